"""The public datasets, each read from the folder it is usually unpacked to."""

import os
from collections.abc import Callable
from pathlib import Path

from proximetry._common import closest
from proximetry.data.catalog import Catalog
from proximetry.data.datasets.archives import shards
from proximetry.data.datasets.counts import finish
from proximetry.data.datasets.faces import faces
from proximetry.data.datasets.products import inshop, sop
from proximetry.data.datasets.zero_shot import cars, cub
from proximetry.data.glyphs import glyphs

# Name: what it is, and what its folder holds.
_KNOWN = {
    "cub": (
        "CUB-200-2011: birds, 100 classes for training and 100 others for test",
        "CUB_200_2011/images.txt with images/, or <class>/<image>.jpg, or tar shards",
    ),
    "cars": (
        "Cars196: car models, 98 classes for training and 98 others for test",
        "cars_annos.mat with car_ims/, or devkit/ with cars_train/ and cars_test/, "
        "or <class>/<image>.jpg, or tar shards",
    ),
    "sop": (
        "Stanford Online Products: 11318 classes for training and 11316 others for test",
        "Stanford_Online_Products/Ebay_train.txt and Ebay_test.txt with <kind>_final/",
    ),
    "inshop": (
        "In-Shop Clothes Retrieval: 3997 classes for training, queries and gallery of 3985",
        "Eval/list_eval_partition.txt with Img/img/",
    ),
    "faces": ("aligned faces, as LFW comes", "<person>/<person>_0001.jpg"),
    "glyphs": ("a thousand characters, built in", "nothing: needs no download"),
    "folder": ("your own images", "<class>/<image>.jpg, below train/ and test/ or not"),
    "csv": ("your own table", "a file with columns path, label; if wanted split, query, gallery"),
    "parquet": ("your own table", "a Parquet file with the same columns"),
    "shards": ("your own images in tar files", "<anything>.tar that hold <class>/<image>"),
}


def _folder(root: str | os.PathLike[str], *, strict: bool = False) -> Catalog:
    return finish(Catalog.from_folder(root), (), strict)


def _shards(root: str | os.PathLike[str], *, strict: bool = False) -> Catalog:
    home = Path(root)
    catalog = shards(sorted(home.glob("*.tar")) if home.is_dir() else [home])
    return finish(catalog, (), strict)


def _csv(root: str | os.PathLike[str], *, strict: bool = False) -> Catalog:
    return finish(Catalog.from_csv(root), (), strict)


def _parquet(root: str | os.PathLike[str], *, strict: bool = False) -> Catalog:
    return finish(Catalog.from_parquet(root), (), strict)


_READERS: dict[str, Callable[..., Catalog]] = {
    "cub": cub,
    "cars": cars,
    "sop": sop,
    "inshop": inshop,
    "faces": faces,
    "folder": _folder,
    "csv": _csv,
    "parquet": _parquet,
    "shards": _shards,
}


def list_datasets() -> dict[str, str]:
    """Return the names that `open_dataset` knows, each with what it is and what it expects."""
    return {name: f"{title} ({layout})" for name, (title, layout) in _KNOWN.items()}


def open_dataset(
    name: str, root: str | os.PathLike[str] | None = None, *, strict: bool = False
) -> Catalog:
    """Return the catalogue of a public dataset in a folder.

    Numbers of images and classes are compared with the published ones. A difference, and what
    is missing, is in the catalogue's `notes` and `describe()`; with `strict` it is an error.
    """
    if name not in _KNOWN:
        raise ValueError(f"unknown dataset {name!r}{closest(name, tuple(_KNOWN))}")
    if name == "glyphs":
        return glyphs() if root is None else glyphs(cache=root)
    if root is None:
        raise ValueError(f"dataset {name!r} needs its folder: one with {_KNOWN[name][1]}")
    return _READERS[name](root, strict=strict)


__all__ = [
    "cars",
    "cub",
    "faces",
    "inshop",
    "list_datasets",
    "open_dataset",
    "shards",
    "sop",
]
