"""Batches of crops from the pixel cache, on the CPU or on the cache's device.

The window of each image is drawn first, on the CPU and from a separate generator, so it is the
same everywhere; how it is scaled depends on where the pixels lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from proximetry.data.augment.resample import Rows, Windows, image_sizes, resample
from proximetry.data.images import Interpolation, check_interpolation, crop_size
from proximetry.data.loader import Pixels

# As in the literature: ten tries for a window that fits, then the largest central one.
_TRIES = 10


@dataclass(frozen=True)
class RandomResizedCrop:
    """Random resized crop and horizontal flip, with the same distribution as torchvision's.

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
        check_interpolation(self.interpolation)
        crop_size(self.crop)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be 0 < smallest ≤ largest ≤ 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio must be 0 < smallest ≤ largest, got {self.ratio}")

    def __call__(self, pixels: Pixels, rows: Rows, generator: torch.Generator) -> Tensor:
        """Return a uint8 batch [rows, 3, height, width] on the device of the pixels."""
        return self.apply(pixels, rows, self.draw(pixels, rows, generator))

    def apply(self, pixels: Pixels, rows: Rows, windows: Windows) -> Tensor:
        """Return the batch for windows that were drawn before."""
        return resample(pixels, rows, windows, crop_size(self.crop), self.interpolation)

    def draw(self, pixels: Pixels, rows: Rows, generator: torch.Generator) -> Windows:
        """Draw a window per image."""
        return self.windows(pixels, rows, self.draw_uniforms(len(rows), generator))

    def draw_uniforms(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the random numbers of `windows`, without knowing the images.

        Every image takes the same number of random values, so those of a global batch can be
        drawn on every rank and sliced.
        """
        return torch.rand(count, 2 * _TRIES + 3, generator=generator, dtype=torch.float64)

    def windows(self, pixels: Pixels, rows: Rows, uniforms: Tensor) -> Windows:
        """Return the window of each image that follows from what was drawn for it."""
        heights, widths = image_sizes(pixels, rows)
        u = uniforms
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
        )

    def _shapes(self, heights: Tensor, widths: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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

    def _central(self, heights: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest window whose shape is allowed."""
        shape = widths.double() / heights.double()
        tall = (widths.double() / self.ratio[0]).round().long()
        wide = (heights.double() * self.ratio[1]).round().long()
        height = torch.where(shape < self.ratio[0], tall, heights)
        width = torch.where(shape > self.ratio[1], wide, widths)
        return height.clamp(min=1), width.clamp(min=1)


@dataclass(frozen=True)
class CenterCrop:
    """The center of cached images: a square, or (height, width).

    As augmentation (`draw`, `apply`), with ``flip`` every second image is mirrored, at random.
    From a cache whose size is an embedder's `resize`, scaled with its interpolation, these
    are the bytes that `resize_and_center_crop` makes of the files.
    """

    crop: int | tuple[int, int]
    flip: bool = False

    def __post_init__(self) -> None:
        crop_size(self.crop)

    def __call__(self, pixels: Pixels, rows: Rows) -> Tensor:
        """Return a uint8 batch [rows, 3, height, width] on the device of the pixels."""
        return self.apply(pixels, rows, self.windows(pixels, rows))

    def apply(self, pixels: Pixels, rows: Rows, windows: Windows) -> Tensor:
        """Return the batch for windows that were drawn before."""
        # Nothing is scaled, so the filter does not matter.
        return resample(pixels, rows, windows, crop_size(self.crop), "bilinear")

    def draw(self, pixels: Pixels, rows: Rows, generator: torch.Generator) -> Windows:
        """Return the central window of each image, flipped or not."""
        return self.windows(pixels, rows, self.draw_uniforms(len(rows), generator))

    def draw_uniforms(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw what decides which images are flipped."""
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def windows(self, pixels: Pixels, rows: Rows, uniforms: Tensor | None = None) -> Windows:
        """Return the central window of each image, flipped by what was drawn for it, if it was."""
        height, width = crop_size(self.crop)
        heights, widths = image_sizes(pixels, rows)
        if (small := (heights < height) | (widths < width)).any():
            k = int(small.int().argmax())
            raise ValueError(
                f"image {rows[k]} has {heights[k]}×{widths[k]} pixels, too few for a crop of "
                f"{height}×{width}; use a short side of {max(height, width)} (model.resize)"
            )
        return Windows(
            top=((heights - height).double() / 2).round().long(),  # halves to even, as with files
            left=((widths - width).double() / 2).round().long(),
            height=torch.full_like(heights, height),
            width=torch.full_like(widths, width),
            flip=torch.zeros(len(heights), dtype=torch.bool)
            if uniforms is None
            else (uniforms < 0.5) & self.flip,
        )
