"""Windows of images, scaled into one batch.

On a GPU one Triton kernel makes the whole batch. Elsewhere, and without Triton, torch's antialiased
resize of bytes scales each window on the CPU; the two agree to one gray level.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from proximetry.data.loader import Pixels

Kernel = Callable[[Tensor, Tensor, tuple[int, int], str], Tensor]
Rows = Sequence[int] | npt.NDArray[np.int64]

# Limit of window side × result side: the kernel computes positions in int32.
_MAX_STEPS = 1 << 29


@dataclass(frozen=True)
class PerImage:
    """Tensors with one entry per image of a batch."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, part: slice) -> Self:
        """Return the entries of a slice of the batch."""
        return replace(self, **{name: values[part] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Windows(PerImage):
    """The window at (top, left) of height × width of every image of a batch.

    The result is mirrored where `flip` is True.
    """

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor

    def table(self) -> Tensor:
        """Return int64 [image, field]."""
        return torch.stack([values.long() for values in vars(self).values()], dim=1)


def resample(
    pixels: Pixels, rows: Rows, windows: Windows, size: tuple[int, int], interpolation: str
) -> Tensor:
    """Return a uint8 batch [rows, 3, *size] on the device of the pixels."""
    images = np.asarray(rows, dtype=np.int64)
    _check(pixels, images, windows)
    device = pixels.flat.device
    steps = torch.maximum(windows.height * size[0], windows.width * size[1])
    kernel = _kernel() if device.type == "cuda" and (steps < _MAX_STEPS).all() else None
    if kernel is None:
        return _resample_each(pixels, images, windows, size, interpolation).to(device)
    table = window_table(pixels, images, windows).pin_memory()
    return kernel(pixels.flat, table.to(device, non_blocking=True), size, interpolation)


def image_sizes(pixels: Pixels, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the heights and widths of the given images."""
    images = np.asarray(rows, dtype=np.int64)
    if images.ndim != 1:
        raise ValueError(f"rows must be a list of image numbers, got shape {images.shape}")
    if not ((images >= 0) & (images < len(pixels))).all():
        got = f"{images.min()} … {images.max()}"
        raise ValueError(f"rows must be between 0 and {len(pixels) - 1}, got {got}")
    return torch.from_numpy(pixels.heights[images]), torch.from_numpy(pixels.widths[images])


def window_table(pixels: Pixels, rows: npt.NDArray[np.int64], windows: Windows) -> Tensor:
    """Return the table that the kernel reads, int64 [image, FIELDS of the kernel]."""
    locations = np.stack([pixels.offsets[rows], pixels.widths[rows]], axis=1)
    return torch.cat([torch.from_numpy(locations), windows.table()], dim=1)


@cache
def _kernel() -> Kernel | None:
    """Return the kernel, or None with a warning if Triton is unavailable."""
    try:
        from proximetry.kernels.resample import check_driver, resample_fused

        check_driver()
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"Triton is unavailable; crops are resampled on the CPU, several times slower: {error}",
            stacklevel=3,
        )
        return None
    return resample_fused


def _check(pixels: Pixels, rows: npt.NDArray[np.int64], windows: Windows) -> None:
    """Raise for windows outside their images: the kernel would read other memory."""
    if len(rows) != len(windows):
        raise ValueError(f"{len(rows)} images, but {len(windows)} windows")
    heights, widths = image_sizes(pixels, rows)
    w = windows
    inside = (w.top >= 0) & (w.height > 0) & (w.top + w.height <= heights)
    inside &= (w.left >= 0) & (w.width > 0) & (w.left + w.width <= widths)
    if not inside.all():
        k = int(inside.int().argmin())
        values = ", ".join(f"{f.name} {int(getattr(w, f.name)[k])}" for f in fields(w))
        raise ValueError(
            f"the window of image {rows[k]} must lie inside its {heights[k]}×{widths[k]} pixels, "
            f"got {values}"
        )


def _resample_each(
    pixels: Pixels,
    rows: npt.NDArray[np.int64],
    windows: Windows,
    size: tuple[int, int],
    interpolation: str,
) -> Tensor:
    """Scale one window after the other on the CPU with torch's resize of bytes."""
    # The bytes of a pixel stay together, which is fast in convolutions on a CPU.
    batch = torch.empty((len(rows), 3, *size), dtype=torch.uint8, memory_format=torch.channels_last)
    for k, (row, window) in enumerate(zip(rows.tolist(), windows.table().tolist(), strict=True)):
        top, left, height, width, flip = window
        image = pixels.tensor(row)[top : top + height, left : left + width].cpu().permute(2, 0, 1)
        if (height, width) != size:
            image = F.interpolate(
                image[None], size=size, mode=interpolation, antialias=True, align_corners=False
            )[0]
        batch[k] = image.flip(-1) if flip else image
    return batch
