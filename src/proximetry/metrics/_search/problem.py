"""A validated search: vectors on one device, classes and groups as integers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.tensors import chunks
from proximetry._util.types import Similarity
from proximetry.metrics._search.similarities import ROWS, sampled_median
from proximetry.metrics._search.validation import Items, encode


@dataclass(frozen=True)
class SearchProblem:
    """Queries and a gallery, on one device.

    Codes index ``classes``, the labels. Gallery items of a query's group are excluded. Without
    groups, ``self_index`` is the gallery row of each query itself, which is excluded.
    """

    queries: Tensor
    gallery: Tensor
    query_codes: Tensor
    gallery_codes: Tensor
    classes: npt.NDArray[Any]
    similarity: Similarity
    self_index: Tensor | None = None
    groups: tuple[Tensor, Tensor] | None = None  # of the queries and of the gallery

    @cached_property
    def duplicates(self) -> tuple[Tensor, Tensor]:
        """Gallery items equal to an earlier item, and the first item equal to each.

        The rounding of a product depends on its position in the matrix. Duplicates take the
        similarity of the first, so that they tie.
        """
        return find_duplicates(self.gallery)

    @cached_property
    def components(self) -> Tensor:
        """Connected components of the gallery: items of one class and duplicates are connected."""
        later, first = self.duplicates
        codes = self.gallery_codes
        return connected_components(len(self.classes), codes[later], codes[first])[codes]

    def hits(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return which of the neighbors ``ids`` of the queries ``rows`` are of their class."""
        same = self.gallery_codes[ids.clamp_min(0)] == self.query_codes[rows, None]
        return same & (ids >= 0)

    def positives(self) -> Tensor:
        """Return the number of gallery items of each query's class that are not excluded."""
        sizes = torch.bincount(self.gallery_codes, minlength=len(self.classes))[self.query_codes]
        if self.groups is None:
            return sizes if self.self_index is None else sizes - 1
        # Items of the same class and group are excluded, the query itself among them.
        count = 1 + max(int(groups.max()) for groups in self.groups if len(groups))
        queries = self.query_codes * count + self.groups[0]
        gallery = (self.gallery_codes * count + self.groups[1]).sort().values
        first, end = (torch.searchsorted(gallery, queries, right=right) for right in (False, True))
        return sizes - (end - first)


def find_duplicates(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows equal to an earlier one, in ascending order, and the first row equal to each.

    Rows are compared by a 64-bit hash, and those of equal hash entry by entry.
    """
    parts = [_hash(matrix[part]) for part in chunks(len(matrix), ROWS)]
    runs = torch.unique(torch.cat(parts), return_inverse=True)[1]
    rows = torch.arange(len(matrix), device=matrix.device)
    first = torch.full_like(rows, len(matrix)).scatter_reduce(0, runs, rows, "amin")[runs]
    later = (first != rows).nonzero()[:, 0]
    first = first[later]
    equal = torch.ones_like(later, dtype=torch.bool)
    for part in chunks(len(later), ROWS):
        equal[part] = (matrix[later[part]] == matrix[first[part]]).all(1)
    return later[equal], first[equal]


def _hash(rows: Tensor) -> Tensor:
    """Return a 64-bit integer for each row."""
    if rows.is_floating_point():
        rows = (rows + 0.0).view(torch.int32)  # adding 0 makes −0 equal to 0
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, rows.shape[1:], generator=generator, device="cpu")
    return (rows.long() * factors.to(rows.device)).sum(1)


def connected_components(count: int, left: Tensor, right: Tensor) -> Tensor:
    """Return the smallest node connected to each of ``count`` nodes by edges left[i] – right[i]."""
    components = torch.arange(count, device=left.device)
    while True:
        smallest = torch.minimum(components[left], components[right])
        merged = components.scatter_reduce(0, left, smallest, "amin")
        merged = merged.scatter_reduce(0, right, smallest, "amin")
        merged = merged[merged]
        if torch.equal(merged, components):
            return components
        components = merged


NEVER = torch.iinfo(torch.int64).max


def first_hits(hits: Tensor) -> Tensor:
    """Return the rank of the first hit of each list, `NEVER` without one."""
    return torch.where(hits.any(1), hits.to(torch.int8).argmax(1) + 1, NEVER)


def build_problem(
    sets: list[Items], similarity: Similarity, share: slice = slice(None)
) -> SearchProblem:
    """Return the search of every query in the gallery; without queries, of every gallery item.

    ``share`` are the queries of this process, whose vectors are in the second set.
    """
    device = sets[0].vectors.device
    vectors = [items.vectors for items in sets]
    if similarity == "euclidean":
        # A large offset would lose precision. The gallery and its origin are the same everywhere.
        origin = sampled_median(vectors[0])
        vectors = [rows - origin for rows in vectors]
    numbers, classes = encode(*(items.labels for items in sets))
    codes = [torch.from_numpy(part).to(device) for part in numbers]
    problem = SearchProblem(
        vectors[-1], vectors[0], codes[-1][share], codes[0], classes, similarity
    )
    if len(sets) == 1:
        self_index = torch.arange(len(sets[0]), device=device)[share]
        # Without other processes the queries are the gallery.
        queries = problem.gallery if share == slice(None) else problem.gallery[share]
        problem = replace(problem, queries=queries, self_index=self_index)
    set_groups = [items.groups for items in sets if items.groups is not None]
    if set_groups:
        groups = [torch.from_numpy(part).to(device) for part in encode(*set_groups)[0]]
        problem = replace(problem, groups=(groups[-1][share], groups[0]))
    return problem


@dataclass(frozen=True)
class Block:
    """Results of some queries: neighbors in order, and the rank of the first positive.

    Missing neighbors have id −1 and similarity −inf. For "euclidean", similarities are negative
    squared distances. Ranks start at 1; `NEVER` is none.
    """

    rows: Tensor
    ids: Tensor
    similarities: Tensor
    ranks: Tensor | None
