"""From what a caller hands over to a checked task, and from a task to the fastest exact way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from proximetry.metrics.arrays import Embeddings, IntArray, Labels, as_labels, encode
from proximetry.metrics.neighbours import Block, Metric, Progress, Task, as_vectors, search
from proximetry.metrics.symmetric import applies, search_symmetric


@dataclass(frozen=True)
class Inputs:
    """What a caller handed over, checked: vectors on one device, labels and groups as arrays."""

    gallery: Tensor
    labels: npt.NDArray[Any]
    queries: Tensor | None
    query_labels: npt.NDArray[Any] | None
    groups: npt.NDArray[Any] | None
    query_groups: npt.NDArray[Any] | None


@dataclass(frozen=True)
class Plan:
    """A task, and the labels its codes stand for."""

    task: Task
    classes: npt.NDArray[Any]


def plan(
    embeddings: Embeddings,
    labels: Labels,
    queries: Embeddings | None,
    query_labels: Labels | None,
    metric: Metric,
    ignore_groups: Labels | None,
    query_ignore_groups: Labels | None,
) -> Plan:
    """Check everything and build the task of one process."""
    inputs = check(
        embeddings, labels, queries, query_labels, metric, ignore_groups, query_ignore_groups
    )
    return build(inputs, metric)


def check(
    embeddings: Embeddings,
    labels: Labels,
    queries: Embeddings | None,
    query_labels: Labels | None,
    metric: Metric,
    ignore_groups: Labels | None,
    query_ignore_groups: Labels | None,
    *,
    allow_empty: bool = False,
) -> Inputs:
    """Refuse what does not fit together; ``allow_empty`` is for a process with no share."""
    gallery = as_vectors(embeddings, metric, "embeddings", allow_empty=allow_empty)
    label_array = as_labels(labels, len(gallery), "labels")
    groups = (
        None if ignore_groups is None else as_labels(ignore_groups, len(gallery), "ignore_groups")
    )
    if queries is None:
        for name, value in (
            ("query_labels", query_labels),
            ("query_ignore_groups", query_ignore_groups),
        ):
            if value is not None:
                raise ValueError(f"{name} is given but queries is not; give both or neither")
        return Inputs(gallery, label_array, None, None, groups, None)
    if query_labels is None:
        raise ValueError("queries is given but query_labels is not; give both or neither")
    if (ignore_groups is None) != (query_ignore_groups is None):
        raise ValueError("give ignore_groups and query_ignore_groups together, or neither")
    asked = as_vectors(queries, metric, "queries", allow_empty=allow_empty)
    _check_alike(gallery, asked)
    return Inputs(
        gallery,
        label_array,
        asked,
        as_labels(query_labels, len(asked), "query_labels"),
        groups,
        None
        if query_ignore_groups is None
        else as_labels(query_ignore_groups, len(asked), "query_ignore_groups"),
    )


def _check_alike(gallery: Tensor, queries: Tensor) -> None:
    if gallery.shape[1] != queries.shape[1]:
        raise ValueError(
            f"queries are {queries.shape[1]} wide and embeddings {gallery.shape[1]}; "
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


def build(inputs: Inputs, metric: Metric) -> Plan:
    """The task in which every query is asked against the whole gallery."""
    device = inputs.gallery.device
    if inputs.queries is None or inputs.query_labels is None:
        (codes,), classes = encode(inputs.labels)
        places = _on(codes, device)
        groups = None if inputs.groups is None else _on(encode(inputs.groups)[0][0], device)
        own = torch.arange(len(inputs.gallery), device=device)
        task = Task(inputs.gallery, inputs.gallery, places, places, metric, own, groups, groups)
        return Plan(task, classes)
    (codes, query_codes), classes = encode(inputs.labels, inputs.query_labels)
    task = Task(
        inputs.queries, inputs.gallery, _on(query_codes, device), _on(codes, device), metric
    )
    if inputs.groups is not None and inputs.query_groups is not None:
        (groups_, query_groups), _ = encode(inputs.groups, inputs.query_groups)
        task = Task(
            task.queries,
            task.gallery,
            task.query_codes,
            task.gallery_codes,
            metric,
            None,
            _on(query_groups, device),
            _on(groups_, device),
        )
    return Plan(task, classes)


def _on(codes: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(codes).to(device)


def answer(
    task: Task, depths: Tensor, *, with_ranks: bool, progress: Progress | None = None
) -> Iterator[Block]:
    """Answer every query by whichever way is faster; both give the same."""
    deepest = int(depths.max())
    if applies(task, deepest):
        yield search_symmetric(task, deepest, with_ranks=with_ranks, progress=progress)
    else:
        yield from search(task, depths, with_ranks=with_ranks, progress=progress)
