"""Windows of images scaled into one batch by one launch of a Triton kernel.

A program makes a tile of one image's result. Where the filter lies is computed in whole numbers, so
it is exact; its weights are float32, and rounding to bytes happens once, at the end.
"""

import torch
import triton
import triton.language as tl

# What a row of the table says about an image, in this order; lengths in pixels, offset in bytes.
FIELDS = ("offset", "stride", "top", "left", "height", "width", "flip")

# A warp writes 32 pixels of a line; a thread makes four below each other, which share the weights
# across.
_ROWS, _COLUMNS, _WARPS = 16, 32, 4


def resample_fused(
    flat: torch.Tensor, table: torch.Tensor, size: tuple[int, int], interpolation: str
) -> torch.Tensor:
    """Return a uint8 batch [image, 3, *size], in memory [image, *size, 3].

    Args:
        flat: the pixels of all images, uint8, three bytes to a pixel.
        table: int64 [image, FIELDS], on the device of `flat`: the window of each image that is
            scaled to the result. It is for the caller to check that windows lie inside.
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
            flat,
            table.contiguous(),
            batch,
            HEIGHT=height,
            WIDTH=width,
            SUPPORT=1 if interpolation == "bilinear" else 2,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )
    return batch


def find_driver() -> None:
    """Raise an error where Triton cannot work: it needs a GPU, and a C compiler to reach it."""
    triton.runtime.driver.active.get_current_device()


@triton.jit
def _resample(
    flat,
    table,
    batch,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SUPPORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = across * ((HEIGHT + ROWS - 1) // ROWS)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    entry = table + image * 7  # FIELDS, by number
    # An image has fewer than 2³¹ bytes; all images together need not.
    line_bytes = tl.load(entry + 1).to(tl.int32) * 3
    window = tl.load(entry + 2).to(tl.int32) * line_bytes + tl.load(entry + 3).to(tl.int32) * 3
    source = flat + tl.load(entry) + window
    height, width = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    flip = tl.load(entry + 6).to(tl.int32)

    row = tile // across * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    wanted = (row < HEIGHT) & (column < WIDTH)
    target = batch + image * (HEIGHT * WIDTH * 3) + (row * WIDTH + column) * 3
    # Beyond the edge of the result the last pixel is made again, and not written.
    row = tl.minimum(row, HEIGHT - 1)
    column = tl.minimum(column, WIDTH - 1)
    column = tl.where(flip != 0, WIDTH - 1 - column, column)

    first_y, from_y = _begin(row, height, HEIGHT, SUPPORT)
    first_x, from_x = _begin(column, width, WIDTH, SUPPORT)
    step_y, taps_y = _spacing(height, HEIGHT, SUPPORT)
    step_x, taps_x = _spacing(width, WIDTH, SUPPORT)

    # The sums are divided by after the loops, not in them: as what comes out of a loop, they would
    # have to be handed from thread to thread every time.
    total_x = tl.zeros((1, COLUMNS), tl.float32)
    for i in range(taps_x):
        total_x += _weight(from_x + i * step_x, first_x + i, width, SUPPORT)
    share_x = 1.0 / total_x
    total_y = tl.zeros((ROWS, 1), tl.float32)
    for j in range(taps_y):
        total_y += _weight(from_y + j * step_y, first_y + j, height, SUPPORT)
    share_y = 1.0 / total_y

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
            # A weight beyond the edge is zero; reading the last pixel instead needs no mask.
            place = source + (line + tl.minimum(first_x + i, width - 1) * 3)
            line_red += weight_x * tl.load(place).to(tl.float32)
            line_green += weight_x * tl.load(place + 1).to(tl.float32)
            line_blue += weight_x * tl.load(place + 2).to(tl.float32)
        red += weight_y * _to_line(line_red * share_x, SUPPORT)
        green += weight_y * _to_line(line_green * share_x, SUPPORT)
        blue += weight_y * _to_line(line_blue * share_x, SUPPORT)
    tl.store(target, _to_byte(red * share_y), mask=wanted)
    tl.store(target + 1, _to_byte(green * share_y), mask=wanted)
    tl.store(target + 2, _to_byte(blue * share_y), mask=wanted)


@triton.jit
def _begin(result, length, scaled: tl.constexpr, SUPPORT: tl.constexpr):
    """First pixel under the filter, and where it lies from the centre in widths of the filter.

    The centre is (result + 1/2) · length / scaled and the filter reaches SUPPORT · max(1, length /
    scaled) to either side; all of it is multiplied by 2 · scaled here.
    """
    longer = tl.maximum(length, scaled)
    center = (2 * result + 1) * length
    first = (center - 2 * SUPPORT * longer + scaled) // (2 * scaled)
    first = tl.maximum(first, 0)
    away = (2 * first + 1) * scaled - center
    return first, away.to(tl.float32) / (2 * longer).to(tl.float32)


@triton.jit
def _spacing(length, scaled: tl.constexpr, SUPPORT: tl.constexpr):
    """Distance between pixels in widths of the filter, and how many it can cover."""
    longer = tl.maximum(length, scaled)
    taps = (2 * SUPPORT * longer + scaled - 1) // scaled
    return tl.cast(scaled, tl.float32) / longer.to(tl.float32), taps


@triton.jit
def _weight(distance, place, length, SUPPORT: tl.constexpr):
    """The filter, which is zero by itself beyond its reach, cut off at the end of the source."""
    x = tl.abs(distance)
    if SUPPORT == 1:
        value = tl.maximum(1.0 - x, 0.0)
    else:
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        value = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(place < length, value, 0.0)


@triton.jit
def _to_line(value, SUPPORT: tl.constexpr):
    if SUPPORT == 2:  # no more than a byte can hold in between: so does torch on the CPU
        value = tl.minimum(tl.maximum(value, 0.0), 255.0)
    return value


@triton.jit
def _to_byte(value):
    # In float32, values from 2²³ on are integers: adding one rounds, halves to even.
    whole = (value + 8388608.0) - 8388608.0
    return tl.minimum(tl.maximum(whole, 0.0), 255.0).to(tl.uint8)
