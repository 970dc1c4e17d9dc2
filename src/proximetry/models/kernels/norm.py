"""Batch norm with fixed statistics and the activation after it, one pass forward and one back.

ACT says which: 0 none, 1 ReLU, 2 ReLU6.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton compiles a kernel anew for sizes that are one or divide by 16. That pays for the number of
# channels alone, which decides whether 16 bytes are read at once.
_ANY = ["rows", "programs"]

# Channels and rows of one program; 32 channels in bfloat16 are two sectors of memory.
_CHANNELS = 32
_ROWS = 64
# Programs that share the rows of one block of channels when sums over rows are wanted.
_PROGRAMS = 2048


@triton.jit
def _load_affine(weight, bias, mean, variance, eps, C, c):
    """What a batch norm with these statistics does to its channels: x · scale + shift."""
    average = tl.load(mean + c, mask=c < C, other=0.0)
    inverse = tl.rsqrt(tl.load(variance + c, mask=c < C, other=1.0) + eps)
    scale = tl.load(weight + c, mask=c < C, other=0.0) * inverse
    shift = tl.load(bias + c, mask=c < C, other=0.0) - average * scale
    return scale[None, :], shift[None, :], average[None, :], inverse[None, :]


@triton.jit(do_not_specialize=_ANY)
def _forward_norm(
    x,
    y,
    weight,
    bias,
    mean,
    variance,
    eps,
    rows,
    C,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    r = (pid // blocks) * BM + tl.arange(0, BM)
    inside = (r < rows)[:, None] & (c < C)[None, :]
    place = r.to(tl.int64)[:, None] * C + c[None, :]
    scale, shift, _, _ = _load_affine(weight, bias, mean, variance, eps, C, c)
    z = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale + shift
    if ACT != 0:
        z = tl.maximum(z, 0.0)
    if ACT == 2:
        z = tl.minimum(z, 6.0)
    tl.store(y + place, z.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_ANY)
def _backward_norm(
    x,
    dy,
    dx,
    weight,
    bias,
    mean,
    variance,
    eps,
    sums,
    rows,
    C,
    programs,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    part = pid // blocks
    scale, shift, average, inverse = _load_affine(weight, bias, mean, variance, eps, C, c)
    dbias = tl.zeros((BM, BC), tl.float32)
    dweight = tl.zeros((BM, BC), tl.float32)
    for first in range(part * BM, rows, programs * BM):
        r = first + tl.arange(0, BM)
        inside = (r < rows)[:, None] & (c < C)[None, :]
        place = r.to(tl.int64)[:, None] * C + c[None, :]
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        z = value * scale + shift
        if ACT != 0:
            dz = tl.where(z > 0.0, dz, 0.0)
        if ACT == 2:
            dz = tl.where(z < 6.0, dz, 0.0)
        tl.store(dx + place, (dz * scale).to(dx.dtype.element_ty), mask=inside)
        dbias += dz
        dweight += dz * (value - average)
    out = sums + part * 2 * C + c
    tl.store(out, tl.sum(dweight * inverse, axis=0), mask=c < C)
    tl.store(out + C, tl.sum(dbias, axis=0), mask=c < C)


class Norm(NamedTuple):
    """A batch norm whose statistics stand still; all tensors are [C] in float32."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    eps: float


def norm(x: Tensor, layer: Norm, act: int) -> Tensor:
    """Return act(the batch norm of x)."""
    y = torch.empty_like(x)
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    grid = (triton.cdiv(channels, _CHANNELS) * triton.cdiv(rows, _ROWS),)
    _forward_norm[grid](x, y, *layer, rows, channels, ACT=act, BM=_ROWS, BC=_CHANNELS)
    return y


def norm_backward(x: Tensor, dy: Tensor, layer: Norm, act: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias, in one pass over x and dy."""
    dx = torch.empty_like(x)
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    blocks = triton.cdiv(channels, _CHANNELS)
    programs = max(1, min(triton.cdiv(rows, _ROWS), _PROGRAMS // blocks))
    sums = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    _backward_norm[(blocks * programs,)](
        x, dy, dx, *layer, sums, rows, channels, programs, ACT=act, BM=_ROWS, BC=_CHANNELS
    )
    dweight, dbias = sums.sum(dim=0)
    return dx, dweight, dbias
