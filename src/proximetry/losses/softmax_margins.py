"""Softmax losses whose margin depends on the sample or its class."""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proximetry.losses.batch import Batch
from proximetry.losses.settings import (
    angle,
    boolean,
    finite,
    fraction,
    non_negative,
    one_of,
    positive,
    setting,
)
from proximetry.losses.softmax import NormSoftmax, add_angle, sine

MarginKind = Literal["angle", "cosine"]


class CombinedMargin(NormSoftmax, name="combined_margin"):
    """The combined margin of ArcFace (Deng et al. 2019, eq. 4): λ(cos(m₁θ + m₂) − m₃).

    For angles with m₁θ + m₂ > π the cosine continues as cos θ − cos((π − m₂)/m₁) − 1, which is
    continuous and decreasing. (1, m, 0) is ArcFace and (1, 0, m) CosFace.
    """

    use = "Like ArcFace or CosFace, to tune the kind of margin; usual for faces."
    scale: float = setting(positive, "scale λ", default=64.0)
    m1: float = setting(positive, "factor m₁ of the angle", default=1.0)
    m2: float = setting(angle, "margin m₂, added to the angle, in **radians**", default=0.3)
    m3: float = setting(finite, "margin m₃, subtracted from the cosine", default=0.2)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ(cos(m₁θ + m₂) − m₃)."""
        if self.m1 == 1.0:
            return self.scale * (add_angle(similarity, self.m2) - self.m3)
        theta = torch.atan2(sine(similarity), similarity)
        limit = (math.pi - self.m2) / self.m1
        beyond = similarity - math.cos(limit) - 1.0
        cosine = torch.where(theta > limit, beyond, torch.cos(self.m1 * theta + self.m2))
        return self.scale * (cosine - self.m3)


class AdaFace(NormSoftmax, name="adaface"):
    """AdaFace (Kim et al. 2022): margins that adapt to the image quality, measured by ‖x‖.

    ẑ = clip((‖x‖ − μ)/(σ + 0.001) · h, −1, 1), with ‖x‖ detached and clipped to 0.001 … 100; μ
    and σ are running statistics of the lengths, updated before the logits. The angle θ − m ẑ is
    clipped to 0 … π. Long embeddings get a margin in cosine, short ones a margin in angle.
    """

    use = "Faces of mixed image quality; the length of an embedding must be free to vary."
    scale: float = setting(positive, "scale λ", default=64.0)
    margin: float = setting(angle, "margin m, in radians and in cosine", default=0.4)
    concentration: float = setting(
        non_negative, "concentration h: the margin at one standard deviation", default=1 / 3
    )
    momentum: float = setting(
        fraction, "weight of a batch in the running statistics", default=0.01, last=True
    )

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies and the statistics of the lengths, which start as in the code."""
        super().build(arguments)
        self.length_mean: Tensor
        self.length_deviation: Tensor
        self.register_buffer("length_mean", torch.full((), 20.0))
        self.register_buffer("length_deviation", torch.full((), 100.0))

    def update_state(self, batch: Batch) -> None:
        """Update the statistics; a batch without two samples has no standard deviation."""
        length, count = _clipped_length(batch), batch.weights.sum()
        mean = (batch.weights * length).sum() / count
        squares = (batch.weights * (length - mean).square()).sum()
        deviation = (squares / (count - 1.0)).sqrt()
        for buffer, value, is_valid in (
            (self.length_mean, mean, mean.isfinite()),
            (self.length_deviation, deviation, deviation.isfinite() & (count > 1.0)),
        ):
            buffer.lerp_(torch.where(is_valid, value, buffer), self.momentum)

    def quality(self, batch: Batch) -> Tensor:
        """Return ẑ [B]: the standardized length, from −1 to 1."""
        z = (_clipped_length(batch) - self.length_mean) / (self.length_deviation + 1e-3)
        return (z * self.concentration).clamp(-1.0, 1.0)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ(cos(θ − mẑ) − m(ẑ + 1))."""
        z = self.quality(batch)
        change = -self.margin * z
        cosine_m, sine_m = change.cos(), change.sin()
        cosine = similarity * cosine_m - sine(similarity) * sine_m
        cosine = torch.where((change < 0) & (similarity > cosine_m), 1.0, cosine)
        cosine = torch.where((change > 0) & (similarity < -cosine_m), -1.0, cosine)
        return self.scale * (cosine - self.margin * (z + 1.0))


def _clipped_length(batch: Batch) -> Tensor:
    return batch.length.detach().clamp(1e-3, 100.0)


class MagFace(NormSoftmax, name="magface"):
    """MagFace (Meng et al. 2021): an angular margin that grows with the length of the embedding.

    a = ‖x‖ clipped to l … u; the margin m(a) grows linearly from m_l to m_u. The term
    ``magnitude_weight`` · (a/u² + 1/a) rewards long embeddings, so easy images become longer than
    hard ones: the length is a quality score. Both have a gradient by ‖x‖.
    """

    use = "Faces, if the length of the embedding is to be a quality score."
    scale: float = setting(positive, "scale λ", default=64.0)
    margin_min: float = setting(angle, "margin m_l in **radians** at length l", default=0.45)
    margin_max: float = setting(angle, "margin m_u in **radians** at length u", default=0.8)
    length_min: float = setting(positive, "lower bound l of the length", default=10.0)
    length_max: float = setting(positive, "upper bound u of the length", default=110.0)
    magnitude_weight: float = setting(
        non_negative, "weight λ_g of the regularizer of the length", default=35.0
    )

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ cos(θ + m(‖x‖))."""
        if self.length_min >= self.length_max:
            raise ValueError(
                f"length_max must be above length_min, {self.length_min}; got {self.length_max}"
            )
        slope = (self.margin_max - self.margin_min) / (self.length_max - self.length_min)
        margin = self.margin_min + slope * (self._length(batch) - self.length_min)
        return self.scale * add_angle(similarity, margin)

    def penalty(self, batch: Batch) -> Tensor:
        """Return λ_g(a/u² + 1/a)."""
        a = self._length(batch)
        return self.magnitude_weight * (a / self.length_max**2 + 1.0 / a)

    def _length(self, batch: Batch) -> Tensor:
        return batch.length.clamp(self.length_min, self.length_max)


