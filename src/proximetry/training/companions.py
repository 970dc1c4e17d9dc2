"""Wider heads that learn beside the embedding and teach it (S2SD, Roth et al. 2021).

A wide embedding ranks better than a narrow one. Here some wide heads over the same features are
trained at once, each with a loss of its own, and the similarities within a batch that the embedding
sees are drawn to those that they see. They cost little and are left behind when training ends.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Companions(nn.Module):
    """The heads, their losses, and what the embedding learns from them.

    Args:
        width: of the features.
        widths: of the heads.
        make_loss: makes the loss of a head from its width.
        weight: of what the embedding learns from the heads.
        temperature: what similarities are divided by there.
    """

    def __init__(
        self,
        width: int,
        widths: Sequence[int],
        make_loss: Callable[[int], nn.Module],
        weight: float,
        temperature: float,
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, wide))
            for wide in widths
        )
        self.losses = nn.ModuleList(make_loss(wide) for wide in widths)
        self.weight, self.temperature = weight, temperature

    def forward(self, embeddings: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over the heads of their losses and of what they teach."""
        total = embeddings.new_zeros(())
        for head, loss in zip(self.heads, self.losses, strict=True):
            wide = F.normalize(head(features), dim=1)
            total = total + loss(wide, labels)
            if self.weight:
                learned = divergence(embeddings, wide.detach(), self.temperature)
                total = total + self.weight * learned
        return total / len(self.heads)


def divergence(learner: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over the batch of KL(teacher ‖ learner), both softmax over cosines to the batch.

    It is multiplied by the square of the temperature, so that the gradient keeps its size.
    """
    wanted, seen = (
        F.log_softmax(similarity / temperature, dim=1)
        for similarity in (_similarities(teacher), _similarities(learner))
    )
    return F.kl_div(seen, wanted, reduction="batchmean", log_target=True) * temperature**2


def _similarities(vectors: Tensor) -> Tensor:
    directions = F.normalize(vectors, dim=1)
    return torch.mm(directions, directions.t())
