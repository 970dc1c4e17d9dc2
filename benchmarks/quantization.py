"""Proxy-Anchor with a quantization term, for the study binary-codes."""

from typing import Any

from torch import Tensor, nn

from proximetry.losses import ProxyAnchor


class QuantizedProxyAnchor(nn.Module):
    """Proxy-Anchor plus ``quantization`` times the distance of unit vectors from ±1/√d.

    The distance is 1 − ‖x‖₁/√d: zero if all entries have the same magnitude.
    """

    def __init__(self, num_classes: int, dim: int, quantization: float, **settings: Any) -> None:
        super().__init__()
        self.loss = ProxyAnchor(num_classes, dim, **settings)
        self.quantization = quantization

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch of unit vectors [B, D]."""
        cosine = embeddings.float().abs().sum(1) / embeddings.shape[1] ** 0.5
        total: Tensor = self.loss(embeddings, labels) + self.quantization * (1 - cosine).mean()
        return total
