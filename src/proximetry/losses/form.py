"""The form of a proxy loss, and the contract `Problem → Parts` of the engines.

Every loss here is a grouped log-sum-exp over class similarities. A `LossForm` names the choices:

1. the *similarity* S(x, c), aggregated from the K proxies of class c;
2. the grouping: one logarithm *by* class, over the samples of the batch, *by* sample, over the
   classes, or *by* entry, for each sample and class;
3. how the logits of a sample's class (positive) and the other classes (negatives) *join*;
4. a function φ(S) that may *adjust* the similarities to the other classes.

The margin is two short methods of the loss itself (`ProxyLoss.positive_logit` and
`ProxyLoss.negative_logit`): any function for the positive, ``scale · S + offset`` for the
negatives, or ``scale · φ(S) + offset``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from proximetry.losses.settings import one_of

Aggregation = Literal["single", "soft", "max", "mean"]
By = Literal["class", "sample", "entry"]
Join = Literal["separate", "joint", "softmax", "nca"]
Precision = Literal["auto", "float32", "tf32", "bf16"]
#: The largest number of proxies per class in the fused engine.
MAX_FUSED_K = 128
Adjust = Callable[[Tensor, Any, Any], tuple[Tensor, Tensor]]
"""Returns φ(S) and its derivative from similarities [B, n], a limit and a value."""


@dataclass(frozen=True)
class LossForm:
    """The form of a loss: choices that all engines understand."""

    similarity: Aggregation
    by: By
    join: Join
    adjust: Adjust | None = None
    """The fused engine supports `adjustments.ADJUSTMENTS` only. Not with label smoothing."""

    def __post_init__(self) -> None:
        for name, choices in (("similarity", Aggregation), ("by", By), ("join", Join)):
            one_of(*get_args(choices))(name, getattr(self, name))
        if self.by != "sample" and self.join != "separate":
            raise ValueError(f"a loss by {self.by} must have join='separate', got {self.join!r}")


@dataclass(frozen=True)
class Problem:
    """The input of an engine: a batch, the proxies, and the logits of the negatives."""

    x: Tensor
    """Embeddings [B, D] of length one."""
    proxies: Tensor
    """[C, K, D], of any length."""
    labels: Tensor
    form: LossForm
    gamma: float
    """Temperature of the soft assignment, for the similarity "soft"."""
    scale: float | Tensor
    """The negative logit is ``scale · φ(S) + offset``; both are a number or one per sample [B]."""
    offset: float | Tensor
    class_weight: float | Tensor | None = None
    """Weight of the negative terms of class-wise losses, a number or one per class [C]; with None
    the engine returns the terms. By entry: weights of the entries by class [C], or None."""
    log_weights: Tensor | None = None
    """Logarithms of the sample weights [B], added to the logits of class-wise losses."""
    has_weights: bool = False
    """Whether the caller passed sample weights, whose logarithms may exceed 0."""
    needs_total: bool = False
    """Whether sample-wise losses need the sum of a sample's similarities."""
    needs_distance: bool = False
    """Whether the loss has an intra-class term."""
    limit: Any = None
    """The second argument of `LossForm.adjust`: one per sample [B, 1] or None."""
    value: Any = 0.0
    """The third argument of `LossForm.adjust`: a number or a tensor with one number."""
    ignore_above: float | None = None
    """Negatives with S(x, c) above this have logit -inf; the sum of similarities includes them."""
    update: Callable[[slice, Tensor], None] | None = None
    """Called in backward with the classes and the gradient of each tile; may change their proxies.
    With it, the engine returns no gradient of the proxies."""
    precision: Precision = "auto"
    """Precision of matrix products in the fused engine; "auto" follows torch's setting."""
    is_shard: bool = False
    """Whether labels may be outside 0 … C − 1, for classes on other ranks. All classes are then
    negatives of the sample, and its `Parts.positive` is not used."""

    def adjust(self, S: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return φ(S) and its derivative; S and None if the form does not adjust it."""
        adjust = self.form.adjust
        return (S, None) if adjust is None else adjust(S, self.limit, self.value)


class Parts(NamedTuple):
    """The output of an engine."""

    positive: Tensor
    """Each sample's similarity to its class [B]."""
    negatives: Tensor
    """By sample: the log-sum-exp over the other classes [B], -inf if there are none. By entry: the
    sum of log(1 + exp logit) over the other classes [B]. By class: log(1 + Σ exp logit over the
    samples of other classes), summed over the classes with ``class_weight``, or [C] without."""
    total: Tensor | None
    """The sum of a sample's similarities to all classes [B], if ``needs_total``."""
    distance: Tensor | None
    """The intra-class distance of the proxies (see `dense.intra_class_distance`), if needed."""
