"""Unreadable and tiny image files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np

from proximetry.data import Catalog, ImageError
from proximetry.data.images import image_size
from proximetry.data.loader import parallel_map
from proximetry.health.finding import Finding

MIN_SIDE = 16  # pixels
MIN_SHARE = 0.25  # of the median short side


def unreadable_images(errors: Mapping[int, Exception]) -> Iterator[Finding]:
    """Yield the images that could not be read, by their row."""
    for row, error in errors.items():
        reason = error.reason if isinstance(error, ImageError) else str(error)
        yield Finding("unreadable", (row,), reason, 1.0, "drop")


def tiny_images(catalog: Catalog) -> Iterator[Finding]:
    """Yield the images whose short side is tiny, or much smaller than that of the others."""
    files = [catalog.file(row) for row in range(len(catalog))]
    sizes = np.array([*parallel_map(_read_size, files)])
    short = sizes.min(1)
    limit = max(MIN_SIDE, MIN_SHARE * float(np.median(short)))
    for row in np.flatnonzero((0 < short) & (short < limit)).tolist():
        width, height = sizes[row].tolist()
        reason = f"{width} × {height} pixels; the median short side is {np.median(short):.0f}"
        yield Finding("tiny", (row,), reason, 1 - short[row] / limit, "drop")


def _read_size(file: str) -> tuple[int, int]:
    with suppress(ImageError):
        return image_size(file)
    return 0, 0
