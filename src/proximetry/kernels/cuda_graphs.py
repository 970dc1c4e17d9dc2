"""CUDA graphs: record the kernels of a network once and replay them with one launch.

Inputs whose shapes differ from the first run without the graph. If recording fails, `on_failure` is
called and everything runs without a graph; by default it raises.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

OnFailure = Callable[[str], None]


class GraphedInference:
    """A network whose forward pass, without gradients, is a CUDA graph.

    It uses the current weights, as long as they change in place.
    """

    def __init__(
        self, network: Callable[[Tensor], Tensor], on_failure: OnFailure | None = None
    ) -> None:
        self._network, self._on_failure = network, on_failure
        self._graph: Any = None
        self._failed = False

    @torch.no_grad()
    def __call__(self, batch: Tensor) -> Tensor:
        """Return the network's result; the first call records the graph."""
        if self._graph is None and not self._failed:
            self._failed = not _try_record(self._record, [batch], self._on_failure)
        if self._failed or batch.shape != self._input.shape:
            return self._network(batch)
        self._input.copy_(batch)
        self._graph.replay()
        return self._output.clone()

    def _record(self, batch: Tensor) -> None:
        self._input = batch.clone()
        side = torch.cuda.Stream(batch.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(batch.device))
        with torch.cuda.stream(side):  # warm-up: kernels are compiled and selected
            for _ in range(2):
                self._network(self._input)
        torch.cuda.current_stream(batch.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _pause_garbage_collection(), torch.cuda.graph(graph):
            self._output = self._network(self._input)
        self._graph = graph


class GraphedNetwork(nn.Module):
    """A network, or a network with its loss, whose forward and backward pass are CUDA graphs."""

    def __init__(self, network: nn.Module, on_failure: OnFailure | None = None) -> None:
        super().__init__()
        self.network, self._on_failure = network, on_failure
        self._graph: Any = None
        self._shapes: list[torch.Size] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the network's result; the first call records the graphs."""
        if self._graph is None and not _try_record(self._record, inputs, self._on_failure):
            self._graph = self.network
        network = self._graph if [x.shape for x in inputs] == self._shapes else self.network
        return network(*inputs)  # type: ignore[no-any-return]

    def _record(self, *inputs: Tensor) -> None:
        # Recording runs the network several times: restore buffers and random state.
        buffers = [buffer.clone() for buffer in self.network.buffers()]
        device = inputs[0].device
        rng_state = torch.cuda.get_rng_state(device)
        network = copy.copy(self.network)  # torch replaces its forward
        try:
            with _pause_garbage_collection():
                self._graph = torch.cuda.make_graphed_callables(
                    network, tuple(x.clone() for x in inputs), allow_unused_input=True
                )
        finally:
            for buffer, value in zip(self.network.buffers(), buffers, strict=True):
                buffer.copy_(value)
            torch.cuda.set_rng_state(rng_state, device)
        self._shapes = [x.shape for x in inputs]


def _try_record(
    record: Callable[..., None], inputs: Sequence[Tensor], on_failure: OnFailure | None
) -> bool:
    """Record a graph and return whether it succeeded; report a failure."""
    try:
        record(*inputs)
    except RuntimeError as error:  # includes CUDA errors and out of memory
        if on_failure is None:
            raise
        if inputs[0].is_cuda:
            # The generator is still in capture mode: replace its state.
            device = inputs[0].device
            generator = torch.Generator(device)
            generator.set_state(torch.cuda.get_rng_state(device))
            default = torch.cuda.default_generators[device.index]
            default.graphsafe_set_state(generator.graphsafe_get_state())
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        on_failure(f"no CUDA graph: recording it failed ({reason})")
        return False
    return True


@contextmanager
def ignore_stream_mismatch() -> Iterator[None]:
    """Disable torch's warning that gradients of a recorded graph are on another stream."""
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
def _pause_garbage_collection() -> Iterator[None]:
    """Collect garbage before recording instead of during it, when freeing a graph is an error."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
