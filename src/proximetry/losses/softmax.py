"""The softmax family: a sample chooses among the classes; margins make its own class harder."""

import math

import torch
from torch import Tensor, nn

from proximetry.losses import checks
from proximetry.losses.proxy_loss import Engine, ProxyLoss
from proximetry.losses.table import Row


class ProxyNCA(ProxyLoss):
    """Proxy-NCA (Movshovitz-Attias et al. 2017): the positive is left out of the denominator.

    ``mean_i −log( e^{−d(x,p_y)/T} / Σ_{c≠y} e^{−d(x,p_c)/T} )`` with squared distances of unit
    vectors, d = 2 − 2 cos, so the logits are 2 cos / T; T = ``temperature``. May be negative.
    """

    row = Row(similarity="single", group="sample", combination="others")
    default_init = "normal"
    settings = {"temperature": checks.positive}  # noqa: RUF012
    temperature: float

    def __init__(
        self, num_classes: int, dim: int, temperature: float = 1.0, *, engine: Engine = "auto"
    ) -> None:
        super().__init__(num_classes, dim, engine=engine)
        self.temperature = temperature

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """2 S / T."""
        return 2.0 / self.temperature * similarity

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """2 S / T."""
        return 2.0 / self.temperature, 0.0


class ProxyNCAPlusPlus(ProxyLoss):
    """ProxyNCA++ (Teh et al. 2020; seed 002): softmax over all proxies at low temperature.

    ``mean_i −log( e^{−d(x,p_y)/T} / Σ_c e^{−d(x,p_c)/T} )``, d the squared distance of unit
    vectors. At T = 1/9 this is cross-entropy on 18 cos. With ``learn_temperature`` the logarithm
    of T is a parameter, trained like the rest.
    """

    row = Row(similarity="single", group="sample", combination="softmax")
    default_init = "normal"

    def __init__(
        self,
        num_classes: int,
        dim: int,
        temperature: float = 1.0 / 9.0,
        *,
        learn_temperature: bool = False,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(num_classes, dim, engine=engine)
        self.log_temperature: nn.Parameter | None = (
            nn.Parameter(torch.zeros(())) if learn_temperature else None
        )
        self.temperature = temperature

    @property
    def temperature(self) -> float:
        """T, fixed or as learned so far."""
        if self.log_temperature is None:
            return self._temperature
        return math.exp(self.log_temperature.item())

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = checks.positive("temperature", value)
        if self.log_temperature is not None:
            with torch.no_grad():
                self.log_temperature.fill_(math.log(value))

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """2 S / T."""
        return self.negative_logit(length)[0] * similarity

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """2 S / T."""
        if self.log_temperature is None:
            return 2.0 / self._temperature, 0.0
        return (2.0 * torch.exp(-self.log_temperature)).to(length.dtype).expand_as(length), 0.0

    def extra_repr(self) -> str:
        """Settings and engine, for ``print(loss)``."""
        learned = self.log_temperature is not None
        return f"temperature={self.temperature!r}, learned={learned}, engine={self.engine!r}"


class SoftTriple(ProxyLoss):
    """SoftTriple (Qian et al. 2019; seed 004 eqs. 1 to 4): softmax over soft-assigned classes.

    ``mean_i −log( e^{λ(S_iy−δ)} / (e^{λ(S_iy−δ)} + Σ_{c≠y} e^{λ S_ic}) )`` plus ``tau`` times the
    intra-class term; λ = ``scale``, δ = ``margin``, ``gamma`` the temperature of the assignment.
    """

    row = Row(similarity="soft", group="sample", combination="softmax")
    default_init = "kaiming_uniform"
    settings = {  # noqa: RUF012
        "scale": checks.positive,
        "gamma": checks.positive,
        "margin": checks.finite,
        "tau": checks.non_negative,
    }

    def __init__(
        self,
        num_classes: int,
        dim: int,
        proxies_per_class: int = 10,
        scale: float = 20.0,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0.2,
        *,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(num_classes, dim, proxies_per_class, engine=engine)
        self.scale = scale
        self.gamma = gamma
        self.margin = margin
        self.tau = tau

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """λ(S − δ)."""
        return self.scale * (similarity - self.margin)

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """λ S."""
        return self.scale, 0.0


class NormSoftmax(ProxyLoss):
    """Normalised softmax (Zhai & Wu 2019): cross-entropy on ``scale`` · cos.

    With ``proxies_per_class`` > 1 the nearest proxy speaks for its class (sub-centres).
    """

    row = Row(similarity="max", group="sample", combination="softmax")
    default_init = "small_normal"
    settings = {"scale": checks.positive}  # noqa: RUF012

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 20.0,
        *,
        proxies_per_class: int = 1,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(num_classes, dim, proxies_per_class, engine=engine)
        self.scale = scale

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """Scale · S."""
        return self.scale * similarity

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """Scale · S."""
        return self.scale, 0.0


class CosFace(NormSoftmax):
    """CosFace (Wang et al. 2018): the own class must win by ``margin`` in cosine."""

    settings = {**NormSoftmax.settings, "margin": checks.finite}  # noqa: RUF012

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.35,
        *,
        proxies_per_class: int = 1,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            num_classes, dim, scale, proxies_per_class=proxies_per_class, engine=engine
        )
        self.margin = margin

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """Scale · (S − m)."""
        return self.scale * (similarity - self.margin)


def _margin_angle(name: str, value: float) -> float:
    angle = checks.non_negative(name, value)
    if angle >= math.pi:
        raise ValueError(f"{name} is an angle in radians below π, got {value!r}")
    return angle


class ArcFace(CosFace):
    """ArcFace (Deng et al. 2019): the own class must win by ``margin`` radians.

    The positive logit is scale · cos(θ + m) while θ ≤ π − m; beyond, where the cosine would rise
    again, scale · (cos θ + cos m − 1), which continues it without a jump. The gradient is the true
    one through the angle.
    """

    settings = {**NormSoftmax.settings, "margin": _margin_angle}  # noqa: RUF012

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        *,
        proxies_per_class: int = 1,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            num_classes, dim, scale, margin, proxies_per_class=proxies_per_class, engine=engine
        )

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """Scale · cos(θ + m), without the arc cosine, whose slope is infinite at ±1."""
        cosine, sine = math.cos(self.margin), math.sin(self.margin)
        least = torch.finfo(similarity.dtype).eps
        sine_theta = (1.0 - similarity.square()).clamp(min=least).sqrt()
        turned = similarity * cosine - sine_theta * sine
        return self.scale * torch.where(similarity > -cosine, turned, similarity + cosine - 1.0)


