"""Resample windows of many images into one batch with one launch of a Triton kernel.

A program computes a tile of one result. Filter positions are exact (integers); weights are float32,
and results are rounded to bytes once, at the end.
"""

import torch
import triton
import triton.language as tl

# Columns of the table, one row per image; lengths in pixels, offset in bytes.
FIELDS = ("offset", "stride", "top", "left", "height", "width", "flip")

# A warp writes 32 pixels of a line; a thread computes four rows, which share horizontal weights.
_ROWS, _COLUMNS, _WARPS = 16, 32, 4


def resample_fused(
    flat: torch.Tensor, table: torch.Tensor, size: tuple[int, int], interpolation: str
) -> torch.Tensor:
    """Return a uint8 batch [image, 3, *size], in memory [image, *size, 3].

    Args:
        flat: the pixels of all images, uint8, three bytes to a pixel.
        table: int64 [image, FIELDS], on the device of `flat`: the window of each image. The caller
            checks that windows lie inside the images.
        size: height and width of the result.
        interpolation: "bilinear" or "bicubic".
    """
    height, width = size
    batch = torch.empty(
        (len(table), 3, height, width),
        dtype=torch.uint8,
        device=flat.device,
        memory_format=torch.channels_last,
    )
    tiles = triton.cdiv(height, _ROWS) * triton.cdiv(width, _COLUMNS)
    with torch.cuda.device(flat.get_device()):  # Triton launches on the current device
        _resample[(len(table) * tiles,)](
            flat, table.contiguous(), batch, HEIGHT=height, WIDTH=width,
            SUPPORT=1 if interpolation == "bilinear" else 2, ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )  # fmt: skip
    return batch


def check_driver() -> None:
    """Raise an error if Triton cannot run: it needs a GPU and a C compiler."""
    triton.runtime.driver.active.get_current_device()


@triton.jit
def _resample(
    flat, table, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SUPPORT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """batch[y, x] = Σ_j Σ_i w(y, j) · w(x, i) · window[j, i] / (Σ w · Σ w), separable filter w.

    SUPPORT 1 is the triangle filter (bilinear), 2 the cubic filter with a = −1/2 (bicubic), both
    widened by the scale when shrinking (antialiasing).
    """
    tiles_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = tiles_per_row * ((HEIGHT + ROWS - 1) // ROWS)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    entry = table + image * 7  # FIELDS, by number
    # An image has fewer than 2³¹ bytes, but all images together may have more.
    line_bytes = tl.load(entry + 1).to(tl.int32) * 3
    window = tl.load(entry + 2).to(tl.int32) * line_bytes + tl.load(entry + 3).to(tl.int32) * 3
    source = flat + tl.load(entry) + window
    height, width = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    flip = tl.load(entry + 6).to(tl.int32)

    row = tile // tiles_per_row * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile % tiles_per_row * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < HEIGHT) & (column < WIDTH)
    target = batch + image * (HEIGHT * WIDTH * 3) + (row * WIDTH + column) * 3
    # Outside the result, the last pixel is computed again but not stored.
    row = tl.minimum(row, HEIGHT - 1)
    column = tl.minimum(column, WIDTH - 1)
    column = tl.where(flip != 0, WIDTH - 1 - column, column)

    first_y, from_y = _first_tap(row, height, HEIGHT, SUPPORT)
    first_x, from_x = _first_tap(column, width, WIDTH, SUPPORT)
    step_y, taps_y = _spacing(height, HEIGHT, SUPPORT)
    step_x, taps_x = _spacing(width, WIDTH, SUPPORT)

    # Weights are normalized after the loops: using the result of a loop in another one would
    # exchange data between threads in every step.
    total_x = tl.zeros((1, COLUMNS), tl.float32)
    for i in range(taps_x):
        total_x += _weight(from_x + i * step_x, first_x + i, width, SUPPORT)
    inverse_x = 1.0 / total_x
    total_y = tl.zeros((ROWS, 1), tl.float32)
    for j in range(taps_y):
        total_y += _weight(from_y + j * step_y, first_y + j, height, SUPPORT)
    inverse_y = 1.0 / total_y

    red = tl.zeros((ROWS, COLUMNS), tl.float32)
    green = tl.zeros((ROWS, COLUMNS), tl.float32)
    blue = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in range(taps_y):
        weight_y = _weight(from_y + j * step_y, first_y + j, height, SUPPORT)
        line = tl.minimum(first_y + j, height - 1) * line_bytes
        line_red = tl.zeros((ROWS, COLUMNS), tl.float32)
        line_green = tl.zeros((ROWS, COLUMNS), tl.float32)
        line_blue = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in range(taps_x):
            weight_x = _weight(from_x + i * step_x, first_x + i, width, SUPPORT)
            # Weights beyond the edge are zero, so the last pixel is read without a mask.
            pixel = source + (line + tl.minimum(first_x + i, width - 1) * 3)
            line_red += weight_x * tl.load(pixel).to(tl.float32)
            line_green += weight_x * tl.load(pixel + 1).to(tl.float32)
            line_blue += weight_x * tl.load(pixel + 2).to(tl.float32)
        red += weight_y * _clamp_line(line_red * inverse_x, SUPPORT)
        green += weight_y * _clamp_line(line_green * inverse_x, SUPPORT)
        blue += weight_y * _clamp_line(line_blue * inverse_x, SUPPORT)
    tl.store(target, _to_byte(red * inverse_y), mask=mask)
    tl.store(target + 1, _to_byte(green * inverse_y), mask=mask)
    tl.store(target + 2, _to_byte(blue * inverse_y), mask=mask)


@triton.jit
def _first_tap(result, length, result_length: tl.constexpr, SUPPORT: tl.constexpr):
    """Return the first pixel under the filter and its distance from the center, in filter widths.

    The center is (result + 1/2) · length / result_length and the filter extends SUPPORT · max(1,
    length / result_length) to either side; both are multiplied by 2 · result_length here.
    """
    longer = tl.maximum(length, result_length)
    center = (2 * result + 1) * length
    first = (center - 2 * SUPPORT * longer + result_length) // (2 * result_length)
    first = tl.maximum(first, 0)
    distance = (2 * first + 1) * result_length - center
    return first, distance.to(tl.float32) / (2 * longer).to(tl.float32)


@triton.jit
def _spacing(length, result_length: tl.constexpr, SUPPORT: tl.constexpr):
    """Return the distance between pixels, in filter widths, and the largest number of taps."""
    longer = tl.maximum(length, result_length)
    taps = (2 * SUPPORT * longer + result_length - 1) // result_length
    return tl.cast(result_length, tl.float32) / longer.to(tl.float32), taps


@triton.jit
def _weight(distance, index, length, SUPPORT: tl.constexpr):
    """Return the filter's weight; zero beyond its support and beyond the source."""
    x = tl.abs(distance)
    if SUPPORT == 1:
        value = tl.maximum(1.0 - x, 0.0)
    else:
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        value = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(index < length, value, 0.0)


@triton.jit
def _clamp_line(value, SUPPORT: tl.constexpr):
    if SUPPORT == 2:  # clamp between the passes, as torch does on the CPU
        value = tl.minimum(tl.maximum(value, 0.0), 255.0)
    return value


@triton.jit
def _to_byte(value):
    # float32 numbers of at least 2²³ are integers: adding 2²³ rounds, halves to even.
    rounded = (value + 8388608.0) - 8388608.0
    return tl.minimum(tl.maximum(rounded, 0.0), 255.0).to(tl.uint8)
