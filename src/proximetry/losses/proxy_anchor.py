"""Proxy-Anchor and its versions with several proxies per class."""

from collections.abc import Callable
from dataclasses import InitVar
from typing import Literal, get_args

from torch import Tensor

from proximetry.losses.base import ProxyLoss
from proximetry.losses.batch import Batch
from proximetry.losses.form import LossForm
from proximetry.losses.settings import cosine_margin, count, non_negative, one_of, positive, setting

NegativeClasses = Literal["all", "absent"]


class _AnchorLogits:
    """The logits of Proxy-Anchor and its versions with several proxies per class."""

    alpha: float
    margin: float

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return −α(S − δ): large while the sample is far from its class."""
        return -self.alpha * (similarity - self.margin)

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return scale and offset of α(S + δ): large while the sample is near another class."""
        return self.alpha, self.alpha * self.margin


class ProxyAnchor(_AnchorLogits, ProxyLoss, name="proxy_anchor"):
    """Proxy-Anchor (Kim et al. 2020, eq. 4): each class against all samples of the batch.

    ``(1/|P⁺|) Σ_c log(1 + Σ_{y=c} e^{−α(s−δ)}) + (1/C) Σ_c log(1 + Σ_{y≠c} e^{α(s+δ)})``,
    with P⁺ the classes in the batch, α = ``alpha``, δ = ``margin``.

    Examples:
        >>> import torch
        >>> from proximetry.losses import ProxyAnchor
        >>> loss = ProxyAnchor(num_classes=100, dim=64)
        >>> embeddings = torch.randn(8, 64, requires_grad=True)
        >>> value = loss(embeddings, torch.arange(8))
        >>> value.backward()
        >>> loss.proxies.weight.grad.shape
        torch.Size([100, 1, 64])
    """

    use = "A good first choice: two robust settings, random sampling; large batches help."
    form = LossForm("single", by="class", join="separate")
    alpha: float = setting(positive, "sharpness α of the exponentials", default=32.0)
    margin: float = setting(cosine_margin, "margin δ", default=0.1)


class _MultiProxyAnchor(_AnchorLogits, ProxyLoss):
    """The settings shared by the losses of Saeki et al. 2021."""

    proxies_per_class: InitVar[int] = setting(count, "proxies per class K", default=10)
    alpha: float = setting(positive, "sharpness α of the exponentials", default=32.0)
    margin: float = setting(cosine_margin, "margin δ", default=0.1)
    gamma: float = setting(positive, "temperature γ of the soft assignment", default=0.1)
    tau: float = setting(non_negative, "weight τ of the intra-class term", default=0.2)


class MPA(_MultiProxyAnchor, name="mpa"):
    """Multi-proxies anchor (Saeki et al. 2021, eqs. 6, 7): Proxy-Anchor with K proxies per class.

    S is the soft assignment of eq. 1 with temperature ``gamma``; ``tau`` weighs eq. 3. The paper
    states neither α (32 agrees with its Proxy-Anchor results) nor C⁻: ``negative_classes="all"``
    uses all classes, like Proxy-Anchor, ``"absent"`` those that are not in the batch.

    Examples:
        >>> import torch
        >>> from proximetry.losses import MPA
        >>> loss = MPA(num_classes=5, dim=16, proxies_per_class=3)
        >>> loss(torch.randn(8, 16), torch.arange(8) % 5).shape
        torch.Size([])
        >>> loss.similarities(torch.randn(8, 16)).shape
        torch.Size([8, 5])
    """

    use = "Few classes with many images each, and several modes per class."
    form = LossForm("soft", by="class", join="separate")
    negative_classes: NegativeClasses = setting(
        one_of(*get_args(NegativeClasses)),
        "classes of the negative term, C⁻: all, or those absent from the batch",
        default="all",
        last=True,
    )

    def negative_weight(
        self, classes: int, present: Callable[[], tuple[Tensor, Tensor]]
    ) -> float | Tensor:
        """Return 1/|C⁻| for the classes of C⁻, 0 for the others."""
        if self.negative_classes == "all":
            return super().negative_weight(classes, present)
        is_present, count = present()
        return (1.0 - is_present) / (classes - count).clamp(min=1.0)


class MPADW(_MultiProxyAnchor, name="mpa_dw"):
    """MPA-DW (Saeki et al. 2021, eqs. 12, 13): the logits of MPA, summed per sample.

    ``mean_i [ log(1 + e^{−α(S_iy−δ)}) + log(1 + Σ_{c≠y} e^{α(S_ic+δ)}) ]``. The gradient of a
    sample does not depend on the rest of the batch.
    """

    use = "Like MPA, for small or unbalanced batches."
    form = LossForm("soft", by="sample", join="separate")


class MPAAP(_MultiProxyAnchor, name="mpa_ap"):
    """MPA-AP (Saeki et al. 2021, eqs. 16, 17): all logits of a sample in one logarithm.

    ``mean_i log(1 + e^{α(δ−S_iy)} + Σ_{c≠y} e^{α(S_ic+δ)})``. Never larger than MPA-DW.
    """

    use = "Like MPA, for batches of any composition; recommended by its authors."
    form = LossForm("soft", by="sample", join="joint")
