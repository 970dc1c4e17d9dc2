"""Columns of a catalog: pyarrow arrays that read like tuples, and their CSV and Parquet files.

Text is stored as bytes, since file names need not be UTF-8. Text that recurs (classes, splits) is a
dictionary array, whose values are sorted.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count, islice
from operator import eq
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

from proximetry._util.errors import UsageError, closest, shown, some
from proximetry._util.files import atomic_path
from proximetry.data import FIELDS
from proximetry.data.folders import open_file

_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
# How Python writes a missing value: as a label it would join unrelated images in a class.
MISSING = frozenset(("", "nan", "NaN", "None", "<NA>", "NaT"))
# Numbers as people write them, but neither 007 nor 1_000 nor nan, and no more digits than 64 bits
# hold: those are names.
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_WHOLE_NAME = re.compile("0|-?[1-9][0-9]{0,17}")  # classes sorted by value; not 007
_DECIMAL = re.compile(rf"({_WHOLE.pattern}(\.[0-9]+)?|-?\.[0-9]+)([eE][+-]?[0-9]+)?")

_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # as surrogateescape reads a UTF-16 BOM

Columns: TypeAlias = Mapping[str, Sequence[Any]]
Rows: TypeAlias = npt.NDArray[np.int64]

TEXT = pa.large_binary()
_ARROW = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_BLOCK = 1 << 16  # rows that are read at a time
_CONVERTED = 1 << 14  # values that are converted at a time


class Column(Sequence[Any]):
    """Immutable, integer-indexed column of text, numbers or flags; a value may be None.

    Attributes:
        array: the values; text as bytes, `surrogateescape` decodes it.
    """

    def __init__(self, array: pa.Array) -> None:
        self.array = array

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Column:
        """Return a column of text; raises UnicodeEncodeError for text that no file name can be."""
        rest, blocks = iter(values), []
        while block := list(islice(rest, _CONVERTED)):
            blocks.append(pa.array([None if v is None else encode(v) for v in block], TEXT))
        return cls(pa.chunked_array(blocks, TEXT).combine_chunks())

    @classmethod
    def coded(cls, distinct: Sequence[str], codes: npt.NDArray[Any]) -> Column:
        """Return a column of recurring text, given distinct values and the index of each row's."""
        keys: Sequence[Any] = distinct
        if all(map(_WHOLE_NAME.fullmatch, distinct)):
            keys = [*map(int, distinct)]
        order = sorted(range(len(distinct)), key=keys.__getitem__)
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(len(order), dtype=np.int32)
        names = pa.array([encode(distinct[i]) for i in order], TEXT)
        return cls(_used(names, ranks[codes]))

    @cached_property
    def distinct(self) -> tuple[str, ...]:
        """The values of recurring text, in sorted order; whole numbers by value."""
        return tuple(map(decode, self.array.dictionary.to_pylist()))

    @property
    def codes(self) -> npt.NDArray[Any]:
        """Index in `distinct` of each row's value."""
        codes: npt.NDArray[Any] = self.array.indices.to_numpy()
        return codes

    def where(self, holds: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        """Return the rows of recurring text whose value meets a condition."""
        mask: npt.NDArray[np.bool_] = np.fromiter(
            map(holds, self.distinct), bool, len(self.distinct)
        )
        return mask[self.codes] if mask.any() else np.zeros(len(self), bool)

    def take(self, rows: Rows) -> Column:
        """Return the values of rows, in this order."""
        taken = self.array.take(pa.array(rows))
        if pa.types.is_dictionary(taken.type):
            return Column(_used(taken.dictionary, taken.indices.to_numpy()))
        return Column(taken)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        value = self.array[range(len(self))[place]].as_py()
        return decode(value) if isinstance(value, bytes) else value

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _CONVERTED):
            for value in self.array[start : start + _CONVERTED].to_pylist():
                yield decode(value) if isinstance(value, bytes) else value

    def __contains__(self, value: object) -> bool:
        known = self.distinct if pa.types.is_dictionary(self.array.type) else iter(self)
        return value in known

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column | tuple):
            return NotImplemented
        return self is other or (len(self) == len(other) and all(map(eq, self, other)))

    def __hash__(self) -> int:
        return hash(tuple(self))  # as an equal tuple

    def __add__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*self, *other)

    def __repr__(self) -> str:
        return shown(tuple(islice(self, 13)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if pa.types.is_dictionary(self.array.type):
            names = np.array(self.distinct, dtype or (None if self.distinct else "U1"))
            return cast(npt.NDArray[Any], names[self.codes])
        if self.array.type == TEXT or self.array.null_count:
            return np.array(list(self), dtype)
        values: npt.NDArray[Any] = self.array.to_numpy(zero_copy_only=False)
        return np.asarray(values, dtype)

    def __reduce__(self) -> Any:
        return Column, (self.array,)


def encode(text: str) -> bytes:
    """Return the bytes of a text that may be a file name."""
    return text.encode("utf-8", "surrogateescape")


def decode(data: bytes) -> str:
    """Return the text of bytes that may be a file name."""
    return data.decode("utf-8", "surrogateescape")


def _used(names: pa.Array, codes: npt.NDArray[Any]) -> pa.DictionaryArray:
    """Return a dictionary array without unused values, and with the smallest codes."""
    used = np.zeros(len(names), bool)
    used[codes] = True
    if not used.all():
        names = names.filter(pa.array(used))
        codes = (np.cumsum(used, dtype=np.int32) - 1)[codes]
    kind = next(kind for kind in (np.int8, np.int16, np.int32) if len(names) <= np.iinfo(kind).max)
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(kind, copy=False)), names)


