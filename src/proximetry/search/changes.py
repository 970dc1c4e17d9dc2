"""Changes of a gallery in a folder: each writes files, and returns the manifest to commit.

All of them require the lock of the folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.search import indexes, metadata
from proximetry.search.manifest import Manifest, ignore
from proximetry.search.new_images import NewImages
from proximetry.search.segment import BLOCK, check_segment, write_deleted, write_segment
from proximetry.search.snapshot import Snapshot

MAX_MERGED_ROWS = 65_536  # of small segments: written in a second


def remove_rows(snapshot: Snapshot, positions: IntArray) -> Manifest:
    """Mark rows as removed."""
    deleted = np.union1d(snapshot.deleted, snapshot.ids(positions))
    return replace(snapshot.manifest, deleted=write_deleted(snapshot.folder, deleted))


def add_rows(snapshot: Snapshot, new_images: NewImages) -> Manifest:
    """Write a segment with the next ids; remove the images that it replaces."""
    manifest = snapshot.manifest
    old = snapshot.find_paths(new_images.table)
    old |= snapshot.find_paths(metadata.from_columns({"path": new_images.replaced}))
    if old:
        manifest = remove_rows(snapshot, np.array(sorted(old.values())))
    segment = new_images.write(snapshot.folder, manifest)
    if segment.index:
        new_images.report(indexes.describe(segment.index, segment.rows, segment.recall))
    segments = (*manifest.segments, segment)
    manifest = replace(manifest, next_id=manifest.next_id + segment.rows, segments=segments)
    return _merge_small_segments(snapshot.folder, manifest)


def merge_segments(snapshot: Snapshot, first: int, index: str, progress: Progress) -> Manifest:
    """Write the segments from `first` as one, without removed rows."""
    manifest, start = snapshot.manifest, int(snapshot.starts[first])
    for info in manifest.segments[first:]:  # damaged files must not get a new checksum
        check_segment(snapshot.folder, info)
    positions = snapshot.allowed_positions(snapshot.alive)
    positions = positions[positions >= start]
    segments = manifest.segments[:first]
    if len(positions):
        merged = write_segment(
            snapshot.folder,
            manifest,
            snapshot.table.take(metadata.arrow().array(positions)),
            snapshot.ids(positions),
            (snapshot.vectors(positions[part]) for part in chunks(len(positions), BLOCK)),
            indexes.resolve(index, len(positions)),
            progress,
        )
        segments = (*segments, merged)
    deleted = np.intersect1d(snapshot.deleted, snapshot.ids(np.arange(start)))
    return replace(manifest, segments=segments, deleted=write_deleted(snapshot.folder, deleted))


def _merge_small_segments(folder: Path, manifest: Manifest) -> Manifest:
    """Merge small segments at the end, each with one that is not much larger.

    A row is rewritten only when its segment doubles, which is rare.
    """
    while len(manifest.segments) > 1:
        first, second = manifest.segments[-2:]
        large = first.rows + second.rows > MAX_MERGED_ROWS
        if first.index or second.index or first.rows > 2 * second.rows or large:
            break
        last = len(manifest.segments) - 2
        manifest = merge_segments(Snapshot(folder, manifest), last, indexes.EXACT, ignore)
    return manifest
