"""The catalog: an immutable, validated table of images."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from proximetry._util.errors import suggest
from proximetry._util.formatting import join_first
from proximetry._util.types import Progress
from proximetry.data import FIELDS
from proximetry.data.folders import (
    SEPARATOR,
    layout,
    scan_folder,
    scan_names,
    scan_shards,
    shard_members,
    split_shard_path,
)
from proximetry.data.recordio import Records, find_records, scan_records
from proximetry.data.suggestions import read_suggestions
from proximetry.data.tables import (
    TEXT,
    Column,
    dictionary_column,
    duplicate_rows,
    pack,
    read_csv,
    read_parquet,
    write_csv,
    write_parquet,
)

SPLITS = ("all", "train", "val", "test")

AnyPath: TypeAlias = "str | os.PathLike[str]"
_CATEGORICAL = ("labels", "splits", "groups")
_FLAGS = ("query", "gallery")
# File names that are not UTF-8 have surrogates from U+DC80 to U+DCFF (surrogateescape).
_INVALID_FILE_NAME = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
_MAX_PROBLEMS = 5  # problems in an error message
_PROGRESS_EVERY = 1000  # files


@dataclass(frozen=True, repr=False)
class Catalog:
    """Immutable, validated table of images, their classes and their roles.

    Columns read like tuples; they are stored as pyarrow arrays.

    Attributes:
        paths: relative to `root`, or absolute; "shard.tar::member" for an image in a tar shard,
            "train.rec::1" in a .rec file.
        labels: class names.
        splits: "train", "val" or "test"; "all" for images without a split.
        root: the folder of relative paths.
        queries: which images are queries, if the dataset defines them (In-Shop).
        galleries: which images are in the gallery, likewise.
        groups: anything coarser than a class, such as the kind of product.
        notes: warnings from reading the data, such as missing images.
        layout: the classes and splits that were inferred, if any.
        columns: extra metadata for galleries by name: text, numbers, flags, or None.

    Examples:
        >>> catalog = Catalog(
        ...     paths=["a.jpg", "b.jpg", "c.jpg"],
        ...     labels=["wren", "wren", "crow"],
        ...     splits=["train", "train", "test"],
        ... )
        >>> catalog.class_names, catalog.codes.tolist()
        (('crow', 'wren'), [1, 1, 0])
        >>> catalog.filter(split="train").paths
        ('a.jpg', 'b.jpg')
    """

    paths: Sequence[str]
    labels: Sequence[str]
    splits: Sequence[str]
    root: Path = Path()
    queries: Sequence[bool] | None = None
    galleries: Sequence[bool] | None = None
    groups: Sequence[str] | None = None
    notes: tuple[str, ...] = ()
    layout: str = field(default="", compare=False)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in FIELDS.values():
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, pack(values, categorical=name in _CATEGORICAL))
        object.__setattr__(self, "root", Path(self.root))
        object.__setattr__(self, "notes", tuple(self.notes))
        columns = {name: pack(values) for name, values in self.columns.items()}
        object.__setattr__(self, "columns", columns)
        _validate(self)

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return (
            f"Catalog({len(self)} images, {len(self.class_names)} classes, root={str(self.root)!r})"
        )

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The distinct labels in sorted order, integers by value; their index is the code."""
        return cast(Column, self.labels).distinct

    @cached_property
    def codes(self) -> npt.NDArray[np.int64]:
        """The class index of every image, 0 … classes − 1."""
        codes = cast(Column, self.labels).codes.astype(np.int64)
        codes.flags.writeable = False
        return codes

    def rows(self, *splits: str) -> npt.NDArray[np.int64]:
        """Return the row numbers of these splits."""
        return np.flatnonzero(cast(Column, self.splits).isin(splits))

    def file(self, i: int) -> str:
        """Return the full path of one image, ready for `open_image`."""
        return os.path.join(self.root, self.paths[i])

    def subset(self, rows: Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Self:
        """Return these rows, by index or mask, in this order."""
        indices = np.arange(len(self))[np.asarray(rows, dtype=None if len(rows) else np.int64)]
        new_fields = {
            name: values.take(indices)
            if isinstance(values, Column)
            else tuple(values[row] for row in indices.tolist())
            for name, values in self._columns().items()
        }
        changes: dict[str, Any] = {"columns": {name: new_fields.pop(name) for name in self.columns}}
        changes |= {FIELDS[name]: values for name, values in new_fields.items()}
        if np.bincount(indices).max(initial=0) > 1:
            return replace(self, **changes)  # raises
        # Rows of a valid catalog need no validation.
        part = object.__new__(type(self))
        same = {item.name: getattr(self, item.name) for item in fields(self)}
        part.__dict__.update(same | changes)
        return part

    def filter(
        self,
        *,
        split: str | None = None,
        labels: Iterable[str] | None = None,
        group: str | None = None,
        query: bool | None = None,
        gallery: bool | None = None,
    ) -> Catalog:
        """Return the rows that match all conditions."""
        if split is not None and split not in SPLITS:
            raise ValueError(f"unknown split {split!r}{suggest(split, SPLITS)}")
        mask = np.ones(len(self), bool)
        if labels is not None:
            names = {labels} if isinstance(labels, str) else set(labels)
            if unknown := sorted(names - set(self.class_names)):
                raise ValueError(f"unknown class: {join_first(map(repr, unknown))}")
            mask &= cast(Column, self.labels).isin(names)
        conditions = {"split": split, "group": group, "query": query, "gallery": gallery}
        for name, value in conditions.items():
            if value is not None:
                if (column := getattr(self, FIELDS[name])) is None:
                    raise ValueError(f"this catalog has no {name} column to filter by")
                mask &= np.asarray(column) == value
        return self.subset(mask)

    def split_classes(
        self,
        parts: float | Sequence[float] | Sequence[int],
        *,
        seed: int = 0,
        names: Sequence[str] = ("train", "test"),
    ) -> tuple[Catalog, ...]:
        """Split into parts with disjoint classes, for instance to hold out classes.

        Args:
            parts: the first part's fraction of the classes (0.8), all fractions ((0.6, 0.2, 0.2))
                or all numbers of classes ((98, 98)).
            seed: seed of the random assignment, which does not depend on the order of the rows.
            names: the split of each part.

        Examples:
            >>> letters = Catalog(["1.png", "2.png", "3.png"], list("abc"), ["all"] * 3)
            >>> [part.labels for part in letters.split_classes((2, 1))]
            [('a', 'c'), ('b',)]
        """
        counts = _class_counts(parts, len(self.class_names))
        if len(names) != len(counts):
            raise ValueError(f"{len(counts)} parts need {len(counts)} names, got {tuple(names)}")
        order = np.random.default_rng(seed).permutation(len(self.class_names))
        part_of = np.repeat(np.arange(len(counts)), counts)[np.argsort(order)]
        pieces = [self.subset(part_of[self.codes] == part) for part in range(len(names))]
        return tuple(
            replace(piece, splits=(name,) * len(piece))
            for piece, name in zip(pieces, names, strict=True)
        )

    def apply_suggestions(self, file: AnyPath) -> Self:
        """Return the catalog with the suggestions of a CSV file: drop, relabel or move images.

        `proximetry check` and the search page write such files; edit them as you like. Columns:
        path (as in `paths`, or in full), action ("drop", "relabel", "move" or "keep"), label,
        split. Image files do not change.
        """
        rows = {path: row for row, path in enumerate(self.paths)}
        labels, splits, dropped = [*self.labels], [*self.splits], set[int]()
        counts, changed = Counter[str](), set[int]()
        for number, suggestion in enumerate(read_suggestions(Path(file)), 1):
            row, path = rows.get(suggestion.path), f"{suggestion.path!r} (row {number})"
            if os.path.isabs(suggestion.path) and row is None:
                row = rows.get(os.path.relpath(suggestion.path, self.root))
            if row is None:
                raise ValueError(f"{file}: no image {path} in {self.root}. Check the images again.")
            if row in changed:
                raise ValueError(f"{file}: two suggestions for {path}. Remove one.")
            changed.add(row)
            counts[suggestion.action] += 1
            if suggestion.action == "drop":
                dropped.add(row)
            elif suggestion.action == "relabel":
                labels[row] = suggestion.label
            elif suggestion.action == "move":
                splits[row] = suggestion.split
        done = ", ".join(f"{action} {count}" for action, count in counts.items()) or "none"
        note = f"suggestions applied from {os.fspath(file)}: {done}"
        try:
            part = replace(self, labels=labels, splits=splits, notes=(*self.notes, note))
        except ValueError as error:
            raise ValueError(f"{os.fspath(file)}: {error}") from None
        return part.subset([row for row in range(len(self)) if row not in dropped])

    def missing_files(self) -> list[int]:
        """Return the rows whose file or shard member does not exist."""
        return [i for i in range(len(self)) if _identity(self.file(i)) is None]

    def shared_classes(self) -> list[str]:
        """Describe the classes that splits have in common."""
        images, notes = self._images_of_splits, []
        for a, b in combinations(images, 2):
            if shared := self._named((images[a] > 0) & (images[b] > 0)):
                count = f"{len(shared)} class{'es' if len(shared) > 1 else ''}"
                notes.append(
                    f"{a} and {b} share {count}, so {b} does not measure unseen classes only: "
                    f"{join_first(shared)}"
                )
        return notes

    @cached_property
    def _images_of_splits(self) -> dict[str, npt.NDArray[np.int64]]:
        """The number of images of each class by split, in the order of `SPLITS`."""
        codes = cast(Column, self.labels).codes
        rows = {split: cast(Column, self.splits).isin((split,)) for split in SPLITS}
        return {
            split: np.bincount(codes[mask], minlength=len(self.class_names))
            for split, mask in rows.items()
            if mask.any()
        }

    def _named(self, classes: npt.NDArray[np.bool_]) -> list[str]:
        return [self.class_names[code] for code in classes.nonzero()[0].tolist()]

    def remarks(self) -> list[str]:
        """Return `layout` and `notes`, which every command prints."""
        return [self.layout, *self.notes] if self.layout else [*self.notes]

    def describe(self) -> str:
        """Summarize the numbers of images and classes by split, in a few lines."""
        parts = self._images_of_splits
        totals = {"total": np.bincount(self.codes)} if len(parts) > 1 else {}
        table: list[tuple[object, ...]] = [
            ("split", "images", "classes", "smallest", "median", "largest")
        ]
        for name, images in (parts | totals).items():
            n = images[images > 0].tolist()
            table.append((name, sum(n), len(n), min(n), f"{median(n):g}", max(n)))
        lines = [f"{len(self)} images of {len(self.class_names)} classes in {self.root}"]
        lines += [f"{row[0]:8}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in table]
        for a, b in combinations(parts, 2):
            if not ((parts[a] > 0) & (parts[b] > 0)).any():
                lines.append(f"{a} and {b} share no class")
        if self.queries is not None and self.galleries is not None:
            lines.append(f"{sum(self.queries)} queries, {sum(self.galleries)} gallery images")
        if self.groups is not None:
            lines.append(f"{len(cast(Column, self.groups).distinct)} groups")
        lines += [f"note: {note}" for note in dict.fromkeys((*self.notes, *self.shared_classes()))]
        return "\n".join([self.layout, *lines] if self.layout else lines)

    @classmethod
    def from_folder(cls, root: AnyPath, *, labels_from_name: str | None = None) -> Catalog:
        """Read a folder of folders: every sub-folder is a class, with all images below it.

        Sub-folders called train, val or test that contain folders are splits, and their sub-folders
        the classes. Skipped files and folders are listed in `layout` and `notes`.

        Args:
            root: the folder.
            labels_from_name: read classes from file names instead: "auto" for the text before the
                last separator and number (boxer in boxer_12.jpg), or a regular expression whose
                first group is the class.

        Examples:
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as folder:
            ...     for name in ("crow/1.jpg", "wren/1.jpg", "wren/2.jpg"):
            ...         (Path(folder) / name).parent.mkdir(exist_ok=True)
            ...         (Path(folder) / name).touch()
            ...     Catalog.from_folder(folder).labels
            ('crow', 'wren', 'wren')
        """
        rule, path = labels_from_name, Path(root)
        scan = scan_folder(path) if rule is None else scan_names(path, rule)
        return cls(root=path, **scan._asdict())

    @classmethod
    def from_shards(cls, files: AnyPath | Sequence[AnyPath]) -> Catalog:
        """Read tar files that contain ``<class>/<image>``, without unpacking them.

        `files` may also be one tar file, or a folder of them. A class may span several shards. The
        class is the folder of the image; folders train, val and test around it are the splits.
        """
        if isinstance(files, str | os.PathLike):
            path = Path(files)
            files = sorted(path.glob("*.tar")) if path.is_dir() else [path]
        root, scan = scan_shards([Path(file) for file in files])
        return cls(root=root, **scan._asdict())

    @classmethod
    def from_records(cls, path: AnyPath) -> Catalog:
        """Read a training set of InsightFace: a .rec file, or a folder with train.rec.

        The .idx file must lie beside it. Classes are the numbers of the identities.
        """
        file = find_records(Path(path))
        records = cast(Records, shard_members(file))
        numbers, identities, notes = scan_records(records)
        names, codes = np.unique(identities, return_inverse=True)
        prefix = pa.scalar(os.fsencode(f"{file.name}{SEPARATOR}"), TEXT)
        texts = pa.array(numbers).cast(pa.large_string()).cast(TEXT)
        return cls(
            paths=Column(pc.binary_join_element_wise(prefix, texts, pa.scalar(b"", TEXT))),
            labels=dictionary_column([str(name) for name in names.tolist()], codes),
            splits=dictionary_column(["all"], np.zeros(len(numbers), np.int64)),
            root=file.parent,
            notes=tuple(notes),
            layout=f"images: {len(names)} classes in {file.name}",
        )

    @classmethod
    def from_csv(
        cls,
        file: AnyPath,
        root: AnyPath | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        check_files: bool = True,
        allow_missing: bool = False,
        progress: Progress | None = None,
    ) -> Catalog:
        """Read a comma-separated table with a header line.

        Columns: path, label; optional split, query, gallery, group. Others become `columns`:
        numbers if all of their values are numbers, else text; None for empty cells.

        Args:
            file: the table.
            root: the folder of relative paths; the folder of the table by default.
            columns: names of the columns in the table if they differ, such as
                {"path": "file", "label": "category"}.
            check_files: check that every image exists and is listed once.
            allow_missing: keep images that do not exist.
            progress: called with (images checked, total).
        """
        values = read_csv(Path(file), columns)
        return cls._from_table(values, file, root, check_files, allow_missing, progress)

    @classmethod
    def from_parquet(
        cls,
        file: AnyPath,
        root: AnyPath | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        check_files: bool = True,
        allow_missing: bool = False,
        progress: Progress | None = None,
    ) -> Catalog:
        """Read a Parquet table, with the arguments of `from_csv`.

        Extra columns keep their types. Labels of any type become text: integers as 7, even if
        stored as 7.0, booleans as True and False, categories as their values.
        """
        values = read_parquet(Path(file), columns)
        return cls._from_table(values, file, root, check_files, allow_missing, progress)

    @classmethod
    def _from_table(
        cls,
        values: Mapping[str, Any],
        file: AnyPath,
        root: AnyPath | None,
        check_files: bool,
        allow_missing: bool,
        progress: Progress | None,
    ) -> Catalog:
        try:
            catalog = cls(root=Path(file).parent if root is None else Path(root), **values)
            if check_files:
                _check_files(catalog, allow_missing, progress)
        except ValueError as error:
            raise ValueError(f"{os.fspath(file)}: {error}") from None
        classes = [
            ("" if split == "all" else split, name)
            for split, images in catalog._images_of_splits.items()
            for name in catalog._named(images > 0)
        ]
        extra = f"; extra columns, used only for search: {join_first(catalog.columns)}"
        about = layout(classes) + (extra if catalog.columns else "")
        object.__setattr__(catalog, "layout", about)  # `replace` would validate all rows again
        return catalog

    def to_csv(self, file: AnyPath) -> None:
        """Write the table for `from_csv`; paths stay relative to `root`."""
        write_csv(Path(file), self._columns())

    def to_parquet(self, file: AnyPath) -> None:
        """Write the table for `from_parquet`; paths stay relative to `root`."""
        write_parquet(Path(file), self._columns())

    def _columns(self) -> dict[str, Sequence[Any]]:
        used = {c: values for c, f in FIELDS.items() if (values := getattr(self, f)) is not None}
        return {**used, **self.columns}


def _class_counts(parts: float | Sequence[float], classes: int) -> list[int]:
    shares: list[float] = [parts, 1 - parts] if isinstance(parts, float | int) else list(parts)
    if all(isinstance(s, int) for s in shares):
        if sum(shares) != classes or min(shares, default=0) < 1:
            raise ValueError(f"class counts {tuple(shares)} must be positive and sum to {classes}")
        return [int(s) for s in shares]
    if min(shares) <= 0 or not math.isclose(sum(shares), 1):
        raise ValueError(f"fractions must be positive and sum to 1, got {parts}")
    if classes < len(shares):
        raise ValueError(f"{classes} classes cannot be split into {len(shares)} parts")
    edges = [round(classes * sum(shares[: i + 1])) for i in range(len(shares))]
    # Rounding must not leave a part empty.
    for i in range(len(edges) - 1):
        edges[i] = min(max(edges[i], (edges[i - 1] if i else 0) + 1), classes - len(edges) + i + 1)
    return [b - a for a, b in zip([0, *edges], edges, strict=False)]


def _identity(path: str) -> tuple[object, ...] | None:
    """Return a value that is equal for all paths of an image; None if it does not exist."""
    file, member = split_shard_path(path)
    try:
        status = os.stat(file)
        if member and member not in shard_members(file):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # reported when it is opened
        return (file, member)
    return (status.st_dev, status.st_ino, member)


def _check_files(catalog: Catalog, allow_missing: bool, progress: Progress | None) -> None:
    """Raise a ValueError for images that do not exist or are listed under two paths."""
    total, missing = len(catalog), []
    keys = np.zeros(total, np.int64)  # hashes: identities of millions of files take much memory
    for i, path in enumerate(catalog.paths):
        identity = _identity(os.path.join(catalog.root, path))
        keys[i] = hash(identity) if identity is not None else hash((None, i))
        if identity is None:
            missing.append(i)
        if progress is not None and i % _PROGRESS_EVERY == _PROGRESS_EVERY - 1:
            progress(i + 1, total)
    if missing and not allow_missing:
        names = join_first([f"{catalog.paths[i]!r} (row {i + 1})" for i in missing])
        hint = ". Skip them with --data.bad-images skip." if len(missing) < total else ""
        raise ValueError(
            f"{len(missing)} of {total} images do not exist below {catalog.root}: {names}{hint}"
        )
    # Hard links may be intended; two paths of one file are not.
    first_rows: dict[str, int] = {}
    for i in duplicate_rows(keys).tolist():
        file, member = split_shard_path(catalog.file(i))
        first = first_rows.setdefault(f"{os.path.realpath(file)}{SEPARATOR}{member}", i)
        if first != i:
            raise ValueError(
                f"row {i + 1}, column path: {catalog.paths[i]!r} is the image of row {first + 1}, "
                f"{catalog.paths[first]!r}. List every image once."
            )


def _validate(catalog: Catalog) -> None:
    """Raise one error that lists the first invalid rows, columns and values."""
    size = len(catalog.paths)
    for name in catalog.columns:
        if name in FIELDS:
            raise ValueError(f"columns has {name!r}, which is a field: {FIELDS[name]}. Rename it.")
        if _problem("label", name):
            raise ValueError(f"invalid name of a column: {name!r}. Rename it.")
    for column, values in catalog._columns().items():
        if len(values) != size:
            name = FIELDS.get(column, column)
            raise ValueError(f"{name} has {len(values)} entries, paths has {size}")
    if (catalog.queries is None) != (catalog.galleries is None):
        raise ValueError("query without gallery, or the reverse. Pass both columns or neither.")
    problems = list(_problems(catalog))
    lines = [
        f"row {row + 1}, column {column}: {catalog._columns()[column][row]!r} {problem}"
        for row, column, problem in problems[:_MAX_PROBLEMS]
    ]
    if len(problems) > _MAX_PROBLEMS:
        lines.append(f"and {len(problems) - _MAX_PROBLEMS} more")
    if lines:
        raise ValueError("; ".join(lines))


def _problems(catalog: Catalog) -> Iterator[tuple[int, str, str]]:
    """Yield row, column and reason of invalid values."""
    for column, values in catalog._columns().items():
        rows: Iterable[int] = range(len(values))
        if isinstance(values, Column):
            kind, complete = values.array.type, not values.array.null_count
            if pa.types.is_dictionary(kind):
                invalid = {text for text in values.distinct if _problem(column, text)}
                rows = np.flatnonzero(values.isin(invalid)).tolist()
            elif column == "path" and kind == TEXT and complete:
                zero = pa.compute.match_substring(values.array, "\0")
                empty = pa.compute.equal(pa.compute.binary_length(values.array), 0)
                rows = np.flatnonzero(pa.compute.or_(zero, empty)).tolist()
            elif column not in FIELDS or (column in _FLAGS and complete and kind == pa.bool_()):
                rows = ()  # the type of the array is enough
        for row in rows:
            if problem := _problem(column, values[row]):
                yield row, column, problem
    if isinstance(catalog.paths, Column):
        # A duplicate image would be its own nearest neighbor.
        hashes = np.fromiter(map(hash, catalog.paths), np.int64, len(catalog))
        rows = duplicate_rows(hashes).tolist()
        counts = Counter(catalog.paths[row] for row in rows)
        for row in rows:
            if counts[catalog.paths[row]] > 1:
                yield row, "path", f"is listed {counts[catalog.paths[row]]} times"


def _problem(column: str, value: Any) -> str:
    """Return why a value cannot be in a column; "" if it can."""
    if column == "split":
        return "" if value in SPLITS else f"is not one of {', '.join(SPLITS)}"
    if column in _FLAGS:
        return "" if isinstance(value, bool) else "is neither true nor false"
    if column in FIELDS:
        text = isinstance(value, str) and (value or column == "group")
        return "" if text and not _INVALID_FILE_NAME.search(value) else "is not valid text"
    valid = (
        value is None
        or (isinstance(value, str) and not _INVALID_FILE_NAME.search(value.replace("\0", "")))
        or (isinstance(value, int) and -(2**63) <= value < 2**63)
        or (isinstance(value, float) and math.isfinite(value))
    )
    return "" if valid else "is neither text nor a number"
