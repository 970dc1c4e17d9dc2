"""The network as the trainer runs it: from bytes to embeddings, in the recipe's precision."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry.models import Embedder

_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The precision of a recipe, for the network alone."""
    dtype = _PRECISIONS.get(precision)
    # The cache of cast weights would outlive a CUDA graph that was recorded with it.
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


class PixelNetwork(nn.Module):
    """Pixels 0…255 to embeddings.

    Args:
        embedder: the network itself.
        precision: of the recipe.
        device: where it runs.
        dropout: part of the features that are left out while training.
        features: whether the features follow the embeddings that come from them.
    """

    def __init__(
        self,
        embedder: Embedder,
        precision: str,
        device: torch.device,
        dropout: float = 0.0,
        features: bool = False,
    ) -> None:
        super().__init__()
        self.embedder, self.precision, self.device = embedder, precision, device
        self.dropout, self.features = dropout, features

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise and embed, in the precision of the recipe."""
        with autocast(self.precision, self.device):
            features = self.embedder.features(self.embedder.preprocessing.normalize(pixels))
            if self.dropout and self.embedder.training:
                features = F.dropout(features, self.dropout)
            embeddings = self.embedder.project(features)
        if not self.features:
            return embeddings
        return torch.cat([embeddings, features.to(embeddings.dtype)], dim=1)
