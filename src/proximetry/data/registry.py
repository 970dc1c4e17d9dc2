"""The registry of datasets, and what their readers share; imports neither NumPy nor pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from proximetry._util.errors import some

if TYPE_CHECKING:
    from proximetry.data.catalog import Catalog

Reader = TypeVar("Reader", bound="Callable[..., Catalog]")

# Column of a table → field of Catalog.
FIELDS = {
    "path": "paths",
    "label": "labels",
    "split": "splits",
    "query": "queries",
    "gallery": "galleries",
    "group": "groups",
}


@dataclass(frozen=True)
class Size:
    """Images and classes of a part of a dataset."""

    images: int
    classes: int


class Home(NamedTuple):
    """Files that identify the folder of a dataset, and its names inside another folder."""

    files: tuple[str, ...]
    names: tuple[str, ...] = ()

    def find(self, root: Path) -> Path | None:
        """Return `root` or the sub-folder of it that has all of these files, if any has."""
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder")
        for home in (root, *(root / name for name in self.names)):
            if all((home / file).is_file() for file in self.files):
                return home
        return None


@dataclass(frozen=True)
class DatasetInfo:
    """Metadata of a dataset.

    Attributes:
        name: for `open_dataset`.
        read: returns the catalog of a folder.
        title: its full name.
        layout: what its folder holds.
        about: what it shows.
        train: published size of that part, where there is any.
        test: the same.
        query: the same.
        gallery: the same.
        homes: files that identify its folder.
        built_in: whether it needs no folder.
    """

    name: str
    read: Callable[..., Catalog]
    title: str
    layout: str
    about: str = ""
    train: Size | None = None
    test: Size | None = None
    query: Size | None = None
    gallery: Size | None = None
    homes: tuple[Home, ...] = ()
    built_in: bool = False

    def __str__(self) -> str:
        text = f"{self.title}: {self.about}" if self.about else self.title
        if self.train and self.test:
            text += f", {self.train.classes} classes for training and {self.test.classes} for test"
        return f"{text} ({self.layout})"

    def count_notes(self, catalog: Catalog) -> Iterator[str]:
        """Yield the parts whose numbers of images or classes differ from the published ones."""
        for part in ("train", "test", "query", "gallery"):
            size: Size | None = getattr(self, part)
            if size is None:
                continue
            role: dict[str, Any] = {part: True} if part in ("query", "gallery") else {"split": part}
            rows = catalog.filter(**role)
            images, classes = len(rows), len(rows.class_names)
            if Size(images, classes) != size:
                yield (
                    f"{self.title} {part}: {images} of {size.images} images, "
                    f"{classes} of {size.classes} classes"
                )


DATASETS: dict[str, DatasetInfo] = {}


def dataset(name: str, **facts: Any) -> Callable[[Reader], Reader]:
    """Declare a dataset, with the fields of DatasetInfo, above the function that reads it."""

    def register(read: Reader) -> Reader:
        DATASETS[name] = DatasetInfo(name, read, **facts)
        return read

    return register


def drop_missing(title: str, catalog: Catalog) -> Catalog:
    """Exclude listed images that do not exist, and name them in a note."""
    missing = catalog.missing_files()
    if not missing:
        return catalog
    if len(missing) == len(catalog):
        raise ValueError(
            f"{title}: none of the {len(catalog)} listed images exist below {catalog.root}; "
            f"expected for instance {catalog.file(0)}"
        )
    existing = catalog.subset(sorted(set(range(len(catalog))) - set(missing)))
    names = some([catalog.paths[i] for i in missing])
    note = f"{title}: {len(missing)} listed images do not exist: {names}"
    return replace(existing, notes=(note,))


def split_by_class(catalog: Catalog, train: set[str], notes: Iterable[str] = ()) -> Catalog:
    """Mark the given classes "train" and all others "test"."""
    splits = tuple("train" if label in train else "test" for label in catalog.labels)
    return replace(catalog, splits=splits, notes=(*catalog.notes, *notes))


def wrong_folder(title: str, root: Path, expected: str) -> ValueError:
    """Return the error for a folder that holds something else."""
    names = some([p.name for p in sorted(root.iterdir())]) or "nothing"
    return ValueError(f"{title}: expected {expected} in {root}, found {names}")


def fields_of(file: Path, count: int, skip: int = 0) -> Iterator[list[str]]:
    """Yield the fields of every line of a space-separated list, checked."""
    with file.open(encoding="utf-8", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, start=1):
            if number <= skip or not line.strip():
                continue
            # The last field may hold spaces: a file name.
            values = line.split(maxsplit=count - 1)
            if len(values) != count:
                raise ValueError(
                    f"{file}: line {number} has {len(values)} fields, expected {count}: {line!r}"
                )
            yield [value.strip() for value in values]
