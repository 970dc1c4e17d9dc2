"""Which package may import which, and how light the light ones are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "proximetry"
ALLOWED = {
    "losses": set(),
    "metrics": set(),
    "cuda": set(),
    "data": {"cuda"},
    "models": {"data"},
    "training": {"losses", "metrics", "models", "data", "cuda"},
    "reproduce": {"losses", "metrics", "models", "data", "training"},
    "cli": {"losses", "metrics", "models", "data", "training", "reproduce"},
}


def imported_packages(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names = [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "proximetry" and len(parts) > 1:
                yield parts[1]


def test_every_package_is_listed():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_it_may(package):
    for path in (SOURCE / package).rglob("*.py"):
        reached = {name for name in imported_packages(path) if (SOURCE / name).is_dir()}
        assert reached <= ALLOWED[package] | {package}, path


@pytest.mark.parametrize("package", ["losses", "metrics"])
def test_losses_and_metrics_need_torch_and_numpy_alone(package):
    code = f"""
import sys
import torch, numpy
before = set(sys.modules)
import proximetry.{package} as package
for name in package.__all__:
    getattr(package, name)
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
third = new - set(sys.stdlib_module_names) - {{"proximetry", "torch", "numpy"}}
assert not third, third
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_helpers_for_all_packages_load_neither_torch_nor_numpy():
    code = "import sys, proximetry._common; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
