"""What is known of the images in a gallery: an Arrow table, and which rows `where` means.

Texts are kept as bytes: names of files and folders need not be UTF-8.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError, closest, need, shown, some
from proximetry.data import Catalog
from proximetry.data.registry import FIELDS
from proximetry.data.shards import SEPARATOR, split_shard_path
from proximetry.search.manifest import DamagedGalleryError

STAMP = ("_size", "_modified")
"""Hidden columns: size and time of modification of each file when it was embedded."""
# Names that results and galleries use themselves.
_RESERVED = ("id", "similarity", "score", *STAMP)

Mask = npt.NDArray[np.bool_]
Where = Mapping[str, Any]
"""By column, the value that is wanted, or several of which one is."""


def arrow(module: str = "pyarrow") -> Any:
    """Import pyarrow or a part of it."""
    return need(module, "search", "A gallery")


def make_rows(
    images: Catalog | Iterable[str | os.PathLike[str]], labels: Sequence[str | None] | None = None
) -> Any:
    """Return the table of the images of a catalogue, or of image files and their classes."""
    if isinstance(images, Catalog):
        if labels is not None:
            raise UsageError("labels are for lists of files; a catalogue has its own")
        given = {column: getattr(images, field) for column, field in FIELDS.items()}
        columns = {name: values for name, values in given.items() if values is not None}
        columns |= images.columns
        columns["path"] = [images.file(row) for row in range(len(images))]
    elif isinstance(images, str | os.PathLike):
        raise UsageError(f"images must be a catalogue or a list of files, got {images}")
    else:
        columns = {"path": [os.fspath(image) for image in images]}
        if labels is not None:
            columns["label"] = [*labels]
            count = len(columns["path"])
            if isinstance(labels, str) or len(columns["label"]) != count:
                raise UsageError(f"labels must be a list of {count} classes, one for each file")
    return table({**columns, "path": [absolute(path) for path in columns["path"]]})


def absolute(path: str) -> str:
    """Make a path absolute; the name of a shard's member stays as it is in the shard."""
    file, member = split_shard_path(path)
    folder, name = os.path.split(file)
    if os.pardir in folder.split(os.sep):  # above a symbolic link lies what it points into
        file = os.path.join(os.path.realpath(folder), name)
    file = os.path.abspath(file)
    return f"{file}{SEPARATOR}{member}" if member else file


