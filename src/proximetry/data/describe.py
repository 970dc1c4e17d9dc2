"""A catalogue in a few lines for people."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proximetry.data.catalog import Catalog

_HEADER = ("split", "images", "classes", "smallest", "median", "largest")


def describe(catalog: Catalog) -> str:
    """Return the table of splits, whether they share classes, roles and notes."""
    members: dict[str, Counter[str]] = {}
    for label, split in zip(catalog.labels, catalog.splits, strict=True):
        members.setdefault(split, Counter())[label] += 1
    order = [s for s in ("all", "train", "val", "test") if s in members]
    rows = [_line(split, members[split]) for split in order]
    if len(order) > 1:
        rows.append(_line("together", Counter(catalog.labels)))
    lines = [f"{len(catalog)} images of {len(catalog.class_names)} classes in {catalog.root}"]
    lines += _table([_HEADER, *rows])
    lines += [_overlap(a, b, members) for a, b in combinations(order, 2)]
    if catalog.queries is not None and catalog.galleries is not None:
        lines.append(f"{sum(catalog.queries)} queries, {sum(catalog.galleries)} gallery images")
    if catalog.groups is not None:
        lines.append(f"{len(set(catalog.groups))} groups")
    if catalog.boxes is not None:
        lines.append(f"{sum(b is not None for b in catalog.boxes)} images have a box")
    lines += [f"note: {note}" for note in catalog.notes]
    return "\n".join(lines)


def _line(name: str, sizes: Counter[str]) -> tuple[str, ...]:
    counts = list(sizes.values()) or [0]
    numbers = (sum(counts), len(sizes), min(counts), median(counts), max(counts))
    return (name, *(f"{n:g}" if isinstance(n, float) else str(n) for n in numbers))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _overlap(a: str, b: str, members: dict[str, Counter[str]]) -> str:
    shared = len(members[a].keys() & members[b].keys())
    return f"{a} and {b} share {shared} classes" if shared else f"{a} and {b} share no class"
