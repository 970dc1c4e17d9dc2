"""Augmentation: random resized crops, flips and color jitter, batched on the CPU or on a GPU.

Windows are drawn on the CPU from a separate generator, so they are the same on every device. Hue,
saturation, contrast and brightness are affine in red, green and blue: one matrix and one shift per
image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from proximetry.data.images import Interpolation, check_interpolation, crop_size
from proximetry.data.loader import Pixels
from proximetry.data.resample import PerImage, Rows, Windows, image_sizes, resample

# Attempts to draw a window that fits, before falling back to the largest central one.
_TRIES = 10
# Luma weights (ITU-R 601), as in torchvision.
_LUMA = (0.2989, 0.587, 0.114)
# Axes of color without luma (NTSC's I and Q), in whose plane hue is an angle.
_CHROMA = ((0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


@dataclass(frozen=True)
class RandomResizedCrop:
    """Random resized crop and horizontal flip, with the same distribution as torchvision's.

    Args:
        crop: side of the result, or its height and width.
        scale: smallest and largest area of the window, as a fraction of the image.
        ratio: smallest and largest aspect ratio (width / height) of the window.
        flip: flip half of the images at random.
        interpolation: "bilinear" or "bicubic", both with antialiasing.

    Examples:
        >>> from proximetry.data import PixelCache
        >>> pixels = PixelCache.in_memory([torch.zeros(40, 60, 3, dtype=torch.uint8).numpy()])
        >>> crop = RandomResizedCrop(32)
        >>> crop(pixels, [0, 0, 0], torch.Generator().manual_seed(0)).shape
        torch.Size([3, 3, 32, 32])
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
        """Return the batch of windows."""
        return resample(pixels, rows, windows, crop_size(self.crop), self.interpolation)

    def draw(self, pixels: Pixels, rows: Rows, generator: torch.Generator) -> Windows:
        """Draw a window per image."""
        return self.windows(pixels, rows, self.draw_uniforms(len(rows), generator))

    def draw_uniforms(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw random numbers for `windows`, the same count per image: a batch can be sliced."""
        return torch.rand(count, 2 * _TRIES + 3, generator=generator, dtype=torch.float64)

    def windows(self, pixels: Pixels, rows: Rows, uniforms: Tensor) -> Windows:
        """Return the window of each image for its random numbers."""
        heights, widths = image_sizes(pixels, rows)
        height, width, fits = self._shapes(heights, widths, uniforms[:, : 2 * _TRIES])
        central_height, central_width = self._central(heights, widths)
        height = torch.where(fits, height, central_height)
        width = torch.where(fits, width, central_width)
        max_top, max_left = heights - height, widths - width
        top = (uniforms[:, -3] * (max_top + 1)).long()
        left = (uniforms[:, -2] * (max_left + 1)).long()
        return Windows(
            top=torch.where(fits, top, max_top // 2),
            left=torch.where(fits, left, max_left // 2),
            height=height,
            width=width,
            flip=(uniforms[:, -1] < 0.5) & self.flip,
        )

    def _shapes(self, heights: Tensor, widths: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first window of each image that fits, and whether there was one."""
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
        """Return the largest window of an allowed aspect ratio."""
        shape = widths.double() / heights.double()
        tall = (widths.double() / self.ratio[0]).round().long()
        wide = (heights.double() * self.ratio[1]).round().long()
        height = torch.where(shape < self.ratio[0], tall, heights)
        width = torch.where(shape > self.ratio[1], wide, widths)
        return height.clamp(min=1), width.clamp(min=1)


@dataclass(frozen=True)
class CenterCrop:
    """Center crop of cached images: a square, or (height, width).

    With ``flip``, half of the images are flipped at random, for training.
    On a cache built with the embedder's resize and interpolation, the result is byte-identical to
    `resize_and_center_crop` of the files.
    """

    crop: int | tuple[int, int]
    flip: bool = False

    def __post_init__(self) -> None:
        crop_size(self.crop)

    def __call__(self, pixels: Pixels, rows: Rows) -> Tensor:
        """Return a uint8 batch [rows, 3, height, width] on the device of the pixels."""
        return self.apply(pixels, rows, self.windows(pixels, rows))

    def apply(self, pixels: Pixels, rows: Rows, windows: Windows) -> Tensor:
        """Return the batch of windows."""
        # Nothing is scaled, so the filter does not matter.
        return resample(pixels, rows, windows, crop_size(self.crop), "bilinear")

    def draw_uniforms(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the random numbers of `windows`."""
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def windows(self, pixels: Pixels, rows: Rows, uniforms: Tensor | None = None) -> Windows:
        """Return the central window of each image, flipped if its random number is below 0.5."""
        height, width = crop_size(self.crop)
        heights, widths = image_sizes(pixels, rows)
        if (small := (heights < height) | (widths < width)).any():
            k = int(small.int().argmax())
            raise ValueError(
                f"image {rows[k]} has {heights[k]}×{widths[k]} pixels, too few for a crop of "
                f"{height}×{width}. Use a short side of {max(height, width)} (model.resize)."
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


@dataclass(frozen=True)
class ColorChanges(PerImage):
    """Color changes of every image of a batch, applied in this order.

    A hue of 0 and factors of 1 leave an image unchanged.

    Attributes:
        hue: fraction of the color circle, from red through green to blue, at constant luma.
        saturation: 0 gives gray.
        contrast: 0 gives the mean brightness everywhere.
        brightness: 0 gives black.
    """

    hue: Tensor
    saturation: Tensor
    contrast: Tensor
    brightness: Tensor


@dataclass(frozen=True)
class ColorJitter:
    """Random brightness, contrast, saturation, hue and grayscale, similar to torchvision's.

    Args:
        jitter: brightness, contrast and saturation are multiplied by 1 − jitter to 1 + jitter.
        hue: maximum hue shift in either direction, as a fraction of the color circle, up to 0.5.
        grayscale: probability of converting an image to grayscale.
    """

    jitter: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0

    def __post_init__(self) -> None:
        for name, maximum in (("jitter", 1.0), ("hue", 0.5), ("grayscale", 1.0)):
            value = getattr(self, name)
            if not 0 <= value <= maximum:
                raise ValueError(f"{name} must be between 0 and {maximum}, got {value!r}")

    def __bool__(self) -> bool:
        """Return whether any change is enabled."""
        return max(self.jitter, self.hue, self.grayscale) > 0

    def draw(self, count: int, generator: torch.Generator) -> ColorChanges:
        """Draw changes, with the same number of random values per image: a batch can be sliced."""
        u = torch.rand(count, 5, generator=generator, dtype=torch.float64)
        offset = (2 * u - 1).unbind(1)
        saturation = 1 + self.jitter * offset[1]
        return ColorChanges(
            hue=self.hue * offset[0],
            saturation=torch.where(u[:, 4] < self.grayscale, 0.0, saturation),
            contrast=1 + self.jitter * offset[2],
            brightness=1 + self.jitter * offset[3],
        )


def recolor(pixels: Tensor, changes: ColorChanges) -> Tensor:
    """Return a uint8 batch [images, 3, height, width] with its colors changed, channels-last."""
    matrix, share = _matrices(changes)
    numbers = torch.cat([matrix.flatten(1), share[:, None]], dim=1).float()
    if pixels.is_cuda:
        numbers = numbers.pin_memory()  # so that the copy is asynchronous
    numbers = numbers.to(pixels.device, non_blocking=True)
    batch, _, height, width = pixels.shape
    values = pixels.permute(0, 2, 3, 1).reshape(batch, height * width, 3).float()
    mean = sum(part * weight for part, weight in zip(values.mean(1).unbind(1), _LUMA, strict=True))
    shift = (numbers[:, 9] * mean)[:, None, None].expand(-1, 1, 3)
    changed = torch.baddbmm(shift, values, numbers[:, :9].view(-1, 3, 3).mT)
    changed = changed.clamp_(0, 255).round_().to(torch.uint8)
    return changed.view(batch, height, width, 3).permute(0, 3, 1, 2)


def _matrices(changes: ColorChanges) -> tuple[Tensor, Tensor]:
    """Return matrices [images, 3, 3], and the share of the mean luma that is added."""
    luma = torch.tensor(_LUMA, dtype=torch.float64)
    axes = torch.stack([luma, *torch.tensor(_CHROMA, dtype=torch.float64)])
    angle = 2 * math.pi * changes.hue
    turn = torch.eye(3, dtype=torch.float64).repeat(len(changes), 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2], turn[:, 2, 1] = angle.sin(), -angle.sin()
    matrix = torch.linalg.inv(axes) @ turn @ axes
    saturation = changes.saturation[:, None, None]
    matrix = saturation * matrix + (1 - saturation) * (luma @ matrix)[:, None, :]
    factor = changes.brightness * changes.contrast
    return factor[:, None, None] * matrix, changes.brightness * (1 - changes.contrast)
