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
