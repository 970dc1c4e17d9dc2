"""Metadata of the images in a gallery: an Arrow table, and filters (`where`).

Text is stored as bytes, because names of files and folders need not be UTF-8.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value, join_first
from proximetry._util.imports import import_optional
from proximetry._util.types import Progress
from proximetry.data import FIELDS, Catalog
from proximetry.data.folders import SEPARATOR, split_shard_path
from proximetry.data.image_files import find_catalog, find_images
from proximetry.data.vectors import is_vector_file
from proximetry.search.conditions import Condition, Where, parse_where
from proximetry.search.manifest import DamagedGalleryError

STAMP = ("_size", "_modified")  # hidden columns: size and mtime of each file when it was embedded
DIGEST = "_digest"  # of its content, for files that are moved
HIDDEN = (*STAMP, DIGEST)
_RESERVED = ("id", "similarity", "score", *HIDDEN)  # names that results and galleries use

Mask = npt.NDArray[np.bool_]
_MAX_BOUND = 1 << 1023  # of a range; NumPy compares no integers from 2¹⁰²⁴ with floats
_COMPARE = {"<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


def arrow(module: str = "pyarrow") -> Any:
    """Import pyarrow or a part of it."""
    return import_optional(module, "search", "A gallery")


def from_images(
    images: Catalog | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    labels: Sequence[str | None] | None = None,
) -> Any:
    """Return the metadata table of a catalog, of image files and their classes, or of a source.

    A source is anything that `from_sources` reads.
    """
    if isinstance(images, str | os.PathLike):
        if labels is None and not split_shard_path(os.fspath(images))[1]:
            return from_sources([images])[0]
        images = [images]
    if isinstance(images, Catalog):
        if labels is not None:
            raise UsageError("labels apply to lists of files only, got a catalog. Omit labels.")
        fields = {column: getattr(images, field) for column, field in FIELDS.items()}
        columns = {name: values for name, values in fields.items() if values is not None}
        columns |= images.columns
        columns["path"] = [images.file(row) for row in range(len(images))]
    else:
        columns = {"path": [os.fspath(image) for image in images]}
        if labels is not None:
            columns["label"] = [*labels]
            count = len(columns["path"])
            if isinstance(labels, str) or len(columns["label"]) != count:
                raise UsageError(f"labels must be a list of {count} classes, one for each file")
    return from_columns({**columns, "path": [absolute(path) for path in columns["path"]]})


def from_sources(
    sources: Iterable[str | os.PathLike[str]],
    columns: Mapping[str, str] | None = None,
    *,
    allow_missing: bool = False,
    progress: Progress | None = None,
) -> tuple[Any, list[str]]:
    """Return the metadata table of the images in files, folders, tables and tar files, and notes.

    Classes come from class folders and tables. Other arguments are as in `open_dataset`.
    """
    names = [os.fspath(source) for source in sources]
    tables, notes = list[Any](), list[str]()
    for name in names:
        if is_vector_file(name):
            raise UsageError(f"{name} has vectors. Index it separately.")
        catalog = find_catalog(
            Path(name).expanduser(), columns, allow_missing=allow_missing, progress=progress
        )
        if catalog is not None:
            tables.append(from_images(catalog))
            notes += catalog.remarks()
        elif (files := find_images([name]))[0]:
            paths, labels = zip(*files[0], strict=True)
            tables.append(from_columns({"path": [*map(absolute, paths)], "label": labels}))
            notes += files[1]
    if not tables:
        places = ", ".join(names) or "the arguments"
        raise UsageError(f"no images in {places}. Pass image files or folders.")
    table = concat(tables)
    first = {path: row for row, path in reversed([*enumerate(table["path"].to_pylist())])}
    return table.take(arrow().array(sorted(first.values()))), notes


def absolute(path: str) -> str:
    """Make a path absolute; the name of a shard's member stays as it is in the shard."""
    file, member = split_shard_path(path)
    folder, name = os.path.split(file)
    if os.pardir in folder.split(os.sep):  # the parent of a symbolic link is that of its target
        file = os.path.join(os.path.realpath(folder), name)
    file = os.path.abspath(file)
    return f"{file}{SEPARATOR}{member}" if member else file


