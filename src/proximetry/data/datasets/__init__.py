"""The public datasets, each read from the folder it is usually unpacked to.

Importing this imports neither torch, NumPy, pyarrow nor Pillow, so datasets are listed quickly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from proximetry._util.errors import UsageError, closest, shown, spaced
from proximetry._util.types import Progress
from proximetry.data.folders import class_folders

if TYPE_CHECKING:
    from proximetry.data.catalog import Catalog

__all__ = [
    "DatasetInfo",
    "Size",
    "datasets_table",
    "list_datasets",
    "not_found",
    "open_dataset",
    "resolve_source",
]

_SUFFIXES = {
    ".csv": "csv",
    ".parquet": "parquet",
    ".tar": "shards",
    ".npz": "vectors",
    ".npy": "vectors",
}
TABLES = ("csv", "parquet")  # whose columns may have other names

Home: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""Files that identify the folder of a dataset, and its names inside another folder."""


@dataclass(frozen=True)
class Size:
    """Images and classes of a part of a dataset."""

    images: int
    classes: int


@dataclass(frozen=True)
class DatasetInfo:
    """Metadata of a dataset.

    Attributes:
        name: for `open_dataset`.
        reader: module and function that returns the catalog of a folder.
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
    reader: str
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

    def read(self, root: Path | None, **options: Any) -> Catalog:
        """Return the catalog of a folder, or of a file."""
        reader = resolve_name(f"proximetry.data.{self.reader}")
        return cast("Catalog", reader(root, **options))

    def find(self, root: Path) -> Path | None:
        """Return `root` or the sub-folder of it that has the files of this dataset, if any has."""
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder")
        for files, names in self.homes:
            for home in (root, *(root / name for name in names)):
                if all((home / file).is_file() for file in files):
                    return home
        return None

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


_INFOS = (
    DatasetInfo(
        "cub",
        "datasets.readers:cub",
        "CUB-200-2011",
        "CUB_200_2011/images.txt with images/, or <class>/<image>.jpg, or tar shards",
        "birds",
        train=Size(5864, 100),
        test=Size(5924, 100),
        homes=((("images.txt", "image_class_labels.txt"), ("CUB_200_2011",)),),
    ),
    DatasetInfo(
        "cars",
        "datasets.readers:cars",
        "Cars196",
        "cars_annos.mat with car_ims/, or devkit/ with cars_train/ and cars_test/, "
        "or <class>/<image>.jpg, or tar shards",
        "car models",
        train=Size(8054, 98),
        test=Size(8131, 98),
        homes=(
            (("cars_annos.mat",), ("stanford_cars", "cars196")),
            (("devkit/cars_train_annos.mat",), ()),
        ),
    ),
    DatasetInfo(
        "flowers",
        "datasets.readers:flowers",
        "Oxford Flowers 102",
        "imagelabels.mat with jpg/, or <number of the class>/<image>.jpg, or tar shards",
        "flowers",
        train=Size(3493, 51),
        test=Size(4696, 51),
        homes=((("imagelabels.mat",), ("flowers-102", "flowers102")),),
    ),
    DatasetInfo(
        "faces",
        "datasets.readers:faces",
        "aligned faces, as LFW comes",
        "<person>/<person>_0001.jpg",
    ),
    DatasetInfo(
        "lfw",
        "datasets.readers:lfw",
        "Labeled Faces in the Wild, people with three images or more",
        "<person>/<person>_0001.jpg",
        "celebrities, every second one of whom is for training",
        train=Size(3902, 451),
        test=Size(3704, 450),
    ),
    DatasetInfo(
        "sop",
        "datasets.readers:sop",
        "Stanford Online Products",
        "Stanford_Online_Products/Ebay_train.txt and Ebay_test.txt with <kind>_final/",
        train=Size(59551, 11318),
        test=Size(60502, 11316),
        homes=((("Ebay_train.txt", "Ebay_test.txt"), ("Stanford_Online_Products",)),),
    ),
    DatasetInfo(
        "inshop",
        "datasets.readers:inshop",
        "In-Shop Clothes Retrieval",
        "Eval/list_eval_partition.txt with Img/img/",
        train=Size(25882, 3997),
        test=Size(26830, 3985),
        query=Size(14218, 3985),
        gallery=Size(12612, 3985),
        homes=((("Eval/list_eval_partition.txt",), ("In-shop", "inshop")),),
    ),
    DatasetInfo(
        "glyphs",
        "datasets.glyphs:glyphs",
        "a thousand characters, built in",
        "nothing: needs no download",
        built_in=True,
    ),
    DatasetInfo(
        "folder",
        "catalog:Catalog.from_folder",
        "your own images",
        "<class>/<image>.jpg, below train/ and test/ or not",
    ),
    DatasetInfo(
        "csv",
        "catalog:Catalog.from_csv",
        "your own table",
        "a file with columns path, label; optional split, query, gallery",
    ),
    DatasetInfo(
        "parquet",
        "catalog:Catalog.from_parquet",
        "your own table",
        "a Parquet file with the same columns",
    ),
    DatasetInfo(
        "vectors",
        "vectors:VectorCatalog.read",
        "vectors of anything, with labels",
        "a .npz, .npy or .parquet file with vectors and labels, as `proximetry embed` writes it",
    ),
    DatasetInfo(
        "shards",
        "catalog:Catalog.from_shards",
        "your own images in tar files",
        "<anything>.tar that hold <class>/<image>",
    ),
)
DATASETS = {info.name: info for info in _INFOS}


def list_datasets() -> dict[str, DatasetInfo]:
    """Return the datasets of `open_dataset` by name; printed, an entry describes its folder."""
    return dict(DATASETS)


def resolve_source(
    source: str | os.PathLike[str], root: str | os.PathLike[str] | None = None
) -> tuple[str, Path | None]:
    """Return the dataset and the root, for `open_dataset`, that a person means by one word.

    The word is the name of a dataset, which comes with a root unless it is built in, or where
    images lie: a folder of class folders, one of tar shards, one that holds a public dataset as
    it is published, or a .csv, .parquet or .tar file; or it is a file of vectors.
    """
    word = os.fspath(source)
    place = Path(word).expanduser()
    if word in DATASETS and (root is not None or DATASETS[word].built_in or not place.exists()):
        return word, None if root is None else Path(root).expanduser()
    if root is not None and place.exists():
        raise UsageError(
            f"{word} is where images lie, so a root besides ({os.fspath(root)}) is one too many; "
            "a root goes with the name of a dataset"
        )
    if place.is_dir():
        for info in DATASETS.values():
            if info.find(place):
                return info.name, place
        shards = any(place.glob("*.tar")) and not class_folders(place)
        return "shards" if shards else "folder", place
    if place.is_file() and place.suffix.lower() in _SUFFIXES:
        from proximetry.data.vectors import holds_vectors

        return "vectors" if holds_vectors(place) else _SUFFIXES[place.suffix.lower()], place
    if place.exists():
        unzip = ". Unzip it first" if place.suffix.lower() == ".zip" else ""
        raise UsageError(f"{word} is neither a folder nor a {', '.join(_SUFFIXES)} file{unzip}")
    raise UsageError(not_found(word, DATASETS, "dataset"))


def not_found(word: str, known: Iterable[str], kind: str) -> str:
    """Return the error for a word that is neither a path nor a known name."""
    place, beside = Path(word).expanduser(), list[str]()
    if place.is_symlink():
        return f"{word} is a link to {os.readlink(place)}, which is not there"
    with suppress(OSError):
        beside = os.listdir(place.parent)
    near = [] if place.suffix else get_close_matches(word, [*known], 1, 0.7)
    near += [str(place.with_name(name)) for name in get_close_matches(place.name, beside, 1, 0.7)]
    missing = f"there is no folder or file {shown(word)}"
    if near:
        return f"{missing}, did you mean {near[0]!r}?"
    if place.suffix or os.sep in word:
        where = ": looked in" if place.parent.is_dir() else ", nor a folder"
        return f"{missing}{where} {place.parent.absolute()}"
    return (
        f"{missing} and no {kind} of that name; your images can be a folder of class folders, "
        "a table or a tar file, and `proximetry datasets` lists the other ones"
    )


def open_dataset(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    allow_missing: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Catalog:
    """Return the catalog of a public dataset in a folder, or of a table.

    Numbers of images and classes are compared with the published ones. A difference, and what
    is missing, is in the catalog's `notes` and `describe()`; with `strict` it is an error. The
    other arguments are for tables: see `Catalog.from_csv`.
    """
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {shown(name)}{closest(name, DATASETS)}")
    info = DATASETS[name]
    if root is None and not info.built_in:
        raise UsageError(f"dataset {name!r} needs its folder: one with {info.layout}")
    options: dict[str, Any] = {}
    if name in TABLES:
        options = {"columns": columns, "allow_missing": allow_missing, "progress": progress}
    elif columns:
        raise UsageError(f"data.columns is for tables, not for the dataset {name}. Remove it.")
    catalog = info.read(None if root is None else Path(root), **options)
    if name in TABLES and not len(catalog):
        raise UsageError(f"no rows in the table: {root}. Add one row per image.")
    notes = (*catalog.notes, *info.count_notes(catalog))
    if strict and notes:
        raise ValueError("; ".join(notes))
    return replace(catalog, notes=(*notes, *catalog.shared_classes()))


def datasets_table() -> str:
    """Return a Markdown table of the datasets that have published sizes."""
    rows = ["| name | dataset | training | test |", "|---|---|---|---|"]
    for info in DATASETS.values():
        if info.train and info.test:
            test = _counted(info.test)
            if info.query and info.gallery:
                test += f" ({spaced(info.query.images)} queries, "
                test += f"{spaced(info.gallery.images)} in the gallery)"
            rows.append(f"| `{info.name}` | {info.title} | {_counted(info.train)} | {test} |")
    return "\n".join(rows)


def _counted(size: Size) -> str:
    return f"{spaced(size.classes)} classes, {spaced(size.images)} images"
