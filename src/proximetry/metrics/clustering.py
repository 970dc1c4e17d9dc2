"""Clustering: Lloyd's k-means on the device with a k-means++ start, compared with the classes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from proximetry.metrics.agreement import PairwiseF1, ami, nmi, pairwise_f1
from proximetry.metrics.arrays import (
    Embeddings,
    Labels,
    as_embeddings,
    as_labels,
    encode,
    full_precision,
)

__all__ = ["KMeans", "PairwiseF1", "ami", "cluster", "kmeans", "nmi", "pairwise_f1"]

# Elements of one tile of scores: large enough to keep the processor busy, small enough to be
# negligible beside the embeddings.
_TILE = {"cpu": 2**22, "cuda": 2**27}
# A round of the k-means++ start adds one centre, and one more for each _SHARE it has already, but
# never above _BLOCK: small enough that the centres of a round hardly compete with each other.
_SHARE = 32
_BLOCK = 128


@dataclass(frozen=True)
class KMeans:
    """What ``kmeans`` found.

    ``centres[j]`` is the mean of the rows assigned to ``j``; ``inertia`` is the sum of squared
    distances of all rows to their centres. ``converged`` says that another step would change
    nothing; otherwise ``iterations`` ran out first.
    """

    assignments: Tensor
    centres: Tensor
    inertia: float
    iterations: int
    converged: bool


def kmeans(
    embeddings: Embeddings,
    clusters: int,
    *,
    seed: int = 0,
    iterations: int = 100,
    restarts: int = 1,
) -> KMeans:
    """Partition the rows into ``clusters`` groups of small squared distance to their mean.

    The start is greedy k-means++: draws have probability proportional to the squared distance to
    the centres before, and each centre is the best of 2 + ln k draws. Centres are added in small
    blocks (at most a 32nd of those there already, or one) with a rejection step that gives the
    draws the law they have one by one; so the work is matrix products. Then
    Lloyd steps until nothing changes or ``iterations`` is reached. A cluster that loses all its
    rows is given the row farthest from its own centre; rows that are identical are never split,
    so data with fewer distinct rows than ``clusters`` leave some clusters empty. With
    ``restarts`` > 1 the run of smallest inertia is returned.

    The same seed gives the same result on the same device; random numbers are drawn on the CPU,
    so other devices differ by rounding alone.
    """
    vectors = as_embeddings(embeddings)
    if not 1 <= clusters <= len(vectors):
        raise ValueError(
            f"clusters must be between 1 and the number of rows ({len(vectors)}), got {clusters}"
        )
    if iterations < 1 or restarts < 1:
        raise ValueError(
            f"iterations and restarts must be at least 1, got {iterations} and {restarts}"
        )
    shift = vectors.mean(0)
    rows = vectors - shift
    # A power of two scales without rounding; it keeps squares clear of under- and overflow.
    largest = float(rows.abs().max())
    scale = 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0
    rows /= scale
    generator = torch.Generator().manual_seed(seed)
    with full_precision(rows.device):
        best = min(
            (_lloyd(rows, _start(rows, clusters, generator), iterations) for _ in range(restarts)),
            key=lambda run: run.inertia,
        )
    return replace(best, centres=best.centres * scale + shift, inertia=best.inertia * scale * scale)


def _tiles(total: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of 0..total such that a tile of the given width stays within the budget."""
    step = max(1, _TILE.get(device.type, _TILE["cpu"]) // max(1, width))
    return (slice(at, min(at + step, total)) for at in range(0, total, step))


def _start(rows: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Indices of the k-means++ centres, each the best of several draws."""
    squares = rows.square().sum(1)
    chosen = [int(torch.randint(len(rows), (), generator=generator))]
    distances = _reach(rows, squares, chosen, torch.full_like(squares, torch.inf))
    trials = _trials(clusters)
    while len(chosen) < clusters:
        weights = distances.double().cpu()
        total = weights.cumsum(0)
        if float(total[-1]) <= 0:  # only copies of the centres are left
            taken = set(chosen)
            chosen += [i for i in range(len(rows)) if i not in taken][: clusters - len(chosen)]
            break
        size = min(_BLOCK, 1 + len(chosen) // _SHARE, clusters - len(chosen))
        draws = torch.rand(2, size, trials, dtype=torch.float64, generator=generator)
        candidates = torch.searchsorted(total, draws[0] * total[-1], right=True)
        candidates.clamp_(max=len(rows) - 1)
        left = _left(rows, squares, candidates.flatten(), distances)
        fresh = _choose(rows, weights, candidates, left, draws[1])
        if fresh:
            distances = _reach(rows, squares, fresh, distances)
            chosen += fresh
    return torch.tensor(chosen, device=rows.device)


def _trials(clusters: int) -> int:
    """Draws from which each centre is chosen, as many as scikit-learn takes."""
    return 2 + int(math.log(clusters))


def _left(rows: Tensor, squares: Tensor, candidates: Tensor, distances: Tensor) -> Tensor:
    """The sum of squared distances left with each candidate as a centre, up to a constant.

    The constant is Σ|x|²: leaving |x|² out of both sides of the minimum saves a pass.
    """
    index = candidates.to(rows.device)
    points, offsets, known = rows[index].T, squares[index], (distances - squares)[:, None]
    left = torch.zeros(len(index), dtype=torch.float64, device=rows.device)
    for tile in _tiles(len(rows), len(index), rows.device):
        apart = torch.addmm(offsets, rows[tile], points, alpha=-2)
        left += torch.minimum(apart, known[tile], out=apart).sum(0)
    return left.cpu()


def _choose(
    rows: Tensor, weights: Tensor, candidates: Tensor, left: Tensor, draws: Tensor
) -> list[int]:
    """From each group of candidates the one that leaves least, if any may be taken.

    All were drawn from the distances known at the start of the round, which can only overstate
    the distances once further centres are in. Taking a candidate with probability (distance now)
    / (distance at the start) gives draws the law they would have one after another.
    """
    points = rows[candidates.flatten().to(rows.device)].cpu().double()
    squares = points.square().sum(1)
    apart = (squares[:, None] + squares - 2 * points @ points.T).numpy()
    stale, left_over = weights[candidates.flatten()].numpy(), left.numpy()
    bar = draws.flatten().numpy() * stale
    now, kept = stale.copy(), []
    groups, trials = candidates.shape
    for first in range(0, groups * trials, trials):
        group = slice(first, first + trials)
        score = np.where(bar[group] < now[group], left_over[group], np.inf)
        best = first + int(score.argmin())
        if bar[best] < now[best]:
            kept.append(int(candidates.flatten()[best]))
            np.minimum(now, apart[best], out=now)
    return kept


def _reach(rows: Tensor, squares: Tensor, fresh: list[int], distances: Tensor) -> Tensor:
    """Squared distance of every row to its nearest centre after adding the fresh ones."""
    index = torch.tensor(fresh, device=rows.device)
    nearest = torch.empty_like(distances)
    for tile in _tiles(len(rows), len(fresh), rows.device):
        best = torch.addmm(0.5 * squares[index], rows[tile], rows[index].T, beta=-1).amax(1)
        nearest[tile] = squares[tile] - 2 * best
    distances = torch.minimum(distances, nearest.clamp_(min=0))
    distances[index] = 0
    return distances


def _lloyd(rows: Tensor, start: Tensor, iterations: int) -> KMeans:
    centres = rows[start]
    assigned, scores = _nearest(rows, centres)
    converged = False
    for iteration in range(1, iterations + 1):
        assigned = _fill_empty(rows, centres, assigned)
        means = _means(rows, assigned, centres)
        moved = (means != centres).any(1)
        centres = means
        if not bool(moved.any()):
            converged = True
            break
        if iteration < iterations:
            _reassign(rows, centres, moved, assigned, scores)
    inertia = math.fsum(
        float((rows[tile] - centres[assigned[tile]]).double().square().sum())
        for tile in _tiles(len(rows), rows.shape[1], rows.device)
    )
    return KMeans(assigned, centres, inertia, iteration, converged)


def _nearest(rows: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """For every row the nearest centre and the score x·c − ‖c‖²/2, which is largest there."""
    offsets = 0.5 * centres.square().sum(1)
    assigned = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    scores = torch.empty(len(rows), dtype=rows.dtype, device=rows.device)
    # Against very many centres a tile of rows alone would be thin: cut both ways.
    for group in _tiles(len(centres), 1024, rows.device):
        for tile in _tiles(len(rows), group.stop - group.start, rows.device):
            products = torch.addmm(offsets[group], rows[tile], centres[group].T, beta=-1)
            best, place = products.max(1)
            if group.start == 0:
                scores[tile], assigned[tile] = best, place
            else:
                better = best > scores[tile]
                scores[tile] = torch.where(better, best, scores[tile])
                assigned[tile] = torch.where(better, place + group.start, assigned[tile])
    return assigned, scores


def _reassign(
    rows: Tensor, centres: Tensor, moved: Tensor, assigned: Tensor, scores: Tensor
) -> None:
    """Assign again, in place, looking only where something can have changed.

    A row whose own centre stayed needs comparing with the moved centres alone; as Lloyd settles
    those are few, and the product shrinks from all rows × all centres to almost nothing.
    """
    own_moved = moved[assigned]
    loose = own_moved.nonzero().flatten()
    assigned[loose], scores[loose] = _nearest(rows[loose], centres)
    settled = (~own_moved).nonzero().flatten()
    if len(settled):
        active = moved.nonzero().flatten()
        place, best = _nearest(rows[settled], centres[active])
        place = active[place]
        old = assigned[settled]
        better = (best > scores[settled]) | ((best == scores[settled]) & (place < old))
        assigned[settled] = torch.where(better, place, old)
        scores[settled] = torch.maximum(best, scores[settled])


def _fill_empty(rows: Tensor, centres: Tensor, assigned: Tensor) -> Tensor:
    """Give every empty cluster one row: the farthest from their centres, first come first."""
    sizes = torch.bincount(assigned, minlength=len(centres))
    empty = (sizes == 0).nonzero().flatten()
    if not len(empty):
        return assigned
    distances = torch.cat(
        [
            (rows[tile] - centres[assigned[tile]]).square().sum(1)
            for tile in _tiles(len(rows), rows.shape[1], rows.device)
        ]
    )
    # Rows that coincide with their centre up to the rounding of a mean stay where they are, and
    # so does the nearest row of each cluster, lest a donor become empty itself.
    noise = (32 * torch.finfo(rows.dtype).eps) ** 2
    free = distances > noise * rows.square().sum(1)
    order = distances.argsort(stable=True)
    order = order[assigned[order].argsort(stable=True)]
    firsts = sizes.cumsum(0)[sizes > 0] - sizes[sizes > 0]
    free[order[firsts]] = False
    farthest = torch.where(free, distances, -1.0).argsort(descending=True, stable=True)
    donors = farthest[: min(len(empty), int(free.sum()))]
    assigned = assigned.clone()
    assigned[donors] = empty[: len(donors)]
    return assigned


def _means(rows: Tensor, assigned: Tensor, previous: Tensor) -> Tensor:
    """Mean of each cluster; an empty one keeps its previous centre.

    Sums are taken in 64-bit fixed point: integer addition does not depend on the order, so
    parallel hardware gives the same bits every time and the same members the same mean.
    """
    bits = 61 - math.ceil(math.log2(len(rows) + 1))
    sums = torch.zeros(previous.shape, dtype=torch.int64, device=rows.device)
    for tile in _tiles(len(rows), rows.shape[1], rows.device):
        fixed = (rows[tile].double() * 2.0**bits).round_().to(torch.int64)
        sums.index_add_(0, assigned[tile], fixed)
    sizes = torch.bincount(assigned, minlength=len(previous)).unsqueeze(1)
    means = torch.empty_like(previous)
    for tile in _tiles(len(means), rows.shape[1], rows.device):
        means[tile] = (sums[tile].double() / (sizes[tile].clamp(min=1) * 2.0**bits)).to(rows.dtype)
    return torch.where(sizes > 0, means, previous)


def cluster(embeddings: Embeddings, labels: Labels, *, seed: int = 0) -> dict[str, float]:
    """Cluster with as many clusters as classes and compare: ``nmi``, ``nmi_geometric``, ``ami``,
    ``f1``.

    k-means is Euclidean: normalise the embeddings first where the cosine is what counts.
    """
    vectors = as_embeddings(embeddings)
    (codes,), classes = encode(as_labels(labels, len(vectors)))
    found = kmeans(vectors, len(classes), seed=seed).assignments.cpu().numpy()
    return {
        "nmi": nmi(codes, found),
        "nmi_geometric": nmi(codes, found, "geometric"),
        "ami": ami(codes, found),
        "f1": pairwise_f1(codes, found).f1,
    }