def from_columns(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a metadata table of columns, one of which is path; label is null by default."""
    pa = arrow()
    for name in columns:
        if name in _RESERVED:
            raise UsageError(f"column {name!r} is reserved by galleries. Rename it.")
    arrays = {name: _array(values, name in FIELDS) for name, values in columns.items()}
    if "label" not in arrays:
        arrays["label"] = pa.nulls(len(columns["path"]), pa.large_binary())
    return pa.table(arrays)


def _array(values: Sequence[Any], is_text: bool) -> Any:
    pa = arrow()
    empty = all(value is None for value in values)
    if empty and not is_text:
        return pa.nulls(len(values))  # compatible with any type of the column
    if empty or any(isinstance(value, str) for value in values):
        encoded = [None if value is None else encode(str(value)) for value in values]
        return pa.array(encoded, pa.large_binary())
    return pa.array(values)


def fill_missing(table: Any, stored: Mapping[str, Sequence[Any]]) -> Any:
    """Replace missing values of a table by those of stored columns."""
    columns: dict[str, Any] = {name: values(table[name]) for name in table.column_names}
    for name, old in stored.items():
        new = columns.get(name, [None] * len(old))
        columns[name] = [b if a is None else a for a, b in zip(new, old, strict=True)]
    return from_columns(columns)


def with_files(table: Any, stamps: Sequence[Any], digests: Sequence[str | None]) -> Any:
    """Add size, mtime and digest of each file (`new_images.Stamp`), null if unknown."""
    pa = arrow()
    for name in STAMP:
        column = [stamp and getattr(stamp, name[1:]) for stamp in stamps]
        table = table.append_column(name, pa.array(column, pa.int64()))
    return table.append_column(DIGEST, _array(digests, is_text=True))


def encode(text: str) -> bytes:
    """Encode text for storage."""
    return text.encode("utf-8", "surrogateescape")


def concat(tables: Sequence[Any]) -> Any:
    """Concatenate tables without copying them; missing columns are null, types may widen."""
    pa = arrow()
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        reason = str(error).replace("large_binary", "text")
        raise UsageError(f"column types differ: {reason}. Rename the column.") from error


def write(table: Any, stream: Any) -> None:
    """Write a table as an Arrow file."""
    with arrow("pyarrow.ipc").new_file(stream, table.schema) as writer:
        writer.write_table(table.combine_chunks())  # as one batch, which `read` maps to memory


def read(file: Path) -> Any:
    """Open a memory-mapped table and validate it."""
    pa, ipc = arrow(), arrow("pyarrow.ipc")
    try:
        table = ipc.open_file(pa.memory_map(os.fsencode(file))).read_all()
        table.validate(full=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # Arrow raises many types for damaged files
        raise DamagedGalleryError(file, error) from error
    return table


def values(column: Any) -> list[Any]:
    """Return a column as Python values, bytes as text."""
    return [
        value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
        for value in column.to_pylist()
    ]


def contains(column: Any, targets: Any) -> Mask:
    """Return a mask of the values that are in an array of the same type."""
    return np.asarray(arrow("pyarrow.compute").is_in(column, value_set=targets))


def select(table: Any, where: Where) -> Mask:
    """Return a mask of the rows that match every condition."""
    mask = np.ones(len(table), np.bool_)
    columns = [name for name in table.column_names if name not in HIDDEN]
    for condition in parse_where(where, columns):
        matches = _matches(table, condition)
        if not matches.any():
            hint = _suggest(table, condition) if condition.operator == "=" else ""
            raise UsageError(f"no image has {condition}{hint}")
        mask &= matches
    return mask


def _matches(table: Any, condition: Condition) -> Mask:
    """Return a mask of the rows that match a condition; null matches != and None only."""
    name, operator, targets = condition
    kind, compute = column_type(table, name), arrow("pyarrow.compute")
    if operator in ("=", "!="):
        if kind is None:
            equal = np.full(len(table), None in targets)
        else:
            equal = contains(table[name], _cast(condition, kind))
        return equal if operator == "=" else ~equal
    if kind is None:
        return np.zeros(len(table), np.bool_)
    if operator == "^=":
        if not arrow().types.is_large_binary(kind):
            raise UsageError(f"column {name} has type {kind}: ^= needs text")
        masks = [compute.starts_with(table[name], encode(prefix)) for prefix in targets]
        return np.asarray(np.any([compute.fill_null(mask, False) for mask in masks], axis=0))
    bound, compare = _bound(condition, kind), _COMPARE[operator]
    if isinstance(bound, int | float):  # unlike Arrow, NumPy compares any two numbers
        known = np.asarray(compute.is_valid(table[name]))
        numbers = compute.fill_null(table[name], 0).to_numpy()
        return np.asarray(getattr(np, compare)(numbers, bound) & known)
    return np.asarray(compute.fill_null(getattr(compute, compare)(table[name], bound), False))


def column_type(table: Any, name: str) -> Any:
    """Return the type of a column; None if it is missing or all null."""
    kind = table[name].type if name in table.column_names else None
    return None if kind is None or arrow().types.is_null(kind) else kind


def _bound(condition: Condition, kind: Any) -> Any:
    """Return the bound of a range: a number for a column of numbers, else an Arrow scalar."""
    types, (value,) = arrow().types, condition.values
    if types.is_integer(kind) or types.is_floating(kind):
        number: Any = value if isinstance(value, str | Real) else None
        for parse in () if isinstance(value, bool) else (int, float):
            with suppress(TypeError, ValueError, OverflowError):
                if isinstance(number, str) or parse(number) == number:
                    return max(-_MAX_BOUND, min(parse(number), _MAX_BOUND))
        _raise_type(condition, kind, [value])
    if types.is_boolean(kind) or (types.is_large_binary(kind) and not isinstance(value, str)):
        _raise_type(condition, kind, [value])
    return _cast(condition, kind)[0]


def _cast(condition: Condition, kind: Any) -> Any:
    """Return an array of the values of a condition in a column's type."""
    pa, targets = arrow(), condition.values
    if pa.types.is_large_binary(kind):
        return pa.array([None if one is None else encode(str(one)) for one in targets], kind)
    arrays, invalid = [pa.array([], kind)], list[Any]()
    for target in targets:
        try:
            arrays.append(pa.array([target]).cast(kind))  # parses text of the command line
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            invalid.append(target)
    if invalid:
        _raise_type(condition, kind, invalid)
    return pa.concat_arrays(arrays)


def _raise_type(condition: Condition, kind: Any, invalid: Sequence[Any]) -> NoReturn:
    kind = "text" if arrow().types.is_large_binary(kind) else kind
    raise UsageError(
        f"column {condition.column} has type {kind}, got {join_first(map(format_value, invalid))}"
    )


def _suggest(table: Any, condition: Condition) -> str:
    """Return a similar value, if there are not too many values to compare."""
    unique = values(table[condition.column].unique())
    texts = [value for value in unique if isinstance(value, str)]
    if not texts or len(texts) > 10_000 or condition.values[0] is None:
        return ""
    hint = suggest(str(condition.values[0]), sorted(texts))
    return "" if hint == "." else hint
