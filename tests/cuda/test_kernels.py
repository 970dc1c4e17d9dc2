"""The Triton kernels in Triton's interpreter, on a GPU, and compiled for one."""

import subprocess
import sys

import pytest
import torch

from proximetry.data.resample import _kernel
from tests.triton_cases import run_cases

CASES = "kernel_cases.py", "resample_kernel_cases.py"


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    run_cases(__file__, CASES, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter stands in")
def test_kernels_on_the_gpu():
    run_cases(__file__, CASES, "cuda")


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
blocks["MOVING"] = True
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
    names += ["_statistics", "_join_statistics", "_backward_moving", "_join_sums"]
    names += ["_input_depthwise_strided", "_weight_depthwise"]
    command = [sys.executable, "-c", COMPILE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(names)


def test_missing_triton_warns_once(monkeypatch):
    module = pytest.importorskip("proximetry.kernels.resample")

    def fail():
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(module, "find_driver", fail)
    _kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C compiler"):
            assert _kernel() is None
        assert _kernel() is None
    finally:
        _kernel.cache_clear()
