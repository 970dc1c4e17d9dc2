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
from threading import Lock, local

import torch
from torch import Tensor

from proximetry._util.machine import torch_pool
from proximetry._util.tensors import chunks
from proximetry._util.types import Progress
from proximetry.metrics._search.problem import NEVER, Block, SearchProblem, find_duplicates
from proximetry.metrics._search.similarities import fix_ties, from_keys, project, to_keys

TILE = 2048
# Entries whose maximum is taken together: along a row, and down a column.
ROW_GROUP = 32
COLUMN_GROUP = 8
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

    items: Tensor  # which item it is
    keys: Tensor  # the best keys so far, unordered
    worst: Tensor  # the worst of them
    best: Tensor  # the key of the best positive, NO_POSITIVE without one
    nearer: Tensor  # number of nearer items; updated once `best` has left the list
    candidates: dict[int, list[tuple[Tensor, Tensor]]]  # by start of tile: rows and keys to merge

    def best_is_out(self, positions: slice) -> Tensor:
        """Return which items of a tile do not have their best positive in their list."""
        return self.best[positions] < self.worst[positions]


def search_symmetric(
    problem: SearchProblem, depth: int, *, with_ranks: bool, progress: Progress | None = None
) -> Block:
    """Return what ``neighbors.search_blocks`` returns, for all items in one block."""
    count = len(problem.gallery)
    items = torch.argsort(problem.components, stable=True)
    tiles = _tiles(problem.components)
    vectors = problem.gallery[items]
    duplicates = {positions.start: find_duplicates(vectors[positions]) for positions in tiles}
    left, right = project(vectors, vectors, problem.similarity)
    del vectors
    state = _State(
        items,
        keys=items.new_empty((count, depth)),
        worst=items.new_empty(count),
        best=items.new_empty(count),
        nearer=items.new_empty(count),
        candidates={tile.start: [] for tile in tiles},
    )
    codes = problem.gallery_codes[items]
    locks = {tile.start: Lock() for tile in tiles}
    widest = max(tile.stop - tile.start for tile in tiles)
    memory = local()  # one reused buffer per thread: fresh pages cost time

    def product(rows: slice, columns: slice) -> Tensor:
        """Return similarities, with −inf at the ends where whole groups need it."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        shape = height + -height % COLUMN_GROUP, width + -width % ROW_GROUP
        if not hasattr(memory, "buffer"):
            memory.buffer = left.new_empty((widest + COLUMN_GROUP) * (widest + ROW_GROUP))
        tile: Tensor = memory.buffer[: shape[0] * shape[1]].view(shape)
        tile[height:] = -torch.inf
        tile[:, width:] = -torch.inf
        torch.mm(left[rows], right[columns].T, out=tile[:height, :width])
        tile_duplicates = {0: duplicates[rows.start], 1: duplicates[columns.start]}
        fix_ties(tile[:height, :width], problem.similarity, tile_duplicates)
        return tile

    def start(positions: slice) -> None:
        size = positions.stop - positions.start
        _diagonal(product(positions, positions)[:size, :size], codes[positions], state, positions)

    def visit(pair: tuple[slice, slice]) -> None:
        rows, columns = pair
        tile = product(rows, columns)
        with locks[rows.start], locks[columns.start]:  # always in ascending order
            _update_from_tile(tile, state, rows, columns, with_ranks)

    # Pairs with the same sum modulo their number share no tile, so threads seldom wait for locks.
    tile_pairs = sorted(combinations(range(len(tiles)), 2), key=lambda pair: sum(pair) % len(tiles))
    pairs = [(tiles[one], tiles[two]) for one, two in tile_pairs]

    def steps(pool: ThreadPoolExecutor) -> Iterator[None]:
        yield from pool.map(start, tiles)  # all of them, before any pair
        yield from pool.map(visit, pairs)

    # Scanning a tile runs mostly on one core: several tiles at a time keep all cores busy.
    threads = torch.get_num_threads()
    workers = min(threads, THREADS)
    with torch_pool(workers, threads // workers) as pool:
        for done, _ in enumerate(steps(pool), 1):
            if progress is not None:
                progress(done, len(tiles) + len(pairs))
    for positions in tiles:
        _merge(state, positions)
    return _finish(state, with_ranks)


def _tiles(components: Tensor) -> list[slice]:
    """Return tiles of items by component, cut evenly except that no component is in two tiles."""
    ends = torch.bincount(components).cumsum(0)
    count = round(len(components) / TILE)
    even = torch.arange(1, count, device=components.device) * len(components) // count
    cuts = {0, *ends[torch.searchsorted(ends, even)].tolist(), len(components)}
    return [slice(*pair) for pair in pairwise(sorted(cuts))]


def _finish(state: _State, with_ranks: bool) -> Block:
    """Return sorted lists and ranks, from positions back to items."""
    ids = torch.empty_like(state.keys)
    values = torch.empty_like(ids, dtype=torch.float32)
    for part in chunks(len(ids), TILE):
        rows = state.items[part]
        values[rows], ids[rows] = from_keys(state.keys[part].sort(dim=1, descending=True).values)
    ranks = None
    if with_ranks:
        before = (state.keys > state.best[:, None]).sum(1)
        by_position = 1 + torch.where(state.best_is_out(slice(None)), state.nearer, before)
        ranks = torch.empty_like(by_position)
        ranks[state.items] = by_position.masked_fill(state.best == NO_POSITIVE, NEVER)
    return Block(torch.arange(len(ids), device=ids.device), ids, values, ranks)


def _diagonal(tile: Tensor, codes: Tensor, state: _State, positions: slice) -> None:
    """Start the lists, find the best positives, and count the items of this tile before them."""
    tile.fill_diagonal_(-torch.inf)
    for rows in chunks(len(tile), TILE // 4):
        keys = to_keys(tile[rows], state.items[positions])
        state.keys[positions][rows] = keys.topk(state.keys.shape[1], dim=1, sorted=False).values
        best = keys.masked_fill(codes[rows, None] != codes, WORST_KEY).amax(1)
        state.nearer[positions][rows] = _true_per_row(keys > best[:, None])
        missing = from_keys(best)[0] == -torch.inf
        state.best[positions][rows] = best.masked_fill(missing, NO_POSITIVE)
    state.worst[positions] = state.keys[positions].amin(1)


def _true_per_row(mask: Tensor) -> Tensor:
    # Bytes add up ten times as fast as booleans.
    return mask.view(torch.uint8).sum(1, dtype=torch.int32)


def _update_from_tile(
    tile: Tensor, state: _State, rows: slice, columns: slice, with_ranks: bool
) -> None:
    """Let a tile of negatives enter the lists, and the ranks, of its rows and columns."""
    row_items, column_items = state.items[rows], state.items[columns]
    height, width = len(row_items), len(column_items)
    if with_ranks:
        for positions, others, across in ((rows, column_items, 0), (columns, row_items, 1)):
            out = state.best_is_out(positions).nonzero()[:, 0]
            values = tile[:height, :width].index_select(across, out).movedim(across, 0)
            best, position = from_keys(state.best[positions][out, None])
            before = (values > best) | ((values == best) & (others < position))
            state.nearer[positions][out] += _true_per_row(before)
    row, column, values = _candidates_by_row(tile[:height], from_keys(state.worst[rows])[0])
    _collect(state, rows, row, to_keys(values, column_items[column]))
    floor = from_keys(state.worst[columns])[0]
    column, row, values = _candidates_by_column(tile[:, :width], floor)
    _collect(state, columns, column, to_keys(values, row_items[row]))


def _candidates_by_row(tile: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return entries that reach their row's floor: row, column and value, by row."""
    grouped = tile.view(len(tile), -1, ROW_GROUP)
    row, group = (grouped.amax(2) >= floor[:, None]).nonzero(as_tuple=True)
    values = grouped[row, group]
    hit, offset = (values >= floor[row, None]).nonzero(as_tuple=True)
    return row[hit], group[hit] * ROW_GROUP + offset, values[hit, offset]


def _candidates_by_column(tile: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return entries that reach their column's floor: column, row and value, by column."""
    grouped = tile.view(-1, COLUMN_GROUP, tile.shape[1])
    column, group = (grouped.amax(1) >= floor).T.nonzero(as_tuple=True)
    values = grouped.transpose(1, 2)[group, column]
    hit, offset = (values >= floor[column, None]).nonzero(as_tuple=True)
    return column[hit], group[hit] * COLUMN_GROUP + offset, values[hit, offset]


def _collect(state: _State, positions: slice, row: Tensor, keys: Tensor) -> None:
    """Collect candidates for the lists of a tile."""
    candidates = state.candidates[positions.start]
    candidates.append((row, keys))
    if sum(len(rows) for rows, _ in candidates) >= MERGE_AFTER * (positions.stop - positions.start):
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
    state.keys[positions] = merged.topk(state.keys.shape[1], dim=1, sorted=False).values
    state.worst[positions] = state.keys[positions].amin(1)
    # Where a best positive has just been pushed out, all that came before it is in `merged`.
    out = (state.best_is_out(positions) & ~was_out).nonzero()[:, 0]
    state.nearer[positions][out] = (merged[out] > state.best[positions][out, None]).sum(1)
