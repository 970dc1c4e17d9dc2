"""CUDA graphs: the kernels of a network are recorded once and then replayed as a whole.

A replay costs the CPU next to nothing, so the GPU never waits for it. Both classes take networks of
one tensor; batches of another shape than the first one go the usual way. So does everything after
a recording that failed, where there is somebody to tell.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Report = Callable[[str], None]


class GraphedInference:
    """A network whose forward pass, without gradients, is a CUDA graph.

    It follows the weights as they are trained, as long as they stay where they are in memory.
    """

    def __init__(
        self, network: Callable[[Tensor], Tensor], on_failure: Report | None = None
    ) -> None:
        self._network, self._on_failure = network, on_failure
        self._graph: torch.cuda.CUDAGraph | None = None
        self._failed = False

    @torch.no_grad()
    def __call__(self, batch: Tensor) -> Tensor:
        """Return the network's result; the first call records the graph."""
        if self._graph is None and not self._failed:
            self._failed = not _recorded(self._record, batch, self._on_failure)
        if self._failed or batch.shape != self._input.shape:
            return self._network(batch)
        self._input.copy_(batch)
        assert self._graph is not None
        self._graph.replay()
        return self._output.clone()

    def _record(self, batch: Tensor) -> None:
        self._input = batch.clone()
        side = torch.cuda.Stream(batch.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(batch.device))
        with torch.cuda.stream(side):  # kernels are compiled and chosen here
            for _ in range(2):
                self._network(self._input)
        torch.cuda.current_stream(batch.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _garbage_kept(), torch.cuda.graph(graph):
            self._output = self._network(self._input)
        self._graph = graph


class GraphedNetwork(nn.Module):
    """A network whose forward and backward pass are CUDA graphs."""

    def __init__(self, network: nn.Module, on_failure: Report | None = None) -> None:
        super().__init__()
        self.network, self._on_failure = network, on_failure
        self._graph: Callable[..., Any] | None = None
        self._shape: torch.Size | None = None

    def forward(self, batch: Tensor) -> Tensor:
        """Return the network's result; the first call records the graphs."""
        if self._graph is None and not _recorded(self._record, batch, self._on_failure):
            self._graph = self.network
        network = self._graph if batch.shape == self._shape else self.network
        assert network is not None
        result: Tensor = network(batch)
        return result

    def _record(self, batch: Tensor) -> None:
        # Recording runs the network some times; running statistics and dropout must not notice.
        buffers = [buffer.clone() for buffer in self.network.buffers()]
        random = torch.cuda.get_rng_state(batch.device)
        once = copy.copy(self.network)  # torch puts its graph in the place of forward
        try:
            with _garbage_kept():
                self._graph = torch.cuda.make_graphed_callables(
                    once, (batch.clone(),), allow_unused_input=True
                )
        finally:
            for buffer, value in zip(self.network.buffers(), buffers, strict=True):
                buffer.copy_(value)
            torch.cuda.set_rng_state(random, batch.device)
        self._shape = batch.shape


def _recorded(record: Callable[[Tensor], None], batch: Tensor, on_failure: Report | None) -> bool:
    """Record a graph; return whether that succeeded, having told why not."""
    try:
        record(batch)
    except RuntimeError as error:  # CUDA's own errors too, and memory that runs out
        if on_failure is None:
            raise
        if batch.is_cuda:
            # The generator still takes itself to be recorded, and would draw nothing more.
            state = torch.cuda.get_rng_state(batch.device)
            fresh = torch.Generator(batch.device)
            fresh.set_state(state)
            own = torch.cuda.default_generators[batch.device.index]
            own.graphsafe_set_state(fresh.graphsafe_get_state())
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        on_failure(f"no CUDA graph: recording it failed ({reason})")
        return False
    return True


@contextmanager
def ignore_stream_mismatch() -> Iterator[None]:
    """Switch off torch's warning that gradients of a recorded graph change streams."""
    native: Any = torch._C
    if not hasattr(native, "_warn_on_accumulate_grad_stream_mismatch"):  # older torch
        yield
        return
    before = native._warn_on_accumulate_grad_stream_mismatch()
    native._set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        native._set_warn_on_accumulate_grad_stream_mismatch(before)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect garbage before a graph is recorded, and none meanwhile.

    An older graph that is freed while another one is recorded invalidates the recording.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
