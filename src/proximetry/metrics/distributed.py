"""Embeddings that are spread over several processes, brought together in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from proximetry._common import gather_rows
from proximetry.metrics.inputs import Similarity
from proximetry.metrics.task import Items, Task, build

T = TypeVar("T")
Array = npt.NDArray[Any]
Check = Callable[[], tuple[Items, Items | None]]


def gather_task(check: Check, similarity: Similarity, group: dist.ProcessGroup) -> Task:
    """This process's queries against the gallery of all; every process refuses what one refuses.

    A process that raised alone would leave the others waiting for ever.
    """
    gallery, queries = _agree(check, group)
    vectors, counts = gather_rows(gallery.vectors, group)
    whole = replace(_gather_labels(gallery, group), vectors=vectors)
    if queries is None:
        mine = _share(counts, group)
        task = build(whole, None, similarity)
        return task.only(mine, task.gallery[mine])
    # The labels of all queries are needed: every process has to number the classes alike.
    asked = _gather_labels(queries, group)
    task = build(whole, asked, similarity, on_any=lambda here: any(_gather(here, group)))
    return task.only(_share(_gather(len(queries), group), group), task.queries)


def gather_arrays(arrays: dict[str, Array], group: dist.ProcessGroup) -> dict[str, Array]:
    """Join the per-query arrays of all processes; every process gets the same."""
    parts = _gather(arrays, group)
    return {name: np.concatenate([part[name] for part in parts]) for name in arrays}


def _agree(check: Check, group: dist.ProcessGroup) -> tuple[Items, Items | None]:
    checked: tuple[Items, Items | None] | None = None
    problem = ""
    try:
        checked = check()
    except ValueError as error:
        problem = str(error)
    problems = [f"process {i}: {text}" for i, text in enumerate(_gather(problem, group)) if text]
    if problems or checked is None:
        raise ValueError("; ".join(problems))
    gallery, queries = checked
    shapes = _gather(
        f"{gallery.vectors.shape[1]} dimensions, {gallery.vectors.dtype}, "
        f"{'no queries' if queries is None else 'queries'}, "
        f"{'no groups' if gallery.groups is None else 'groups'}",
        group,
    )
    if len(set(shapes)) > 1:
        listed = "; ".join(f"process {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise ValueError(f"the processes disagree about their embeddings ({listed})")
    for name, items in (("embeddings", gallery), ("queries", queries)):
        if items is not None and not any(_gather(len(items), group)):
            raise ValueError(f"{name} is empty on every process")
    return checked


def _share(counts: list[int], group: dist.ProcessGroup) -> slice:
    """Where the rows of this process stand among those of all."""
    rank = dist.get_rank(group)
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def _gather(value: T, group: dist.ProcessGroup) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _gather_labels(items: Items, group: dist.ProcessGroup) -> Items:
    groups = None if items.groups is None else _gather_array(items.groups, group)
    return replace(items, labels=_gather_array(items.labels, group), groups=groups)


def _gather_array(array: Array, group: dist.ProcessGroup) -> Array:
    parts = _gather(array, group)
    filled = [part for part in parts if len(part)] or parts[:1]
    if len({part.dtype.kind for part in filled}) > 1:
        raise ValueError("some processes have integer labels and others strings; use one kind")
    return np.concatenate(filled)
