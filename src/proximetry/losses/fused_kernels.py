"""Triton kernels of the fused engine: products with epilogues, over chunks of classes.

Products use bf16 matrix units. A number is stored as PARTS bf16 numbers that add up to it, and a
product is the sum of the products of the parts: 1 part has the accuracy of bf16, 2 parts (three
products) more than that of TF32, 3 parts (six products) that of float32.

Arrays of a chunk: `x` [PARTS, batch, dim] has the unit embeddings, `w` [PARTS, rows, dim] the unit
proxies, `g` [PARTS, rows, batch] the gradient of each cosine. A row is a proxy, class · K + k.
Batch and dim are padded with zeros to multiples of the tiles, so that loops need no masks. In a
tile each class has KP ≥ K rows, a power of two.
"""

import os

import triton
import triton.language as tl

#: Triton's interpreter cannot multiply bf16 numbers.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: How the K proxies of a class give its similarity.
AGGREGATIONS = {"single": 0, "mean": 0, "soft": 1, "max": 2}
#: Arguments that change from chunk to chunk.
_CHUNK = ["first", "count", "rows"]


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
    return value.to(tl.float32) if _INTERPRETED else value


@triton.jit
def _multiply(
    acc, a, b, a_part, b_part, a_mask, b_mask, PARTS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return acc + a @ b, for pointers to the first parts; masks count only if MASKED."""
    a0, b0 = _load(a, a_mask, MASKED), _load(b, b_mask, MASKED)
    acc = tl.dot(a0, b0, acc)
    if PARTS > 1:
        a1, b1 = _load(a + a_part, a_mask, MASKED), _load(b + b_part, b_mask, MASKED)
        acc = tl.dot(a0, b1, acc)
        acc = tl.dot(a1, b0, acc)
        if PARTS > 2:
            a2 = _load(a + 2 * a_part, a_mask, MASKED)
            b2 = _load(b + 2 * b_part, b_mask, MASKED)
            acc = tl.dot(a1, b1, acc)
            acc = tl.dot(a0, b2, acc)
            acc = tl.dot(a2, b0, acc)
    return acc


@triton.jit
def _inverse(squares):
    """Return 1 / length, 0 for lengths up to 1e-12, and NaN where the length overflows."""
    inverse = tl.where(squares > 1e-24, tl.rsqrt(squares), 0.0)
    return tl.where((squares == float("inf")) | (squares != squares), float("nan"), inverse)


@triton.jit
def _aggregate(s, valid, gamma, K: tl.constexpr, AGGREGATION: tl.constexpr):
    """Return S [n, m] from the cosines [n, KP, m] of K proxies, and the derivatives dS/ds."""
    if AGGREGATION == 1:  # soft
        masked = tl.where(valid, s, float("-inf"))
        e = tl.exp((masked - tl.max(masked, 1)[:, None, :]) / gamma)
        share = e / tl.sum(e, 1)[:, None, :]
        S = tl.sum(share * s, 1)
        slope = share * ((s - S[:, None, :]) / gamma + 1.0)
    elif AGGREGATION == 2:  # max
        masked = tl.where(valid, s, float("-inf"))
        S = tl.max(masked, 1)
        nearest = (masked == S[:, None, :]).to(tl.float32)
        slope = nearest / tl.sum(nearest, 1)[:, None, :]
    else:  # mean
        S = tl.sum(tl.where(valid, s, 0.0), 1) / K
        slope = tl.where(valid, s * 0.0 + 1.0 / K, 0.0)
    return S, slope


@triton.jit
def _similarities(
    x, w, tile, sample, count, dim, x_part, w_part, gamma,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    BR: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return the cosines s [BR, BB] of a tile, S [BR / KP, BB], and the derivatives dS/ds."""
    BC: tl.constexpr = BR // KP
    r = tl.arange(0, BR)
    row = (tile * BC + r // KP) * K + tl.minimum(r % KP, K - 1)
    row = tl.minimum(row, count * K - 1)
    d = tl.arange(0, BD)
    a = w + row[:, None] * dim + d[None, :]
    b = x + sample[None, :] * dim + d[:, None]
    s = tl.zeros((BR, BB), tl.float32)
    for start in range(0, dim, BD):
        s = _multiply(s, a + start, b + start, w_part, x_part, 0, 0, PARTS, False)
    if K == 1:
        S, slope = s, s
    else:
        valid = (tl.arange(0, KP) < K)[None, :, None]
        S, slope = _aggregate(tl.reshape(s, (BC, KP, BB)), valid, gamma, K, AGGREGATION)
    return s, S, slope


@triton.jit
def _negative_logits(
    S, tile, sample, labels, log_weights, scales, scale, offset, ignore_above, first, count, batch,
    BC: tl.constexpr, LOG_WEIGHTS: tl.constexpr, SCALES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Return the logits [BC, BB], -inf where an entry is not a negative, and the scales."""
    class_ = tile * BC + tl.arange(0, BC)
    inside = (class_ < count)[:, None] & (sample < batch)[None, :]
    label = tl.load(labels + sample, mask=sample < batch, other=-1)
    factor = tl.zeros_like(S) + scale
    if SCALES:
        factor = tl.zeros_like(S) + tl.load(scales + sample, mask=sample < batch, other=0.0)
    z = S * factor + offset
    if LOG_WEIGHTS:
        z += tl.load(log_weights + sample, mask=sample < batch, other=0.0)[None, :]
    is_negative = inside & (label[None, :] != (first + class_)[:, None])
    if LIMIT:
        is_negative &= S <= ignore_above
    return tl.where(is_negative, z, float("-inf")), factor, inside


@triton.jit
def _load_proxies(weight, row, mask, d, dim):
    """Return the proxies [.., .., BD] of some rows, 0 outside of the mask."""
    inside = mask[:, :, None] & (d < dim)[None, None, :]
    return tl.load(
        weight + row.to(tl.int64)[:, :, None] * dim + d[None, None, :], mask=inside, other=0.0
    )


@triton.jit
def _products(
    weight, class_, row, mask, count, dim,
    K: tl.constexpr, KP: tl.constexpr, GRAM: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return the squared lengths [BC, KP] and the Gram matrices [BC, KP, KP] of the proxies."""
    squares = tl.zeros((BC, KP), tl.float32)
    gram = tl.zeros((BC, KP, KP), tl.float32)
    for start in range(0, dim, BD):
        d = start + tl.arange(0, BD)
        value = _load_proxies(weight, row, mask, d, dim)
        squares += tl.sum(value * value, 2)
        if GRAM:
            for s in range(K):
                other = _load_proxies(
                    weight, class_[:, None] * K + s, (class_ < count)[:, None], d, dim
                )
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


@triton.jit(do_not_specialize=_CHUNK)
def prepare(
    weight, w, inverses, distances, first, count, dim, padded_dim, w_part,
    K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr, DISTANCES: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Normalize the proxies of a chunk; sum the distances of the proxies of each class."""
    class_ = tl.program_id(0) * BC + tl.arange(0, BC)
    k = tl.arange(0, KP)
    row = class_[:, None] * K + k[None, :]
    mask = (class_ < count)[:, None] & (k < K)[None, :]
    weight += first.to(tl.int64) * K * dim
    squares, gram = _products(weight, class_, row, mask, count, dim, K, KP, DISTANCES, BC, BD)
    inverse = _inverse(squares)
    tl.store(inverses + row, inverse, mask=mask)
    for start in range(0, padded_dim, BD):
        d = start + tl.arange(0, BD)
        unit = _load_proxies(weight, row, mask, d, dim) * inverse[:, :, None]
        inside = mask[:, :, None] & (d < padded_dim)[None, None, :]
        target = w + row[:, :, None] * padded_dim + d[None, None, :]
        _store_parts(target, unit, inside, w_part, PARTS)
    if DISTANCES:
        pairs, distance, _ = _pair_distances(gram, inverse, K, KP)
        total = tl.sum(tl.sum(tl.where(pairs != 0.0, distance, 0.0), 2), 1) * 0.5
        tl.store(distances + first + class_, total, mask=class_ < count)


@triton.jit
def add_pair_gradients(
    weight, gradient, slope, factor, count, dim,
    K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add slope · factor times the gradient of the sum of the distances (see `prepare`).

    For proxy t: Σ_s (ŵ_t cos_ts − ŵ_s) / (distance_ts ‖w_t‖).
    """
    class_ = tl.program_id(0) * BC + tl.arange(0, BC)
    k = tl.arange(0, KP)
    row = class_[:, None] * K + k[None, :]
    mask = (class_ < count)[:, None] & (k < K)[None, :]
    squares, gram = _products(weight, class_, row, mask, count, dim, K, KP, True, BC, BD)
    inverse = _inverse(squares)
    pairs, distance, cosine = _pair_distances(gram, inverse, K, KP)
    near = tl.where(pairs != 0.0, 1.0 / distance, 0.0)
    slope = tl.load(slope) * factor
    own = tl.sum(cosine * near, 2) * inverse * inverse * slope  # [BC, KP]
    others = near * inverse[:, :, None] * inverse[:, None, :] * slope
    for start in range(0, dim, BD):
        d = start + tl.arange(0, BD)
        change = own[:, :, None] * _load_proxies(weight, row, mask, d, dim)
        for s in range(K):
            other = _load_proxies(
                weight, class_[:, None] * K + s, (class_ < count)[:, None], d, dim
            )
            is_s = (tl.arange(0, KP) == s)[None, None, :]
            change -= tl.sum(tl.where(is_s, others, 0.0), 2)[:, :, None] * other
        target = gradient + row.to(tl.int64)[:, :, None] * dim + d[None, None, :]
        inside = mask[:, :, None] & (d < dim)[None, None, :]
        tl.store(target, tl.load(target, mask=inside, other=0.0) + change, mask=inside)


@triton.jit(do_not_specialize=_CHUNK)
def log_sums(
    x, w, labels, scales, peaks, sums, totals, scale, offset, ignore_above, gamma,
    first, count, batch, padded_batch, dim, x_part, w_part,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    SCALES: tl.constexpr, LIMIT: tl.constexpr, TOTAL: tl.constexpr,
    BR: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Continue each sample's running log-sum-exp of the negatives, peaks + log(sums).

    Program (i, j) adds every tile of the chunk whose index is j modulo the number of programs, and
    stores its result in row j.
    """
    BC: tl.constexpr = BR // KP
    sample = tl.program_id(0) * BB + tl.arange(0, BB)
    slot = tl.program_id(1) * padded_batch + sample
    peak, total = tl.load(peaks + slot), tl.load(sums + slot)
    if TOTAL:
        similarity = tl.load(totals + slot)
    for tile in range(tl.program_id(1), tl.cdiv(count, BC), tl.num_programs(1)):
        _, S, _ = _similarities(
            x, w, tile, sample, count, dim, x_part, w_part, gamma,
            K, KP, AGGREGATION, PARTS, BR, BB, BD,
        )  # fmt: skip
        z, _, inside = _negative_logits(
            S, tile, sample, labels, labels, scales, scale, offset, ignore_above,
            first, count, batch, BC, False, SCALES, LIMIT,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(z, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher[None, :]), 0)
        peak = higher
        if TOTAL:
            similarity += tl.sum(tl.where(inside, S, 0.0), 0)
    tl.store(peaks + slot, peak)
    tl.store(sums + slot, total)
    if TOTAL:
        tl.store(totals + slot, similarity)


@triton.jit(do_not_specialize=_CHUNK)
def entries(
    x, w, labels, log_weights, scales, shifts, lse, slopes, total_slopes,
    g, sums, radial, scale_slopes, scale, offset, ignore_above, gamma,
    first, count, batch, padded_batch, dim, x_part, w_part, g_part, capacity,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    BY_CLASS: tl.constexpr, LOG_WEIGHTS: tl.constexpr, SHIFTS: tl.constexpr, PEAKS: tl.constexpr,
    SCALES: tl.constexpr, LIMIT: tl.constexpr, TOTAL: tl.constexpr, GRADIENT: tl.constexpr,
    BR: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute a tile of entries e^z, and the gradients of the cosines.

    By class: `sums` [batch tiles, classes] receives Σ e^(z − shift) over the samples of a tile, or
    with PEAKS the largest z. By sample: e is e^(z − lse) · slope. `radial` [batch tiles, rows]
    receives Σ g · cos, which the gradient of a proxy needs.
    """
    BC: tl.constexpr = BR // KP
    tile, block = tl.program_id(0), tl.program_id(1)
    sample = block * BB + tl.arange(0, BB)
    class_ = tile * BC + tl.arange(0, BC)
    s, S, slope = _similarities(
        x, w, tile, sample, count, dim, x_part, w_part, gamma, K, KP, AGGREGATION, PARTS, BR, BB, BD
    )
    z, factor, inside = _negative_logits(
        S, tile, sample, labels, log_weights, scales, scale, offset, ignore_above,
        first, count, batch, BC, LOG_WEIGHTS, SCALES, LIMIT,
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
            level = tl.load(lse + sample, mask=sample < batch, other=0.0)
            level = tl.where(level == float("-inf"), 0.0, level)
            e = tl.exp(z - level[None, :])
            e *= tl.load(slopes + sample, mask=sample < batch, other=0.0)[None, :]
            if SCALES:
                tl.store(scale_slopes + tile * padded_batch + sample, tl.sum(e * S, 0))
        if GRADIENT:
            gradient = e * factor
            if TOTAL:
                direct = tl.load(total_slopes + sample, mask=sample < batch, other=0.0)
                gradient = tl.where(inside, gradient + direct[None, :], 0.0)
            if K > 1:
                gradient = tl.reshape(gradient[:, None, :] * slope, (BR, BB))
            r = tl.arange(0, BR)
            row = (tile * BC + r // KP) * K + r % KP
            valid = (r % KP < K) & (tile * BC + r // KP < count)
            tl.store(radial + block * capacity * K + row, tl.sum(gradient * s, 1), mask=valid)
            target = g + row[:, None] * padded_batch + sample[None, :]
            _store_parts(target, gradient, valid[:, None], g_part, PARTS)


@triton.jit
def _log1p(value):
    """Return log(1 + value), accurate for small values (Kahan)."""
    rounded = 1.0 + value
    return tl.where(rounded == 1.0, value, tl.log(rounded) * (value / (rounded - 1.0)))


@triton.jit(do_not_specialize=_CHUNK)
def class_terms(
    sums, shifts, weights, weight, terms, factors, w, first, count, blocks, dim, w_part, capacity,
    K: tl.constexpr, PARTS: tl.constexpr, SHIFTS: tl.constexpr, WEIGHTS: tl.constexpr,
    TERMS: tl.constexpr, GRADIENT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute log(1 + Σ e^z) of each class, weighted; multiply its proxies by the derivative.

    With TERMS the terms are not weighted.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    class_ = row // K
    mask = class_ < count
    total = tl.zeros((BR,), tl.float32)
    for block in range(blocks):
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
        for start in range(0, dim, BD):
            d = start + tl.arange(0, BD)
            inside = mask[:, None] & (d < dim)[None, :]
            target = w + row[:, None] * dim + d[None, :]
            value = _load_parts(target, inside, w_part, PARTS) * factor[:, None]
            _store_parts(target, value, inside, w_part, PARTS)


@triton.jit(do_not_specialize=_CHUNK)
def embedding_gradients(
    g, w, out, rows, padded_batch, padded_dim, g_part, w_part,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add gᵀ w over the rows of a chunk to `out` [splits, batch, dim]."""
    split = tl.program_id(2)
    b = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BN + tl.arange(0, BN)
    target = out + split * padded_batch * padded_dim + b[:, None] * padded_dim + d[None, :]
    acc = tl.load(target)
    for start in range(split * BK, rows, tl.num_programs(2) * BK):
        row = start + tl.arange(0, BK)
        mask = row < rows
        left = g + row[None, :] * padded_batch + b[:, None]
        right = w + row[:, None] * padded_dim + d[None, :]
        acc = _multiply(acc, left, right, g_part, w_part, mask[None, :], mask[:, None], PARTS, True)
    tl.store(target, acc)


@triton.jit(do_not_specialize=_CHUNK)
def proxy_gradients(
    g, x, w, inverses, factors, radial, out, rows, first, padded_batch, dim, padded_dim,
    g_part, x_part, w_part, capacity, blocks,
    PARTS: tl.constexpr, FACTORS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the proxies of a chunk: (g x − radial · ŵ) · factor / ‖w‖."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    clamped = tl.minimum(row, rows - 1)
    k = tl.arange(0, BK)
    left = g + clamped[:, None] * padded_batch + k[None, :]
    right = x + k[:, None] * padded_dim + column[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, padded_batch, BK):
        acc = _multiply(
            acc, left + start, right + start * padded_dim, g_part, x_part, 0, 0, PARTS, False
        )
    inverse = tl.load(inverses + clamped)
    length = tl.zeros((BM,), tl.float32)
    for block in range(blocks):
        length += tl.load(radial + block * capacity + clamped)
    unit = _load_parts(
        w + clamped[:, None] * padded_dim + column[None, :],
        (column < padded_dim)[None, :],
        w_part,
        PARTS,
    )
    # The unit proxies of class-wise losses are multiplied by the factor already.
    if FACTORS:
        acc *= tl.load(factors + clamped)[:, None]
    acc -= length[:, None] * unit
    target = out + (first.to(tl.int64) + row)[:, None] * dim + column[None, :]
    tl.store(target, acc * inverse[:, None], mask=(row < rows)[:, None] & (column < dim)[None, :])


@triton.jit
def positives(
    x, weight, labels, S_out, cosines, slopes, x_parts, gamma,
    batch, classes, dim, padded_dim, x_part,
    K: tl.constexpr, KP: tl.constexpr, AGGREGATION: tl.constexpr, PARTS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute each sample's similarity to its class, its derivatives, and the parts of x."""
    sample = tl.program_id(0)
    is_sample = sample < batch
    label = tl.load(labels + sample, mask=is_sample, other=-1)
    is_here = is_sample & (label >= 0) & (label < classes)
    k = tl.arange(0, KP)
    row = tl.where(is_here, label, 0) * K + k
    squares, products = tl.zeros((KP,), tl.float32), tl.zeros((KP,), tl.float32)
    for start in range(0, padded_dim, BD):
        d = start + tl.arange(0, BD)
        value = tl.load(x + sample * dim + d, mask=is_sample & (d < dim), other=0.0)
        _store_parts(x_parts + sample * padded_dim + d, value, d < padded_dim, x_part, PARTS)
        inside = is_here & (k < K)[:, None] & (d < dim)[None, :]
        w = tl.load(weight + row[:, None] * dim + d[None, :], mask=inside, other=0.0)
        squares += tl.sum(w * w, 1)
        products += tl.sum(w * value[None, :], 1)
    s = products * _inverse(squares)
    S, slope = _aggregate(s[None, :, None], (k < K)[None, :, None], gamma, K, AGGREGATION)
    tl.store(
        S_out + sample + tl.arange(0, 1),
        tl.where(is_here, tl.reshape(S, (1,)), 0.0),
        mask=is_sample,
    )
    tl.store(cosines + sample * K + k, s, mask=is_sample & (k < K))
    tl.store(slopes + sample * K + k, tl.reshape(slope, (KP,)), mask=is_here & (k < K))


@triton.jit
def add_positive_gradients(
    x, weight, labels, cosines, slopes, grad, dx, dw, batch, classes, dim,
    K: tl.constexpr, KP: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
    BB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the similarities of the samples to their classes.

    The first sample of a class adds the gradient of its proxies for all samples of the class.
    """
    sample = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    k = tl.arange(0, KP)
    label = tl.load(labels + sample)
    is_here = (label >= 0) & (label < classes)
    source = weight + (tl.where(is_here, label, 0) * K + k)[:, None] * dim
    mask = is_here & (k < K)[:, None]
    squares = tl.zeros((KP,), tl.float32)
    for start in range(0, dim, BD):
        column = (start + tl.arange(0, BD))[None, :]
        value = tl.load(source + column, mask=mask & (column < dim), other=0.0)
        squares += tl.sum(value * value, 1)
    inverse = _inverse(squares)
    inside = mask & (d < dim)[None, :]
    unit = tl.load(source + d[None, :], mask=inside, other=0.0) * inverse[:, None]
    if X:
        share = tl.load(slopes + sample * K + k, mask=is_here & (k < K), other=0.0)
        pull = tl.sum(unit * share[:, None], 0) * tl.load(grad + sample)
        row = dx + sample * dim + d
        tl.store(row, tl.load(row, mask=d < dim, other=0.0) + pull, mask=is_here & (d < dim))
    if W:
        earlier = tl.zeros((BB,), tl.int32)
        for start in range(0, sample, BB):
            i = start + tl.arange(0, BB)
            earlier += (tl.load(labels + i, mask=i < sample, other=-1) == label).to(tl.int32)
        if is_here & (tl.sum(earlier, 0) == 0):
            total = tl.zeros((KP, BD), tl.float32)
            radial = tl.zeros((KP,), tl.float32)
            for start in range(sample, batch, BB):
                i = start + tl.arange(0, BB)
                same = tl.load(labels + i, mask=i < batch, other=-1) == label
                if tl.sum(same.to(tl.int32), 0) > 0:
                    entry = i[:, None] * K + k[None, :]
                    both = same[:, None] & (k < K)[None, :]
                    slope = tl.load(slopes + entry, mask=both, other=0.0)
                    slope *= tl.load(grad + i, mask=same, other=0.0)[:, None]
                    radial += tl.sum(slope * tl.load(cosines + entry, mask=both, other=0.0), 0)
                    rows = x + i[:, None] * dim + d[None, :]
                    value = tl.load(rows, mask=same[:, None] & (d < dim)[None, :], other=0.0)
                    total = tl.dot(tl.trans(slope), value, total, input_precision="ieee")
            target = dw + (label * K + k)[:, None] * dim + d[None, :]
            change = (total - radial[:, None] * unit) * inverse[:, None]
            tl.store(target, tl.load(target, mask=inside, other=0.0) + change, mask=inside)


@triton.jit
def multiply_unless_one(values, factor, n, BLOCK: tl.constexpr):
    """Multiply an array by a number on the device; return at once if it is 1."""
    f = tl.load(factor)
    if f != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(start, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(values + i, tl.load(values + i, mask=i < n) * f, mask=i < n)
