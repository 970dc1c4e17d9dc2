"""`sync_images`: update a gallery to the files of folders, in one atomic change.

Files are compared by size and modification time. A digest of the content finds moved files, and
those of which only the time has changed; both keep their vectors.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from proximetry._util.tensors import chunks
from proximetry._util.types import Progress
from proximetry.search import metadata
from proximetry.search.manifest import Report
from proximetry.search.new_images import CHUNK, BadImages, NewImages, digest_of, stamp_of
from proximetry.search.snapshot import Snapshot, StoredFile

if TYPE_CHECKING:
    from proximetry.search.gallery import Gallery


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


def sync_images(
    gallery: Gallery,
    table: Any,
    folders: Iterable[str | os.PathLike[str]],
    *,
    bad_images: BadImages = "error",
    batch_size: int = 64,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Changes:
    """Update a gallery to the images of a table; see `Gallery.sync`.

    Only images below the folders are removed.
    """
    gallery._check_local("sync")
    snapshot = Snapshot.open(gallery.path)
    gallery._check_not_rebuilt(snapshot)
    files, missing, moved = _compare(snapshot, table, folders)
    fingerprint = snapshot.manifest.embedder
    counts, new_images = Counter[str](), None
    gallery.skipped = []
    if files:
        sources = np.array([file.source for file in files], np.int64)
        listed = table.take(metadata.arrow().array([file.row for file in files]))
        if (sources >= 0).any():
            stored = snapshot.take(sources, snapshot.columns)
            listed = metadata.fill_missing(listed, stored)
        new_images = NewImages(
            listed, gallery.dim, None, None, bad_images, batch_size, progress, report
        )
        same = np.flatnonzero([file.same_content for file in files])
        for part in chunks(len(same), CHUNK):
            vectors = snapshot.vectors(sources[same[part]])
            new_images.stage(same[part], vectors, fingerprint, gallery.path)
        kinds = dict(zip(listed["path"].to_pylist(), [file.kind for file in files], strict=True))
        new_images.embed(gallery.embedder, fingerprint, gallery.path)
        gallery.skipped = new_images.skipped
        counts.update(kinds[path] for path in new_images.table["path"].to_pylist())
    if new_images and counts:
        new_images.replaced = sorted(missing | moved)
        gallery._write(new_images, replace=True)
    elif missing:
        paths = metadata.from_columns({"path": sorted(missing)})
        gallery.remove(snapshot.ids(np.array([*snapshot.find_paths(paths).values()])))
    return Changes(counts["added"], counts["changed"], counts["moved"], len(missing))


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
