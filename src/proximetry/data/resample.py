"""Windows of images scaled into one batch, in ways that agree to one grey level.

On the CPU every window goes through torch's own antialiased resize of bytes. On a GPU, where a
launch per image would dominate, one kernel makes the whole batch. On other devices, and where
Triton cannot compile the kernel, scaling is two matrix products per batch: rows of weights over the
source's rows, and over its columns.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from proximetry.data.pixels import PixelCache

Kernel = Callable[[torch.Tensor, torch.Tensor, tuple[int, int], str], torch.Tensor]

# Source pixels gathered at once: 256 MiB as float32, twice that for their places.
_GATHER = 1 << 26

# The kernel counts in steps of half a pixel of the result; up to here that fits 32 bits.
_LARGEST = 1 << 29


@dataclass(frozen=True)
class Windows:
    """For every image of a batch, one whole number (or truth value) per field.

    The window at (top, left) of height × width is scaled to scaled_height × scaled_width, of
    which the result shows the part that starts at (first_row, first_column), then mirrored
    where `flip` says so.
    """

    top: torch.Tensor
    left: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor
    flip: torch.Tensor
    scaled_height: torch.Tensor
    scaled_width: torch.Tensor
    first_row: torch.Tensor
    first_column: torch.Tensor

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, part: slice) -> Windows:
        """Return the windows of a slice of the batch."""
        return Windows(*(getattr(self, f.name)[part] for f in fields(self)))


def resample(
    pixels: PixelCache,
    rows: Sequence[int] | npt.NDArray[np.int64],
    windows: Windows,
    size: tuple[int, int],
    interpolation: str,
) -> torch.Tensor:
    """Return a uint8 batch [rows, 3, *size] on the device of the pixels."""
    chosen = np.asarray(rows, dtype=np.int64)
    _check(pixels, chosen, windows, size)
    device = pixels.flat.device
    if device.type == "cpu":
        return resample_each(pixels, chosen, windows, size, interpolation)
    kernel = _kernel() if device.type == "cuda" and _countable(windows) else None
    if kernel is None:
        return resample_together(pixels, chosen, windows, size, interpolation)
    table = window_table(pixels, chosen, windows).pin_memory()
    # Nothing waits for the copy: the pinned memory is not used again before it is done.
    return kernel(pixels.flat, table.to(device, non_blocking=True), size, interpolation)


def window_table(pixels: PixelCache, rows: npt.NDArray[np.int64], windows: Windows) -> torch.Tensor:
    """Return all that the kernel has to know, int64 [image, FIELDS of the kernel]."""
    columns = [torch.from_numpy(pixels.offsets[rows]), torch.from_numpy(pixels.widths[rows])]
    columns += [getattr(windows, f.name) for f in fields(windows)]
    return torch.stack([column.long() for column in columns], dim=1)


@cache
def _kernel() -> Kernel | None:
    """Return the kernel, or None with a warning where Triton cannot work."""
    try:
        from proximetry.cuda.resample_kernel import find_driver, resample_fused

        find_driver()
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"crops on the GPU are made without Triton, several times slower: {error}",
            stacklevel=3,
        )
        return None
    return resample_fused


def _countable(windows: Windows) -> bool:
    down = windows.height * windows.scaled_height < _LARGEST
    return bool((down & (windows.width * windows.scaled_width < _LARGEST)).all())


def _check(
    pixels: PixelCache, rows: npt.NDArray[np.int64], windows: Windows, size: tuple[int, int]
) -> None:
    """Refuse windows outside their images: a GPU would read whatever lies there."""
    if len(rows) != len(windows):
        raise ValueError(f"{len(rows)} images, but {len(windows)} windows")
    if not ((rows >= 0) & (rows < len(pixels))).all():
        raise ValueError(f"rows run from 0 to {len(pixels) - 1}, got {rows.min()} … {rows.max()}")
    w = windows
    heights, widths = torch.from_numpy(pixels.heights[rows]), torch.from_numpy(pixels.widths[rows])
    inside = (w.top >= 0) & (w.height > 0) & (w.top + w.height <= heights)
    inside &= (w.left >= 0) & (w.width > 0) & (w.left + w.width <= widths)
    inside &= (w.first_row >= 0) & (w.first_row + size[0] <= w.scaled_height)
    inside &= (w.first_column >= 0) & (w.first_column + size[1] <= w.scaled_width)
    if not inside.all():
        k = int(inside.int().argmin())
        values = ", ".join(f"{f.name} {int(getattr(w, f.name)[k])}" for f in fields(w))
        raise ValueError(
            f"the window of image {rows[k]} must lie inside its {heights[k]}×{widths[k]} pixels "
            f"and hold a result of {size[0]}×{size[1]}, got {values}"
        )


def resample_each(
    pixels: PixelCache,
    rows: npt.NDArray[np.int64],
    windows: Windows,
    size: tuple[int, int],
    interpolation: str,
) -> torch.Tensor:
    """Scale one window after the other with torch's resize of bytes."""
    # The cache keeps a pixel's three bytes together; the batch does too, and convolutions on
    # a CPU prefer it.
    batch = torch.empty((len(rows), 3, *size), dtype=torch.uint8, memory_format=torch.channels_last)
    numbers = torch.stack([getattr(windows, f.name).long() for f in fields(windows)], dim=1)
    for place, (row, window) in enumerate(zip(rows.tolist(), numbers.tolist(), strict=True)):
        top, left, height, width, flip, scaled_height, scaled_width, y, x = window
        image = pixels.tensor(row)[top : top + height, left : left + width].permute(2, 0, 1)
        if (height, width) != (scaled_height, scaled_width):
            image = F.interpolate(
                image[None],
                size=(scaled_height, scaled_width),
                mode=interpolation,
                antialias=True,
                align_corners=False,
            )[0]
        image = image[:, y : y + size[0], x : x + size[1]]
        batch[place] = image.flip(-1) if flip else image
    return batch


