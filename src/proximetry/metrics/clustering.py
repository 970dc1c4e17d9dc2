"""Clustering: k-means, and the agreement of its clusters with the classes.

Agreement is computed in float64 from the sparse table of (class, cluster) counts.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.labels import Labels, as_labels
from proximetry._util.tensors import chunks
from proximetry._util.types import FloatArray, IntArray
from proximetry.metrics._search.similarities import full_precision, sampled_median, tiles
from proximetry.metrics._search.validation import (
    Embeddings,
    as_count,
    as_embeddings,
    as_vectors,
    encode,
)
from proximetry.metrics.scores import CLUSTERING

Average = Literal["arithmetic", "geometric"]

# Entries of one tile of products.
_TILE = {"cpu": 2**22, "cuda": 2**27}
# Terms of the expected mutual information in memory.
_MAX_TERMS = 2**21


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
        """Whether both labelings are the same partition."""
        return len(self.cells) == len(self.row_sizes) == len(self.column_sizes)

    @property
    def entropies(self) -> list[float]:
        """The entropies of classes and clusters; 0 for a single group."""
        sizes = self.row_sizes, self.column_sizes
        return [float(np.sum(n / self.total * np.log(self.total / n))) for n in sizes]


def _table(labels_true: Labels, labels_pred: Labels) -> _Table:
    expected = as_labels(labels_true, len(labels_true), "labels_true")
    if not len(expected):
        raise ValueError("labels_true is empty")
    predicted = as_labels(labels_pred, len(expected), "labels_pred")
    # Encoded separately: classes may be strings and clusters integers.
    true, pred = encode(expected)[0][0], encode(predicted)[0][0]
    row_sizes, column_sizes = np.bincount(true), np.bincount(pred)
    keys, cells = np.unique(true * len(column_sizes) + pred, return_counts=True)
    rows, columns = np.divmod(keys, len(column_sizes))
    return _Table(cells, rows, columns, row_sizes, column_sizes, len(true))


def _mutual_information(table: _Table) -> float:
    outer = table.row_sizes[table.rows] * table.column_sizes[table.columns]
    ratio = table.cells * float(table.total) / outer
    return max(0.0, float(np.sum(table.cells / table.total * np.log(ratio))))


def _expected_mutual_information(table: _Table) -> float:
    """Return the exact mean mutual information of random labelings with the same sizes.

    Only distinct pairs of sizes (a, b) matter. The overlap n of a class of size a with a random
    cluster of size b is hypergeometric; its weights come from the ratio of successive terms and
    are normalized by their own sum, which is more accurate than differences of log-gammas.
    """
    small = np.unique(table.row_sizes, return_counts=True)
    large = np.unique(table.column_sizes, return_counts=True)
    if len(small[0]) > len(large[0]):
        small, large = large, small
    parts = []
    for a, times in zip(*small, strict=True):
        for part in chunks(len(large[0]), max(1, _MAX_TERMS // (int(a) + 1))):
            b, b_times = large[0][part], large[1][part]
            parts.append(float(times * np.sum(b_times * _overlap_terms(int(a), b, table.total))))
    return math.fsum(parts)


def _overlap_terms(a: int, b: IntArray, total: int) -> FloatArray:
    """Return E[n/N · log(N n / (a b))] for the overlap n of groups of a and b of N items."""
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
    return (weights * gains).sum(1) / weights.sum(1)  # type: ignore[no-any-return]


def nmi(labels_true: Labels, labels_pred: Labels, average: Average = "arithmetic") -> float:
    """Compute the normalized mutual information of two labelings, in [0, 1].

    Mutual information divided by the mean of the two entropies: ``"arithmetic"``
    (H₁ + H₂)/2, as in scikit-learn and SoftTriple's code, or ``"geometric"`` √(H₁ H₂), as in
    ProxyNCA++'s code. The same partition gives 1; if only one of the two is a single group, 0.
    """
    if average not in ("arithmetic", "geometric"):
        raise ValueError(f'average must be "arithmetic" or "geometric", got {average!r}')
    table = _table(labels_true, labels_pred)
    if table.identical:
        return 1.0
    entropies = table.entropies
    if min(entropies) <= 0:
        return 0.0
    mean = sum(entropies) / 2 if average == "arithmetic" else math.sqrt(math.prod(entropies))
    return min(1.0, _mutual_information(table) / mean)


def ami(labels_true: Labels, labels_pred: Labels) -> float:
    """Compute adjusted mutual information: 0 on average at random, 1 for the same partition.

    (MI − E[MI]) / ((H₁ + H₂)/2 − E[MI]) with the exact expectation over random labelings that
    have the same group sizes. Unlike ``nmi`` it does not grow with the number of groups.
    """
    table = _table(labels_true, labels_pred)
    if table.identical:
        return 1.0
    if min(table.entropies) <= 0:
        return 0.0
    expected = _expected_mutual_information(table)
    return (_mutual_information(table) - expected) / (sum(table.entropies) / 2 - expected)


class PairwiseF1(NamedTuple):
    """Precision, recall and F1 over all pairs of items."""

    precision: float
    recall: float
    f1: float


def pairwise_f1(labels_true: Labels, labels_pred: Labels) -> PairwiseF1:
    """Compute precision, recall and F1 over pairs of items in the same group.

    A labeling without pairs scores 0; two such labelings score 1.
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


