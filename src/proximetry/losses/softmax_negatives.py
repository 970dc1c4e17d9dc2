"""Softmax losses that change the similarities of hard negatives."""

from dataclasses import InitVar
from typing import Any, get_args

import torch
from torch import Tensor

from proximetry.losses.adjustments import circle, curricular, misclassified
from proximetry.losses.base import ProxyLoss
from proximetry.losses.batch import Batch
from proximetry.losses.form import LossForm
from proximetry.losses.settings import (
    angle,
    cosine_margin,
    count,
    fraction,
    non_negative,
    one_of,
    positive,
    setting,
)
from proximetry.losses.softmax import add_angle
from proximetry.losses.softmax_margins import MarginKind


class _Adjusted(ProxyLoss):
    """Base of the losses: the logit of the other classes is λφ(S)."""

    default_init = "small_normal"
    scale: float = setting(positive, "scale λ", default=64.0)
    proxies_per_class: InitVar[int] = setting(
        count, "proxies per class K; the nearest counts (sub-centers)", default=1, last=True
    )

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of scale · φ(S)."""
        return self.scale, 0.0

    def limit(self, batch: Batch) -> Tensor:
        """Return the similarity above which negatives are hard [B, 1]."""
        assert batch.own is not None
        return (self.positive_logit(batch.own, batch) / self.scale).unsqueeze(1)


class CurricularFace(_Adjusted, name="curricularface"):
    """CurricularFace (Huang et al. 2020): ArcFace whose hard negatives count more over time.

    φ(S) = S(t + S) if S > cos(θ_y + m), else S. t is the running mean of the similarities to the
    samples' classes, updated before the logits; it starts at 0, so that hard negatives count less
    at first. The margin continues beyond θ = π − m like that of ArcFace.
    """

    form = LossForm("max", by="sample", join="softmax", adjust=curricular)
    use = "Like ArcFace, with little weight for hard negatives at the beginning and more later."
    scale: float = setting(positive, "scale λ", default=64.0)
    margin: float = setting(angle, "margin m in **radians**", default=0.5)
    momentum: float = setting(
        fraction, "weight of a batch in the running mean t", default=0.01, last=True
    )

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies and t."""
        super().build(arguments)
        self.t: Tensor
        self.register_buffer("t", torch.zeros(()))

    def update_state(self, batch: Batch) -> None:
        """Update t, unless all samples are ignored."""
        assert batch.own is not None
        mean = (batch.own * batch.weights).sum() / batch.weights.sum()
        self.t.lerp_(torch.where(mean.isfinite(), mean, self.t), self.momentum)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ cos(θ + m)."""
        return self.scale * add_angle(similarity, self.margin)

    def adjust_arguments(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return cos(θ + m) and t."""
        return self.limit(batch), self.t.clone()


class MVSoftmax(_Adjusted, name="mv_softmax"):
    """MV-Softmax (Wang et al. 2020): hard negatives, which the margin misclassifies, count more.

    φ(S) = (t + 1)S + t if S exceeds the similarity to the sample's class with its margin, else S;
    the margin is CosFace's or ArcFace's. t = 0 has no effect.
    """

    form = LossForm("max", by="sample", join="softmax", adjust=misclassified)
    use = "Like CosFace or ArcFace, with more weight for hard negatives; for clean labels."
    scale: float = setting(positive, "scale λ", default=32.0)
    margin: float = setting(angle, "margin m, in cosine or in **radians**", default=0.35)
    t: float = setting(non_negative, "additional weight t of hard negatives", default=0.2)
    kind: MarginKind = setting(
        one_of(*get_args(MarginKind)),
        "whether the margin is in cosine (MV-AM) or in angle (MV-Arc)",
        default="cosine",
    )

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ(S − m) or λ cos(θ + m)."""
        if self.kind == "cosine":
            return self.scale * (similarity - self.margin)
        return self.scale * add_angle(similarity, self.margin)

    def adjust_arguments(self, batch: Batch) -> tuple[Tensor, float]:
        """Return S − m or cos(θ + m) of the sample's class, and t."""
        return self.limit(batch), self.t


class ProxyCircle(_Adjusted, name="proxy_circle"):
    """Circle loss with proxies (Sun et al. 2020): each similarity has its own weight.

    ``mean_i log(1 + Σ_{c≠y} e^{γ(α_c(S_ic − m) − α_y(S_iy − 1 + m))})`` with α_c = [S_ic + m]₊ and
    α_y = [1 + m − S_iy]₊, which have no gradient.
    """

    form = LossForm("max", by="sample", join="softmax", adjust=circle)
    use = "Similarities to the own class near 1 and to other classes near 0, with one margin."
    scale: float = setting(positive, "scale γ", default=256.0)
    margin: float = setting(cosine_margin, "margin m", default=0.25)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return γ[1 + m − S]₊(S − 1 + m)."""
        weight = (1.0 + self.margin - similarity.detach()).clamp(min=0.0)
        return self.scale * weight * (similarity - 1.0 + self.margin)

    def adjust_arguments(self, batch: Batch) -> tuple[None, float]:
        """Return m."""
        return None, self.margin
