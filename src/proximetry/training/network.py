"""The network as the trainer runs it: from bytes to embeddings, plain or as a CUDA graph."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry.models import Embedder

_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The precision of a recipe, for the network alone."""
    dtype = _PRECISIONS.get(precision)
    # The cache of cast weights would outlive a CUDA graph that was captured with it.
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
            features = self.embedder.features(self.embedder.preprocessing.normalise(pixels))
            if self.dropout and self.embedder.training:
                features = F.dropout(features, self.dropout)
            embeddings = self.embedder.project(features)
        if not self.features:
            return embeddings
        return torch.cat([embeddings, features.to(embeddings.dtype)], dim=1)


class CapturedInference:
    """A network whose forward pass, without gradients, is recorded once and then replayed.

    It follows the weights as they are trained. Batches of another shape than the first one go
    the usual way.
    """

    def __init__(self, network: PixelNetwork) -> None:
        self._network = network
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Embed pixels; the first call records."""
        if self._graph is None:
            self._record(pixels)
        if pixels.shape != self._pixels.shape:
            embeddings: Tensor = self._network(pixels)
            return embeddings
        self._pixels.copy_(pixels)
        assert self._graph is not None
        self._graph.replay()
        return self._embeddings.clone()

    def _record(self, pixels: Tensor) -> None:
        self._pixels = pixels.clone()
        side = torch.cuda.Stream(pixels.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(pixels.device))
        with torch.cuda.stream(side):  # kernels are compiled and chosen here
            for _ in range(2):
                self._network(self._pixels)
        torch.cuda.current_stream(pixels.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._embeddings: Tensor = self._network(self._pixels)


class CapturedNetwork(nn.Module):
    """A network whose forward and backward pass are recorded once and then replayed whole.

    A replay costs the processor next to nothing, so the card is never left waiting. Batches of
    another shape than the first one go the usual way.
    """

    def __init__(self, network: PixelNetwork) -> None:
        super().__init__()
        self.network = network
        self._graph: Callable[..., Any] | None = None
        self._shape: torch.Size | None = None

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed pixels; the first call records."""
        if self._graph is None:
            self._shape, self._graph = pixels.shape, self._record(pixels)
        network = self._graph if pixels.shape == self._shape else self.network
        embeddings: Tensor = network(pixels)
        return embeddings

    def _record(self, pixels: Tensor) -> Callable[..., Any]:
        # Recording runs the network some times; moving statistics and dropout must not notice.
        buffers = [buffer.clone() for buffer in self.network.buffers()]
        drawn = torch.cuda.get_rng_state(pixels.device)
        once = copy.copy(self.network)  # torch puts its graph in the place of forward
        # Recording happens on a stream of its own, and so do the gradients' first steps: meant so.
        graphs: Any = torch.autograd.graph
        if hasattr(graphs, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer torch warns
            graphs.set_warn_on_accumulate_grad_stream_mismatch(False)
        graph = torch.cuda.make_graphed_callables(once, (pixels.clone(),), allow_unused_input=True)
        for buffer, value in zip(self.network.buffers(), buffers, strict=True):
            buffer.copy_(value)
        torch.cuda.set_rng_state(drawn, pixels.device)
        return graph