@dataclass(frozen=True)
class KMeans:
    """The result of ``kmeans``.

    ``centers[j]`` is the mean of the rows assigned to ``j``; ``inertia`` is the sum of squared
    distances of all rows to their centers. ``converged`` is False if the iterations ran out.
    """

    assignments: IntArray
    centers: npt.NDArray[np.floating[Any]]
    inertia: float
    iterations: int
    converged: bool


def kmeans(
    embeddings: Embeddings, clusters: int, *, seed: int = 0, iterations: int = 100
) -> KMeans:
    """Partition rows into ``clusters`` groups by k-means.

    Lloyd's algorithm after greedy k-means++ initialization: each center is the best of 2 + ln k
    rows, drawn with probability proportional to the squared distance to the nearest center so far.
    It stops when the assignments stay the same or ``iterations`` is reached. An empty cluster gets
    the row farthest from its center; identical rows are never split, so clusters may be empty if
    there are fewer distinct rows than ``clusters``.

    Random numbers are drawn on the CPU, so results on other devices differ by rounding only.

    Examples:
        >>> import numpy as np
        >>> from proximetry.metrics import kmeans
        >>> result = kmeans(np.array([[0.0], [1.0], [8.0], [9.0]]), clusters=2)
        >>> sorted(result.centers[:, 0].tolist()), result.inertia
        ([0.5, 8.5], 1.0)
    """
    vectors = as_vectors(embeddings, "euclidean", "embeddings")
    clusters, iterations = as_count(clusters, "clusters"), as_count(iterations, "iterations")
    if clusters > len(vectors):
        raise ValueError(
            f"clusters must be at most the number of rows: {clusters} > {len(vectors)}"
        )
    origin = sampled_median(vectors)
    rows = vectors - origin  # a large offset would lose precision
    with full_precision(rows.device):
        centers = _initial_centers(rows, clusters, torch.Generator().manual_seed(seed))
        assigned, done, converged = rows.new_empty(0), 0, False
        while not converged and done < iterations:
            previous, assigned = assigned, _fill_empty(rows, centers, _nearest(rows, centers))
            converged = torch.equal(assigned, previous)
            centers, done = _means(rows, assigned, centers), done + 1
        inertia = float(_distances(rows, centers, assigned).sum())
    centers = (centers.double() + origin).to(vectors.dtype)
    return KMeans(assigned.cpu().numpy(), centers.cpu().numpy(), inertia, done, converged)


