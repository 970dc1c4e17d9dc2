"""Exact search through vectors on disk, and the similarities of candidates.

A float32 product finds candidates; their similarities are then computed in float64, each by
itself, so that they do not depend on what else is searched for or where a row stands. The float64
values decide the order, equal ones by place. The bound on the error of the product says whether
any other row could still belong in a list.

A similarity is the inner product of vectors that have unit length, or the negative squared
Euclidean distance. Places of rows are counted through all segments; no place is −1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.errors import Progress, UsageError, spaced
from proximetry._util.tensors import chunks
from proximetry.metrics._search.copies import connected_components
from proximetry.metrics._search.inputs import IntArray, full_precision
from proximetry.models.names import Similarity

FloatArray = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Similarities that are held at once: 64 MB of float32.
_ENTRIES = 1 << 24
_QUERIES = 1024
# Entries whose maximum is taken before the best of them are looked for.
_GROUP = 32
# Candidates beyond k, so that a second pass is rarely needed.
SPARE = 16
# Values of vectors that are gathered at once: 2 MB of float64, which stay in the cache.
_GATHERED = 1 << 18
_TILE = 4096
_MOST_PAIRS = 10_000_000


class Part(NamedTuple):
    """Rows that are searched together, of one segment.

    Attributes:
        vectors: of the whole segment [n, dim], float32.
        squares: the squared length of each, for Euclidean distances.
        start: the place of the first row of the segment.
        rows: the rows to search, if not all.
        allowed: a mask of the rows to search, if not all: faster than `rows` where most are.
    """

    vectors: FloatArray
    squares: FloatArray | None
    start: int
    rows: IntArray | None = None
    allowed: Mask | None = None

    @property
    def scanned(self) -> int:
        """The number of rows that a search reads."""
        return len(self.vectors) if self.rows is None else len(self.rows)

    def places(self, found: IntArray) -> IntArray:
        """The places of rows of this part."""
        return self.start + (found if self.rows is None else self.rows[found])


class Found(NamedTuple):
    """Places [queries, k], nearest first, and similarities; −1 and −inf where there are fewer."""

    places: IntArray
    scores: Scores

    def top(self, k: int) -> Found:
        """The nearest of them, in the order (similarity falling, place rising)."""
        order = np.lexsort((self.places, -self.scores))[:, :k]
        rows = np.arange(len(order))[:, None]
        return Found(self.places[rows, order], self.scores[rows, order])


def join(found: Sequence[Found], k: int) -> Found:
    """The k nearest of what several searches have found, in different places."""
    width = sum(one.places.shape[1] for one in found)
    shape = len(found[0].places), max(k, width)
    places, scores = np.full(shape, -1, np.int64), np.full(shape, -np.inf)
    start = 0
    for one in found:
        end = start + one.places.shape[1]
        places[:, start:end], scores[:, start:end] = one
        start = end
    return Found(places, scores).top(k)


@dataclass(frozen=True)
class Store:
    """The vectors of all segments, by place.

    Attributes:
        vectors: of each segment [rows, dim], float32, memory-mapped.
        starts: the place of the first row of each segment, and the number of all rows.
        similarity: "cosine", with vectors of unit length, or "euclidean".
        longest: no vector is longer.
    """

    vectors: Sequence[FloatArray]
    starts: IntArray
    similarity: Similarity
    longest: float

    def take(self, places: IntArray) -> FloatArray:
        """The vectors at places, [n, dim]."""
        if len(self.vectors) == 1:
            return self.vectors[0][places]
        found = np.empty((len(places), self.vectors[0].shape[1]), np.float32)
        segment = np.searchsorted(self.starts, places, "right") - 1
        for number in np.unique(segment):
            chosen = segment == number
            found[chosen] = self.vectors[number][places[chosen] - self.starts[number]]
        return found

    def scores(self, queries: FloatArray, places: IntArray) -> Scores:
        """The similarity of each query to the rows at its places, [queries, n]."""
        scores = np.full(places.shape, -np.inf)
        if not (places >= 0).any():
            return scores
        for part in chunks(len(places), max(1, _GATHERED // (places.shape[1] * queries.shape[1]))):
            wanted = np.maximum(places[part], 0)
            rows = self.take(wanted.ravel()).reshape(*wanted.shape, -1).astype(np.float64)
            near = similarities(queries[part, None].astype(np.float64), rows, self.similarity)
            scores[part] = np.where(places[part] >= 0, near, -np.inf)
        return scores

    def settle(self, queries: FloatArray, places: IntArray, k: int) -> Found:
        """The k nearest of candidates, which may stand in a list twice only if they are −1."""
        return join([Found(places, self.scores(queries, places))], k)

    def bounds(self, queries: FloatArray) -> npt.NDArray[np.float64]:
        """How far a float32 product can be from the similarity of each query."""
        lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
        size = lengths * self.longest
        if self.similarity == "euclidean":
            size = (lengths + self.longest) ** 2
        dim = queries.shape[1]
        # The last term is for products that are too small for float32.
        return np.asarray((dim + 8) * 2.0**-24 * size + dim * 2.0**-140)

    def shifts(self, queries: FloatArray) -> npt.NDArray[np.float64]:
        """What a product is larger by than the similarity it stands for."""
        if self.similarity == "cosine":
            return np.zeros(len(queries))
        return np.asarray(np.square(queries.astype(np.float64)).sum(1))

    def search(self, parts: Sequence[Part], queries: FloatArray, k: int) -> Found:
        """The k nearest rows of these parts, exactly."""
        found = [self._search(parts, queries[block], k) for block in chunks(len(queries), _QUERIES)]
        if not found:
            return Found(np.empty((0, k), np.int64), np.empty((0, k)))
        return Found(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def _search(self, parts: Sequence[Part], queries: FloatArray, k: int) -> Found:
        with full_precision(torch.device("cpu")):
            wanted = k + SPARE
            places, products = _candidates(parts, queries, self.similarity, wanted)
            found = self.settle(queries, places, k)
            if places.shape[1] < wanted:  # which is all there is
                return found
            # Nothing outside the candidates has a larger product than the least of them.
            sure = found.scores[:, -1] + self.shifts(queries) - self.bounds(queries)
            for query in np.flatnonzero(~(sure > products) & (products > -np.inf)):
                row = slice(query, query + 1)
                again = self._search_again(parts, queries[row], float(sure[query]), k)
                found.places[row], found.scores[row] = again.places, again.scores
        return found

    def _search_again(
        self, parts: Sequence[Part], query: FloatArray, least: float, k: int
    ) -> Found:
        """The k nearest of all rows whose product is not below the least that can matter."""
        found = Found(np.empty((1, 0), np.int64), np.empty((1, 0)))
        for part, rows, products in _products(parts, query, self.similarity):
            near = (products[0] >= least).nonzero()[:, 0].numpy()
            for some in chunks(len(near), _TILE):
                places = part.places(near[some] + rows.start)[None]
                found = join([found, Found(places, self.scores(query, places))], k)
        return join([found], k)


def similarities(queries: Scores, rows: Scores, similarity: Similarity) -> Scores:
    """Similarities of [n, 1, dim] to [n, m, dim] as [n, m]; equal rows have equal ones."""
    if similarity == "cosine":
        # einsum without a BLAS adds up every row in the same order.
        return np.asarray(np.einsum("nmd,nd->nm", rows, queries[:, 0]))
    rows = rows - queries
    return np.asarray(-np.einsum("nmd,nmd->nm", rows, rows))


def _products(
    parts: Sequence[Part], queries: FloatArray, similarity: Similarity
) -> Iterator[tuple[Part, slice, Tensor]]:
    """The products of all queries with some rows after others, −inf where not allowed."""
    factor = 1.0 if similarity == "cosine" else 2.0
    asked = torch.from_numpy(factor * queries)
    for part in parts:
        held = len(queries) if part.rows is None else max(len(queries), part.vectors.shape[1])
        size = max(_GROUP, _ENTRIES // max(1, held) // _GROUP * _GROUP)
        for rows in chunks(part.scanned, size):
            chosen: Any = rows if part.rows is None else part.rows[rows]
            products = asked @ torch.from_numpy(part.vectors[chosen]).T
            if part.squares is not None:
                products -= torch.from_numpy(part.squares[chosen])
            if part.allowed is not None:
                forbidden = ~part.allowed[rows]
                products.masked_fill_(torch.from_numpy(forbidden), -torch.inf)
            yield part, rows, products


def _candidates(
    parts: Sequence[Part], queries: FloatArray, similarity: Similarity, count: int
) -> tuple[IntArray, FloatArray]:
    """Places of the largest products, fewer than `count` if there are no more, and the least."""
    values = torch.empty((len(queries), 0))
    places = torch.empty((len(queries), 0), dtype=torch.int64)
    for part, rows, products in _products(parts, queries, similarity):
        best, columns = _largest(products, count)
        found = torch.from_numpy(part.places((columns + rows.start).numpy()))
        values, places = torch.cat([values, best], 1), torch.cat([places, found], 1)
        values, chosen = values.topk(min(count, values.shape[1]), 1, sorted=False)
        places = places.gather(1, chosen)
    places = places.masked_fill(values == -torch.inf, -1)
    least = values.amin(1) if values.shape[1] else torch.full((len(queries),), -torch.inf)
    return places.numpy(), least.numpy()


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest entries of each row, in no order, and their columns.

    Each of them lies in one of the `count` groups that have the largest maxima.
    """
    rows, width = values.shape
    groups = width // _GROUP
    if groups < 4 * count:
        found = values.topk(min(count, width), 1, sorted=False)
        return found.values, found.indices
    # Group g holds the columns g, g + groups, …: maxima of whole rows are quick to take.
    body = values[:, : groups * _GROUP].reshape(rows, _GROUP, groups)
    maxima = body.amax(1)
    best = maxima.topk(count, 1, sorted=False).indices
    inside = torch.arange(_GROUP)[:, None] * groups + best[:, None]
    rest = torch.arange(groups * _GROUP, width).expand(rows, -1)
    columns = torch.cat([inside.flatten(1), rest], 1)
    found = values.gather(1, columns).topk(count, 1, sorted=False)
    return found.values, columns.gather(1, found.indices)


