"""Color jitter and random grayscale, batched on the device of the pixels.

Hue, saturation, contrast and brightness are affine in red, green and blue: for an image they are
one matrix and one shift, and a batch is one product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# How bright red, green and blue appear (ITU-R 601), as torchvision has them.
_LUMA = (0.2989, 0.587, 0.114)
# Two axes of color without luma; hue turns them into each other (NTSC's I and Q).
_CHROMA = ((0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


@dataclass(frozen=True)
class ColorChanges:
    """What was drawn for every image of a batch; applied in this order.

    A hue of 0 and factors of 1 leave an image as it is.

    Attributes:
        hue: fraction of the color circle, from red over green to blue, at the same luma.
        saturation: 0 leaves gray.
        contrast: 0 leaves the mean brightness.
        brightness: 0 leaves black.
    """

    hue: Tensor
    saturation: Tensor
    contrast: Tensor
    brightness: Tensor

    def __len__(self) -> int:
        return len(self.hue)

    def __getitem__(self, part: slice) -> ColorChanges:
        """Return what happens to a slice of the batch."""
        return ColorChanges(*(getattr(self, f.name)[part] for f in fields(self)))


@dataclass(frozen=True)
class ColorJitter:
    """Random brightness, contrast, saturation and hue, much as torchvision's; random grayscale.

    Args:
        jitter: brightness, contrast and saturation are multiplied by 1 − jitter to 1 + jitter.
        hue: largest hue shift either way, as a fraction of the color circle; 0.5 is any hue.
        grayscale: probability that an image becomes gray.
    """

    jitter: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("jitter", 1.0), ("hue", 0.5), ("grayscale", 1.0)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ValueError(f"{name} must be between 0 and {most}, got {value!r}")

    def __bool__(self) -> bool:
        """Whether it does anything."""
        return max(self.jitter, self.hue, self.grayscale) > 0

    def draw(self, count: int, generator: torch.Generator) -> ColorChanges:
        """Draw for n images; all take as many random values, so a batch can be sliced."""
        u = torch.rand(count, 5, generator=generator, dtype=torch.float64)
        around = (2 * u - 1).unbind(1)
        saturation = 1 + self.jitter * around[1]
        return ColorChanges(
            hue=self.hue * around[0],
            saturation=torch.where(u[:, 4] < self.grayscale, 0.0, saturation),
            contrast=1 + self.jitter * around[2],
            brightness=1 + self.jitter * around[3],
        )


def recolor(pixels: Tensor, changes: ColorChanges) -> Tensor:
    """Return a uint8 batch [images, 3, height, width] with its colors changed, channels-last."""
    matrix, share = _matrices(changes)
    numbers = torch.cat([matrix.flatten(1), share[:, None]], dim=1).float()
    if pixels.is_cuda:
        numbers = numbers.pin_memory()  # so that nothing waits for the copy
    numbers = numbers.to(pixels.device, non_blocking=True)
    batch, _, height, width = pixels.shape
    values = pixels.permute(0, 2, 3, 1).reshape(batch, height * width, 3).float()
    mean = sum(part * weight for part, weight in zip(values.mean(1).unbind(1), _LUMA, strict=True))
    shift = (numbers[:, 9] * mean)[:, None, None].expand(-1, 1, 3)
    changed = torch.baddbmm(shift, values, numbers[:, :9].view(-1, 3, 3).mT)
    changed = changed.clamp_(0, 255).round_().to(torch.uint8)
    return changed.view(batch, height, width, 3).permute(0, 3, 1, 2)


def _matrices(changes: ColorChanges) -> tuple[Tensor, Tensor]:
    """Return [images, 3, 3], and which share of an image's mean luma is added to it."""
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
