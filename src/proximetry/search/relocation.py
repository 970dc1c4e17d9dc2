"""`remap_paths`: replace the start of a gallery's paths after its images were moved."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from proximetry._util.errors import UsageError
from proximetry.search import metadata
from proximetry.search.manifest import Manifest
from proximetry.search.segment import check_segment, copy_segment
from proximetry.search.snapshot import Snapshot


def remap_paths(snapshot: Snapshot, old: str | None, new: str) -> tuple[Manifest, int]:
    """Write segments with new paths; return the manifest and the number of images.

    The other files of a segment are linked, not copied.
    """
    pa, compute = metadata.arrow(), metadata.arrow("pyarrow.compute")
    paths = snapshot.table["path"].filter(pa.array(snapshot.alive))
    if not len(paths):
        raise UsageError(f"{snapshot.folder} is empty")
    common = _common_folder(compute.min_max(paths).as_py())
    old = common if old is None else os.path.abspath(old)
    prefix, target = (metadata.encode(os.path.join(root, "")) for root in (old, new))

    def move(column: Any) -> Any:
        moved = compute.binary_replace_slice(column, 0, len(prefix), target)
        return compute.if_else(compute.starts_with(column, prefix), moved, column)

    count = compute.sum(compute.starts_with(paths, prefix)).as_py()
    if not count:
        raise UsageError(f"no image of the gallery is below {old}. All are below {common}.")
    if compute.count_distinct(move(paths)).as_py() < len(paths):
        raise UsageError(f"{new} already has images of the gallery with the same names")
    segments = []
    for info, segment in zip(snapshot.manifest.segments, snapshot.segments, strict=True):
        check_segment(snapshot.folder, info)
        number = segment.table.column_names.index("path")
        table = segment.table.set_column(number, "path", move(segment.table["path"]))
        segments.append(copy_segment(snapshot.folder, info, table))
    return replace(snapshot.manifest, segments=tuple(segments)), count


def _common_folder(ends: dict[str, bytes]) -> str:
    """Return the folder of all paths, from the first and the last in order."""
    return os.fsdecode(os.path.commonpath([os.path.dirname(path) for path in ends.values()]))
