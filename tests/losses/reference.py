"""Reference implementations of the losses, from the papers, in NumPy float64 and loops.

Independent of the package. ``x`` is [B, D], ``w`` is [C, K, D], ``y`` is [B]. The function ``mpa``
has the formula of the loss ``mpa``, and its settings as arguments.
"""

from itertools import combinations

import numpy as np


def unit(v):
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def cosine(x, w):
    """[B, C, K]"""
    return np.einsum("bd,ckd->bck", unit(x), unit(w))


def soft_similarity(x, w, gamma):
    """Saeki et al. 2021, eq. 1."""
    s = cosine(x, w)
    q = np.exp(s / gamma) / np.exp(s / gamma).sum(-1, keepdims=True)
    return (q * s).sum(-1)


def intra_class(w):
    """Saeki et al. 2021, eq. 3, with the 1e-5 of SoftTriple's code."""
    C, K, _ = w.shape
    if K == 1:
        return 0.0
    w = unit(w)
    total = 0.0
    for v in w:
        total += sum(np.sqrt(2 + 1e-5 - 2 * a @ b) for a, b in combinations(v, 2))
    return total / (C * K * (K - 1))


def squared_distances(x, w):
    """[B, C], with one proxy per class."""
    return ((unit(x)[:, None] - unit(w)[:, 0]) ** 2).sum(-1)


def proxy_nca(x, w, y, temperature=1.0):
    total = 0.0
    for d, c in zip(squared_distances(x, w) / temperature, y, strict=True):
        total -= np.log(np.exp(-d[c]) / np.exp(-np.delete(d, c)).sum())
    return total / len(x)


def proxy_nca_plus_plus(x, w, y, temperature=1 / 9):
    return cross_entropy(-squared_distances(x, w) / temperature, y)


def anchor_terms(S, y, alpha, margin):
    """Kim et al. 2020, eq. 4; Saeki et al. 2021, eq. 6; over similarities [B, C]."""
    B, C = S.shape
    present = sorted(set(y.tolist()))
    pull = 0.0
    for c in present:
        pull += np.log(1 + sum(np.exp(-alpha * (S[i, c] - margin)) for i in range(B) if y[i] == c))
    push = 0.0
    for c in range(C):
        push += np.log(1 + sum(np.exp(alpha * (S[i, c] + margin)) for i in range(B) if y[i] != c))
    return pull / len(present) + push / C


def proxy_anchor(x, w, y, alpha=32.0, margin=0.1):
    return anchor_terms(cosine(x, w)[:, :, 0], y, alpha, margin)


def mpa(x, w, y, alpha=32.0, margin=0.1, gamma=0.1, tau=0.2):
    return anchor_terms(soft_similarity(x, w, gamma), y, alpha, margin) + tau * intra_class(w)


def mpa_dw(x, w, y, alpha=32.0, margin=0.1, gamma=0.1, tau=0.2):
    """Saeki et al. 2021, eqs. 12 and 13."""
    S = soft_similarity(x, w, gamma)
    total = 0.0
    for i in range(len(x)):
        total += np.log(1 + np.exp(-alpha * (S[i, y[i]] - margin)))
        push = [np.exp(alpha * (S[i, c] + margin)) for c in range(S.shape[1]) if c != y[i]]
        total += np.log(1 + sum(push))
    return total / len(x) + tau * intra_class(w)


def mpa_ap(x, w, y, alpha=32.0, margin=0.1, gamma=0.1, tau=0.2):
    """Saeki et al. 2021, eqs. 15 to 17."""
    S = soft_similarity(x, w, gamma)
    total = 0.0
    for i in range(len(x)):
        marked = [margin - S[i, c] if c == y[i] else S[i, c] + margin for c in range(S.shape[1])]
        total += np.log(1 + np.exp(alpha * np.array(marked)).sum())
    return total / len(x) + tau * intra_class(w)


def cross_entropy(logits, y):
    terms = [-np.log(np.exp(z[c]) / np.exp(z).sum()) for z, c in zip(logits, y, strict=True)]
    return np.mean(terms)


