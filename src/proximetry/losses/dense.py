"""The dense engine: the page to check against the papers. Plain torch, plain autograd."""

import torch
from torch import Tensor

from proximetry.losses.similarity import cosines, inverse_length, reduce_proxies
from proximetry.losses.table import Row, softplus


def class_similarities(x: Tensor, weight: Tensor, row: Row, gamma: float) -> Tensor:
    """S(x, c) for every sample and class, [batch, classes], from unit ``x`` and raw proxies."""
    inverse, _ = inverse_length(weight)
    return reduce_proxies(cosines(x, weight, inverse), row.similarity, gamma)


def dense(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    row: Row,
    gamma: float,
    scale: float | Tensor,
    offset: float,
    class_weight: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return each sample's similarity to its own class, and the negatives.

    ``x`` [B, D] has length one, ``weight`` is [C, K, D], the negative logit is
    ``scale · S + offset`` with a number or one value per sample as ``scale``. The negatives are,
    by sample, the log-sum-exp over the other classes [B]; by class, the sum over the classes of
    ``class_weight`` · log(1 + Σ exp logit over the samples of other classes).
    """
    S = class_similarities(x, weight, row, gamma)
    own = labels.unsqueeze(1)
    positive = S.gather(1, own).squeeze(1)
    factor = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
    z = (factor * S + offset).scatter(1, own, -torch.inf)
    if row.group == "sample":
        return positive, z.logsumexp(1)
    return positive, (class_weight * softplus(z.logsumexp(0))).sum()
