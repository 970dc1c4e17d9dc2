"""Exact nearest neighbors, one block of queries at a time.

Neighbors are in a total order (descending similarity, ascending index), on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from proximetry._util.machine import by_device
from proximetry._util.tensors import chunks, inner_products
from proximetry._util.types import Progress
from proximetry.metrics._search.problem import NEVER, Block, SearchProblem, first_hits
from proximetry.metrics._search.similarities import fix_ties, from_keys, project, to_keys
from proximetry.metrics._search.symmetric import can_search_symmetric, search_symmetric

# Bytes of similarities in memory. A CPU works best from its caches; a GPU with large
# products and few launches.
BLOCK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
MAX_ROWS = 8192
_GROUP = 32  # columns whose maximum is computed before the largest are selected


def search(
    problem: SearchProblem, depths: Tensor, *, with_ranks: bool, progress: Progress | None = None
) -> Iterator[Block]:
    """Find ``depths[i]`` neighbors of every query by the faster method."""
    if can_search_symmetric(problem, int(depths.max())):
        yield search_symmetric(problem, depths, with_ranks=with_ranks, progress=progress)
    else:
        yield from search_blocks(problem, depths, with_ranks=with_ranks, progress=progress)


def search_blocks(
    problem: SearchProblem, depths: Tensor, *, with_ranks: bool, progress: Progress | None = None
) -> Iterator[Block]:
    """Search in blocks that fit in cache or memory.

    Queries of similar depth share a block: one large class does not make every list long.
    """
    queries, gallery = project(problem.queries, problem.gallery, problem.similarity)
    order = torch.argsort(depths, stable=True)
    done = 0
    for rows, depth in _blocks(order, depths, len(gallery), gallery.element_size()):
        similarities = inner_products(queries[rows], gallery)
        fix_ties(similarities, problem.similarity, {1: problem.duplicates})
        if problem.groups is not None:
            query_groups, gallery_groups = problem.groups
            similarities.masked_fill_(query_groups[rows, None] == gallery_groups, -torch.inf)
        elif problem.self_index is not None:
            similarities.scatter_(1, problem.self_index[rows, None], -torch.inf)
        values, ids = nearest(similarities, depth)
        ids = ids.masked_fill(values == -torch.inf, -1)
        ranks = _best_ranks(similarities, ids, problem, rows) if with_ranks else None
        yield Block(rows, ids, values, ranks)
        done += len(rows)
        if progress is not None:
            progress(done, len(order))


def _blocks(
    order: Tensor, depths: Tensor, width: int, itemsize: int
) -> Iterator[tuple[Tensor, int]]:
    budget = by_device(order.device, **BLOCK_BYTES)
    sorted_depths = depths[order].clamp(max=width).tolist()
    start = 0
    while start < len(order):
        # Estimate the block from its shallowest query, then shrink it for its deepest.
        rows = _rows_within(budget, width, itemsize, sorted_depths[start])
        deepest = sorted_depths[min(start + rows, len(order)) - 1]
        rows = _rows_within(budget, width, itemsize, deepest)
        stop = min(start + rows, len(order))
        yield order[start:stop], sorted_depths[stop - 1]
        start = stop


def _rows_within(budget: int, width: int, itemsize: int, depth: int) -> int:
    # Each neighbor takes a value, an index and their copies for sorting.
    return max(1, min(MAX_ROWS, budget // (width * itemsize + depth * 32)))


def nearest(similarities: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the largest entries of each row, ties by smaller index."""
    # One more than depth shows whether a tie straddles the end of the list.
    values, ids = largest(similarities, depth + 1)
    if values.shape[1] > depth:
        split = (values[:, depth - 1] == values[:, depth]) & (values[:, depth] > -torch.inf)
        values, ids = values[:, :depth], ids[:, :depth]
        if bool(split.any()):
            rows = split.nonzero()[:, 0]
            values, ids = values.clone(), ids.clone()
            # Rows with such a tie are selected in the total order, a few at a time.
            for part in _small_parts(rows, len(similarities)):
                values[part], ids[part] = _nearest_in_total_order(similarities[part], depth)
    tied = bool((values[:, 1:] == values[:, :-1]).any())
    return sort_by_value(values, ids) if tied else (values, ids)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest entries of each row, in descending order, and their columns.

    Ties come in any order. Each entry is in one of the `count` groups of columns with the largest
    maxima, so that a CPU sorts only these.
    """
    rows, width = values.shape
    groups = width // _GROUP
    if groups < 4 * count or values.is_cuda:
        top = values.topk(min(count, width), dim=1)
        return top.values, top.indices
    # Group g has the columns g, g + groups, …: maxima of whole rows are fast to compute.
    maxima = values[:, : groups * _GROUP].reshape(rows, _GROUP, groups).amax(1)
    best = maxima.topk(count, 1, sorted=False).indices
    inside = torch.arange(_GROUP)[:, None] * groups + best[:, None]
    rest = torch.arange(groups * _GROUP, width).expand(rows, -1)
    columns = torch.cat([inside.flatten(1), rest], 1)
    top = values.gather(1, columns).topk(count, dim=1)
    return top.values, columns.gather(1, top.indices)


def _small_parts(rows: Tensor, block: int) -> Iterator[Tensor]:
    """Yield rows in parts of at most a quarter of the block, whose copies then stay small."""
    return (rows[part] for part in chunks(len(rows), max(1, block // 4)))


def _nearest_in_total_order(similarities: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    if similarities.dtype != torch.float32:
        values, ids = similarities.sort(dim=1, descending=True, stable=True)
        return values[:, :depth], ids[:, :depth]
    ids = torch.arange(similarities.shape[1], device=similarities.device)
    return from_keys(to_keys(similarities, ids).topk(depth, dim=1).values)


def sort_by_value(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of each row by descending value, ties by smaller index."""
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _best_ranks(similarities: Tensor, ids: Tensor, problem: SearchProblem, rows: Tensor) -> Tensor:
    """Return the rank of each query's best positive: read from its list, or else counted."""
    ranks = first_hits(problem.hits(rows, ids))
    columns = torch.arange(similarities.shape[1], device=similarities.device)
    for part in _small_parts((ranks == NEVER).nonzero()[:, 0], len(similarities)):
        near = similarities[part]
        negative = problem.gallery_codes != problem.query_codes[rows[part], None]
        positives = near.masked_fill(negative, -torch.inf)
        best = positives.amax(1, keepdim=True)
        first = (positives == best).to(torch.int8).argmax(1, keepdim=True)  # the first of equals
        nearer = (near > best) | ((near == best) & (columns < first))
        ranks[part] = torch.where(best[:, 0] > -torch.inf, 1 + nearer.sum(1), NEVER)
    return ranks
