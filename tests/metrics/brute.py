"""Reference computations in plain NumPy, one query at a time, straight from the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def similarity_matrix(queries, gallery, similarity):
    if similarity == "hamming":
        bits = np.unpackbits(queries, axis=1)[:, None] != np.unpackbits(gallery, axis=1)[None]
        return -bits.sum(2).astype(np.float64)
    queries, gallery = queries.astype(np.float64), gallery.astype(np.float64)
    if similarity == "euclidean":
        return -np.sqrt(((queries[:, None] - gallery[None]) ** 2).sum(2))
    if similarity == "cosine":
        queries, gallery = _unit(queries), _unit(gallery)
    return queries @ gallery.T


def _unit(rows):
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(length == 0, 1, length)


def ranking(similarities, allowed):
    """Return the allowed indices, most similar first, ties by index."""
    return sorted(np.flatnonzero(allowed).tolist(), key=lambda j: (-similarities[j], j))


def rankings(queries, gallery, similarity, *, same_set, query_groups=None, groups=None):
    matrix = similarity_matrix(queries, gallery, similarity)
    lists = []
    for i, row in enumerate(matrix):
        allowed = np.ones(len(row), dtype=bool)
        if same_set:
            allowed[i] = False
        if query_groups is not None and groups is not None:
            allowed &= groups != query_groups[i]
        lists.append(ranking(row, allowed))
    return lists


def scores(relevant, cutoffs):
    """All scores of one full ranking that has at least one relevant item."""
    R = sum(relevant)
    precision = [sum(relevant[: i + 1]) / (i + 1) for i in range(len(relevant))]
    actual = {
        "r_precision": sum(relevant[:R]) / R,
        "map@r": sum(p for p, hit in zip(precision[:R], relevant, strict=False) if hit) / R,
        "mrr": 1 / (relevant.index(True) + 1),
    }
    for k in cutoffs:
        actual[f"recall@{k}"] = float(any(relevant[:k]))
        actual[f"precision@{k}"] = sum(relevant[:k]) / k
        actual[f"map@{k}"] = sum(p for p, h in zip(precision[:k], relevant, strict=False) if h) / k
        gain = sum((2**r - 1) / math.log2(i + 2) for i, r in enumerate(map(int, relevant[:k])))
        best = sum(1 / math.log2(i + 2) for i in range(min(k, R)))
        actual[f"ndcg@{k}"] = gain / best
    return actual


def evaluate(lists, query_labels, labels, cutoffs):
    """Means over the queries with a positive, and the number of those without."""
    rows = []
    without = 0
    for label, order in zip(query_labels, lists, strict=True):
        relevant = [bool(labels[j] == label) for j in order]
        if any(relevant):
            rows.append(scores(relevant, cutoffs))
        else:
            without += 1
    names = rows[0] if rows else {}
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in names}, without
