"""Depthwise convolution with 3 × 3 and 5 × 5 kernels at stride 1 and 2, and its gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from proximetry.kernels.channels import CHANNELS, SIZES, program_channels

# A strip is four adjacent pixels in a row of the result, which share inputs.
_STRIPS = 16  # per program
_PROGRAMS = 2048  # of a reduction over strips


@triton.jit
def _load_pixel(base, n, row, column, H, W, C, c, inside):
    """Load one pixel of every strip, [strips, channels]; zero outside the image."""
    valid = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    offsets = ((n * H + row) * W + column).to(tl.int64) * C
    mask = valid[:, None] & (c < C)[None, :]
    return tl.load(base + offsets[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_pixel(base, value, n, row, column, H, W, C, c, inside):
    offsets = ((n * H + row) * W + column).to(tl.int64) * C
    mask = (inside & (column < W))[:, None] & (c < C)[None, :]
    tl.store(base + offsets[:, None] + c[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _weight(w, row, column, C, c, K: tl.constexpr):
    mask = (c < C) & (row < K)
    return tl.load(w + (row * K + column) * C + c, mask=mask, other=0.0)[None, :]


@triton.jit
def _weights(w, row, C, c, K: tl.constexpr):
    """Load one row of the kernel; the last two columns are unused for size 3."""
    w0 = _weight(w, row, 0, C, c, K)
    w1 = _weight(w, row, 1, C, c, K)
    w2 = _weight(w, row, 2, C, c, K)
    w3 = w0
    w4 = w0
    if K == 5:
        w3 = _weight(w, row, 3, C, c, K)
        w4 = _weight(w, row, 4, C, c, K)
    return w0, w1, w2, w3, w4


@triton.jit
def _select(i: tl.constexpr, w0, w1, w2, w3, w4):
    if i == 0:
        w = w0
    elif i == 1:
        w = w1
    elif i == 2:
        w = w2
    elif i == 3:
        w = w3
    else:
        w = w4
    return w


@triton.jit
def _accumulate(total, v, i: tl.constexpr, K: tl.constexpr, w0, w1, w2, w3, w4):
    """Return total + v · wᵢ if the kernel has a column i, else total."""
    if (i >= 0) and (i < K):
        total += v * _select(i, w0, w1, w2, w3, w4)
    return total


@triton.jit(do_not_specialize=SIZES)
def _forward_depthwise(
    x, w, y,
    N, H, W, C, HO, WO, strips, PT, PL,
    K: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y[n, i, j, c] = Σ x[n, i·S + k − PT, j·S + l − PL, c] · w[k, l, c]."""
    c, part = program_channels(C, BC)
    strip = part * BP + tl.arange(0, BP)
    strips_per_row = tl.cdiv(WO, 4)
    inside = strip < strips
    first = (strip % strips_per_row) * 4
    row = (strip // strips_per_row) % HO
    n = strip // (strips_per_row * HO)
    a = tl.zeros((BP, BC), tl.float32)
    b = tl.zeros((BP, BC), tl.float32)
    d = tl.zeros((BP, BC), tl.float32)
    e = tl.zeros((BP, BC), tl.float32)
    for k in tl.static_range(K):
        w0, w1, w2, w3, w4 = _weights(w, k, C, c, K)
        for j in tl.static_range(3 * S + K):
            v = _load_pixel(x, n, row * S + k - PT, first * S + j - PL, H, W, C, c, inside)
            a = _accumulate(a, v, j, K, w0, w1, w2, w3, w4)
            b = _accumulate(b, v, j - S, K, w0, w1, w2, w3, w4)
            d = _accumulate(d, v, j - 2 * S, K, w0, w1, w2, w3, w4)
            e = _accumulate(e, v, j - 3 * S, K, w0, w1, w2, w3, w4)
    _store_pixel(y, a, n, row, first, HO, WO, C, c, inside)
    _store_pixel(y, b, n, row, first + 1, HO, WO, C, c, inside)
    _store_pixel(y, d, n, row, first + 2, HO, WO, C, c, inside)
    _store_pixel(y, e, n, row, first + 3, HO, WO, C, c, inside)


@triton.jit(do_not_specialize=SIZES)
def _input_depthwise_strided(
    dy, w, dx,
    N, H, W, C, HO, WO, half, strips, PT,
    LEFT: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradient of the input at stride 2; rows of one parity use the same rows of the kernel."""
    c, part = program_channels(C, BC)
    parity = part % 2
    strip = (part // 2) * BP + tl.arange(0, BP)
    strips_per_row = tl.cdiv(W, 4)
    first = (strip % strips_per_row) * 4
    row = ((strip // strips_per_row) % half) * 2 + parity
    n = strip // (strips_per_row * half)
    inside = (strip < strips) & (row < H)
    a = tl.zeros((BP, BC), tl.float32)
    b = tl.zeros((BP, BC), tl.float32)
    d = tl.zeros((BP, BC), tl.float32)
    e = tl.zeros((BP, BC), tl.float32)
    begin = (parity + PT) % 2
    # Column `first + t` gets dy at first / 2 + o through the kernel's column t + LEFT − 2 o, with
    # o descending from `last`.
    last: tl.constexpr = (3 + LEFT) // 2
    for i in tl.static_range((K + 1) // 2):
        kh = begin + 2 * i
        dy_row = (row + PT - kh) // 2
        is_valid = inside & (row + PT - kh >= 0)
        w0, w1, w2, w3, w4 = _weights(w, kh, C, c, K)
        for j in tl.static_range(last + (K - LEFT) // 2 + 1):
            v = _load_pixel(dy, n, dy_row, first // 2 + last - j, HO, WO, C, c, is_valid)
            a = _accumulate(a, v, LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
            b = _accumulate(b, v, 1 + LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
            d = _accumulate(d, v, 2 + LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
            e = _accumulate(e, v, 3 + LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
    _store_pixel(dx, a, n, row, first, H, W, C, c, inside)
    _store_pixel(dx, b, n, row, first + 1, H, W, C, c, inside)
    _store_pixel(dx, d, n, row, first + 2, H, W, C, c, inside)
    _store_pixel(dx, e, n, row, first + 3, H, W, C, c, inside)


@triton.jit(do_not_specialize=SIZES)
def _weight_depthwise(
    x, dy, sums,
    N, H, W, C, HO, WO, strips, programs, PT, PL,
    K: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums of the weight gradient: one kernel row, block of channels and part of strips."""
    c, row_and_part = program_channels(C, BC)
    kh = row_and_part % K
    part = row_and_part // K
    strips_per_row = tl.cdiv(WO, 4)
    s0 = tl.zeros((BP, BC), tl.float32)
    s1 = tl.zeros((BP, BC), tl.float32)
    s2 = tl.zeros((BP, BC), tl.float32)
    s3 = tl.zeros((BP, BC), tl.float32)
    s4 = tl.zeros((BP, BC), tl.float32)
    for start in range(part * BP, strips, programs * BP):
        strip = start + tl.arange(0, BP)
        inside = strip < strips
        first = (strip % strips_per_row) * 4
        row = (strip // strips_per_row) % HO
        n = strip // (strips_per_row * HO)
        g0 = _load_pixel(dy, n, row, first, HO, WO, C, c, inside)
        g1 = _load_pixel(dy, n, row, first + 1, HO, WO, C, c, inside)
        g2 = _load_pixel(dy, n, row, first + 2, HO, WO, C, c, inside)
        g3 = _load_pixel(dy, n, row, first + 3, HO, WO, C, c, inside)
        for j in tl.static_range(3 * S + K):
            v = _load_pixel(x, n, row * S + kh - PT, first * S + j - PL, H, W, C, c, inside)
            for t in tl.static_range(4):
                g = _select(t, g0, g1, g2, g3, g3)
                if j - t * S == 0:
                    s0 += v * g
                if j - t * S == 1:
                    s1 += v * g
                if j - t * S == 2:
                    s2 += v * g
                if (j - t * S == 3) and (K == 5):
                    s3 += v * g
                if (j - t * S == 4) and (K == 5):
                    s4 += v * g
    out = sums + ((part * K + kh) * K) * C + c
    tl.store(out, tl.sum(s0, axis=0), mask=c < C)
    tl.store(out + C, tl.sum(s1, axis=0), mask=c < C)
    tl.store(out + 2 * C, tl.sum(s2, axis=0), mask=c < C)
    if K == 5:
        tl.store(out + 3 * C, tl.sum(s3, axis=0), mask=c < C)
        tl.store(out + 4 * C, tl.sum(s4, axis=0), mask=c < C)


def _empty(like: Tensor, size: Sequence[int]) -> Tensor:
    """Return an empty channels-last tensor of another size."""
    return like.new_empty((len(like), *size, like.shape[1])).permute(0, 3, 1, 2)


def _suits_cudnn(x: Tensor, size: Sequence[int]) -> bool:
    """Return whether cuDNN is faster, at stride 1 except for the input gradient."""
    return x.is_cuda and tuple(x.shape[2:]) == tuple(size)


def _convolve(
    x: Tensor, weight: Tensor, stride: int, padding: Sequence[int], size: Sequence[int]
) -> Tensor:
    y = _empty(x, size)
    batch, channels, height, width = x.shape
    strips = batch * size[0] * triton.cdiv(size[1], 4)
    grid = (triton.cdiv(channels, CHANNELS) * triton.cdiv(strips, _STRIPS),)
    _forward_depthwise[grid](
        x, weight, y, batch, height, width, channels, *size, strips, *padding,
        K=len(weight), S=stride, BP=_STRIPS, BC=CHANNELS,
    )  # fmt: skip
    return y


def _input_gradient(
    dy: Tensor, weight: Tensor, stride: int, padding: Sequence[int], size: Sequence[int]
) -> Tensor:
    if stride == 1:
        flipped = [len(weight) - 1 - side for side in padding]
        return _convolve(dy, weight.flip(0, 1), 1, flipped, size)
    dx = _empty(dy, size)
    batch, channels, out_height, out_width = dy.shape
    half = triton.cdiv(size[0], 2)
    strips = batch * half * triton.cdiv(size[1], 4)
    grid = (triton.cdiv(channels, CHANNELS) * 2 * triton.cdiv(strips, _STRIPS),)
    _input_depthwise_strided[grid](
        dy, weight, dx, batch, *size, channels, out_height, out_width, half, strips, padding[0],
        LEFT=padding[1], K=len(weight), BP=_STRIPS, BC=CHANNELS,
    )  # fmt: skip
    return dx


def _weight_gradient(
    x: Tensor, dy: Tensor, kernel: int, stride: int, padding: Sequence[int]
) -> Tensor:
    batch, channels, out_height, out_width = dy.shape
    if _suits_cudnn(x, (out_height, out_width)):
        shape = channels, 1, kernel, kernel
        gradient: Tensor = conv2d_weight(x, shape, dy, padding=padding, groups=channels)
        return gradient.float().squeeze(1).permute(1, 2, 0)
    strips = batch * out_height * triton.cdiv(out_width, 4)
    blocks = triton.cdiv(channels, CHANNELS)
    programs = max(1, min(triton.cdiv(strips, _STRIPS), _PROGRAMS // (blocks * kernel)))
    sums = torch.empty(programs, kernel, kernel, channels, dtype=torch.float32, device=x.device)
    _weight_depthwise[(blocks * kernel * programs,)](
        x, dy, sums, batch, *x.shape[2:], channels, out_height, out_width, strips, programs,
        *padding, K=kernel, S=stride, BP=_STRIPS, BC=CHANNELS,
    )  # fmt: skip
    return sums.sum(dim=0)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: int,
        padding: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding
        if _suits_cudnn(x, size):
            torch_weight = weight.permute(2, 0, 1).unsqueeze(1).to(x.dtype)
            return F.conv2d(x, torch_weight, padding=padding, groups=x.shape[1])
        return _convolve(x, weight, stride, padding, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(dy, weight, stride, padding, x.shape[2:])
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(x, dy, len(weight), stride, padding)
        return dx, dweight, None, None, None


depthwise: Callable[..., Tensor] = _Depthwise.apply
"""depthwise(x, weight, stride, padding, size) returns a depthwise convolution of that size.

The weight is [kernel, kernel, C] in float32. `padding` is that of top and left; bottom and right
follow from the size.
"""
