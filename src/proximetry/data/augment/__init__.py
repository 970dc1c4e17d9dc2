"""Augmentation: random resized crops, flips and color jitter, batched on the CPU or on a GPU."""

from proximetry.data.augment.colors import ColorChanges, ColorJitter, recolor
from proximetry.data.augment.crops import CenterCrop, RandomResizedCrop
from proximetry.data.augment.resample import Windows

__all__ = [
    "CenterCrop",
    "ColorChanges",
    "ColorJitter",
    "RandomResizedCrop",
    "Windows",
    "recolor",
]
