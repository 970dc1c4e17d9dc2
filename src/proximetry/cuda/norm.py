"""Batch norm and the activation after it.

With fixed statistics it is one pass forward and one back. Statistics of the batch cost one more
each: to take them, and to know what they pass on to every row. ACT says which activation: 0 none,
1 ReLU, 2 ReLU6; like torch's, they let NaN through.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximetry.cuda.sharing import CHANNELS, SIZES, share

# Rows of one program.
_ROWS = 128
# Programs that share the rows when sums over them are wanted: a few for each of a GPU's
# multiprocessors (four on an H200), since the sums of every one have to be joined.
_PROGRAMS = 528
# Channels and parts at once when the parts of these programs are joined: few channels, so that
# many programs share the work.
_JOIN_CHANNELS = 8
_JOIN_PARTS = 128


@triton.jit
def _tile(first, rows, C, c, BM: tl.constexpr):
    """Which entries of BM rows and some channels are there, and where."""
    r = first + tl.arange(0, BM)
    inside = (r < rows)[:, None] & (c < C)[None, :]
    return inside, r.to(tl.int64)[:, None] * C + c[None, :]


@triton.jit
def _load_affine(weight, bias, mean, variance, eps, C, c):
    """What a batch norm with these statistics does to its channels: (x − mean) · scale + bias."""
    average = tl.load(mean + c, mask=c < C, other=0.0)
    inverse = tl.rsqrt(tl.load(variance + c, mask=c < C, other=1.0) + eps)
    scale = tl.load(weight + c, mask=c < C, other=0.0) * inverse
    offset = tl.load(bias + c, mask=c < C, other=0.0)
    return scale[None, :], offset[None, :], average[None, :], inverse[None, :]


@triton.jit
def _load_slope(x, dy, place, inside, scale, offset, average, ACT: tl.constexpr):
    """x − mean, and the gradient with respect to what the activation saw."""
    away = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - average
    dz = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    z = away * scale + offset
    if ACT != 0:
        dz = tl.where(z <= 0.0, 0.0, dz)
    if ACT == 2:
        dz = tl.where(z >= 6.0, 0.0, dz)
    return away, dz


@triton.jit
def _count(part, rows, programs, BM: tl.constexpr):
    """How many rows a part has when the parts take turns at BM rows."""
    turn = programs * BM
    rest = rows % turn - part * BM
    return (rows // turn * BM + tl.minimum(tl.maximum(rest, 0), BM)).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _statistics(x, parts, rows, C, programs, BM: tl.constexpr, BC: tl.constexpr):
    """Mean and sum of squared deviations of every part of the rows."""
    c, part = share(C, BC)
    # Squares cancel when the mean is far from zero, but not around a value of the part itself.
    origin = tl.load(x + (part * BM).to(tl.int64) * C + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    squares = tl.zeros((BM, BC), tl.float32)
    for first in range(part * BM, rows, programs * BM):
        inside, place = _tile(first, rows, C, c, BM)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, value - origin[None, :], 0.0)
        total += away
        squares += away * away
    whole = tl.sum(total, axis=0)
    shift = whole / _count(part, rows, programs, BM)
    out = parts + part * 2 * C + c
    tl.store(out, origin + shift, mask=c < C)
    tl.store(out + C, tl.sum(squares, axis=0) - whole * shift, mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def _join_statistics(
    parts, mean, variance, running_mean, running_variance, batches,
    momentum, rows, C, programs,
    BM: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Statistics of all rows from those of the parts; moves the running ones."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    origin = tl.load(parts + c, mask=c < C, other=0.0)
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for first in range(0, programs, BP):
        part = first + tl.arange(0, BP)
        inside = (part < programs)[:, None] & (c < C)[None, :]
        place = part[:, None] * 2 * C + c[None, :]
        away = tl.load(parts + place, mask=inside, other=0.0) - origin[None, :]
        away = tl.where(inside, away, 0.0)
        weighted = away * _count(part, rows, programs, BM)[:, None]
        total += weighted
        squares += weighted * away + tl.load(parts + C + place, mask=inside, other=0.0)
    whole = tl.sum(total, axis=0)
    n = rows.to(tl.float32)
    average = origin + whole / n
    spread = tl.sum(squares, axis=0) - whole * (whole / n)
    spread = tl.where(spread < 0.0, 0.0, spread)  # rounding; NaN stays
    tl.store(mean + c, average, mask=c < C)
    tl.store(variance + c, spread / n, mask=c < C)
    old = tl.load(running_mean + c, mask=c < C, other=0.0)
    tl.store(running_mean + c, (1 - momentum) * old + momentum * average, mask=c < C)
    old = tl.load(running_variance + c, mask=c < C, other=0.0)
    new = (1 - momentum) * old + momentum * (spread / (n - 1))
    tl.store(running_variance + c, new, mask=c < C)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=SIZES)
def _forward_norm(
    x, y, weight, bias, mean, variance,
    eps, rows, C,
    ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    c, part = share(C, BC)
    inside, place = _tile(part * BM, rows, C, c, BM)
    scale, offset, average, _ = _load_affine(weight, bias, mean, variance, eps, C, c)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    z = (value - average) * scale + offset
    if ACT != 0:
        z = tl.where(z < 0.0, 0.0, z)
    if ACT == 2:
        z = tl.where(z > 6.0, 6.0, z)
    tl.store(y + place, z.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _backward_norm(
    x, dy, dx, weight, bias, mean, variance,
    eps, parts, rows, C, programs,
    MOVING: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    c, part = share(C, BC)
    scale, offset, average, inverse = _load_affine(weight, bias, mean, variance, eps, C, c)
    dbias = tl.zeros((BM, BC), tl.float32)
    dweight = tl.zeros((BM, BC), tl.float32)
    for first in range(part * BM, rows, programs * BM):
        inside, place = _tile(first, rows, C, c, BM)
        away, dz = _load_slope(x, dy, place, inside, scale, offset, average, ACT)
        if not MOVING:
            tl.store(dx + place, (dz * scale).to(dx.dtype.element_ty), mask=inside)
        dbias += dz
        dweight += dz * away
    out = parts + part * 2 * C + c
    tl.store(out, tl.sum(dweight * inverse, axis=0), mask=c < C)
    tl.store(out + C, tl.sum(dbias, axis=0), mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def _backward_moving(
    x, dy, dx, weight, bias, mean, variance,
    eps, sums, rows, C,
    ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of x when every row moves the statistics; `sums` are the whole ones, [2, C]."""
    c, part = share(C, BC)
    inside, place = _tile(part * BM, rows, C, c, BM)
    scale, offset, average, inverse = _load_affine(weight, bias, mean, variance, eps, C, c)
    n = rows.to(tl.float32)
    along = inverse * (tl.load(sums + c, mask=c < C, other=0.0)[None, :] / n)
    level = tl.load(sums + C + c, mask=c < C, other=0.0)[None, :] / n
    away, dz = _load_slope(x, dy, place, inside, scale, offset, average, ACT)
    slope = scale * (dz - level - away * along)
    tl.store(dx + place, slope.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _join_sums(parts, sums, C, programs, BP: tl.constexpr, BC: tl.constexpr):
    """Sums of all parts, [programs, C] to [C]; torch's own takes several times as long."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BP, BC), tl.float32)
    for first in range(0, programs, BP):
        part = first + tl.arange(0, BP)
        inside = (part < programs)[:, None] & (c < C)[None, :]
        total += tl.load(parts + part[:, None] * C + c[None, :], mask=inside, other=0.0)
    tl.store(sums + c, tl.sum(total, axis=0), mask=c < C)


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    """Return rows, channels, blocks of channels, and the programs that share the rows of one."""
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    blocks = triton.cdiv(channels, CHANNELS)
    programs = max(1, min(triton.cdiv(rows, _ROWS), _PROGRAMS // blocks))
    return rows, channels, blocks, programs


def statistics(
    x: Tensor, mean: Tensor, variance: Tensor, batches: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of x, and move a layer's running ones in place.

    `batches` counts the batches seen. Needs at least two rows.
    """
    rows, channels, blocks, programs = _shape(x)
    parts = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    _statistics[(blocks * programs,)](x, parts, rows, channels, programs, BM=_ROWS, BC=CHANNELS)
    found = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    _join_statistics[(triton.cdiv(channels, _JOIN_CHANNELS),)](
        parts, *found, mean, variance, batches, momentum, rows, channels, programs,
        BM=_ROWS, BP=_JOIN_PARTS, BC=_JOIN_CHANNELS,
    )  # fmt: skip
    for moved in (mean, variance, batches):  # autograd did not see it
        torch.autograd.graph.increment_version(moved)
    return found[0], found[1]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, act: int, moving: bool, *layer: Tensor) -> Tensor:
        ctx.save_for_backward(x, *layer)
        ctx.settings = eps, act, moving
        y = torch.empty_like(x)
        rows, channels, blocks, _ = _shape(x)
        _forward_norm[(blocks * triton.cdiv(rows, _ROWS),)](
            x, y, *layer, eps, rows, channels, ACT=act, BM=_ROWS, BC=CHANNELS
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *layer = ctx.saved_tensors
        eps, act, moving = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        rows, channels, blocks, programs = _shape(x)
        parts = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
        _backward_norm[(blocks * programs,)](
            x, dy, dx, *layer, eps, parts, rows, channels, programs,
            MOVING=moving, ACT=act, BM=_ROWS, BC=CHANNELS,
        )  # fmt: skip
        sums = torch.empty(2, channels, dtype=torch.float32, device=x.device)
        _join_sums[(triton.cdiv(2 * channels, _JOIN_CHANNELS),)](
            parts, sums, 2 * channels, programs, BP=_JOIN_PARTS, BC=_JOIN_CHANNELS
        )
        if moving:
            _backward_moving[(blocks * triton.cdiv(rows, _ROWS),)](
                x, dy, dx, *layer, eps, sums, rows, channels, ACT=act, BM=_ROWS, BC=CHANNELS
            )
        return dx, None, None, None, *sums, None, None


norm: Callable[..., Tensor] = _Norm.apply
"""norm(x, eps, act, moving, weight, bias, mean, variance) is act(batch norm of x).

All but x are [C] in float32. With `moving`, mean and variance are those of x, and x has its
gradient through them too; else they are constants. Of all the large tensors, x alone is saved.
"""
