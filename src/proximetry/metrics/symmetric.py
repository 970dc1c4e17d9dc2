"""Every item against all others on a CPU: each similarity is computed once, used twice.

Items are laid out class by class in tiles, so that all positives of an item lie in its diagonal
tile. Diagonal tiles go first: they give each item its best positive and a first list. A tile off
the diagonal then holds negatives only, and serves its rows and, transposed, its columns:

- neighbours: maxima of small groups show the few places that can still enter a list;
- ranks: while the best positive is in its item's list, so is everything nearer; once it has been
  pushed out, the nearer items of each further tile are counted, with byte-wide additions.

Both come from the same products, so a list and a rank never contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

from proximetry._common import Progress, chunks
from proximetry.metrics.task import Block, Task, from_keys, project, reported, to_keys

TILE = 2048
# Entries whose maximum is taken together: along a row, and down a column.
ROW_GROUP = 32
COLUMN_GROUP = 8
# A byte counts to 255; eight bytes to the word; so this many columns may share a sum.
LANES = 8 * 255
WORST_KEY = torch.iinfo(torch.int64).min
# Candidates per item that are collected before they are merged into the lists together.
MERGE_AFTER = 48
# Threads that look through tiles at the same time; each holds one tile.
THREADS = 4


def applies(task: Task, depth: int) -> bool:
    """Whether this search can be used, and is faster than going block by block."""
    return (
        task.is_self_search
        and task.query_groups is None
        and task.gallery.device.type == "cpu"
        and task.gallery.dtype != torch.float64
        and len(task.gallery) >= 2 * TILE
        and depth <= TILE // 4
        and int(torch.bincount(task.gallery_codes).max()) <= TILE // 2
    )


@dataclass
class _State:
    """What is known so far of every item, in tile order; padding never takes part."""

    keys: Tensor  # the best keys so far, unordered
    floor: Tensor  # the similarity of the worst of them
    best: Tensor  # the similarity of the best positive, +inf without one
    place: Tensor  # and its index
    lost: Tensor  # whether the best positive is out of the list
    nearer: Tensor  # how many negatives come before it, kept up once it is out
    waiting: dict[int, list[tuple[Tensor, Tensor]]]  # by tile: rows and keys of candidates


@dataclass(frozen=True)
class _Layout:
    """Items by class, cut into tiles at class boundaries, each tile padded to whole groups."""

    items: Tensor  # the item at each position, −1 for padding
    tiles: list[slice]

    @classmethod
    def of(cls, codes: Tensor) -> _Layout:
        order = torch.argsort(codes, stable=True)
        ends = torch.bincount(codes).cumsum(0)
        count = round(len(codes) / TILE)
        # The class boundary next to each even cut: no class is in two tiles.
        even = torch.arange(1, count) * len(codes) // count
        inner = set(ends[torch.searchsorted(ends, even)].tolist()) - {len(codes)}
        cuts = [0, *sorted(inner), len(codes)]
        parts: list[Tensor] = []
        tiles: list[slice] = []
        at = 0
        for start, stop in pairwise(cuts):
            padding = -(stop - start) % max(ROW_GROUP, COLUMN_GROUP)
            parts += [order[start:stop], order.new_full((padding,), -1)]
            tiles.append(slice(at, at + stop - start + padding))
            at = tiles[-1].stop
        return cls(torch.cat(parts), tiles)


def search_symmetric(
    task: Task, depth: int, *, with_ranks: bool, progress: Progress | None = None
) -> Block:
    """The same answer as ``neighbors.search_blocks``, for all items at once."""
    layout = _Layout.of(task.gallery_codes)
    items = layout.items.clamp_min(0)
    vectors = task.gallery[items]
    right = project(vectors, task.similarity, "gallery")
    left = (
        right
        if task.similarity in ("cosine", "dot")
        else project(vectors, task.similarity, "query")
    )
    del vectors
    state = _State(
        keys=torch.empty((len(items), depth), dtype=torch.int64),
        floor=torch.full((len(items),), torch.inf),
        best=torch.full((len(items),), torch.inf),
        place=torch.zeros(len(items), dtype=torch.int64),
        lost=torch.zeros(len(items), dtype=torch.bool),
        nearer=torch.zeros(len(items), dtype=torch.int64),
        waiting={at.start: [] for at in layout.tiles},
    )
    codes = task.gallery_codes[items]
    buffers = _BufferPool(max(at.stop - at.start for at in layout.tiles) ** 2)
    locks = {at.start: Lock() for at in layout.tiles}

    def start(at: slice) -> None:
        with buffers.take() as buffer:
            tile = _product(left[at], right[at], buffer)
            _diagonal(tile, layout.items[at], codes[at], state, at)

    def visit(pair: tuple[slice, slice]) -> None:
        rows, columns = pair
        with buffers.take() as buffer:
            tile = _product(left[rows], right[columns], buffer)
            _blank_padding(tile, layout.items[rows], layout.items[columns])
            with locks[rows.start], locks[columns.start]:  # always in rising order
                if with_ranks:
                    _count_nearer(tile, layout.items[columns], state, rows, across=1)
                    _count_nearer(tile, layout.items[rows], state, columns, across=0)
                _gather_neighbours(tile, layout.items, state, rows, columns)

    pairs = _rounds(layout.tiles)
    total = len(layout.tiles) + len(pairs)

    def steps(pool: ThreadPoolExecutor) -> Iterator[None]:
        yield from pool.map(start, layout.tiles)  # all of them, before any pair
        yield from pool.map(visit, pairs)

    with _thread_pool() as pool:
        for done, _ in enumerate(steps(pool), 1):
            if progress is not None:
                progress(done, total)
    for at in layout.tiles:
        _merge(state, at)
    return _finish(task, layout, state, depth, with_ranks)


@contextmanager
def _thread_pool() -> Iterator[ThreadPoolExecutor]:
    """A few threads that share the cores; afterwards torch has its number of threads back.

    Looking through a tile runs mostly on one core: several tiles at once keep all of them busy.
    """
    threads = torch.get_num_threads()
    workers = min(threads, THREADS)
    try:
        with ThreadPoolExecutor(
            workers, initializer=torch.set_num_threads, initargs=(threads // workers,)
        ) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


class _BufferPool:
    """Memory for tiles, used again and again: fresh pages cost time."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._free: list[Tensor] = []

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = torch.empty(self._entries)
        with torch.no_grad():  # a thread of the pool starts with gradients on
            yield buffer
        self._free.append(buffer)


