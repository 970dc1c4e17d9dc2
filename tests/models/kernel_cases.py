"""What `test_fused.py` runs with Triton's interpreter, or on a GPU, in a process of its own."""

import copy
import os

import pytest
import torch
from timm.layers import BatchNormAct2d
from timm.layers.conv2d_same import Conv2dSame
from torch import nn

from proximetry.models import freeze_batchnorm
from proximetry.models import fused as module
from proximetry.models.fused import fuse, fused_depthwise, fused_norm

DEVICE = os.environ["KERNEL_DEVICE"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def images(*shape, dtype=torch.float32):
    values = torch.randn(shape, device=DEVICE).to(dtype)
    return values.to(memory_format=torch.channels_last).requires_grad_()


def norm(channels, act):
    layer = BatchNormAct2d(channels, act_layer=act).to(DEVICE)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.1, 3)
    nn.init.normal_(layer.weight, std=3)
    nn.init.normal_(layer.bias, mean=1)
    return freeze_batchnorm(layer)


def agree(one, two, dtype=torch.float32):
    scale = two.detach().float().norm().item() + 1e-30
    assert (one.detach().float() - two.detach().float()).norm().item() / scale < TOLERANCE[dtype]


def compare(fast, plain, layer, x):
    """Value and all gradients of two functions of x and the parameters of a layer."""
    y = plain(x.float())  # the reference does not round in between
    slope = torch.randn_like(y).to(x.dtype)
    parameters = list(layer.parameters())
    expected = [y, *torch.autograd.grad(y, [x, *parameters], slope.float())]
    y = fast(layer, x)
    found = [y, *torch.autograd.grad(y, [x, *parameters], slope)]
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    for one, two in zip(found, expected, strict=True):
        assert one.shape == two.shape
        agree(one, two, x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU, nn.ReLU6, nn.SiLU])
@pytest.mark.parametrize("shape", [(3, 24, 5, 7), (2, 70, 3, 3), (1, 1, 1, 1)])
def test_frozen_norm_is_torchs(shape, act, dtype):
    layer = norm(shape[1], act)
    compare(fused_norm, layer, layer, images(*shape, dtype=dtype))


def test_frozen_norm_without_scale_and_shift():
    layer = freeze_batchnorm(nn.BatchNorm2d(8, affine=False).to(DEVICE))
    layer.running_mean.normal_()
    compare(fused_norm, layer, layer, images(2, 8, 3, 3))


@pytest.mark.parametrize("size", [(7, 9), (8, 8), (1, 1)])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_is_torchs(kernel, stride, same, size):
    kind = Conv2dSame if same else nn.Conv2d
    padding = 0 if same else kernel // 2
    layer = kind(24, 24, kernel, stride, padding, groups=24, bias=False).to(DEVICE)
    compare(fused_depthwise, layer, layer, images(2, 24, *size))


@pytest.mark.parametrize("padding", [0, 1])
def test_depthwise_with_less_padding(padding):
    layer = nn.Conv2d(40, 40, 5, 1, padding, groups=40, bias=False).to(DEVICE)
    compare(fused_depthwise, layer, layer, images(2, 40, 9, 8))


def test_depthwise_in_bfloat16():
    layer = nn.Conv2d(40, 40, 3, 2, 1, groups=40, bias=False).to(DEVICE)
    x = images(2, 40, 9, 9, dtype=torch.bfloat16)
    y = fused_depthwise(layer, x)
    agree(y, layer(x.float()), torch.bfloat16)


def test_a_network_learns_the_same(monkeypatch):
    monkeypatch.setattr(module, "_suits", lambda x: True)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False),
        BatchNormAct2d(8, act_layer=nn.ReLU6),
        Conv2dSame(8, 8, 5, 2, groups=8, bias=False),
        BatchNormAct2d(8, act_layer=nn.ReLU6),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False),
        nn.BatchNorm2d(8),
    ).to(DEVICE)
    freeze_batchnorm(plain)
    fast = fuse(copy.deepcopy(plain))
    x = images(2, 3, 10, 10)
    for network in (plain, fast):
        network(x).square().sum().backward()
    for one, two in zip(fast.parameters(), plain.parameters(), strict=True):
        agree(one.grad, two.grad)
