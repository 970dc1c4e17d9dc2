"""Fused layers: the kernels in Triton's interpreter or on a GPU, and the swap of classes here."""

import copy
import pickle
import subprocess
import sys
from contextlib import contextmanager

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, StdConv2d
from torch import nn

from proximetry.kernels import fused
from proximetry.kernels.layers import fuse, unfuse
from proximetry.models import freeze_batchnorm
from tests.triton_cases import run_cases


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    run_cases(__file__, "kernel_cases.py", "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter stands in")
def test_kernels_on_the_gpu():
    run_cases(__file__, "kernel_cases.py", "cuda")


# What the interpreter accepts need not compile. A compiler for GPUs comes with Triton.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from proximetry.kernels import depthwise, norm

floats = {"x", "y", "dx", "dy"}
sums = {"weight", "bias", "mean", "variance", "sums", "w"}
sums |= {"parts", "running_mean", "running_variance"}
blocks = {"ACT": 2, "BM": 128, "BC": 32, "BP": 16, "S": 2, "K": 5, "LEFT": 1}
blocks["MOVING"] = True
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
            else "fp32" if parameter.name in ("eps", "momentum")
            else "*i64" if parameter.name == "batches"
            else "i32"
        )
    source = ASTSource(kernel, kinds, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(name, len(made.asm["cubin"]))
"""


def test_kernels_compile_for_a_gpu():
    pytest.importorskip("triton")
    names = ["_forward_norm", "_backward_norm", "_forward_depthwise"]
    names += ["_statistics", "_join_statistics", "_backward_moving", "_join_sums"]
    names += ["_input_depthwise_strided", "_weight_depthwise"]
    command = [sys.executable, "-c", COMPILE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(names)


def network():
    torch.manual_seed(0)
    return timm.create_model("tf_efficientnet_lite0", num_classes=8)


@pytest.mark.parametrize("frozen", [True, False])
def test_on_the_cpu_nothing_changes(frozen):
    plain = freeze_batchnorm(network()) if frozen else network()
    fast = fuse(copy.deepcopy(plain))
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


@pytest.mark.parametrize("frozen", [True, False])
def test_every_norm_and_depthwise_convolution_is_swapped_once(frozen):
    model = fuse(fuse(freeze_batchnorm(network()) if frozen else network()))
    for layer in model.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.BatchNorm2d):
            assert name == "FusedBatchNormAct2d"
        if isinstance(layer, nn.Conv2d):
            assert name.startswith("Fused") == (layer.groups > 1)


class OwnNorm(nn.BatchNorm2d):
    """Norms half a batch at a time."""

    def forward(self, x):
        return torch.cat([super(OwnNorm, self).forward(half) for half in x.chunk(2)])


def test_what_the_kernels_cannot_do_stays_as_it_is():
    layers = nn.Sequential(
        nn.SyncBatchNorm(8),  # its statistics are of more than its own batch
        OwnNorm(8),
        nn.BatchNorm1d(8),
        nn.Conv2d(8, 8, 3, groups=8),  # has a bias
        nn.Conv2d(8, 8, 3, groups=8, bias=False, dilation=2),
        nn.Conv2d(8, 8, 7, groups=8, bias=False),
        nn.Conv2d(8, 8, (3, 5), groups=8, bias=False),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, padding="same"),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, padding=1, padding_mode="reflect"),
        StdConv2d(8, 8, 3, groups=8, bias=False),  # standardizes its weights
    )
    kinds = [type(layer) for layer in layers]
    assert [type(layer) for layer in fuse(layers)] == kinds


def test_unfuse_restores_layer_types():
    model = network()
    kinds = [type(layer) for layer in model.modules()]
    assert [type(layer) for layer in fuse(model).modules()] != kinds
    assert [type(layer) for layer in unfuse(model).modules()] == kinds


@pytest.mark.parametrize(
    "prepare", [freeze_batchnorm, fuse, lambda model: fuse(freeze_batchnorm(model))]
)
def test_pickle_round_trip_of_frozen_and_fused_networks(prepare, tmp_path):
    model = prepare(network())
    torch.save(model, tmp_path / "model.pt")
    copies = [
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ]
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model.train()(x)
        for copied in copies:
            assert [type(layer) for layer in copied.modules()] == [
                type(layer) for layer in model.modules()
            ]
            assert torch.equal(copied.train()(x), expected)


def test_without_triton_nothing_is_swapped(monkeypatch):
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    model = fuse(freeze_batchnorm(network()))
    assert not any(type(layer).__name__.startswith("Fused") for layer in model.modules())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_norm_that_drops_units_stays_as_it_is(frozen):
    layer = BatchNormAct2d(8, drop_layer=nn.Dropout)
    if frozen:
        freeze_batchnorm(layer)
    kind = type(layer)
    assert type(fuse(layer)) is kind


class ReachedError(Exception):
    """Where the kernels would have been called."""


def reach(layer, x):
    raise ReachedError


@pytest.fixture
def any_tensor_suits(monkeypatch):
    monkeypatch.setattr(fused, "_suits", lambda x: True)
    monkeypatch.setattr(fused, "fused_norm", reach)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_kernels_serve_training_and_evaluation(any_tensor_suits, kind, affine, training):
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

    monkeypatch.setattr(fused, "_suits", lambda x: True)
    monkeypatch.setattr(torch.cuda, "device", guard)
    for name in ("fused_norm", "fused_depthwise"):
        monkeypatch.setattr(fused, name, launch)
    for layer in (nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8, bias=False)):
        fuse(layer)(torch.randn(2, 8, 3, 3))
    assert launched == [True, True]


def untracked(layer):
    layer.track_running_stats = False


def uncounted(layer):
    layer.num_batches_tracked = None


@pytest.mark.parametrize(
    "change", [lambda layer: setattr(layer, "momentum", None), untracked, uncounted]
)
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
def test_moving_norms_that_are_torchs(any_tensor_suits, kind, change):
    plain = kind(8)
    change(plain)
    fast = fuse(copy.deepcopy(plain))
    for _ in range(3):
        x = torch.randn(2, 8, 3, 3)
        assert torch.equal(fast(x), plain(x))
    before, after = plain.state_dict(), fast.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_without_running_statistics_is_torchs(any_tensor_suits, training):
    plain = nn.BatchNorm2d(8, track_running_stats=False)
    x = torch.randn(2, 8, 3, 3)
    fast = fuse(copy.deepcopy(plain)).train(training)
    assert torch.equal(fast(x), plain(x))
    frozen = fuse(freeze_batchnorm(nn.BatchNorm2d(8, track_running_stats=False)))
    assert torch.equal(frozen(x), plain(x))


def test_statistics_in_half_precision_are_torchs(any_tensor_suits):
    plain = nn.BatchNorm2d(8).to(torch.bfloat16)
    x = torch.randn(2, 8, 3, 3, dtype=torch.bfloat16)
    assert torch.equal(fuse(copy.deepcopy(plain))(x), plain(x))


def test_torch_refuses_what_it_refuses(any_tensor_suits):
    layer = fuse(nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 8, 1, 1))
    for mode in (True, False):
        with pytest.raises(RuntimeError, match="8"):
            layer.train(mode)(torch.randn(2, 4, 3, 3))
    layer = fuse(nn.Conv2d(8, 8, 3, groups=8, bias=False))
    with pytest.raises(RuntimeError, match="8 channels"):
        layer(torch.randn(2, 4, 3, 3))