def table(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return columns as rows of a gallery; path and label are always among them."""
    pa = arrow()
    for name in columns:
        if name in _RESERVED:
            raise UsageError(
                f"the images have a column {name!r}, which galleries use themselves; rename it"
            )
    arrays = {name: _array(values, name in FIELDS) for name, values in columns.items()}
    if "label" not in arrays:
        arrays["label"] = pa.nulls(len(columns["path"]), pa.large_binary())
    return pa.table(arrays)


def _array(values: Sequence[Any], ours: bool) -> Any:
    pa = arrow()
    if not ours and all(value is None for value in values):
        return pa.nulls(len(values))  # which fits whatever the column holds elsewhere
    if any(isinstance(value, str) for value in values) or all(value is None for value in values):
        values = [value if value is None else str(value) for value in values]
        raw = [None if value is None else _encode(value) for value in values]
        return pa.array(raw, pa.large_binary())
    if any(isinstance(value, float) for value in values):
        return pa.array(values, pa.float64())
    return pa.array(values)


def with_stamps(table: Any, stamps: Sequence[tuple[int, int] | None]) -> Any:
    """Add size and time of modification of each file, null where they are not known."""
    pa = arrow()
    for number, name in enumerate(STAMP):
        column = [stamp and stamp[number] for stamp in stamps] or [None] * len(table)
        table = table.append_column(name, pa.array(column, pa.int64()))
    return table


def below(table: Any, folder: str) -> Mask:
    """Say which paths lie below a folder."""
    compute = arrow("pyarrow.compute")
    return np.asarray(compute.starts_with(table["path"], _encode(os.path.join(folder, ""))))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def stack(tables: Sequence[Any]) -> Any:
    """Put tables under each other; what a column has no value for is null."""
    pa = arrow()
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"the columns do not fit those of the gallery: {error}") from error


def check_fits(tables: Sequence[Any], more: Any) -> None:
    """Refuse columns that hold text here and numbers there: no file could hold them together."""
    pa = arrow()
    for name in more.column_names:
        for rows in tables:
            if name in rows.column_names:
                kinds = [rows.schema.field(name), more.schema.field(name)]
                try:
                    pa.unify_schemas(
                        [pa.schema([kind]) for kind in kinds], promote_options="permissive"
                    )
                except pa.ArrowTypeError:
                    told = ["text" if pa.types.is_large_binary(k.type) else k.type for k in kinds]
                    raise UsageError(
                        f"column {name} holds {told[0]} in the gallery and {told[1]} in these "
                        "images; give it another name"
                    ) from None


def write(rows: Any, stream: Any) -> None:
    """Write a table, for `read`."""
    ipc = arrow("pyarrow.ipc")
    with ipc.new_file(stream, rows.schema) as writer:
        writer.write_table(rows)


def read(file: Path) -> Any:
    """Open a memory-mapped table, after checking that no value lies outside of it."""
    pa, ipc = arrow(), arrow("pyarrow.ipc")
    try:
        table = ipc.open_file(pa.memory_map(os.fsencode(file))).read_all()
        table.validate(full=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # Arrow raises anything for damaged files
        raise DamagedGalleryError(file, error) from error
    return table


def values(column: Any) -> list[Any]:
    """Return a column as Python values, bytes as text."""
    return [
        value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
        for value in column.to_pylist()
    ]


def contains(column: Any, wanted: Any) -> Mask:
    """Say of each value whether it is among those wanted, given as an array of its type."""
    compute = arrow("pyarrow.compute")
    return np.asarray(compute.is_in(column, value_set=wanted))


def select(tables: Sequence[Any], where: Where) -> list[Mask]:
    """Say which rows of each table meet every condition; at least one row does."""
    known = dict.fromkeys(name for rows in tables for name in rows.column_names)
    masks = [np.ones(len(rows), np.bool_) for rows in tables]
    for name, value in where.items():
        if name not in known:
            raise UsageError(f"the gallery has no column {shown(name)}{closest(name, known)}")
        wanted = wanted_values(name, value)
        _check_kinds(tables, name, wanted)
        met = [_meets(rows, name, wanted) for rows in tables]
        if not any(mask.any() for mask in met):
            told = some([shown(one) for one in wanted])
            raise UsageError(
                f"no image of the gallery has {name} {told}{_nearest(tables, name, wanted)}"
            )
        masks = [mask & more for mask, more in zip(masks, met, strict=True)]
    return masks


def wanted_values(name: str, value: Any) -> list[Any]:
    """The values that a condition of `where` asks for."""
    alone = isinstance(value, str | bytes) or not isinstance(value, Iterable)
    wanted = [value] if alone else [*value]
    if not wanted:
        raise UsageError(f"where asks for no value of {name}; give one, or leave {name} out")
    return wanted


def conditions(words: Iterable[str]) -> dict[str, list[str]]:
    """Read conditions that are written COLUMN=VALUE; of several for one column any will do."""
    found: dict[str, list[str]] = {}
    for word in words:
        column, sign, value = word.partition("=")
        if not sign or not column:
            raise UsageError(f"where {shown(word)} must be COLUMN=VALUE, such as label=jay")
        found.setdefault(column, []).append(value)
    return found


def column_type(rows: Any, name: str) -> Any:
    """The type of a column; None where there is none, or one without a single value."""
    kind = rows[name].type if name in rows.column_names else None
    return None if kind is None or arrow().types.is_null(kind) else kind


def _check_kinds(tables: Sequence[Any], name: str, wanted: list[Any]) -> None:
    """Refuse values that the column can hold in none of the tables."""
    kinds = [
        *dict.fromkeys(kind for rows in tables if (kind := column_type(rows, name)) is not None)
    ]
    strange = [one for one in wanted if kinds and not any(len(_cast([one], k)) for k in kinds)]
    if strange:
        raise UsageError(
            f"column {name} holds {some(map(str, kinds))}, which {some(map(shown, strange))} is not"
        )


def _cast(values: list[Any], kind: Any) -> Any:
    """Those of the values that a column's type can hold, as an array of it."""
    pa = arrow()
    if pa.types.is_large_binary(kind):
        return pa.array([None if one is None else _encode(str(one)) for one in values], kind)
    held = [pa.array([], kind)]
    for one in values:
        with suppress(pa.ArrowException, TypeError, ValueError):
            held.append(pa.array([one]).cast(kind))  # words of the command line are read as it
    return pa.concat_arrays(held)


def _meets(rows: Any, name: str, wanted: list[Any]) -> Mask:
    kind = column_type(rows, name)
    if kind is None:
        return np.full(len(rows), None in wanted)
    return contains(rows[name], _cast(wanted, kind))


def _nearest(tables: Sequence[Any], name: str, wanted: list[Any]) -> str:
    """Name the value that was probably meant, if there are few enough to look through."""
    pa = arrow()
    known: set[str] = set()
    for rows in tables:
        if name in rows.column_names and pa.types.is_large_binary(rows[name].type):
            known |= {value for value in values(rows[name].unique()) if value is not None}
        if len(known) > 10_000:
            return ""
    hint = closest(str(wanted[0]), sorted(known))
    return "" if hint == "." else hint
