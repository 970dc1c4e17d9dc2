"""The catalogue: one checked, unchanging table that says which images there are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proximetry._common import closest, some
from proximetry.data.checks import SPLITS, Box, check
from proximetry.data.folders import scan_folder
from proximetry.data.tables import read_csv, read_parquet, write_csv, write_parquet
from proximetry.data.tar_members import is_shard_path, shard_members, split_shard_path


class Row(NamedTuple):
    """One image: where it is, what it shows, what it is for."""

    path: str
    label: str
    split: str
    query: bool | None
    gallery: bool | None
    group: str | None
    box: Box | None


@dataclass(frozen=True)
class Catalog:
    """Images, their classes and their roles; built once, checked, never changed.

    Attributes:
        paths: relative to `root` (absolute ones stay as they are); "shard.tar::member" for an
            image inside a tar shard.
        labels: class names.
        splits: "train", "val" or "test"; "all" for images that are not divided yet.
        root: the folder that relative paths start from.
        queries, galleries: roles in retrieval, for sets that prescribe them (In-Shop).
        groups: anything coarser than a class, such as the kind of product.
        boxes: x, y, width and height of the object in pixels; None where unknown.
        notes: what the reader of the data has to say, such as missing images.
    """

    paths: tuple[str, ...]
    labels: tuple[str, ...]
    splits: tuple[str, ...]
    root: Path = field(default=Path("."))
    queries: tuple[bool, ...] | None = None
    galleries: tuple[bool, ...] | None = None
    groups: tuple[str, ...] | None = None
    boxes: tuple[Box | None, ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))
        for name in (*_COLUMNS, "notes"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, tuple(value))
        check(self, _COLUMNS)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(len(self)))

    def row(self, i: int) -> Row:
        """Return one line of the table."""
        return Row(
            self.paths[i],
            self.labels[i],
            self.splits[i],
            None if self.queries is None else self.queries[i],
            None if self.galleries is None else self.galleries[i],
            None if self.groups is None else self.groups[i],
            None if self.boxes is None else self.boxes[i],
        )

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The distinct labels in sorted order; a class's code is its place here."""
        return tuple(sorted(set(self.labels)))

    @cached_property
    def codes(self) -> npt.NDArray[np.int64]:
        """The class of every image as a number, 0 … classes − 1."""
        place = {name: i for i, name in enumerate(self.class_names)}
        codes = np.array([place[label] for label in self.labels], dtype=np.int64)
        codes.flags.writeable = False
        return codes

    def file(self, i: int) -> str:
        """Return the full path of one image, ready for `open_image`."""
        # os.path.join leaves absolute paths alone.
        return os.path.join(self.root, self.paths[i])

    def subset(
        self, rows: Sequence[int] | npt.NDArray[np.integer] | npt.NDArray[np.bool_]
    ) -> Catalog:
        """Return the given rows, by number or by a mask, in the order given."""
        chosen = np.asarray(rows)
        if chosen.dtype == np.bool_:
            if chosen.shape != (len(self),):
                raise ValueError(f"a mask needs {len(self)} entries, got shape {chosen.shape}")
            chosen = np.flatnonzero(chosen)
        elif chosen.size and not np.issubdtype(chosen.dtype, np.integer):
            raise ValueError(f"rows must be whole numbers or a mask, got {chosen.dtype}")
        if chosen.size and not (-len(self) <= chosen.min() and chosen.max() < len(self)):
            raise ValueError(
                f"rows run from 0 to {len(self) - 1}, got {chosen.min()} … {chosen.max()}"
            )
        picks = chosen.astype(np.int64).tolist()
        columns: dict[str, Any] = {
            name: tuple(values[i] for i in picks)
            for name in _COLUMNS
            if (values := getattr(self, name)) is not None
        }
        return replace(self, **columns)

    def filter(
        self,
        *,
        split: str | None = None,
        labels: Iterable[str] | None = None,
        group: str | None = None,
        query: bool | None = None,
        gallery: bool | None = None,
    ) -> Catalog:
        """Return the rows that meet every condition given."""
        return self.subset(
            self.mask(split=split, labels=labels, group=group, query=query, gallery=gallery)
        )

    def mask(
        self,
        *,
        split: str | None = None,
        labels: Iterable[str] | None = None,
        group: str | None = None,
        query: bool | None = None,
        gallery: bool | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Return a mask over the rows: which meet every condition given."""
        keep = np.ones(len(self), dtype=np.bool_)
        if split is not None:
            if split not in SPLITS:
                raise ValueError(f"unknown split {split!r}{closest(split, SPLITS)}")
            keep &= np.array([s == split for s in self.splits], dtype=np.bool_)
        if labels is not None:
            wanted = {labels} if isinstance(labels, str) else set(labels)
            unknown = sorted(wanted - set(self.class_names))
            if unknown:
                raise ValueError(f"no such class: {some([repr(u) for u in unknown])}")
            keep &= np.array([label in wanted for label in self.labels], dtype=np.bool_)
        for name, values, value in (
            ("group", self.groups, group),
            ("query", self.queries, query),
            ("gallery", self.galleries, gallery),
        ):
            if value is not None:
                if values is None:
                    raise ValueError(f"this catalogue has no {name} column to filter by")
                keep &= np.array([v == value for v in values], dtype=np.bool_)
        return keep

    def split_classes(
        self,
        parts: float | Sequence[float] | Sequence[int],
        *,
        seed: int = 0,
        names: Sequence[str] = ("train", "test"),
    ) -> tuple[Catalog, ...]:
        """Divide into parts that share no class, for instance to hold out classes.

        Args:
            parts: the first part's fraction of the classes (0.8), fractions that sum to one
                ((0.6, 0.2, 0.2)), or numbers of classes that sum to all of them ((98, 98)).
            seed: decides which classes go where; the order of the rows does not matter.
            names: the split that each part's rows are marked with.
        """
        counts = _class_counts(parts, len(self.class_names))
        if len(names) != len(counts):
            raise ValueError(f"{len(counts)} parts need {len(counts)} names, got {tuple(names)}")
        order = np.random.default_rng(seed).permutation(len(self.class_names))
        part_of = np.repeat(np.arange(len(counts)), counts)[np.argsort(order)]
        pieces = []
        for part, name in enumerate(names):
            piece = self.subset(part_of[self.codes] == part)
            pieces.append(replace(piece, splits=(name,) * len(piece)))
        return tuple(pieces)

    def with_notes(self, *notes: str) -> Catalog:
        """Return the same table with more notes."""
        return replace(self, notes=self.notes + notes)

    def missing_files(self) -> list[int]:
        """Return the rows whose file or shard member does not exist."""
        return [i for i in range(len(self)) if not _exists(self.file(i))]

    def check_files(self) -> None:
        """Raise an error that counts and names the files that do not exist."""
        missing = self.missing_files()
        if missing:
            names = some([f"{self.paths[i]!r} (row {i + 1})" for i in missing])
            raise ValueError(
                f"{len(missing)} of {len(self)} images do not exist below {self.root}: {names}"
            )

    def describe(self) -> str:
        """Say in a few lines how many images and classes there are, and in which splits."""
        from proximetry.data.describe import describe

        return describe(self)

    @classmethod
    def from_folder(cls, root: str | os.PathLike[str]) -> Catalog:
        """Read a folder of folders: every sub-folder is a class, with all images below it.

        When the sub-folders are called train, val or test and hold folders themselves, those
        are the classes and the outer names the splits. Files that are no images, and folders
        without any, are counted in `notes`.
        """
        found = scan_folder(Path(root))
        return cls(found.paths, found.labels, found.splits, Path(root), notes=found.notes)

    @classmethod
    def from_csv(
        cls,
        file: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        *,
        check_files: bool = True,
    ) -> Catalog:
        """Read a comma-separated table with a header line.

        Columns: path, label; if wanted split, query, gallery, group, and box_x, box_y, box_w,
        box_h. `root` is the CSV's own folder unless given.
        """
        return cls._from_table(read_csv(Path(file)), file, root, check_files)

    @classmethod
    def from_parquet(
        cls,
        file: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        *,
        check_files: bool = True,
    ) -> Catalog:
        """Read a Parquet table; columns as in `from_csv`."""
        return cls._from_table(read_parquet(Path(file)), file, root, check_files)

    @classmethod
    def _from_table(
        cls,
        columns: dict[str, tuple[object, ...]],
        file: str | os.PathLike[str],
        root: str | os.PathLike[str] | None,
        check_files: bool,
    ) -> Catalog:
        base = Path(file).parent if root is None else Path(root)
        try:
            catalog = cls(root=base, **columns)  # type: ignore[arg-type]
            if check_files:
                catalog.check_files()
        except ValueError as error:
            raise ValueError(f"{os.fspath(file)}: {error}") from None
        return catalog

    def to_csv(self, file: str | os.PathLike[str]) -> None:
        """Write the table for `from_csv`; paths stay relative to `root`."""
        write_csv(Path(file), self._columns())

    def to_parquet(self, file: str | os.PathLike[str]) -> None:
        """Write the table for `from_parquet`; paths stay relative to `root`."""
        write_parquet(Path(file), self._columns())

    def _columns(self) -> dict[str, tuple[object, ...]]:
        return {n: v for n in _COLUMNS if (v := getattr(self, n)) is not None}


_COLUMNS = tuple(f.name for f in fields(Catalog) if f.name not in ("root", "notes"))


def concatenate(*catalogs: Catalog) -> Catalog:
    """Put catalogues with the same root and the same columns under one another."""
    if not catalogs:
        raise ValueError("concatenate needs at least one catalogue")
    first = catalogs[0]
    roots = {c.root for c in catalogs}
    if len(roots) > 1:
        raise ValueError(f"catalogues have different roots: {some(sorted(map(str, roots)))}")
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        values = [getattr(c, name) for c in catalogs]
        if any((v is None) != (values[0] is None) for v in values):
            raise ValueError(f"only some of the catalogues have {name}; give it to all or to none")
        if values[0] is not None:
            columns[name] = tuple(item for v in values for item in v)
    notes = tuple(dict.fromkeys(note for c in catalogs for note in c.notes))
    return replace(first, notes=notes, **columns)


def _class_counts(parts: float | Sequence[float], classes: int) -> list[int]:
    shares: list[float] = [parts, 1 - parts] if isinstance(parts, float | int) else list(parts)
    if all(isinstance(s, int) for s in shares):
        if sum(shares) != classes or min(shares, default=0) < 1:
            raise ValueError(f"class counts {tuple(shares)} must be positive and sum to {classes}")
        return [int(s) for s in shares]
    if min(shares) <= 0 or not math.isclose(sum(shares), 1):
        raise ValueError(f"fractions must be positive and sum to 1, got {parts}")
    if classes < len(shares):
        raise ValueError(f"{classes} classes cannot be divided into {len(shares)} parts")
    edges = [round(classes * sum(shares[: i + 1])) for i in range(len(shares))]
    # Rounding must not leave a part empty: every edge keeps room on both sides.
    for i in range(len(edges) - 1):
        edges[i] = min(max(edges[i], (edges[i - 1] if i else 0) + 1), classes - len(edges) + i + 1)
    return [b - a for a, b in zip([0, *edges], edges, strict=False)]


def _exists(path: str) -> bool:
    if not is_shard_path(path):
        return os.path.isfile(path)
    shard, member = split_shard_path(path)
    return os.path.isfile(shard) and member in shard_members(shard)
