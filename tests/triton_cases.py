"""Run a file of cases in a process of its own, in Triton's interpreter or on a GPU.

The interpreter has to be chosen before Triton is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


def run_cases(beside, names, device):
    """Run pytest on files beside the file `beside`, in another process."""
    triton = pytest.importorskip("triton")
    if device == "cpu" and version(triton) < (3, 7) and version(np) >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    environment = {**os.environ, "KERNEL_DEVICE": device, "TRITON_INTERPRET": "1"}
    if device != "cpu":
        del environment["TRITON_INTERPRET"]
    cases = [str(Path(beside).with_name(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases]
    run = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
