"""The catalogue's columns in CSV and Parquet files."""

import csv
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from proximetry._common import atomic_path, closest, need

Columns = dict[str, tuple[object, ...]]

# Column in the file → field of Catalog.
_FIELDS = {
    "path": "paths",
    "label": "labels",
    "split": "splits",
    "query": "queries",
    "gallery": "galleries",
    "group": "groups",
}
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}


def read_csv(file: Path) -> Columns:
    """Read a CSV file into the fields of Catalog."""
    try:
        # utf-8-sig drops the mark that spreadsheets write first; surrogateescape keeps file
        # names that are not UTF-8 as the system gave them.
        with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
            lines = csv.reader(stream, strict=True)
            header = next(lines, None)
            if not header:
                raise ValueError(f"{file}: empty, expected a header line such as path,label,split")
            _check_header(file, header)
            table = list(_numbered(file, lines, len(header)))
    except csv.Error as error:
        raise ValueError(f"{file}: not a CSV file: {error}") from error
    columns = {name: [line[i] for line in table] for i, name in enumerate(header)}
    return _to_fields(file, columns, len(table))


def _numbered(file: Path, lines: Iterable[list[str]], width: int) -> Iterator[list[str]]:
    number = 0
    for line in lines:
        if not line:
            continue
        number += 1
        if len(line) != width:
            raise ValueError(
                f"{file}: row {number} has {len(line)} fields, the header has {width}: {line!r}"
            )
        yield line


def read_parquet(file: Path) -> Columns:
    """Read a Parquet file into the fields of Catalog."""
    parquet = need("pyarrow.parquet", "parquet", "Reading Parquet")
    arrow = need("pyarrow", "parquet", "Reading Parquet")
    try:
        table = parquet.read_table(os.fspath(file))
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{file}: not a Parquet file: {error}") from error
    _check_header(file, table.column_names)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return _to_fields(file, columns, table.num_rows)


def _check_header(file: Path, header: list[str]) -> None:
    for name in header:
        if name not in _FIELDS:
            hint = closest(name, _FIELDS)
            if any(mark in name for mark in ";\t|"):
                hint = ": the columns must be separated by commas."
            raise ValueError(f"{file}: unknown column {name!r}{hint}")
        if header.count(name) > 1:
            raise ValueError(f"{file}: column {name!r} appears twice")
    for name in ("path", "label"):
        if name not in header:
            raise ValueError(f"{file}: the column {name!r} is missing; it has {', '.join(header)}")


def _to_fields(file: Path, columns: dict[str, list[Any]], rows: int) -> Columns:
    fields: Columns = {"splits": ("all",) * rows}
    for name, target in _FIELDS.items():
        if name in columns:
            texts = ["" if value is None else str(value) for value in columns[name]]
            flags = name in ("query", "gallery")
            fields[target] = tuple(_to_flags(file, name, texts) if flags else texts)
    return fields


def _to_flags(file: Path, name: str, texts: list[str]) -> Iterator[bool]:
    for i, text in enumerate(texts):
        word = text.strip().lower()
        if word not in _FLAGS:
            raise ValueError(
                f"{file}: row {i + 1}, column {name}: {text!r} is neither true nor false"
            )
        yield _FLAGS[word]


def _to_columns(fields: Columns) -> dict[str, tuple[object, ...]]:
    return {name: fields[target] for name, target in _FIELDS.items() if target in fields}


def write_csv(file: Path, fields: Columns) -> None:
    """Write the fields of Catalog as CSV, whole or not at all."""
    columns = _to_columns(fields)
    with (
        atomic_path(file) as part,
        part.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*(map(_csv_cell, c) for c in columns.values()), strict=True))


def _csv_cell(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def write_parquet(file: Path, fields: Columns) -> None:
    """Write the fields of Catalog as Parquet, whole or not at all."""
    arrow = need("pyarrow", "parquet", "Writing Parquet")
    parquet = need("pyarrow.parquet", "parquet", "Writing Parquet")
    types = {"query": arrow.bool_(), "gallery": arrow.bool_()}
    columns = _to_columns(fields)
    try:
        arrays = [arrow.array(v, types.get(n, arrow.string())) for n, v in columns.items()]
    except UnicodeEncodeError as error:
        raise ValueError(f"Parquet holds UTF-8 only, this is not: {error.object!r}") from error
    with atomic_path(file) as part:
        parquet.write_table(arrow.table(arrays, names=list(columns)), os.fspath(part))
