"""Query expansion, k-reciprocal re-ranking, and binary codes whose candidates are re-scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.machine import by_device
from proximetry._util.tensors import binary_codes as pack_signs
from proximetry._util.tensors import chunks
from proximetry._util.types import FloatArray, Progress
from proximetry.metrics._search.neighbors import nearest, search, sort_by_value
from proximetry.metrics._search.problem import SearchProblem
from proximetry.metrics._search.similarities import full_precision, normalize
from proximetry.metrics._search.validation import Embeddings, as_count, as_embeddings

ALPHA = 3.0  # exponent of query expansion
K1, K2, WEIGHT = 20, 6, 0.3  # parameters of k-reciprocal re-ranking
RERANKED = 100  # items per query that `evaluate(rerank=True)` re-ranks
OVERSAMPLING = 20  # candidates by code per neighbor, re-scored with full vectors
MIN_K = 10  # smallest k used for the number of candidates
# Values of vectors gathered together: 32 MB of float64.
_GATHERED_VALUES = 1 << 22
# Distances between candidates that are re-ranked together.
_RERANKED_ENTRIES = {"cpu": 2**18, "cuda": 2**23}
# Compute distances from differences: the matrix-product formula loses half of the digits.
_BY_DIFFERENCES = "donot_use_mm_for_euclid_dist"

Reorder = Callable[[Tensor, Tensor], Tensor]
"""Reorders the candidates [rows, n] of the queries ``rows``; −1 marks missing candidates."""


def binary_codes(embeddings: Embeddings) -> npt.NDArray[np.uint8]:
    """Return the packed binary codes of embeddings: the signs of their dimensions.

    A bit is 1 where the entry is positive and 0 where it is negative or zero.

    Args:
        embeddings: [items, dimensions].

    Returns:
        uint8 [items, ⌈dimensions / 8⌉] as `numpy.packbits` packs them, for `similarity="hamming"`.
    """
    return pack_signs(as_embeddings(embeddings)).cpu().numpy()


def num_candidates(k: int) -> int:
    """Return the number of candidates by code for k neighbors."""
    return max(k, MIN_K) * OVERSAMPLING


def expand_queries(
    queries: Embeddings, neighbors: Embeddings, *, alpha: float = ALPHA
) -> FloatArray:
    """Return queries expanded by their nearest neighbors, for a second search.

    α-weighted query expansion (Radenović et al. 2019): q + Σ max(0, cos(q, g))^α g over the n
    neighbors, all of unit length; the sum is scaled to unit length. α = 0 gives every neighbor
    the weight 1: average query expansion (Chum et al. 2007).

    Args:
        queries: [queries, dimensions].
        neighbors: the nearest gallery items of each, [queries, n, dimensions].
        alpha: exponent of the weights; 0 weighs all neighbors equally.

    Returns:
        Unit vectors [queries, dimensions], float64.
    """
    if not alpha >= 0:
        raise ValueError(f"alpha must not be negative, got {alpha!r}")
    vectors = as_embeddings(queries, "queries")
    shape = tuple(getattr(neighbors, "shape", ()))
    if len(shape) != 3 or (shape[0], shape[2]) != tuple(vectors.shape):
        count, dim = vectors.shape
        raise ValueError(f"neighbors must be [{count}, n, {dim}], got {shape}")
    flat = neighbors.reshape(-1, shape[2])
    near = normalize(as_embeddings(flat, "neighbors").double()).reshape(shape)
    vectors = normalize(vectors.double())
    # 0 to the power of 0 is 1, so that alpha = 0 is the plain mean.
    weights = torch.einsum("qnd,qd->qn", near, vectors).clamp(0, 1) ** alpha
    return normalize(vectors + torch.einsum("qn,qnd->qd", weights, near)).cpu().numpy()


def k_reciprocal_distances(
    queries: Embeddings, gallery: Embeddings, *, k1: int = K1, k2: int = K2, weight: float = WEIGHT
) -> FloatArray:
    """Return distances after k-reciprocal re-ranking (Zhong et al. 2017), [queries, gallery items].

    Items are near if they have neighbors in common that are neighbors of each other. All
    queries and gallery items are ranked together by their squared Euclidean distance d, which for
    unit vectors orders them as the cosine does. R(i, k) are the items of which i is among the k + 1
    nearest and that are among those of i, i itself included; R* adds, for each j of R(i, k1), the
    set R(j, k1 / 2) if more than two thirds of it are in R(i, k1) already (as in the authors' code;
    the paper prints "at least"). V_i is exp(−d / largest d of i) at the items of R*, scaled to the
    sum 1, then the mean of this over the k2 nearest of i. The result is (1 − λ) · Jaccard distance
    of V_q and V_g + λ · d / largest d of q, with λ = ``weight``. Equal distances are ranked by
    index.

    It holds (queries + gallery items)² distances in memory: pass the candidates of a search.

    Examples:
        >>> import numpy as np
        >>> from proximetry.metrics import k_reciprocal_distances
        >>> vectors = np.random.default_rng(0).normal(size=(50, 8))
        >>> k_reciprocal_distances(vectors[:2], vectors).argmin(axis=1).tolist()
        [0, 1]
    """
    k1, k2 = as_count(k1, "k1"), as_count(k2, "k2")
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be between 0 and 1, got {weight!r}")
    first, second = as_embeddings(queries, "queries"), as_embeddings(gallery, "gallery")
    if first.shape[1] != second.shape[1]:
        raise ValueError(
            f"queries have {first.shape[1]} dimensions, but the gallery has {second.shape[1]}. "
            "Embed both with the same model."
        )
    with full_precision(second.device):
        items = torch.cat([first.double(), second.double()])
        return _k_reciprocal(items.unsqueeze(0), len(first), k1, k2, weight)[0].cpu().numpy()


def _k_reciprocal(items: Tensor, queries: int, k1: int, k2: int, weight: float) -> Tensor:
    """Return distances [B, queries, n − queries] of the first items of [B, n, D] to the others."""
    distances = _relative_distances(items)
    count = distances.shape[1]
    depth = min(count, max(k1 + 1, k2))
    ranks = nearest(-distances.flatten(0, 1), depth)[1].view(*distances.shape[:2], depth)
    wide, narrow = (_reciprocal(ranks, count, k).float() for k in (k1, round(k1 / 2)))
    # Number of items in the narrow set of j that are in the wide set of i: [B, i, j].
    shared = wide @ narrow.mT
    agree = wide * (3 * shared > 2 * narrow.sum(2).unsqueeze(1))
    expanded = wide + agree @ narrow > 0
    values = torch.where(expanded, torch.exp(-distances), 0)
    values = values / values.sum(2, keepdim=True)
    if k2 > 1:
        sets = torch.arange(len(ranks), device=ranks.device)[:, None, None]
        values = values[sets, ranks[..., :k2]].mean(2)
    rows = []
    for query in range(queries):
        common = torch.minimum(values[:, query, None], values[:, queries:]).sum(2)
        # Both sum to 1, so the sum of the maxima is 2 minus the sum of the minima.
        rows.append(1 - common / (2 - common))
    return (1 - weight) * torch.stack(rows, 1) + weight * distances[:, :queries, queries:]


def _relative_distances(items: Tensor) -> Tensor:
    """Return squared distances [B, n, n] of items [B, n, D], divided by the largest of each row."""
    items = items - items[:, :1]  # a large offset would lose precision
    squares = items.square().sum(2)
    distances = squares.unsqueeze(2) + squares.unsqueeze(1) - 2 * items @ items.mT
    distances = distances / distances.amax(2, keepdim=True).clamp_min(1e-300)
    # Products of equal vectors may differ in their last digits; rounded, they tie.
    return distances.clamp_min(0).round(decimals=11)


def _reciprocal(ranks: Tensor, count: int, k: int) -> Tensor:
    """Return which items are among the k + 1 nearest of each other, [B, items, items]."""
    near = torch.zeros((*ranks.shape[:2], count), dtype=torch.bool, device=ranks.device)
    near.scatter_(2, ranks[..., : k + 1], True)
    return near & near.mT


def expand_problem(problem: SearchProblem, count: int, progress: Progress | None) -> SearchProblem:
    """Return the problem with queries expanded by their nearest ``count`` items.

    Excluded items (the query itself, items of its group) do not take part.
    """
    result = torch.empty_like(problem.queries)
    depths = torch.full((len(result),), count, device=result.device)
    for block in (
        search(problem, depths, with_ranks=False, progress=progress) if len(result) else ()
    ):
        for part in chunks(len(block.rows), _rows(block.ids, result)):
            rows, ids = block.rows[part], block.ids[part]
            # A vector of zeros changes nothing.
            near = problem.gallery[ids.clamp_min(0)].masked_fill((ids < 0).unsqueeze(2), 0)
            result[rows] = torch.from_numpy(expand_queries(problem.queries[rows], near)).to(result)
    return replace(problem, queries=result)


def vector_reorder(queries: Tensor, gallery: Tensor, similarity: str) -> Reorder:
    """Return a function that reorders candidates by the similarity of their vectors."""
    if similarity == "cosine":
        queries, gallery = normalize(queries), normalize(gallery)

    def reorder(rows: Tensor, ids: Tensor) -> Tensor:
        scores = similarities_of(queries[rows], gallery, ids, similarity)
        return sort_by_value(scores.float(), ids)[1]

    return reorder


def similarities_of(queries: Tensor, gallery: Tensor, ids: Tensor, similarity: str) -> Tensor:
    """Return dot products or negative distances of queries and their candidates, in float64.

    Distances come from the differences. Missing candidates have −inf.
    """
    scores = torch.empty(ids.shape, dtype=torch.float64, device=ids.device)
    for part in chunks(len(ids), _rows(ids, gallery)):
        query = queries[part].double().unsqueeze(1)
        near = gallery[ids[part].clamp_min(0)].double()
        if similarity == "euclidean":
            scores[part] = -torch.cdist(query, near, compute_mode=_BY_DIFFERENCES)[:, 0]
        else:
            scores[part] = (near * query).sum(2)
    return scores.masked_fill_(ids < 0, -torch.inf)


def k_reciprocal_reorder(problem: SearchProblem, progress: Progress | None) -> Reorder:
    """Return a function that reorders candidates by `k_reciprocal_distances` within the list."""
    queries, gallery = problem.queries, problem.gallery
    if problem.similarity == "cosine":
        queries, gallery = normalize(queries), normalize(gallery)
    done = 0

    def reorder(rows: Tensor, ids: Tensor) -> Tensor:
        nonlocal done
        scores = torch.full(ids.shape, -torch.inf, dtype=torch.float32, device=ids.device)
        counts = (ids >= 0).sum(1)
        for count in set(counts.tolist()):  # a list may end early
            matching_rows = (counts == count).nonzero()[:, 0]
            size = by_device(ids.device, **_RERANKED_ENTRIES) // (count + 1) ** 2
            for part in matching_rows.split(max(1, size)):
                near = gallery[ids[part, :count]]
                items = torch.cat([queries[rows[part], None], near], dim=1).double()
                distances = _k_reciprocal(items, 1, K1, K2, WEIGHT)
                scores[part, :count] = -distances[:, 0].float()
                done += len(part)
                if progress is not None:
                    progress(done, len(queries))
        return sort_by_value(scores, ids)[1]

    return reorder


def _rows(ids: Tensor, vectors: Tensor) -> int:
    """Return the number of lists whose vectors are gathered together."""
    return max(1, _GATHERED_VALUES // (ids.shape[1] * vectors.shape[1]))
