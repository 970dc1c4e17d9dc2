"""The softmax family: cross-entropy over classes, with margins on the sample's class."""

import math
from dataclasses import InitVar
from typing import Any

import torch
from torch import Tensor, nn

from proximetry.losses.base import ProxyLoss
from proximetry.losses.batch import Batch
from proximetry.losses.form import LossForm
from proximetry.losses.settings import (
    angle,
    boolean,
    count,
    finite,
    fraction,
    non_negative,
    positive,
    setting,
)


class ProxyNCA(ProxyLoss, name="proxy_nca"):
    """Proxy-NCA (Movshovitz-Attias et al. 2017): the positive is not in the denominator.

    ``mean_i −log( e^{−d(x,p_y)/T} / Σ_{c≠y} e^{−d(x,p_c)/T} )`` with squared distances of unit
    vectors, d = 2 − 2 cos, so the logits are 2 cos / T; T = ``temperature``. May be negative.
    """

    use = "To reproduce the paper; otherwise use ProxyNCA++."
    form = LossForm("single", by="sample", join="nca")
    default_init = "normal"
    temperature: float = setting(positive, "temperature T", default=1.0)

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of 2S/T."""
        return 2.0 / self.temperature, 0.0


class _Softmax(ProxyLoss):
    """Base of the losses with a softmax over all classes."""

    label_smoothing: float = setting(
        fraction,
        "label smoothing ε: the fraction of the target spread evenly over all classes",
        default=0.0,
        last=True,
    )


class ProxyNCAPlusPlus(_Softmax, name="proxy_nca_plus_plus"):
    """ProxyNCA++ (Teh et al. 2020): softmax over all proxies at low temperature.

    ``mean_i −log( e^{−d(x,p_y)/T} / Σ_c e^{−d(x,p_c)/T} )``, d the squared distance of unit
    vectors. At T = 1/9 this is cross-entropy on 18 cos. With ``learn_temperature`` the logarithm
    of T is a trained parameter.
    """

    use = "Many classes with few images each; batches of any composition."
    form = LossForm("single", by="sample", join="softmax")
    default_init = "normal"
    _temperature: float = setting(
        positive,
        "temperature T, or its initial value if learned",
        default=1.0 / 9.0,
        alias="temperature",
    )
    learn_temperature: InitVar[bool] = setting(
        boolean, "learn T as the parameter `log_temperature`", default=False, last=True
    )

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies, and the parameter if T is learned."""
        super().build(arguments)
        learn = arguments["learn_temperature"]
        self.log_temperature = nn.Parameter(torch.zeros(())) if learn else None

    @property
    def temperature(self) -> float:
        """The temperature T, fixed or learned."""
        if self.log_temperature is None:
            return self._temperature
        return math.exp(self.log_temperature.item())

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = value
        if self.log_temperature is not None:
            with torch.no_grad():
                self.log_temperature.fill_(math.log(value))

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of 2S/T."""
        if self.log_temperature is None:
            return 2.0 / self._temperature, 0.0
        scale = 2.0 * torch.exp(-self.log_temperature)
        return scale.to(batch.length.dtype).expand_as(batch.length), 0.0


class SoftTriple(_Softmax, name="soft_triple"):
    """SoftTriple (Qian et al. 2019; Saeki et al. 2021, eqs. 1 to 4): softmax over soft classes.

    ``mean_i −log( e^{λ(S_iy−δ)} / (e^{λ(S_iy−δ)} + Σ_{c≠y} e^{λ S_ic}) )`` plus ``tau`` times the
    intra-class term; λ = ``scale``, δ = ``margin``, ``gamma`` the temperature of the assignment.

    Examples:
        >>> import torch
        >>> from proximetry.losses import SoftTriple
        >>> loss = SoftTriple(num_classes=5, dim=16, proxies_per_class=2)
        >>> loss(torch.randn(8, 16), torch.arange(8) % 5, reduction="none").shape
        torch.Size([8])
    """

    use = "Many classes with few images each (then K = 2), or classes with several modes."
    form = LossForm("soft", by="sample", join="softmax")
    default_init = "kaiming_uniform"
    proxies_per_class: InitVar[int] = setting(count, "proxies per class K", default=10)
    scale: float = setting(positive, "scale λ", default=20.0)
    gamma: float = setting(
        positive,
        "temperature γ of the soft assignment: small for the nearest proxy, large for the mean",
        default=0.1,
    )
    margin: float = setting(finite, "margin δ", default=0.01)
    tau: float = setting(non_negative, "weight τ of the intra-class term", default=0.2)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ(S − δ)."""
        return self.scale * (similarity - self.margin)

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of λS."""
        return self.scale, 0.0


class NormSoftmax(_Softmax, name="norm_softmax"):
    """Normalized softmax (Zhai & Wu 2019): cross-entropy on ``scale`` · cos.

    With ``proxies_per_class`` > 1, S is the cosine with the nearest proxy of a class (sub-centers).

    Examples:
        >>> import torch
        >>> from proximetry.losses import NormSoftmax
        >>> loss = NormSoftmax(num_classes=3, dim=3, scale=10)
        >>> loss.proxies.weight.data = torch.eye(3)[:, None]
        >>> round(loss(torch.eye(3), [0, 1, 2]).item(), 6)
        9.1e-05
    """

    use = "A baseline with one setting, easy to train."
    form = LossForm("max", by="sample", join="softmax")
    default_init = "small_normal"
    scale: float = setting(positive, "scale λ, the inverse temperature", default=20.0)
    proxies_per_class: InitVar[int] = setting(
        count, "proxies per class K; the nearest counts (sub-centers)", default=1, last=True
    )

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of λS."""
        return self.scale, 0.0