def pack(values: Iterable[Any], *, recurring: bool = False) -> Sequence[Any]:
    """Return a column of plain values; a tuple if they are of different kinds."""
    if isinstance(values, Column):
        if recurring and values.array.type == TEXT and not values.array.null_count:
            codes = values.array.dictionary_encode()
            names = list(map(decode, codes.dictionary.to_pylist()))
            return Column.coded(names, codes.indices.to_numpy())
        return values
    plain = tuple(values)
    kinds = {type(value) for value in plain}
    kind: Any = next(iter(kinds - {type(None)}), str if recurring else None)
    if not kinds <= {kind, type(None)}:
        return plain
    try:
        if kind is str:
            if recurring and None not in plain:
                places = {text: i for i, text in enumerate(dict.fromkeys(plain))}
                codes = np.fromiter(map(places.__getitem__, plain), np.int64, len(plain))
                return Column.coded(tuple(places), codes)
            return Column.of(plain)
        if kind is float and not all(value is None or math.isfinite(value) for value in plain):
            return plain
        if kind in _ARROW:
            return Column(pa.array(plain, _ARROW[kind]))
    except (UnicodeEncodeError, OverflowError):
        pass
    return plain


def repeated_rows(keys: npt.NDArray[np.int64]) -> Rows:
    """Return the rows whose key other rows have, too."""
    ordered = np.sort(keys)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return np.flatnonzero(np.isin(keys, repeated)) if len(repeated) else np.zeros(0, np.int64)


