"""Columns of a catalog: pyarrow arrays that read like tuples, and their CSV and Parquet files.

Text is stored as bytes, since file names need not be UTF-8. Categorical text (classes, splits) is a
dictionary array, whose values are sorted.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import eq
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

from proximetry._util.errors import UsageError, suggest
from proximetry._util.files import atomic_path
from proximetry._util.formatting import format_value, join_first
from proximetry.data import FIELDS
from proximetry.data.folders import open_file

_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
# Spellings of missing values. As a label, one would group unrelated images.
MISSING = frozenset(("", "nan", "NaN", "None", "<NA>", "NaT"))
# Numbers of at most 64 bits; 007, 1_000 and nan are text.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_INTEGER_NAME = re.compile("0|-?[1-9][0-9]{0,17}")  # classes sorted by value; not 007
_DECIMAL = re.compile(rf"({_INTEGER.pattern}(\.[0-9]+)?|-?\.[0-9]+)([eE][+-]?[0-9]+)?")

_BYTES = re.compile("(large_|fixed_size_)?binary")  # types of pyarrow
_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # as surrogateescape reads a UTF-16 BOM

Columns: TypeAlias = Mapping[str, Sequence[Any]]
Rows: TypeAlias = npt.NDArray[np.int64]

TEXT = pa.large_binary()
_ARROW = {str: TEXT, bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_BLOCK = 1 << 16  # rows that are read at a time
_CHUNK_ROWS = 1 << 14  # values that are converted at a time


@dataclass(frozen=True, eq=False, repr=False)
class Column(Sequence[Any]):
    """Immutable, integer-indexed column of text, numbers or flags; a value may be None.

    Attributes:
        array: the values; text as bytes, `surrogateescape` decodes it.
    """

    array: pa.Array

    @cached_property
    def distinct(self) -> tuple[str, ...]:
        """The values of categorical text, in sorted order; integers by value."""
        return tuple(map(decode, self.array.dictionary.to_pylist()))

    @property
    def codes(self) -> npt.NDArray[np.int32]:
        """Index in `distinct` of each row's value."""
        codes: npt.NDArray[np.int32] = self.array.indices.to_numpy()
        return codes

    def isin(self, values: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return which rows of categorical text have one of the values."""
        return np.array([name in values for name in self.distinct], bool)[self.codes]

    def take(self, rows: Rows) -> Column:
        """Return the values of rows, in this order."""
        if pa.types.is_dictionary(self.array.type):
            return dictionary_column(self.distinct, self.codes[rows])
        return Column(self.array.take(pa.array(rows)))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        value = self.array[range(len(self))[index]].as_py()
        return decode(value) if isinstance(value, bytes) else value

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _CHUNK_ROWS):
            for value in self.array[start : start + _CHUNK_ROWS].to_pylist():
                yield decode(value) if isinstance(value, bytes) else value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column | tuple):
            return NotImplemented
        return self is other or (len(self) == len(other) and all(map(eq, self, other)))

    def __hash__(self) -> int:
        return hash(tuple(self))  # as an equal tuple

    def __add__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*self, *other)

    def __repr__(self) -> str:
        return format_value(tuple(islice(self, 13)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if pa.types.is_dictionary(self.array.type):
            return np.array(self.distinct, dtype or (None if self.distinct else "U1"))[self.codes]
        if self.array.type == TEXT or self.array.null_count:
            return np.array(list(self), dtype)
        values: npt.NDArray[Any] = self.array.to_numpy(zero_copy_only=False)
        return np.asarray(values, dtype)


def encode(texts: Sequence[str | None]) -> pa.Array:
    """Return texts as bytes; raise a UnicodeEncodeError for text that cannot be a file name."""
    try:
        return pa.array(texts, TEXT)
    except UnicodeEncodeError:  # not UTF-8
        escaped = [
            text if text is None else text.encode("utf-8", "surrogateescape") for text in texts
        ]
        return pa.array(escaped, TEXT)


def decode(data: bytes) -> str:
    """Return the text of bytes that may be a file name."""
    return data.decode("utf-8", "surrogateescape")


def dictionary_column(texts: Sequence[str], codes: npt.NDArray[Any] | None = None) -> Column:
    """Return a column of categorical text: `texts` themselves, or those that `codes` index.

    Its distinct values are sorted, integers by value.
    """
    if codes is None:
        used = dict.fromkeys(texts)
    else:
        used = dict.fromkeys(texts[i] for i in np.flatnonzero(np.bincount(codes)).tolist())
    names = sorted(used, key=int if all(map(_INTEGER_NAME.fullmatch, used)) else None)
    code_of = {name: i for i, name in enumerate(names)}
    indices = np.fromiter((code_of.get(text, -1) for text in texts), np.int32, len(texts))
    indices = indices if codes is None else indices[codes]
    return Column(pa.DictionaryArray.from_arrays(pa.array(indices), encode(names)))


def pack(values: Iterable[Any], *, categorical: bool = False) -> Sequence[Any]:
    """Return a column of plain values; a tuple if they are of different kinds."""
    if isinstance(values, Column) and not (categorical and values.array.type == TEXT):
        return values
    plain = tuple(values)
    kinds = {type(value) for value in plain} - {type(None)}
    kind = next(iter(kinds), str if categorical else None)
    finite = kind is not float or all(value is None or math.isfinite(value) for value in plain)
    if len(kinds) > 1 or kind not in _ARROW or not finite:
        return plain
    try:
        if kind is not str:
            return Column(pa.array(plain, _ARROW[kind]))
        return (
            dictionary_column(plain) if categorical and None not in plain else Column(encode(plain))
        )
    except (UnicodeEncodeError, OverflowError):
        return plain


def duplicate_rows(keys: npt.NDArray[np.int64]) -> Rows:
    """Return the rows with duplicate keys."""
    ordered = np.sort(keys)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return np.flatnonzero(np.isin(keys, repeated)) if len(repeated) else np.zeros(0, np.int64)


def read_csv(file: Path, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a CSV file into the fields of Catalog; see `_match_columns`."""
    # utf-8-sig drops the BOM of spreadsheets; surrogateescape keeps file names that are not UTF-8.
    with _open(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        try:
            lines = filter(None, csv.reader(text, strict=True))
            if (names := next(lines, None)) is None:
                raise ValueError(f"{file}: empty, expected a header line such as path,label,split")
            if names[0].startswith(_UTF16_MARKS):
                raise ValueError(f"{file}: encoded as UTF-16. Save it as CSV in UTF-8.")
            field_columns, others = _match_columns(file, names, columns)
            blocks: list[list[pa.Array]] = [[] for _ in names]
            rows = 0
            while block := list(islice(lines, _BLOCK)):
                if {*map(len, block)} != {len(names)}:
                    i = next(i for i, line in enumerate(block) if len(line) != len(names))
                    raise ValueError(
                        f"{file}: row {rows + i + 1} has {len(block[i])} fields, the header has "
                        f"{len(names)}: {block[i]!r}"
                    )
                rows += len(block)
                for arrays, cells in zip(blocks, zip(*block, strict=True), strict=True):
                    arrays.append(encode(cells))
        except csv.Error as error:
            raise ValueError(f"{file}: not a CSV file: {error}") from error
    texts = {
        name: pa.chunked_array(arrays, TEXT) for name, arrays in zip(names, blocks, strict=True)
    }
    values = {name: _text_column(texts[name], field) for name, field in field_columns.items()}
    values |= {name: _parse_numbers(texts[name]) for name in others}
    return _to_fields(file, names, field_columns, values)


def read_parquet(file: Path, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a Parquet file into the fields of Catalog; see `_match_columns`."""
    with _open(file) as stream:
        with _parquet_errors(file):
            schema = parquet.read_schema(stream)
        field_columns, others = _match_columns(file, schema.names, columns)
        # Text and numbers: no lists such as vectors, no records, no bytes.
        scalar = [
            column.name
            for column in schema
            if not pa.types.is_nested(column.type) and not _BYTES.match(str(column.type))
        ]
        # Categorical columns are read as dictionaries.
        categorical = [name for name in scalar if field_columns.get(name, "path") != "path"]
        with _parquet_errors(file):
            table = parquet.ParquetFile(stream, read_dictionary=categorical)
            values = {
                name: _text_column(table.read(columns=[name]).column(name), field)
                for name, field in field_columns.items()
            }
            for name in others:
                if name in scalar:
                    values[name] = _values(table.read(columns=[name]).column(name))
    return _to_fields(file, schema.names, field_columns, values)


@contextmanager
def _parquet_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{file}: not a readable Parquet file: {error}") from error


def _text_column(column: pa.ChunkedArray, field: str) -> Sequence[Any]:
    """Return a column of any type as text; a tuple if it holds lists or records."""
    if pa.types.is_nested(column.type):
        return tuple(_text(value) for value in column.to_pylist())
    if field == "path":
        if column.type in (pa.string(), pa.large_string(), pa.binary(), TEXT):
            return Column(column.cast(TEXT).combine_chunks().fill_null(b""))
        return Column(encode([_text(value) for value in _to_list(column)]))
    array = column.combine_chunks()
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    names = [*map(_text, _to_list(array.dictionary)), ""]  # a missing value is an empty string
    return dictionary_column(names, array.indices.fill_null(len(names) - 1).to_numpy())


def _values(column: pa.ChunkedArray) -> Sequence[Any]:
    """Return an extra column: numbers, text, or None."""
    types, kind = pa.types, column.type
    if kind in (pa.string(), pa.large_string()):
        return Column(column.cast(TEXT).combine_chunks())
    if types.is_boolean(kind):
        return Column(column.combine_chunks())
    if types.is_signed_integer(kind):
        return Column(column.cast(pa.int64()).combine_chunks())
    if types.is_float32(kind) or types.is_float64(kind):
        values = column.cast(pa.float64()).to_numpy()
        return Column(pa.array(values, mask=~np.isfinite(values)))
    return pack(_plain_value(value) for value in _to_list(column))


def _plain_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    return None if value is None else _text(value)


def _parse_numbers(cells: pa.ChunkedArray) -> Sequence[Any]:
    """Parse CSV cells as numbers if every non-empty cell is one; empty cells become None."""
    texts = [decode(cell) for cell in cells.to_pylist()]
    empty = np.array([not text for text in texts], bool)
    for kind, pattern in ((int, _INTEGER), (float, _DECIMAL)):
        if not empty.all() and all(not text or pattern.fullmatch(text) for text in texts):
            values = np.array([kind(text or 0) for text in texts])
            if np.isfinite(values).all():
                return Column(pa.array(values, mask=empty))
    return Column(encode([text or None for text in texts]))


def _open(file: Path) -> io.BufferedReader:
    try:
        return open_file(file)
    except FileNotFoundError:
        raise ValueError(f"no such table: {file}") from None
    except OSError as error:
        raise ValueError(f"the table {file} cannot be read: {error.strerror}") from error


def _to_list(column: Any) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # bytes that are declared as UTF-8
        return list(column.cast("binary").to_pylist())


def _match_columns(
    file: Path, names: list[str], columns: Mapping[str, str] | None
) -> tuple[dict[str, str], list[str]]:
    """Return the field of each column that is one of `FIELDS`, and the names of the other columns.

    `columns` maps `FIELDS` to their names in the table, where these differ.
    """
    mapping = dict(columns or {})
    for field, name in mapping.items():
        if field not in FIELDS:
            raise UsageError(
                f"data.columns: unknown field {format_value(field)}{suggest(field, FIELDS)}"
            )
        if name not in names:
            raise ValueError(
                f"{file}: no column {format_value(name)} for {field}; it has "
                f"{', '.join(names)}. Set --data.columns {field}=COLUMN."
            )
        if list(mapping.values()).count(name) > 1:
            raise UsageError(f"data.columns: duplicate column {format_value(name)}")
    for name in names:
        if names.count(name) > 1 and name:
            raise ValueError(f"{file}: duplicate column {name!r}")
    fields = {mapping.get(field, field): field for field in FIELDS}
    field_columns = {name: fields[name] for name in names if name in fields}
    if needed := [field for field in ("path", "label") if field not in field_columns.values()]:
        for name in names:
            if any(mark in name for mark in ";\t|"):
                raise ValueError(f"{file}: column {name!r}: columns must be separated by commas")
        raise ValueError(
            f"{file}: missing columns: {', '.join(map(repr, needed))}; it has "
            f"{', '.join(names)}. Set --data.columns "
            f"{','.join(f'{name}=COLUMN' for name in needed)}."
        )
    # A column without a name holds row numbers.
    return field_columns, [name for name in names if name and name not in {*field_columns, *FIELDS}]


def _to_fields(
    file: Path, names: list[str], field_columns: Mapping[str, str], columns: Columns
) -> dict[str, Any]:
    """Return the fields of Catalog, given columns of a table and which of `FIELDS` they are."""
    values = {field: columns[name] for name, field in field_columns.items()}
    labels = values["label"]
    gaps = np.flatnonzero(labels.isin(MISSING)).tolist() if isinstance(labels, Column) else []
    if gaps:
        rows = join_first([f"row {row + 1} ({labels[row]!r})" for row in gaps])
        raise ValueError(
            f"{file}: column label has no value in {rows}. Fill it in, or rename a class of this "
            "name."
        )
    for name in ("query", "gallery"):
        texts = values.get(name)
        if isinstance(texts, Column):
            # Other words are kept for Catalog to report.
            flags = [_FLAGS.get(word.strip().lower(), word) for word in texts.distinct]
            values[name] = pack(flags[code] for code in texts.codes.tolist())
    values.setdefault("split", dictionary_column(("all",), np.zeros(len(labels), np.int64)))
    unused = [name for name in names if name and name not in columns]
    return {
        **{FIELDS[name]: column for name, column in values.items()},
        "columns": {name: column for name, column in columns.items() if name not in field_columns},
        "notes": (f"unused columns: {join_first(unused)}",) if unused else (),
    }


def _text(value: Any) -> Any:
    """Return a value as text; keep lists and records for Catalog to report.

    Integers are written without a decimal point, even if stored as 7.0 because values are missing.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):  # text that is not UTF-8
        return decode(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, list | dict) else str(value)


def write_csv(file: Path, columns: Columns) -> None:
    """Write columns as CSV, atomically."""
    with (
        atomic_path(file) as part,
        part.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_parquet(file: Path, columns: Columns) -> None:
    """Write columns as Parquet, atomically; numbers among text become text."""
    arrays = {}
    for name, values in columns.items():
        array = values.array if isinstance(values, Column) else None
        if array is None and not any(isinstance(value, str) for value in values):
            array = pa.array(values)
        is_text = array is None or array.type == TEXT or pa.types.is_dictionary(array.type)
        arrays[name] = text_array(values) if is_text else array
    with atomic_path(file) as part:
        parquet.write_table(pa.table(arrays), os.fspath(part))


def text_array(values: Iterable[Any]) -> pa.Array:
    """Return text for Parquet: as strings or, if any is not UTF-8, as bytes."""
    if isinstance(values, Column):
        array = values.array.cast(TEXT)
    else:
        array = encode([None if value is None else str(value) for value in values])
    try:
        return array.cast(pa.large_string())
    except pa.ArrowInvalid:
        return array