class ElasticFace(NormSoftmax, name="elasticface"):
    """ElasticFace (Boutros et al. 2022): in training, every sample has a random margin.

    The margin is drawn from a normal distribution; in evaluation mode it is the mean. With
    ``sort_margins`` (ElasticFace+) the sample with the k-th smallest similarity to its class has
    the k-th largest margin. Margins in angle are clipped to 0 … π.
    """

    use = "Like ArcFace or CosFace, if one margin does not fit all classes."
    scale: float = setting(positive, "scale λ", default=64.0)
    margin: float = setting(finite, "mean margin m, in **radians** or in cosine", default=0.5)
    deviation: float = setting(non_negative, "standard deviation σ of the margin", default=0.05)
    kind: MarginKind = setting(
        one_of(*get_args(MarginKind)),
        "whether the margin is in angle or in cosine",
        default="angle",
    )
    sort_margins: bool = setting(boolean, "larger margins for harder samples", default=False)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ cos(θ + m) or λ(S − m), with m ~ N(m, σ²)."""
        margin = torch.full_like(similarity, self.margin)
        if self.training and self.deviation:
            margin += self.deviation * torch.randn_like(similarity)
            if self.sort_margins:
                hardest_first = similarity.detach().argsort()
                largest_first = margin.sort(descending=True).values
                margin = margin.scatter(0, hardest_first, largest_first)
        if self.kind == "cosine":
            return self.scale * (similarity - margin)
        return self.scale * add_angle(similarity, margin.clamp(0.0, math.pi))


class DynamicMargin(NormSoftmax, name="dynamic_margin"):
    """Dynamic margin (Ha et al. 2020): an angular margin that is larger for smaller classes.

    For n images of a class the margin is a n^(−p) + b, with a and b such that the smallest class
    has the margin ``margin_max`` and the largest ``margin_min``. The trainer sets the numbers of
    training images; in your own loop, call `set_class_counts`. Until then all classes are equal.

    Examples:
        >>> from proximetry.losses import DynamicMargin
        >>> loss = DynamicMargin(num_classes=3, dim=8)
        >>> loss.set_class_counts([16, 256, 10_000])
        >>> [round(m, 3) for m in loss.class_margins().tolist()]
        [0.5, 0.219, 0.05]
    """

    use = "Classes of very different sizes."
    scale: float = setting(positive, "scale λ", default=64.0)
    margin_min: float = setting(angle, "margin of the largest class, in **radians**", default=0.05)
    margin_max: float = setting(angle, "margin of the smallest class, in **radians**", default=0.5)
    exponent: float = setting(positive, "exponent p of the number of images", default=0.25)

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies, and the numbers of images, all equal."""
        super().build(arguments)
        self.class_counts: Tensor
        self.register_buffer("class_counts", torch.ones(arguments["num_classes"]))

    def set_class_counts(self, counts: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Set the number of training images of each class [C]; 0 counts as 1."""
        values = torch.as_tensor(np.asarray(counts), dtype=self.class_counts.dtype)
        if values.shape != (self.proxies.num_classes,):
            raise ValueError(
                f"counts must have {self.proxies.num_classes} entries, one per class; got "
                f"{list(values.shape)}"
            )
        self.class_counts = values.clamp(min=1.0).to(self.class_counts.device)

    def class_margins(self) -> Tensor:
        """Return the margin of each class [C]."""
        return self._margins(self.class_counts)

    def _margins(self, counts: Tensor) -> Tensor:
        smallest, largest = self.class_counts.aminmax()
        low, high, value = (n**-self.exponent for n in (largest, smallest, counts))
        tiny = torch.finfo(counts.dtype).tiny  # equal classes have the largest margin
        share = 1.0 - (high - value) / (high - low).clamp(min=tiny)
        return self.margin_min + (self.margin_max - self.margin_min) * share

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ cos(θ + m_y)."""
        margin = self._margins(self.class_counts[batch.labels])
        return self.scale * add_angle(similarity, margin)
