"""Regularizers that can be added to any loss: terms of its proxies or of the embeddings."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximetry._util.tensors import (
    chunks,
    inverse_length,
    l2_normalize,
    nearest_other_class,
    rescale,
)
from proximetry.losses.base import IGNORED, Labels, validate_batch
from proximetry.losses.dense import add_rows_, intra_class_distance, weighted_mean
from proximetry.losses.proxies import Proxies
from proximetry.losses.settings import FullPrecision, count, non_negative, positive
from proximetry.losses.sharded import ShardedProxies

#: Maximum number of entries in a block of proxies.
BLOCK_ENTRIES = 2**20


class Term(FullPrecision):
    """Base of the regularizers: a term with a weight."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = non_negative("weight", weight)


class IntraClassRegularizer(Term):
    """Pulls the proxies of a class together (Qian et al. 2019; Saeki et al. 2021, eq. 3).

    ``weight · Σ_c Σ_{t<s} √(2 + 1e-5 − 2 ŵ_ct·ŵ_cs) / (C·K·(K−1))``, half the mean distance of two
    proxies of a class. The 1e-5 keeps the gradient of equal proxies finite.
    """

    def __init__(self, weight: float = 0.2) -> None:
        super().__init__(weight)

    def forward(self, proxies: Proxies | Tensor) -> Tensor:
        """Return the term for proxies [C, K, D] or [C, D]; zero for one proxy per class."""
        if isinstance(proxies, ShardedProxies):
            share = proxies.mean_over_classes(intra_class_distance(proxies.weight))
            return self.weight * proxies.sum(share)[0]  # type: ignore[no-any-return]
        return self.weight * intra_class_distance(_weight_of(proxies))


class ExclusiveRegularizer(Term):
    """Pushes each class away from the nearest other class (RegularFace; Zhao et al. 2019).

    ``weight · (1/C) Σ_i max_{j≠i} cos(W_i, W_j)``, over all proxies if there are several per
    class. The nearest proxies are searched in tiles without gradient; only these pairs are
    differentiated.
    """

    def forward(self, proxies: Proxies | Tensor) -> Tensor:
        """Return the term for proxies [C, K, D] or [C, D]; zero for one class."""
        weight = _weight_of(proxies)
        if weight.shape[0] == 1:
            return weight.sum() * 0.0
        with torch.autocast(weight.device.type, enabled=False):
            flat, _ = rescale(weight.flatten(0, 1))
            _, nearest = nearest_other_class(l2_normalize(flat.detach())[0], weight.shape[1])
            total: Tensor = _PairCosines.apply(flat, nearest)  # type: ignore[no-untyped-call]
            return self.weight * total / len(flat)


