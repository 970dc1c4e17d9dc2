"""Preprocessing of images to the normalized pixels of a backbone."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import floor, prod
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from proximetry._util.formatting import format_value, join_first
from proximetry.data.images import (
    MAX_PIXELS,
    Interpolation,
    Size,
    Source,
    check_interpolation,
    open_image,
    resize_and_center_crop,
)
from proximetry.models.constants import MAX_SIDE

_MAX_VALUE = 1e9  # of mean, std and scale, and their inverses
_MAX_ENTRIES = 2**28  # of a tensor: 1 GB
Channels = Literal["RGB", "BGR"]
ImageSource: TypeAlias = "Source | Tensor"
ImageSources: TypeAlias = "ImageSource | Iterable[ImageSource]"
"""One image or several."""


@dataclass(frozen=True)
class Preprocessing:
    """Resizing, cropping and normalization of images.

    An image is resized so that its short side is `resize`, or to `resize` = (height, width)
    ignoring its aspect ratio; center-cropped to `crop` (height, width); reordered to `channels`,
    multiplied by `scale` and standardized with `mean` and `std` (in the order of `channels`, after
    `scale`).
    """

    resize: Size
    crop: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    channels: Channels = "RGB"
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        for name in ("resize", "crop", "mean", "std"):
            if isinstance(getattr(self, name), list):  # from JSON
                object.__setattr__(self, name, tuple(getattr(self, name)))
        sides = self.resize if isinstance(self.resize, tuple) else (self.resize,) * 2
        number = (int, float)
        for name, values, length, kinds, low, high in (
            ("resize", sides, 2, (int,), 1, MAX_SIDE),
            ("crop", self.crop, 2, (int,), 1, MAX_SIDE),
            ("mean", self.mean, 3, number, -_MAX_VALUE, _MAX_VALUE),
            ("std", self.std, 3, number, 1 / _MAX_VALUE, _MAX_VALUE),
            ("scale", (self.scale,), 1, number, 1 / _MAX_VALUE, _MAX_VALUE),
        ):
            valid = isinstance(values, tuple) and len(values) == length
            if not valid or not all(type(v) in kinds and low <= v <= high for v in values):
                raise ValueError(
                    f"{name} must have {length} numbers between {low:g} and {high:g}, got "
                    f"{format_value(getattr(self, name))}"
                )
        minimum = self.crop if isinstance(self.resize, tuple) else (min(self.crop),) * 2
        if sides[0] < minimum[0] or sides[1] < minimum[1]:
            size, crop, needed = (f"{h}×{w}" for h, w in (sides, self.crop, minimum))
            raise ValueError(f"resize {size} is smaller than crop {crop}. Use at least {needed}.")
        if self.channels not in get_args(Channels):
            raise ValueError(f"channels must be 'RGB' or 'BGR', got {format_value(self.channels)}")
        check_interpolation(self.interpolation)

    @property
    def short_side(self) -> int:
        """The shorter side of a resized image."""
        return self.resize if isinstance(self.resize, int) else min(self.resize)

    @property
    def squash(self) -> bool:
        """Whether images are resized ignoring their aspect ratio."""
        return not isinstance(self.resize, int)

    def size_at(self, short_side: int) -> Size:
        """Return `resize` for another short side."""
        if isinstance(self.resize, int):
            return short_side
        height, width = (side * short_side // self.short_side for side in self.resize)
        return height, width

    @classmethod
    def from_timm(
        cls, model: Any, crop: tuple[int, int] | None, resize: int | None, squash: bool | None
    ) -> Self:
        """Return the preprocessing of a timm model's pretrained configuration.

        `crop`, `resize` and `squash` override its sizes and `crop_mode`.
        """
        config = model.pretrained_cfg
        mode = config["crop_mode"]
        if squash is None:
            squash = mode == "squash"
            if mode == "border":
                warnings.warn(
                    f"crop_mode 'border' of {config['architecture']} is not supported: the center "
                    "is cropped. Use squash=True for the whole image.",
                    stacklevel=2,
                )
        height, width = crop or config["input_size"][-2:]
        crop_pct = config["crop_pct"] if squash == (mode == "squash") else 1.0
        scaled = floor(height / crop_pct), floor(width / crop_pct)
        if squash and resize:
            scaled = height * resize // min(height, width), width * resize // min(height, width)
        size: Size = scaled if squash else resize or min(scaled)
        return cls(
            resize=size,
            crop=(height, width),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
            **getattr(model, "pixel_format", {}),
        )

    def pixels(self, source: ImageSource, *, max_pixels: int = MAX_PIXELS) -> Tensor:
        """Read an image as uint8 RGB [3, height, width], resized and cropped.

        `source` is a path, the bytes of a file, a PIL image, or a uint8 array or tensor [H, W, 3]
        or [H, W]. Large JPEG files (not PIL images) are decoded at a reduced size.

        Raises:
            ImageError: for unreadable images and more than `max_pixels`; see `open_image`.
        """
        if isinstance(source, Tensor):
            source = source.numpy(force=True)
        image = open_image(source, max_pixels=max_pixels, size=self.resize)
        image = resize_and_center_crop(image, self.resize, self.crop, self.interpolation)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize RGB pixels 0…255, uint8 or float, [B, 3, H, W]; returns float32.

        Raises:
            ValueError: for other shapes, and for float values in 0…1.
        """
        if pixels.ndim != 4 or pixels.shape[1] != 3:
            raise ValueError(f"pixels must be [batch, 3, height, width], got {list(pixels.shape)}")
        if pixels.is_floating_point() and pixels.numel() and not torch.compiler.is_compiling():
            low, high = (float(value) for value in pixels.detach().aminmax())
            if low < high <= 1:  # a constant image may be black
                raise ValueError(
                    f"pixels must be 0…255, got float values from {low:g} to {high:g}. Multiply "
                    "them by 255, or pass uint8."
                )
        if self.channels == "BGR":
            pixels = pixels.flip(1)
        device = pixels.device
        # Subtracting first rounds integers once. Created on the device: a copy from the CPU
        # synchronizes and cannot be part of a CUDA graph.
        shift, factor = (
            torch.stack([torch.full((1, 1), v, dtype=torch.float32, device=device) for v in values])
            for values in ([v / self.scale for v in self.mean], [self.scale / v for v in self.std])
        )
        return (pixels.float() - shift) * factor

    def transform(self) -> Callable[[ImageSource], Tensor]:
        """Return a picklable transform for a torch Dataset, from an image to float32 [3, H, W].

        Examples:
            >>> half = (0.5, 0.5, 0.5)
            >>> transform = Preprocessing(resize=36, crop=(32, 32), mean=half, std=half).transform()
            >>> transform(np.zeros((40, 60, 3), np.uint8)).shape
            torch.Size([3, 32, 32])
        """
        return self._transform

    def _transform(self, source: ImageSource) -> Tensor:
        return self.normalize(self.pixels(source)[None])[0]

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random pixels 0…255, float32 [count, 3, height, width]."""
        return torch.rand(count, 3, *self.crop, generator=generator) * 255

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Create from the result of `dataclasses.asdict`, also read from JSON."""
        keys = sorted(set(values) ^ {field.name for field in fields(cls)})
        if keys:
            raise ValueError(f"preprocessing has missing or unknown keys: {join_first(keys)}")
        return cls(**values)


