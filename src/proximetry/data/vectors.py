"""A catalog of vectors with labels, read from .npz, .npy and .parquet files."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as arrow  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

from proximetry._util.errors import UsageError
from proximetry._util.files import read_json
from proximetry._util.formatting import format_value, join_first, shorten
from proximetry.data import FIELDS
from proximetry.data.catalog import Catalog
from proximetry.data.tables import MISSING, decode

SUFFIXES = (".npz", ".npy", ".parquet")
COLUMN = "vector"
# Field → names of its array or column; the first one is written.
_NAMES = {field: (field, column) for column, field in FIELDS.items()} | {
    "vectors": ("vectors", COLUMN, "embeddings", "embedding"),
    "labels": ("labels", "label", "class", "targets", "target", "y"),
}
_MAX_JSON_BYTES = 2_000_000_000


@dataclass(frozen=True, repr=False)
class VectorCatalog(Catalog):
    """A catalog whose rows are vectors instead of images.

    Attributes:
        vectors: float32 [rows, dim].
    """

    vectors: npt.NDArray[np.float32] = field(default=None, compare=False)  # type: ignore[arg-type]

    def subset(self, rows: Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Self:
        """Return these rows, by index or mask, in this order."""
        index = np.asarray(rows, dtype=None if len(rows) else np.int64)
        return replace(super().subset(rows), vectors=self.vectors[index])

    @property
    def has_paths(self) -> bool:
        """Whether rows have image paths."""
        return not self.root.is_file()  # paths are row numbers below the file of vectors

    @classmethod
    def from_arrays(
        cls,
        vectors: Any,
        labels: Iterable[Any] | None,
        *,
        splits: Iterable[Any] | None = None,
        queries: Iterable[Any] | None = None,
        galleries: Iterable[Any] | None = None,
        paths: Iterable[Any] | None = None,
        groups: Iterable[Any] | None = None,
        source: str = "vectors",
    ) -> VectorCatalog:
        """Create a catalog from arrays.

        Args:
            vectors: [N, dim], of numbers.
            labels: N classes, strings or numbers.
            splits: "train", "val" or "test" of each row.
            queries: which rows are queries, with `galleries`.
            galleries: which rows are in the gallery.
            paths: the image file of each row.
            groups: a coarser class of each row.
            source: name used in error messages.

        Examples:
            >>> catalog = VectorCatalog.from_arrays(np.eye(3), ["wren", "crow", "wren"])
            >>> len(catalog), catalog.class_names, catalog.vectors.dtype
            (3, ('crow', 'wren'), dtype('float32'))
        """
        root = Path(source)
        array = np.asarray(vectors)
        if array.ndim != 2 or array.dtype.kind not in "fiu" or 0 in array.shape:
            raise UsageError(
                f"{source}: vectors must be numbers [rows, dim], got {array.dtype} "
                f"{list(array.shape)}"
            )
        array = np.require(array, np.float32, ["C", "W"])  # torch requires writable memory
        bad = np.flatnonzero(~np.isfinite(array).all(1))
        if len(bad):
            raise UsageError(
                f"{source}: {len(bad)} vectors contain NaN or infinity, first in row {bad[0] + 1}"
            )
        if labels is None:
            raise UsageError(f"{source} has no labels. Add the class of each vector.")
        fields = {"labels": labels, "splits": splits, "queries": queries, "galleries": galleries}
        fields |= {"paths": paths, "groups": groups}
        columns = {name: list(values) for name, values in fields.items() if values is not None}
        for name, values in columns.items():
            if len(values) != len(array):
                raise UsageError(f"{source}: {len(values)} {name} for {len(array)} vectors")
        names = label_names(columns["labels"])
        missing = [str(row + 1) for row, label in enumerate(names) if label in MISSING]
        if missing:
            raise UsageError(f"{source}: no label in row {join_first(missing)}. Fill it in.")
        files = tuple(str(path) for path in columns.get("paths", ()))
        # Paths may be missing or repeated.
        if len(set(files)) == len(array):
            root = root.parent
        else:
            files = tuple(f"row {row + 1}" for row in range(len(array)))
        roles: dict[str, Any] = {
            name: tuple(map(read, columns[name]))
            for name, read in (("queries", _flag), ("galleries", _flag), ("groups", str))
            if name in columns
        }
        parts = tuple(str(split) for split in columns.get("splits", ["all"] * len(array)))
        try:
            return cls(files, names, parts, root, vectors=array, **roles)
        except ValueError as error:
            raise UsageError(f"{source}: {error}") from None

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> VectorCatalog:
        """Read a file of vectors: what `proximetry embed` writes, or other arrays.

        - .npz: arrays `vectors`, `labels`, optionally `splits`, `queries`, `galleries`, `paths`;
        - .npy: the vectors; `v.npy.json` beside `v.npy` holds lists of those names;
        - .parquet: columns `vector` (lists of one length), `label`, optionally `split`, `query`,
          `gallery`, `path`.

        Arrays and columns may also be called `embedding(s)` and `class`, `target(s)` or `y`.
        """
        path = Path(file)
        try:
            vectors, fields = _READERS[path.suffix.lower()](path)
        except KeyError:
            raise UsageError(f"{path} must end in {', '.join(SUFFIXES)}") from None
        except FileNotFoundError:
            raise UsageError(f"no such file: {path}") from None
        labels = fields.pop("labels", None)
        return cls.from_arrays(vectors, labels, source=str(path), **fields)


def rows_file(file: Path) -> Path:
    """Return the JSON file beside a .npy file that describes its rows."""
    return file.with_name(f"{file.name}.json")


def holds_vectors(file: Path) -> bool:
    """Return whether a file holds vectors, by its name and, for Parquet, by its columns.

    A Parquet file with paths is a table of images, unless it has a column `vector`.
    """
    if file.suffix.lower() != ".parquet":
        return file.suffix.lower() in SUFFIXES
    types = parquet_columns(file)
    name = _names_of(types).get("vectors")
    return name is not None and types[name] and (name == COLUMN or "path" not in types)


def is_vector_file(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is a file of vectors."""
    file = Path(source).expanduser()
    return file.is_file() and holds_vectors(file)