def resample_together(
    pixels: PixelCache,
    rows: npt.NDArray[np.int64],
    windows: Windows,
    size: tuple[int, int],
    interpolation: str,
) -> torch.Tensor:
    """Scale all windows with two batched matrix products, on any device."""
    tallest, widest = int(windows.height.max()), int(windows.width.max())
    group = max(1, _GATHER // (3 * tallest * widest))
    parts = [
        _scale_group(pixels, rows[i : i + group], windows[i : i + group], size, interpolation)
        for i in range(0, len(rows), group)
    ]
    return torch.cat(parts)


def _scale_group(
    pixels: PixelCache,
    rows: npt.NDArray[np.int64],
    windows: Windows,
    size: tuple[int, int],
    interpolation: str,
) -> torch.Tensor:
    device = pixels.flat.device
    source = _gather(pixels, rows, windows)
    down = axis_weights(
        windows.height, windows.scaled_height, windows.first_row, size[0], interpolation
    )
    across = axis_weights(
        windows.width, windows.scaled_width, windows.first_column, size[1], interpolation
    )
    across = torch.where(windows.flip[:, None, None], across.flip(1), across)
    down, across = down.to(device)[:, None], across.to(device)[:, None]
    # Columns first, and no more than a byte can hold in between: so does torch on the CPU.
    narrow = (source @ across.mT).clamp_(0, 255)
    return (down @ narrow).round_().clamp_(0, 255).to(torch.uint8)


def _gather(pixels: PixelCache, rows: npt.NDArray[np.int64], windows: Windows) -> torch.Tensor:
    """Return the windows' pixels as float32 [image, 3, tallest, widest].

    Beyond a smaller window its last row or column is repeated; the weights there are zero.
    """
    device = pixels.flat.device
    width = torch.from_numpy(pixels.widths[rows])
    start = torch.from_numpy(pixels.offsets[rows]) + (windows.top * width + windows.left) * 3
    y = torch.arange(int(windows.height.max()))
    x = torch.arange(int(windows.width.max()))
    down = torch.minimum(y[None], windows.height[:, None] - 1) * width[:, None] * 3
    across = torch.minimum(x[None], windows.width[:, None] - 1) * 3
    lines = (start[:, None] + down).to(device)[:, None, :, None]
    channels = torch.arange(3, device=device)[None, :, None, None]
    places = lines + across.to(device)[:, None, None, :] + channels
    return pixels.flat[places].float()


def axis_weights(
    length: torch.Tensor,
    scaled: torch.Tensor,
    first: torch.Tensor,
    count: int,
    interpolation: str,
) -> torch.Tensor:
    """Return [image, count, longest] weights: result `first + i` as a mean over the source.

    The filter is a triangle, or Keys' cubic with a = −1/2, as wide as one step of the result
    when scaling down (antialiasing) and cut off at the ends of the source.
    """
    step = (length.double() / scaled)[:, None, None]
    width = step.clamp(min=1)
    reach = width * (1 if interpolation == "bilinear" else 2)
    results = (first[:, None] + torch.arange(count))[:, :, None]
    centre = step * (results + 0.5)
    source = torch.arange(int(length.max()))[None, None, :]
    begin = (centre - reach + 0.5).long().clamp(min=0)
    end = torch.minimum((centre + reach + 0.5).long(), length[:, None, None])
    distance = ((source - centre + 0.5) / width).abs()
    weights = _triangle(distance) if interpolation == "bilinear" else _cubic(distance)
    weights = torch.where((source >= begin) & (source < end), weights, 0.0)
    return (weights / weights.sum(dim=2, keepdim=True)).float()


def _triangle(x: torch.Tensor) -> torch.Tensor:
    return (1 - x).clamp(min=0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
