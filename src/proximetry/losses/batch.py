"""Preparation of a batch: unit embeddings, their lengths, and sample weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from proximetry._util.tensors import l2_normalize
from proximetry.losses.dense import present_classes, pull_by_class, weighted_mean
from proximetry.losses.form import Parts, Problem


class Batch(NamedTuple):
    """A normalized batch; ignored samples have weight 0, label 0 and zero embeddings."""

    x: Tensor
    """Embeddings [B, D] of length one."""
    length: Tensor
    """Lengths [B] before normalization."""
    labels: Tensor
    weights: Tensor
    log_weights: Tensor
    """Logarithms of the weights; a low finite number for weight 0."""
    own: Tensor | None = None
    """Similarities to the samples' classes [B], without gradient, for losses that adjust the
    negatives."""


class Engine(NamedTuple):
    """The functions that compute a loss; all engines return the same results."""

    solve: Callable[[Problem], Parts]
    normalize: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Batch]
    """Normalizes embeddings [B, D], with labels and weights [B], in the dtype of the proxies."""
    pull: Callable[[Tensor, Batch, int], tuple[Tensor, Tensor]]
    """Returns the mean over the classes of the batch of log(1 + Σ w e^logit), given the logits [B]
    and the number of classes; and 1, or 0 if all samples are ignored."""
    mean: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Returns the weighted mean of terms [B]; and 1, or 0 if all weights are 0."""


def normalize(
    embeddings: Tensor, labels: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Batch:
    """Normalize a batch in a dtype; samples of weight 0 or label -1 are ignored."""
    if weights is None:
        weights = torch.ones_like(labels, dtype=dtype)
    weights = weights.to(dtype).masked_fill(labels < 0, 0.0)
    # Zero ignored samples, so that NaN in them does not spread.
    ignored = weights == 0
    labels = labels.masked_fill(ignored, 0)
    x, length = l2_normalize(embeddings.to(dtype).masked_fill(ignored.unsqueeze(1), 0.0))
    # Low enough that the exponential of an ignored sample is 0. With -inf, the gradient would be
    # NaN if all samples are ignored.
    log_weights = weights.log().clamp(min=torch.finfo(dtype).min / 4)
    return Batch(x, length, labels, weights, log_weights)


def pull(logit: Tensor, batch: Batch, num_classes: int) -> tuple[Tensor, Tensor]:
    """See `Engine.pull`."""
    present = present_classes(batch.labels, batch.weights, num_classes).sum()
    terms = pull_by_class(logit + batch.log_weights, batch.labels, num_classes)
    return terms.sum() / present.clamp(min=1.0), present.clamp(max=1.0)


def mean(terms: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `Engine.mean`."""
    return weighted_mean(terms, weights), (weights.sum() > 0).to(terms.dtype)
