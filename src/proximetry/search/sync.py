"""`plan_sync`: what to change in a gallery so that it has the files of folders.

Files are compared by size and modification time. A digest of the content finds moved files, and
those of which only the time has changed; both keep their vectors.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.search import metadata
from proximetry.search.manifest import Report
from proximetry.search.new_images import CHUNK, BadImages, NewImages, digest_of, stamp_of
from proximetry.search.snapshot import Snapshot, StoredFile


class Changes(NamedTuple):
    """The number of images that were added, embedded again, moved and removed."""

    added: int = 0
    changed: int = 0
    moved: int = 0
    removed: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._asdict().items())


class _File(NamedTuple):
    """A listed file to write.

    Its metadata is taken from `source`, a position in the gallery, and its vector too if the
    content is the same.
    """

    row: int
    kind: str  # "added", "changed", "moved" or "touched"
    source: int = -1
    same_content: bool = False


class Plan(NamedTuple):
    """The changes of a gallery.

    `new_images` replace the missing and moved ones; without any, `missing` are removed.
    """

    new_images: NewImages | None
    kinds: dict[str, str]  # of the new images, by path
    missing: IntArray  # positions

    def changes(self) -> Changes:
        """Return the number of changed images, after `new_images` were embedded."""
        paths = [] if self.new_images is None else self.new_images.table["path"].to_pylist()
        counts = Counter(self.kinds[path] for path in paths)
        return Changes(counts["added"], counts["changed"], counts["moved"], len(self.missing))


def plan_sync(
    snapshot: Snapshot,
    table: Any,
    folders: Iterable[str | os.PathLike[str]],
    bad_images: BadImages = "error",
    batch_size: int = 64,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Plan:
    """Compare a gallery with the images of a table; stage vectors that are known.

    Only images below the folders are missing. Other arguments are as in `Gallery.sync`.
    """
    files, missing, moved = _compare(snapshot, table, folders)
    paths = metadata.from_columns({"path": sorted(missing)})
    lost = np.array([*snapshot.find_paths(paths).values()], np.int64)
    if not files:
        return Plan(None, {}, lost)
    sources = np.array([file.source for file in files], np.int64)
    listed = table.take(metadata.arrow().array([file.row for file in files]))
    if (sources >= 0).any():
        listed = metadata.fill_missing(listed, snapshot.take(sources, snapshot.columns))
    manifest = snapshot.manifest
    new_images = NewImages(
        listed, manifest.dim, None, None, bad_images, batch_size, progress, report
    )
    new_images.replaced = sorted(missing | moved)
    same = np.flatnonzero([file.same_content for file in files])
    for part in chunks(len(same), CHUNK):
        vectors = snapshot.vectors(sources[same[part]])
        new_images.stage(same[part], vectors, manifest.embedder, snapshot.folder)
    kinds = dict(zip(listed["path"].to_pylist(), [file.kind for file in files], strict=True))
    return Plan(new_images, kinds, lost)


def check_files(snapshot: Snapshot, folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Return missing and changed files; see `Gallery.check_files`."""
    missing: list[str] = []
    changed: list[str] = []
    for file in snapshot.files(snapshot.positions_below(folder)):
        stamp = stamp_of(file.path)
        if stamp is None:
            missing.append(file.path)
        elif file.is_changed(stamp):
            changed.append(file.path)
    return missing, changed


def _compare(
    snapshot: Snapshot, table: Any, folders: Iterable[str | os.PathLike[str]]
) -> tuple[list[_File], set[str], set[str]]:
    """Return the files to write, the paths without a file, and the old paths of moved files."""
    known = np.array([*snapshot.find_paths(table).values()], np.int64)
    inside = [snapshot.positions_below(folder) for folder in folders]
    positions = np.unique(np.concatenate([*inside, known]))
    stored = {file.path: file for file in snapshot.files(positions)}
    paths = metadata.values(table["path"])
    missing = {path for path in stored.keys() - {*paths} if stamp_of(path) is None}
    lost = defaultdict[str, list[StoredFile]](list)
    for path in sorted(missing, reverse=True):
        if digest := stored[path].digest:
            lost[digest].append(stored[path])
    sizes = {file.size for same in lost.values() for file in same}
    files, moved = list[_File](), set[str]()
    for row, path in enumerate(paths):
        old, stamp = stored.get(path), stamp_of(path)
        if old is not None:
            if stamp is not None and old.is_changed(stamp):
                comparable = old.digest is not None and old.size == stamp.size
                same = comparable and old.digest == digest_of(path, stamp)
                files.append(_File(row, "touched" if same else "changed", old.position, same))
        elif stamp and stamp.size in sizes and (origins := lost[digest_of(path, stamp) or ""]):
            origin = origins.pop()
            moved.add(origin.path)
            files.append(_File(row, "moved", origin.position, same_content=True))
        else:
            files.append(_File(row, "added"))
    return files, missing - moved, moved