class CosFace(NormSoftmax, name="cosface"):
    """CosFace (Wang et al. 2018): a margin in cosine between a sample's class and the others."""

    use = "Recognition with very many classes (faces, products) and a similarity threshold."
    scale: float = setting(positive, "scale λ", default=64.0)
    margin: float = setting(finite, "margin m, in cosine", default=0.35)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ(S − m)."""
        return self.scale * (similarity - self.margin)


class ArcFace(CosFace, name="arcface"):
    """ArcFace (Deng et al. 2019): a margin in angle between a sample's class and the others.

    The positive logit is scale · cos(θ + m) up to θ = π − m. For larger angles, where this cosine
    increases again, it is scale · (cos θ + cos m − 1), which is continuous. The gradient is exact.
    """

    use = "Recognition with very many classes and a similarity threshold; usual for faces."
    margin: float = setting(angle, "margin m in **radians**", default=0.5)

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return λ cos(θ + m)."""
        return self.scale * add_angle(similarity, self.margin)


def sine(cosine: Tensor) -> Tensor:
    """Return sin θ from cos θ, for θ from 0 to π."""
    # 1 − s² would cancel near s = 1. With the clamp the slope at s = 1 is zero, not infinite.
    tiny = torch.finfo(cosine.dtype).tiny
    return ((1.0 - cosine) * (1.0 + cosine)).clamp(min=tiny).sqrt()


def add_angle(cosine: Tensor, margin: float | Tensor) -> Tensor:
    """Return cos(θ + m) from cos θ, and cos θ + cos m − 1 for θ > π − m, for m from 0 to π.

    The arc cosine is avoided: its slope is infinite at ±1.
    """
    cosine_m: float | Tensor
    sine_m: float | Tensor
    if isinstance(margin, Tensor):
        cosine_m, sine_m = margin.cos(), margin.sin()
    else:
        cosine_m, sine_m = math.cos(margin), math.sin(margin)
    cosine_sum = cosine * cosine_m - sine(cosine) * sine_m
    return torch.where(cosine > -cosine_m, cosine_sum, cosine + cosine_m - 1.0)


class SphereFace(_Softmax, name="sphereface"):
    """SphereFace (Liu et al. 2017): the angle to a sample's class is multiplied by ``margin``.

    Embeddings are not normalized: logits ‖x‖ cos θ, and ‖x‖ (λ cos θ + ψ(θ)) / (1 + λ) for the
    sample's class; ψ(θ) = (−1)^k cos(mθ) − 2k on [kπ/m, (k+1)π/m], the monotone form of cos(mθ).
    λ is annealed over the training steps t = 1, 2, …: max(λ_min, base · (1 + rate·t)^−power).
    """

    use = "To reproduce SphereFace or RegularFace; otherwise use CosFace or ArcFace."
    form = LossForm("max", by="sample", join="softmax")
    default_init = "sphere"
    margin: int = setting(count, "margin m, an integer", default=4)
    lambda_base: float = setting(positive, "λ before the first step", default=1000.0, last=True)
    lambda_rate: float = setting(non_negative, "decay rate of λ", default=0.12, last=True)
    lambda_power: float = setting(
        non_negative, "exponent of the decay of λ", default=1.0, last=True
    )
    lambda_min: float = setting(non_negative, "lower bound of λ", default=5.0, last=True)
    proxies_per_class: InitVar[int] = setting(
        count, "proxies per class K; the nearest counts (sub-centers)", default=1, last=True
    )

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies and the step counter."""
        super().build(arguments)
        self.step: Tensor
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def annealed_lambda(self) -> Tensor:
        """Return λ of the next step, as a tensor on the device of the loss."""
        # In the authors' code the first step is 1.
        decay = (1.0 + self.lambda_rate * (self.step.double() + 1.0)) ** -self.lambda_power
        return (self.lambda_base * decay).clamp(min=self.lambda_min)

    def ramp(self) -> Tensor | float:
        """Return λ_min / λ, as in the code of RegularFace, or 1 if λ_min is 0."""
        return self.lambda_min / self.annealed_lambda().float() if self.lambda_min else 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss, and in training mode count the step."""
        loss = super().forward(*args, **kwargs)
        if self.training and kwargs.get("truncate_dim") is None:
            self.step.add_(1)
        return loss

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return ‖x‖(λ cos θ + ψ(θ))/(1 + λ)."""
        lam = self.annealed_lambda().to(similarity.dtype)
        return batch.length * (lam * similarity + self._psi(similarity)) / (1.0 + lam)

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of ‖x‖ cos θ."""
        return batch.length, 0.0

    def _psi(self, cosine: Tensor) -> Tensor:
        with torch.no_grad():  # the branch is a step function of the angle
            theta = torch.acos(cosine.clamp(-1.0, 1.0))
            k = (theta * (self.margin / math.pi)).floor().clamp(max=self.margin - 1)
            sign = 1.0 - 2.0 * torch.remainder(k, 2.0)
        # cos(mθ) as a Chebyshev polynomial of cos θ, whose slope is finite everywhere.
        previous, current = torch.ones_like(cosine), cosine
        for _ in range(self.margin - 1):
            previous, current = current, 2.0 * cosine * current - previous
        return sign * current - 2.0 * k
