"""Every item against all others on a CPU: each similarity is computed once, used twice.

Items are laid out class by class in tiles, so that all positives of an item lie in its diagonal
tile, and with them its duplicates, which take their similarities from the first of them. Diagonal
tiles go first: they give each item its best positive and a first list. A tile off the diagonal
then holds negatives only, and serves its rows and, transposed, its columns:

- neighbors: maxima of small groups show the few entries that can still enter a list;
- ranks: once the best positive of an item has left its list, nearer items of each tile are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise
from threading import Lock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from proximetry._util.machine import torch_pool
from proximetry._util.tensors import inner_products
from proximetry._util.types import Progress
from proximetry.metrics._search.problem import NEVER, Block, SearchProblem
from proximetry.metrics._search.similarities import fix_ties, from_keys, project, to_keys

TILE = 1024
GROUP = 16  # entries whose maximum is taken together
# WORST_KEY sorts after all keys; NO_POSITIVE before all keys, so it never leaves a list.
WORST_KEY, NO_POSITIVE = torch.iinfo(torch.int64).min, NEVER
# Candidates per item that are collected before they are merged into the lists together.
MERGE_AFTER = 48
# Threads that scan tiles at the same time; each holds one tile.
THREADS = 4


def can_search_symmetric(problem: SearchProblem, depth: int) -> bool:
    """Return whether this search is supported and faster than `search_blocks`."""
    return (
        problem.self_index is not None
        and problem.queries is problem.gallery
        and problem.groups is None
        and problem.gallery.device.type == "cpu"
        and problem.gallery.dtype != torch.float64
        and len(problem.gallery) >= 2 * TILE
        and depth <= TILE // 4
        and int(torch.bincount(problem.components).max()) <= TILE // 2
    )


@dataclass
class _State:
    """Partial results of the item at each position."""

    items: Tensor  # which item it is; ascending within a tile
    keys: Tensor  # the best keys so far, ascending
    last: Tensor  # column of `keys` with the last neighbor that is needed
    best: Tensor  # the key of the best positive, NO_POSITIVE without one
    nearer: Tensor  # number of nearer items; updated once `best` has left the list
    candidates: dict[int, list[tuple[Tensor, Tensor]]]  # by start of tile: rows and keys to merge

    def worst(self, positions: slice) -> Tensor:
        """Return the last key of each list of a tile."""
        return self.keys[positions].gather(1, self.last[positions, None])[:, 0]

    def best_is_out(self, positions: slice) -> Tensor:
        """Return which items of a tile do not have their best positive in their list."""
        return self.best[positions] < self.worst(positions)


def search_symmetric(
    problem: SearchProblem, depths: Tensor, *, with_ranks: bool, progress: Progress | None = None
) -> Block:
    """Return what ``neighbors.search_blocks`` returns, for all items in one block."""
    tiles, items = _tiles(problem.components)
    deepest = int(depths.max())
    codes = problem.gallery_codes[items]
    duplicates = _duplicates_by_tile(problem, tiles, items)
    state = _State(
        items,
        keys=items.new_full((len(items), deepest), WORST_KEY),
        last=deepest - depths[items],
        best=items.new_full((len(items),), NO_POSITIVE),
        nearer=torch.zeros_like(items),
        candidates={tile.start: [] for tile in tiles},
    )
    locks = {tile.start: Lock() for tile in tiles}
    operands: dict[int, tuple[Tensor, Tensor]] = {}

    # Each thread has its own grad mode; where it is on, `inner_products` is half as fast.
    @torch.no_grad()
    def product(rows: slice, columns: slice) -> Tensor:
        """Return similarities, with −inf at the ends that fill the last groups."""
        tile = inner_products(operands[rows.start][0], operands[columns.start][1])
        height, width = rows.stop - rows.start, columns.stop - columns.start
        tile[height:] = -torch.inf
        tile[:, width:] = -torch.inf
        tile_duplicates = {0: duplicates[rows.start], 1: duplicates[columns.start]}
        fix_ties(tile[:height, :width], problem.similarity, tile_duplicates)
        return tile

    def start(positions: slice) -> None:
        vectors = problem.gallery[items[positions]]
        height = len(vectors)
        vectors = F.pad(vectors, (0, 0, 0, -height % GROUP))
        operands[positions.start] = project(vectors, vectors, problem.similarity)
        tile = product(positions, positions).fill_diagonal_(-torch.inf)
        largest = np.partition(tile[:height].numpy(), -deepest, axis=1)[:, -deepest:]
        largest.sort(axis=1)
        floor = torch.from_numpy(largest).gather(1, state.last[positions, None])[:, 0]
        _collect(tile, 1, floor, state, positions, positions)
        _merge(state, positions)
        if with_ranks:
            _find_best(tile, codes[positions], state, positions)
            _count_nearer(tile, 1, state, positions, positions)

    def visit(pair: tuple[slice, slice]) -> None:
        rows, columns = pair
        tile = product(rows, columns)
        with locks[rows.start], locks[columns.start]:  # always in ascending order
            for dim, positions, others in ((1, rows, columns), (0, columns, rows)):
                if with_ranks:
                    _count_nearer(tile, dim, state, positions, others)
                floor = from_keys(state.worst(positions))[0]
                _collect(tile, dim, floor, state, positions, others)

    # Pairs with the same sum modulo their number share no tile, so threads seldom wait for locks.
    tile_pairs = sorted(combinations(range(len(tiles)), 2), key=lambda pair: sum(pair) % len(tiles))
    pairs = [(tiles[one], tiles[two]) for one, two in tile_pairs]

    block = Block(
        torch.arange(len(items), device=items.device),
        ids=torch.empty_like(state.keys),
        similarities=torch.empty_like(state.keys, dtype=torch.float32),
        ranks=torch.empty_like(items) if with_ranks else None,
    )

    def finish(positions: slice) -> None:
        _merge(state, positions)
        _write(state, positions, block)

    def steps(pool: ThreadPoolExecutor) -> Iterator[None]:
        yield from pool.map(start, tiles)  # all of them, before any pair
        yield from pool.map(visit, pairs)
        yield from pool.map(finish, tiles)

    # Scanning a tile runs mostly on one core: several tiles at a time keep all cores busy.
    threads = torch.get_num_threads()
    workers = min(threads, THREADS)
    with torch_pool(workers, threads // workers) as pool:
        for done, _ in enumerate(steps(pool), 1):
            if progress is not None:
                progress(done, 2 * len(tiles) + len(pairs))
    return block


def _tiles(components: Tensor) -> tuple[list[slice], Tensor]:
    """Return tiles of positions, cut evenly except that no component is in two tiles.

    Also return the item at each position, ascending within a tile.
    """
    items = torch.argsort(components, stable=True)
    ends = torch.bincount(components).cumsum(0)
    count = round(len(components) / TILE)
    even = torch.arange(1, count, device=components.device) * len(components) // count
    cuts = {0, *ends[torch.searchsorted(ends, even)].tolist(), len(components)}
    tiles = [slice(*pair) for pair in pairwise(sorted(cuts))]
    return tiles, torch.cat([items[tile].sort().values for tile in tiles])


def _duplicates_by_tile(
    problem: SearchProblem, tiles: list[slice], items: Tensor
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return `SearchProblem.duplicates` of each tile, as positions within the tile."""
    position = torch.empty_like(items)
    position[items] = torch.arange(len(items), device=items.device)
    later, first = (position[rows] for rows in problem.duplicates)
    inside = {tile.start: (tile.start <= later) & (later < tile.stop) for tile in tiles}
    return {start: (later[rows] - start, first[rows] - start) for start, rows in inside.items()}


