"""Depthwise convolution with 3 × 3 and 5 × 5 kernels at stride 1 and 2, and its gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proximetry.cuda.sharing import CHANNELS, share

# Triton compiles a kernel anew for sizes that are one or divide by 16. That pays for the number of
# channels alone, which decides whether 16 bytes are read at once.
_ANY = ["programs", "N", "H", "W", "HO", "WO", "PT", "PL", "half", "strips"]

# Strips of one program.
_STRIPS = 16
# Programs that share the strips of one block of channels when sums over them are wanted.
_PROGRAMS = 2048


@triton.jit
def _tap(base, n, row, column, H, W, C, c, inside):
    """One pixel of every strip: [strips, channels], zero outside of the image."""
    here = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    place = ((n * H + row) * W + column).to(tl.int64) * C
    mask = here[:, None] & (c < C)[None, :]
    return tl.load(base + place[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(base, value, n, row, column, H, W, C, c, inside):
    place = ((n * H + row) * W + column).to(tl.int64) * C
    mask = (inside & (column < W))[:, None] & (c < C)[None, :]
    tl.store(base + place[:, None] + c[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _weight(w, row, column, C, c, K: tl.constexpr):
    mask = (c < C) & (row < K)
    return tl.load(w + (row * K + column) * C + c, mask=mask, other=0.0)[None, :]


@triton.jit
def _weights(w, row, C, c, K: tl.constexpr, FLIP: tl.constexpr):
    """One row of the kernel; of the five columns, one of size three has the first three."""
    w0 = _weight(w, row, K - 1 if FLIP else 0, C, c, K)
    w1 = _weight(w, row, K - 2 if FLIP else 1, C, c, K)
    w2 = _weight(w, row, K - 3 if FLIP else 2, C, c, K)
    w3 = w0
    w4 = w0
    if K == 5:
        w3 = _weight(w, row, 1 if FLIP else 3, C, c, K)
        w4 = _weight(w, row, 0 if FLIP else 4, C, c, K)
    return w0, w1, w2, w3, w4


@triton.jit
def _pick(i: tl.constexpr, w0, w1, w2, w3, w4):
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
def _add(total, v, i: tl.constexpr, K: tl.constexpr, w0, w1, w2, w3, w4):
    """total + v · wᵢ, if the kernel has a column i."""
    if (i >= 0) and (i < K):
        total += v * _pick(i, w0, w1, w2, w3, w4)
    return total


@triton.jit(do_not_specialize=_ANY)
def _forward_depthwise(
    x, w, y,
    N, H, W, C, HO, WO, strips, PT, PL,
    K: tl.constexpr, S: tl.constexpr, FLIP: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # A strip is four neighbours of a row of the result: what they share is read once.
    c, part = share(C, BC)
    strip = part * BP + tl.arange(0, BP)
    across = tl.cdiv(WO, 4)
    inside = strip < strips
    first = (strip % across) * 4
    row = (strip // across) % HO
    n = strip // (across * HO)
    a = tl.zeros((BP, BC), tl.float32)
    b = tl.zeros((BP, BC), tl.float32)
    d = tl.zeros((BP, BC), tl.float32)
    e = tl.zeros((BP, BC), tl.float32)
    for k in tl.static_range(K):
        w0, w1, w2, w3, w4 = _weights(w, K - 1 - k if FLIP else k, C, c, K, FLIP)
        for j in tl.static_range(3 * S + K):
            v = _tap(x, n, row * S + k - PT, first * S + j - PL, H, W, C, c, inside)
            a = _add(a, v, j, K, w0, w1, w2, w3, w4)
            b = _add(b, v, j - S, K, w0, w1, w2, w3, w4)
            d = _add(d, v, j - 2 * S, K, w0, w1, w2, w3, w4)
            e = _add(e, v, j - 3 * S, K, w0, w1, w2, w3, w4)
    _put(y, a, n, row, first, HO, WO, C, c, inside)
    _put(y, b, n, row, first + 1, HO, WO, C, c, inside)
    _put(y, d, n, row, first + 2, HO, WO, C, c, inside)
    _put(y, e, n, row, first + 3, HO, WO, C, c, inside)


@triton.jit(do_not_specialize=_ANY)
def _input_depthwise_strided(
    dy, w, dx,
    N, H, W, C, HO, WO, half, strips, PT,
    LEFT: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # Stride 2. Rows of one parity together, so that each meets the same rows of the kernel.
    c, part = share(C, BC)
    parity = part % 2
    strip = (part // 2) * BP + tl.arange(0, BP)
    across = tl.cdiv(W, 4)
    first = (strip % across) * 4
    row = ((strip // across) % half) * 2 + parity
    n = strip // (across * half)
    inside = (strip < strips) & (row < H)
    a = tl.zeros((BP, BC), tl.float32)
    b = tl.zeros((BP, BC), tl.float32)
    d = tl.zeros((BP, BC), tl.float32)
    e = tl.zeros((BP, BC), tl.float32)
    begin = (parity + PT) % 2
    # Column `first + t` meets dy at first / 2 + o through the kernel's column t + LEFT − 2 o,
    # and o falls from `last`.
    last: tl.constexpr = (3 + LEFT) // 2
    for i in tl.static_range((K + 1) // 2):
        kh = begin + 2 * i
        above = (row + PT - kh) // 2
        fits = inside & (row + PT - kh >= 0)
        w0, w1, w2, w3, w4 = _weights(w, kh, C, c, K, False)
        for j in tl.static_range(last + (K - LEFT) // 2 + 1):
            v = _tap(dy, n, above, first // 2 + last - j, HO, WO, C, c, fits)
            a = _add(a, v, LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
            b = _add(b, v, 1 + LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
            d = _add(d, v, 2 + LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
            e = _add(e, v, 3 + LEFT - 2 * (last - j), K, w0, w1, w2, w3, w4)
    _put(dx, a, n, row, first, H, W, C, c, inside)
    _put(dx, b, n, row, first + 1, H, W, C, c, inside)
    _put(dx, d, n, row, first + 2, H, W, C, c, inside)
    _put(dx, e, n, row, first + 3, H, W, C, c, inside)


@triton.jit(do_not_specialize=_ANY)
def _weight_depthwise(
    x, dy, sums,
    N, H, W, C, HO, WO, strips, programs, PT, PL,
    K: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # One row of the kernel and one block of channels; every program takes its part of the strips.
    c, both = share(C, BC)
    kh = both % K
    part = both // K
    across = tl.cdiv(WO, 4)
    s0 = tl.zeros((BP, BC), tl.float32)
    s1 = tl.zeros((BP, BC), tl.float32)
    s2 = tl.zeros((BP, BC), tl.float32)
    s3 = tl.zeros((BP, BC), tl.float32)
    s4 = tl.zeros((BP, BC), tl.float32)
    for start in range(part * BP, strips, programs * BP):
        strip = start + tl.arange(0, BP)
        inside = strip < strips
        first = (strip % across) * 4
        row = (strip // across) % HO
        n = strip // (across * HO)
        g0 = _tap(dy, n, row, first, HO, WO, C, c, inside)
        g1 = _tap(dy, n, row, first + 1, HO, WO, C, c, inside)
        g2 = _tap(dy, n, row, first + 2, HO, WO, C, c, inside)
        g3 = _tap(dy, n, row, first + 3, HO, WO, C, c, inside)
        for j in tl.static_range(3 * S + K):
            v = _tap(x, n, row * S + kh - PT, first * S + j - PL, H, W, C, c, inside)
            for t in tl.static_range(4):
                if j - t * S == 0:
                    s0 += v * _pick(t, g0, g1, g2, g3, g3)
                if j - t * S == 1:
                    s1 += v * _pick(t, g0, g1, g2, g3, g3)
                if j - t * S == 2:
                    s2 += v * _pick(t, g0, g1, g2, g3, g3)
                if (j - t * S == 3) and (K == 5):
                    s3 += v * _pick(t, g0, g1, g2, g3, g3)
                if (j - t * S == 4) and (K == 5):
                    s4 += v * _pick(t, g0, g1, g2, g3, g3)
    out = sums + ((part * K + kh) * K) * C + c
    tl.store(out, tl.sum(s0, axis=0), mask=c < C)
    tl.store(out + C, tl.sum(s1, axis=0), mask=c < C)
    tl.store(out + 2 * C, tl.sum(s2, axis=0), mask=c < C)
    if K == 5:
        tl.store(out + 3 * C, tl.sum(s3, axis=0), mask=c < C)
        tl.store(out + 4 * C, tl.sum(s4, axis=0), mask=c < C)


def _new(batch: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    return torch.empty(
        (batch, channels, height, width),
        dtype=like.dtype,
        device=like.device,
        memory_format=torch.channels_last,
    )


def depthwise(
    x: Tensor,
    weight: Tensor,
    kernel: int,
    stride: int,
    before: tuple[int, int],
    size: tuple[int, int],
    flip: bool = False,
) -> Tensor:
    """Return the depthwise convolution of `size`; `weight` is [kernel², C] in float32.

    `before` is the padding above and to the left; what is missing below and to the right
    follows from the size. `flip` turns the kernel by 180 degrees.
    """
    batch, channels, height, width = x.shape
    y = _new(batch, channels, *size, like=x)
    strips = batch * size[0] * triton.cdiv(size[1], 4)
    grid = (triton.cdiv(channels, CHANNELS) * triton.cdiv(strips, _STRIPS),)
    _forward_depthwise[grid](
        x, weight, y, batch, height, width, channels, *size, strips, *before,
        K=kernel, S=stride, FLIP=flip, BP=_STRIPS, BC=CHANNELS,
    )  # fmt: skip
    return y


def depthwise_input(
    dy: Tensor,
    weight: Tensor,
    kernel: int,
    stride: int,
    before: tuple[int, int],
    size: tuple[int, int],
) -> Tensor:
    """Return the gradient with respect to an input of `size`."""
    batch, channels, below, across = dy.shape
    if stride == 1:
        turned = (kernel - 1 - before[0], kernel - 1 - before[1])
        return depthwise(dy, weight, kernel, 1, turned, size, flip=True)
    dx = _new(batch, channels, *size, like=dy)
    half = triton.cdiv(size[0], 2)
    strips = batch * half * triton.cdiv(size[1], 4)
    grid = (triton.cdiv(channels, CHANNELS) * 2 * triton.cdiv(strips, _STRIPS),)
    _input_depthwise_strided[grid](
        dy, weight, dx, batch, *size, channels, below, across, half, strips, before[0],
        LEFT=before[1], K=kernel, BP=_STRIPS, BC=CHANNELS,
    )  # fmt: skip
    return dx


def depthwise_weight(
    x: Tensor, dy: Tensor, kernel: int, stride: int, before: tuple[int, int]
) -> Tensor:
    """Return the gradient with respect to the weight, as [kernel², C]."""
    batch, channels, height, width = x.shape
    below, across = dy.shape[2:]
    strips = batch * below * triton.cdiv(across, 4)
    blocks = triton.cdiv(channels, CHANNELS)
    programs = max(1, min(triton.cdiv(strips, _STRIPS), _PROGRAMS // (blocks * kernel)))
    sums = torch.empty(programs, kernel**2, channels, dtype=torch.float32, device=x.device)
    _weight_depthwise[(blocks * kernel * programs,)](
        x, dy, sums, batch, height, width, channels, below, across, strips, programs, *before,
        K=kernel, S=stride, BP=_STRIPS, BC=CHANNELS,
    )  # fmt: skip
    return sums.sum(dim=0)
