"""The catalogue's columns in CSV and Parquet files."""

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError, closest, need, shown, some
from proximetry._util.files import atomic_path
from proximetry.data.columns import Coded, CodedMaker, Column, Numbers, Texts, TextsMaker, pack
from proximetry.data.shards import open_file

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
MISSING = frozenset(("", "nan", "NaN", "None", "<NA>", "NaT"))
# Whole numbers and others as people write them, but neither 007 nor 1_000 nor nan, and no more
# digits than 64 bits hold: those are names.
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(rf"({_WHOLE.pattern}(\.[0-9]+)?|-?\.[0-9]+)([eE][+-]?[0-9]+)?")

_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # as surrogateescape reads a UTF-16 BOM

Columns = Mapping[str, Sequence[Any]]
_BLOCK = 1 << 16  # rows that are read at once


def read_csv(file: Path, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a CSV file into the fields of Catalog; see `Header` for the columns."""
    # utf-8-sig drops the mark that spreadsheets write first; surrogateescape keeps file
    # names that are not UTF-8 as the system gave them.
    with _opened(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        try:
            lines = (line for line in csv.reader(text, strict=True) if line)
            first = next(lines, None)
            if first is None:
                raise ValueError(f"{file}: empty, expected a header line such as path,label,split")
            if first[0].startswith(_UTF16_MARKS):
                raise ValueError(f"{file}: encoded as UTF-16. Save it as CSV in UTF-8.")
            header = Header(file, first, columns)
            texts = {name: TextsMaker() for name in first if name not in header.coded}
            coded = {name: CodedMaker() for name in header.coded}
            makers = [texts.get(name) or coded[name] for name in first]
            numbers = count(1)
            while block := list(islice(lines, _BLOCK)):
                for line, row in zip(block, numbers, strict=False):
                    if len(line) != len(first):
                        raise ValueError(
                            f"{file}: row {row} has {len(line)} fields, the header has "
                            f"{len(first)}: {line!r}"
                        )
                for maker, cells in zip(makers, zip(*block, strict=True), strict=True):
                    maker.extend(cells)
        except csv.Error as error:
            raise ValueError(f"{file}: not a CSV file: {error}") from error
    ours = {name: (texts.get(name) or coded[name]).make() for name in header.ours}
    return header.to_fields(ours, {name: _numbers(texts[name].make()) for name in header.others})


def read_parquet(file: Path, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a Parquet file into the fields of Catalog; see `Header` for the columns."""
    parquet = need("pyarrow.parquet", "parquet", "Reading Parquet")
    with _opened(file) as stream:
        with _named_errors(file):
            schema = parquet.read_schema(stream)
        header = Header(file, schema.names, columns)
        kinds = {entry.name: entry.type for entry in schema}
        plain = [name for name, kind in kinds.items() if _is_plain(kind)]
        coded = [name for name in header.coded if name in plain]
        with _named_errors(file):
            table = parquet.ParquetFile(stream, read_dictionary=coded)

            def read(name: str) -> Sequence[Any]:
                if name in header.coded:
                    return _coded(table.read(columns=[name]).column(name))
                # A few rows at a time: such a column is large, and is not to be there twice.
                parts = (batch.column(name) for batch in table.iter_batches(_BLOCK, columns=[name]))
                return _texts(parts) if name in header.ours else _kept(parts, kinds[name])

            # What takes the most memory to be read comes before what takes the most to be kept.
            order = sorted(header.ours, key=lambda name: name not in header.coded)
            ours = {name: read(name) for name in order}
            kept = {name: read(name) for name in header.others if name in plain}
    return header.to_fields(ours, kept)


def _is_plain(kind: Any) -> bool:
    """Whether a column holds texts or numbers: no lists, such as vectors, no records, no bytes."""
    types = need("pyarrow", "parquet", "Reading Parquet").types
    raw = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return not types.is_nested(kind) and not raw


def _texts(parts: Iterable[Any]) -> Texts:
    """A column of Parquet as texts, whatever it holds; empty where it holds nothing."""
    need("pyarrow", "parquet", "Reading Parquet").default_memory_pool().release_unused()
    maker = TextsMaker()
    for part in parts:
        _add(maker, part)
    found = maker.make()
    return Texts(found.data, found.starts, found.sizes)


def _add(maker: TextsMaker, part: Any) -> None:
    """Take values of Parquet: the bytes of texts as they are, others one by one."""
    import numpy as np

    arrow = need("pyarrow", "parquet", "Reading Parquet")
    wide = part.type in (arrow.large_string(), arrow.large_binary())
    if wide or part.type in (arrow.string(), arrow.binary()):
        _, starts, data = part.buffers()
        ends = np.frombuffer(starts, "i8" if wide else "i4")[part.offset :][: len(part) + 1]
        missing = _missing(part)
        sizes = np.diff(ends)
        if data is not None and not sizes[missing].any():  # else there is more than texts
            maker.add(np.frombuffer(data, "u1")[ends[0] : ends[-1]], sizes, missing)
            return
    maker.extend([None if value is None else _text(value) for value in _values(part)])


def _missing(part: Any) -> Any:
    return part.is_null().to_numpy(zero_copy_only=False)


def _coded(column: Any) -> Sequence[Any]:
    """A column of Parquet as texts that recur; a tuple where it holds what cannot be text."""
    import numpy as np

    types = need("pyarrow", "parquet", "Reading Parquet").types
    if types.is_nested(column.type):
        return tuple(_text(value) for value in column.to_pylist())
    if not types.is_dictionary(column.type):
        column = column.dictionary_encode()
    parts = column.unify_dictionaries().chunks  # now all of them have the same values
    maker = CodedMaker()
    if parts:
        # What has no value is as if it were one more, which is empty.
        values = [*map(_text, _values(parts[0].dictionary)), ""]
        codes = [part.indices.fill_null(len(values) - 1).to_numpy() for part in parts]
        maker.add(values, np.concatenate(codes))
        del column, parts, codes
    return maker.make()


def _kept(parts: Iterable[Any], kind: Any) -> Sequence[Any]:
    """A further column of Parquet: numbers, texts, or None."""
    import numpy as np

    types = need("pyarrow", "parquet", "Reading Parquet").types
    floating = types.is_float32(kind) or types.is_float64(kind)
    if types.is_boolean(kind) or floating or types.is_signed_integer(kind):
        wanted = "bool" if types.is_boolean(kind) else "f8" if floating else "i8"
        arrays, gaps = [np.zeros(0, wanted)], [np.zeros(0, bool)]
        for part in parts:
            filled = part.fill_null(False if wanted == "bool" else 0)
            array = filled.to_numpy(zero_copy_only=False)
            gap = _missing(part) | ~np.isfinite(array)
            arrays.append(np.where(gap, 0, array).astype(wanted))
            gaps.append(gap)
        missing = np.concatenate(gaps)
        return Numbers(np.concatenate(arrays), missing if missing.any() else None)
    if types.is_string(kind) or types.is_large_string(kind):
        maker = TextsMaker()
        for part in parts:
            _add(maker, part)
        return maker.make()
    return pack(_plain(value) for part in parts for value in _values(part))


def _plain(value: Any) -> Any:
    """A value of Parquet as a catalogue has it: a number, a text, or None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    return None if value is None else _text(value)


def _numbers(texts: Texts) -> Sequence[Any]:
    """Cells of CSV as numbers, if all that are not empty are; None for empty ones."""
    import numpy as np

    missing = texts.sizes == 0
    for kind, pattern in (("i8", _WHOLE), ("f8", _DECIMAL)):
        if all(not text or pattern.fullmatch(text) for text in texts) and not missing.all():
            array = np.fromiter(
                (float(t or 0) if kind == "f8" else int(t or 0) for t in texts), kind
            )
            if np.isfinite(array).all():
                return Numbers(array, missing if missing.any() else None)
    return Texts(texts.data, texts.starts, texts.sizes, missing if missing.any() else None)


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


class Header:
    """Which column of a table is what.

    Args:
        file: the table, for errors.
        names: its columns.
        columns: what a column is called there, by what it is called here, where that differs.

    Attributes:
        ours: by column of the table, which of `FIELDS` it is.
        others: further columns, which are kept.
        coded: those of ours whose texts recur.
    """

    def __init__(self, file: Path, names: list[str], columns: Mapping[str, str] | None) -> None:
        self._file, self._names, given = file, names, dict(columns or {})
        for field, name in given.items():
            self._check_mapping(field, name, given)
        for name in names:
            if names.count(name) > 1 and name:
                raise ValueError(f"{file}: column {name!r} appears twice")
        there = {given.get(field, field): field for field in FIELDS}
        self.ours = {name: there[name] for name in names if name in there}
        # A column that is called as one of ours but has been replaced would be mistaken for it.
        # A column without a name holds the numbers of rows.
        self.others = [name for name in names if name and name not in {*self.ours, *FIELDS}]
        self._check_required()
        self.coded = [name for name, field in self.ours.items() if field != "path"]

    def _check_mapping(self, field: str, name: str, given: Mapping[str, str]) -> None:
        if field not in FIELDS:
            raise UsageError(f"data.columns: there is no {shown(field)}{closest(field, FIELDS)}")
        if name not in self._names:
            raise ValueError(
                f"{self._file}: there is no column {shown(name)} to be the {field}; it has "
                f"{', '.join(self._names)}. Say which it is: --data.columns {field}=COLUMN"
            )
        if list(given.values()).count(name) > 1:
            raise UsageError(f"data.columns: the column {shown(name)} can be one thing only")

    def _check_required(self) -> None:
        file, there = self._file, self.ours.values()
        needed = [name for name in ("path", "label") if name not in there]
        if not needed:
            return
        for name in self._names:
            if any(mark in name for mark in ";\t|"):
                raise ValueError(
                    f"{file}: column {name!r}: the columns must be separated by commas"
                )
        are, which = "column {} is", "one of these is the"
        if len(needed) > 1:
            are, which = "columns {} are", "two of these are"
        raise ValueError(
            f"{file}: the {are.format(' and '.join(map(repr, needed)))} missing; it has "
            f"{', '.join(self._names)}. If {which} {' and '.join(needed)}, say so: "
            f"--data.columns {','.join(f'{name}=COLUMN' for name in needed)}"
        )

    def to_fields(
        self, ours: Mapping[str, Sequence[Any]], kept: Mapping[str, Sequence[Any]]
    ) -> dict[str, Any]:
        """Return the fields of Catalog, given columns by their names in the table."""
        found = {self.ours[name]: values for name, values in ours.items()}
        fields: dict[str, Any] = {"columns": kept}
        fields["splits"] = Coded.constant("all", len(found["path"]))
        left_out = [name for name in self._names if name and name not in {*ours, *kept}]
        if left_out:
            fields["notes"] = (f"columns that are not used: {some(left_out)}",)
        for name, values in found.items():
            if name == "label":
                self._check_labels(values)
            fields[FIELDS[name]] = _flags(values) if name in _ROLES else values
        return fields

    def _check_labels(self, labels: Sequence[Any]) -> None:
        gaps: list[int] = []
        if isinstance(labels, Coded) and not MISSING.isdisjoint(labels.distinct):
            gaps = labels.among(MISSING).nonzero()[0].tolist()
        if gaps:
            named = some([f"row {row + 1} ({labels[row]!r})" for row in gaps[:6]])
            more = f" and {len(gaps) - 6} more" if len(gaps) > 6 else ""
            raise ValueError(
                f"{self._file}: column label has no value in {named}{more}; fill it in, or give "
                "a class that is really called so another name"
            )


def _flags(values: Sequence[Any]) -> Sequence[Any]:
    """Words as True and False; where there are others they stay, and Catalog names them."""
    import numpy as np

    if not isinstance(values, Coded):
        return values
    meant = [_FLAGS.get(text.strip().lower(), text) for text in values.distinct]
    if all(isinstance(flag, bool) for flag in meant):
        return Numbers(np.array(meant, bool)[values.codes])
    return tuple(meant[code] for code in values.codes.tolist())


def _text(value: Any) -> Any:
    """Return a value as text; what cannot be is left, for Catalog to name it.

    Numbers that are whole are written so, also where a program keeps them as 7.0 because there
    are gaps in the column.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):  # which Parquet has for text that is not UTF-8
        return value.decode("utf-8", "surrogateescape")
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
    """Write columns as Parquet, whole or not at all."""
    arrow = need("pyarrow", "parquet", "Writing Parquet")
    parquet = need("pyarrow.parquet", "parquet", "Writing Parquet")
    arrays = [_array(values) for values in columns.values()]
    with atomic_path(file) as part:
        parquet.write_table(arrow.table(arrays, names=list(columns)), os.fspath(part))


