"""Pair-based losses and cross-batch memory from pytorch-metric-learning (extra ``pairs``).

The adapter gives them the interface of the proxy losses: ``forward(embeddings, labels)`` returns a
float32 scalar, computes in full precision under autocast and ignores labels of -1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from proximetry._util.errors import suggest
from proximetry._util.formatting import format_value
from proximetry._util.imports import import_optional
from proximetry._util.tensors import rescale
from proximetry.losses.base import IGNORED, Labels, validate_batch
from proximetry.losses.settings import (
    LOSS_SETTINGS,
    FullPrecision,
    Setting,
    count,
    finite,
    optional,
    positive,
    setting,
    validate,
)

LossAndMiner = tuple[nn.Module, nn.Module | None]

_MEMORY = setting(
    optional(count), "number of past embeddings in a cross-batch memory (Wang et al. 2020)", None
)

#: When to use them.
USE = "Baselines, and data without fixed classes; batches need several images per class."

PAIR_LOSSES: dict[str, Callable[..., LossAndMiner]] = {}
"""Functions that create pair losses and their miners, by name."""


def _pair_loss(
    name: str, *, memory: bool = True, **settings: Setting
) -> Callable[[Callable[..., LossAndMiner]], Callable[..., LossAndMiner]]:
    def register(make: Callable[..., LossAndMiner]) -> Callable[..., LossAndMiner]:
        PAIR_LOSSES[name] = make
        LOSS_SETTINGS[f"pairs/{name}"] = settings | ({"memory": _MEMORY} if memory else {})
        return make

    return register


@_pair_loss("contrastive", margin=setting(finite, "negatives are pushed below this cosine", 0.5))
def _contrastive(pml: Any, margin: float) -> LossAndMiner:
    """Hadsell et al. 2006, on cosines: positives to 1, negatives below the margin; no miner."""
    cosine = pml.distances.CosineSimilarity()
    return pml.losses.ContrastiveLoss(pos_margin=1.0, neg_margin=margin, distance=cosine), None


@_pair_loss("triplet", margin=setting(finite, "margin of distances", 0.1))
def _triplet(pml: Any, margin: float) -> LossAndMiner:
    """Schroff et al. 2015, semi-hard negatives with the same margin."""
    miner = pml.miners.TripletMarginMiner(margin=margin, type_of_triplets="semihard")
    return pml.losses.TripletMarginLoss(margin=margin), miner


@_pair_loss("lifted_structure", margin=setting(finite, "margin of distances", 1.0))
def _lifted(pml: Any, margin: float) -> LossAndMiner:
    """Oh Song et al. 2016, in the generalized form; no miner."""
    return pml.losses.GeneralizedLiftedStructureLoss(neg_margin=margin), None


@_pair_loss("n_pair", memory=False)
def _n_pair(pml: Any) -> LossAndMiner:
    """Sohn 2016; no miner."""
    return pml.losses.NPairsLoss(), None


@_pair_loss(
    "margin",
    margin=setting(finite, "margin of distances", 0.2),
    beta=setting(finite, "boundary β between positives and negatives", 1.2),
    num_classes=setting(optional(count), "number of classes to learn β for", None),
)
def _margin(pml: Any, margin: float, beta: float, num_classes: int | None) -> LossAndMiner:
    """Wu et al. 2017, distance-weighted negatives."""
    learn = num_classes is not None
    loss = pml.losses.MarginLoss(
        margin=margin, nu=0, beta=beta, learn_beta=learn, num_classes=num_classes
    )
    return loss, pml.miners.DistanceWeightedMiner(cutoff=0.5, nonzero_loss_cutoff=1.4)


@_pair_loss(
    "multi_similarity",
    alpha=setting(finite, "sharpness α for positives", 2.0),
    beta=setting(finite, "sharpness β for negatives", 50.0),
    base=setting(finite, "cosine λ that is subtracted from the similarities", 0.5),
    epsilon=setting(finite, "margin of the miner", 0.1),
)
def _multi_similarity(
    pml: Any, alpha: float, beta: float, base: float, epsilon: float
) -> LossAndMiner:
    """Wang et al. 2019, with its miner of informative pairs."""
    loss = pml.losses.MultiSimilarityLoss(alpha=alpha, beta=beta, base=base)
    return loss, pml.miners.MultiSimilarityMiner(epsilon=epsilon)


@_pair_loss("sup_con", temperature=setting(positive, "temperature T", 0.1))
def _sup_con(pml: Any, temperature: float) -> LossAndMiner:
    """Khosla et al. 2020, supervised contrastive; no miner."""
    return pml.losses.SupConLoss(temperature=temperature), None


@_pair_loss("nt_xent", temperature=setting(positive, "temperature T", 0.07))
def _nt_xent(pml: Any, temperature: float) -> LossAndMiner:
    """Chen et al. 2020 (SimCLR): each positive pair against all negatives; no miner."""
    return pml.losses.NTXentLoss(temperature=temperature), None


@_pair_loss(
    "circle", margin=setting(finite, "relaxation m", 0.4), gamma=setting(positive, "scale γ", 80.0)
)
def _circle(pml: Any, margin: float, gamma: float) -> LossAndMiner:
    """Sun et al. 2020; no miner."""
    return pml.losses.CircleLoss(m=margin, gamma=gamma), None


class PairLoss(FullPrecision):
    """A pair-based loss, optionally with another miner and with a memory of past batches.

    Args:
        loss: a name of `PAIR_LOSSES`, with its ``settings``, or a loss object of
            pytorch-metric-learning.
        miner: a miner object that overrides the loss's default miner.
        memory: number of past embeddings in a cross-batch memory (Wang et al. 2020); it needs
            ``dim``, and is inactive in evaluation mode.
        dim: the embedding dimension, for the memory.
    """

    remembered: Tensor
    """The number of embeddings added to the memory, which gives its position."""

    def __init__(
        self,
        loss: str | nn.Module,
        *,
        miner: nn.Module | None = None,
        memory: int | None = None,
        dim: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not isinstance(miner, nn.Module | None):
            raise ValueError(f"miner must be a miner object, got {format_value(miner)}")
        if not isinstance(loss, nn.Module) and loss not in PAIR_LOSSES:
            raise ValueError(
                f"unknown pair loss {format_value(loss)}{suggest(str(loss), PAIR_LOSSES)} "
                "Pass other losses of pytorch-metric-learning as objects."
            )
        if hasattr(loss, "embedding_memory"):
            raise ValueError("the loss is a CrossBatchMemory. Pass its loss, memory= and dim=.")
        if memory is not None:
            settings["memory"] = memory
            if dim is None:
                raise ValueError("cross-batch memory needs the embedding dimension. Pass dim.")
        for name in ("losses", "miners", "distances"):
            import_optional(f"pytorch_metric_learning.{name}", "pairs", "a pair loss")
        pml = import_optional("pytorch_metric_learning", "pairs", "a pair loss")
        if isinstance(loss, nn.Module):
            self.loss: nn.Module = loss
            self.miner = miner
            validate(f"loss {type(loss).__name__}", {"memory": _MEMORY}, settings)
        else:
            declarations = LOSS_SETTINGS[f"pairs/{loss}"]
            values = {key: entry.default for key, entry in declarations.items()}
            values |= validate(f"loss 'pairs/{loss}'", declarations, settings)
            values.pop("memory", None)
            self.loss, default_miner = PAIR_LOSSES[loss](pml, **values)
            self.miner = default_miner if miner is None else miner
        self.memory, self.dim = memory, None
        if memory is not None:
            module, supported = self.loss, pml.losses.CrossBatchMemory.supported_losses()
            if type(module).__name__ not in supported:
                raise ValueError(f"loss {type(module).__name__} does not support a memory")
            self.dim = count("dim", dim)
            self.loss = pml.losses.CrossBatchMemory(module, self.dim, memory, self.miner)
            self.miner = None
            self.register_buffer("remembered", torch.zeros((), dtype=torch.long))

    def forward(self, embeddings: Tensor, labels: Labels) -> Tensor:
        """Return the loss of a batch [B, D] with labels [B]; zero if no pair can be formed.

        Labels may be any integers; samples of label -1 are ignored. NaN or infinity in other
        embeddings makes the loss NaN.
        """
        labels = validate_batch(embeddings, labels, self.dim)
        with torch.autocast(embeddings.device.type, enabled=False):
            is_counted = labels != IGNORED
            if not is_counted.all():
                embeddings, labels = embeddings[is_counted], labels[is_counted]
            if not len(labels):
                return embeddings.float().sum()  # 0, with gradient 0
            x, _ = rescale(embeddings.float())  # the loss normalizes x, which could overflow
            # Comparisons with NaN are false: the loss would skip such pairs.
            is_finite = torch.isfinite(x).all()
            x = x.nan_to_num(0.0, 0.0, 0.0)
            if self.memory is not None:
                value = self._with_memory(x, labels, self.memory, is_finite)
            else:
                value = _evaluate(self.loss, self.miner, x, labels)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ValueError(
                    f"loss {type(self.loss).__name__} does not return a scalar. Use a reducer that "
                    "does, such as MeanReducer."
                )
            return value.float().reshape(()).masked_fill(~is_finite, torch.nan)

    def _with_memory(self, x: Tensor, labels: Tensor, size: int, is_finite: Tensor) -> Tensor:
        # The position of the queue is in attributes, which are not in the state dictionary.
        # Derive it from the buffer instead.
        queue: Any = self.loss
        state = torch.stack([self.remembered, is_finite.to(self.remembered)])
        previous_count, valid = state.tolist()
        if not valid or not self.training:
            return _evaluate(queue.loss, queue.miner, x, labels)
        queue.queue_idx, queue.has_been_filled = previous_count % size, previous_count >= size
        self.remembered += len(x)
        if len(x) <= size:
            return queue(x, labels)  # type: ignore[no-any-return]
        # A larger batch is compared with itself and replaces the memory.
        queue.queue_idx = int(self.remembered) % size
        queue.add_to_memory(x[-size:], labels[-size:], size)
        return _evaluate(queue.loss, queue.miner, x, labels)


def _evaluate(loss: nn.Module, miner: nn.Module | None, x: Tensor, labels: Tensor) -> Tensor:
    pairs = miner(x, labels) if miner is not None else None
    return loss(x, labels, pairs)  # type: ignore[no-any-return]
