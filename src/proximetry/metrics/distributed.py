"""Embeddings distributed over several processes, gathered in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from proximetry._util.tensors import gather_rows
from proximetry.metrics._search.validation import Items, join_labels

T = TypeVar("T")


def gather_sets(
    check: Callable[[], list[Items]], group: dist.ProcessGroup | None
) -> tuple[list[Items], slice]:
    """Return the sets and this process's slice of the queries.

    The gallery is gathered from all processes. For queries, labels and groups are gathered;
    vectors stay local.
    """
    if group is None:
        return check(), slice(None)
    sets = raise_on_all_ranks(check, group)
    vectors = sets[0].vectors
    shapes = gather_objects(
        f"{vectors.shape[1]} dimensions, {vectors.dtype}, "
        f"{'no queries' if len(sets) == 1 else 'queries'}, "
        f"{'no groups' if sets[0].groups is None else 'groups'}",
        group,
    )
    if len(set(shapes)) > 1:
        listed = "; ".join(f"process {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise ValueError(f"the processes have different kinds of embeddings ({listed})")
    all_sets = []
    for name, items in zip(("embeddings", "queries"), sets, strict=False):
        labels, groups = zip(*gather_objects((items.labels, items.groups), group), strict=True)
        counts = [len(part) for part in labels]
        if not any(counts):
            raise ValueError(f"{name} is empty on every process")
        all_groups = None if items.groups is None else join_labels(groups)
        all_sets.append(replace(items, labels=join_labels(labels), groups=all_groups))
    all_sets[0] = replace(all_sets[0], vectors=gather_rows(vectors, group)[0])
    rank = dist.get_rank(group)
    return all_sets, slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def raise_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call a function on every rank; raise on all ranks if any rank raises a ValueError."""
    if group is None:
        return function()
    results, message = list[T](), ""
    try:
        results.append(function())
    except ValueError as error:
        message = str(error) or type(error).__name__
    messages = enumerate(gather_objects(message, group))
    if errors := [f"process {rank}: {text}" for rank, text in messages if text]:
        raise ValueError("; ".join(errors))
    return results[0]


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all processes, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
