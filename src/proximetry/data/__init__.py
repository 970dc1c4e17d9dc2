"""Catalogs of images, their pixels, augmentation and samplers.

Names are imported when they are first used: a catalog needs neither torch nor Pillow.
"""

from typing import TYPE_CHECKING

from proximetry._util.errors import lazy_exports

if TYPE_CHECKING:
    from proximetry.data.augment import CenterCrop, ColorJitter, RandomResizedCrop
    from proximetry.data.cache import PixelCache
    from proximetry.data.catalog import Catalog
    from proximetry.data.datasets import (
        DatasetInfo,
        list_datasets,
        open_dataset,
        resolve_source,
    )
    from proximetry.data.datasets.glyphs import glyphs
    from proximetry.data.images import ImageError, open_image, resize_and_center_crop
    from proximetry.data.samplers import ClassBalanced, Shuffled, Streamed
    from proximetry.data.vectors import VectorCatalog

__all__ = [
    "Catalog",
    "CenterCrop",
    "ClassBalanced",
    "ColorJitter",
    "DatasetInfo",
    "ImageError",
    "PixelCache",
    "RandomResizedCrop",
    "Shuffled",
    "Streamed",
    "VectorCatalog",
    "glyphs",
    "list_datasets",
    "open_dataset",
    "open_image",
    "resize_and_center_crop",
    "resolve_source",
]

# Column of a table → field of Catalog.
FIELDS = {
    "path": "paths",
    "label": "labels",
    "split": "splits",
    "query": "queries",
    "gallery": "galleries",
    "group": "groups",
}

__getattr__ = lazy_exports(
    __name__,
    {
        "augment": ("CenterCrop", "ColorJitter", "RandomResizedCrop"),
        "catalog": ("Catalog",),
        "datasets": ("DatasetInfo", "list_datasets", "open_dataset", "resolve_source"),
        "datasets.glyphs": ("glyphs",),
        "images": ("ImageError", "open_image", "resize_and_center_crop"),
        "cache": ("PixelCache",),
        "samplers": ("ClassBalanced", "Shuffled", "Streamed"),
        "vectors": ("VectorCatalog",),
    },
    extra="images",
)
