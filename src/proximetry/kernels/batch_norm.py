"""Batch norm with its activation: y = act(x̂ · weight + bias), x̂ = (x − mean) / √(variance + eps).

Fixed statistics need one pass forward and one backward, batch statistics one more each. ACT is the
activation: 0 none, 1 ReLU, 2 ReLU6; NaN is preserved, as by torch.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximetry.kernels.channels import CHANNELS, SIZES, program_channels

_ROWS = 128  # per program and step
# Programs that reduce rows to partial sums: four per multiprocessor of an H200.
_PROGRAMS = 528
# Channels and partial sums per combining program. Few channels per program give more parallelism.
_JOIN_CHANNELS = 8
_JOIN_PARTS = 128


@triton.jit
def _tile(first, rows, C, c, BM: tl.constexpr):
    """Return mask and offsets of BM rows and some channels."""
    r = first + tl.arange(0, BM)
    mask = (r < rows)[:, None] & (c < C)[None, :]
    return mask, r.to(tl.int64)[:, None] * C + c[None, :]


@triton.jit
def _load_affine(weight, bias, mean, variance, eps, C, c):
    """Return scale, bias, mean and 1 / std of the channels, for (x − mean) · scale + bias."""
    mu = tl.load(mean + c, mask=c < C, other=0.0)
    inverse_std = tl.rsqrt(tl.load(variance + c, mask=c < C, other=1.0) + eps)
    scale = tl.load(weight + c, mask=c < C, other=0.0) * inverse_std
    offset = tl.load(bias + c, mask=c < C, other=0.0)
    return scale[None, :], offset[None, :], mu[None, :], inverse_std[None, :]


@triton.jit
def _load_gradient(x, dy, offsets, mask, scale, offset, mu, ACT: tl.constexpr):
    """Return x − mean, and the gradient dz of the activation's input z."""
    centered = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - mu
    dz = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    z = centered * scale + offset
    if ACT != 0:
        dz = tl.where(z <= 0.0, 0.0, dz)
    if ACT == 2:
        dz = tl.where(z >= 6.0, 0.0, dz)
    return centered, dz