def parquet_columns(file: Path) -> dict[str, bool]:
    """Return the columns of a Parquet file and whether each holds lists; {} if it has none."""
    try:
        schema = parquet.read_schema(file)
    except (arrow.ArrowException, OSError, ValueError):  # reported when it is read
        return {}
    return {entry.name: arrow.types.is_nested(entry.type) for entry in schema}


def _names_of(present: Collection[str]) -> dict[str, str]:
    """Return the column of each field that a file has."""
    names = {field: [n for n in choices if n in present] for field, choices in _NAMES.items()}
    return {field: matches[0] for field, matches in names.items() if matches}


def label_names(labels: Iterable[Any]) -> tuple[str, ...]:
    """Return labels as strings: the number 7 is "7"."""
    plain = (label.item() if hasattr(label, "item") else label for label in labels)
    return tuple("" if label is None else str(label) for label in plain)


def read_rows(file: Path) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
    """Read the vectors of a file, and all its other columns by name; labels are optional."""
    if file.suffix.lower() == ".parquet":
        vectors, columns = _read_parquet_columns(file)
    elif file.suffix.lower() == ".npz":
        vectors = load_arrays(file)["vectors"]
        with np.load(file, allow_pickle=False) as arrays:
            other = [name for name in arrays.files if name not in _NAMES["vectors"]]
            columns = {name: arrays[name].tolist() for name in other}
    else:
        vectors, description = load_arrays(file)["vectors"], rows_file(file)
        columns = _read_lists(description) if description.exists() else {}
    singular = {name: column for column, field in FIELDS.items() for name in _NAMES[field]}
    columns = {singular.get(name, name): values for name, values in columns.items()}
    if columns.get("label") is not None:
        columns["label"] = [name or None for name in label_names(columns["label"])]
    no_labels = ["-"] * len(vectors)
    checked = VectorCatalog.from_arrays(vectors, no_labels, source=str(file)).vectors
    for name, values in columns.items():
        if len(values) != len(checked):
            raise UsageError(f"{file}: {len(values)} {name} for {len(checked)} vectors")
    for row, path in enumerate(columns.get("path", ())):
        if not isinstance(path, str | None):
            raise UsageError(
                f"{file}: the path of row {row + 1} must be text, got {format_value(path)}"
            )
    return checked, columns


