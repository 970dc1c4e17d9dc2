"""PCA of the embedding, or its mean, folded into the linear head.

A wide head trains better than a narrow one. PCA, fitted on the training images, then reduces the
embedding to fewer dimensions with the least loss of variance. Leading dimensions carry most
variance, so prefixes of the vectors can be used directly.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry.models.embedder import Embedder

# Smallest variance, relative to the largest, that counts in whitening. float64 would resolve far
# less, but a network in bfloat16 rounds its features by about 1e-3, whose square this is: what
# varies less is noise, which whitening would enlarge more than a thousandfold.
_SMALLEST_VARIANCE = 1e-6

# It matters little: between 0.001 and 0.1 MAP@R of other classes changed by about a point, and was
# above that without PCA (benchmarks/defaults).
_PRIOR = 0.03


def second_moments(vectors: Tensor) -> Tensor:
    """Return Σ (v, 1) (v, 1)ᵀ [D + 1, D + 1] of vectors [N, D], in float64, for `principal_axes`.

    The moments of several batches may be added.
    """
    extended = F.pad(vectors.double(), (0, 1), value=1.0)
    return torch.mm(extended.t(), extended)


def moments_of_few(
    moments: Tensor, embedder: Embedder, centered: bool = False, prior: float = _PRIOR
) -> Tensor:
    """Return second moments of fewer vectors than dimensions with what the head tells added.

    Few vectors have no variance at all along most directions, and would leave it to chance which
    of those PCA keeps. The head tells how far each varies where the features vary alike in all.
    `prior` is what that counts, relative to the variance there is: about the origin or, `centered`,
    the mean.
    """
    head = embedder.head
    if isinstance(head, nn.Linear):
        spread = torch.mm(head.weight.double(), head.weight.double().t())
    else:
        spread = torch.eye(len(moments) - 1, dtype=torch.float64, device=moments.device)
    tiny = torch.finfo(spread.dtype).tiny  # a head of zeros
    variance = moments[:-1, :-1].trace()
    if centered:
        variance = variance - moments[:-1, -1].square().sum() / moments[-1, -1]
    scale = prior * variance.clamp(min=0) / spread.trace().clamp(min=tiny)
    return moments + F.pad(scale * spread, (0, 1, 0, 1))


def principal_axes(
    moments: Tensor, dim: int, centered: bool = False, whitening: float = 0.0
) -> Tensor:
    """Return the first `dim` principal axes [dim, D] of second moments, largest variance first.

    About the origin, which keeps cosines; or `centered` on the mean, which distances ignore. With
    `whitening` each axis is divided by this power of the standard deviation along it, relative to
    that along the first: with 0 all have unit length, with 1 all components vary alike.
    """
    second, first, count = moments[:-1, :-1], moments[:-1, -1], moments[-1, -1]
    if not 1 <= dim <= len(second):
        raise ValueError(f"dim must be between 1 and {len(second)}, got {dim}")
    if not torch.isfinite(moments).all():
        raise ValueError("the vectors, or their second moments, have NaN or infinite values")
    if centered:
        second = second - torch.outer(first, first) / count
    values, vectors = torch.linalg.eigh(second)
    axes: Tensor = vectors.flip(1)[:, :dim].t()
    # The sign is arbitrary: the largest entry is made positive, so that equal runs agree.
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * largest.sign()
    if whitening:
        # Vectors that are all equal have no variance about their mean.
        relative = values / values[-1].clamp(min=torch.finfo(values.dtype).tiny)
        deviation = relative.clamp(min=_SMALLEST_VARIANCE).sqrt().flip(0)[:dim, None]
        axes = axes / deviation**whitening
    return axes.float().contiguous()


@torch.no_grad()
def centered(embedder: Embedder, mean: Tensor) -> Embedder:
    """Return a copy of an embedder whose head gives vectors less this mean [dim].

    About the mean of the training images, each sign is that of about half of them: a bit that is
    the same for nearly all images would tell nothing.
    """
    moved = copy.deepcopy(embedder)
    assert isinstance(moved.head, nn.Linear)
    moved.head.bias.sub_(mean)
    return moved


@torch.no_grad()
def with_pca(embedder: Embedder, axes: Tensor) -> Embedder:
    """Return a copy of an embedder whose vectors are reduced to their components along the axes.

    `axes` is [dim, D]. Features that are at hand need not be computed again: `project` of the
    copy turns those of `embedder.pixel_features` into the reduced vectors.
    """
    reduced, head = copy.deepcopy(embedder), embedder.head
    reduced.dim, reduced.bits = len(axes), None  # other dimensions have other signs
    reduced.architecture = replace(embedder.architecture, dim=reduced.dim, binary=False)
    # Without the usual start, which would draw random numbers.
    linear = nn.Linear(embedder.width, reduced.dim, device="meta").to_empty(device=axes.device)
    reduced.head = linear
    if isinstance(head, nn.Linear):
        linear.weight.copy_(torch.mm(axes.double(), head.weight.double()))
        linear.bias.copy_(torch.mv(axes.double(), head.bias.double()))
    else:
        linear.weight.copy_(axes)
        linear.bias.zero_()
    return reduced
