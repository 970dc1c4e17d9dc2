"""The dense engine, which computes all similarities in one array and uses autograd."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from proximetry._util.tensors import inner_products, inverse_length
from proximetry.losses.form import Aggregation, LossForm, Parts, Problem


def cosines(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines [K, B, C] of unit ``x`` [B, D] and proxies [C, K, D], and 1 / ‖proxy‖ [C, K].

    Scaling the products is cheaper than scaling the proxies if the batch is smaller than the
    embedding dimension. K comes first so that later operations run along long rows.
    """
    classes, k, dim = weight.shape
    inverse, _ = inverse_length(weight)
    s = inner_products(x, weight.reshape(classes * k, dim)) * inverse.reshape(-1)
    return s.view(x.shape[0], classes, k).permute(2, 0, 1).contiguous(), inverse


def reduce_proxies(s: Tensor, aggregation: Aggregation, gamma: float) -> Tensor:
    """Return S from the cosines ``s`` of the K proxies of a class, K in dimension 0.

    ``soft`` is Saeki et al. 2021, eq. 1: the mean of the cosines weighted by softmax(s / gamma).
    """
    if s.shape[0] == 1:
        return s[0]
    match aggregation:
        case "soft":
            return (torch.softmax(s / gamma, 0) * s).sum(0)
        case "max":
            return s.amax(0)
        case "mean":
            return s.mean(0)
        case "single":
            raise ValueError(f"similarity 'single' takes one proxy per class, got {s.shape[0]}")


def spread_gradient(
    grad: Tensor, s: Tensor, S: Tensor, aggregation: Aggregation, gamma: float
) -> Tensor:
    """Return ∂L/∂s from ∂L/∂S, S = reduce_proxies(s); may overwrite ``grad``."""
    if s.shape[0] == 1:
        return grad.unsqueeze(0)
    if aggregation == "soft":
        share = torch.softmax(s / gamma, 0)
        return share.mul_(grad).mul_((s - S).div_(gamma).add_(1.0))
    if aggregation == "max":
        nearest = s == S
        return nearest * (grad / nearest.sum(0))
    return (grad / s.shape[0]).expand_as(s).contiguous()