@dataclass(frozen=True)
class Duplicates:
    """Images that are alike.

    Attributes:
        pairs: ids of two images each, the smaller one first, most alike first, [n, 2].
        similarities: of each pair: the cosine, or the negative Euclidean distance.
        groups: ids of images that pairs lead to from one to the other, the largest group first.
        paths: the file of each image in a group, by its id.
        threshold: the cosine or Euclidean distance from which on images are alike.
        chosen: how the threshold was chosen, "" for one that was given.
    """

    pairs: IntArray
    similarities: FloatArray
    groups: list[IntArray]
    paths: dict[int, str]
    threshold: float
    chosen: str = ""


def similar_pairs(
    store: Store, parts: Sequence[Part], least: float, progress: Progress | None
) -> tuple[IntArray, Scores]:
    """Every pair of places, smaller one first, that is at least so similar, exactly."""
    tiles = [(part, rows) for part in parts for rows in chunks(len(part.vectors), _TILE)]
    pairs: list[IntArray] = [np.empty((0, 2), np.int64)]
    scores: list[Scores] = [np.empty(0)]
    count, done, total = 0, 0, len(tiles) * (len(tiles) + 1) // 2
    with full_precision(torch.device("cpu")):
        for number, (part, rows) in enumerate(tiles):
            here = part.vectors[rows]
            # The bound of the longest query holds for all.
            limits = least + store.shifts(here) - store.bounds(here).max(initial=0)
            limits = torch.from_numpy(limits.astype(np.float32))[:, None]
            for other, columns in tiles[number:]:
                piece = _slice(other, columns)
                ((_, _, products),) = _products([piece], here, store.similarity)
                near = products >= limits
                if part.allowed is not None:
                    near &= torch.from_numpy(part.allowed[rows])[:, None]
                if other is part and columns == rows:
                    near = near.triu(1)
                first, second = (each.numpy() for each in near.nonzero(as_tuple=True))
                check_pairs(count + len(first))
                found = np.stack(
                    [part.places(first + rows.start), other.places(second + columns.start)], 1
                )
                near_by = store.scores(here[first], found[:, 1:])[:, 0]
                found = found[near_by >= least]
                pairs.append(found)
                scores.append(near_by[near_by >= least])
                count += len(found)
                done += 1
                if progress is not None:
                    progress(done, total)
    return np.concatenate(pairs), np.concatenate(scores)


def _slice(part: Part, rows: slice) -> Part:
    return part._replace(
        vectors=part.vectors[rows],
        squares=None if part.squares is None else part.squares[rows],
        allowed=None if part.allowed is None else part.allowed[rows],
    )


def check_pairs(count: int) -> None:
    """Refuse a threshold that nearly everything meets."""
    if count > _MOST_PAIRS:
        raise UsageError(
            f"more than {spaced(_MOST_PAIRS)} pairs of images are that similar; "
            "give a stricter threshold"
        )


def group_pairs(pairs: IntArray) -> list[IntArray]:
    """What the pairs lead to from one to the other, the largest group first."""
    members, ends = np.unique(pairs, return_inverse=True)
    one, two = torch.from_numpy(ends.reshape(-1, 2).astype(np.int64)).T
    roots: Any = connected_components(len(members), one, two).numpy()
    order = np.argsort(roots, kind="stable")
    edges = np.flatnonzero(np.diff(roots[order])) + 1
    groups = [group for group in np.split(members[order], edges) if len(group)]
    return sorted(groups, key=lambda group: (-len(group), int(group[0])))
