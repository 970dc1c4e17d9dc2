"""`merge_snapshots`: write the images of several galleries of one embedder as a new gallery."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proximetry._util.errors import UsageError
from proximetry._util.formatting import pluralize
from proximetry._util.tensors import chunks
from proximetry._util.types import Progress
from proximetry.search import indexes, metadata
from proximetry.search.exact import FloatArray
from proximetry.search.manifest import EMBEDDER, Manifest, Report, commit_first, lock_new_folder
from proximetry.search.segment import BLOCK, write_segment
from proximetry.search.snapshot import Snapshot


def merge_snapshots(
    snapshots: Sequence[Snapshot],
    out: str | os.PathLike[str],
    index: str | None,
    progress: Progress,
    report: Report,
) -> None:
    """Merge galleries; see `Gallery.merge`."""
    if not snapshots:
        raise UsageError("no galleries. Pass at least one.")
    first = snapshots[0].manifest
    for snapshot in snapshots:
        if snapshot.manifest.embedder != first.embedder:
            raise UsageError(
                f"{snapshot.folder} and {snapshots[0].folder} have different embedders. Index the "
                "images again with one of them."
            )
    alive = [snapshot.allowed_positions(snapshot.alive) for snapshot in snapshots]
    table = metadata.concat(
        [
            snapshot.table.take(metadata.arrow().array(positions))
            for snapshot, positions in zip(snapshots, alive, strict=True)
        ]
    )
    total, keep = len(table), _first_rows(table["path"])
    if not len(keep):
        raise UsageError("no images in the galleries")
    table = table.take(metadata.arrow().array(keep))
    owners = np.repeat(np.arange(len(alive)), [*map(len, alive)])[keep]
    positions = np.concatenate(alive)[keep]

    def blocks() -> Iterator[FloatArray]:
        for number, snapshot in enumerate(snapshots):
            own = positions[owners == number]
            for part in chunks(len(own), BLOCK):
                yield snapshot.vectors(own[part])

    folder, kinds = Path(out), {snapshot.manifest.index for snapshot in snapshots}
    index = index or (kinds.pop() if len(kinds) == 1 else "auto")
    indexes.check(index, first.dim, len(keep))
    with lock_new_folder(folder, report):
        shutil.copytree(snapshots[0].folder / EMBEDDER, folder / EMBEDDER, dirs_exist_ok=True)
        manifest = Manifest(first.embedder, first.similarity, first.dim, index)
        kind = indexes.resolve(index, len(keep))
        ids = np.arange(len(keep))
        segment = write_segment(folder, manifest, table, ids, blocks(), kind, progress)
        report(indexes.describe(segment.index, segment.rows, segment.recall))
        if len(keep) < total:
            report(f"{pluralize(total - len(keep), 'image')} in several galleries, kept once")
        commit_first(folder, manifest, segment)


def _first_rows(paths: Any) -> Any:
    """Return the first row of every path, in ascending order."""
    _, first = np.unique(np.array(paths.to_pylist(), np.object_), return_index=True)
    return np.sort(first)
