"""The catalogue: one checked, unchanging table that says which images there are."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from proximetry._common import closest, some
from proximetry.data.csv_parquet import FIELDS, read_csv, read_parquet, write_csv, write_parquet
from proximetry.data.folders import layout, scan_folder
from proximetry.data.tar_shards import SEPARATOR, scan_shards, shard_members, split_shard_path

if TYPE_CHECKING:  # numpy is imported where it is used: the list of datasets loads without it
    import numpy as np
    import numpy.typing as npt

SPLITS = ("all", "train", "val", "test")

AnyPath: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True, repr=False)
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
        notes: what the reader of the data has to say, such as missing images.
        layout: one sentence on what was taken for classes and splits, where that was found out.
        columns: whatever else is known of the images, by name: texts, numbers, True and False, or
            None. Galleries keep it; training does not ask for it.
    """

    paths: tuple[str, ...]
    labels: tuple[str, ...]
    splits: tuple[str, ...]
    root: Path = Path()
    queries: tuple[bool, ...] | None = None
    galleries: tuple[bool, ...] | None = None
    groups: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    layout: str = field(default="", compare=False)
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))
        for name in (*FIELDS.values(), "notes"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, tuple(value))
        columns = {name: tuple(values) for name, values in self.columns.items()}
        object.__setattr__(self, "columns", columns)
        _check(self)

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return (
            f"Catalog({len(self)} images, {len(self.class_names)} classes, root={str(self.root)!r})"
        )

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The distinct labels in sorted order; a class's code is its place here."""
        return tuple(sorted(set(self.labels)))

    @cached_property
    def codes(self) -> npt.NDArray[np.int64]:
        """The class of every image as a number, 0 … classes − 1."""
        import numpy as np

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
        import numpy as np

        chosen = np.asarray(rows, dtype=None if len(rows) else np.int64)
        picks = np.arange(len(self))[chosen].tolist()
        chosen_of = {
            name: tuple(values[i] for i in picks) for name, values in self._columns().items()
        }
        columns = {name: chosen_of.pop(name) for name in self.columns}
        fields: dict[str, Any] = {FIELDS[name]: values for name, values in chosen_of.items()}
        return replace(self, columns=columns, **fields)

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
        if split is not None and split not in SPLITS:
            raise ValueError(f"unknown split {split!r}{closest(split, SPLITS)}")
        keep = list(range(len(self)))
        if labels is not None:
            wanted = {labels} if isinstance(labels, str) else set(labels)
            unknown = sorted(wanted - set(self.class_names))
            if unknown:
                raise ValueError(f"no such class: {some([repr(u) for u in unknown])}")
            keep = [i for i in keep if self.labels[i] in wanted]
        columns = self._columns()
        wanted_values = {"split": split, "group": group, "query": query, "gallery": gallery}
        for name, value in wanted_values.items():
            if value is not None:
                if name not in columns:
                    raise ValueError(f"this catalogue has no {name} column to filter by")
                keep = [i for i in keep if columns[name][i] == value]
        return self.subset(keep)

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
        import numpy as np

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

    def missing_files(self) -> list[int]:
        """Return the rows whose file or shard member does not exist."""
        return [i for i in range(len(self)) if _identity(self.file(i)) is None]

    def shared_classes(self) -> list[str]:
        """Say which splits have classes in common, and which."""
        classes: dict[str, set[str]] = {}
        for split, label in zip(self.splits, self.labels, strict=True):
            classes.setdefault(split, set()).add(label)
        found = []
        for a, b in combinations([split for split in SPLITS if split in classes], 2):
            shared = sorted(classes[a] & classes[b])
            if shared:
                count = f"{len(shared)} class{'es' if len(shared) > 1 else ''}"
                found.append(
                    f"{a} and {b} share {count}, so {b} does not measure unseen classes only: "
                    f"{some(shared)}"
                )
        return found

    def remarks(self) -> list[str]:
        """Return what every command tells about these images: `layout` and `notes`."""
        return [self.layout, *self.notes] if self.layout else [*self.notes]

    def describe(self) -> str:
        """Say in a few lines how many images and classes there are, and in which splits."""
        rows = list(zip(self.labels, self.splits, strict=True))
        parts = {s: Counter(label for label, split in rows if split == s) for s in SPLITS}
        parts = {split: sizes for split, sizes in parts.items() if sizes}
        lines = [
            f"{len(self)} images of {len(self.class_names)} classes in {self.root}",
            _line("split", "images", "classes", "smallest", "median", "largest"),
        ]
        together = {"together": Counter(self.labels)} if len(parts) > 1 else {}
        for name, sizes in (parts | together).items():
            n = sizes.values()
            lines.append(_line(name, sum(n), len(n), min(n), f"{median(n):g}", max(n)))
        for a, b in combinations(parts, 2):
            if not parts[a].keys() & parts[b].keys():
                lines.append(f"{a} and {b} share no class")
        if self.queries is not None and self.galleries is not None:
            lines.append(f"{sum(self.queries)} queries, {sum(self.galleries)} gallery images")
        if self.groups is not None:
            lines.append(f"{len(set(self.groups))} groups")
        notes = (*self.notes, *self.shared_classes())
        lines += [f"note: {note}" for note in dict.fromkeys(notes)]
        return "\n".join([self.layout, *lines] if self.layout else lines)

    @classmethod
    def from_folder(cls, root: AnyPath) -> Catalog:
        """Read a folder of folders: every sub-folder is a class, with all images below it.

        When sub-folders are called train, val or test and hold folders themselves, those are
        the classes and the outer names the splits. What is left out, such as files that are no
        images, is named in `layout` and `notes`.
        """
        return cls(root=Path(root), **scan_folder(Path(root))._asdict())

    @classmethod
    def from_shards(cls, files: Sequence[AnyPath]) -> Catalog:
        """Read tar files that hold <class>/<image>; the images stay where they are.

        A class may be spread over several shards. The class is the folder next to the image;
        train, val and test around the classes are the splits.
        """
        root, found = scan_shards([Path(file) for file in files])
        return cls(root=root, **found._asdict())

    @classmethod
    def from_csv(
        cls, file: AnyPath, root: AnyPath | None = None, *, check_files: bool = True
    ) -> Catalog:
        """Read a comma-separated table with a header line.

        Columns: path, label; if wanted split, query, gallery, group. Others become `columns`:
        numbers where all of their values are numbers, else text; None where nothing is written.
        `root` is the CSV's own folder unless given.
        """
        return cls._from_table(read_csv(Path(file)), file, root, check_files)

    @classmethod
    def from_parquet(
        cls, file: AnyPath, root: AnyPath | None = None, *, check_files: bool = True
    ) -> Catalog:
        """Read a Parquet table; columns as in `from_csv`, with the kinds that they have there."""
        return cls._from_table(read_parquet(Path(file)), file, root, check_files)

    @classmethod
    def _from_table(
        cls, fields: dict[str, Any], file: AnyPath, root: AnyPath | None, check_files: bool
    ) -> Catalog:
        try:
            catalog = cls(root=Path(file).parent if root is None else Path(root), **fields)
            if check_files:
                _check_files(catalog)
        except ValueError as error:
            raise ValueError(f"{os.fspath(file)}: {error}") from None
        homes = ("" if split == "all" else split for split in catalog.splits)
        return replace(catalog, layout=layout(zip(homes, catalog.labels, strict=True)))

    def to_csv(self, file: AnyPath) -> None:
        """Write the table for `from_csv`; paths stay relative to `root`."""
        write_csv(Path(file), self._columns())

    def to_parquet(self, file: AnyPath) -> None:
        """Write the table for `from_parquet`; paths stay relative to `root`."""
        write_parquet(Path(file), self._columns())

    def _columns(self) -> dict[str, tuple[Any, ...]]:
        ours = {c: values for c, f in FIELDS.items() if (values := getattr(self, f)) is not None}
        return {**ours, **self.columns}


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


