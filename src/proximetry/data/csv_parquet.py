"""The catalogue's columns in CSV and Parquet files."""

import csv
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from proximetry._common import atomic_path, closest, need, some

# Column in the file → field of Catalog.
FIELDS = {
    "path": "paths",
    "label": "labels",
    "split": "splits",
    "query": "queries",
    "gallery": "galleries",
    "group": "groups",
}
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}

Columns = dict[str, tuple[Any, ...]]


def read_csv(file: Path) -> Columns:
    """Read a CSV file into the fields of Catalog."""
    try:
        # utf-8-sig drops the mark that spreadsheets write first; surrogateescape keeps file
        # names that are not UTF-8 as the system gave them.
        with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
            lines = [line for line in csv.reader(stream, strict=True) if line]
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
    return _to_fields({name: [line[i] for line in table] for i, name in enumerate(header)})


def read_parquet(file: Path) -> Columns:
    """Read a Parquet file into the fields of Catalog."""
    parquet = need("pyarrow.parquet", "parquet", "Reading Parquet")
    arrow = need("pyarrow", "parquet", "Reading Parquet")
    try:
        table = parquet.read_table(os.fspath(file))
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{file}: not a Parquet file: {error}") from error
    _check_header(file, table.column_names)
    return _to_fields(table.to_pydict())


def _check_header(file: Path, header: list[str]) -> None:
    absent = [name for name in FIELDS if name not in header]
    for name in header:
        if name in FIELDS:
            if header.count(name) > 1:
                raise ValueError(f"{file}: column {name!r} appears twice")
        elif any(mark in name for mark in ";\t|"):
            raise ValueError(f"{file}: column {name!r}: the columns must be separated by commas")
        elif get_close_matches(name.lower(), absent):  # a slip; other columns are left out
            raise ValueError(f"{file}: unknown column {name!r}{closest(name, absent)}")
    for name in ("path", "label"):
        if name not in header:
            raise ValueError(f"{file}: the column {name!r} is missing; it has {', '.join(header)}")


def _to_fields(columns: dict[str, list[Any]]) -> Columns:
    fields: Columns = {"splits": ("all",) * len(columns["path"])}
    others = [name for name in columns if name not in FIELDS]
    if others:
        fields["notes"] = (f"columns that are not used: {some(others)}",)
    for name, values in columns.items():
        if name in others:
            continue
        texts = ["" if value is None else str(value) for value in values]
        if name in ("query", "gallery"):  # other words stay as they are, and Catalog names them
            fields[FIELDS[name]] = tuple(_FLAGS.get(t.strip().lower(), t) for t in texts)
        else:
            fields[FIELDS[name]] = tuple(texts)
    return fields


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
    types = {"query": arrow.bool_(), "gallery": arrow.bool_()}
    try:
        arrays = [arrow.array(v, types.get(n, arrow.string())) for n, v in columns.items()]
    except UnicodeEncodeError as error:
        raise ValueError(f"Parquet holds UTF-8 only, this is not: {error.object!r}") from error
    with atomic_path(file) as part:
        parquet.write_table(arrow.table(arrays, names=list(columns)), os.fspath(part))
