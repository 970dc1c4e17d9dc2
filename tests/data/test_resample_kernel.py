"""The Triton kernel on a GPU, or in Triton's interpreter where there is none.

The interpreter has to be chosen before Triton is imported, so the cases run in another process.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from proximetry.data import resample

CASES = Path(__file__).with_name("resample_kernel_cases.py")


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


def run_cases(device, **environment):
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(
        command,
        env={**known, "KERNEL_DEVICE": device, **environment},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def test_in_the_interpreter():
    triton = pytest.importorskip("triton")
    if version(triton) < (3, 7) and version(np) >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    run_cases("cpu", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter stands in")
def test_on_the_card():
    run_cases("cuda")


def test_without_triton_a_warning_says_so_and_the_matrices_do_it(monkeypatch):
    module = pytest.importorskip("proximetry.data.resample_kernel")

    def fail():
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(module, "find_driver", fail)
    resample._kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match="without Triton, several times slower: no C compiler"):
            assert resample._kernel() is None
        assert resample._kernel() is None  # and says it once
    finally:
        resample._kernel.cache_clear()