class _PairCosines(torch.autograd.Function):
    """Σ_i cos(W_i, W_nearest(i)); the gradient reaches both members of a pair."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, nearest: Tensor) -> Tensor:
        inverse, _ = inverse_length(weight)
        cosines = weight.new_empty(len(weight))
        for rows in chunks(len(weight), block_rows(weight)):
            other = nearest[rows]
            dot = (weight[rows] * weight[other]).sum(1)
            cosines[rows] = dot * inverse[rows] * inverse[other]
        ctx.save_for_backward(weight, nearest, inverse, cosines)
        return cosines.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, nearest, inverse, cosines = ctx.saved_tensors
        # d cos(a, b) / da = b̂/‖a‖ − cos · a/‖a‖²; the second part is radial.
        radial = add_rows_(cosines.clone(), nearest, cosines).mul_(inverse.square())
        gradient = weight * radial.neg_().unsqueeze(1)
        for rows in chunks(len(weight), block_rows(weight)):
            other = nearest[rows]
            factor = (inverse[rows] * inverse[other]).unsqueeze(1)
            gradient[rows] += weight[other] * factor
            add_rows_(gradient, other, weight[rows] * factor)
        return gradient.mul_(grad), None


class CenterLoss(Term):
    """Center loss (Wen et al. 2016): pulls embeddings to the running center of their class.

    ``weight · ½ · mean_i ‖x_i − c_{y_i}‖²``. The optimizer does not train the centers: in training
    mode each call updates the centers of the batch by
    ``c_j ← c_j − rate · Σ_{y_i=j} (c_j − x_i) / (1 + n_j)``, after computing the loss. Embeddings
    are not normalized. A batch whose loss is not finite does not change the centers.
    """

    centers: Tensor

    def __init__(
        self, num_classes: int, dim: int, weight: float = 0.003, rate: float = 0.5
    ) -> None:
        super().__init__(weight)
        self.rate = positive("rate", rate)
        shape = (count("num_classes", num_classes), count("dim", dim))
        self.register_buffer("centers", torch.zeros(shape))

    def forward(self, embeddings: Tensor, labels: Labels) -> Tensor:
        """Return the term of a batch, and in training mode update the centers."""
        with torch.autocast(embeddings.device.type, enabled=False):
            labels, valid = _valid_labels(embeddings, labels, self.centers)
            offset = embeddings.to(self.centers.dtype) - self.centers[labels]
            offset = offset.masked_fill((valid == 0).unsqueeze(1), 0.0)
            loss = self.weight * 0.5 * weighted_mean(offset.square().sum(1), valid)
            if self.training:
                sums = add_rows_(torch.zeros_like(self.centers), labels, offset.detach())
                members = add_rows_(sums.new_zeros(len(sums), 1), labels, valid.unsqueeze(1))
                step = self.rate * sums / (1 + members)
                # A batch with NaN must not change the centers.
                self.centers.add_(step.masked_fill(~torch.isfinite(loss.detach()), 0.0))
            return loss


class AngularCenterLoss(Term):
    """Pulls embeddings to the proxy of their class (the center loss of Zhao et al. 2019).

    ``weight · mean_i (1 − cos(x_i, w_{y_i}))``: the proxies are the centers, trained by the
    optimizer. With several proxies per class, the nearest is used.
    """

    def forward(self, embeddings: Tensor, labels: Labels, proxies: Proxies | Tensor) -> Tensor:
        """Return the term of a batch, for proxies [C, K, D] or [C, D]."""
        centers = _weight_of(proxies)
        with torch.autocast(embeddings.device.type, enabled=False):
            labels, valid = _valid_labels(embeddings, labels, centers)
            x = embeddings.to(centers.dtype).masked_fill((valid == 0).unsqueeze(1), 0.0)
            cosine = (l2_normalize(centers[labels])[0] @ l2_normalize(x)[0].unsqueeze(2)).amax(
                (1, 2)
            )
            return self.weight * weighted_mean(1.0 - cosine, valid)


class QuantizationLoss(Term):
    """Pulls embeddings to their binary codes (Li et al. 2016, on the unit sphere).

    ``weight · mean_i ‖x̂_i − b_i / √D‖²`` with the unit vector x̂ and its code b = sign(x), of ±1.
    This equals the mean of (√D |x̂_ij| − 1)² over all entries, and of 2 (1 − cos(x_i, b_i)).
    """

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the term of a batch [B, D]."""
        with torch.autocast(embeddings.device.type, enabled=False):
            dtype = torch.promote_types(embeddings.dtype, torch.float32)
            direction, _ = l2_normalize(embeddings.to(dtype))
            difference = direction.abs() * math.sqrt(embeddings.shape[-1]) - 1.0
            return self.weight * difference.square().mean()


def _valid_labels(embeddings: Tensor, labels: Labels, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return validated labels [B], 0 for ignored samples, and the weight of each sample [B]."""
    labels = validate_batch(embeddings, labels, centers.shape[-1], len(centers))
    ignored = labels == IGNORED
    return labels.masked_fill(ignored, 0), (~ignored).to(centers.dtype)


def block_rows(weight: Tensor) -> int:
    """Return the number of rows of ``weight`` in a block of `BLOCK_ENTRIES`."""
    return max(1, BLOCK_ENTRIES // weight[0].numel())


def _weight_of(proxies: Proxies | Tensor) -> Tensor:
    if isinstance(proxies, ShardedProxies):
        raise ValueError("this term does not support sharded proxies. Do not shard the loss.")
    weight = proxies.weight if isinstance(proxies, Proxies) else proxies
    if weight.ndim not in (2, 3):
        raise ValueError(f"proxies must be [C, D] or [C, K, D], got {list(weight.shape)}")
    return weight.unsqueeze(1) if weight.ndim == 2 else weight
