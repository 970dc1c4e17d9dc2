"""The Triton kernels in Triton's interpreter, on a GPU, and compiled for one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from proximetry.data.resample import _kernel

HERE = Path(__file__).parent
NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: tested in the interpreter"
)


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


@pytest.mark.parametrize("cases", ["kernel_cases", "resample_kernel_cases", "fused_cases"])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=NO_GPU)]
)
def test_kernels(device, cases):
    """In another process: the interpreter has to be chosen before Triton is imported."""
    triton = pytest.importorskip("triton")
    if device == "cpu" and version(triton) < (3, 7) and version(np) >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    environment = {**os.environ, "KERNEL_DEVICE": device, "TRITON_INTERPRET": "1"}
    if device != "cpu":
        del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / f"{cases}.py"]
    root = HERE.parents[1]
    run = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


# What the interpreter accepts need not compile. A compiler for GPUs comes with Triton.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from proximetry.kernels import batch_norm, depthwise_conv

floats = {"x", "y", "dx", "dy"}
sums = {"weight", "bias", "mean", "variance", "sums", "w"}
sums |= {"parts", "running_mean", "running_variance"}
blocks = {"ACT": 2, "BM": 128, "BC": 32, "BP": 16, "S": 2, "K": 5, "LEFT": 1}
blocks["BATCH_STATS"] = True
for name in sys.argv[1:]:
    kernel = getattr(batch_norm, name, None) or getattr(depthwise_conv, name)
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
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(name, len(compiled.asm["cubin"]))
"""


def test_kernels_compile_for_a_gpu():
    pytest.importorskip("triton")
    names = ["_forward_norm", "_backward_norm", "_forward_depthwise"]
    names += ["_statistics", "_join_statistics", "_backward_batch_stats", "_join_sums"]
    names += ["_input_depthwise_strided", "_weight_depthwise"]
    command = [sys.executable, "-c", COMPILE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(names)


@pytest.mark.slow
def test_fused_loss_kernels_compile_and_hardly_spill_registers():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.cuda.compile_fused"]
    root = HERE.parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    memory = [line.split()[:2] for line in done.stdout.splitlines()]
    assert len(memory) > 30
    assert max(int(spilled) for _, spilled in memory) <= 32, done.stdout


def test_missing_triton_warns_once(monkeypatch):
    module = pytest.importorskip("proximetry.kernels.resample")

    def fail():
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(module, "check_driver", fail)
    _kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C compiler"):
            assert _kernel() is None
        assert _kernel() is None
    finally:
        _kernel.cache_clear()
