"""Batches from the pixel cache: crops, flips and scaling, on the CPU or on the cache's device.

Which window of which image is drawn first, on the CPU and from a generator of one's own, so it is
the same everywhere; how the window is resampled depends on where the pixels lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from proximetry.data.pixels import PixelCache
from proximetry.data.resample import Windows, resample

Interpolation = Literal["bilinear", "bicubic"]
Rows = Sequence[int] | npt.NDArray[np.int64]

# As in the literature: so many tries for a window that fits, then the largest central one.
_TRIES = 10


def _size(crop: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width."""
    height, width = (crop, crop) if isinstance(crop, int) else crop
    if height < 1 or width < 1:
        raise ValueError(f"crop must be positive, got {crop}")
    return height, width


def _check_interpolation(name: str) -> None:
    if name not in ("bilinear", "bicubic"):
        raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {name!r}")


def _sizes(pixels: PixelCache, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = np.asarray(rows, dtype=np.int64)
    if chosen.ndim != 1 or chosen.size == 0:
        raise ValueError(f"rows must be a non-empty list of image numbers, got {chosen.shape}")
    if chosen.min() < 0 or chosen.max() >= len(pixels):
        raise ValueError(
            f"rows run from 0 to {len(pixels) - 1}, got {chosen.min()} … {chosen.max()}"
        )
    heights, widths = pixels.heights[chosen], pixels.widths[chosen]
    return torch.from_numpy(heights), torch.from_numpy(widths)


@dataclass(frozen=True)
class TrainTransform:
    """Random resized crop and horizontal flip, by the same law as torchvision's.

    Args:
        crop: side of the result, or its height and width.
        scale: smallest and largest area of the window, as a fraction of the image.
        ratio: smallest and largest width over height of the window.
        flip: mirror every second image, at random.
        interpolation: "bilinear" or "bicubic", both with antialiasing.
    """

    crop: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        _check_interpolation(self.interpolation)
        _size(self.crop)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be 0 < smallest ≤ largest ≤ 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio must be 0 < smallest ≤ largest, got {self.ratio}")

    def __call__(self, pixels: PixelCache, rows: Rows, generator: torch.Generator) -> torch.Tensor:
        """Return a uint8 batch [rows, 3, height, width] on the device of the pixels."""
        return self.apply(pixels, rows, self.draw(pixels, rows, generator))

    def apply(self, pixels: PixelCache, rows: Rows, windows: Windows) -> torch.Tensor:
        """Return the batch for windows that were drawn before."""
        return resample(pixels, rows, windows, _size(self.crop), self.interpolation)

    def draw(self, pixels: PixelCache, rows: Rows, generator: torch.Generator) -> Windows:
        """Draw a window per image.

        Every image takes the same number of random values from the generator, so the windows
        of a global batch can be drawn on every rank and sliced.
        """
        heights, widths = _sizes(pixels, rows)
        u = torch.rand(len(heights), 2 * _TRIES + 3, generator=generator, dtype=torch.float64)
        height, width, found = self._shapes(heights, widths, u[:, : 2 * _TRIES])
        central_height, central_width = self._central(heights, widths)
        height = torch.where(found, height, central_height)
        width = torch.where(found, width, central_width)
        room_down, room_right = heights - height, widths - width
        down = (u[:, -3] * (room_down + 1)).long()
        right = (u[:, -2] * (room_right + 1)).long()
        return Windows(
            top=torch.where(found, down, room_down // 2),
            left=torch.where(found, right, room_right // 2),
            height=height,
            width=width,
            flip=(u[:, -1] < 0.5) & self.flip,
            scaled_height=torch.full_like(height, _size(self.crop)[0]),
            scaled_width=torch.full_like(width, _size(self.crop)[1]),
            first_row=torch.zeros_like(height),
            first_column=torch.zeros_like(width),
        )

    def _shapes(
        self, heights: torch.Tensor, widths: torch.Tensor, u: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the first window that fits of each image, and whether there was one."""
        smallest, largest = self.scale
        area = (heights * widths)[:, None] * (smallest + u[:, :_TRIES] * (largest - smallest))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = torch.exp(low + u[:, _TRIES:] * (high - low))
        width = torch.sqrt(area * aspect).round().long()
        height = torch.sqrt(area / aspect).round().long()
        fits = (width > 0) & (width <= widths[:, None])
        fits &= (height > 0) & (height <= heights[:, None])
        first = fits.int().argmax(dim=1, keepdim=True)
        return height.gather(1, first)[:, 0], width.gather(1, first)[:, 0], fits.any(dim=1)

    def _central(
        self, heights: torch.Tensor, widths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest window whose shape is allowed."""
        shape = widths.double() / heights.double()
        tall = (widths.double() / self.ratio[0]).round().long()
        wide = (heights.double() * self.ratio[1]).round().long()
        height = torch.where(shape < self.ratio[0], tall, heights)
        width = torch.where(shape > self.ratio[1], wide, widths)
        return height.clamp(min=1), width.clamp(min=1)


@dataclass(frozen=True)
class EvalTransform:
    """Scale the shorter side to `resize`, then take the centre: a square or height × width."""

    resize: int
    crop: int | tuple[int, int]
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        _check_interpolation(self.interpolation)
        if not min(_size(self.crop)) <= self.resize:
            raise ValueError(
                f"crop must be from 1 to resize, got crop {self.crop}, resize {self.resize}"
            )

    def __call__(self, pixels: PixelCache, rows: Rows) -> torch.Tensor:
        """Return a uint8 batch [rows, 3, height, width] on the device of the pixels."""
        windows = self.windows(pixels, rows)
        return resample(pixels, rows, windows, _size(self.crop), self.interpolation)

    def windows(self, pixels: PixelCache, rows: Rows) -> Windows:
        """Return the central window of each image."""
        heights, widths = _sizes(pixels, rows)
        # The rule of `scaled_size`, for all images at once.
        longer, shorter = torch.maximum(heights, widths), torch.minimum(heights, widths)
        long_side = ((self.resize * longer).double() / shorter).long().clamp(min=self.resize)
        scaled_height = torch.where(widths <= heights, long_side, self.resize)
        scaled_width = torch.where(widths <= heights, self.resize, long_side)
        height, width = _size(self.crop)
        if (small := (scaled_height < height) | (scaled_width < width)).any():
            k = int(small.int().argmax())
            raise ValueError(
                f"image {rows[k]} becomes {scaled_height[k]}×{scaled_width[k]} pixels, too few for "
                f"a crop of {height}×{width}; use a resize of {max(height, width)}"
            )
        return Windows(
            top=torch.zeros_like(heights),
            left=torch.zeros_like(widths),
            height=heights,
            width=widths,
            flip=torch.zeros(len(heights), dtype=torch.bool),
            scaled_height=scaled_height,
            scaled_width=scaled_width,
            # round() to even, as torchvision's centre crop does.
            first_row=((scaled_height - height) / 2).round().long(),
            first_column=((scaled_width - width) / 2).round().long(),
        )