def _find_best(tile: Tensor, codes: Tensor, state: _State, positions: slice) -> None:
    """Find the best positives in a diagonal tile; the first of equals has the smallest index."""
    positives = tile[: len(codes), : len(codes)].masked_fill(codes[:, None] != codes, -torch.inf)
    best, column = positives.max(1)
    keys = to_keys(best, state.items[positions][column])
    state.best[positions] = keys.masked_fill(best == -torch.inf, NO_POSITIVE)


def _count_nearer(tile: Tensor, dim: int, state: _State, positions: slice, others: slice) -> None:
    """Count the items before the best positives that have left the lists of ``positions``.

    The tile has the others along ``dim``.
    """
    out = state.best_is_out(positions).nonzero()[:, 0]
    values = tile.index_select(1 - dim, out).movedim(dim, 1)[:, : others.stop - others.start]
    best, item = from_keys(state.best[positions][out, None])
    before = (values > best) | ((values == best) & (state.items[others] < item))
    # Bytes add up ten times as fast as booleans.
    state.nearer[positions][out] += before.view(torch.uint8).sum(1, dtype=torch.int32)


def _collect(
    tile: Tensor, dim: int, floor: Tensor, state: _State, positions: slice, others: slice
) -> None:
    """Collect entries that reach the floors of ``positions``; the others are along ``dim``."""
    # Group g has the entries g, g + groups, …
    maxima = torch.unflatten(tile, dim, (GROUP, -1)).amax(dim)
    if dim == 0:
        tile, maxima = tile.T, maxima.T
    row, group = (maxima[: len(floor)] >= floor[:, None]).nonzero(as_tuple=True)
    values = torch.unflatten(tile, 1, (GROUP, -1))[row, :, group]
    hit, member = (values >= floor[row, None]).nonzero(as_tuple=True)
    column = member * maxima.shape[1] + group[hit]
    keys = to_keys(values[hit, member], state.items[others][column])
    candidates = state.candidates[positions.start]
    candidates.append((row[hit], keys))
    if sum(len(rows) for rows, _ in candidates) >= MERGE_AFTER * len(floor):
        _merge(state, positions)