@triton.jit
def _count(part, rows, programs, BM: tl.constexpr):
    """Return the number of rows of a part; parts alternate in blocks of BM rows."""
    turn = programs * BM
    rest = rows % turn - part * BM
    return (rows // turn * BM + tl.minimum(tl.maximum(rest, 0), BM)).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _statistics(x, parts, rows, C, programs, BM: tl.constexpr, BC: tl.constexpr):
    """Compute mean and sum of squared deviations of each part of the rows."""
    c, part = program_channels(C, BC)
    # Relative to one value, because squares would cancel if the mean is far from zero.
    origin = tl.load(x + (part * BM).to(tl.int64) * C + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    squares = tl.zeros((BM, BC), tl.float32)
    for first in range(part * BM, rows, programs * BM):
        mask, offsets = _tile(first, rows, C, c, BM)
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        centered = tl.where(mask, value - origin[None, :], 0.0)
        total += centered
        squares += centered * centered
    total_sum = tl.sum(total, axis=0)
    shift = total_sum / _count(part, rows, programs, BM)
    out = parts + part * 2 * C + c
    tl.store(out, origin + shift, mask=c < C)
    tl.store(out + C, tl.sum(squares, axis=0) - total_sum * shift, mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def _join_statistics(
    parts, mean, variance, running_mean, running_variance, batches,
    momentum, rows, C, programs,
    BM: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Combine the statistics of the parts; update the running statistics."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    origin = tl.load(parts + c, mask=c < C, other=0.0)
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for first in range(0, programs, BP):
        part = first + tl.arange(0, BP)
        mask = (part < programs)[:, None] & (c < C)[None, :]
        offsets = part[:, None] * 2 * C + c[None, :]
        centered = tl.load(parts + offsets, mask=mask, other=0.0) - origin[None, :]
        centered = tl.where(mask, centered, 0.0)
        weighted = centered * _count(part, rows, programs, BM)[:, None]
        total += weighted
        squares += weighted * centered + tl.load(parts + C + offsets, mask=mask, other=0.0)
    total_sum = tl.sum(total, axis=0)
    n = rows.to(tl.float32)
    mu = origin + total_sum / n
    squared_sum = tl.sum(squares, axis=0) - total_sum * (total_sum / n)
    squared_sum = tl.where(squared_sum < 0.0, 0.0, squared_sum)  # rounding; NaN is preserved
    tl.store(mean + c, mu, mask=c < C)
    tl.store(variance + c, squared_sum / n, mask=c < C)
    old = tl.load(running_mean + c, mask=c < C, other=0.0)
    tl.store(running_mean + c, (1 - momentum) * old + momentum * mu, mask=c < C)
    old = tl.load(running_variance + c, mask=c < C, other=0.0)
    new = (1 - momentum) * old + momentum * (squared_sum / (n - 1))
    tl.store(running_variance + c, new, mask=c < C)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=SIZES)
def _forward_norm(
    x, y, weight, bias, mean, variance,
    eps, rows, C,
    ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = act((x − mean) · weight / √(variance + eps) + bias)."""
    c, part = program_channels(C, BC)
    mask, offsets = _tile(part * BM, rows, C, c, BM)
    scale, offset, mu, _ = _load_affine(weight, bias, mean, variance, eps, C, c)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    z = (value - mu) * scale + offset
    if ACT != 0:
        z = tl.where(z < 0.0, 0.0, z)
    if ACT == 2:
        z = tl.where(z > 6.0, 6.0, z)
    tl.store(y + offsets, z.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _backward_norm(
    x, dy, dx, weight, bias, mean, variance,
    eps, parts, rows, C, programs,
    BATCH_STATS: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums of dweight = Σ dz · x̂ and dbias = Σ dz; dx = scale · dz if not BATCH_STATS."""
    c, part = program_channels(C, BC)
    scale, offset, mu, inverse_std = _load_affine(weight, bias, mean, variance, eps, C, c)
    dbias = tl.zeros((BM, BC), tl.float32)
    dweight = tl.zeros((BM, BC), tl.float32)
    for first in range(part * BM, rows, programs * BM):
        mask, offsets = _tile(first, rows, C, c, BM)
        centered, dz = _load_gradient(x, dy, offsets, mask, scale, offset, mu, ACT)
        if not BATCH_STATS:
            tl.store(dx + offsets, (dz * scale).to(dx.dtype.element_ty), mask=mask)
        dbias += dz
        dweight += dz * centered
    out = parts + part * 2 * C + c
    tl.store(out, tl.sum(dweight * inverse_std, axis=0), mask=c < C)
    tl.store(out + C, tl.sum(dbias, axis=0), mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def _backward_batch_stats(
    x, dy, dx, weight, bias, mean, variance,
    eps, sums, rows, C,
    ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = scale · (dz − mean(dz) − x̂ · mean(dz · x̂)), through the batch statistics.

    `sums` [2, C] are Σ dz · x̂ and Σ dz.
    """
    c, part = program_channels(C, BC)
    mask, offsets = _tile(part * BM, rows, C, c, BM)
    scale, offset, mu, inverse_std = _load_affine(weight, bias, mean, variance, eps, C, c)
    n = rows.to(tl.float32)
    mean_dz_xhat = inverse_std * (tl.load(sums + c, mask=c < C, other=0.0)[None, :] / n)
    mean_dz = tl.load(sums + C + c, mask=c < C, other=0.0)[None, :] / n
    centered, dz = _load_gradient(x, dy, offsets, mask, scale, offset, mu, ACT)
    gradient = scale * (dz - mean_dz - centered * mean_dz_xhat)
    tl.store(dx + offsets, gradient.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _join_sums(parts, sums, C, programs, BP: tl.constexpr, BC: tl.constexpr):
    """Sum the parts, [programs, C] to [C], several times faster than torch."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BP, BC), tl.float32)
    for first in range(0, programs, BP):
        part = first + tl.arange(0, BP)
        mask = (part < programs)[:, None] & (c < C)[None, :]
        total += tl.load(parts + part[:, None] * C + c[None, :], mask=mask, other=0.0)
    tl.store(sums + c, tl.sum(total, axis=0), mask=c < C)


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    """Return rows, channels, blocks of channels, and programs per block."""
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    blocks = triton.cdiv(channels, CHANNELS)
    programs = max(1, min(triton.cdiv(rows, _ROWS), _PROGRAMS // blocks))
    return rows, channels, blocks, programs


def statistics(
    x: Tensor, mean: Tensor, variance: Tensor, batches: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of x; update running statistics and `batches` in place.

    Needs at least two rows.
    """
    rows, channels, blocks, programs = _shape(x)
    parts = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    _statistics[(blocks * programs,)](x, parts, rows, channels, programs, BM=_ROWS, BC=CHANNELS)
    result = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    _join_statistics[(triton.cdiv(channels, _JOIN_CHANNELS),)](
        parts, *result, mean, variance, batches, momentum, rows, channels, programs,
        BM=_ROWS, BP=_JOIN_PARTS, BC=_JOIN_CHANNELS,
    )  # fmt: skip
    for buffer in (mean, variance, batches):  # changed without autograd
        torch.autograd.graph.increment_version(buffer)
    return result[0], result[1]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, act: int, batch_stats: bool, *layer: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *layer)
        ctx.settings = eps, act, batch_stats
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
        eps, act, batch_stats = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        rows, channels, blocks, programs = _shape(x)
        parts = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
        _backward_norm[(blocks * programs,)](
            x, dy, dx, *layer, eps, parts, rows, channels, programs,
            BATCH_STATS=batch_stats, ACT=act, BM=_ROWS, BC=CHANNELS,
        )  # fmt: skip
        sums = torch.empty(2, channels, dtype=torch.float32, device=x.device)
        _join_sums[(triton.cdiv(2 * channels, _JOIN_CHANNELS),)](
            parts, sums, 2 * channels, programs, BP=_JOIN_PARTS, BC=_JOIN_CHANNELS
        )
        if batch_stats:
            _backward_batch_stats[(blocks * triton.cdiv(rows, _ROWS),)](
                x, dy, dx, *layer, eps, sums, rows, channels, ACT=act, BM=_ROWS, BC=CHANNELS
            )
        return dx, None, None, None, *sums, None, None


norm: Callable[..., Tensor] = _Norm.apply
"""norm(x, eps, act, batch_stats, weight, bias, mean, variance) returns act(batch norm of x).

All but x are [C] in float32. With `batch_stats`, mean and variance are statistics of x and the
gradient of x flows through them; otherwise they are constants. The only large tensor saved is x.
"""
