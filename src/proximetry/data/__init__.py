"""Catalogs of images, their pixels, augmentation and samplers.

Names are imported when they are first used: a catalog needs neither torch nor Pillow.
"""

# ruff: noqa: F403
from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.data.augment import *
    from proximetry.data.catalog import *
    from proximetry.data.datasets import *
    from proximetry.data.datasets.glyphs import *
    from proximetry.data.health_check import *
    from proximetry.data.images import *
    from proximetry.data.pixel_cache import *
    from proximetry.data.samplers import *
    from proximetry.data.vectors import *

_EXPORTS = {
    "augment": "CenterCrop ColorJitter RandomResizedCrop",
    "pixel_cache": "PixelCache",
    "catalog": "Catalog",
    "datasets": "DatasetInfo list_datasets open_dataset resolve_source",
    "datasets.glyphs": "glyphs",
    "health_check": "health",
    "images": "ImageError open_image resize_and_center_crop",
    "samplers": "ClassBalancedSampler ShuffledSampler StreamedSampler",
    "vectors": "VectorCatalog",
}

__all__ = [name for names in _EXPORTS.values() for name in names.split()]

FIELDS = {  # column of a table → field of Catalog
    "path": "paths",
    "label": "labels",
    "split": "splits",
    "query": "queries",
    "gallery": "galleries",
    "group": "groups",
}

__getattr__ = lazy_exports(
    __name__, {module: names.split() for module, names in _EXPORTS.items()}, extra="images"
)
