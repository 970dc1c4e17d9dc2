"""Synchronization with folders: changed, moved and missing files; paths that are remapped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from proximetry import index
from proximetry._util.errors import UsageError
from proximetry.search import Gallery, new_images
from tests.interrupt import completes, kill_at
from tests.search.conftest import make_embedder


@pytest.fixture
def home(images, tmp_path, monkeypatch):
    """A working folder with images, and a gallery of them."""
    shutil.copytree(images, tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    make_embedder().save(tmp_path / "model")
    index("images", "gallery", make_embedder(), report=lambda line: None)
    return tmp_path


def contents(folder="gallery"):
    gallery = Gallery.open(folder)
    gallery.verify()
    ids = gallery.ids()
    known = gallery.rows(ids)
    rows = zip(known["label"], gallery.vectors(ids), strict=True)
    return {Path(path).name: row for path, row in zip(known["path"], rows, strict=True)}, known


def change_files(home):
    """Change, touch, move (to another class), add and delete files."""
    folder = home / "images"
    shutil.copy(folder / "class02/0.png", folder / "class03/1.png")
    os.utime(folder / "class04/0.png", (1, 1))
    (folder / "class00/0.png").rename(folder / "class01/moved.png")
    shutil.copy(folder / "class05/2.png", folder / "class05/new.png")
    (folder / "class06/1.png").unlink()


def test_sync_updates_the_gallery_in_one_version(home, monkeypatch):
    gallery = Gallery.open("gallery")
    before, moved = gallery.ids(), gallery.vectors([0])[0]
    change_files(home)
    encoded, encode = [], type(gallery.embedder).encode
    monkeypatch.setattr(
        type(gallery.embedder),
        "encode",
        lambda self, files, *rest, **options: (
            encoded.extend(files) or encode(self, files, *rest, **options)
        ),
    )
    changes = gallery.sync("images")
    assert changes == (1, 1, 1, 1)
    assert {Path(file).name for file in encoded} == {"1.png", "new.png"}
    assert len(gallery.versions()) == 2
    known, rows = contents()
    expected = sorted(map(str, (home / "images").rglob("*.png")))
    assert sorted(rows["path"]) == expected
    assert len(gallery) == len(before)
    label, vector = known["moved.png"]
    assert label == "class01"
    np.testing.assert_allclose(vector, moved, atol=1e-6)
    assert gallery.search("images/class03/1.png", 1).similarities[0, 0] > 0.9999
    assert gallery.check_files("images") == ([], [])
    assert gallery.sync("images") == (0, 0, 0, 0)
    assert len(gallery.versions()) == 2
    assert gallery.sync(["images/class01", "images/class02/0.png"]) == (0, 0, 0, 0)
    monkeypatch.setenv("HOME", str(home))
    Path("images/class01/moved.png").unlink()
    index("~/images", "gallery", sync=True, report=lambda line: None)
    assert len(Gallery.open("gallery")) == len(before) - 1


def test_sync_keeps_metadata_that_is_not_listed(home):
    files = sorted(map(str, (home / "images/class00").iterdir()))
    gallery = Gallery.build(make_embedder(), files, "g", labels=["jay"] * len(files))
    other = home / "images/class00/other.png"
    Path(files[0]).rename(other)
    shutil.copy("images/class02/0.png", files[1])
    assert gallery.sync("images/class00") == (0, 1, 1, 0)
    assert gallery.count_labels() == {"jay": len(files)}
    assert gallery.contains([other, files[0]]) == [True, False]


def test_sync_skips_unreadable_files_and_keeps_their_old_rows(home):
    Path("images/class00/0.png").write_bytes(b"no image")
    Path("images/class00/bad.png").write_bytes(b"no image")
    gallery = Gallery.open("gallery")
    with pytest.raises(ValueError, match="png"):
        gallery.sync("images")
    count = len(gallery)
    assert gallery.sync("images", bad_images="skip") == (0, 0, 0, 0)
    assert len(gallery.skipped) == 2
    assert len(gallery) == count


def test_sync_embeds_the_images_of_a_changed_shard_again(home):
    def pack(*files):
        with tarfile.open("shards/0.tar", "w") as shard:
            for number, file in enumerate(files):
                shard.add(file, f"jay/{number}.png")
        return os.stat("shards/0.tar").st_size

    Path("shards").mkdir()
    size = pack("images/class00/0.png", "images/class01/0.png")
    gallery = index("shards/0.tar", "g", make_embedder(), report=lambda line: None)
    before = gallery.vectors([0, 1])
    assert pack("images/class01/0.png", "images/class00/0.png") == size
    assert gallery.sync("shards/0.tar") == (0, 2, 0, 0)
    np.testing.assert_allclose(gallery.vectors(gallery.ids()), before[::-1], atol=1e-6)


def test_index_sync_command(home, call):
    change_files(home)
    text = call("index", "images")
    assert "2 missing and 2 changed files" in text
    assert "--sync" in text
    Path("images/class02/later.png").write_bytes(Path("images/class02/1.png").read_bytes())
    document = json.loads(call("index", "images", "--sync", "--json"))
    counts = {name: document[name] for name in ("added", "changed", "moved", "removed", "missing")}
    assert counts == {"added": 1, "changed": 1, "moved": 0, "removed": 2, "missing": 0}
    assert "0 added, 0 changed, 0 moved, 0 removed" in call("index", "images", "--sync")
    for path in (home / "images").rglob("*.png"):
        path.unlink()
    assert "no images in" in call("index", "images", "--sync", code=2)  # such as an unmounted disk
    assert len(Gallery.open("gallery")) == document["images"]


def test_killed_sync_leaves_the_old_or_the_new_version(home, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(new_images, "CHUNK", 1)
    shutil.copytree("gallery", "start")
    before = sorted(contents()[1]["path"])
    change_files(home)
    after = sorted(map(str, (home / "images").rglob("*.png")))
    Gallery.open("start").embedder  # noqa: B018 - imported before processes are forked
    outcomes, moment, ended = set(), 1, False
    while not ended:
        folder = shutil.copytree("start", f"moment-{moment}")

        def change(folder=folder, moment=moment):
            kill_at(moment, Path(folder))
            Gallery.open(folder).sync("images")

        ended = completes(change)
        paths = sorted(contents(folder)[1]["path"])
        assert paths in (before, after)
        outcomes.add(paths == after)
        if moment % 10 == 1 or ended:
            Gallery.open(folder).sync("images")
            assert sorted(contents(folder)[1]["path"]) == after
        moment += 1
    assert outcomes == {False, True}
    assert moment > 10


def test_remapped_paths_serve_searches_and_sync(home, call):
    Path("elsewhere").mkdir()
    (home / "images").rename("elsewhere/birds")
    query = home / "elsewhere/birds/class00/0.png"
    ids = Gallery.open("gallery").ids()
    assert str(home / "images") in call("search", query, "-k", 1, "--json")
    text = call("index", "elsewhere/birds", "--root", "elsewhere/birds")
    assert "48 paths are now below elsewhere/birds" in text
    assert " 0 new" in text
    gallery = Gallery.open("gallery")
    gallery.verify()
    assert gallery.ids().tolist() == ids.tolist()
    assert gallery.search(query, 1).paths[0, 0] == str(query)
    assert gallery.check_files("elsewhere") == ([], [])
    assert gallery.sync("elsewhere/birds") == (0, 0, 0, 0)
    assert gallery.remap_paths("/data", home / "elsewhere/birds/class00") > 0
    assert gallery.rows([0])["path"] == ["/data/0.png"]
    assert gallery.rows([20])["path"][0].startswith(str(home))
    assert "no image of the gallery is below" in call("index", "--root", "/a=/b", code=2)
    with pytest.raises(UsageError, match="same names"):
        gallery.remap_paths(home / "elsewhere/birds/class01", home / "elsewhere/birds/class02")


def test_watch_ends_on_invalid_options(home, call):
    np.savez("v.npz", vectors=np.eye(3))
    assert "--watch needs images" in call("index", "v.npz", "--watch", code=2)
    words = ["--gallery", "new", "--model", "model", "--interval", "0.1", "--index", "Flaat"]
    assert "unknown index 'Flaat'" in call("index", "images", "--watch", *words, code=2)


def test_watch_indexes_a_growing_folder(home):
    """A file that is still being written is left for later; Ctrl-C stops cleanly."""
    command = [sys.executable, "-m", "proximetry", "index", "drop", "--model", "model"]
    command += ["--gallery", "g", "--watch", "--interval", "0.3", "--sync"]
    Path("drop").mkdir()
    pngs = sorted((home / "images").rglob("*.png"))
    shutil.copy(pngs[0], "drop/a.png")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(120, process.kill)
    limit.start()

    def wait_for(token):
        lines = []
        while not lines or token not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], lines

    try:
        wait_for("g: 1 image: 1 added")
        content = pngs[1].read_bytes()
        with open("drop/b.png", "wb") as stream:
            for byte in range(6):  # slower than the interval
                stream.write(content[20 * byte : 20 * byte + 20])
                stream.flush()
                time.sleep(0.2)
            stream.write(content[120:])
        wait_for("g: 2 images: 1 added")
        Path("drop/a.png").rename("drop/c.png")
        wait_for("1 moved")
        Path("drop/bad.png").write_bytes(b"no image")
        wait_for("skipped")
        Path("drop/c.png").unlink()
        wait_for("g: 1 image: 0 added, 0 changed, 0 moved, 1 removed")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
        assert "stopped" in output
        assert process.returncode == 0
    finally:
        limit.cancel()
        process.kill()
    assert Gallery.open("g").rows(Gallery.open("g").ids())["path"] == [str(home / "drop/b.png")]