def _identity(path: str) -> tuple[object, ...] | None:
    """Return what is the same for two paths of one image; None where there is no image."""
    file, member = split_shard_path(path)
    try:
        status = os.stat(file)
        if member and member not in shard_members(file):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # whoever opens it will say why it cannot be opened
        return (file, member)
    return (status.st_dev, status.st_ino, member)


def _check_files(catalog: Catalog) -> None:
    """Refuse images that do not exist, and those that are listed twice under other paths."""
    rows: dict[tuple[object, ...] | None, list[int]] = {}
    for i in range(len(catalog)):
        rows.setdefault(_identity(catalog.file(i)), []).append(i)
    missing = rows.pop(None, [])
    if missing:
        names = some([f"{catalog.paths[i]!r} (row {i + 1})" for i in missing])
        raise ValueError(
            f"{len(missing)} of {len(catalog)} images do not exist below {catalog.root}: {names}"
        )
    # Two names of one file on the disk are copies of it, which may be meant.
    places: dict[str, int] = {}
    for i in sorted(i for same in rows.values() if len(same) > 1 for i in same):
        file, member = split_shard_path(catalog.file(i))
        first = places.setdefault(f"{os.path.realpath(file)}{SEPARATOR}{member}", i)
        if first != i:
            raise ValueError(
                f"row {i + 1}, column path: {catalog.paths[i]!r} is the image of row {first + 1}, "
                f"{catalog.paths[first]!r}; list every image once"
            )