@dataclass(frozen=True)
class Tensors:
    """Input of one shape without preprocessing: vectors, spectrograms, other tensors."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        sides = tuple(self.shape) if isinstance(self.shape, Sequence) else ()
        valid = sides and all(type(side) is int and side >= 1 for side in sides)
        if not valid or prod(sides) > _MAX_ENTRIES:
            raise ValueError(
                "preprocessing must be a Preprocessing or a shape of positive integers, such as "
                f"(1, 28, 28), got {format_value(self.shape)}"
            )
        object.__setattr__(self, "shape", sides)

    def __str__(self) -> str:
        if len(self.shape) == 1:
            return f"vectors of {self.shape[0]} dimensions"
        return f"tensors of shape {list(self.shape)}"

    def pixels(self, source: Any) -> Tensor:
        """Return one input as float32."""
        if not isinstance(source, np.ndarray | Tensor | Sequence) or isinstance(source, str):
            raise TypeError(f"this embedder takes {self}, got {format_value(source)}")
        return self.normalize(torch.as_tensor(source)[None])[0].cpu()

    def normalize(self, batch: Tensor) -> Tensor:
        """Return a batch [B, *shape] as float32; raise ValueError for any other shape."""
        if tuple(batch.shape[1:]) != self.shape:
            raise ValueError(
                f"this embedder takes {self}, got a batch of shape {list(batch.shape)}"
            )
        return batch.float()

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random values, float32 [count, *shape]."""
        return torch.randn(count, *self.shape, generator=generator)


Input: TypeAlias = Preprocessing | Tensors
"""Input of an embedder."""
