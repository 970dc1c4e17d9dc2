"""Changes of a gallery, each in a forked process that is killed at every file operation.

    python -m tests.search.killed FOLDER

Kill points are those of `tests.interrupt.kill_at`. Everything is imported once.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from proximetry.metrics import retrieve
from proximetry.search import Gallery, changes, manifest, new_images
from tests.interrupt import completes, kill_at
from tests.search.conftest import make_embedder, make_table, make_vectors
from tests.training.tiny import make_images

BEFORE, AFTER = make_vectors(60), make_vectors(30, seed=1)
EMBEDDER = make_embedder()


def build(folder):
    Gallery.build(EMBEDDER, make_table(0, 60), folder, vectors=BEFORE)


def add(folder):
    Gallery.open(folder).add(make_table(60, 30), vectors=AFTER)


def remove(folder):
    Gallery.open(folder).remove(range(10, 40))


def update(folder):
    Gallery.open(folder).add(make_table(50, 30), vectors=AFTER, replace=True)


def compact(folder):
    Gallery.open(folder).compact()


def state(folder):
    """Return the content of a gallery, after comparing a search with `retrieve`."""
    gallery = Gallery.open(folder)
    gallery.verify()
    ids = gallery.ids()
    vectors = gallery.vectors(ids)
    expected = retrieve(vectors, queries=AFTER[:3], k=5)
    assert np.array_equal(gallery.search(AFTER[:3], 5).ids, ids[expected.ids])
    known = gallery.rows(ids)
    return ids.tolist(), known["path"], vectors.tobytes()


def kill_everywhere(home, start, change, check):
    """Kill a change at every operation and check the result; return the number of operations."""
    moments, ended = 0, False
    while not ended:
        moments += 1
        folder = home / f"moment-{moments}"
        if start.exists():
            shutil.copytree(start, folder)
        ended = completes(lambda: (kill_at(moments, folder), change(folder)))  # noqa: B023
        check(folder)
        shutil.rmtree(folder)
    return moments


def interrupt(change, before, home):
    """Kill a change at every operation; the state is as before or after, and the change resumes."""
    home.mkdir()
    start, after = home / "start", home / "after"
    if before:
        build(start)
        for step in before:
            step(start)
        shutil.copytree(start, after)
    change(after)
    states = [state(after), state(start) if before else None]

    def check(folder):
        there = (folder / "gallery.json").exists()
        result = state(folder) if there else None
        assert result in states, "neither before nor after"
        if result != states[0]:
            change(folder)
            assert state(folder) == states[0]
        # The next change removes the files of the killed process.
        Gallery.open(folder).remove([])
        named = {info.name for info in Gallery.open(folder)._snapshot.manifest.segments}
        assert {path.name for path in (folder / "segments").iterdir()} == named
        assert not list(folder.glob(".*"))

    return kill_everywhere(home, start, change, check)


def update_images(home):
    """Kill an update of images at every operation; all vectors match the old or the new images.

    One more image changes before the update is repeated, so that batches differ; the last bits of a
    vector depend on its batch.
    """
    files, others = (
        sorted(make_images(home / str(seed), 3, 2, seed=seed).rglob("*.png")) for seed in (0, 1)
    )
    Gallery.build(EMBEDDER, files, home / "start", batch_size=2)
    old = EMBEDDER.encode(files).numpy()
    for file, other in zip(files, others, strict=True):
        shutil.copy(other, file)
    new = EMBEDDER.encode(files).numpy()

    def vectors(folder):
        opened = Gallery.open(folder)
        opened.verify()
        ids = opened.ids()
        known = dict(zip(opened.rows(ids)["path"], opened.vectors(ids), strict=True))
        return np.stack([known[str(file)] for file in files])

    def change(folder):
        Gallery.open(folder).add(files, batch_size=2, replace=True)

    def check(folder):
        result = vectors(folder)
        assert any(np.allclose(result, expected, atol=1e-6) for expected in (old, new))
        files[1].touch()
        change(folder)
        np.testing.assert_allclose(vectors(folder), new, atol=1e-6)
        assert not (folder / "staging").exists()

    return kill_everywhere(home, home / "start", change, check)


def kill_at_random(home, times):
    """Kill a process that changes a gallery in a loop; every change is complete or absent."""
    home.mkdir()
    folder = home / "gallery"
    build(folder)
    draw = random.Random(0)
    changes = 0
    for turn in range(times):
        child = os.fork()
        if child == 0:
            torch.manual_seed(turn)
            opened = Gallery.open(folder)
            while True:
                first = int(time.monotonic_ns())
                ids = opened.add(make_table(first, 20), vectors=make_vectors(20, seed=2))
                opened.remove(ids[::2])
                opened.compact()
        time.sleep(draw.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        gallery = Gallery.open(folder)
        gallery.verify()
        more = len(gallery) - 60
        assert more % 10 == 0, f"half a change: {more}"
        changes += more // 10
        ids = gallery.ids()
        assert len(gallery.rows(ids)["path"]) == len(gallery)
        gallery.remove(ids[60:])
    return changes


def write_concurrently(home, writers, times):
    """Add and remove in several processes; nothing is lost."""
    home.mkdir()
    folder = home / "gallery"
    build(folder)
    children = []
    for writer in range(writers):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                opened = Gallery.open(folder)
                for turn in range(times):
                    first = 1000 * (writer + 1) + 10 * turn
                    vectors = make_vectors(10, seed=first)
                    ids = opened.add(make_table(first, 10), vectors=vectors)
                    assert opened.search(vectors, 1).ids.ravel().tolist() == ids.tolist()
                    opened.remove(ids[5:])
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * writers
    gallery = Gallery.open(folder)
    gallery.verify()
    firsts = [1000 * (w + 1) + 10 * turn for w in range(writers) for turn in range(times)]
    expected = [first + i for first in firsts for i in range(5)]
    paths = {os.path.basename(path) for path in gallery.rows(gallery.ids())["path"]}
    assert paths == {f"{number:05d}.png" for number in (*range(60), *expected)}
    return len(gallery)


def resume_build(home):
    """Kill a build while it embeds, and repeat it with one changed and two new images."""
    pngs = sorted(make_images(home / "images").rglob("*.png"))
    files, more = [str(path) for path in pngs[:20]], [str(path) for path in pngs[20:22]]

    def killed():
        left = [15]

        def watch(event, arguments):
            if event == "open" and str(arguments[0]).endswith(".png"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        Gallery.build(EMBEDDER, files, home / "g", batch_size=2)

    assert not completes(killed)
    with pytest.raises(ValueError, match="not finished"):
        Gallery.open(home / "g")
    Path(files[1]).touch()
    read, encode = [], type(EMBEDDER).encode

    def count(self, images, *rest, **options):
        read.extend(images)
        return encode(self, images, *rest, **options)

    type(EMBEDDER).encode = count
    built = Gallery.build(EMBEDDER, [more[0], *files, more[1]], home / "g")
    type(EMBEDDER).encode = encode
    assert {files[1], *more} <= set(read)
    assert built.search(files[:8], 1).paths.ravel().tolist() == files[:8]
    assert not (home / "g" / "staging").exists()
    return 22 - len(read)


def main(home):
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # slow, and matters for power failures only
    changes.MAX_MERGED_ROWS = 1000
    manifest.GRACE = 0  # so that the next change removes replaced segments
    new_images.CHUNK = 4
    resumed = resume_build(home / "resumed")
    new_images.CHUNK = 2
    results = {
        "resumed": resumed,
        "build": interrupt(build, [], home / "build"),
        "add": interrupt(add, [remove], home / "add"),
        "remove": interrupt(remove, [add], home / "remove"),
        "update": interrupt(update, [remove], home / "update"),
        "update_images": update_images(home / "update_images"),
        "compact": interrupt(compact, [add, remove], home / "compact"),
        "random": kill_at_random(home / "random", 8),
        "concurrent": write_concurrently(home / "concurrent", 2, 8),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
