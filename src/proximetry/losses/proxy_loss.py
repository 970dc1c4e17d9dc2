"""What every proxy loss shares: its proxies, its engine, and the one forward."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from proximetry.losses import checks
from proximetry.losses.dense import class_similarities, dense
from proximetry.losses.proxies import Init, Proxies
from proximetry.losses.regularizers import intra_class_distance
from proximetry.losses.similarity import unit
from proximetry.losses.streamed import streamed
from proximetry.losses.table import Row, combine

Engine = Literal["auto", "dense", "streamed"]

#: ``auto`` streams when batch × classes × K has more entries than this (4 MiB in float32).
DENSE_ENTRIES = 2**20


class ProxyLoss(nn.Module):
    """A row of the table, with its proxies. Subclasses add the margins.

    ``settings`` names the numbers that may be changed between steps and the check each must pass;
    a bad value is refused on assignment, not steps later.
    """

    row: ClassVar[Row]
    default_init: ClassVar[Init] = "kaiming_normal"
    settings: ClassVar[dict[str, Callable[[str, Any], Any]]] = {}
    #: Temperature of the soft assignment; only rows with similarity "soft" read it.
    gamma: float = 1.0
    #: Weight of the intra-class term (seed 004 eq. 3), for losses with several proxies per class.
    tau: float = 0.0

    def __init__(
        self, num_classes: int, dim: int, proxies_per_class: int = 1, *, engine: Engine = "auto"
    ) -> None:
        super().__init__()
        checks.one_of("engine", engine, get_args(Engine))
        self.engine: Engine = engine
        self.check_labels = True
        """Whether labels are checked against the number of classes. On CUDA the check waits for
        the device once a step; a loop whose labels are known to be good may turn it off."""
        self.proxies = Proxies(num_classes, dim, proxies_per_class, init=self.default_init)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" not in cls.__dict__:
            # torch.compile caches per code object and gives up after eight variants: with a copy
            # each, all the losses can be compiled in one process.
            shared = cls.forward
            cls.forward = FunctionType(  # type: ignore[method-assign]
                shared.__code__.replace(), shared.__globals__, "forward", None, shared.__closure__
            )
            cls.forward.__doc__ = shared.__doc__

    def positive_logit(self, similarity: Tensor, length: Tensor) -> Tensor:
        """Return the logit of each sample's own class from its similarity S [B] and ‖x‖ [B]."""
        raise NotImplementedError

    def negative_logit(self, length: Tensor) -> tuple[float | Tensor, float]:
        """Return (scale, offset) of the other classes' logit, ``scale · S + offset``."""
        raise NotImplementedError

    def negative_weight(self, labels: Tensor) -> float | Tensor:
        """Return the weight of each class's negative term in a class-wise loss: 1 / C."""
        return 1.0 / self.proxies.num_classes

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch [B, D] with labels [B] as one number in float32."""
        checks.batch(embeddings, labels, self.proxies.dim)
        if self.check_labels and not torch.compiler.is_compiling():
            checks.label_range(labels, self.proxies.num_classes)
        labels = labels.long()
        with torch.autocast(embeddings.device.type, enabled=False):
            weight = self.proxies.weight
            x, length = unit(embeddings.to(weight.dtype))
            scale, offset = self.negative_logit(length)
            engine = dense if self._is_dense(x) else streamed
            share = self.negative_weight(labels) if self.row.group == "class" else 0.0
            similarity, negatives = engine(
                x, weight, labels, self.row, self.gamma, scale, offset, share
            )
            positive = self.positive_logit(similarity, length)
            loss = combine(self.row, positive, negatives, labels, weight.shape[0])
            if self.tau > 0.0 and self.proxies.proxies_per_class > 1:
                loss = loss + self.tau * intra_class_distance(weight)
            return loss

    def similarities(self, embeddings: Tensor) -> Tensor:
        """Return S(x, c) for every class, [B, C]: the nearest class is the arg max."""
        with torch.autocast(embeddings.device.type, enabled=False):
            x, _ = unit(embeddings.to(self.proxies.weight.dtype))
            return class_similarities(x, self.proxies.weight, self.row, self.gamma)

    def extra_repr(self) -> str:
        """Settings and engine, for ``print(loss)``."""
        values = [f"{name}={getattr(self, name)!r}" for name in self.settings]
        return ", ".join([*values, f"engine={self.engine!r}"])

    def __setattr__(self, name: str, value: Any) -> None:
        check = self.settings.get(name)
        super().__setattr__(name, check(name, value) if check is not None else value)

    def _is_dense(self, x: Tensor) -> bool:
        classes, k, _ = self.proxies.weight.shape
        if self.engine == "auto":
            return x.shape[0] * classes * k <= DENSE_ENTRIES
        return self.engine == "dense"
