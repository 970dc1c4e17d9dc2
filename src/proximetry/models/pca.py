"""PCA of the embedding, or its mean, folded into the linear head.

A wide head trains better than a narrow one. PCA, fitted on the training images, then reduces the
embedding to fewer dimensions with the least loss of variance. Leading dimensions carry most
variance, so prefixes of the vectors can be used directly.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry.models.embedder import Embedder

# Smallest variance used in whitening, relative to the largest: the squared rounding error of
# bfloat16 features. Smaller variances are noise, which whitening would amplify.
_MIN_VARIANCE = 1e-6

# From 0.001 to 0.1, MAP@R changes by about a point (benchmarks/default-recipe-search).
_PRIOR = 0.03


def second_moments(vectors: Tensor) -> Tensor:
    """Return Σ (v, 1) (v, 1)ᵀ [D + 1, D + 1] of vectors [N, D], in float64, for `principal_axes`.

    The moments of several batches may be added.
    """
    extended = F.pad(vectors.double(), (0, 1), value=1.0)
    return torch.mm(extended.t(), extended)


def regularized_moments(
    moments: Tensor, embedder: Embedder, centered: bool = False, prior: float = _PRIOR
) -> Tensor:
    """Return regularized second moments of fewer vectors than dimensions.

    Adds W Wᵀ of the head, the covariance of the vectors if features had equal variance in all
    directions: otherwise the choice among directions without variance is arbitrary. `prior` is its
    weight relative to the total variance, about the origin or, if `centered`, the mean.
    """
    head = embedder.head
    if isinstance(head, nn.Linear):
        covariance = torch.mm(head.weight.double(), head.weight.double().t())
    else:
        covariance = torch.eye(len(moments) - 1, dtype=torch.float64, device=moments.device)
    tiny = torch.finfo(covariance.dtype).tiny  # for a head of zeros
    variance = moments[:-1, :-1].trace()
    if centered:
        variance = variance - moments[:-1, -1].square().sum() / moments[-1, -1]
    scale = prior * variance.clamp(min=0) / covariance.trace().clamp(min=tiny)
    return moments + F.pad(scale * covariance, (0, 1, 0, 1))


def principal_axes(
    moments: Tensor, dim: int, centered: bool = False, whitening: float = 0.0
) -> Tensor:
    """Return the first `dim` principal axes [dim, D] of second moments, largest variance first.

    About the origin, which preserves cosines, or `centered` on the mean, which preserves distances.
    With `whitening` each axis is divided by that power of its standard deviation, relative to the
    first: 0 gives axes of unit length, 1 components of equal variance.
    """
    second, first, count = moments[:-1, :-1], moments[:-1, -1], moments[-1, -1]
    if not 1 <= dim <= len(second):
        raise ValueError(f"dim must be between 1 and {len(second)}, got {dim}")
    if not torch.isfinite(moments).all():
        raise ValueError("the second moments have NaN or infinite values")
    if centered:
        second = second - torch.outer(first, first) / count
    values, vectors = torch.linalg.eigh(second)
    axes: Tensor = vectors.flip(1)[:, :dim].t()
    # The sign is arbitrary: make the largest entry positive.
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * largest.sign()
    if whitening:
        # Equal vectors have no variance about their mean.
        relative = values / values[-1].clamp(min=torch.finfo(values.dtype).tiny)
        deviation = relative.clamp(min=_MIN_VARIANCE).sqrt().flip(0)[:dim, None]
        axes = axes / deviation**whitening
    return axes.float().contiguous()


@torch.no_grad()
def subtract_mean(embedder: Embedder, mean: Tensor) -> Embedder:
    """Return a copy of an embedder with a head, which subtracts a mean [dim].

    With the mean of the training images, each bit of a binary code is set for about half of them.
    """
    result: Any = copy.deepcopy(embedder)
    result.head.bias.sub_(mean)
    return result  # type: ignore[no-any-return]


@torch.no_grad()
def with_pca(embedder: Embedder, axes: Tensor) -> Embedder:
    """Return a copy of an embedder whose vectors are projected onto axes [dim, D].

    The pooled features stay the same: `project` of the copy maps them to the reduced vectors.
    """
    reduced, head = copy.deepcopy(embedder), embedder.head
    weight, bias = axes, axes.new_zeros(len(axes))
    if isinstance(head, nn.Linear):
        weight = torch.mm(axes.double(), head.weight.double())
        bias = torch.mv(axes.double(), head.bias.double())
    dim = len(axes)
    reduced.dim, reduced.bits = dim, None
    reduced.architecture = replace(embedder.architecture, dim=dim, binary=False)
    # On "meta" the initialization draws no random numbers.
    reduced.head = nn.Linear(embedder.width, dim, device="meta").to_empty(device=weight.device)
    reduced.head.load_state_dict({"weight": weight, "bias": bias})
    return reduced
