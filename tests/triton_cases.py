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


def run_cases(beside: str, name: str, device: str) -> None:
    """Let pytest run the file `name` that lies beside the file `beside`."""
    triton = pytest.importorskip("triton")
    if device == "cpu" and version(triton) < (3, 7) and version(np) >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    chosen = {"KERNEL_DEVICE": device} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    cases = Path(beside).with_name(name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    run = subprocess.run(
        command,
        env={**known, **chosen},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