def soft_triple(x, w, y, scale=20.0, gamma=0.1, margin=0.01, tau=0.2):
    """Saeki et al. 2021, eqs. 2 to 4, with the mean over the batch as in the authors' code."""
    z = soft_similarity(x, w, gamma)
    z[np.arange(len(x)), y] -= margin
    return cross_entropy(scale * z, y) + tau * intra_class(w)


def norm_softmax(x, w, y, scale=20.0):
    return cross_entropy(scale * cosine(x, w).max(-1), y)


def cosface(x, w, y, scale=64.0, margin=0.35):
    z = cosine(x, w).max(-1)
    z[np.arange(len(x)), y] -= margin
    return cross_entropy(scale * z, y)


def arcface(x, w, y, scale=64.0, margin=0.5):
    z = cosine(x, w).max(-1)
    for i in range(len(x)):
        theta = np.arccos(z[i, y[i]])
        beyond = theta > np.pi - margin
        z[i, y[i]] = np.cos(theta) + np.cos(margin) - 1 if beyond else np.cos(theta + margin)
    return cross_entropy(scale * z, y)


def psi(theta, m):
    k = min(int(theta * m / np.pi), m - 1)
    return (-1) ** k * np.cos(m * theta) - 2 * k


def sphereface(x, w, y, margin=4, lam=1000.0 / 1.12):
    z = cosine(x, w).max(-1)
    for i in range(len(x)):
        theta = np.arccos(z[i, y[i]])
        z[i, y[i]] = (lam * np.cos(theta) + psi(theta, margin)) / (1 + lam)
    return cross_entropy(np.linalg.norm(x, axis=1, keepdims=True) * z, y)


def softmax_with_margin(x, w, y, scale, margin):
    """Cross-entropy with the logit scale · margin(θ, i) of each sample's class."""
    z = cosine(x, w).max(-1)
    for i in range(len(x)):
        z[i, y[i]] = margin(np.arccos(z[i, y[i]]), i)
    return cross_entropy(scale * z, y)


def angular(theta, m):
    """ArcFace's cos(θ + m), continued beyond π."""
    return np.cos(theta) + np.cos(m) - 1 if theta > np.pi - m else np.cos(theta + m)


def combined_margin(x, w, y, scale=64.0, m1=1.0, m2=0.3, m3=0.2):
    def margin(theta, i):
        last = (np.pi - m2) / m1
        if theta > last:
            return np.cos(theta) - np.cos(last) - 1 - m3
        return np.cos(m1 * theta + m2) - m3

    return softmax_with_margin(x, w, y, scale, margin)


def adaface(x, w, y, scale=64.0, margin=0.4, concentration=1 / 3, mean=20.0, deviation=100.0):
    """Kim et al. 2022, eqs. 13 to 15, clipped as in the authors' code."""
    lengths = np.clip(np.linalg.norm(x, axis=1), 0.001, 100)
    z = np.clip((lengths - mean) / (deviation + 0.001) * concentration, -1, 1)

    def logit(theta, i):
        return np.cos(np.clip(theta - margin * z[i], 0, np.pi)) - margin * (z[i] + 1)

    return softmax_with_margin(x, w, y, scale, logit)


def magface(
    x, w, y, scale=64.0, margin_min=0.45, margin_max=0.8, length_min=10.0, length_max=110.0,
    magnitude_weight=35.0,
):  # fmt: skip
    """Meng et al. 2021, eq. 3 and the functions of section 3.3."""
    a = np.clip(np.linalg.norm(x, axis=1), length_min, length_max)
    m = np.interp(a, [length_min, length_max], [margin_min, margin_max])
    loss = softmax_with_margin(x, w, y, scale, lambda theta, i: angular(theta, m[i]))
    return loss + magnitude_weight * np.mean(a / length_max**2 + 1 / a)


def elasticface(x, w, y, scale=64.0, margin=0.5):
    """Without random numbers."""
    return arcface(x, w, y, scale, margin)


def dynamic_margin(
    x, w, y, scale=64.0, margin_min=0.05, margin_max=0.5, exponent=0.25, counts=None
):
    """Ha et al. 2020, section 2.2, with the limits of the authors' code."""
    n = np.ones(len(w)) if counts is None else np.asarray(counts, float)
    m = np.full(len(w), margin_max)
    if n.min() < n.max():
        values = [float(n.max()) ** -exponent, float(n.min()) ** -exponent]
        m = np.interp(n**-exponent, values, [margin_min, margin_max])
    return softmax_with_margin(x, w, y, scale, lambda theta, i: angular(theta, m[y[i]]))


