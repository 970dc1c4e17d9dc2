"""Triton kernels of the fused engine: products with epilogues, over chunks of classes.

Products use bf16 matrix units. A number is stored as PARTS bf16 numbers that add up to it, and a
product is the sum of the products of the parts: 1 part has the accuracy of bf16, 2 parts (three
products) more than that of TF32, 3 parts (six products) that of float32.

Arrays of a chunk: `x` [PARTS, PB, PD] has the unit embeddings, `w` [PARTS, capacity · K, PD] the
unit proxies, `g` [PARTS, capacity · K, PB] the gradient of each cosine. A row is a proxy,
class · K + k. PB and PD are batch and DIM, padded with zeros to multiples of the tiles, so that
loops need no masks. A tile of `entries` has KP ≥ K rows for each of its classes, KP a power of two:
first one proxy of each class, then the next, so that a thread has all of up to four proxies.
"""

import os
from typing import Any

import triton
import triton.language as tl

from proximetry.losses import adjustments
from proximetry.losses.form import Adjust

#: Triton's interpreter cannot multiply bf16 numbers.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: The logarithm of weight 0: finite, since -inf would give NaN gradients (see `batch.normalize`).
_LOG_ZERO = tl.constexpr(-8.507058730234616e37)
#: AGGREGATION of the kernels: how the similarity of a class is computed from its K proxies.
AGGREGATIONS = {"single": 0, "mean": 0, "soft": 1, "max": 2}
#: Arguments for whose values kernels are not specialized; see `fused.launcher`.
_INTEGERS = [
    "first", "count", "rows", "batch", "classes", "capacity", "splits", "programs", "start", "n"
]  # fmt: skip


