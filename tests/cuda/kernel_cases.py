"""Fused layers against torch; run by test_kernels.py in Triton's interpreter or on a GPU."""

import copy
import os

import pytest
import torch
from timm.layers import BatchNormAct2d
from timm.layers.conv2d_same import Conv2dSame
from torch import nn

from proximetry.kernels import batch_norm, layers
from proximetry.kernels.layers import fuse, fused_depthwise, fused_norm
from proximetry.models import freeze_batchnorm

DEVICE = os.environ["KERNEL_DEVICE"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def images(*shape, dtype=torch.float32):
    values = torch.randn(shape, device=DEVICE).to(dtype)
    return values.to(memory_format=torch.channels_last).requires_grad_()


def norm_layer(channels, act=nn.Identity, **options):
    layer = BatchNormAct2d(channels, act_layer=act, **options).to(DEVICE)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.1, 3)
    if layer.affine:
        nn.init.normal_(layer.weight, std=3)
        nn.init.normal_(layer.bias, mean=1)
    return layer


def distance(one, two):
    return ((one.double() - two.double()).norm() / (two.double().norm() + 1e-30)).item()


def compare(fast, layer, x):
    """Value, gradients and buffers over two batches; the twin computes in float64."""
    twin = copy.deepcopy(layer).double()
    for batch in (x, (x * 2 + 1).detach().requires_grad_()):
        wide = batch.detach().double().requires_grad_()
        y = twin(wide)
        slope = torch.randn_like(y).to(x.dtype)
        expected = [y, *torch.autograd.grad(y, [wide, *twin.parameters()], slope.double())]
        y = fast(layer, batch)
        actual = [y, *torch.autograd.grad(y, [batch, *layer.parameters()], slope)]
        assert y.dtype == actual[1].dtype == x.dtype
        assert y.is_contiguous(memory_format=torch.channels_last)
        for one, two in zip(actual, expected, strict=True):
            assert one.shape == two.shape
            assert distance(one, two) < TOLERANCE[x.dtype]
    for name, buffer in twin.named_buffers():
        assert distance(layer.get_buffer(name), buffer) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU, nn.ReLU6, nn.SiLU])
@pytest.mark.parametrize("shape", [(3, 24, 5, 7), (2, 70, 3, 3), (1, 1, 1, 1)])
def test_frozen_norm_equals_torch(shape, act, dtype):
    layer = freeze_batchnorm(norm_layer(shape[1], act))
    compare(fused_norm, layer, images(*shape, dtype=dtype))


# With few programs, each takes several steps, and the parts are combined in several steps.
FEW_PROGRAMS = pytest.mark.parametrize(("programs", "parts"), [(528, 128), (3, 2)])


def share_among(monkeypatch, programs, parts):
    monkeypatch.setattr(batch_norm, "_PROGRAMS", programs)
    monkeypatch.setattr(batch_norm, "_JOIN_PARTS", parts)


# With only two rows, the gradient would be zero without eps.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("shape", [(3, 24, 5, 7), (2, 70, 3, 3), (2, 1, 1, 1), (2, 33, 1, 1)])
def test_training_norm_equals_torch(shape, act, dtype):
    layer = norm_layer(shape[1], act, eps=0.1, momentum=0.3)
    compare(fused_norm, layer, images(*shape, dtype=dtype))
    assert layer.num_batches_tracked.item() == 2


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"momentum": 0}, {"momentum": 1}, {"act": nn.ReLU, "affine": False}, {"act": nn.SiLU}],
)
def test_options_of_norm(options, frozen):
    layer = norm_layer(8, **options)
    compare(fused_norm, freeze_batchnorm(layer) if frozen else layer, images(2, 8, 3, 3))


@FEW_PROGRAMS
@pytest.mark.parametrize("batch", [1, 2, 6, 9])
def test_training_norm_of_many_rows(batch, programs, parts, monkeypatch):
    share_among(monkeypatch, programs, parts)
    compare(fused_norm, norm_layer(24, nn.ReLU6), images(batch, 24, 8, 9))


def test_training_norm_with_frozen_scale_and_shift():
    layer, x = norm_layer(8, nn.ReLU), images(2, 8, 3, 3)
    twin = copy.deepcopy(layer)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    expected = torch.autograd.grad(twin(x).square().sum(), x)
    actual = torch.autograd.grad(fused_norm(layer, x).square().sum(), x)
    assert distance(*actual, *expected) < 1e-5