def by_entry(S, y, positive, negative):
    """Mean over the samples of log(1 + e^positive) + Σ log(1 + e^negative)."""
    total = 0.0
    for i, c in np.ndindex(S.shape):
        total += np.log1p(np.exp(positive(S[i, c]) if y[i] == c else negative(S[i, c])))
    return total / len(S)


def proxy_sigmoid(x, w, y, bias=-10.0):
    S, t = cosine(x, w).max(-1), np.exp(np.float64(np.float32(np.log(10))))  # a float32 parameter
    return by_entry(S, y, lambda s: -(t * s + bias), lambda s: t * s + bias)


def uniface(x, w, y, scale=64.0, margin=0.4, negative_share=1.0, bias=None):
    """Zhou et al. 2023, section 3.3, without the clipping of the authors' code."""
    S, b = cosine(x, w).max(-1), np.float64(np.float32(np.log(10 * len(w))))
    b = b if bias is None else bias
    own = np.arange(len(w)) == y[:, None]
    positives = np.logaddexp(0, b - scale * (S - margin))[own].sum()
    return (positives + negative_share * np.logaddexp(0, scale * S - b)[~own].sum()) / len(x)


def sphereface2(
    x, w, y, scale=40.0, margin=0.4, exponent=3.0, positive_share=0.7, bias=None
):  # fmt: skip
    """Wen et al. 2022, eq. 5 with the functions of section 3; b as in the authors' code."""
    if bias is None:
        z = 0.7 / (0.3 * max(len(w) - 1, 1))
        ay, ai = 40.0 * (2 * 0.5**3 - 1 - 0.4), 40.0 * (2 * 0.5**3 - 1 + 0.4)
        root = np.sqrt((1 - z) ** 2 + 4 * z * np.exp(ay - ai))
        bias = np.float64(np.float32(np.log(2 * z) - ai - np.log(1 - z + root)))
    g = 2 * ((cosine(x, w).max(-1) + 1) / 2) ** exponent - 1
    own = np.arange(len(w)) == y[:, None]
    positives = np.logaddexp(0, -scale * (g - margin) - bias)[own].sum()
    negatives = np.logaddexp(0, scale * (g + margin) + bias)[~own].sum()
    share = positive_share
    return (share * positives + (1 - share) * negatives) / scale / len(x)


def softmax_with_hard_negatives(x, w, y, scale, target, adjust):
    """Cross-entropy; negatives more similar than the target are adjusted."""
    S = cosine(x, w).max(-1)
    z = np.empty_like(S)
    for i, c in np.ndindex(S.shape):
        own = target(np.arccos(S[i, y[i]]))
        hard = S[i, c] > own
        z[i, c] = own if c == y[i] else adjust(S[i, c]) if hard else S[i, c]
    return cross_entropy(scale * z, y)


def curricularface(x, w, y, scale=64.0, margin=0.5, mean=0.0):
    """Huang et al. 2020, section 3.2."""
    return softmax_with_hard_negatives(
        x, w, y, scale, lambda theta: angular(theta, margin), lambda s: s * (mean + s)
    )


def mv_softmax(x, w, y, scale=32.0, margin=0.35, t=0.2):
    """Wang et al. 2020, with the margin of CosFace."""
    return softmax_with_hard_negatives(
        x, w, y, scale, lambda theta: np.cos(theta) - margin, lambda s: (t + 1) * s + t
    )


def proxy_circle(x, w, y, scale=256.0, margin=0.25):
    """Sun et al. 2020, section 3.1, with the margins of section 3.2."""
    S = cosine(x, w).max(-1)
    total = 0.0
    for i in range(len(x)):
        positive = max(1 + margin - S[i, y[i]], 0) * (S[i, y[i]] - 1 + margin)
        logits = [max(s + margin, 0) * (s - margin) for s in np.delete(S[i], y[i])]
        total += np.logaddexp(0, np.logaddexp.reduce(scale * np.array(logits)) - scale * positive)
    return total / len(x)