def _rounds(tiles: list[slice]) -> list[tuple[slice, slice]]:
    """Every pair of tiles once, as in a round-robin tournament: consecutive pairs share no tile."""
    order: list[int | None] = list(range(len(tiles)))
    if len(order) % 2:
        order.append(None)
    half = len(order) // 2
    pairs = []
    for _ in range(len(order) - 1):
        for one, two in zip(order[:half], reversed(order[half:]), strict=True):
            if one is not None and two is not None:
                pairs.append((tiles[min(one, two)], tiles[max(one, two)]))
        order = [order[0], order[-1], *order[1:-1]]
    return pairs


def _product(left: Tensor, right: Tensor, buffer: Tensor) -> Tensor:
    tile = buffer[: len(left) * len(right)].view(len(left), len(right))
    return torch.mm(left, right.T, out=tile)


def _finish(task: Task, layout: _Layout, state: _State, depth: int, with_ranks: bool) -> Block:
    count = len(task.gallery)
    ids = torch.empty((count, depth), dtype=torch.int64)
    values = torch.empty((count, depth), dtype=torch.float32)
    for tile in layout.tiles:
        items = layout.items[tile]
        real = items >= 0
        found, neighbours = from_keys(state.keys[tile][real].sort(dim=1, descending=True).values)
        values[items[real]] = reported(found, task.similarity)
        ids[items[real]] = neighbours
    ranks = None
    if with_ranks:
        real = layout.items >= 0
        before = (state.keys > to_keys(state.best, state.place)[:, None]).sum(1)
        ranks_in_order = 1 + torch.where(state.lost, state.nearer, before)
        without_positive = state.best[real] == torch.inf
        ranks = torch.zeros(count, dtype=torch.int64)
        ranks[layout.items[real]] = ranks_in_order[real].masked_fill(without_positive, 0)
    return Block(torch.arange(count), ids, values, ranks)


