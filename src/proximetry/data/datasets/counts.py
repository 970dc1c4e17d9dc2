"""Published sizes, and what is said when a copy differs from them."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from proximetry._common import some
from proximetry.data.catalog import Catalog


@dataclass(frozen=True)
class Size:
    """Images and classes of a part of a dataset."""

    images: int
    classes: int


def count_notes(title: str, parts: dict[str, tuple[Catalog, Size]]) -> list[str]:
    """Return one sentence for every part whose size is not the published one."""
    notes = []
    for name, (catalog, size) in parts.items():
        images, classes = len(catalog), len(catalog.class_names)
        if Size(images, classes) != size:
            notes.append(
                f"{title} {name}: {images} of {size.images} images, "
                f"{classes} of {size.classes} classes"
            )
    return notes


def split_notes(title: str, catalog: Catalog, train: Size, test: Size) -> list[str]:
    """Compare the train and test parts with the published sizes."""
    parts = {
        "train": (catalog.filter(split="train"), train),
        "test": (catalog.filter(split="test"), test),
    }
    return count_notes(title, parts)


def finish(catalog: Catalog, notes: Iterable[str], strict: bool) -> Catalog:
    """Add the notes to the catalogue's own, or raise them all."""
    noted = catalog.with_notes(*notes)
    if strict and noted.notes:
        raise ValueError("; ".join(noted.notes))
    return noted


def drop_missing(title: str, catalog: Catalog) -> tuple[Catalog, list[str]]:
    """Leave out images that are listed but not there, and name them."""
    missing = catalog.missing_files()
    if not missing:
        return catalog, []
    if len(missing) == len(catalog):
        raise ValueError(
            f"{title}: none of the {len(catalog)} listed images exist below {catalog.root}; "
            f"expected for instance {catalog.file(0)}"
        )
    gone = set(missing)
    kept = catalog.subset([i for i in range(len(catalog)) if i not in gone])
    names = some([catalog.paths[i] for i in missing])
    return kept, [f"{title}: {len(missing)} listed images do not exist: {names}"]


def find_home(root: str | os.PathLike[str], inner: Iterable[str], marks: Iterable[str]) -> Path:
    """Return `root` or a sub-folder of it that has all of the marks, else `root`."""
    base = Path(root)
    if not base.is_dir():
        raise ValueError(f"{base} is not a folder")
    wanted = list(marks)
    for home in (base, *(base / name for name in inner)):
        if all((home / mark).exists() for mark in wanted):
            return home
    return base


def wrong_folder(title: str, root: Path, expected: str) -> ValueError:
    """Return the error for a folder that holds something else."""
    found = some([p.name for p in sorted(root.iterdir())]) or "nothing"
    return ValueError(f"{title}: expected {expected} in {root}, found {found}")


def fields_of(file: Path, count: int, skip: int = 0) -> Iterator[list[str]]:
    """Give the fields of every line of a space-separated list, checked."""
    with file.open(encoding="utf-8") as stream:
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


def mark_splits(catalog: Catalog, train_labels: set[str]) -> Catalog:
    """Mark the given classes "train" and all others "test"."""
    splits = tuple("train" if label in train_labels else "test" for label in catalog.labels)
    return replace(catalog, splits=splits)
