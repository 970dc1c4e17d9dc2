"""Which images there are, and how they reach the model."""

from proximetry.data.catalog import Catalog, Row, concatenate
from proximetry.data.datasets import list_datasets, open_dataset, shards
from proximetry.data.decode import ImageError, open_image
from proximetry.data.glyphs import glyphs
from proximetry.data.pixels import PixelCache
from proximetry.data.resample import Windows
from proximetry.data.samplers import ClassBalanced, Shuffled
from proximetry.data.transforms import EvalTransform, TrainTransform

__all__ = [
    "Catalog",
    "ClassBalanced",
    "EvalTransform",
    "ImageError",
    "PixelCache",
    "Row",
    "Shuffled",
    "TrainTransform",
    "Windows",
    "concatenate",
    "glyphs",
    "list_datasets",
    "open_dataset",
    "open_image",
    "shards",
]
