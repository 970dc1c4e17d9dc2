"""What every proxy loss shares: its proxies, its engine, and the one forward."""

from dataclasses import InitVar
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from proximetry._common import unit
from proximetry.losses import checks
from proximetry.losses.declaration import Declared, setting
from proximetry.losses.formulation import LossForm, Problem, combine, dense
from proximetry.losses.proxies import Init, Proxies
from proximetry.losses.regularizers import intra_class_distance
from proximetry.losses.similarity import class_similarities
from proximetry.losses.streamed import streamed

Engine = Literal["auto", "dense", "streamed"]

#: ``auto`` streams when batch × classes × K has more entries than this (4 MiB in float32).
DENSE_ENTRIES = 2**20

#: Every proxy loss by its name in recipes and on the command line.
LOSSES: dict[str, "type[ProxyLoss]"] = {}


class ProxyLoss(Declared):
    """A form, settings and proxies. Subclasses add the logits; a ``name`` registers them.

    Settings may be changed between steps; a bad value is refused on assignment, not steps later.
    """

    num_classes: InitVar[int] = setting(checks.count, "number of classes C")
    dim: InitVar[int] = setting(checks.count, "embedding dimension D")
    engine: Engine = setting(
        checks.one_of(*get_args(Engine)),
        "how the loss is computed, with the same result",
        default="auto",
        kw_only=True,
    )

    use: ClassVar[str] = ""
    """When to use it, in one sentence."""
    form: ClassVar[LossForm]
    default_init: ClassVar[Init] = "kaiming_normal"
    # What a loss without these settings uses; not annotated, so that they are no arguments.
    gamma = 1.0
    tau = 0.0
    check_labels = True
    """Whether labels are checked against the number of classes. On CUDA the check waits for the
    device once a step; a loop whose labels are known to be good may turn it off."""

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            old = LOSSES.get(name, cls)
            if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"a loss named {name!r} exists already: {old.__name__}")
            LOSSES[name] = cls

    def build(self, arguments: dict[str, Any]) -> None:
        """Make the proxies, K of them for each class where the loss has ``proxies_per_class``."""
        shape = arguments["num_classes"], arguments["dim"], arguments.get("proxies_per_class", 1)
        self.proxies = Proxies(*shape, init=self.default_init)

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """Return the logit of each sample's own class from its similarity S [B] and ‖x‖ [B].

        Without a margin it is that of the other classes.
        """
        scale, offset = self.negative_logit(length)
        return scale * similarity + offset

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """Return (scale, offset) of the other classes' logit, ``scale · S + offset``."""
        raise NotImplementedError

    def negative_weight(self, labels: Tensor) -> float | Tensor:
        """Return the weight of each class's negative term in a class-wise loss: 1 / C."""
        return 1.0 / self.proxies.num_classes

    def ramp(self) -> float | Tensor:
        """Return what the weight of an added exclusive term is multiplied by at this step."""
        return 1.0

    def forward(self, embeddings: Tensor, labels: checks.Labels) -> Tensor:
        """Return the loss of a batch [B, D] with labels [B] as one number in float32."""
        labels = checks.batch(embeddings, labels, self.proxies.dim)
        if self.check_labels and not torch.compiler.is_compiling():
            checks.label_range(labels, self.proxies.num_classes)
        with torch.autocast(embeddings.device.type, enabled=False):
            proxies = self.proxies.weight
            x, length = unit(embeddings.to(proxies.dtype))
            scale, offset = self.negative_logit(length)
            weight = self.negative_weight(labels)
            problem = Problem(x, proxies, labels, self.form, self.gamma, scale, offset, weight)
            engine = dense if self._is_dense(x) else streamed
            similarity, negatives = engine(problem)
            positive = self.positive_logit(similarity, length)
            loss = combine(self.form, positive, negatives, labels, proxies.shape[0])
            if self.tau > 0.0:
                loss = loss + self.tau * intra_class_distance(proxies)
            return loss

    def similarities(self, embeddings: Tensor) -> Tensor:
        """Return S(x, c) for every class, [B, C]: the nearest class is the arg max."""
        with torch.autocast(embeddings.device.type, enabled=False):
            x, _ = unit(embeddings.to(self.proxies.weight.dtype))
            return class_similarities(x, self.proxies.weight, self.form.similarity, self.gamma)

    def _is_dense(self, x: Tensor) -> bool:
        classes, k, _ = self.proxies.weight.shape
        if self.engine == "auto":
            return x.shape[0] * classes * k <= DENSE_ENTRIES
        return self.engine == "dense"
