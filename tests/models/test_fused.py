"""Fused layers: the kernels in Triton's interpreter or on a GPU, and the swap of classes here."""

import copy
import subprocess
import sys

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from proximetry.models import freeze_batchnorm, fused
from proximetry.models.fused import fuse
from tests.triton_cases import run_cases


def test_kernels_in_the_interpreter():
    run_cases(__file__, "kernel_cases.py", "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter stands in")
def test_kernels_on_the_card():
    run_cases(__file__, "kernel_cases.py", "cuda")


# What the interpreter accepts need not compile. A compiler for cards comes with Triton.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from proximetry.models.kernels import depthwise, norm

floats = {"x", "y", "dx", "dy"}
sums = {"weight", "bias", "mean", "variance", "sums", "w"}
blocks = {"ACT": 2, "BM": 64, "BC": 32, "BP": 16, "S": 2, "K": 5, "MIRROR": False, "LEFT": 1}
for name in sys.argv[1:]:
    kernel = getattr(norm, name, None) or getattr(depthwise, name)
    kinds, constants = {}, {}
    for place, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            constants[(place,)] = blocks[parameter.name]
        kinds[parameter.name] = (
            "constexpr" if parameter.is_constexpr
            else "*bf16" if parameter.name in floats
            else "*fp32" if parameter.name in sums
            else "fp32" if parameter.name == "eps"
            else "i32"
        )
    source = ASTSource(kernel, kinds, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(name, len(made.asm["cubin"]))
"""


def test_kernels_compile_for_a_card():
    pytest.importorskip("triton")
    names = ["_forward_norm", "_backward_norm", "_forward_depthwise"]
    names += ["_input_depthwise_strided", "_weight_depthwise"]
    command = [sys.executable, "-c", COMPILE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(names)


def network():
    torch.manual_seed(0)
    return timm.create_model("tf_efficientnet_lite0", num_classes=8)


def test_on_the_cpu_nothing_changes():
    plain = freeze_batchnorm(network())
    fast = fuse(copy.deepcopy(plain))
    assert plain.state_dict().keys() == fast.state_dict().keys()
    x = torch.randn(2, 3, 64, 64)
    expected, found = plain.train()(x), fast.train()(x)
    assert torch.equal(expected, found)
    expected.sum().backward()
    found.sum().backward()
    for one, two in zip(plain.parameters(), fast.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_every_frozen_norm_and_depthwise_convolution_is_swapped_once():
    model = fuse(fuse(freeze_batchnorm(network())))
    for layer in model.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.BatchNorm2d):
            assert name == "FusedFrozenBatchNormAct2d"
        if isinstance(layer, nn.Conv2d):
            assert name.startswith("Fused") == (layer.groups > 1)


def test_what_the_kernels_cannot_do_stays_as_it_is():
    layers = nn.Sequential(
        BatchNormAct2d(8),  # its statistics move
        nn.Conv2d(8, 8, 3, groups=8),  # has a bias
        nn.Conv2d(8, 8, 3, groups=8, bias=False, dilation=2),
        nn.Conv2d(8, 8, 7, groups=8, bias=False),
        nn.Conv2d(8, 8, (3, 5), groups=8, bias=False),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, padding="same"),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, padding=1, padding_mode="reflect"),
    )
    kinds = [type(layer) for layer in layers]
    assert [type(layer) for layer in fuse(layers)] == kinds


def test_without_triton_nothing_is_swapped(monkeypatch):
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    model = fuse(freeze_batchnorm(network()))
    assert not any(type(layer).__name__.startswith("Fused") for layer in model.modules())


def test_a_norm_that_drops_units_stays_as_it_is():
    layer = freeze_batchnorm(BatchNormAct2d(8, drop_layer=nn.Dropout))
    kind = type(layer)
    assert type(fuse(layer)) is kind
