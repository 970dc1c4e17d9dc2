"""Pair-based baselines and cross-batch memory, from pytorch-metric-learning (extra ``pairs``).

Proxy losses are our own work; the pair losses exist, are good, and are used as they are. The
adapter gives them the same face as the rest: ``forward(embeddings, labels)`` to a float32 scalar,
full precision under autocast, clear errors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from proximetry._common import closest
from proximetry.losses import checks


def _contrastive(peer: Any, miners: Any, margin: float = 0.5) -> tuple[nn.Module, nn.Module | None]:
    """Hadsell et al. 2006 on cosines: pull to 1, push below ``margin``."""
    cosine = peer.distances.CosineSimilarity()
    return peer.losses.ContrastiveLoss(pos_margin=1.0, neg_margin=margin, distance=cosine), None


def _triplet(peer: Any, miners: Any, margin: float = 0.1) -> tuple[nn.Module, nn.Module | None]:
    """Schroff et al. 2015 with semi-hard negatives."""
    miner = miners.TripletMarginMiner(margin=margin, type_of_triplets="semihard")
    return peer.losses.TripletMarginLoss(margin=margin), miner


def _lifted(peer: Any, miners: Any, margin: float = 1.0) -> tuple[nn.Module, nn.Module | None]:
    """Oh Song et al. 2016, in the generalised form."""
    return peer.losses.GeneralizedLiftedStructureLoss(neg_margin=margin), None


def _n_pair(peer: Any, miners: Any) -> tuple[nn.Module, nn.Module | None]:
    """Sohn 2016."""
    return peer.losses.NPairsLoss(), None


def _margin(
    peer: Any, miners: Any, num_classes: int | None = None, margin: float = 0.2, beta: float = 1.2
) -> tuple[nn.Module, nn.Module | None]:
    """Wu et al. 2017 with distance-weighted negatives; β per class if ``num_classes`` is given."""
    learn = num_classes is not None
    loss = peer.losses.MarginLoss(
        margin=margin, nu=0, beta=beta, learn_beta=learn, num_classes=num_classes
    )
    return loss, miners.DistanceWeightedMiner(cutoff=0.5, nonzero_loss_cutoff=1.4)


def _multi_similarity(
    peer: Any,
    miners: Any,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float = 0.1,
) -> tuple[nn.Module, nn.Module | None]:
    """Wang et al. 2019 with its own mining of informative pairs."""
    loss = peer.losses.MultiSimilarityLoss(alpha=alpha, beta=beta, base=base)
    return loss, miners.MultiSimilarityMiner(epsilon=epsilon)


#: The pair losses by name; their settings are the keyword arguments of these functions.
PAIR_LOSSES: dict[str, Callable[..., tuple[nn.Module, nn.Module | None]]] = {
    "contrastive": _contrastive,
    "triplet": _triplet,
    "lifted_structure": _lifted,
    "n_pair": _n_pair,
    "margin": _margin,
    "multi_similarity": _multi_similarity,
}


class PairLoss(nn.Module):
    """A pair-based loss by name, optionally with a memory of past batches.

    ``memory`` is how many past embeddings cross-batch memory (Wang et al. 2020) keeps; it needs
    ``dim``. Further settings are those of the loss, and unknown ones are errors.
    """

    def __init__(
        self, name: str, *, memory: int | None = None, dim: int | None = None, **settings: float
    ) -> None:
        super().__init__()
        if name not in PAIR_LOSSES:
            known = ", ".join(PAIR_LOSSES)
            raise ValueError(
                f"unknown pair loss {name!r}{closest(name, PAIR_LOSSES)} Known: {known}"
            )
        try:
            import pytorch_metric_learning as peer
            from pytorch_metric_learning import distances, losses, miners  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "pair losses come from pytorch-metric-learning: pip install 'proximetry[pairs]'"
            ) from error
        try:
            loss, miner = PAIR_LOSSES[name](peer, miners, **settings)
        except TypeError as error:
            raise ValueError(f"pair loss {name!r}: {error}") from error
        self.name = name
        self.miner = miner
        if memory is not None:
            if name == "n_pair":
                raise ValueError("n_pair cannot be combined with cross-batch memory")
            if dim is None:
                raise ValueError("cross-batch memory needs dim, the width of the embeddings")
            loss = losses.CrossBatchMemory(
                loss,
                embedding_size=checks.count("dim", dim),
                memory_size=checks.count("memory", memory),
                miner=miner,
            )
            self.miner = None
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch [B, D] with labels [B]; zero if no pair can be formed."""
        checks.batch(embeddings, labels)
        with torch.autocast(embeddings.device.type, enabled=False):
            x = embeddings.float()
            pairs = self.miner(x, labels) if self.miner is not None else None
            value: Tensor = self.loss(x, labels, pairs)
            return value.float().reshape(())

    def extra_repr(self) -> str:
        """Name, for ``print(loss)``."""
        return f"name={self.name!r}"