def _diagonal(tile: Tensor, items: Tensor, codes: Tensor, state: _State, at: slice) -> None:
    """Start the lists, find the best positives, and count the negatives of this tile."""
    tile.fill_diagonal_(-torch.inf)
    _blank_padding(tile, items, items)
    real = items >= 0
    depth = state.keys.shape[1]
    for rows in chunks(len(tile), TILE // 4):
        chosen = to_keys(tile[rows], items).topk(depth, dim=1, sorted=False).values
        state.keys[at][rows] = chosen
        same = codes[rows, None] == codes
        own = tile[rows].masked_fill(~same, -torch.inf)
        best = own.amax(1, keepdim=True)
        place = torch.where(own == best, items, len(state.place)).amin(1, keepdim=True)
        before = (tile[rows] > best) | ((tile[rows] == best) & (items < place))
        # A best positive at infinity never leaves the list: queries without one count nothing.
        state.best[at][rows] = best[:, 0].masked_fill(best[:, 0] == -torch.inf, torch.inf)
        state.place[at][rows] = place[:, 0]
        state.nearer[at][rows] = (before & ~same).sum(1)
    state.floor[at] = from_keys(state.keys[at].amin(1))[0]
    best_keys = to_keys(state.best[at], state.place[at])
    state.lost[at] = real & (best_keys < state.keys[at].amin(1))
    # Nothing reaches an infinite floor: padding collects no neighbours.
    state.floor[at][~real] = torch.inf


def _blank_padding(tile: Tensor, row_items: Tensor, column_items: Tensor) -> None:
    """Padding stands at the end of a tile and must never look near."""
    tile[int((row_items >= 0).sum()) :] = -torch.inf
    tile[:, int((column_items >= 0).sum()) :] = -torch.inf


def _gather_neighbours(
    tile: Tensor, items: Tensor, state: _State, rows: slice, columns: slice
) -> None:
    row, column, found = _candidates_by_row(tile, state.floor[rows])
    _offer(state, rows, row, to_keys(found, items[columns][column]))
    column, row, found = _candidates_by_column(tile, state.floor[columns])
    _offer(state, columns, column, to_keys(found, items[rows][row]))


def _count_nearer(tile: Tensor, items: Tensor, state: _State, at: slice, across: int) -> None:
    """For rows (``across`` = 1) whose best positive is out of the list: the columns before it.

    With ``across`` = 0 the same for columns, and the rows before their best positives.
    """
    lines = _to_count(state.lost[at])
    if lines is None:
        return
    count, along = (_true_per_row, 0) if across else (_true_per_column, 1)
    chosen = tile[lines] if across else tile[:, lines]
    best, place = (of[at][lines].unsqueeze(across) for of in (state.best, state.place))
    nearer = count(chosen > best)
    tied = (count(chosen >= best) > nearer).nonzero()[:, 0]
    if len(tied):
        chosen, best, place = (of.index_select(along, tied) for of in (chosen, best, place))
        before = (chosen == best) & (items.unsqueeze(along) < place)
        nearer[tied] += before.sum(across)
    state.nearer[at][lines] += nearer


def _to_count(lost: Tensor) -> Tensor | slice | None:
    """Which lines to count: those that need it, in whole words of eight, or simply all.

    What is counted for a line that does not need it yet is thrown away when it does.
    """
    number = int(lost.sum())
    if number == 0:
        return None
    if number > len(lost) // 4:
        return slice(None)
    order = torch.argsort(lost.to(torch.uint8), descending=True)
    return order[: number + -number % 8]


def _true_per_row(mask: Tensor) -> Tensor:
    """Trues in each row, eight bytes at a time: many times faster than adding booleans."""
    total = torch.zeros(len(mask), dtype=torch.int64)
    for start in range(0, mask.shape[1], LANES):
        words = mask.view(torch.int64)[:, start // 8 : (start + LANES) // 8].sum(1)
        total += words.view(torch.uint8).view(-1, 8).sum(1)
    return total


def _true_per_column(mask: Tensor) -> Tensor:
    total = torch.zeros(mask.shape[1], dtype=torch.int64)
    words = mask.view(torch.int64)
    for start in range(0, len(mask), 255):
        total += words[start : start + 255].sum(0).view(torch.uint8)
    return total


def _candidates_by_row(tile: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries that reach their row's floor: row, column and value, by row."""
    height, width = tile.shape
    groups = width // ROW_GROUP
    maxima = tile.view(height, groups, ROW_GROUP).amax(2)
    place = (maxima >= floor[:, None]).view(-1).nonzero()[:, 0]
    row, group = place // groups, place % groups
    values = tile.view(-1, ROW_GROUP)[place]
    hit, offset = (values >= floor[row, None]).nonzero(as_tuple=True)
    return row[hit], group[hit] * ROW_GROUP + offset, values[hit, offset]


def _candidates_by_column(tile: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries that reach their column's floor: column, row and value, by column."""
    height, width = tile.shape
    grouped = tile.view(height // COLUMN_GROUP, COLUMN_GROUP, width)
    column, group = (grouped.amax(1) >= floor).T.nonzero(as_tuple=True)
    values = grouped.transpose(1, 2)[group, column]
    hit, offset = (values >= floor[column, None]).nonzero(as_tuple=True)
    return column[hit], group[hit] * COLUMN_GROUP + offset, values[hit, offset]


def _offer(state: _State, at: slice, row: Tensor, keys: Tensor) -> None:
    """Collect candidates for the lists of a tile, given by rising row."""
    waiting = state.waiting[at.start]
    waiting.append((row, keys))
    if sum(len(rows) for rows, _ in waiting) >= MERGE_AFTER * (at.stop - at.start):
        _merge(state, at)


def _merge(state: _State, at: slice) -> None:
    """Merge the collected candidates into the lists of a tile."""
    waiting, state.waiting[at.start] = state.waiting[at.start], []
    height, depth = at.stop - at.start, state.keys.shape[1]
    filled = torch.zeros(height, dtype=torch.int64)
    places = []
    for row, _ in waiting:
        counts = torch.bincount(row, minlength=height)
        # Candidates of a row stand together: their places count up from what is filled.
        starts = filled - (counts.cumsum(0) - counts)
        places.append(torch.arange(len(row)) + starts[row])
        filled += counts
    widest = int(filled.max())
    if widest == 0:
        return
    rivals = torch.full((height, depth + widest), WORST_KEY)
    rivals[:, :depth] = state.keys[at]
    for (row, keys), place in zip(waiting, places, strict=True):
        rivals.view(-1)[row * rivals.shape[1] + depth + place] = keys
    kept = rivals.topk(depth, dim=1, sorted=False).values
    worst = kept.amin(1)
    state.keys[at] = kept
    # Padding has no list to enter and keeps its infinite floor.
    floor = state.floor[at]
    state.floor[at] = torch.where(floor == torch.inf, floor, from_keys(worst)[0])
    _note_losses(state, at, rivals, worst)


def _note_losses(state: _State, at: slice, rivals: Tensor, worst: Tensor) -> None:
    """Where a best positive has just been pushed out: all that came before it is among rivals."""
    best_keys = to_keys(state.best[at], state.place[at])
    pushed = ((best_keys < worst) & ~state.lost[at]).nonzero()[:, 0]
    if len(pushed):
        state.nearer[at][pushed] = (rivals[pushed] > best_keys[pushed, None]).sum(1)
        state.lost[at][pushed] = True
