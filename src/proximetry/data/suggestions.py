"""Suggestions for the images of a dataset: a CSV file of `proximetry check` or the search page."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value
from proximetry.data.tables import write_csv

Action: TypeAlias = Literal["drop", "relabel", "move", "keep"]


class Suggestion(NamedTuple):
    """What to do with one image.

    Attributes:
        path: as in the catalog.
        kind: what was found, such as "label error".
        action: "drop", "relabel", "move" (to another split) or "keep" (the class is confirmed).
        label: the new class of a relabeled image, else "".
        split: the new split of a moved image, else "".
        reason: why, in words.
    """

    path: str
    kind: str
    action: Action
    label: str
    split: str
    reason: str


def write_suggestions(file: Path, suggestions: Iterable[Suggestion]) -> None:
    """Write suggestions as CSV, atomically."""
    columns = zip(*suggestions, strict=True)
    empty: tuple[tuple[str, ...], ...] = ((),) * len(Suggestion._fields)
    write_csv(file, dict(zip(Suggestion._fields, tuple(columns) or empty, strict=True)))


def read_suggestions(file: Path) -> list[Suggestion]:
    """Read and validate the suggestions of a CSV file; kind and reason may be missing."""
    try:
        with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
            reader = csv.DictReader(stream, strict=True)
            names = reader.fieldnames or ()
            if missing := [name for name in ("path", "action") if name not in names]:
                raise UsageError(f"{file}: missing columns: {', '.join(missing)}")
            lines = list(reader)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except csv.Error as error:
        raise UsageError(f"{file}: not a CSV file: {error}") from error
    suggestions = []
    for number, line in enumerate(lines, 1):
        values = {name: line.get(name) or "" for name in Suggestion._fields}
        action, target = values["action"], {"relabel": "label", "move": "split"}
        if action not in get_args(Action):
            raise UsageError(
                f"{file}: row {number}: unknown action {format_value(action)}. Write "
                f"{', '.join(get_args(Action))}, or remove the row."
            )
        if (column := target.get(action)) and not values[column]:
            raise UsageError(f"{file}: row {number}: {action} without a {column}. Fill it in.")
        suggestions.append(Suggestion(**values))  # type: ignore[arg-type]
    return suggestions