def _flag(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    return bool(plain) if plain in (0, 1) else plain


def load_arrays(file: Path, *fields: str) -> dict[str, Any]:
    """Read the vectors of a .npy or .npz file, and those of `fields` that a .npz file has."""
    zipped, problem = file.suffix.lower() == ".npz", f"{file} is not a NumPy file of plain arrays"
    try:
        arrays = np.load(file, allow_pickle=False, mmap_mode="r")
        if isinstance(arrays, np.ndarray) == zipped:
            raise UsageError(f"{file} is a .np{'y' if zipped else 'z'} file. Rename it.")
        if not zipped:
            return {"vectors": arrays}
        with arrays:
            names = _names_of(arrays.files)
            for field in ("vectors", *({"labels"} & {*fields})):
                if field not in names:
                    raise UsageError(
                        f"{file} has no array {field!r}; it has {join_first(arrays.files)}"
                    )
            problem = f"{file}: an array cannot be read"
            return {field: arrays[names[field]] for field in ("vectors", *fields) if field in names}
    except FileNotFoundError:
        raise UsageError(f"no such file: {file}") from None
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # damaged files raise anything: zlib.error, tokenize.TokenError, …
        reason = shorten(str(error) or type(error).__name__, 200)
        raise UsageError(f"{problem}: {reason}") from error


def _read_arrays(file: Path) -> tuple[Any, dict[str, Any]]:
    fields, description = load_arrays(file, *FIELDS.values()), rows_file(file)
    vectors = fields.pop("vectors")
    if file.suffix.lower() == ".npz":
        return vectors, fields
    if not description.exists():
        raise UsageError(
            f"{file} has no labels: {description.name} is missing beside it, with a list of labels"
        )
    rows = _read_lists(description)
    return vectors, {name: rows[name] for name in FIELDS.values() if name in rows}


def _read_lists(description: Path) -> dict[str, list[Any]]:
    try:
        rows = read_json(description, _MAX_JSON_BYTES)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not isinstance(rows, dict) or not all(isinstance(v, list) for v in rows.values()):
        raise UsageError(f"{description} must hold lists: labels, optionally splits and paths")
    return rows


def _read_parquet(file: Path) -> tuple[Any, dict[str, Any]]:
    vectors, columns = _read_parquet_columns(file, "label")
    names = _names_of(columns)
    return vectors, {field: columns[name] for field, name in names.items()}


def _read_parquet_columns(file: Path, required: str = "") -> tuple[Any, dict[str, Any]]:
    """Return vectors and columns; with a required column, only those of `_NAMES`."""
    try:
        present = parquet.read_schema(file).names
        names = _names_of(present)
        for field, expected in (("vectors", COLUMN), ("labels", required)):
            if expected and field not in names:
                raise UsageError(f"{file} has no column {expected!r}; it has {join_first(present)}")
        table = parquet.read_table(file, columns=[*names.values()] if required else None)
        column = table[names["vectors"]].combine_chunks()
        sizes = {len(row) if row is not None else 0 for row in column}
        if len(sizes) != 1:
            raise UsageError(f"{file}: the vectors have {len(sizes)} different lengths")
        flat = column.flatten().to_numpy(zero_copy_only=False)
        columns = {
            # Text that is not UTF-8 is bytes in Parquet.
            name: [decode(v) if isinstance(v, bytes) else v for v in table[name].to_pylist()]
            for name in table.column_names
            if name != names["vectors"]
        }
    except (arrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UsageError | FileNotFoundError):
            raise
        raise UsageError(f"{file} is not a readable Parquet file: {error}") from error
    return np.asarray(flat).reshape(len(column), sizes.pop()), columns


_READERS = {".npz": _read_arrays, ".npy": _read_arrays, ".parquet": _read_parquet}