# An outlier as the origin of a part's sums costs a few digits only.
@FEW_PROGRAMS
@pytest.mark.parametrize(("outlier", "tolerance"), [(0, 1e-6), (100, 1e-4)])
@pytest.mark.parametrize(("middle", "spread"), [(0, 1), (100, 0.1), (-3e4, 0.5), (7, 0)])
def test_statistics_are_accurate_for_any_mean(
    middle, spread, outlier, tolerance, programs, parts, monkeypatch
):
    share_among(monkeypatch, programs, parts)
    x = images(3, 24, 11, 13).detach() * spread + middle
    x[0, :, 0, 0] += outlier * spread
    layer = norm_layer(24)
    layer.running_mean.zero_()  # far from the mean of the batch
    running = layer.running_mean, layer.running_var, layer.num_batches_tracked
    mean, variance = batch_norm.statistics(x, *running, 1.0)
    if spread:  # the rounding of the mean, relative to the spread
        tolerance += torch.finfo(x.dtype).eps * abs(middle) / spread
    rows = x.double().movedim(1, -1).flatten(0, 2)
    assert distance(mean + spread, rows.mean(dim=0) + spread) < tolerance
    assert distance(variance, rows.var(dim=0, correction=0)) < tolerance
    assert torch.equal(layer.running_mean, mean)
    assert distance(layer.running_var, rows.var(dim=0)) < tolerance


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU, nn.ReLU6])
def test_nan_is_preserved(act, frozen):
    layer, x = norm_layer(8, act), images(2, 8, 3, 3).detach()
    if frozen:
        freeze_batchnorm(layer)
    x[1, 2, 0, 1] = torch.nan
    assert torch.equal(fused_norm(layer, x).isnan(), copy.deepcopy(layer)(x).isnan())


def test_results_are_deterministic():
    layer, x = norm_layer(24, nn.ReLU6), images(9, 24, 8, 9)
    results = []
    for twin in (copy.deepcopy(layer), layer):
        y = fused_norm(twin, x)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *twin.parameters()])])
        results[-1] += twin.buffers()
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_changed_statistics_raise_in_backward(monkeypatch):
    monkeypatch.setattr(layers, "_suits", lambda x: True)
    layer, x = fuse(norm_layer(8)), images(2, 8, 3, 3)
    y = layer.eval()(x)
    layer.train()(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_raise():
    layer, x = norm_layer(8), images(2, 8, 3, 3)
    (slope,) = torch.autograd.grad(fused_norm(layer, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_recorded_norm_updates_its_statistics():
    layer, x = fuse(norm_layer(24, nn.ReLU6)), images(3, 24, 5, 7)
    twin = copy.deepcopy(layer)
    recorded = torch.cuda.make_graphed_callables(layer, (x,))
    layer.load_state_dict(twin.state_dict())  # recording runs the layer several times
    for _ in range(3):
        batch, slopes = images(3, 24, 5, 7), []
        for network in (recorded, twin):
            loss = network(batch).square().sum()
            slopes.append(torch.autograd.grad(loss, [batch, *network.parameters()]))
        for one, two in zip(*slopes, strict=True):
            assert distance(one, two) < 1e-5
    for one, two in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, two)
    assert layer.num_batches_tracked.item() == 3


@pytest.mark.parametrize("size", [(5, 6), (1, 1)])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_equals_torch(kernel, stride, same, size):
    kind = Conv2dSame if same else nn.Conv2d
    padding = 0 if same else kernel // 2
    layer = kind(24, 24, kernel, stride, padding, groups=24, bias=False).to(DEVICE)
    compare(fused_depthwise, layer, images(2, 24, *size))


def test_depthwise_in_bfloat16():
    layer = nn.Conv2d(40, 40, 3, 2, 1, groups=40, bias=False).to(DEVICE)
    compare(fused_depthwise, layer, images(2, 40, 7, 6, dtype=torch.bfloat16))


@pytest.mark.parametrize("frozen", [True, False])
def test_fused_network_has_the_gradients_of_torch(frozen, monkeypatch):
    monkeypatch.setattr(layers, "_suits", lambda x: True)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False),
        BatchNormAct2d(8, act_layer=nn.ReLU6),
        Conv2dSame(8, 8, 5, 2, groups=8, bias=False),
        BatchNormAct2d(8, act_layer=nn.ReLU6),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False),
        nn.BatchNorm2d(8),
    ).to(DEVICE)
    for layer in (plain[1], plain[3]):  # the next norm would undo a scale without a bias
        nn.init.normal_(layer.bias)
    if frozen:
        freeze_batchnorm(plain)
    fast = fuse(copy.deepcopy(plain))
    x = images(2, 3, 5, 6)
    slope = torch.randn(2, 8, 3, 3, device=DEVICE)
    for network in (plain, fast):
        (network(x) * slope).sum().backward()
    for one, two in zip(fast.parameters(), plain.parameters(), strict=True):
        assert distance(one.grad, two.grad) < 1e-5
    for one, two in zip(fast.buffers(), plain.buffers(), strict=True):
        assert distance(one, two) < 1e-5
    assert distance(fast.eval()(x), plain.eval()(x)) < 1e-5
