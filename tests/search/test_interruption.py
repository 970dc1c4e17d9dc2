"""Processes that are killed, at every moment and at random ones; several that write at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proximetry.search import Gallery, staging
from tests.search.conftest import make_embedder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_killed_change_has_happened_or_has_not(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.search.killed", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for change in ("build", "add", "remove", "update", "compact"):
        assert told[change] > 5, "too few moments to show anything"
    assert told["random"] > 0
    assert told["together"] == 60 + 2 * 8 * 5


RESUMED = """
import os, signal, sys
from proximetry.search import Gallery, staging
from tests.search.conftest import make_embedder

staging.CHUNK = 4
left = [int(sys.argv[2])]

def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".png"):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
files = sys.stdin.read().split("\\n")
Gallery.build(make_embedder(), files, sys.argv[1], batch_size=2)
"""


@pytest.mark.slow
def test_a_build_goes_on_where_it_was_cut_off(images, tmp_path, monkeypatch):
    files = [str(path) for path in sorted(images.rglob("*.png"))[:20]]
    done = subprocess.run(
        [sys.executable, "-c", RESUMED, tmp_path / "g", "15"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input="\n".join(files),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    with pytest.raises(ValueError, match="it was not finished"):
        Gallery.open(tmp_path / "g")
    monkeypatch.setattr(staging, "CHUNK", 4)
    embedder, read = make_embedder(), []
    encode = embedder.encode
    monkeypatch.setattr(
        embedder,
        "encode",
        lambda images, *rest, **more: (read.extend(images), encode(images, *rest, **more))[1],
    )
    # One that has changed since is embedded again, wherever new ones stand in the list.
    Path(files[1]).touch()
    more = [str(path) for path in sorted(images.rglob("*.png"))[20:22]]
    found = Gallery.build(embedder, [more[0], *files, more[1]], tmp_path / "g")
    kept = 20 + 2 - len(read)
    assert kept in (7, 11)  # whole chunks before the kill, less the one that has changed
    assert {files[1], *more} <= set(read)
    assert found.search(files[:8], 1).paths.ravel().tolist() == files[:8]
    assert not (tmp_path / "g" / "staging").exists()


def test_damaged_leftovers_are_embedded_again(images, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK", 4)
    files = [str(path) for path in sorted(images.rglob("*.png"))[:12]]
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"bad\.png"):
        Gallery.build(make_embedder(), [*files, tmp_path / "bad.png"], tmp_path / "g")
    left = sorted((tmp_path / "g" / "staging").rglob("*.npy"))
    assert len(left) == 3
    left[0].write_bytes(b"")
    found = Gallery.build(make_embedder(), files, tmp_path / "g")
    assert found.search(files, 1).paths.ravel().tolist() == files
