"""From proxies to one similarity per class: S(x, c), forwards and (for the tiles) backwards."""

from typing import Literal

import torch
from torch import Tensor

from proximetry._util.tensors import inverse_length

Similarity = Literal["single", "soft", "max", "mean"]


def cosines(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Cosines [K, B, C] of unit ``x`` [B, D] and proxies [C, K, D] of lengths 1 / ``inverse``.

    Scaling the products by the lengths is cheaper than scaling the proxies when the batch is
    smaller than the embedding dimension. K comes first so that what follows runs along long rows.
    """
    classes, k, dim = weight.shape
    s = (x @ weight.reshape(classes * k, dim).T) * inverse.reshape(-1)
    return s.view(x.shape[0], classes, k).permute(2, 0, 1).contiguous()


def class_similarities(x: Tensor, proxies: Tensor, similarity: Similarity, gamma: float) -> Tensor:
    """S(x, c) for every sample and class, [B, C], from unit ``x`` [B, D] and proxies [C, K, D]."""
    inverse, _ = inverse_length(proxies)
    return reduce_proxies(cosines(x, proxies, inverse), similarity, gamma)


def reduce_proxies(s: Tensor, similarity: Similarity, gamma: float) -> Tensor:
    """S from the cosines ``s`` of the K proxies of a class, K in dimension 0.

    ``soft`` is Saeki et al. 2021, eq. 1: the mean of the cosines weighted by softmax(s / gamma).
    """
    if s.shape[0] == 1:
        return s[0]
    match similarity:
        case "soft":
            return (torch.softmax(s / gamma, 0) * s).sum(0)
        case "max":
            return s.amax(0)
        case "mean":
            return s.mean(0)
        case "single":
            raise ValueError(f"similarity 'single' takes one proxy per class, got {s.shape[0]}")


def spread_gradient(
    grad: Tensor, s: Tensor, S: Tensor, similarity: Similarity, gamma: float
) -> Tensor:
    """∂/∂s from the gradient with respect to S = reduce_proxies(s); may reuse ``grad``."""
    if s.shape[0] == 1:
        return grad.unsqueeze(0)
    if similarity == "soft":
        share = torch.softmax(s / gamma, 0)
        return share.mul_(grad).mul_((s - S).div_(gamma).add_(1.0))
    if similarity == "max":
        nearest = s == S
        return nearest * (grad / nearest.sum(0))
    return (grad / s.shape[0]).expand_as(s).contiguous()


def add_rows_(to: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Add each of ``values`` to one of the rows of ``to``, in an order that is fixed.

    On CUDA ``index_add`` adds in whatever order its threads arrive, so runs with the same seed
    would differ in their last digits; ``index_put`` sorts first.
    """
    if to.is_cuda:
        return to.index_put_((rows,), values, accumulate=True)
    return to.index_add_(0, rows, values)
