"""CUDA graphs equal the network, and recording has no side effects."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from proximetry.kernels.cuda_graphs import GraphedInference, GraphedNetwork, ignore_stream_mismatch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def make_network(device="cuda"):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * 36, 4)).to(device)


def make_batch(count=5, device="cuda"):
    return torch.randn(count, 3, 8, 8, device=device)


@pytest.fixture
def record_with(monkeypatch):
    """Replace the recording of torch, on the CPU."""

    def replace(record):
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: torch.set_rng_state(state))
    return replace


@on_gpu
def test_inference_on_the_gpu_follows_the_weights():
    network = make_network().eval()
    graphed = GraphedInference(network)
    for count in (5, 5, 2):  # recorded, replayed, not graphed
        batch = make_batch(count)
        with torch.no_grad():
            network[0].weight.normal_()
            expected = network(batch)
        actual = graphed(batch)
        graphed(make_batch())  # does not overwrite earlier results
        torch.testing.assert_close(actual, expected)
        assert not actual.requires_grad


@on_gpu
def test_training_on_the_gpu_equals_the_network():
    network = make_network()
    plain = copy.deepcopy(network)
    graphed = GraphedNetwork(network)
    for count in (5, 5, 2):
        batch, slopes = make_batch(count), []
        for one in (graphed, plain):
            torch.manual_seed(1)
            loss = one(batch).square().sum()
            slopes.append(torch.autograd.grad(loss, list(one.parameters())))
        for actual, expected in zip(*slopes, strict=True):
            torch.testing.assert_close(actual, expected)
    for actual, expected in zip(network.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_recording_restores_random_state_and_buffers(record_with):
    """A resumed run records at another step, and dropout must not change."""

    def record(module, arguments, allow_unused_input):
        for _ in range(3):  # as torch does, to warm up
            module(*arguments)
        return module

    record_with(record)
    network, batch = make_network("cpu"), make_batch(device="cpu")
    plain, graphed = copy.deepcopy(network), GraphedNetwork(network)
    results = []
    for one in (graphed, plain):
        torch.manual_seed(5)
        results.append([one(batch), one(batch)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    for actual, value in zip(network.buffers(), plain.buffers(), strict=True):
        assert torch.equal(actual, value)


def test_no_garbage_collection_during_recording(record_with):
    """Freeing an older graph would invalidate the recording."""

    class OldGraph:
        def __init__(self):
            self.me = self

    waiting = weakref.ref(OldGraph())
    actual = []

    def record(module, arguments, allow_unused_input):
        actual.append((waiting() is None, gc.isenabled()))
        return module

    record_with(record)
    GraphedNetwork(make_network("cpu"))(make_batch(device="cpu"))
    assert actual == [(True, False)]
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_stream_mismatch_warning_is_restored(enabled):
    native = torch._C
    if not hasattr(native, "_warn_on_accumulate_grad_stream_mismatch"):
        pytest.skip("this torch does not warn")
    native._set_warn_on_accumulate_grad_stream_mismatch(enabled)
    try:
        with ignore_stream_mismatch():
            assert not native._warn_on_accumulate_grad_stream_mismatch()
        assert native._warn_on_accumulate_grad_stream_mismatch() == enabled
    finally:
        native._set_warn_on_accumulate_grad_stream_mismatch(True)


@pytest.mark.parametrize("reported", [True, False])
def test_failed_recording_is_reported_or_raised(record_with, reported):
    def record(module, arguments, allow_unused_input):
        module(*arguments)  # moves the running statistics
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    record_with(record)
    lines, network, batch = [], make_network("cpu"), make_batch(device="cpu")
    plain = copy.deepcopy(network)
    graphed = GraphedNetwork(network, lines.append if reported else None)
    if not reported:
        with pytest.raises(RuntimeError, match="not permitted"):
            graphed(batch)
        return
    for one in (graphed, plain):
        torch.manual_seed(5)
        one(batch), one(batch)
    for actual, value in zip(network.buffers(), plain.buffers(), strict=True):
        assert torch.equal(actual, value)
    assert len(lines) == 1
    assert lines[0].endswith("(operation not permitted when stream is capturing)")


@on_gpu
def test_network_that_cannot_be_recorded_runs_without_graph():
    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4).cuda()

        def forward(self, batch):
            result = torch.dropout(self.layer(batch), 0.1, self.training)
            return result * (2.0 if result.sum().item() > 0 else 1.0)  # waits for the GPU

    lines = []
    batch = torch.randn(8, 4, device="cuda")
    graphed = GraphedNetwork(Waits(), lines.append)
    for _ in range(3):
        torch.manual_seed(1)
        graphed(batch).sum().backward()
    assert len(lines) == 1
    inference = GraphedInference(graphed.network.eval(), lines.append)
    torch.testing.assert_close(inference(batch), graphed.network(batch))
    assert len(lines) == 2
    again = GraphedNetwork(nn.Linear(4, 4).cuda())  # another network can still be recorded
    again(batch).sum().backward()