class SphereFace(ProxyLoss):
    """SphereFace (Liu et al. 2017; seed 003): the angle to the own class counts ``margin``-fold.

    The embedding keeps its length: logits ‖x‖ cos θ, and ‖x‖ (λ cos θ + ψ(θ)) / (1 + λ) for the own
    class, with ψ(θ) = (−1)^k cos(mθ) − 2k on [kπ/m, (k+1)π/m], the monotone form of cos(mθ).
    λ is annealed over the training steps t: max(λ_min, base · (1 + rate·t)^−power).
    """

    row = Row(similarity="max", group="sample", combination="softmax")
    default_init = "sphere"
    settings = {  # noqa: RUF012
        "margin": checks.count,
        "lambda_base": checks.positive,
        "lambda_rate": checks.non_negative,
        "lambda_power": checks.non_negative,
        "lambda_min": checks.non_negative,
    }
    step: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: int = 4,
        *,
        lambda_base: float = 1000.0,
        lambda_rate: float = 0.12,
        lambda_power: float = 1.0,
        lambda_min: float = 5.0,
        proxies_per_class: int = 1,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(num_classes, dim, proxies_per_class, engine=engine)
        self.margin = margin
        self.lambda_base = lambda_base
        self.lambda_rate = lambda_rate
        self.lambda_power = lambda_power
        self.lambda_min = lambda_min
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def annealed_lambda(self) -> Tensor:
        """λ at the present step, as a tensor on the device of the loss."""
        growth = (1.0 + self.lambda_rate * self.step.double()) ** -self.lambda_power
        return (self.lambda_base * growth).clamp(min=self.lambda_min)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; in training mode the step of the annealing advances by one."""
        loss = super().forward(embeddings, labels)
        if self.training:
            self.step.add_(1)
        return loss

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """‖x‖ (λ cos θ + ψ(θ)) / (1 + λ)."""
        lam = self.annealed_lambda().to(similarity.dtype)
        return length * (lam * similarity + self._psi(similarity)) / (1.0 + lam)

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """‖x‖ cos θ."""
        return length, 0.0

    def _psi(self, cosine: Tensor) -> Tensor:
        with torch.no_grad():  # which branch: a step function of the angle
            theta = torch.acos(cosine.clamp(-1.0, 1.0))
            k = (theta * (self.margin / math.pi)).floor().clamp(max=self.margin - 1)
            sign = 1.0 - 2.0 * torch.remainder(k, 2.0)
        return sign * _chebyshev(cosine, self.margin) - 2.0 * k


def _chebyshev(cosine: Tensor, m: int) -> Tensor:
    """cos(mθ) as a polynomial of cos θ: exact, with a finite slope everywhere."""
    before, now = torch.ones_like(cosine), cosine
    for _ in range(m - 1):
        before, now = now, 2.0 * cosine * now - before
    return now
