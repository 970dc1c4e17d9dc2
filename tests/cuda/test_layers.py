"""Fused layers: which layers are replaced, and when they fall back to torch."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, StdConv2d
from torch import nn

from proximetry.kernels import layers
from proximetry.kernels.layers import fuse, unfuse
from proximetry.models import freeze_batchnorm


def network():
    torch.manual_seed(0)
    return timm.create_model("tf_efficientnet_lite0", num_classes=8)


class CustomNorm(nn.BatchNorm2d):
    """Another forward pass."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("frozen", [True, False])
def test_fused_network_equals_torch_on_the_cpu(frozen):
    plain = freeze_batchnorm(network()) if frozen else network()
    fast = fuse(fuse(copy.deepcopy(plain)))
    for layer in fast.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.BatchNorm2d):
            assert name == "FusedBatchNormAct2d"
        if isinstance(layer, nn.Conv2d):
            assert name.startswith("Fused") == (layer.groups > 1)
    x = torch.randn(2, 3, 64, 64)
    expected, actual = plain.train()(x), fast.train()(x)
    assert torch.equal(expected, actual)
    expected.sum().backward()
    actual.sum().backward()
    for one, two in zip(plain.parameters(), fast.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    before, after = plain.state_dict(), fast.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    kinds = [type(layer) for layer in plain.modules()]
    assert [type(layer) for layer in unfuse(fast).modules()] == kinds


def test_unsupported_layers_are_not_fused():
    plain = nn.Sequential(
        nn.SyncBatchNorm(8),
        CustomNorm(8),
        nn.BatchNorm1d(8),
        nn.Conv2d(8, 8, 3, groups=8),  # has a bias
        nn.Conv2d(8, 8, 3, groups=8, bias=False, dilation=2),
        nn.Conv2d(8, 8, 7, groups=8, bias=False),
        nn.Conv2d(8, 8, (3, 5), groups=8, bias=False),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, padding="same"),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, padding=1, padding_mode="reflect"),
        StdConv2d(8, 8, 3, groups=8, bias=False),  # standardizes its weights
        BatchNormAct2d(8, drop_layer=nn.Dropout),
        freeze_batchnorm(BatchNormAct2d(8, drop_layer=nn.Dropout)),
    )
    kinds = [type(layer) for layer in plain.modules()]
    assert [type(layer) for layer in fuse(plain).modules()] == kinds


@pytest.mark.parametrize(
    "prepare", [freeze_batchnorm, fuse, lambda model: fuse(freeze_batchnorm(model))]
)
def test_pickle_round_trip_of_frozen_and_fused_networks(prepare):
    model = prepare(network())
    copied = pickle.loads(pickle.dumps(model))
    kinds = [type(layer) for layer in model.modules()]
    assert [type(layer) for layer in copied.modules()] == kinds
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(copied.train()(x), model.train()(x))


def test_fuse_without_triton_changes_nothing(monkeypatch):
    monkeypatch.setattr(layers, "find_spec", lambda name: None)
    model = fuse(freeze_batchnorm(network()))
    assert not any(type(layer).__name__.startswith("Fused") for layer in model.modules())


class ReachedError(Exception):
    """Raised instead of launching a kernel."""


def reach(layer, x):
    raise ReachedError


@pytest.fixture
def any_tensor_suits(monkeypatch):
    monkeypatch.setattr(layers, "_suits", lambda x: True)
    monkeypatch.setattr(layers, "fused_norm", reach)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_kernels_run_in_training_and_evaluation(any_tensor_suits, kind, affine, training):
    layers = [kind(8, affine=affine), freeze_batchnorm(kind(8, affine=affine))]
    layers.append(freeze_batchnorm(fuse(kind(8, affine=affine))))  # frozen afterwards
    for layer in layers:
        with pytest.raises(ReachedError):
            fuse(layer).train(training)(torch.randn(2, 8, 3, 3))


def test_kernels_launch_on_the_device_of_their_input(monkeypatch):
    entered, launched = [], []

    @contextmanager
    def guard(device):
        entered.append(device)
        yield
        entered.remove(device)

    def launch(layer, x):
        launched.append(entered == [x.get_device()])
        return x

    monkeypatch.setattr(layers, "_suits", lambda x: True)
    monkeypatch.setattr(torch.cuda, "device", guard)
    for name in ("fused_norm", "fused_depthwise"):
        monkeypatch.setattr(layers, name, launch)
    for layer in (nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8, bias=False)):
        fuse(layer)(torch.randn(2, 8, 3, 3))
    assert launched == [True, True]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pointwise_convolution_equals_torch(monkeypatch, bias, dtype):
    monkeypatch.setattr(layers, "_suits", lambda x: True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = nn.Conv2d(24, 16, 1, bias=bias).to(device, dtype, memory_format=torch.channels_last)
    fast = fuse(copy.deepcopy(plain))
    results = []
    for layer in (plain, fast):
        torch.manual_seed(0)
        x = torch.randn(3, 24, 5, 7, device=device, dtype=dtype)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results.append((y, x.grad, *(parameter.grad for parameter in layer.parameters())))
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).float().norm() < 1e-2 * expected.float().norm()
    assert results[1][0].is_contiguous(memory_format=torch.channels_last)
    assert type(unfuse(fast)) is nn.Conv2d


def batch_norm(**changes):
    layer = nn.BatchNorm2d(8, track_running_stats=changes.pop("track", True))
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    "plain",
    [
        batch_norm(momentum=None),
        batch_norm(track_running_stats=False),
        batch_norm(num_batches_tracked=None),
        batch_norm(track=False),
        batch_norm(track=False).eval(),
        freeze_batchnorm(batch_norm(track=False)),
        batch_norm().to(torch.bfloat16),
    ],
)
def test_unsupported_statistics_fall_back_to_torch(any_tensor_suits, plain):
    fast = fuse(copy.deepcopy(plain))
    for _ in range(3):
        x = torch.randn(2, 8, 3, 3, dtype=plain.weight.dtype)
        assert torch.equal(fast(x), plain(x))
    before, after = plain.state_dict(), fast.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_invalid_input_raises_the_errors_of_torch(any_tensor_suits):
    layer = fuse(nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 8, 1, 1))
    for mode in (True, False):
        with pytest.raises(RuntimeError, match="8"):
            layer.train(mode)(torch.randn(2, 4, 3, 3))
    layer = fuse(nn.Conv2d(8, 8, 3, groups=8, bias=False))
    with pytest.raises(RuntimeError, match="8 channels"):
        layer(torch.randn(2, 4, 3, 3))