def _array(values: Sequence[Any]) -> Any:
    """Return a column for Parquet; numbers among texts become texts."""
    arrow = need("pyarrow", "parquet", "Writing Parquet")
    if isinstance(values, Numbers):
        return arrow.array(values.array, mask=values.missing)
    if isinstance(values, Column):
        return text_array(values)
    if any(isinstance(value, str) for value in values):
        return text_array([None if value is None else str(value) for value in values])
    if any(isinstance(value, float) for value in values):
        return arrow.array([None if value is None else float(value) for value in values])
    return arrow.array(values)


def text_array(values: Sequence[str | None]) -> Any:
    """Return texts for Parquet: as strings or, if any is not UTF-8, as bytes."""
    import numpy as np

    arrow = need("pyarrow", "parquet", "Writing Parquet")
    texts = values.joined() if isinstance(values, Texts) else Texts.of(values)
    there = None if texts.missing is None else arrow.array(~texts.missing).buffers()[1]
    ends = np.append(texts.starts, len(texts.data))
    parts = [there, arrow.py_buffer(ends), arrow.py_buffer(texts.data)]
    raw = arrow.Array.from_buffers(arrow.large_binary(), len(texts), parts)
    try:
        return raw.cast(arrow.large_string())
    except arrow.ArrowInvalid:
        return raw
