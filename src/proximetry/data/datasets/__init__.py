"""The datasets, each read from the folder it is usually unpacked to.

This module imports none of torch, NumPy, pyarrow and Pillow, so datasets are listed quickly.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value
from proximetry._util.types import Progress
from proximetry.data.folders import class_folders

if TYPE_CHECKING:
    from proximetry.data.catalog import Catalog

_SUFFIXES = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".tar": "shards",
    ".rec": "records",
    ".npz": "vectors",
    ".npy": "vectors",
}
TABLES = ("csv", "parquet")  # whose columns may have other names

_PARTS = ("train", "test", "query", "gallery")


class PartSize(NamedTuple):
    """Published numbers of images and classes of a part of a dataset."""

    images: int
    classes: int


@dataclass(frozen=True)
class DatasetInfo:
    """Metadata of a dataset, from `datasets.toml`.

    Attributes:
        name: for `open_dataset`.
        reader: module and function that returns the catalog of a folder.
        title: its full name.
        layout: contents of its folder.
        about: subject of the images.
        files: lists of files, each of which identifies its folder.
        folders: usual names of its folder.
        built_in: whether it needs no folder.
        train: published size of this part, as for `test`, `query` and `gallery`; None if unknown.
    """

    name: str
    reader: str
    title: str
    layout: str
    about: str = ""
    files: Sequence[Sequence[str]] = ()
    folders: Sequence[str] = ()
    built_in: bool = False
    train: PartSize | None = None
    test: PartSize | None = None
    query: PartSize | None = None
    gallery: PartSize | None = None

    def __str__(self) -> str:
        text = f"{self.title}: {self.about}" if self.about else self.title
        if self.train and self.test:
            text += f", {self.train.classes} classes for training and {self.test.classes} for test"
        return f"{text} ({self.layout})"

    def find(self, root: Path) -> Path | None:
        """Return `root` or its sub-folder with the files of this dataset; None if there is none."""
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder")
        for files in self.files:
            for home in (root, *(root / name for name in self.folders)):
                if all((home / file).is_file() for file in files):
                    return home
        return None


_ENTRIES = tomllib.loads(Path(__file__).with_name("datasets.toml").read_text(encoding="utf-8"))
DATASETS = {
    name: DatasetInfo(name, **entry | {p: PartSize(*entry[p]) for p in _PARTS if p in entry})
    for name, entry in _ENTRIES.items()
}


def list_datasets() -> dict[str, DatasetInfo]:
    """Return the datasets of `open_dataset` by name; `str` of one describes its folder."""
    return dict(DATASETS)


def resolve_source(
    source: str | os.PathLike[str], root: str | os.PathLike[str] | None = None
) -> tuple[str, Path | None]:
    """Resolve a dataset's name or a path to the name and root for `open_dataset`.

    A path is a folder of class folders, of tar shards or of a public dataset as it is published, a
    .csv, .parquet, .tar or .rec file, or a file of vectors. A name needs a root unless the dataset
    is built in.
    """
    name = os.fspath(source)
    path = Path(name).expanduser()
    if name in DATASETS and (root is not None or DATASETS[name].built_in or not path.exists()):
        return name, None if root is None else Path(root).expanduser()
    if root is not None and path.exists():
        raise UsageError(
            f"{name} is a path, and {os.fspath(root)} was passed as its root. Pass a "
            "root only with the name of a dataset."
        )
    if path.is_dir():
        for info in DATASETS.values():
            if info.find(path):
                return info.name, path
        has_shards = any(path.glob("*.tar")) and not class_folders(path)
        return "shards" if has_shards else "folder", path
    if path.is_file() and path.suffix.lower() in _SUFFIXES:
        from proximetry.data.vectors import holds_vectors

        return "vectors" if holds_vectors(path) else _SUFFIXES[path.suffix.lower()], path
    if path.exists():
        unzip = ". Unzip it first." if path.suffix.lower() == ".zip" else ""
        raise UsageError(f"{name} is neither a folder nor a {', '.join(_SUFFIXES)} file{unzip}")
    raise UsageError(not_found_message(name, DATASETS, "dataset"))


def not_found_message(source: str, names: Iterable[str], kind: str) -> str:
    """Return the error for a source that is neither a path nor one of the names."""
    path, siblings = Path(source).expanduser(), list[str]()
    if path.is_symlink():
        return f"{source} is a broken link to {os.readlink(path)}"
    with suppress(OSError):
        siblings = os.listdir(path.parent)
    near = [] if path.suffix else get_close_matches(source, [*names], 1, 0.7)
    near += [str(path.with_name(name)) for name in get_close_matches(path.name, siblings, 1, 0.7)]
    missing = f"no folder or file {format_value(source)}"
    if near:
        return f"{missing}, did you mean {near[0]!r}?"
    if path.suffix or os.sep in source:
        where = " in" if path.parent.is_dir() else ", and no folder"
        return f"{missing}{where} {path.parent.absolute()}"
    return (
        f"{missing} and no {kind} of that name. Pass a folder of class folders, a table, a tar "
        "file or a name that `proximetry datasets` lists."
    )


def open_dataset(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    labels_from_name: str | None = None,
    allow_missing: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Catalog:
    """Return the catalog of a public dataset in a folder, or of a table.

    Numbers of images and classes are compared with the published ones. Differences and missing
    files are listed in the catalog's `notes` and `describe()`; with `strict` they are errors. The
    other arguments are for tables (see `Catalog.from_csv`), ``labels_from_name`` for folders (see
    `Catalog.from_folder`).
    """
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {format_value(name)}{suggest(name, DATASETS)}")
    info = DATASETS[name]
    if root is None and not info.built_in:
        raise UsageError(f"dataset {name!r} needs its folder, with {info.layout}")
    options: dict[str, Any] = {}
    if name in TABLES:
        options = {"columns": columns, "allow_missing": allow_missing, "progress": progress}
    elif columns:
        raise UsageError(f"data.columns is for tables, not for the dataset {name}. Remove it.")
    if labels_from_name is not None:
        if name != "folder":
            raise UsageError(
                f"data.labels_from_name is for folders, not for the dataset {name}. Remove it."
            )
        options["labels_from_name"] = labels_from_name
    catalog: Catalog = resolve_name(info.reader)(None if root is None else Path(root), **options)
    if name in TABLES and not len(catalog):
        raise UsageError(f"no rows in the table: {root}. Add one row per image.")
    notes = [*catalog.notes]
    for part in _PARTS:
        published: PartSize | None = getattr(info, part)
        if published:
            # Queries and gallery are columns of flags, the others are splits.
            role: dict[str, Any] = {part: True} if part in _PARTS[2:] else {"split": part}
            rows = catalog.filter(**role)
            size = PartSize(len(rows), len(rows.class_names))
            if size != published:
                notes.append(
                    f"{info.title} {part}: {size.images} of {published.images} images, "
                    f"{size.classes} of {published.classes} classes"
                )
    if strict and notes:
        raise ValueError("; ".join(notes))
    return replace(catalog, notes=(*notes, *catalog.shared_classes()))