def _check(catalog: Catalog) -> None:
    """Raise one error that lists the first offending rows, columns and values."""
    size = len(catalog.paths)
    for name in catalog.columns:
        if name in FIELDS:
            raise ValueError(f"columns holds {name!r}, which is the catalogue's own {FIELDS[name]}")
        if not _is_text(name) or not name:
            raise ValueError(f"{name!r} is no usable name for a column")
    for column, values in catalog._columns().items():
        if len(values) != size:
            name = FIELDS.get(column, column)
            raise ValueError(f"{name} has {len(values)} entries, paths has {size}")
    if (catalog.queries is None) != (catalog.galleries is None):
        raise ValueError("query and gallery come together: give both columns or neither")
    problems = list(_problems(catalog))
    if len(problems) > 5:
        problems[5:] = [f"and {len(problems) - 5} more"]
    if problems:
        raise ValueError("; ".join(problems))


def _problems(catalog: Catalog) -> Iterator[str]:
    for column, values in (
        ("path", catalog.paths),
        ("label", catalog.labels),
        ("group", catalog.groups),
    ):
        for i, value in enumerate(values or ()):
            if not _is_text(value) or not (value or column == "group"):
                yield f"row {i + 1}, column {column}: {value!r} is not a usable text"
    for i, split in enumerate(catalog.splits):
        if split not in SPLITS:
            yield f"row {i + 1}, column split: {split!r} is none of {', '.join(SPLITS)}"
    for column, flags in (("query", catalog.queries), ("gallery", catalog.galleries)):
        for i, flag in enumerate(flags or ()):
            if not isinstance(flag, bool):
                yield f"row {i + 1}, column {column}: {flag!r} is neither true nor false"
    yield from _problems_elsewhere(catalog)
    # The same picture twice would be its own nearest neighbour.
    counts = Counter(catalog.paths)
    for i, path in enumerate(catalog.paths if len(counts) < len(catalog) else ()):
        if counts[path] > 1:
            yield f"row {i + 1}, column path: {path!r} is listed {counts[path]} times"


def _problems_elsewhere(catalog: Catalog) -> Iterator[str]:
    for column, values in catalog.columns.items():
        for i, value in enumerate(values):
            text = isinstance(value, str) and _is_text(value.replace("\0", ""))
            if not (text or value is None or _is_number(value)):
                yield f"row {i + 1}, column {column}: {value!r} is neither a text nor a number"


def _is_number(value: object) -> bool:
    """Whether a value is a number, also True or False, that 64 bits hold."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)


def _is_text(value: object) -> bool:
    """Whether a value is text that a system could have as a file name, in UTF-8 or not."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        return value.isascii() or bool(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False


def _line(first: str, *others: object) -> str:
    return f"{first:8}" + "".join(f"{cell:>10}" for cell in others)