def read_csv(file: Path, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a CSV file into the fields of Catalog; see `Header` for the columns."""
    # utf-8-sig drops the BOM of spreadsheets; surrogateescape keeps file names that are not UTF-8.
    with _open(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        try:
            lines = (line for line in csv.reader(text, strict=True) if line)
            first = next(lines, None)
            if first is None:
                raise ValueError(f"{file}: empty, expected a header line such as path,label,split")
            if first[0].startswith(_UTF16_MARKS):
                raise ValueError(f"{file}: encoded as UTF-16. Save it as CSV in UTF-8.")
            header = Header(file, first, columns)
            blocks: list[list[pa.Array]] = [[] for _ in first]
            numbers = count(1)
            while block := list(islice(lines, _BLOCK)):
                for line, row in zip(block, numbers, strict=False):
                    if len(line) != len(first):
                        raise ValueError(
                            f"{file}: row {row} has {len(line)} fields, the header has "
                            f"{len(first)}: {line!r}"
                        )
                for arrays, cells in zip(blocks, zip(*block, strict=True), strict=True):
                    arrays.append(pa.array([*map(encode, cells)], TEXT))
        except csv.Error as error:
            raise ValueError(f"{file}: not a CSV file: {error}") from error
    texts = {
        name: pa.chunked_array(arrays, TEXT) for name, arrays in zip(first, blocks, strict=True)
    }
    ours = {name: _text_column(texts[name], header.ours[name]) for name in header.ours}
    return header.to_fields(ours, {name: _parse_numbers(texts[name]) for name in header.others})


def read_parquet(file: Path, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a Parquet file into the fields of Catalog; see `Header` for the columns."""
    with _open(file) as stream:
        try:
            schema = parquet.read_schema(stream)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{file}: not a readable Parquet file: {error}") from error
        header = Header(file, schema.names, columns)
        others = [name for name in header.others if _is_plain(schema.field(name).type)]
        # Columns whose values recur are read as dictionaries.
        recurring = [name for name, field in header.ours.items() if field != "path"]
        recurring = [name for name in recurring if _is_plain(schema.field(name).type)]
        try:
            table = parquet.ParquetFile(stream, read_dictionary=recurring)
            ours = {
                name: _text_column(table.read(columns=[name]).column(name), field)
                for name, field in header.ours.items()
            }
            further = {name: _values(table.read(columns=[name]).column(name)) for name in others}
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise ValueError(f"{file}: not a readable Parquet file: {error}") from error
    return header.to_fields(ours, further)


def _is_plain(kind: pa.DataType) -> bool:
    """Whether a type is text or numbers: no lists, such as vectors, no records, no bytes."""
    types = pa.types
    raw = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return not types.is_nested(kind) and not raw


def _text_column(column: pa.ChunkedArray, field: str) -> Sequence[Any]:
    """Return a column of any type as text; a tuple if it holds lists or records."""
    if pa.types.is_nested(column.type):
        return tuple(_text(value) for value in column.to_pylist())
    if field == "path":
        if column.type in (pa.string(), pa.large_string(), pa.binary(), TEXT):
            return Column(column.cast(TEXT).combine_chunks().fill_null(b""))
        return Column.of(_text(value) for value in _to_list(column))
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    parts = column.unify_dictionaries().chunks
    # A missing value is an empty text.
    names = [*map(_text, _to_list(parts[0].dictionary)), ""] if parts else [""]
    codes = [part.indices.fill_null(len(names) - 1).to_numpy() for part in parts]
    places = {name: i for i, name in enumerate(dict.fromkeys(names))}
    same = np.array([places[name] for name in names])
    return Column.coded(tuple(places), same[np.concatenate([np.zeros(0, np.int64), *codes])])


def _values(column: pa.ChunkedArray) -> Sequence[Any]:
    """Return a further column: numbers, text, or None."""
    types, kind = pa.types, column.type
    if kind in (pa.string(), pa.large_string()):
        return Column(column.cast(TEXT).combine_chunks())
    if types.is_boolean(kind):
        return Column(column.combine_chunks())
    if types.is_signed_integer(kind):
        return Column(column.cast(pa.int64()).combine_chunks())
    if types.is_float32(kind) or types.is_float64(kind):
        array = column.cast(pa.float64()).combine_chunks()
        values = array.to_numpy(zero_copy_only=False)
        return Column(pa.array(values, mask=~np.isfinite(values)))
    return pack(_plain_value(value) for value in _to_list(column))


def _plain_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    return None if value is None else _text(value)


def _parse_numbers(cells: pa.ChunkedArray) -> Sequence[Any]:
    """Return cells of CSV as numbers if all that are not empty are; None for empty ones."""
    array = cells.combine_chunks()
    texts = [decode(cell) for cell in array.to_pylist()]
    empty = np.fromiter((not text for text in texts), bool, len(texts))
    for kind, pattern in ((int, _WHOLE), (float, _DECIMAL)):
        if not empty.all() and all(not text or pattern.fullmatch(text) for text in texts):
            values = np.array([kind(text or 0) for text in texts])
            if np.isfinite(values).all():
                return Column(pa.array(values, mask=empty))
    return Column(pa.compute.if_else(pa.array(empty), pa.scalar(None, TEXT), array))


def _open(file: Path) -> io.BufferedReader:
    try:
        return open_file(file)
    except FileNotFoundError:
        raise ValueError(f"there is no table {file}") from None
    except OSError as error:
        raise ValueError(f"the table {file} cannot be read: {error.strerror}") from error


def _to_list(column: Any) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # bytes that are declared as UTF-8
        return list(column.cast("binary").to_pylist())


class Header:
    """The meaning of the columns of a table.

    Args:
        file: the table, for errors.
        names: its columns.
        columns: the column of the table for each of `FIELDS`, where its name differs.

    Attributes:
        ours: which of `FIELDS` a column is.
        others: further columns.
    """

    def __init__(self, file: Path, names: list[str], columns: Mapping[str, str] | None) -> None:
        self._file, self._names, mapping = file, names, dict(columns or {})
        for field, name in mapping.items():
            if field not in FIELDS:
                raise UsageError(
                    f"data.columns: there is no {shown(field)}{closest(field, FIELDS)}"
                )
            if name not in names:
                raise ValueError(
                    f"{file}: there is no column {shown(name)} to be the {field}; it has "
                    f"{', '.join(names)}. Set --data.columns {field}=COLUMN."
                )
            if list(mapping.values()).count(name) > 1:
                raise UsageError(f"data.columns: the column {shown(name)} can be one thing only")
        for name in names:
            if names.count(name) > 1 and name:
                raise ValueError(f"{file}: column {name!r} appears twice")
        fields = {mapping.get(field, field): field for field in FIELDS}
        self.ours = {name: fields[name] for name in names if name in fields}
        # A column with a reserved name that another column replaces is not used. A column without a
        # name holds row numbers.
        self.others = [name for name in names if name and name not in {*self.ours, *FIELDS}]
        needed = [name for name in ("path", "label") if name not in self.ours.values()]
        for name in names if needed else ():
            if any(mark in name for mark in ";\t|"):
                raise ValueError(
                    f"{file}: column {name!r}: the columns must be separated by commas"
                )
        if needed:
            raise ValueError(
                f"{file}: missing columns: {', '.join(map(repr, needed))}; it has "
                f"{', '.join(names)}. Set --data.columns "
                f"{','.join(f'{name}=COLUMN' for name in needed)}."
            )

    def to_fields(self, ours: Columns, others: Columns) -> dict[str, Any]:
        """Return the fields of Catalog, given columns by their names in the table."""
        columns = {self.ours[name]: values for name, values in ours.items()}
        fields: dict[str, Any] = {"columns": others}
        fields["splits"] = Column.coded(("all",), np.zeros(len(columns["path"]), np.int8))
        unused = [name for name in self._names if name and name not in {*ours, *others}]
        if unused:
            fields["notes"] = (f"columns that are not used: {some(unused)}",)
        for name, values in columns.items():
            if name == "label" and isinstance(values, Column):
                gaps = values.where(MISSING.__contains__).nonzero()[0].tolist()
                if gaps:
                    rows = some([f"row {row + 1} ({values[row]!r})" for row in gaps])
                    raise ValueError(
                        f"{self._file}: column label has no value in {rows}. Fill it in, or rename "
                        "a class of this name."
                    )
            fields[FIELDS[name]] = _flags(values) if name in ("query", "gallery") else values
        return fields


def _flags(values: Sequence[Any]) -> Sequence[Any]:
    """Return words as True and False; other words stay, and Catalog reports them."""
    if not isinstance(values, Column):
        return values
    flags = [_FLAGS.get(text.strip().lower(), text) for text in values.distinct]
    if all(isinstance(flag, bool) for flag in flags):
        return Column(pa.array(np.array(flags, bool)[values.codes]))
    return tuple(flags[code] for code in values.codes.tolist())


def _text(value: Any) -> Any:
    """Return a value as text; lists and records stay, and Catalog reports them.

    Whole numbers are written so, also if stored as 7.0 because other values are missing.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):  # text that is not UTF-8
        return decode(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
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
    """Write columns as Parquet, whole or not at all; numbers among text become text."""
    arrays = []
    for values in columns.values():
        plain = values.array if isinstance(values, Column) else None
        if plain is None and not any(isinstance(value, str) for value in values):
            plain = pa.array(values)
        text = plain is None or plain.type == TEXT or pa.types.is_dictionary(plain.type)
        arrays.append(text_array(values) if text else plain)
    with atomic_path(file) as part:
        parquet.write_table(pa.table(arrays, names=list(columns)), os.fspath(part))


def text_array(values: Iterable[Any]) -> pa.Array:
    """Return text for Parquet: as strings or, if any is not UTF-8, as bytes."""
    if not isinstance(values, Column):
        values = Column.of(None if value is None else str(value) for value in values)
    array = values.array
    raw = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    try:
        return raw.cast(pa.large_string())
    except pa.ArrowInvalid:
        return raw
