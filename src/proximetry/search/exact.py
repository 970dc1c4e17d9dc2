"""Exact search over memory-mapped vectors, and float64 scores of candidates.

A float32 product selects candidates, which are then scored in float64 one by one: a score depends
neither on the other queries nor on the position of a row. A bound on the error of the product
shows whether another row could belong to the result. Top-k and tie order are those of
`metrics._search.neighbors`.

A score is the dot product of unit vectors, or the negative squared Euclidean distance. Positions
count rows over all segments; −1 means none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray
from proximetry.metrics._search.neighbors import largest, nearest
from proximetry.metrics._search.similarities import full_precision
from proximetry.models.constants import Similarity

FloatArray = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

SPARE = 16  # candidates beyond k, so that a second pass is rarely needed
_MAX_PRODUCTS = 1 << 24  # in memory at a time: 64 MB of float32
_QUERY_BATCH = 1024
_MAX_GATHERED_VALUES = 1 << 18  # of vectors at a time: 2 MB of float64, which fit in the cache
_CANDIDATE_BATCH = 4096  # candidates of a second pass that are scored at a time


class Part(NamedTuple):
    """The searched rows of one segment: all of them, `rows`, or those of the mask `allowed`."""

    vectors: FloatArray  # of the whole segment [n, dim], float32
    squares: FloatArray | None  # the squared length of each, for Euclidean distances
    start: int  # the position of the first row of the segment
    rows: IntArray | None = None
    allowed: Mask | None = None

    def products(self, queries: FloatArray) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the scanned rows and their products with the queries, −inf if masked."""
        scaled = torch.from_numpy(queries if self.squares is None else 2 * queries)
        width = len(queries) if self.rows is None else max(len(queries), self.vectors.shape[1])
        count = len(self.vectors) if self.rows is None else len(self.rows)
        for scanned in chunks(count, max(1, _MAX_PRODUCTS // max(1, width))):
            selection: Any = scanned if self.rows is None else self.rows[scanned]
            products = scaled @ torch.from_numpy(self.vectors[selection]).T
            if self.squares is not None:
                products -= torch.from_numpy(self.squares[selection])
            if self.allowed is not None:
                products.masked_fill_(torch.from_numpy(~self.allowed[scanned]), -torch.inf)
            yield scanned, products

    def positions(self, scanned: IntArray) -> IntArray:
        """Return the positions of scanned rows."""
        return self.start + (scanned if self.rows is None else self.rows[scanned])


class Hits(NamedTuple):
    """Positions [queries, k], nearest first, and scores; −1 and −inf if there are fewer."""

    positions: IntArray
    scores: Scores


def merge_hits(hits: Sequence[Hits], k: int) -> Hits:
    """Return the k nearest of several searches: descending score, then ascending position."""
    missing = max(0, k - sum(part.positions.shape[1] for part in hits))
    shape = len(hits[0].positions), missing
    padding = Hits(np.full(shape, -1, np.int64), np.full(shape, -np.inf))
    positions, scores = (np.concatenate(arrays, 1) for arrays in zip(*hits, padding, strict=True))
    order = positions.argsort(1)  # `nearest` breaks ties by column
    positions, scores = (np.take_along_axis(array, order, 1) for array in (positions, scores))
    values, columns = nearest(torch.from_numpy(scores), k)
    return Hits(np.take_along_axis(positions, columns.numpy(), 1), values.numpy())


def take(arrays: Sequence[FloatArray], starts: IntArray, positions: IntArray) -> FloatArray:
    """Return the rows at positions over several arrays whose first rows are at `starts`."""
    if len(arrays) == 1:
        return arrays[0][positions]
    vectors = np.empty((len(positions), arrays[0].shape[1]), np.float32)
    owners = np.searchsorted(starts, positions, "right") - 1
    for number in np.unique(owners):
        mask = owners == number
        vectors[mask] = arrays[number][positions[mask] - starts[number]]
    return vectors


@dataclass(frozen=True)
class Store:
    """The vectors of all segments, by position."""

    vectors: Sequence[FloatArray]  # of each segment [rows, dim], float32, memory-mapped
    starts: IntArray  # the position of the first row of each segment, and the number of all rows
    similarity: Similarity  # "cosine", with vectors of unit length, or "euclidean"
    longest: float  # the length of the longest vector

    def scores(self, queries: FloatArray, positions: IntArray) -> Scores:
        """Return the scores of each query with the rows at its positions, [queries, n]."""
        scores = np.full(positions.shape, -np.inf)
        if not (positions >= 0).any():
            return scores
        size = max(1, _MAX_GATHERED_VALUES // (positions.shape[1] * queries.shape[1]))
        for part in chunks(len(positions), size):
            valid = positions[part] >= 0
            rows = take(self.vectors, self.starts, np.where(valid, positions[part], 0).ravel())
            vectors = rows.reshape(*valid.shape, -1)
            part_scores = exact_scores(queries[part], vectors, self.similarity)
            scores[part] = np.where(valid, part_scores, -np.inf)
        return scores

    def rescore(self, queries: FloatArray, positions: IntArray, k: int) -> Hits:
        """Return the k nearest of candidates, which are distinct or −1."""
        return merge_hits([Hits(positions, self.scores(queries, positions))], k)

    def bounds(self, queries: FloatArray) -> Scores:
        """Return the largest error of a float32 product of each query."""
        lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
        longest = self.longest * (1 + 1e-6)  # it may be rounded down
        size = lengths * longest
        if self.similarity == "euclidean":
            size = (lengths + longest) ** 2
        dim = queries.shape[1]
        # The last term is for products that underflow.
        return np.asarray((dim + 8) * 2.0**-24 * size + dim * 2.0**-140)

    def shifts(self, queries: FloatArray) -> Scores:
        """Return product − score of each query."""
        if self.similarity == "cosine":
            return np.zeros(len(queries))
        return np.asarray(np.square(queries.astype(np.float64)).sum(1))

    def search(self, parts: Sequence[Part], queries: FloatArray, k: int) -> Hits:
        """Return the k nearest rows of these parts, exactly."""
        if not len(queries):
            return Hits(np.empty((0, k), np.int64), np.empty((0, k)))
        with full_precision(torch.device("cpu")):
            blocks = chunks(len(queries), _QUERY_BATCH)
            hits = [self._search(parts, queries[block], k) for block in blocks]
        return Hits(*map(np.concatenate, zip(*hits, strict=True)))

    def _search(self, parts: Sequence[Part], queries: FloatArray, k: int) -> Hits:
        values = torch.empty((len(queries), 0))
        positions = torch.empty((len(queries), 0), dtype=torch.int64)
        for part in parts:
            for scanned, products in part.products(queries):
                new_values, columns = largest(products, k + SPARE)
                rows = (columns + scanned.start).numpy()
                new_positions = torch.from_numpy(part.positions(rows))
                values, columns = largest(torch.cat([values, new_values], 1), k + SPARE)
                positions = torch.cat([positions, new_positions], 1).gather(1, columns)
        candidates = positions.masked_fill(values == -torch.inf, -1).numpy()
        hits = self.rescore(queries, candidates, k)
        if values.shape[1] < k + SPARE:  # all rows are candidates
            return hits
        # No other row has a larger product than the last candidate.
        last = values[:, -1].numpy()
        limits = hits.scores[:, -1] + self.shifts(queries) - self.bounds(queries)
        for query in np.flatnonzero(~(limits > last) & (last > -np.inf)):
            row = slice(query, query + 1)
            second = self._search_above(parts, queries[row], float(limits[query]), k)
            hits.positions[row], hits.scores[row] = second
        return hits

    def _search_above(self, parts: Sequence[Part], query: FloatArray, limit: float, k: int) -> Hits:
        """Return the k nearest of all rows whose product is at least a limit."""
        hits = [Hits(np.empty((1, 0), np.int64), np.empty((1, 0)))]
        for part in parts:
            for scanned, products in part.products(query):
                rows = (products[0] >= limit).nonzero()[:, 0].numpy() + scanned.start
                for chunk in chunks(len(rows), _CANDIDATE_BATCH):
                    positions = part.positions(rows[chunk])[None]
                    hits.append(Hits(positions, self.scores(query, positions)))
                    hits = [merge_hits(hits, k)]
        return merge_hits(hits, k)


def exact_scores(queries: FloatArray, rows: FloatArray, similarity: Similarity) -> Scores:
    """Return float64 scores of queries [n, dim] with rows [n, m, dim]; equal rows tie."""
    rows_64, queries_64 = rows.astype(np.float64), queries.astype(np.float64)
    if similarity == "cosine":
        # einsum without BLAS sums every row in the same order.
        return np.asarray(np.einsum("nmd,nd->nm", rows_64, queries_64))
    rows_64 -= queries_64[:, None]
    return np.asarray(-np.einsum("nmd,nmd->nm", rows_64, rows_64))


def as_similarities(scores: Scores, similarity: Similarity) -> FloatArray:
    """Convert scores to the similarities of results: cosines up to 1, or negative distances."""
    similarities = scores.clip(-1, 1) if similarity == "cosine" else -np.sqrt(-scores)
    return np.where(scores == -np.inf, scores, similarities).astype(np.float32)
