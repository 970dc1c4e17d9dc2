"""The Triton kernel on a GPU, or in Triton's interpreter where there is none.

The interpreter has to be chosen before Triton is imported, so the cases run in another process.
"""

import pytest
import torch

from proximetry.data.augment.resample import _kernel
from tests.triton_cases import run_cases


@pytest.mark.slow
def test_in_the_interpreter():
    run_cases(__file__, "resample_kernel_cases.py", "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter stands in")
def test_on_the_gpu():
    run_cases(__file__, "resample_kernel_cases.py", "cuda")


def test_without_triton_a_warning_says_so_once(monkeypatch):
    module = pytest.importorskip("proximetry.kernels.resample")

    def fail():
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(module, "find_driver", fail)
    _kernel.cache_clear()
    try:
        with pytest.warns(
            UserWarning,
            match="without Triton crops are made on the CPU, several times slower: no C",
        ):
            assert _kernel() is None
        assert _kernel() is None
    finally:
        _kernel.cache_clear()
