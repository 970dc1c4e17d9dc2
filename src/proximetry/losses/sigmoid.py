"""Losses by entry: for each sample and class, the sigmoid of one logit decides whether they match.

There is no maximum or sum over the classes, so that sharded proxies need one sum over the ranks.
"""

import math
from dataclasses import InitVar
from typing import Any

import torch
from torch import Tensor, nn

from proximetry.losses.adjustments import power
from proximetry.losses.base import ProxyLoss
from proximetry.losses.batch import Batch
from proximetry.losses.dense import softplus
from proximetry.losses.form import LossForm
from proximetry.losses.settings import (
    at_least_one,
    count,
    finite,
    fraction,
    non_negative,
    positive,
    setting,
)


class _Sigmoid(ProxyLoss):
    """Base of the losses by entry, with a learned bias b."""

    form = LossForm("max", by="entry", join="separate")
    default_init = "sphere"
    proxies_per_class: InitVar[int] = setting(
        count, "proxies per class K; the nearest counts (sub-centers)", default=1, last=True
    )

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies and the bias."""
        super().build(arguments)
        self.bias = nn.Parameter(torch.tensor(self.starting_bias(arguments)))

    def starting_bias(self, arguments: dict[str, Any]) -> float:
        """Return the bias before training."""
        raise NotImplementedError

    def _bias(self, batch: Batch) -> Tensor:
        return self.bias.to(batch.length.dtype).expand_as(batch.length)


class ProxySigmoid(_Sigmoid, name="proxy_sigmoid"):
    """The sigmoid loss of SigLIP (Zhai et al. 2023) with proxies instead of texts.

    ``mean_i [ log(1 + e^{−(t S_iy + b)}) + Σ_{c≠y} log(1 + e^{t S_ic + b}) ]``; the logarithm of t
    and b are trained.

    Examples:
        >>> import torch
        >>> from proximetry.losses import ProxySigmoid
        >>> loss = ProxySigmoid(num_classes=3, dim=3)
        >>> loss.proxies.weight.data = torch.eye(3)[:, None]
        >>> round(loss(torch.eye(3), [0, 1, 2]).item(), 4)
        0.6932
    """

    use = "Very many classes with sharded proxies; the sigmoid of a logit is a probability."
    initial_scale: InitVar[float] = setting(positive, "t before training", default=10.0)
    initial_bias: InitVar[float] = setting(finite, "b before training", default=-10.0)

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies, the scale and the bias."""
        super().build(arguments)
        self.log_scale = nn.Parameter(torch.tensor(math.log(arguments["initial_scale"])))

    def starting_bias(self, arguments: dict[str, Any]) -> float:
        """Return the setting."""
        bias: float = arguments["initial_bias"]
        return bias

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return −(tS + b)."""
        scale, offset = self.negative_logit(batch)
        return -(scale * similarity + offset)

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of tS + b."""
        scale = self.log_scale.exp().to(batch.length.dtype).expand_as(batch.length)
        return scale, self._bias(batch)


class UniFace(_Sigmoid, name="uniface"):
    """UniFace (Zhou et al. 2023): a unified cross-entropy with one threshold b for all classes.

    ``mean_i [ log(1 + e^{−(s(S_iy − m) − b)}) + l Σ_{c≠y} log(1 + e^{s S_ic − b}) ]``; b is trained
    and starts at log(10 C). The authors' code clips the logits at ±s.
    """

    use = "Recognition with very many classes and a similarity threshold that is part of the loss."
    scale: float = setting(positive, "scale s", default=64.0)
    margin: float = setting(finite, "margin m, in cosine", default=0.4)
    negative_share: float = setting(
        non_negative, "weight l of the negatives", default=1.0, last=True
    )

    def starting_bias(self, arguments: dict[str, Any]) -> float:
        """Return log(10 C)."""
        return math.log(10.0 * arguments["num_classes"])

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return b − s(S − m)."""
        return self._bias(batch) - self.scale * (similarity - self.margin)

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of sS − b."""
        return self.scale, -self._bias(batch)

    def join(self, positive: Tensor, negatives: Tensor) -> Tensor:
        """Weight the negatives."""
        return super().join(positive, self.negative_share * negatives)


class SphereFace2(_Sigmoid, name="sphereface2"):
    """SphereFace2 (Wen et al. 2022), with the margin in cosine (SphereFace2-C).

    ``mean_i [ (λ/r) log(1 + e^{−r(g(S_iy) − m) − b}) + ((1 − λ)/r) Σ_{c≠y} log(1 + e^{z_ic}) ]``
    with z = r(g(S) + m) + b and g(S) = 2((S + 1)/2)^t − 1. b is trained; it starts at the value of
    the authors' code, for similarities of 0. The gradient is that of the formula; in the authors'
    code the derivative of g is 1, and the loss is multiplied by 50.
    """

    form = LossForm("max", by="entry", join="separate", adjust=power)
    use = "Faces with a similarity threshold, without a softmax over the classes."
    scale: float = setting(positive, "scale r", default=40.0)
    margin: float = setting(finite, "margin m, in g(S)", default=0.4)
    exponent: float = setting(at_least_one, "exponent t of g", default=3.0)
    positive_share: float = setting(fraction, "weight λ of the positives", default=0.7)

    def starting_bias(self, arguments: dict[str, Any]) -> float:
        """Return the bias of the authors' code; for λ = 1 the value for the smallest weight."""
        share: float = min(arguments["positive_share"], 1.0 - 1e-6)
        odds = max(share, 1e-6) / ((1.0 - share) * max(1, arguments["num_classes"] - 1))
        zero: float = 2.0 * 0.5 ** arguments["exponent"] - 1.0  # g(0)
        scale: float = arguments["scale"]
        margin: float = arguments["margin"]
        root = math.hypot(1 - odds, 2 * math.sqrt(odds) * math.exp(min(-scale * margin, 300)))
        if odds < 1.0:
            last = math.log(1.0 - odds + root)
        else:  # without cancellation
            last = math.log(4 * odds) - 2 * scale * margin - math.log(max(root + odds - 1, 1e-300))
        return math.log(2.0 * odds) - scale * (zero + margin) - last

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return −r(g(S) − m) − b."""
        g, _ = power(similarity, None, self.exponent)
        return -self.scale * (g - self.margin) - self._bias(batch)

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of r(φ(S) + m) + b."""
        return self.scale, self.scale * self.margin + self._bias(batch)

    def adjust_arguments(self, batch: Batch) -> tuple[None, float]:
        """Return the exponent of φ = g."""
        return None, self.exponent

    def join(self, positive: Tensor, negatives: Tensor) -> Tensor:
        """Weight positives and negatives."""
        share = self.positive_share
        return (share * softplus(positive) + (1.0 - share) * negatives) / self.scale
