"""How well two labellings agree: mutual information and counted pairs.

Everything comes in float64 from the sparse table of (class, cluster) counts, so the cost grows
with the number of items and not with classes × clusters.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from proximetry.metrics.arrays import IntArray, Labels, as_labels, encode

Average = Literal["arithmetic", "geometric"]

# Most terms of the expected mutual information held at once.
_TERMS = 2**21


class _Table(NamedTuple):
    """The sparse contingency table: filled cells, and the sizes of classes and clusters."""

    cells: IntArray
    rows: IntArray
    columns: IntArray
    row_sizes: IntArray
    column_sizes: IntArray
    total: int

    @property
    def identical(self) -> bool:
        """Whether the two labellings are the same partition."""
        return len(self.cells) == len(self.row_sizes) == len(self.column_sizes)


def _table(labels_true: Labels, labels_pred: Labels) -> _Table:
    expected = as_labels(labels_true, len(labels_true), "labels_true")
    if not len(expected):
        raise ValueError("labels_true is empty; there is nothing to compare")
    found = as_labels(labels_pred, len(expected), "labels_pred")
    # Each side is numbered by itself: classes may be names and clusters numbers.
    true, pred = encode(expected)[0][0], encode(found)[0][0]
    row_sizes, column_sizes = np.bincount(true), np.bincount(pred)
    keys, cells = np.unique(true * len(column_sizes) + pred, return_counts=True)
    rows, columns = np.divmod(keys, len(column_sizes))
    return _Table(cells, rows, columns, row_sizes, column_sizes, len(true))


def _entropy(sizes: IntArray, total: int) -> float:
    return float(np.sum(sizes / total * np.log(total / sizes)))


def _mutual_information(table: _Table) -> float:
    outer = table.row_sizes[table.rows] * table.column_sizes[table.columns]
    ratio = table.cells * float(table.total) / outer
    return max(0.0, float(np.sum(table.cells / table.total * np.log(ratio))))


def _expected_mutual_information(table: _Table) -> float:
    """Mean mutual information of random labellings with the same sizes, exactly.

    Only distinct pairs of sizes (a, b) matter. The overlap n of a class of size a with a random
    cluster of size b is hypergeometric; its weights come from the ratio of successive terms and
    are normalised by their own sum, which is more accurate than differences of log-gammas.
    """
    small = np.unique(table.row_sizes, return_counts=True)
    large = np.unique(table.column_sizes, return_counts=True)
    if len(small[0]) > len(large[0]):
        small, large = large, small
    parts = []
    for a, times in zip(*small, strict=True):
        step = max(1, _TERMS // (int(a) + 1))
        for at in range(0, len(large[0]), step):
            b, b_times = large[0][at : at + step], large[1][at : at + step]
            parts.append(float(times * np.sum(b_times * _overlap_terms(int(a), b, table.total))))
    return math.fsum(parts)


def _overlap_terms(a: int, b: IntArray, total: int) -> npt.NDArray[np.float64]:
    """E[n/N · log(N n / (a b))] for the overlap n of groups of size a and b among N items."""
    low = np.maximum(0, a + b - total)[:, None]
    high = np.minimum(a, b)[:, None]
    n = low + np.arange(int((high - low).max()) + 1)
    inside = n <= high
    b = b[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (a - n + 1.0) * (b - n + 1.0) / (n * (total - a - b + n * 1.0))
        logs = np.where(inside & (n > low), np.log(ratios), 0.0).cumsum(1)
        gains = np.where(n > 0, n / total * np.log(float(total) * n / (a * b)), 0.0)
    logs = np.where(inside, logs, -np.inf)
    weights = np.exp(logs - logs.max(1, keepdims=True))
    mean: npt.NDArray[np.float64] = (weights * gains).sum(1) / weights.sum(1)
    return mean


def nmi(
    labels_true: Labels,
    labels_pred: Labels,
    average: Average = "arithmetic",
) -> float:
    """Normalised mutual information of two labellings, in [0, 1].

    Mutual information divided by the mean of the two entropies: ``"arithmetic"``
    (H₁ + H₂)/2, scikit-learn's default and SoftTriple's choice, or ``"geometric"`` √(H₁ H₂),
    ProxyNCA++'s. The same partition gives 1; if only one of the two is a single group, 0.
    """
    if average not in ("arithmetic", "geometric"):
        raise ValueError(f'average must be "arithmetic" or "geometric", got {average!r}')
    table = _table(labels_true, labels_pred)
    if table.identical:
        return 1.0
    entropies = (
        _entropy(table.row_sizes, table.total),
        _entropy(table.column_sizes, table.total),
    )
    if min(entropies) <= 0:
        return 0.0
    mean = sum(entropies) / 2 if average == "arithmetic" else math.sqrt(math.prod(entropies))
    return min(1.0, _mutual_information(table) / mean)


def ami(labels_true: Labels, labels_pred: Labels) -> float:
    """Adjusted mutual information: 0 on average for random labellings, 1 for the same partition.

    (MI − E[MI]) / ((H₁ + H₂)/2 − E[MI]) with the exact expectation over random labellings that
    have the same group sizes. Unlike ``nmi`` it does not grow with the number of groups.
    """
    table = _table(labels_true, labels_pred)
    if table.identical:
        return 1.0
    if len(table.row_sizes) == 1 or len(table.column_sizes) == 1:
        return 0.0
    mean = 0.5 * (
        _entropy(table.row_sizes, table.total) + _entropy(table.column_sizes, table.total)
    )
    expected = _expected_mutual_information(table)
    return (_mutual_information(table) - expected) / (mean - expected)


class PairwiseF1(NamedTuple):
    """Precision, recall and F1 over all pairs of items."""

    precision: float
    recall: float
    f1: float


def pairwise_f1(labels_true: Labels, labels_pred: Labels) -> PairwiseF1:
    """Count pairs: of those put together, how many belong together (precision), and vice versa.

    F1 is the harmonic mean of the two. A side without any pair (all groups of one item) scores
    0, unless both partitions are that one, which is a perfect match.
    """
    table = _table(labels_true, labels_pred)
    both, true, pred = (
        int(np.sum(sizes * (sizes - 1) // 2))
        for sizes in (table.cells, table.row_sizes, table.column_sizes)
    )
    if true == pred == 0:
        return PairwiseF1(1.0, 1.0, 1.0)
    return PairwiseF1(
        both / pred if pred else 0.0, both / true if true else 0.0, 2 * both / (true + pred)
    )
