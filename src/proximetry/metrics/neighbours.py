"""Exact nearest neighbours, one block of queries at a time.

Every metric is one matrix product: Euclidean and Hamming distances become dot products of
slightly longer vectors. Similarities are always "larger is nearer"; neighbours are in the total
order (similarity falling, index rising), so equal similarities never depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from proximetry.metrics.arrays import as_codes, as_embeddings, normalise

Metric = Literal["cosine", "euclidean", "dot", "hamming"]
METRICS: tuple[str, ...] = get_args(Metric)
Progress = Callable[[int, int], None]

# Bytes of similarities held at once. A processor works best from its caches; a GPU wants large
# products and few launches.
BLOCK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
MOST_ROWS = 8192


def check_metric(metric: str) -> None:
    """Refuse a metric nobody knows."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; choose one of {', '.join(METRICS)}")


def as_vectors(values: object, metric: Metric, name: str, *, allow_empty: bool = False) -> Tensor:
    """Embeddings, or packed codes for the Hamming distance, checked."""
    check_metric(metric)
    if metric == "hamming":
        return as_codes(values, name, allow_empty=allow_empty)  # type: ignore[arg-type]
    vectors = as_embeddings(values, name, allow_empty=allow_empty)  # type: ignore[arg-type]
    if metric != "cosine" and len(vectors):
        largest = float(torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64).max())
        if 4 * largest * largest > torch.finfo(vectors.dtype).max:
            raise ValueError(
                f"{name} has vectors of length {largest:.3g}: their products overflow "
                f"{vectors.dtype}; rescale them or use float64"
            )
    return vectors


@dataclass(frozen=True)
class Task:
    """Who is asked about whom. All tensors live on one device.

    ``own`` holds each query's own place in the gallery, which is left out by index; queries and
    gallery items with equal group are left out too. Codes number the labels.
    """

    queries: Tensor
    gallery: Tensor
    query_codes: Tensor
    gallery_codes: Tensor
    metric: Metric
    own: Tensor | None = None
    query_groups: Tensor | None = None
    gallery_groups: Tensor | None = None

    @property
    def is_self_search(self) -> bool:
        """Whether every item is asked against all others, in order."""
        return self.own is not None and self.queries is self.gallery

    def positives(self) -> Tensor:
        """How many gallery items of its class each query may find."""
        classes = 1 + int(torch.maximum(self.query_codes.amax(), self.gallery_codes.amax()))
        found = torch.bincount(self.gallery_codes, minlength=classes)[self.query_codes]
        if self.query_groups is not None and self.gallery_groups is not None:
            groups = 1 + int(torch.maximum(self.query_groups.amax(), self.gallery_groups.amax()))
            found = found - _occurrences(
                self.query_codes * groups + self.query_groups,
                self.gallery_codes * groups + self.gallery_groups,
            )
            # A query's own entry shares its group, so it is gone already.
            return found
        return found if self.own is None else found - 1


def _occurrences(wanted: Tensor, values: Tensor) -> Tensor:
    """How often each wanted number occurs among the values."""
    ordered = values.sort().values
    high = torch.searchsorted(ordered, wanted, right=True)
    return high - torch.searchsorted(ordered, wanted)


@dataclass(frozen=True)
class Block:
    """Answers for some queries: neighbours in order, and where the best positive stands.

    ``ids`` is −1 and ``similarities`` −inf where fewer items than asked for may be returned.
    ``ranks`` counts from 1, and is 0 for queries that have no positive.
    """

    rows: Tensor
    ids: Tensor
    similarities: Tensor
    ranks: Tensor | None


def project(vectors: Tensor, metric: Metric, side: Literal["query", "gallery"]) -> Tensor:
    """Vectors whose dot products are similarities: of a query with a gallery item."""
    if metric == "dot":
        return vectors
    if metric == "cosine":
        return normalise(vectors)
    if metric == "euclidean":
        # −|q − g|² = 2 q·g − |q|² − |g|²
        squares = vectors.square().sum(1, keepdim=True)
        ones = torch.ones_like(squares)
        if side == "query":
            return torch.cat([2 * vectors, squares, ones], dim=1)
        return torch.cat([vectors, -ones, -squares], dim=1)
    # Signs s of b bits: −(number of different bits) = (s·s′ − b) / 2, exact in float32.
    bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=vectors.device)
    signs = (vectors[:, :, None] >> bits & 1).flatten(1).to(torch.float32).mul_(2).sub_(1)
    ones = torch.ones_like(signs[:, :1])
    if side == "query":
        return torch.cat([signs, ones], dim=1)
    return torch.cat([signs.mul_(0.5), ones * (-signs.shape[1] / 2)], dim=1)


def reported(similarities: Tensor, metric: Metric) -> Tensor:
    """What people see: the negative distance instead of its negative square."""
    if metric != "euclidean":
        return similarities
    return -(-similarities).clamp_min(0).sqrt()


def search(
    task: Task, depths: Tensor, *, with_ranks: bool, progress: Progress | None = None
) -> Iterator[Block]:
    """Answer every query, ``depths[i]`` neighbours deep, in blocks that fit in cache or memory.

    Queries of like depth share a block: one large class does not make every list long.
    """
    gallery = project(task.gallery, task.metric, "gallery")
    shared = task.metric in ("cosine", "dot") and task.queries is task.gallery
    queries = gallery if shared else project(task.queries, task.metric, "query")
    members = _Members.of(task.gallery_codes) if with_ranks else None
    order = torch.argsort(depths, stable=True)
    done = 0
    for rows, depth in _blocks(order, depths, len(gallery), gallery.element_size()):
        similarities = queries[rows] @ gallery.T
        _leave_out(similarities, task, rows)
        values, ids = nearest(similarities, depth)
        ids = ids.masked_fill(values == -torch.inf, -1)
        ranks = None
        if members is not None:
            ranks = _best_ranks(
                similarities, ids, task.query_codes[rows], task.gallery_codes, members
            )
        yield Block(rows, ids, reported(values, task.metric), ranks)
        done += len(rows)
        if progress is not None:
            progress(done, len(order))


