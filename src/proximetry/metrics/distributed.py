"""Embeddings distributed over several processes, gathered in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from proximetry._util.tensors import gather_rows
from proximetry.metrics._search.task import Items

T = TypeVar("T")
Array = npt.NDArray[Any]


def gather_sets(
    check: Callable[[], list[Items]], group: dist.ProcessGroup | None
) -> tuple[list[Items], slice]:
    """Return the gallery of all processes, the queries if any, and the share of this process.

    Queries have the labels of all processes, which number the classes alike, but the vectors of
    this one. The share is a slice of all queries, or of the gallery.
    """
    if group is None:
        return check(), slice(None)
    gallery, *queries = _agree(check, group)
    vectors, counts = gather_rows(gallery.vectors, group)
    sets = [replace(_gather_labels(gallery, group), vectors=vectors)]
    if queries:
        sets.append(_gather_labels(queries[0], group))
        counts = gather_objects(len(queries[0]), group)
    rank = dist.get_rank(group)
    return sets, slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def gather_arrays(arrays: dict[str, Array], group: dist.ProcessGroup | None) -> dict[str, Array]:
    """Concatenate the per-query arrays of all processes, on every process."""
    if group is None:
        return arrays
    parts = gather_objects(arrays, group)
    return {name: np.concatenate([part[name] for part in parts]) for name in arrays}


def together(task: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run a task on every rank; raise on all ranks if any rank raises a ValueError."""
    if group is None:
        return task()
    done: list[T] = []
    problem = ""
    try:
        done.append(task())
    except ValueError as error:
        problem = str(error) or type(error).__name__
    texts = gather_objects(problem, group)
    problems = [f"process {rank}: {text}" for rank, text in enumerate(texts) if text]
    if problems:
        raise ValueError("; ".join(problems))
    return done[0]


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all processes, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _agree(check: Callable[[], list[Items]], group: dist.ProcessGroup) -> list[Items]:
    sets = together(check, group)
    gallery, *queries = sets
    shapes = gather_objects(
        f"{gallery.vectors.shape[1]} dimensions, {gallery.vectors.dtype}, "
        f"{'queries' if queries else 'no queries'}, "
        f"{'no groups' if gallery.groups is None else 'groups'}",
        group,
    )
    if len(set(shapes)) > 1:
        listed = "; ".join(f"process {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise ValueError(f"the processes disagree about their embeddings ({listed})")
    for name, items in zip(("embeddings", "queries"), sets, strict=False):
        if not any(gather_objects(len(items), group)):
            raise ValueError(f"{name} is empty on every process")
    return sets


def _gather_labels(items: Items, group: dist.ProcessGroup) -> Items:
    groups = None if items.groups is None else _gather_array(items.groups, group)
    return replace(items, labels=_gather_array(items.labels, group), groups=groups)


def _gather_array(array: Array, group: dist.ProcessGroup) -> Array:
    parts = gather_objects(array, group)
    filled = [part for part in parts if len(part)] or parts[:1]
    if len({part.dtype.kind for part in filled}) > 1:
        raise ValueError("some processes have integer labels and others strings; use one kind")
    return np.concatenate(filled)
