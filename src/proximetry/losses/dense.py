"""The dense engine: the page to check against the papers. Plain torch, plain autograd."""

import torch
from torch import Tensor

from proximetry.losses.formulation import LossForm, Problem, softplus
from proximetry.losses.similarity import cosines, inverse_length, reduce_proxies


def class_similarities(x: Tensor, proxies: Tensor, form: LossForm, gamma: float) -> Tensor:
    """S(x, c) for every sample and class, [batch, classes], from unit ``x`` and raw proxies."""
    inverse, _ = inverse_length(proxies)
    return reduce_proxies(cosines(x, proxies, inverse), form.similarity, gamma)


def dense(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return each sample's similarity to its own class, and the negatives; see `Problem`."""
    S = class_similarities(problem.x, problem.proxies, problem.form, problem.gamma)
    own = problem.labels.unsqueeze(1)
    positive = S.gather(1, own).squeeze(1)
    scale = problem.scale
    factor = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
    z = (factor * S + problem.offset).scatter(1, own, -torch.inf)
    if problem.form.by == "sample":
        return positive, z.logsumexp(1)
    return positive, (problem.class_weight * softplus(z.logsumexp(0))).sum()
