"""What a catalogue must satisfy; every complaint names row, column and value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from proximetry.data.catalog import Catalog

SPLITS = ("all", "train", "val", "test")
Box: TypeAlias = tuple[float, float, float, float]


def check(catalog: Catalog, columns: tuple[str, ...]) -> None:
    """Raise one error that lists the first offending rows, columns and values."""
    size = len(catalog.paths)
    for name in columns:
        values = getattr(catalog, name)
        if values is not None and len(values) != size:
            raise ValueError(f"{name} has {len(values)} entries, paths has {size}")
    if (catalog.queries is None) != (catalog.galleries is None):
        raise ValueError("query and gallery come together: give both columns or neither")
    problems = list(_problems(catalog))
    if problems:
        listed = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{listed}{more}")


def _problems(catalog: Catalog) -> Iterator[str]:
    for column, values in (
        ("path", catalog.paths),
        ("label", catalog.labels),
        ("group", catalog.groups),
    ):
        for i, value in enumerate(values or ()):
            if not isinstance(value, str) or (not value and column != "group") or "\0" in value:
                yield f"row {i + 1}, column {column}: {value!r} is not a usable text"
    for i, split in enumerate(catalog.splits):
        if split not in SPLITS:
            yield f"row {i + 1}, column split: {split!r} is none of {', '.join(SPLITS)}"
    for column, flags in (("query", catalog.queries), ("gallery", catalog.galleries)):
        for i, flag in enumerate(flags or ()):
            if not isinstance(flag, bool):
                yield f"row {i + 1}, column {column}: {flag!r} is neither true nor false"
    for i, box in enumerate(catalog.boxes or ()):
        if box is not None and not _good_box(box):
            yield f"row {i + 1}, column box: {box!r} is not x, y ≥ 0 and width, height > 0"
    yield from _duplicates(catalog)


def _good_box(box: Box) -> bool:
    try:
        x, y, w, h = box
        return all(map(math.isfinite, box)) and x >= 0 and y >= 0 and w > 0 and h > 0
    except (TypeError, ValueError):
        return False


def _duplicates(catalog: Catalog) -> Iterator[str]:
    # The same picture twice would be its own nearest neighbour. Two boxes of one are fine.
    keys = list(zip(catalog.paths, catalog.boxes or (None,) * len(catalog), strict=True))
    if len(set(keys)) == len(keys):
        return
    counts = Counter(keys)
    for i, key in enumerate(keys):
        if counts[key] > 1:
            yield f"row {i + 1}, column path: {key[0]!r} is listed {counts[key]} times"
