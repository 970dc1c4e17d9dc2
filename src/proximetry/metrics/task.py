"""A search, checked and ready to run: vectors on one device, labels and groups as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from proximetry.metrics.copies import connected_components, find_copies
from proximetry.metrics.inputs import (
    Embeddings,
    Labels,
    Similarity,
    as_labels,
    as_vectors,
    bounds_of_lengths,
    encode,
    fit_float32,
    middle,
    move,
    normalize,
    power_of_two,
)


@dataclass(frozen=True)
class Items:
    """A gallery or queries as handed over by the caller, checked."""

    vectors: Tensor
    labels: npt.NDArray[Any]
    groups: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.vectors)


@dataclass(frozen=True)
class Task:
    """Queries and a gallery. All tensors live on one device.

    ``own`` holds each query's own place in the gallery, which is left out by index; queries and
    gallery items with equal group are left out too. Codes number the labels, ``classes``.
    """

    queries: Tensor
    gallery: Tensor
    query_codes: Tensor
    gallery_codes: Tensor
    classes: npt.NDArray[Any]
    similarity: Similarity
    own: Tensor | None = None
    query_groups: Tensor | None = None
    gallery_groups: Tensor | None = None

    @property
    def is_self_search(self) -> bool:
        """Whether every item is a query against all others, in order."""
        return self.own is not None and self.queries is self.gallery

    @cached_property
    def copies(self) -> tuple[Tensor, Tensor]:
        """Gallery items whose vector stands earlier in the gallery too, and where it is first.

        The rounding of a product depends on its place in the matrix. So that copies are equally
        near, all take the similarity of the first. Hamming distances are exact as they are.
        """
        if self.similarity == "hamming":
            return (self.gallery_codes[:0],) * 2
        return find_copies(self.gallery)

    @cached_property
    def components(self) -> Tensor:
        """A number for each gallery item, the same for items of one class and for copies."""
        later, first = self.copies
        codes = self.gallery_codes
        return connected_components(len(self.classes), codes[later], codes[first])[codes]

    def only(self, rows: slice, queries: Tensor) -> Task:
        """The same for some of the queries, whose vectors are given."""
        return replace(
            self,
            queries=queries,
            query_codes=self.query_codes[rows],
            own=None if self.own is None else self.own[rows],
            query_groups=None if self.query_groups is None else self.query_groups[rows],
        )

    def positives(self) -> Tensor:
        """How many gallery items of its class each query may find."""
        found = torch.bincount(self.gallery_codes, minlength=len(self.classes))[self.query_codes]
        if self.query_groups is None or self.gallery_groups is None:
            return found if self.own is None else found - 1
        # What shares class and group is left out, a query's own entry among it.
        groups = 1 + int(torch.cat([self.query_groups, self.gallery_groups]).amax())
        wanted = self.query_codes * groups + self.query_groups
        held = (self.gallery_codes * groups + self.gallery_groups).sort().values
        return found - (
            torch.searchsorted(held, wanted, right=True) - torch.searchsorted(held, wanted)
        )


Given = tuple[Embeddings | None, Labels | None, Labels | None]
"""Vectors, their labels, and the groups that are not to meet."""


def check(
    similarity: Similarity,
    gallery: Given,
    queries: Given,
    *,
    allow_empty: bool = False,
    allow_unlabeled: bool = False,
) -> tuple[Items, Items | None]:
    """Refuse what does not fit together; ``allow_empty`` is for a process with no share."""

    def items(given: Given, names: tuple[str, str, str]) -> Items:
        vectors = as_vectors(given[0], similarity, names[0], allow_empty=allow_empty)
        # Without labels every item counts as a class of its own.
        unlabeled = given[1] is None and allow_unlabeled
        return Items(
            vectors,
            as_labels(range(len(vectors)) if unlabeled else given[1], len(vectors), names[1]),
            None if given[2] is None else as_labels(given[2], len(vectors), names[2]),
        )

    held = items(gallery, ("embeddings", "labels", "ignore_groups"))
    names = ("queries", "query_labels", "query_ignore_groups")
    if queries[0] is None:
        for name, value in zip(names, queries, strict=True):
            if value is not None:
                raise ValueError(f"{name} is given but queries is not; give both or neither")
        return held, None
    for place, pair in (
        (1, "labels and query_labels"),
        (2, "ignore_groups and query_ignore_groups"),
    ):
        if (gallery[place] is None) != (queries[place] is None):
            raise ValueError(f"give {pair} together, or neither")
    asked = items(queries, names)
    _check_alike(held.vectors, asked.vectors)
    return held, asked


def _check_alike(gallery: Tensor, queries: Tensor) -> None:
    if gallery.shape[1] != queries.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} dimensions and embeddings {gallery.shape[1]}; "
            "they must come from one model"
        )
    if gallery.device != queries.device:
        raise ValueError(
            f"queries are on {queries.device} and embeddings on {gallery.device}; "
            "move them to one device"
        )
    if gallery.dtype != queries.dtype:
        raise ValueError(
            f"queries are {queries.dtype} and embeddings {gallery.dtype}; use one type for both"
        )


def build(
    gallery: Items,
    queries: Items | None,
    similarity: Similarity,
    *,
    on_any: Callable[[bool], bool] = bool,
) -> Task:
    """The search of every query in the whole gallery; without queries, of every item.

    ``on_any`` says whether something is true on any process, where the queries are spread.
    """
    device = gallery.vectors.device
    sets = [gallery] if queries is None else [gallery, queries]
    unit = 1.0
    if similarity == "euclidean":
        sets, unit = _around_origin(sets)
    if similarity in ("dot", "euclidean") and on_any(_needs_float64(sets, unit)):
        sets = [replace(items, vectors=items.vectors.double()) for items in sets]
    numbers, classes = encode(*(items.labels for items in sets))
    codes = [torch.from_numpy(part).to(device) for part in numbers]
    task = Task(sets[-1].vectors, sets[0].vectors, codes[-1], codes[0], classes, similarity)
    if queries is None:
        task = replace(task, own=torch.arange(len(gallery), device=device))
    named = [items.groups for items in sets if items.groups is not None]
    if named:
        groups = [torch.from_numpy(part).to(device) for part in encode(*named)[0]]
        task = replace(task, query_groups=groups[-1], gallery_groups=groups[0])
    return task


def _around_origin(sets: list[Items]) -> tuple[list[Items], float]:
    """Gallery and queries moved and scaled alike, and the unit: no digits lost to an offset.

    The origin is that of the gallery, which all processes know; a unit rounds nothing, so it may
    differ between them.
    """
    origin = middle(sets[0].vectors)
    ends = [torch.stack(items.vectors.aminmax()).abs().max() for items in sets if len(items)]
    unit = power_of_two(float(max(ends)))
    return [replace(items, vectors=move(items.vectors, origin, unit)) for items in sets], unit


def _needs_float64(sets: list[Items], unit: float) -> bool:
    """Whether products of these vectors, or distances in this unit, leave the range of float32."""
    found = [bounds_of_lengths(items.vectors) for items in sets if len(items)]
    shortest, longest = min(low for low, _ in found), max(high for _, high in found)
    return not fit_float32(shortest, longest) or 4 * longest * unit > torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Block:
    """Answers for some queries: neighbours in order, and the place of the best positive.

    ``ids`` is −1 and ``similarities`` −inf where fewer items than asked for may be returned. For
    "euclidean" these are negative squared distances, in the units of the task.
    ``ranks`` counts from 1, and is 0 for queries that have no positive.
    """

    rows: Tensor
    ids: Tensor
    similarities: Tensor
    ranks: Tensor | None


def project(queries: Tensor, gallery: Tensor, similarity: Similarity) -> tuple[Tensor, Tensor]:
    """Queries and gallery items such that their dot products are the similarities."""
    if similarity == "dot":
        return queries, gallery
    if similarity == "cosine":
        items = normalize(gallery)
        return items if queries is gallery else normalize(queries), items
    if similarity == "euclidean":
        # −|q − g|² = 2 q·g − |q|² − |g|²
        asked, held = (of.square().sum(1, keepdim=True) for of in (queries, gallery))
        return (
            torch.cat([2 * queries, asked, torch.ones_like(asked)], dim=1),
            torch.cat([gallery, -torch.ones_like(held), -held], dim=1),
        )
    # Signs s of b bits: −(number of different bits) = (s·s′ − b) / 2, exact in float32.
    bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=gallery.device)
    left, right = (
        (of[:, :, None] >> bits & 1).flatten(1).to(torch.float32).mul_(2).sub_(1)
        for of in (queries, gallery)
    )
    ones, half = torch.ones_like(left[:, :1]), torch.full_like(right[:, :1], right.shape[1] / 2)
    return torch.cat([left, ones], dim=1), torch.cat([right.mul_(0.5), -half], dim=1)


def settle(
    values: Tensor, similarity: Similarity, copies: Mapping[int, tuple[Tensor, Tensor]]
) -> None:
    """Take away what rounding did: cosines beyond ±1, and copies that are not equally near.

    ``copies`` are those along each dimension, as in ``Task.copies``.
    """
    if similarity == "cosine":
        values.clamp_(-1, 1)
    for dim, (later, first) in copies.items():
        if len(later):
            values.index_copy_(dim, later, values.index_select(dim, first))


def to_keys(similarities: Tensor, ids: Tensor) -> Tensor:
    """Whole numbers in the order of float32 similarities, equal ones by smaller index first."""
    bits = (similarities + 0.0).view(torch.int32)  # adding 0 makes −0 equal to 0
    # The bits of a negative float count backwards.
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(torch.int64) << 32) + (0x7FFFFFFF - ids)


def from_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The similarities and indices that `to_keys` was given."""
    bits = (keys >> 32).to(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0x7FFFFFFF - (keys & 0xFFFFFFFF)
