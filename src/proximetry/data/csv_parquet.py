"""The catalogue's columns in CSV and Parquet files."""

import csv
import io
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from proximetry._common import atomic_path, closest, need, some
from proximetry.data.tar_shards import open_file

# Column in the file → field of Catalog.
FIELDS = {
    "path": "paths",
    "label": "labels",
    "split": "splits",
    "query": "queries",
    "gallery": "galleries",
    "group": "groups",
}
_ROLES = ("query", "gallery")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
# How Python writes a value that is missing: as a label it would join unrelated images in a class.
_MISSING = frozenset(("", "nan", "NaN", "None", "<NA>", "NaT"))
_BOX = re.compile(r"(b|bounding_?)?box(es)?(_.*)?", re.IGNORECASE)

# Whole numbers and others as people write them, but neither 007 nor 1_000 nor nan, and no more
# digits than 64 bits hold: those are names.
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(rf"({_WHOLE.pattern}(\.[0-9]+)?|-?\.[0-9]+)([eE][+-]?[0-9]+)?")

Columns = dict[str, tuple[Any, ...]]


def read_csv(file: Path) -> dict[str, Any]:
    """Read a CSV file into the fields of Catalog."""
    # utf-8-sig drops the mark that spreadsheets write first; surrogateescape keeps file
    # names that are not UTF-8 as the system gave them.
    with _opened(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        try:
            lines = [line for line in csv.reader(text, strict=True) if line]
        except csv.Error as error:
            raise ValueError(f"{file}: not a CSV file: {error}") from error
    if not lines:
        raise ValueError(f"{file}: empty, expected a header line such as path,label,split")
    header, *table = lines
    _check_header(file, header)
    for number, line in enumerate(table, start=1):
        if len(line) != len(header):
            raise ValueError(
                f"{file}: row {number} has {len(line)} fields, the header has {len(header)}: "
                f"{line!r}"
            )
    columns = {name: [line[i] for line in table] for i, name in enumerate(header)}
    kept = {name: _numbers(values) for name, values in columns.items() if name not in FIELDS}
    return _to_fields(file, header, columns, kept)


def read_parquet(file: Path) -> dict[str, Any]:
    """Read a Parquet file into the fields of Catalog."""
    parquet = need("pyarrow.parquet", "parquet", "Reading Parquet")
    with _opened(file) as stream:
        with _named_errors(file):
            schema = parquet.read_schema(stream)
        _check_header(file, schema.names)
        wanted = [entry.name for entry in schema if entry.name in FIELDS or _is_plain(entry.type)]
        with _named_errors(file):
            table = parquet.read_table(stream, columns=wanted)
            columns = {name: _values(table[name]) for name in table.column_names}
    kept = {
        name: [_plain(value) for value in values]
        for name, values in columns.items()
        if name not in FIELDS
    }
    return _to_fields(file, schema.names, columns, kept)


def _is_plain(kind: Any) -> bool:
    """Whether a column holds texts or numbers: no lists, such as vectors, no records, no bytes."""
    types = need("pyarrow", "parquet", "Reading Parquet").types
    raw = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return not types.is_nested(kind) and not raw


def _plain(value: Any) -> Any:
    """A value of Parquet as a catalogue has it: a number, a text, or None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    return None if value is None else _text(value)


def _numbers(texts: Sequence[str]) -> list[Any]:
    """Cells of CSV as numbers, if all that are not empty are; None for empty ones."""
    there = [text for text in texts if text]
    read: Any = None
    if all(_WHOLE.fullmatch(text) for text in there):
        read = int
    elif all(_DECIMAL.fullmatch(text) and math.isfinite(float(text)) for text in there):
        read = float
    return [(read(text) if read else text) if text else None for text in texts]


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    arrow = need("pyarrow", "parquet", "Reading Parquet")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{file}: not a Parquet file that can be read: {error}") from error


def _opened(file: Path) -> io.BufferedReader:
    try:
        return open_file(file)
    except FileNotFoundError:
        raise ValueError(f"there is no table {file}") from None
    except OSError as error:
        raise ValueError(f"the table {file} cannot be read: {error.strerror}") from error


def _values(column: Any) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # bytes that only say they are UTF-8
        return list(column.cast("binary").to_pylist())


def _check_header(file: Path, header: list[str]) -> None:
    absent = [name for name in FIELDS if name not in header]
    boxes = [name for name in header if _BOX.fullmatch(name)]
    if boxes:
        raise ValueError(
            f"{file}: column {boxes[0]!r}: images are used whole, boxes are not; crop the images "
            "to their boxes first, or take the column out of the table"
        )
    for name in header:
        if header.count(name) > 1 and name:
            raise ValueError(f"{file}: column {name!r} appears twice")
        if name in FIELDS:
            continue
        if any(mark in name for mark in ";\t|"):
            raise ValueError(f"{file}: column {name!r}: the columns must be separated by commas")
        if get_close_matches(name.lower(), absent):  # a slip; other columns are kept as they are
            raise ValueError(f"{file}: unknown column {name!r}{closest(name, absent)}")
    for name in ("path", "label"):
        if name not in header:
            raise ValueError(f"{file}: the column {name!r} is missing; it has {', '.join(header)}")


def _to_fields(
    file: Path, header: list[str], columns: dict[str, list[Any]], kept: dict[str, list[Any]]
) -> dict[str, Any]:
    kept.pop("", None)  # as a table has that was written with the numbers of its rows
    fields: dict[str, Any] = {"splits": ("all",) * len(columns["path"]), "columns": kept}
    others = [name for name in header if name not in FIELDS and name not in kept]
    if others:
        fields["notes"] = (f"columns that are not used: {some(others)}",)
    for name, field in FIELDS.items():
        if name not in columns:
            continue
        texts = [_text(value) for value in columns[name]]
        if name == "label":
            gaps = [f"row {i + 1} ({t!r})" for i, t in enumerate(texts) if str(t) in _MISSING]
            if gaps:
                raise ValueError(
                    f"{file}: column label has no value in {some(gaps)}; fill it in, or give a "
                    "class that is really called so another name"
                )
        if name in _ROLES:  # other words stay as they are, and Catalog names them
            texts = [_FLAGS.get(str(text).strip().lower(), text) for text in texts]
        fields[field] = tuple(texts)
    return fields


def _text(value: Any) -> Any:
    """Return a value as text; what cannot be is left, for Catalog to name it."""
    if value is None:
        return ""
    if isinstance(value, bytes):  # which Parquet has for text that is not UTF-8
        return value.decode("utf-8", "surrogateescape")
    return value if isinstance(value, list | dict) else str(value)


def write_csv(file: Path, columns: Columns) -> None:
    """Write columns as CSV, whole or not at all."""
    with (
        atomic_path(file) as part,
        part.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_parquet(file: Path, columns: Columns) -> None:
    """Write columns as Parquet, whole or not at all."""
    arrow = need("pyarrow", "parquet", "Writing Parquet")
    parquet = need("pyarrow.parquet", "parquet", "Writing Parquet")
    arrays = [
        arrow.array(values, arrow.bool_()) if name in _ROLES else _array(values)
        for name, values in columns.items()
    ]
    with atomic_path(file) as part:
        parquet.write_table(arrow.table(arrays, names=list(columns)), os.fspath(part))


def _array(values: Sequence[Any]) -> Any:
    """Return a column for Parquet; numbers among texts become texts."""
    if all(value is None or isinstance(value, str) for value in values):
        return text_array(values)
    arrow = need("pyarrow", "parquet", "Writing Parquet")
    if any(isinstance(value, str) for value in values):
        return text_array([None if value is None else str(value) for value in values])
    if any(isinstance(value, float) for value in values):
        return arrow.array([None if value is None else float(value) for value in values])
    return arrow.array(values)


def text_array(values: Sequence[str | None]) -> Any:
    """Return texts for Parquet: as strings or, if any is not UTF-8, as bytes."""
    arrow = need("pyarrow", "parquet", "Writing Parquet")
    try:
        return arrow.array(values, arrow.string())
    except UnicodeEncodeError:
        raw = [None if v is None else v.encode("utf-8", "surrogateescape") for v in values]
        return arrow.array(raw, arrow.binary())
