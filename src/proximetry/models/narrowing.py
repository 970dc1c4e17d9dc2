"""Fewer numbers at little loss: the head is turned to the principal axes of what it gives.

A wide head learns better than a narrow one, and many of its numbers say little. Along the principal
axes of the vectors of some images (those it was trained with), the first numbers say the most: no
linear map to as many numbers keeps more of these vectors, and cutting them again needs no new map.
Turning and cutting are linear, so they are folded into the head.
"""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from proximetry.models.embedder import Embedder


def moments(vectors: Tensor) -> Tensor:
    """Return Σ (v, 1) (v, 1)ᵀ [D + 1, D + 1] of vectors [N, D], in float64, for `principal_axes`.

    What parts of the vectors give may be added.
    """
    extended = F.pad(vectors.double(), (0, 1), value=1.0)
    return torch.mm(extended.t(), extended)


def principal_axes(summed: Tensor, dim: int, about_mean: bool = False) -> Tensor:
    """Return the first `dim` principal axes [dim, D] of summed moments, the strongest first.

    About the origin, where cosines are angles; or about the mean, which distances do not notice.
    """
    second, first, count = summed[:-1, :-1], summed[:-1, -1], summed[-1, -1]
    if not 1 <= dim <= len(second):
        raise ValueError(f"dim must be between 1 and {len(second)}, got {dim}")
    if about_mean:
        second = second - torch.outer(first, first) / count
    axes: Tensor = torch.linalg.eigh(second).eigenvectors.flip(1)[:, :dim].t()
    # An axis has no direction; its largest entry is made positive, so that equal runs agree.
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return (axes * largest.sign()).float().contiguous()


def narrow(vectors: Tensor, axes: Tensor, normalize: bool) -> Tensor:
    """Return vectors [N, D] along the axes [dim, D], as the embedder of `narrowed` gives them."""
    found = torch.mm(vectors, axes.t())
    return F.normalize(found, dim=1) if normalize else found


@torch.no_grad()
def narrowed(embedder: "Embedder", axes: Tensor) -> "Embedder":
    """Return a copy of an embedder whose vectors lie along the axes [dim, D]."""
    slim, head = copy.deepcopy(embedder), embedder.head
    slim.dim = len(axes)
    slim.architecture = replace(embedder.architecture, dim=slim.dim)
    slim.head = nn.Linear(embedder.width, slim.dim, device=axes.device)
    if isinstance(head, nn.Linear):
        slim.head.weight.copy_(torch.mm(axes.double(), head.weight.double()))
        slim.head.bias.copy_(torch.mv(axes.double(), head.bias.double()))
    else:
        slim.head.weight.copy_(axes)
        slim.head.bias.zero_()
    return slim