@triton.jit
def _store_parts(pointer, value, mask, stride, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        rounded = value.to(tl.bfloat16)
        tl.store(pointer + part * stride, rounded, mask=mask)
        value -= rounded.to(tl.float32)


@triton.jit
def _load_parts(pointer, mask, stride, PARTS: tl.constexpr):
    value = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(pointer + part * stride, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    value = tl.load(pointer, mask=mask, other=0.0) if MASKED else tl.load(pointer)
    return value.to(tl.float32) if INTERPRETED else value


@triton.jit
def _multiply(
    acc, a, b, a_part, b_part, a_mask, b_mask, PARTS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return acc + a @ b, for pointers to the first parts; masks are used only if MASKED.

    Matrix units truncate their sums. With three parts they add few numbers, and the sum is rounded.
    """
    a0, b0 = _load(a, a_mask, MASKED), _load(b, b_mask, MASKED)
    if PARTS == 1:
        return tl.dot(a0, b0, acc)
    a1, b1 = _load(a + a_part, a_mask, MASKED), _load(b + b_part, b_mask, MASKED)
    if PARTS == 2:
        acc = tl.dot(a1, b0, acc)
        acc = tl.dot(a0, b1, acc)
        return tl.dot(a0, b0, acc)
    a2 = _load(a + 2 * a_part, a_mask, MASKED)
    b2 = _load(b + 2 * b_part, b_mask, MASKED)
    product = tl.dot(a2, b0)
    product = tl.dot(a0, b2, product)
    product = tl.dot(a1, b1, product)
    product = tl.dot(a1, b0, product)
    product = tl.dot(a0, b1, product)
    return acc + tl.dot(a0, b0, product)


@triton.jit
def _inverse(squares):
    """Return 1 / length, 0 for lengths up to 1e-12, and NaN where the length overflows."""
    inverse = tl.where(squares > 1e-24, tl.rsqrt(squares), 0.0)
    return tl.where((squares == float("inf")) | (squares != squares), float("nan"), inverse)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _aggregate(s, valid, gamma, K: tl.constexpr, AGGREGATION: tl.constexpr):
    """Return S and dS/ds from the cosines s of K proxies along the first axis, which S keeps."""
    if AGGREGATION == 1:  # soft
        masked, rate = tl.where(valid, s, float("-inf")), 1.0 / gamma
        e = tl.exp((masked - tl.max(masked, 0, keep_dims=True)) * rate)
        share = e * (1.0 / tl.sum(e, 0, keep_dims=True))
        S = tl.sum(share * s, 0, keep_dims=True)
        slope = share * ((s - S) * rate + 1.0)
    elif AGGREGATION == 2:  # max
        masked = tl.where(valid, s, float("-inf"))
        S = tl.reduce(masked, 0, _larger, keep_dims=True)  # `tl.max` ignores NaN
        nearest = (masked == S).to(tl.float32)
        slope = nearest / tl.sum(nearest, 0, keep_dims=True)
    else:  # mean
        S = tl.sum(tl.where(valid, s, 0.0), 0, keep_dims=True) / K
        slope = tl.where(valid, s * 0.0 + 1.0 / K, 0.0)
    return S, slope


@triton.jit
def _similarities(
    x, w, tile, sample, count, capacity, gamma,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    PB: tl.constexpr, PD: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return the cosines s [BR, BB] of a tile, S [BR / KP, BB], and the derivatives dS/ds."""
    BC: tl.constexpr = BR // KP
    r = tl.arange(0, BR)
    row = tl.minimum(tile * BC + r % BC, count - 1) * K + tl.minimum(r // BC, K - 1)
    d = tl.arange(0, BD)
    a = w + row[:, None] * PD + d[None, :]
    b = x + sample[None, :] * PD + d[:, None]
    s = tl.zeros((BR, BB), tl.float32)
    for start in range(0, PD, BD):
        s = _multiply(s, a + start, b + start, capacity * K * PD, PB * PD, 0, 0, PARTS, False)
    if K == 1:
        S, slope = s, s
    else:
        valid = (tl.arange(0, KP) < K)[:, None, None]
        S, slope = _aggregate(tl.reshape(s, (KP, BC, BB)), valid, gamma, K, AGGREGATION)
        S = tl.reshape(S, (BC, BB))
    return s, S, slope


@triton.jit
def _curricular(S, limit, t):
    hard = limit < S
    return tl.where(hard, S * (t + S), S), tl.where(hard, t + 2.0 * S, 1.0)


@triton.jit
def _misclassified(S, limit, t):
    extra = tl.where(limit < S, t, 0.0)
    return S + extra * (S + 1.0), extra + 1.0


@triton.jit
def _circle(S, limit, margin):
    weight = _larger(S + margin, 0.0)
    return weight * (S - margin), weight


@triton.jit
def _power(S, limit, exponent):
    half = _larger(0.5 * (S + 1.0), 0.0)
    power = tl.where(exponent == 1.0, 1.0, tl.exp(tl.log(half) * (exponent - 1.0)))
    return 2.0 * half * power - 1.0, exponent * power


#: ADJUST of the kernels, by `LossForm.adjust`.
ADJUSTMENTS: dict[Adjust | None, Any] = {
    None: None,
    adjustments.curricular: _curricular,
    adjustments.misclassified: _misclassified,
    adjustments.circle: _circle,
    adjustments.power: _power,
}


@triton.jit
def _adjust(S, limits, value, sample, batch, ADJUST: tl.constexpr):
    """Return φ(S) and its derivative."""
    phi, change = S, S
    if ADJUST is not None:
        limit = tl.load(limits + sample, mask=sample < batch, other=0.0)
        phi, change = ADJUST(S, limit[None, :], tl.load(value))
    return phi, change


@triton.jit
def _negative_logits(
    S, phi, tile, sample, labels, offsets, scales, scale, offset, ignore_above, first, count, batch,
    BC: tl.constexpr, OFFSETS: tl.constexpr, SCALES: tl.constexpr, IGNORE: tl.constexpr,
):  # fmt: skip
    """Return the logits [BC, BB], -inf where an entry is not a negative, and the scales."""
    class_ = tile * BC + tl.arange(0, BC)
    inside = (class_ < count)[:, None] & (sample < batch)[None, :]
    label = tl.load(labels + sample, mask=sample < batch, other=-1)
    factor = tl.zeros_like(S) + scale
    if SCALES:
        factor = tl.zeros_like(S) + tl.load(scales + sample, mask=sample < batch, other=0.0)
    z = phi * factor + offset
    if OFFSETS:
        z += tl.load(offsets + sample, mask=sample < batch, other=0.0)[None, :]
    is_negative = inside & (label[None, :] != (first + class_)[:, None])
    if IGNORE:
        is_negative &= (S > ignore_above) == 0  # NaN is a negative
    return tl.where(is_negative, z, float("-inf")), factor, inside


@triton.jit
def _log1p(value):
    """Return log(1 + value), accurate for small values (Kahan)."""
    rounded = 1.0 + value
    return tl.where(rounded == 1.0, value, tl.log(rounded) * (value / (rounded - 1.0)))


@triton.jit
def _weigh_classes(
    values, class_weights, tile, first, count, BC: tl.constexpr, WEIGHTS: tl.constexpr
):  # fmt: skip
    if WEIGHTS:
        class_ = tile * BC + tl.arange(0, BC)
        values *= tl.load(class_weights + first + class_, mask=class_ < count, other=0.0)[:, None]
    return values


@triton.jit
def _load_proxies(weight, row, mask, d, DIM: tl.constexpr):
    """Return the proxies [.., .., BD] of some rows, 0 outside of the mask."""
    inside = mask[:, :, None] & (d < DIM)[None, None, :]
    return tl.load(
        weight + row.to(tl.int64)[:, :, None] * DIM + d[None, None, :], mask=inside, other=0.0
    )


@triton.jit
def _products(
    value, weight, class_, count, d,
    K: tl.constexpr, KP: tl.constexpr, DIM: tl.constexpr, GRAM: tl.constexpr,
):  # fmt: skip
    """Return what dimensions d add to the squared lengths and Gram matrices of the proxies."""
    squares = tl.sum(value * value, 2)
    gram = tl.zeros((value.shape[0], KP, KP), tl.float32)
    if GRAM:
        for s in range(K):
            row, mask = class_[:, None] * K + s, (class_ < count)[:, None]
            other = _load_proxies(weight, row, mask, d, DIM)
            column = tl.sum(value * other, 2)
            gram += column[:, :, None] * (tl.arange(0, KP) == s).to(tl.float32)[None, None, :]
    return squares, gram


@triton.jit
def _pair_distances(gram, inverse, K: tl.constexpr, KP: tl.constexpr):
    """Return 1 for the pairs t ≠ s of proxies of a class, their distances and cosines."""
    t, s = tl.arange(0, KP)[:, None], tl.arange(0, KP)[None, :]
    pairs = ((t != s) & (t < K) & (s < K)).to(tl.float32)[None, :, :]
    cosine = gram * inverse[:, :, None] * inverse[:, None, :]
    squares = 2.0 + 1e-5 - 2.0 * cosine
    return pairs, tl.sqrt(tl.where(squares < 1e-6, 1e-6, squares)), cosine


@triton.jit(do_not_specialize=_INTEGERS)
def prepare(
    weight, w, inverses, distances, first, count, capacity,
    K: tl.constexpr, KP: tl.constexpr, DIM: tl.constexpr, PD: tl.constexpr, PARTS: tl.constexpr,
    DISTANCES: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Normalize the proxies of a chunk; sum the distances of the proxies of each class."""
    class_ = tl.program_id(0) * BC + tl.arange(0, BC)
    k = tl.arange(0, KP)
    row = class_[:, None] * K + k[None, :]
    mask = (class_ < count)[:, None] & (k < K)[None, :]
    weight += first.to(tl.int64) * K * DIM
    d = tl.arange(0, BD)
    value = _load_proxies(weight, row, mask, d, DIM)  # often all dimensions
    squares, gram = _products(value, weight, class_, count, d, K, KP, DIM, DISTANCES)
    for start in range(BD, DIM, BD):
        other = _load_proxies(weight, row, mask, start + d, DIM)
        more, products = _products(other, weight, class_, count, start + d, K, KP, DIM, DISTANCES)
        squares += more
        gram += products
    inverse = _inverse(squares)
    tl.store(inverses + row, inverse, mask=mask)
    part, target = capacity * K * PD, w + row[:, :, None] * PD + d[None, None, :]
    inside = mask[:, :, None] & (d < PD)[None, None, :]
    _store_parts(target, value * inverse[:, :, None], inside, part, PARTS)
    for start in range(BD, PD, BD):
        unit = _load_proxies(weight, row, mask, start + d, DIM) * inverse[:, :, None]
        inside = mask[:, :, None] & (start + d < PD)[None, None, :]
        _store_parts(target + start, unit, inside, part, PARTS)
    if DISTANCES:
        pairs, distance, _ = _pair_distances(gram, inverse, K, KP)
        total = tl.sum(tl.sum(tl.where(pairs != 0.0, distance, 0.0), 2), 1) * 0.5
        tl.store(distances + first + class_, total, mask=class_ < count)


@triton.jit
def _change_of_pairs(
    value, weight, class_, count, d, own, others,
    K: tl.constexpr, KP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Return own_t · w_t − Σ_s others_ts · w_s for the dimensions d."""
    change = own[:, :, None] * value
    for s in range(K):
        row, mask = class_[:, None] * K + s, (class_ < count)[:, None]
        is_s = (tl.arange(0, KP) == s)[None, None, :]
        share = tl.sum(tl.where(is_s, others, 0.0), 2)
        change -= share[:, :, None] * _load_proxies(weight, row, mask, d, DIM)
    return change


@triton.jit(do_not_specialize=_INTEGERS)
def add_pair_gradients(
    weight, gradient, slope, factor, first, count,
    K: tl.constexpr, KP: tl.constexpr, DIM: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add slope · factor times the gradient of the sum of the distances (see `prepare`).

    For proxy t: Σ_s (ŵ_t cos_ts − ŵ_s) / (distance_ts ‖w_t‖). `gradient` starts at class first.
    """
    weight += first.to(tl.int64) * K * DIM
    class_ = tl.program_id(0) * BC + tl.arange(0, BC)
    k = tl.arange(0, KP)
    row = class_[:, None] * K + k[None, :]
    mask = (class_ < count)[:, None] & (k < K)[None, :]
    d = tl.arange(0, BD)
    value = _load_proxies(weight, row, mask, d, DIM)  # often all dimensions
    squares, gram = _products(value, weight, class_, count, d, K, KP, DIM, True)
    for start in range(BD, DIM, BD):
        other = _load_proxies(weight, row, mask, start + d, DIM)
        more, products = _products(other, weight, class_, count, start + d, K, KP, DIM, True)
        squares += more
        gram += products
    inverse = _inverse(squares)
    pairs, distance, cosine = _pair_distances(gram, inverse, K, KP)
    near = tl.where(pairs != 0.0, 1.0 / distance, 0.0)
    slope = tl.load(slope) * factor
    own = tl.sum(cosine * near, 2) * inverse * inverse * slope  # [BC, KP]
    others = near * inverse[:, :, None] * inverse[:, None, :] * slope
    target = gradient + row.to(tl.int64)[:, :, None] * DIM + d[None, None, :]
    inside = mask[:, :, None] & (d < DIM)[None, None, :]
    change = _change_of_pairs(value, weight, class_, count, d, own, others, K, KP, DIM)
    tl.store(target, tl.load(target, mask=inside, other=0.0) + change, mask=inside)
    for start in range(BD, DIM, BD):
        value = _load_proxies(weight, row, mask, start + d, DIM)
        inside = mask[:, :, None] & (start + d < DIM)[None, None, :]
        change = _change_of_pairs(value, weight, class_, count, start + d, own, others, K, KP, DIM)
        old = tl.load(target + start, mask=inside, other=0.0)
        tl.store(target + start, old + change, mask=inside)


@triton.jit(do_not_specialize=_INTEGERS)
def log_sums(
    x, w, labels, offsets, scales, class_weights, limits, value, peaks, sums, totals,
    scale, offset, ignore_above, gamma, first, count, batch, capacity,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    PB: tl.constexpr, PD: tl.constexpr, BY_ENTRY: tl.constexpr, WEIGHTS: tl.constexpr,
    OFFSETS: tl.constexpr, SCALES: tl.constexpr, IGNORE: tl.constexpr, ADJUST: tl.constexpr,
    TOTAL: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Continue each sample's running log-sum-exp of the negatives, peaks + log(sums).

    By entry, `sums` receives Σ log(1 + e^z), with the weights of the classes.

    Program (i, j) adds the tiles whose index is j modulo the number of programs, and stores its
    result in row j. The first chunk initializes the rows.
    """
    BC: tl.constexpr = BR // KP
    sample = tl.program_id(0) * BB + tl.arange(0, BB)
    slot = tl.program_id(1) * PB + sample
    peak = tl.full((BB,), -3.4028234663852886e38, tl.float32)  # finite: −inf − (−inf) is NaN
    total, similarity = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    if first > 0:
        peak, total = tl.load(peaks + slot), tl.load(sums + slot)
        if TOTAL:
            similarity = tl.load(totals + slot)
    for tile in range(tl.program_id(1), tl.cdiv(count, BC), tl.num_programs(1)):
        _, S, _ = _similarities(
            x, w, tile, sample, count, capacity, gamma,
            K, KP, AGGREGATION, PARTS, PB, PD, BR, BB, BD,
        )  # fmt: skip
        phi, _ = _adjust(S, limits, value, sample, batch, ADJUST)
        z, _, inside = _negative_logits(
            S, phi, tile, sample, labels, offsets, scales, scale, offset, ignore_above,
            first, count, batch, BC, OFFSETS, SCALES, IGNORE,
        )  # fmt: skip
        if BY_ENTRY:
            e = tl.maximum(z, 0.0) + _log1p(tl.exp(-tl.abs(z)))
            total += tl.sum(_weigh_classes(e, class_weights, tile, first, count, BC, WEIGHTS), 0)
        else:
            higher = tl.maximum(peak, tl.max(z, 0))
            total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher[None, :]), 0)
            peak = higher
        if TOTAL:
            similarity += tl.sum(tl.where(inside, S, 0.0), 0)
    tl.store(peaks + slot, peak)
    tl.store(sums + slot, total)
    if TOTAL:
        tl.store(totals + slot, similarity)


@triton.jit(do_not_specialize=_INTEGERS)
def finish_log_sums(
    peaks, sums, totals, lse, total, batch, programs,
    PB: tl.constexpr, BY_ENTRY: tl.constexpr, TOTAL: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Add the results of the programs of `log_sums`."""
    sample = tl.program_id(0) * BB + tl.arange(0, BB)
    inside = sample < batch
    peak = tl.full((BB,), -3.4028234663852886e38, tl.float32)
    for program in range(programs):
        peak = tl.maximum(peak, tl.load(peaks + program * PB + sample, mask=inside, other=0.0))
    sum_exp, similarity = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    for program in range(programs):
        slot = program * PB + sample
        part = tl.load(sums + slot, mask=inside, other=0.0)
        sum_exp += part * tl.exp(tl.load(peaks + slot, mask=inside, other=0.0) - peak)
        if TOTAL:
            similarity += tl.load(totals + slot, mask=inside, other=0.0)
    if not BY_ENTRY:  # else all peaks are the same
        sum_exp = peak + tl.log(sum_exp)
    tl.store(lse + sample, sum_exp, mask=inside)
    if TOTAL:
        tl.store(total + sample, similarity, mask=inside)


@triton.jit(do_not_specialize=_INTEGERS)
def entries(
    x, w, labels, offsets, scales, class_weights, limits, value, shifts, lse, slopes, total_slopes,
    g, sums, radial, scale_slopes, offset_slopes, scale, offset, ignore_above, gamma,
    first, count, batch, capacity,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    PB: tl.constexpr, PD: tl.constexpr,
    BY_CLASS: tl.constexpr, BY_ENTRY: tl.constexpr, WEIGHTS: tl.constexpr, OFFSETS: tl.constexpr,
    SHIFTS: tl.constexpr, PEAKS: tl.constexpr, SCALES: tl.constexpr, IGNORE: tl.constexpr,
    ADJUST: tl.constexpr, TOTAL: tl.constexpr, GRADIENT: tl.constexpr,
    BR: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute a tile of entries e^z, and the gradients of the cosines.

    By class: `sums` [PB / BB, capacity] receives Σ e^(z − shift) over the samples of a tile, or
    with PEAKS the largest z. By sample: e is e^(z − lse) · slope. By entry: e is 1 / (1 + e^(−z)) ·
    slope, with the weights of the classes. `radial` [PB / BB, capacity · K] receives Σ g · cos,
    which the gradient of a proxy needs.
    """
    BC: tl.constexpr = BR // KP
    block, tile = tl.program_id(0), tl.program_id(1)
    sample = block * BB + tl.arange(0, BB)
    class_ = tile * BC + tl.arange(0, BC)
    s, S, slope = _similarities(
        x, w, tile, sample, count, capacity, gamma, K, KP, AGGREGATION, PARTS, PB, PD, BR, BB, BD
    )
    phi, change = _adjust(S, limits, value, sample, batch, ADJUST)
    z, factor, inside = _negative_logits(
        S, phi, tile, sample, labels, offsets, scales, scale, offset, ignore_above,
        first, count, batch, BC, OFFSETS, SCALES, IGNORE,
    )  # fmt: skip
    if PEAKS:
        tl.store(sums + block * capacity + class_, tl.max(z, 1), mask=class_ < count)
    else:
        if BY_CLASS:
            if SHIFTS:
                z -= tl.load(shifts + class_, mask=class_ < count, other=0.0)[:, None]
            e = tl.exp(z)
            tl.store(sums + block * capacity + class_, tl.sum(e, 1), mask=class_ < count)
        else:
            if BY_ENTRY:
                e = 1.0 / (1.0 + tl.exp(-z))
                e = _weigh_classes(e, class_weights, tile, first, count, BC, WEIGHTS)
            else:
                level = tl.load(lse + sample, mask=sample < batch, other=0.0)
                level = tl.where(level == float("-inf"), 0.0, level)
                e = tl.exp(z - level[None, :])
            e *= tl.load(slopes + sample, mask=sample < batch, other=0.0)[None, :]
            if SCALES:
                tl.store(scale_slopes + tile * PB + sample, tl.sum(e * phi, 0))
            if OFFSETS:
                tl.store(offset_slopes + tile * PB + sample, tl.sum(e, 0))
        if GRADIENT:
            gradient = e * factor
            if ADJUST is not None:
                gradient *= change
            if TOTAL:
                direct = tl.load(total_slopes + sample, mask=sample < batch, other=0.0)
                gradient = tl.where(inside, gradient + direct[None, :], 0.0)
            if K > 1:
                gradient = tl.reshape(gradient[None, :, :] * slope, (BR, BB))
            r = tl.arange(0, BR)
            row = (tile * BC + r % BC) * K + r // BC
            valid = (r // BC < K) & (tile * BC + r % BC < count)
            tl.store(radial + block * capacity * K + row, tl.sum(gradient * s, 1), mask=valid)
            target = g + row[:, None] * PB + sample[None, :]
            _store_parts(target, gradient, valid[:, None], capacity * K * PB, PARTS)


@triton.jit(do_not_specialize=_INTEGERS)
def class_terms(
    sums, shifts, weights, weight, terms, factors, w, first, count, capacity,
    K: tl.constexpr, PD: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    SHIFTS: tl.constexpr, WEIGHTS: tl.constexpr, TERMS: tl.constexpr, GRADIENT: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute log(1 + Σ e^z) of each class, weighted; multiply its proxies by the derivative.

    With TERMS the terms are not weighted.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    class_ = row // K
    mask = class_ < count
    total = tl.zeros((BR,), tl.float32)
    for block in range(BLOCKS):
        total += tl.load(sums + block * capacity + class_, mask=mask, other=0.0)
    shift = tl.zeros((BR,), tl.float32)
    if SHIFTS:
        shift = tl.load(shifts + class_, mask=mask, other=0.0)
    factor = tl.zeros((BR,), tl.float32) + weight
    if WEIGHTS:
        factor = tl.load(weights + first + class_, mask=mask, other=0.0)
    term = shift + _log1p(total + (tl.exp(-shift) - 1.0))
    if not TERMS:
        term *= factor
    tl.store(terms + first + class_, term, mask=mask & (row % K == 0))
    if GRADIENT:
        factor /= total + tl.exp(-shift)
        tl.store(factors + row, factor, mask=mask)
        for start in range(0, PD, BD):
            d = start + tl.arange(0, BD)
            inside = mask[:, None] & (d < PD)[None, :]
            target = w + row[:, None] * PD + d[None, :]
            value = _load_parts(target, inside, capacity * K * PD, PARTS) * factor[:, None]
            _store_parts(target, value, inside, capacity * K * PD, PARTS)


@triton.jit(do_not_specialize=_INTEGERS)
def embedding_gradients(
    g, w, out, first, rows, capacity, splits,
    K: tl.constexpr, PB: tl.constexpr, PD: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add gᵀ w over the rows of a chunk to `out` [splits, PB, PD], which the first chunk fills."""
    tile = tl.program_id(0)
    b = tile % (PB // BM) * BM + tl.arange(0, BM)
    d = tile // (PB // BM) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    target = out + split * PB * PD + b[:, None] * PD + d[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if first > 0:
        acc = tl.load(target)
    for start in range(split * BK, rows, splits * BK):
        row = start + tl.arange(0, BK)
        mask = row < rows
        left = g + row[None, :] * PB + b[:, None]
        right = w + row[:, None] * PD + d[None, :]
        acc = _multiply(
            acc, left, right, capacity * K * PB, capacity * K * PD, mask[None, :], mask[:, None],
            PARTS, True,
        )  # fmt: skip
    tl.store(target, acc)


@triton.jit(do_not_specialize=_INTEGERS)
def proxy_gradients(
    g, x, w, inverses, factors, radial, out, rows, first, capacity,
    K: tl.constexpr, DIM: tl.constexpr, PB: tl.constexpr, PD: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, FACTORS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the proxies of a chunk: (g x − radial · ŵ) · factor / ‖w‖."""
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    clamped = tl.minimum(row, rows - 1)
    k = tl.arange(0, BK)
    left = g + clamped[:, None] * PB + k[None, :]
    right = x + k[:, None] * PD + column[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, PB, BK):
        acc = _multiply(
            acc, left + start, right + start * PD, capacity * K * PB, PB * PD, 0, 0, PARTS, False
        )
    inverse = tl.load(inverses + clamped)
    length = tl.zeros((BM,), tl.float32)
    for block in range(BLOCKS):
        length += tl.load(radial + block * capacity * K + clamped)
    unit = _load_parts(
        w + clamped[:, None] * PD + column[None, :], (column < PD)[None, :], capacity * K * PD,
        PARTS,
    )  # fmt: skip
    # The unit proxies of class-wise losses are multiplied by the factor already.
    if FACTORS:
        acc *= tl.load(factors + clamped)[:, None]
    acc -= length[:, None] * unit
    target = out + (first.to(tl.int64) + row)[:, None] * DIM + column[None, :]
    tl.store(target, acc * inverse[:, None], mask=(row < rows)[:, None] & (column < DIM)[None, :])


@triton.jit(do_not_specialize=_INTEGERS)
def positives(
    x, weight, labels, S_out, cosines, slopes, x_parts, gamma, batch, classes,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    DIM: tl.constexpr, PB: tl.constexpr, PD: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute each sample's similarity to its class, its derivatives, and the parts of x."""
    sample = tl.program_id(0)
    is_sample = sample < batch
    label = tl.load(labels + sample, mask=is_sample, other=-1)
    is_here = is_sample & (label >= 0) & (label < classes)
    k = tl.arange(0, KP)
    row = tl.where(is_here, label, 0) * K + k
    squares, products = tl.zeros((KP,), tl.float32), tl.zeros((KP,), tl.float32)
    for start in range(0, PD, BD):
        d = start + tl.arange(0, BD)
        value = tl.load(x + sample * DIM + d, mask=is_sample & (d < DIM), other=0.0)
        _store_parts(x_parts + sample * PD + d, value, d < PD, PB * PD, PARTS)
        inside = is_here & (k < K)[:, None] & (d < DIM)[None, :]
        w = tl.load(weight + row[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        squares += tl.sum(w * w, 1)
        products += tl.sum(w * value[None, :], 1)
    s = products * _inverse(squares)
    S, slope = _aggregate(s, k < K, gamma, K, AGGREGATION)
    tl.store(S_out + sample + tl.arange(0, 1), tl.where(is_here, S, 0.0), mask=is_sample)
    tl.store(cosines + sample * K + k, s, mask=is_sample & (k < K))
    slope = tl.where(is_here, slope, 0.0)
    tl.store(slopes + sample * K + k, slope, mask=is_sample & (k < K))


@triton.jit(do_not_specialize=_INTEGERS)
def complete_embeddings(
    partial, factor, weight, labels, slopes, grad, out, batch, classes, splits,
    K: tl.constexpr, DIM: tl.constexpr, PB: tl.constexpr, PD: tl.constexpr, FACTOR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the embeddings: factor · Σ partial + grad · dS/dx of the own class."""
    sample = tl.program_id(0)
    d = tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * PB + sample) * PD + d, mask=d < DIM, other=0.0)
    if FACTOR:
        total *= tl.load(factor)
    label = tl.load(labels + sample)
    is_here = (label >= 0) & (label < classes)
    pull = tl.zeros((BD,), tl.float32)
    for k in range(K):
        w = tl.load(weight + (label * K + k) * DIM + d, mask=is_here & (d < DIM), other=0.0)
        pull += w * (_inverse(tl.sum(w * w, 0)) * tl.load(slopes + sample * K + k))
    tl.store(out + sample * DIM + d, total + pull * tl.load(grad + sample), mask=d < DIM)


@triton.jit(do_not_specialize=_INTEGERS)
def add_positive_gradients(
    x, weight, labels, cosines, slopes, grad, dw, first, batch, classes,
    K: tl.constexpr, KP: tl.constexpr, DIM: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the similarities of the samples to the proxies of classes from first.

    The first sample of a class adds the gradient of its proxies for all samples of the class.
    """
    sample = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    k = tl.arange(0, KP)
    label = tl.load(labels + sample)
    if (label >= first) & (label < first + classes):
        earlier = tl.zeros((BB,), tl.int32)
        for start in range(0, sample, BB):
            i = start + tl.arange(0, BB)
            earlier += (tl.load(labels + i, mask=i < sample, other=-1) == label).to(tl.int32)
        if tl.sum(earlier, 0) == 0:
            source = weight + (label * K + k)[:, None] * DIM
            squares = tl.zeros((KP,), tl.float32)
            for start in range(0, DIM, BD):
                column = (start + tl.arange(0, BD))[None, :]
                value = tl.load(source + column, mask=(k < K)[:, None] & (column < DIM), other=0.0)
                squares += tl.sum(value * value, 1)
            inverse = _inverse(squares)
            inside = (k < K)[:, None] & (d < DIM)[None, :]
            unit = tl.load(source + d[None, :], mask=inside, other=0.0) * inverse[:, None]
            total = tl.zeros((KP, BD), tl.float32)
            radial = tl.zeros((KP,), tl.float32)
            for start in range(sample // BB * BB, batch, BB):
                i = start + tl.arange(0, BB)
                same = tl.load(labels + i, mask=i < batch, other=-1) == label
                j = tl.min(tl.where(same, i, batch), 0)  # the next sample of the class
                while j < batch:
                    slope = tl.load(slopes + j * K + k, mask=k < K, other=0.0) * tl.load(grad + j)
                    radial += slope * tl.load(cosines + j * K + k, mask=k < K, other=0.0)
                    value = tl.load(x + j * DIM + d, mask=d < DIM, other=0.0)
                    total += slope[:, None] * value[None, :]
                    j = tl.min(tl.where(same & (i > j), i, batch), 0)
            target = dw + ((label - first) * K + k)[:, None] * DIM + d[None, :]
            change = (total - radial[:, None] * unit) * inverse[:, None]
            tl.store(target, tl.load(target, mask=inside, other=0.0) + change, mask=inside)


@triton.jit(do_not_specialize=_INTEGERS)
def multiply_unless_one(values, factor, n: tl.int64, BLOCK: tl.constexpr):
    """Multiply an array by a number on the device; return immediately if it is 1."""
    f = tl.load(factor)
    if f != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(start, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(values + i, tl.load(values + i, mask=i < n) * f, mask=i < n)


@triton.jit(do_not_specialize=_INTEGERS)
def normalize(
    embeddings, labels, weights, x, lengths, inverses, labels_out, weights_out, log_weights,
    DIM: tl.constexpr, WEIGHTS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Scale an embedding to length one, like `l2_normalize`; zero it if its sample is ignored."""
    sample = tl.program_id(0)
    label = tl.load(labels + sample)
    weight = tl.where(label >= 0, 1.0, 0.0)
    if WEIGHTS:
        weight = tl.load(weights + sample, mask=label >= 0, other=0.0)
        label = tl.where(weight > 0.0, label, -1)
    d = tl.arange(0, BD)
    inside = (label >= 0) & (d < DIM)
    value = tl.load(embeddings + sample * DIM + d, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    factor = tl.where(largest > 2.0**50, 2.0**-80, tl.where(largest < 2.0**-38, 2.0**70, 1.0))
    value *= factor
    squares = tl.sum(value * value, 0)
    inverse = _inverse(squares)
    tl.store(x + sample * DIM + d, value * inverse, mask=d < DIM)
    tl.store(lengths + sample, tl.sqrt(squares) / factor)
    tl.store(inverses + sample, inverse * factor)
    tl.store(labels_out + sample, tl.where(label >= 0, label, 0))
    tl.store(weights_out + sample, weight)
    tl.store(log_weights + sample, tl.where(weight > 0.0, tl.log(weight), _LOG_ZERO))


@triton.jit(do_not_specialize=_INTEGERS)
def normalize_backward(
    x, inverses, grad, length_grad, out,
    DIM: tl.constexpr, LENGTH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradient of an embedding from those of its direction and length."""
    sample = tl.program_id(0)
    d = tl.arange(0, BD)
    unit = tl.load(x + sample * DIM + d, mask=d < DIM, other=0.0)
    g = tl.load(grad + sample * DIM + d, mask=d < DIM, other=0.0)
    g = (g - unit * tl.sum(g * unit, 0)) * tl.load(inverses + sample)
    if LENGTH:
        g += unit * tl.load(length_grad + sample)
    tl.store(out + sample * DIM + d, g, mask=d < DIM)


@triton.jit(do_not_specialize=_INTEGERS)
def class_pulls(
    logits, log_weights, labels, terms, slopes, batch, BB: tl.constexpr
):  # fmt: skip
    """Compute log(1 + Σ w e^logit) over the samples of a class, at the first of them; else -1.

    `slopes` receives the derivative of the term by each sample's logit.
    """
    sample = tl.program_id(0)
    label = tl.load(labels + sample)
    peak = tl.zeros((BB,), tl.float32)
    for start in range(0, batch, BB):
        i = start + tl.arange(0, BB)
        same = (i < batch) & (tl.load(labels + i, mask=i < batch, other=-1) == label)
        z = tl.load(logits + i, mask=same, other=0.0)
        z += tl.load(log_weights + i, mask=same, other=0.0)
        peak = tl.maximum(peak, tl.where(same, z, 0.0))
    shift = tl.max(peak, 0)
    total = tl.zeros((BB,), tl.float32)
    earlier = tl.zeros((BB,), tl.int32)
    for start in range(0, batch, BB):
        i = start + tl.arange(0, BB)
        same = (i < batch) & (tl.load(labels + i, mask=i < batch, other=-1) == label)
        z = tl.load(logits + i, mask=same, other=0.0)
        z += tl.load(log_weights + i, mask=same, other=0.0)
        total += tl.where(same, tl.exp(z - shift), 0.0)
        is_used = tl.load(log_weights + i, mask=same, other=_LOG_ZERO) > _LOG_ZERO
        earlier += (same & is_used & (i < sample)).to(tl.int32)
    sum_exp = tl.sum(total, 0)
    term = shift + _log1p(sum_exp + (tl.exp(-shift) - 1.0))
    own_weight = tl.load(log_weights + sample)
    is_first = (tl.sum(earlier, 0) == 0) & (own_weight > _LOG_ZERO)
    tl.store(terms + sample, tl.where(is_first, term, -1.0))
    own = tl.load(logits + sample) + own_weight
    tl.store(slopes + sample, tl.exp(own - shift) / (sum_exp + tl.exp(-shift)))


@triton.jit(do_not_specialize=_INTEGERS)
def finish_pulls(terms, slopes, value, factor, batch, BB: tl.constexpr):
    """Compute the mean of the terms of `class_pulls`, and divide the slopes by their number."""
    total, count = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    for start in range(0, batch, BB):
        i = start + tl.arange(0, BB)
        term = tl.load(terms + i, mask=i < batch, other=-1.0)
        count += (term >= 0.0).to(tl.float32)
        total += tl.where(term < 0.0, 0.0, term)  # NaN stays
    classes = tl.sum(count, 0)
    inverse = 1.0 / tl.maximum(classes, 1.0)
    tl.store(value, tl.sum(total, 0) * inverse)
    tl.store(factor, tl.minimum(classes, 1.0))
    for start in range(0, batch, BB):
        i = start + tl.arange(0, BB)
        slope = tl.load(slopes + i, mask=i < batch)
        tl.store(slopes + i, slope * inverse, mask=i < batch)


@triton.jit(do_not_specialize=_INTEGERS)
def weighted_mean(terms, weights, slopes, value, factor, batch, BB: tl.constexpr):
    """Compute Σ w·t / Σ w and its derivatives w / Σ w; zeros if all weights are 0."""
    total, weight = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    for start in range(0, batch, BB):
        i = start + tl.arange(0, BB)
        w = tl.load(weights + i, mask=i < batch, other=0.0)
        total += w * tl.load(terms + i, mask=i < batch, other=0.0)
        weight += w
    weight_sum = tl.sum(weight, 0)
    inverse = tl.where(weight_sum > 0.0, 1.0 / weight_sum, 0.0)
    tl.store(value, tl.sum(total, 0) * inverse)
    tl.store(factor, (weight_sum > 0.0).to(tl.float32))
    for start in range(0, batch, BB):
        i = start + tl.arange(0, BB)
        w = tl.load(weights + i, mask=i < batch)
        tl.store(slopes + i, w * inverse, mask=i < batch)


@triton.jit(do_not_specialize=_INTEGERS)
def update_by_sgd(
    weight, gradient, mean, lr, momentum, weight_decay, start: tl.int64, n: tl.int64,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update n numbers of the proxies from `start`: see `ProxySGD`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    w = tl.load(weight + start + i, mask=inside)
    g = tl.load(gradient + i, mask=inside) + weight_decay * w
    if MEAN:
        g += momentum * tl.load(mean + start + i, mask=inside)
        tl.store(mean + start + i, g, mask=inside)
    tl.store(weight + start + i, w - lr * g, mask=inside)


@triton.jit(do_not_specialize=_INTEGERS)
def update_by_rowwise_adam(
    weight, gradient, first_moment, second_moment, corrections, lr, first_decay, second_decay, eps,
    weight_decay, start: tl.int64, DIM: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Update a proxy: see `RowwiseAdam`. `corrections` has 1 − β^step for both moments."""
    row, d = tl.program_id(0) + start, tl.arange(0, BD)
    i, inside = row * DIM + d, d < DIM
    w = tl.load(weight + i, mask=inside, other=0.0)
    g = tl.load(gradient + tl.program_id(0) * DIM + d, mask=inside, other=0.0)
    second = tl.load(second_moment + row)
    second += (1.0 - second_decay) * (tl.sum(g * g, 0) / DIM - second)
    tl.store(second_moment + row, second)
    if FIRST:
        first = tl.load(first_moment + i, mask=inside, other=0.0)
        first += (1.0 - first_decay) * (g - first)
        tl.store(first_moment + i, first, mask=inside)
        g = first / tl.load(corrections)
    g /= tl.sqrt(second / tl.load(corrections + 1)) + eps
    tl.store(weight + i, w * (1.0 - lr * weight_decay) - lr * g, mask=inside)
