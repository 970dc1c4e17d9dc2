"""Interrupted changes: processes killed at every moment, staged vectors, concurrent writers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proximetry.search import Gallery, new_images
from tests.search.conftest import make_embedder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_changes_are_atomic_and_resume(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.search.killed", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["resumed"] in (7, 11)  # whole chunks before the kill, less the changed image
    for change in ("build", "add", "remove", "update", "update_images", "compact"):
        assert results[change] > 5, "too few kill points"
    assert results["random"] > 0
    assert results["concurrent"] == 60 + 2 * 8 * 5


@pytest.fixture
def interrupted(images, tmp_path, monkeypatch):
    """A build of twelve images in three chunks that stopped at a thirteenth one."""
    monkeypatch.setattr(new_images, "CHUNK", 4)
    folder = shutil.copytree(images, tmp_path / "images")
    files = [str(path) for path in sorted(folder.rglob("*.png"))[:12]]
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bad\.png"):
        Gallery.build(make_embedder(), [*files, tmp_path / "bad.png"], tmp_path / "g")
    left = sorted((tmp_path / "g" / "staging").rglob("*.arrow"))
    assert len(left) == 3
    return tmp_path / "g", files, left


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, lambda file: file.write_bytes(b"")])
def test_damaged_staged_vectors_are_embedded_again(interrupted, damage):
    folder, files, left = interrupted
    damage(left[0])
    gallery = Gallery.build(make_embedder(), files, folder)
    expected = make_embedder().encode(files).numpy()
    np.testing.assert_allclose(gallery.vectors(gallery.ids()), expected, atol=1e-6)
    assert not (folder / "staging").exists()


def test_image_replaced_with_equal_size_and_mtime_is_embedded_again(tmp_path, monkeypatch):
    monkeypatch.setattr(new_images, "CHUNK", 2)
    draw = np.random.default_rng(0)

    def save(file):
        Image.fromarray(draw.integers(0, 256, (24, 24, 3), np.uint8)).save(file)

    files = [tmp_path / f"{number}.bmp" for number in range(4)]
    for file in files:
        save(file)
    with pytest.raises(ValueError, match="no such file"):
        Gallery.build(make_embedder(), [*files, tmp_path / "none.bmp"], tmp_path / "g")
    before = files[0].stat()
    save(files[0])
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files[0].stat().st_size == before.st_size
    gallery = Gallery.build(make_embedder(), files, tmp_path / "g")
    expected = make_embedder().encode(files).numpy()
    np.testing.assert_allclose(gallery.vectors(gallery.ids()), expected, atol=1e-6)


def test_staged_vectors_are_swept_after_the_grace_period(gallery, images, monkeypatch):
    monkeypatch.setattr(new_images, "CHUNK", 4)
    files = [str(path) for path in sorted(images.rglob("*.png"))[:8]]
    with pytest.raises(ValueError, match="no such file"):
        gallery.add([*files, "/nowhere.png"])
    left = [*(gallery.path / "staging").rglob("*.arrow")]
    assert len(left) == 2
    gallery.remove([0])
    assert all(file.exists() for file in left)
    for file in left:
        os.utime(file, (0, 0))
    gallery.remove([1])
    assert not (gallery.path / "staging").exists()