def _blocks(
    order: Tensor, depths: Tensor, width: int, itemsize: int
) -> Iterator[tuple[Tensor, int]]:
    budget = BLOCK_BYTES.get(order.device.type, BLOCK_BYTES["cpu"])
    sorted_depths = depths[order].clamp(max=width).tolist()
    start = 0
    while start < len(order):
        # A guess from the shallowest row, corrected by the deepest row it leads to.
        rows = _rows_within(budget, width, itemsize, sorted_depths[start])
        deepest = sorted_depths[min(start + rows, len(order)) - 1]
        rows = _rows_within(budget, width, itemsize, deepest)
        stop = min(start + rows, len(order))
        yield order[start:stop], sorted_depths[stop - 1]
        start = stop


def _rows_within(budget: int, width: int, itemsize: int, depth: int) -> int:
    # Each neighbour costs a value, an index and their copies while they are put in order.
    return max(1, min(MOST_ROWS, budget // (width * itemsize + depth * 32)))


def _leave_out(similarities: Tensor, task: Task, rows: Tensor) -> None:
    if task.own is not None:
        similarities.scatter_(1, task.own[rows, None], -torch.inf)
    if task.query_groups is not None and task.gallery_groups is not None:
        same = task.query_groups[rows, None] == task.gallery_groups
        similarities.masked_fill_(same, -torch.inf)


def nearest(similarities: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The largest entries of each row, ties by smaller index."""
    width = similarities.shape[1]
    # One more than asked shows whether a tie straddles the end of the list.
    values, ids = similarities.topk(min(depth + 1, width), dim=1)
    if values.shape[1] > depth:
        split = (values[:, depth - 1] == values[:, depth]) & (values[:, depth] > -torch.inf)
        values, ids = values[:, :depth], ids[:, :depth]
        if bool(split.any()):
            rows = split.nonzero()[:, 0]
            values, ids = values.clone(), ids.clone()
            # A row that ties over its end is chosen again in the full order, a few rows at a time.
            for part in _quarters(rows, len(similarities)):
                values[part], ids[part] = _nearest_in_total_order(similarities[part], depth)
    return _order_ties(values, ids)


def _quarters(rows: Tensor, block: int) -> Iterator[Tensor]:
    """Rows in parts no larger than a quarter of the block, whose copies then stay small."""
    size = max(1, block // 4)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _nearest_in_total_order(similarities: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    if similarities.dtype != torch.float32:
        values, ids = similarities.sort(dim=1, descending=True, stable=True)
        return values[:, :depth], ids[:, :depth]
    ids = torch.arange(similarities.shape[1], device=similarities.device)
    return from_keys(to_keys(similarities, ids).topk(depth, dim=1).values)


def _order_ties(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    if not bool((values[:, 1:] == values[:, :-1]).any()):
        return values, ids
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def to_keys(similarities: Tensor, ids: Tensor) -> Tensor:
    """Whole numbers in the order of float32 similarities, equal ones by smaller index first."""
    bits = (similarities + 0.0).view(torch.int32)  # adding 0 makes −0 equal to 0
    # The bits of a negative float count backwards.
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(torch.int64) << 32) + (0x7FFFFFFF - ids)


def from_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The similarities and indices that :func:`to_keys` was given."""
    bits = (keys >> 32).to(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0x7FFFFFFF - (keys & 0xFFFFFFFF)


@dataclass(frozen=True)
class _Members:
    """Gallery items by class: those of class c are ``order[starts[c] : starts[c] + counts[c]]``."""

    order: Tensor
    starts: Tensor
    counts: Tensor

    @classmethod
    def of(cls, codes: Tensor) -> _Members:
        counts = torch.bincount(codes)
        return cls(torch.argsort(codes, stable=True), counts.cumsum(0) - counts, counts)

    def table(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """One row of members per code, and which entries of the row are real."""
        known = codes < len(self.counts)
        safe = codes.clamp(max=len(self.counts) - 1)
        counts = self.counts[safe] * known
        places = torch.arange(max(1, int(counts.max())), device=codes.device)
        real = places < counts[:, None]
        return self.order[(self.starts[safe, None] + places).masked_fill(~real, 0)], real


def _best_ranks(
    similarities: Tensor, ids: Tensor, codes: Tensor, gallery_codes: Tensor, members: _Members
) -> Tensor:
    """The place of each query's best positive: read from its list, or else counted."""
    hits = (gallery_codes[ids.clamp_min(0)] == codes[:, None]) & (ids >= 0)
    ranks = torch.where(hits.any(1), hits.to(torch.int8).argmax(1) + 1, 0)
    missed = (ranks == 0).nonzero()[:, 0]
    for part in _quarters(missed, len(similarities)):
        ranks[part] = _count_ranks(similarities[part], *members.table(codes[part]))
    return ranks


def _count_ranks(similarities: Tensor, table: Tensor, real: Tensor) -> Tensor:
    own = similarities.gather(1, table).masked_fill_(~real, -torch.inf)
    best = own.amax(1, keepdim=True)
    last = similarities.shape[1]
    place = torch.where(own == best, table, last).amin(1, keepdim=True)
    nearer = (similarities > best).sum(1)
    columns = torch.arange(last, device=similarities.device)
    tied = ((similarities == best) & (columns < place)).sum(1)
    return torch.where(best[:, 0] > -torch.inf, 1 + nearer + tied, 0)