def _initial_centers(rows: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Choose k-means++ centers among the rows, each the best of several draws."""
    trials = 2 + int(math.log(clusters))  # as in scikit-learn
    squares = rows.square().sum(1)
    center_rows = torch.randint(len(rows), (1,), generator=generator, device="cpu").tolist()
    distances = _squared_distances(rows, squares, torch.tensor(center_rows, device=rows.device))[0]
    while len(center_rows) < clusters:
        cumulative = distances.double().cpu().cumsum(0)
        uniform = torch.rand(trials, dtype=torch.float64, generator=generator, device="cpu")
        candidates = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
        candidates = candidates.clamp_(max=len(rows) - 1).to(rows.device)
        # The squared distance of every row to its nearest center if a drawn row is added.
        remaining = torch.minimum(_squared_distances(rows, squares, candidates), distances)
        best = remaining.sum(1, dtype=torch.float64).argmin()
        center_rows.append(int(candidates[best]))
        distances = remaining[best]
    return rows[center_rows]


def _squared_distances(rows: Tensor, squares: Tensor, center_rows: Tensor) -> Tensor:
    """Return the squared distances of the rows `center_rows` to all rows."""
    products = torch.addmm(squares, rows[center_rows], rows.T, alpha=-2).add_(
        squares[center_rows, None]
    )
    return products.clamp_(min=0).scatter_(1, center_rows[:, None], 0)


def _distances(rows: Tensor, centers: Tensor, assigned: Tensor) -> Tensor:
    """Return the squared distance of every row to its center, float64."""
    parts = [
        (rows[tile] - centers[assigned[tile]]).double().square().sum(1)
        for tile in tiles(len(rows), rows.shape[1], rows.device, _TILE)
    ]
    return torch.cat(parts)


def _nearest(rows: Tensor, centers: Tensor) -> Tensor:
    """Return the nearest center of every row, which maximizes x·c − ‖c‖²/2."""
    offsets = 0.5 * centers.square().sum(1)
    parts = [
        torch.addmm(offsets, rows[tile], centers.T, beta=-1).argmax(1)
        for tile in tiles(len(rows), len(centers), rows.device, _TILE)
    ]
    return torch.cat(parts)


def _fill_empty(rows: Tensor, centers: Tensor, assigned: Tensor) -> Tensor:
    """Assign to every empty cluster the row farthest from its center."""
    sizes = torch.bincount(assigned, minlength=len(centers))
    empty = (sizes == 0).nonzero()[:, 0].tolist()
    if not empty:
        return assigned
    distances = _distances(rows, centers, assigned)
    # Rows that coincide with their center up to the rounding of a mean stay where they are.
    noise = (32 * torch.finfo(rows.dtype).eps) ** 2
    distances[distances <= noise * rows.square().sum(1)] = 0
    assigned = assigned.clone()
    for target in empty:
        free = torch.where(sizes[assigned] > 1, distances, 0)  # the last row of a cluster stays
        row = free.argmax()
        if float(free[row]) <= 0:
            break
        sizes[assigned[row]] -= 1
        sizes[target], assigned[row] = 1, target
    return assigned


def _means(rows: Tensor, assigned: Tensor, previous: Tensor) -> Tensor:
    """Return the mean of each cluster; an empty one keeps its previous center."""
    sums = torch.zeros(previous.shape, dtype=torch.float64, device=rows.device)
    for tile in tiles(len(rows), rows.shape[1], rows.device, _TILE):
        # On CUDA `index_add_` adds in no fixed order.
        sums.index_put_((assigned[tile],), rows[tile].double(), accumulate=True)
    sizes = torch.bincount(assigned, minlength=len(previous))[:, None]
    means = (sums / sizes.clamp(min=1)).to(rows.dtype)
    return torch.where(sizes > 0, means, previous)


def cluster(embeddings: Embeddings, labels: Labels, *, seed: int = 0) -> dict[str, float]:
    """Score k-means with as many clusters as classes: NMI (both averages), AMI, pairwise F1.

    k-means is Euclidean: normalize embeddings that are compared by cosine.
    """
    vectors = as_embeddings(embeddings)
    (codes,), classes = encode(as_labels(labels, len(vectors)))
    clusters = kmeans(vectors, len(classes), seed=seed).assignments
    scores = nmi(codes, clusters), nmi(codes, clusters, "geometric"), ami(codes, clusters)
    return dict(zip(CLUSTERING, (*scores, pairwise_f1(codes, clusters).f1), strict=True))
