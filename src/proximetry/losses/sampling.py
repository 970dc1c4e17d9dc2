"""Sampled negatives (Partial FC; An et al. 2022): the classes of the batch and random others.

With n of C classes, m of them in the batch:

- Losses by class or entry and the intra-class term weight each random class by
  (C − m) / (n − m), so value and gradients are unbiased.
- Sample-wise losses take the log-sum-exp over the n classes, as in the paper.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from proximetry.losses.dense import intra_class_distance, present_classes
from proximetry.losses.form import Parts, Problem


def sampled(
    solve: Callable[[Problem], Parts], problem: Problem, *, share: float, weights: Tensor
) -> Parts:
    """Estimate the parts of a problem by solving it for a fraction of its classes.

    ``weights`` [B] are 0 for ignored samples, whose classes count as absent. Shapes do not depend
    on the labels, and nothing synchronizes with a GPU.
    """
    if problem.update is not None:
        raise ValueError("a proxy optimizer needs sampled_negatives=1. Use another optimizer.")
    classes = len(problem.proxies)
    size = max(round(share * classes), len(problem.x) + 1)  # at least one class is random
    if size >= classes:
        return solve(problem)
    # With sharded proxies, the classes of some samples are on other ranks.
    inside = (problem.labels >= 0) & (problem.labels < classes)
    labels = problem.labels.masked_fill(~inside, 0)
    present = present_classes(labels, weights.masked_fill(~inside, 0.0), classes)
    chosen = choose_classes(present, size)
    count = present.sum()
    factor = (classes - count) / (size - count)
    factors = factor.expand(size).masked_fill(present[chosen] > 0, 1.0)
    columns = torch.arange(size, device=chosen.device)
    column_of_class = torch.zeros_like(present, dtype=torch.long).scatter(0, chosen, columns)
    proxies = problem.proxies.index_select(0, chosen)
    class_weight = problem.class_weight
    if class_weight is not None:
        in_subset = class_weight[chosen] if isinstance(class_weight, Tensor) else class_weight
        class_weight = factors * in_subset
    elif problem.form.by == "entry":
        class_weight = factors
    parts = solve(
        replace(
            problem,
            proxies=proxies,
            labels=column_of_class[labels].masked_fill(~inside, -1),
            class_weight=class_weight,
            needs_distance=False,
        )
    )
    if problem.form.by == "class" and class_weight is None:
        terms = present.new_zeros(classes).index_copy(0, chosen, factors * parts.negatives)
        parts = parts._replace(negatives=terms)
    if parts.total is not None:  # each other class counts equally
        positive = parts.positive.masked_fill(~inside, 0.0)
        own = inside.to(positive.dtype)
        others = (parts.total - positive) * ((classes - own) / (size - own))
        parts = parts._replace(total=positive + others)
    if problem.needs_distance:
        distance = intra_class_distance(proxies, factors * (size / classes))
        parts = parts._replace(distance=distance)
    return parts


def choose_classes(present: Tensor, size: int) -> Tensor:
    """Return ``size`` classes in ascending order: those with ``present`` > 0 and random others."""
    keys = torch.rand(len(present), device=present.device).masked_fill(present > 0, 2.0)
    return keys.topk(size, sorted=False).indices.sort().values
