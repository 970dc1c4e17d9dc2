"""Proxy-Anchor and the multi-proxy anchor family: logarithms of 1 + Σ, positives pulled apart."""

from typing import Literal, get_args

import torch
from torch import Tensor

from proximetry.losses import checks
from proximetry.losses.proxy_loss import Engine, ProxyLoss
from proximetry.losses.table import Row

NegativeClasses = Literal["all", "absent"]


class ProxyAnchor(ProxyLoss):
    """Proxy-Anchor (Kim et al. 2020; seed 001): every class gathers the whole batch around it.

    ``(1/|P⁺|) Σ_c log(1 + Σ_{y=c} e^{−α(s−δ)}) + (1/C) Σ_c log(1 + Σ_{y≠c} e^{α(s+δ)})``,
    P⁺ the classes in the batch, δ = ``margin``.
    """

    row = Row(similarity="single", group="class", combination="apart")
    settings = {"alpha": checks.positive, "margin": checks.finite}  # noqa: RUF012

    def __init__(
        self,
        num_classes: int,
        dim: int,
        alpha: float = 32.0,
        margin: float = 0.1,
        *,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(num_classes, dim, engine=engine)
        self.alpha = alpha
        self.margin = margin

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """−α(S − δ): large while the sample is far from its class."""
        return -self.alpha * (similarity - self.margin)

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """α(S + δ): large while the sample is near another class."""
        return self.alpha, self.alpha * self.margin


class MPA(ProxyAnchor):
    """Multi-proxies anchor loss (seed 004 eqs. 6 and 7): Proxy-Anchor with K proxies per class.

    S is the soft assignment of eq. 1 with temperature ``gamma``; ``tau`` weighs eq. 3. The paper
    states neither α (32 agrees with its Proxy-Anchor rerun) nor C⁻: ``negative_classes="all"``
    takes every class, as Proxy-Anchor does, ``"absent"`` those that are not in the batch.
    """

    row = Row(similarity="soft", group="class", combination="apart")
    settings = {  # noqa: RUF012
        **ProxyAnchor.settings,
        "gamma": checks.positive,
        "tau": checks.non_negative,
    }

    def __init__(
        self,
        num_classes: int,
        dim: int,
        proxies_per_class: int = 10,
        alpha: float = 32.0,
        margin: float = 0.1,
        gamma: float = 0.1,
        tau: float = 0.2,
        *,
        negative_classes: NegativeClasses = "all",
        engine: Engine = "auto",
    ) -> None:
        ProxyLoss.__init__(self, num_classes, dim, proxies_per_class, engine=engine)
        checks.one_of("negative_classes", negative_classes, get_args(NegativeClasses))
        self.negative_classes: NegativeClasses = negative_classes
        self.alpha = alpha
        self.margin = margin
        self.gamma = gamma
        self.tau = tau

    def negative_weight(self, labels: Tensor) -> float | Tensor:
        """1/|C⁻| for the classes of C⁻, 0 for the others."""
        if self.negative_classes == "all":
            return super().negative_weight(labels)
        weight = self.proxies.weight
        absent = torch.ones(weight.shape[0], dtype=weight.dtype, device=weight.device)
        absent = absent.scatter(0, labels, 0.0)
        return absent / absent.sum().clamp(min=1.0)


class _SampleWiseMPA(MPA):
    """What MPA-DW and MPA-AP share: MPA's logits and penalty, grouped by sample."""

    def __init__(
        self,
        num_classes: int,
        dim: int,
        proxies_per_class: int = 10,
        alpha: float = 32.0,
        margin: float = 0.1,
        gamma: float = 0.1,
        tau: float = 0.2,
        *,
        engine: Engine = "auto",
    ) -> None:
        super().__init__(
            num_classes, dim, proxies_per_class, alpha, margin, gamma, tau, engine=engine
        )


class MPADW(_SampleWiseMPA):
    """MPA-DW (seed 004 eqs. 12 and 13): MPA's logits summed over the classes of each sample.

    ``mean_i [ log(1 + e^{−α(S_iy−δ)}) + log(1 + Σ_{c≠y} e^{α(S_ic+δ)}) ]``. The gradient of a
    sample does not depend on the rest of the batch.
    """

    row = Row(similarity="soft", group="sample", combination="apart")


class MPAAP(_SampleWiseMPA):
    """MPA-AP (seed 004 eqs. 16 and 17): positives and negatives of a sample in one logarithm.

    ``mean_i log(1 + e^{α(δ−S_iy)} + Σ_{c≠y} e^{α(S_ic+δ)})``. Never above MPA-DW.
    """

    row = Row(similarity="soft", group="sample", combination="together")
