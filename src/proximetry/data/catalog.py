"""The catalogue: one checked, unchanging table that says which images there are."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from proximetry._util.errors import Progress, closest, some
from proximetry.data.columns import Coded, Numbers, Texts, equal_rows, pack, take
from proximetry.data.folders import layout, scan_folder
from proximetry.data.shards import SEPARATOR, scan_shards, shard_members, split_shard_path
from proximetry.data.tables import FIELDS, read_csv, read_parquet, write_csv, write_parquet

if TYPE_CHECKING:  # numpy is imported where it is used: the list of datasets loads without it
    import numpy as np
    import numpy.typing as npt

SPLITS = ("all", "train", "val", "test")

AnyPath: TypeAlias = "str | os.PathLike[str]"
Rows: TypeAlias = "Sequence[int] | npt.NDArray[np.int64]"


@dataclass(frozen=True, repr=False)
class Catalog:
    """Images, their classes and their roles; built once, checked, never changed.

    Columns are given as any sequences and read like tuples; they are kept in little more memory
    than their bytes (`data.columns`).

    Attributes:
        paths: relative to `root` (absolute ones stay as they are); "shard.tar::member" for an
            image inside a tar shard.
        labels: class names.
        splits: "train", "val" or "test"; "all" for images that are not divided yet.
        root: the folder that relative paths start from.
        queries: which images are queries, for sets that prescribe it (In-Shop).
        galleries: which images are searched, likewise.
        groups: anything coarser than a class, such as the kind of product.
        notes: what the reader of the data has to say, such as missing images.
        layout: one sentence on what was taken for classes and splits, where that was found out.
        columns: whatever else is known of the images, by name: texts, numbers, True and False, or
            None. Galleries keep it; training does not ask for it.
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
            values = getattr(self, name)
            if values is not None:
                values = pack(values)
                if name in ("labels", "splits", "groups") and _is_whole(values):
                    values = Coded.of(values)
                object.__setattr__(self, name, values)
        object.__setattr__(self, "root", Path(self.root))
        object.__setattr__(self, "notes", tuple(self.notes))
        columns = {name: pack(values) for name, values in self.columns.items()}
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
        """The distinct labels in sorted order, whole numbers by value; their index is the code."""
        return self._coded("labels").distinct

    @cached_property
    def codes(self) -> npt.NDArray[np.int64]:
        """The class of every image as a number, 0 … classes − 1."""
        import numpy as np

        codes = self._coded("labels").codes.astype(np.int64)
        codes.flags.writeable = False
        return codes

    def rows(self, *splits: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows of these splits."""
        import numpy as np

        return np.flatnonzero(self._coded("splits").among(splits))

    def _coded(self, name: str) -> Coded:
        return cast(Coded, getattr(self, name))

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
        picks = np.arange(len(self))[chosen]
        chosen_of = {name: take(values, picks) for name, values in self._columns().items()}
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
        import numpy as np

        if split is not None and split not in SPLITS:
            raise ValueError(f"unknown split {split!r}{closest(split, SPLITS)}")
        keep = np.ones(len(self), bool)
        if labels is not None:
            wanted = {labels} if isinstance(labels, str) else set(labels)
            unknown = sorted(wanted - set(self.class_names))
            if unknown:
                raise ValueError(f"no such class: {some([repr(u) for u in unknown])}")
            keep &= self._coded("labels").among(wanted)
        for name, text in (("split", split), ("group", group)):
            if text is not None:
                self._need(name)
                keep &= self._coded(FIELDS[name]).among([text])
        for name, flag in (("query", query), ("gallery", gallery)):
            if flag is not None:
                self._need(name)
                keep &= np.asarray(getattr(self, FIELDS[name]), bool) == flag
        return self.subset(keep)

    def _need(self, column: str) -> None:
        if getattr(self, FIELDS[column]) is None:
            raise ValueError(f"this catalogue has no {column} column to filter by")

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
            pieces.append(replace(piece, splits=Coded.constant(name, len(piece))))
        return tuple(pieces)

    def missing_files(self) -> list[int]:
        """Return the rows whose file or shard member does not exist."""
        return [i for i in range(len(self)) if _identity(self.file(i)) is None]

    def shared_classes(self) -> list[str]:
        """Say which splits have classes in common, and which."""
        images, found = self._images_of_splits, []
        for a, b in combinations(images, 2):
            shared = self._named((images[a] > 0) & (images[b] > 0))
            if shared:
                count = f"{len(shared)} class{'es' if len(shared) > 1 else ''}"
                found.append(
                    f"{a} and {b} share {count}, so {b} does not measure unseen classes only: "
                    f"{some(shared)}"
                )
        return found

    @cached_property
    def _images_of_splits(self) -> dict[str, npt.NDArray[np.int64]]:
        """By split, in the order of `SPLITS`, the number of images of each class."""
        import numpy as np

        labels, splits, size = self._coded("labels"), self._coded("splits"), len(self.class_names)
        return {
            split: np.bincount(labels.codes[splits.among([split])], minlength=size)
            for split in SPLITS
            if split in splits
        }

    def _named(self, classes: npt.NDArray[np.bool_]) -> list[str]:
        return [self.class_names[code] for code in classes.nonzero()[0].tolist()]

    def remarks(self) -> list[str]:
        """Return what every command tells about these images: `layout` and `notes`."""
        return [self.layout, *self.notes] if self.layout else [*self.notes]

    def describe(self) -> str:
        """Say in a few lines how many images and classes there are, and in which splits."""
        lines = [
            f"{len(self)} images of {len(self.class_names)} classes in {self.root}",
            _line("split", "images", "classes", "smallest", "median", "largest"),
        ]
        parts = self._images_of_splits
        together = {"together": self._coded("labels").counts()} if len(parts) > 1 else {}
        for name, images in (parts | together).items():
            n = images[images > 0].tolist()
            lines.append(_line(name, sum(n), len(n), min(n), f"{median(n):g}", max(n)))
        for a, b in combinations(parts, 2):
            if not ((parts[a] > 0) & (parts[b] > 0)).any():
                lines.append(f"{a} and {b} share no class")
        if self.queries is not None and self.galleries is not None:
            lines.append(f"{sum(self.queries)} queries, {sum(self.galleries)} gallery images")
        if self.groups is not None:
            lines.append(f"{len(self._coded('groups').distinct)} groups")
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
        """Read tar files that hold ``<class>/<image>``; the images stay where they are.

        A class may be spread over several shards. The class is the folder next to the image;
        train, val and test around the classes are the splits.
        """
        root, found = scan_shards([Path(file) for file in files])
        return cls(root=root, **found._asdict())

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

        Columns: path, label; if wanted split, query, gallery, group. Others become `columns`:
        numbers where all of their values are numbers, else text; None where nothing is written.

        Args:
            file: the table.
            root: the folder that paths start from; the table's own unless given.
            columns: what such a column is called there, where it has another name:
                {"path": "file", "label": "category"}.
            check_files: look whether every image is there, and there once.
            allow_missing: keep images that are not there, for whoever leaves out what it cannot
                read.
            progress: called meanwhile with (images looked for, images in all).
        """
        catalog = cls._from_table(read_csv(Path(file), columns), file, root)
        return catalog._checked(file, allow_missing, progress) if check_files else catalog

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
        """Read a Parquet table, as `from_csv` does; further columns keep the kinds they have there.

        Labels may be of any kind and become text: whole numbers as 7, also those that are kept as
        7.0, truth values as True and False, categories as what they stand for.
        """
        catalog = cls._from_table(read_parquet(Path(file), columns), file, root)
        return catalog._checked(file, allow_missing, progress) if check_files else catalog

    def _checked(self, table: AnyPath, allow_missing: bool, progress: Progress | None) -> Catalog:
        try:
            _check_files(self, allow_missing, progress)
        except ValueError as error:
            raise ValueError(f"{os.fspath(table)}: {error}") from None
        return self

    @classmethod
    def _from_table(cls, fields: dict[str, Any], file: AnyPath, root: AnyPath | None) -> Catalog:
        try:
            catalog = cls(root=Path(file).parent if root is None else Path(root), **fields)
        except ValueError as error:
            raise ValueError(f"{os.fspath(file)}: {error}") from None
        found = {split: catalog._named(n > 0) for split, n in catalog._images_of_splits.items()}
        homes = {"" if split == "all" else split: names for split, names in found.items()}
        kept = f"; further columns, for search only: {some(catalog.columns)}"
        return replace(catalog, layout=layout(homes) + (kept if catalog.columns else ""))

    def to_csv(self, file: AnyPath) -> None:
        """Write the table for `from_csv`; paths stay relative to `root`."""
        write_csv(Path(file), self._columns())

    def to_parquet(self, file: AnyPath) -> None:
        """Write the table for `from_parquet`; paths stay relative to `root`."""
        write_parquet(Path(file), self._columns())

    def _columns(self) -> dict[str, Sequence[Any]]:
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


_TOLD = 1000  # files between two reports of progress


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


def _check_files(catalog: Catalog, allow_missing: bool, progress: Progress | None) -> None:
    """Refuse images that do not exist, and those that are listed twice under other paths."""
    import numpy as np

    total, missing = len(catalog), []
    # Of millions of files only a number each is kept; those with equal ones are looked at again.
    keys = np.zeros(total, np.int64)
    for i, path in enumerate(catalog.paths):
        identity = _identity(os.path.join(catalog.root, path))
        # No image is the same as no other, so each has a number of its own.
        keys[i] = hash(identity) if identity is not None else hash((None, i))
        if identity is None:
            missing.append(i)
        if progress is not None and i % _TOLD == _TOLD - 1:
            progress(i + 1, total)
    if missing and not allow_missing:
        names = some([f"{catalog.paths[i]!r} (row {i + 1})" for i in missing[:5]])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        hint = "; --data.bad-images skip leaves them out" if len(missing) < total else ""
        raise ValueError(
            f"{len(missing)} of {total} images do not exist below {catalog.root}: {names}{more}"
            f"{hint}"
        )
    # Two names of one file on the disk are copies of it, which may be meant.
    places: dict[str, int] = {}
    for i in equal_rows(keys).tolist():
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
    count = sum(len(rows) for rows, _ in problems)
    shown = [tell(int(row)) for rows, tell in problems for row in rows[:_SHOWN]][:_SHOWN]
    if count > _SHOWN:
        shown.append(f"and {count - _SHOWN} more")
    if shown:
        raise ValueError("; ".join(shown))


_SHOWN = 5  # problems that are told


def _problems(catalog: Catalog) -> Iterator[tuple[Rows, Callable[[int], str]]]:
    """Give rows in which something is wrong, and what tells it of one of them."""

    def told(column: str, values: Sequence[Any], what: str) -> Callable[[int], str]:
        return lambda i: f"row {i + 1}, column {column}: {values[i]!r} {what}"

    for column in ("path", "label", "group"):
        values = getattr(catalog, FIELDS[column]) or ()
        rows = _no_text(values, empty=column == "group")
        yield rows, told(column, values, "is not a usable text")
    splits = catalog.splits
    if isinstance(splits, Coded):
        odd: Rows = splits.where(lambda split: split not in SPLITS).nonzero()[0]
    else:
        odd = [i for i, split in enumerate(splits) if split not in SPLITS]
    yield odd, told("split", splits, f"is none of {', '.join(SPLITS)}")
    for column in ("query", "gallery"):
        flags = getattr(catalog, FIELDS[column]) or ()
        fine = isinstance(flags, Numbers) and flags.array.dtype == bool and flags.missing is None
        wrong = [] if fine else [i for i, flag in enumerate(flags) if type(flag) is not bool]
        yield wrong, told(column, flags, "is neither true nor false")
    for column, values in catalog.columns.items():
        fine = isinstance(values, Numbers | Texts)  # of one kind, which has been looked at
        bad = [] if fine else [i for i, value in enumerate(values) if not _is_plain(value)]
        yield bad, told(column, values, "is neither a text nor a number")
    # The same picture twice would be its own nearest neighbour.
    paths = catalog.paths
    if isinstance(paths, Texts) and len(paths.repeated):
        counts = Counter(paths[i] for i in paths.repeated.tolist())
        yield (
            paths.repeated,
            lambda i: told("path", paths, f"is listed {counts[paths[i]]} times")(i),
        )


def _is_whole(values: Sequence[Any]) -> bool:
    """Whether these are texts, with none missing."""
    return not len(values) or (isinstance(values, Texts) and values.missing is None)


def _no_text(values: Sequence[Any], *, empty: bool) -> Rows:
    """Return the rows that hold no text, or an empty one unless that is allowed."""

    def usable(value: object) -> bool:
        return _is_text(value) and bool(value or empty)

    if isinstance(values, Texts) and _is_whole(values) and not empty:
        return values.unusable
    if isinstance(values, Coded):
        if _is_text("".join(values.distinct)) and (empty or "" not in values.distinct[:1]):
            return []  # all of them at once, since there may be a million classes
        return values.where(lambda text: not usable(text)).nonzero()[0]
    return [i for i, value in enumerate(values) if not usable(value)]


def _is_plain(value: object) -> bool:
    text = isinstance(value, str) and _is_text(value.replace("\0", ""))
    return text or value is None or _is_number(value)


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