def add_rows_(target: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` to rows of ``target``, deterministically.

    On CUDA the order of additions of ``index_add`` is random; ``index_put`` sorts first.
    """
    if target.is_cuda:
        return target.index_put_((rows,), values, accumulate=True)
    return target.index_add_(0, rows, values)


def dense(problem: Problem) -> Parts:
    """Solve a problem with the complete [B, C] array of similarities."""
    if problem.update is not None:
        raise ValueError("the dense engine cannot update proxies. Use another engine.")
    s, _ = cosines(problem.x, problem.proxies)
    S = reduce_proxies(s, problem.form.similarity, problem.gamma)
    label_column, classes = problem.labels.unsqueeze(1), S.shape[1]
    if problem.is_shard:  # one more column, for labels of other ranks
        S = F.pad(S, (0, 1))
        label_column = label_column.masked_fill(
            (label_column < 0) | (label_column > classes), classes
        )
    positive = S.gather(1, label_column).squeeze(1)
    scale = problem.scale
    factor = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
    offset = problem.offset
    if problem.log_weights is not None:
        offset = problem.log_weights + offset
    offset = offset.unsqueeze(1) if isinstance(offset, Tensor) else offset
    phi, _ = problem.adjust(S)
    z = (factor * phi + offset).scatter(1, label_column, -torch.inf)
    if problem.is_shard:
        S, z = S[:, :classes], z[:, :classes]
    if problem.ignore_above is not None:
        z = z.masked_fill(S > problem.ignore_above, -torch.inf)
    distance = intra_class_distance(problem.proxies) if problem.needs_distance else None
    if problem.form.by == "entry":
        e = softplus(z)
        e = e if problem.class_weight is None else e * problem.class_weight
        return Parts(positive, e.sum(1), None, distance)
    if problem.form.by == "sample":
        return Parts(positive, z.logsumexp(1), S.sum(1) if problem.needs_total else None, distance)
    push = softplus(z.logsumexp(0))
    if problem.class_weight is not None:
        push = (problem.class_weight * push).sum()
    return Parts(positive, push, None, distance)


@torch.no_grad()
def own_similarity(
    x: Tensor, proxies: Tensor, labels: Tensor, form: LossForm, gamma: float
) -> Tensor:
    """Return the similarity of each sample to its class [B], without gradient."""
    w = proxies[labels]  # [B, K, D]
    s = torch.einsum("bd,bkd->kb", x, w) * inverse_length(w)[0].T
    return reduce_proxies(s, form.similarity, gamma)


def join_by_sample(form: LossForm, positive: Tensor, negatives: Tensor) -> Tensor:
    """Return the terms of the samples [B] from the positive logits and `Parts.negatives` [B]."""
    if form.by == "entry":
        return softplus(positive) + negatives
    match form.join:
        case "separate":
            return softplus(positive) + softplus(negatives)
        case "joint":
            return softplus(torch.logaddexp(positive, negatives))
        case "softmax":
            return softplus(negatives - positive)
        case "nca":
            # With one class there are no negatives.
            return negatives.masked_fill(torch.isneginf(negatives), 0.0) - positive


def pull_by_class(logit: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return log(1 + Σ over the samples of a class of e^logit) for every class [C]."""
    zero = logit.new_zeros(num_classes)
    shift = zero.scatter_reduce(0, labels, logit.detach(), "amax", include_self=True)
    total = add_rows_(torch.zeros_like(zero), labels, torch.exp(logit - shift[labels]))
    return log1p_sum_exp(total, shift)


def present_classes(labels: Tensor, weights: Tensor, num_classes: int) -> Tensor:
    """Return 1 for classes with a sample of weight > 0, and 0 for the others [C]."""
    counts = (weights > 0).to(weights.dtype)
    return weights.new_zeros(num_classes).scatter_reduce(0, labels, counts, "amax")


def weighted_mean(terms: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w·t / Σ w, or 0 if all w are 0; bit-equal to the mean if all w are 1."""
    total = weights.sum()
    share = (len(weights) / total).masked_fill(~(total > 0), 0.0)  # `where` would synchronize
    return (terms * weights).mean() * share


softplus = partial(F.softplus, threshold=50.0)
"""log(1 + e^z), accurate in float64, too (torch's default threshold is z = 20)."""


def log1p_sum_exp(total: Tensor, shift: Tensor) -> Tensor:
    """Return log(1 + Σ e^z) from ``total`` = Σ e^(z - shift) and ``shift`` ≥ 0."""
    return shift + torch.log1p(total + torch.expm1(-shift))


def intra_class_distance(weight: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return half the mean distance of two proxies of a class (Saeki et al. 2021, eq. 3).

    With ``factors`` [C], the distances of a class are multiplied by its factor.
    """
    if weight.shape[1] == 1:
        return weight.new_zeros(())
    with torch.autocast(weight.device.type, enabled=False):
        factor = 1.0 if factors is None else factors.view(-1, 1, 1)
        total: Tensor = _PairDistances.apply(weight, factor)  # type: ignore[no-untyped-call]
        return total / distance_terms(weight)


def distance_terms(weight: Tensor) -> int:
    """Return the number of ordered pairs of proxies of a class, over all classes."""
    classes, k, _ = weight.shape
    return classes * k * (k - 1)


class _PairDistances(torch.autograd.Function):
    """Σ over classes and pairs t < s of √(2 + 1e-5 − 2 cos(w_t, w_s)), times the class's factor.

    The Gram matrices [C, K, K] of the proxies give the distances, and one product with the proxies
    the gradient: Σ_s (ŵ_t cos_ts − ŵ_s) / (distance_ts ‖w_t‖).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float | Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.factor = factor
        _, distance, _, pairs = _pair_distances(weight)
        return (distance * (pairs * factor)).sum() / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        with torch.autocast(weight.device.type, enabled=False):
            return pair_distance_gradient(weight, grad * ctx.factor), None


def pair_distance_gradient(weight: Tensor, grad: Tensor) -> Tensor:
    """Return ``grad`` times the gradient of the sum of the distances within each class."""
    cosine, distance, inverse, pairs = _pair_distances(weight)
    near = pairs / distance
    factors = (cosine * near).sum(2, keepdim=True) * (1 - pairs) - near
    products = grad * factors * inverse.unsqueeze(1) * inverse.unsqueeze(2)
    return products @ weight


def _pair_distances(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cosines and distances [C, K, K], 1 / ‖w‖ [C, K], and 1 for pairs t ≠ s [K, K]."""
    gram = weight @ weight.transpose(1, 2)
    squares = gram.diagonal(dim1=1, dim2=2)
    inverse = squares.masked_fill(~(squares > 1e-24), torch.inf).rsqrt()
    cosine = gram * inverse.unsqueeze(1) * inverse.unsqueeze(2)
    pairs = 1 - torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    return cosine, (2.0 + 1e-5 - 2.0 * cosine).clamp(min=1e-6).sqrt(), inverse, pairs
