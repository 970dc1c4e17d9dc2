"""Versions, rollback, closed galleries and merged galleries."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from proximetry._util.errors import UsageError
from proximetry.search import Gallery, manifest
from tests.interrupt import completes, kill_at
from tests.search.conftest import make_embedder, make_table, make_vectors, names


def paths(gallery):
    return gallery.rows(gallery.ids())["path"]


def files_of(gallery):
    return {path.relative_to(gallery.path) for path in gallery.path.rglob("*") if path.is_file()}


def test_rollback_restores_contents_and_can_be_undone(gallery):
    before = paths(gallery)
    gallery.remove(range(20))
    gallery.compact()
    gallery.remove([30])
    gallery.add(make_table(60, 5), vectors=make_vectors(5, seed=3))
    changed = paths(gallery)
    assert [one.images for one in gallery.versions()] == [60, 40, 40, 39, 44]
    assert [one.number for one in gallery.versions()] == [1, 2, 3, 4, 5]
    identifiers = {gallery.version}
    for number, expected in ((1, before), (None, changed), (2, before[20:]), (5, changed)):
        gallery.rollback(number)
        gallery.verify()
        assert paths(gallery) == paths(Gallery.open(gallery.path)) == expected
        identifiers.add(gallery.version)
    assert len(identifiers) == 5
    gallery.rollback(1)
    assert gallery.add(make_table(90, 1), vectors=make_vectors(1)).tolist() == [65]
    with pytest.raises(UsageError, match="no version 99"):
        gallery.rollback(99)


def test_other_hosts_read_replaced_versions(gallery):
    """A manifest that was read before changes can be opened after them."""
    old = manifest.read_manifest(gallery.path)
    gallery.remove(range(20))
    deleted = manifest.read_manifest(gallery.path)
    gallery.compact()
    gallery.add(make_table(60, 5), vectors=make_vectors(5, seed=3))
    from proximetry.search.snapshot import Snapshot

    assert [len(Snapshot(gallery.path, one)) for one in (old, deleted)] == [60, 40]


def test_versions_and_their_files_are_removed_after_the_grace_period(gallery, monkeypatch):
    gallery.remove([1])
    gallery.compact()
    clock = manifest.time.time
    monkeypatch.setattr(manifest.time, "time", lambda: clock() + manifest.GRACE + 1)
    gallery.remove([2])
    gallery.remove([3])
    assert [one.images for one in gallery.versions()] == [59, 58, 57]
    gallery.prune()
    assert [one.number for one in gallery.versions()] == [5]
    with pytest.raises(UsageError, match="no earlier version"):
        gallery.rollback()
    current = gallery._snapshot.manifest
    expected = {f"segments/{info.name}" for info in current.segments}
    assert {str(path.parent) for path in files_of(gallery) if path.suffix == ".npy"} == {
        *expected,
        ".",
    }
    assert not list((gallery.path / "versions").iterdir())
    gallery.verify()


def test_killed_rollback_keeps_a_version(gallery, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    gallery.remove(range(20))
    moment, ended, sizes = 1, False, set()
    while not ended:
        folder = tmp_path / str(moment)
        shutil.copytree(gallery.path, folder)
        ended = completes(lambda: (kill_at(moment, folder), Gallery.open(folder).rollback()))  # noqa: B023
        opened = Gallery.open(folder)
        opened.verify()
        sizes.add(len(opened))
        opened.rollback(1)
        assert len(opened) == 60
        moment += 1
    assert sizes == {40, 60}


def test_closed_galleries_raise(gallery):
    with Gallery.open(gallery.path) as opened:
        assert len(opened) == 60
    for use in (
        len,
        repr,
        lambda g: g.search(make_vectors(1)),
        lambda g: g.ids(),
        Gallery.versions,
        Gallery.compact,
    ):
        with pytest.raises(UsageError, match="is closed"):
            use(opened)


@pytest.mark.parametrize("index", [None, "IVF4,Flat"])
def test_merged_galleries_search_like_one(gallery, embedder, tmp_path, index, monkeypatch):
    monkeypatch.setattr("proximetry.search.indexes.MIN_INDEXED_ROWS", 10)
    table = make_table(50, 30).append_column("size", [[*range(30)]])
    other = Gallery.build(embedder, table, tmp_path / "other", vectors=make_vectors(30, seed=5))
    other.remove([29])
    gallery.remove([0])
    lines = []
    (tmp_path / "m" / "segments" / ("0" * 32)).mkdir(parents=True)  # of an interrupted merge
    merged = Gallery.merge(
        [gallery, tmp_path / "other"], tmp_path / "m", index, report=lines.append
    )
    merged.verify()
    assert paths(merged) == names(1, 78)
    assert len([*(tmp_path / "m" / "segments").iterdir()]) == 1
    assert "10 images in several galleries, kept once" in lines
    assert merged.rows([0, 58, 59, 60], ["size"])["size"] == [None, None, 10, 11]
    queries = make_vectors(4, seed=9)
    stored = np.concatenate([make_vectors(60)[1:], make_vectors(30, seed=5)[10:29]])
    scores = queries @ (stored / np.linalg.norm(stored, axis=1, keepdims=True)).T
    expected = np.argsort(-scores, 1)[:, :5]
    assert np.array_equal(merged.search(queries, 5, exact=index is not None).ids, expected)
    assert merged._snapshot.index_kinds == [index or "Flat"]
    assert merged.embedder.fingerprint() == embedder.fingerprint()


def test_merge_rejects_other_embedders(gallery, tmp_path):
    with pytest.raises(UsageError, match="must be a list"):
        Gallery.merge(str(gallery.path), tmp_path / "m")
    other = make_embedder(seed=1)
    Gallery.build(other, make_table(0, 5), tmp_path / "other", vectors=make_vectors(5))
    with pytest.raises(UsageError, match="have different embedders"):
        Gallery.merge([gallery.path, tmp_path / "other"], tmp_path / "m")
    with pytest.raises(UsageError, match="already a gallery"):
        Gallery.merge([gallery], tmp_path / "other")
    with pytest.raises(UsageError, match="no galleries"):
        Gallery.merge([], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_gallery_commands(gallery, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gallery.remove([1, 2])
    lines = call("gallery", "versions").splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert lines[1].endswith("58 images  (current)")
    assert "gallery: 60 images" in call("gallery", "rollback")
    assert json.loads(call("gallery", "rollback", "gallery", 2, "--json"))["images"] == 58
    assert "no version 77" in call("gallery", "rollback", 77, code=2)
    assert "every search is exact" in call("gallery", "compact", "gallery", "--keep", "2h")
    versions = json.loads(call("gallery", "versions", "gallery", "--json"))["versions"]
    assert [one["images"] for one in versions] == [60, 58, 60, 58, 58]
    assert "must be a duration" in call("gallery", "compact", "--keep", "2", code=2)
    assert "recall@5 1.0000, measured on 58 images" in call("gallery", "recall", "-k", 5)
    assert "nprobe has no effect" in call("gallery", "recall", "--nprobe", 5, code=2)
    shutil.copytree("gallery", "second")
    assert "both: 58 images" in call("gallery", "merge", "gallery", "second", "--out", "both")


def test_rollback_in_a_second_process(gallery):
    """A reader keeps its version while another process returns to an earlier one."""
    gallery.remove(range(20))
    reader = Gallery.open(gallery.path)
    command = [sys.executable, "-m", "proximetry", "gallery", "rollback", gallery.path]
    assert b"60 images" in subprocess.run(command, capture_output=True, check=True).stdout
    assert len(reader) == 40
    reader.refresh()
    assert len(reader) == 60