def _merge(state: _State, positions: slice) -> None:
    """Merge the collected candidates into the lists of a tile."""
    candidates, state.candidates[positions.start] = state.candidates[positions.start], []
    if not candidates:
        return
    row, by_row = torch.cat([rows for rows, _ in candidates]).sort(stable=True)
    keys = torch.cat([keys for _, keys in candidates])[by_row]
    counts = torch.bincount(row, minlength=positions.stop - positions.start)
    position = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    new = keys.new_full((len(counts), int(counts.max())), WORST_KEY)
    new[row, position] = keys
    merged = torch.cat([state.keys[positions], new], dim=1)
    was_out = state.best_is_out(positions)
    # NumPy selects and sorts ten times as fast as torch.
    merged = torch.from_numpy(np.sort(merged.numpy(), axis=1))
    state.keys[positions] = merged[:, -state.keys.shape[1] :]
    # If a best positive has just left its list, all nearer items are in `merged`.
    out = (state.best_is_out(positions) & ~was_out).nonzero()[:, 0]
    state.nearer[positions][out] = (merged[out] > state.best[positions][out, None]).sum(1)


def _write(state: _State, positions: slice, block: Block) -> None:
    """Write the lists and ranks of a tile to the rows of its items."""
    items, keys = state.items[positions], state.keys[positions]
    similarities, ids = from_keys(keys.flip(1))
    is_missing = (
        torch.arange(keys.shape[1], device=keys.device).flip(0) < state.last[positions, None]
    )
    block.similarities[items] = similarities.masked_fill(is_missing, -torch.inf)
    block.ids[items] = ids.masked_fill(is_missing, -1)
    if block.ranks is not None:
        best = state.best[positions]
        before = (keys > best[:, None]).sum(1)
        ranks = 1 + torch.where(state.best_is_out(positions), state.nearer[positions], before)
        block.ranks[items] = ranks.masked_fill(best == NO_POSITIVE, NEVER)
