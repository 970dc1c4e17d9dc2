"""Embeddings that are spread over several processes, brought together in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry.metrics.neighbours import Metric, Task
from proximetry.metrics.plan import Inputs, Plan, build

T = TypeVar("T")
Array = npt.NDArray[Any]


def gather_plan(check: Callable[[], Inputs], metric: Metric, group: dist.ProcessGroup) -> Plan:
    """This process's queries against the gallery of all; every process refuses what one refuses.

    A process that raised alone would leave the others waiting for ever.
    """
    inputs = _agree(check, group)
    gallery, start = _gather_rows(inputs.gallery, group)
    whole = replace(
        inputs,
        gallery=gallery,
        labels=_gather_array(inputs.labels, group),
        groups=None if inputs.groups is None else _gather_array(inputs.groups, group),
    )
    if inputs.queries is None or inputs.query_labels is None:
        everything = build(whole, metric)
        own = slice(start, start + len(inputs.gallery))
        return Plan(_only(everything.task, gallery[own], own), everything.classes)
    counts = _gather(len(inputs.queries), group)
    first = sum(counts[: dist.get_rank(group)])
    asked = replace(
        whole,
        query_labels=_gather_array(inputs.query_labels, group),
        query_groups=None
        if inputs.query_groups is None
        else _gather_array(inputs.query_groups, group),
    )
    everything = build(asked, metric)
    mine = slice(first, first + len(inputs.queries))
    return Plan(_only(everything.task, inputs.queries, mine), everything.classes)


def gather_arrays(arrays: dict[str, Array], group: dist.ProcessGroup) -> dict[str, Array]:
    """Join the per-query arrays of all processes; every process gets the same."""
    parts = _gather(arrays, group)
    return {name: np.concatenate([part[name] for part in parts]) for name in arrays}


def _only(task: Task, queries: Tensor, mine: slice) -> Task:
    return replace(
        task,
        queries=queries,
        query_codes=task.query_codes[mine],
        own=None if task.own is None else task.own[mine],
        query_groups=None if task.query_groups is None else task.query_groups[mine],
    )


def _agree(check: Callable[[], Inputs], group: dist.ProcessGroup) -> Inputs:
    inputs: Inputs | None = None
    problem = ""
    try:
        inputs = check()
    except ValueError as error:
        problem = str(error)
    problems = _gather(problem, group)
    told = [f"process {rank}: {text}" for rank, text in enumerate(problems) if text]
    if told or inputs is None:
        raise ValueError("; ".join(told))
    shapes = _gather(_description(inputs), group)
    if len(set(shapes)) > 1:
        listed = "; ".join(f"process {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise ValueError(f"the processes disagree about their embeddings ({listed})")
    sizes = _gather((len(inputs.gallery), _length(inputs.queries)), group)
    for name, index in (("embeddings", 0), ("queries", 1)):
        if sum(size[index] for size in sizes) == 0 and (index == 0 or inputs.queries is not None):
            raise ValueError(f"{name} is empty on every process")
    return inputs


def _length(queries: Tensor | None) -> int:
    return 0 if queries is None else len(queries)


def _description(inputs: Inputs) -> str:
    asked = "no queries" if inputs.queries is None else "queries"
    ignoring = "no groups" if inputs.groups is None else "groups"
    return f"{inputs.gallery.shape[1]} wide, {inputs.gallery.dtype}, {asked}, {ignoring}"


def _gather(value: T, group: dist.ProcessGroup) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _gather_array(array: Array, group: dist.ProcessGroup) -> Array:
    parts = _gather(array, group)
    filled = [part for part in parts if len(part)] or parts[:1]
    if len({part.dtype.kind for part in filled}) > 1:
        raise ValueError("some processes have integer labels and others strings; use one kind")
    return np.concatenate(filled)


def _gather_rows(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """The rows of all processes, and where this process's own begin."""
    counts = _gather(len(rows), group)
    start = sum(counts[: dist.get_rank(group)])
    device = rows.device
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    # Collectives want equal shapes: pad to the largest share.
    padded = torch.zeros((max(counts), rows.shape[1]), dtype=rows.dtype, device=device)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return whole.to(rows.device), start
