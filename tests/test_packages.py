"""Who may import whom, and how light the light rooms are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "proximetry"
ALLOWED = {
    "losses": set(),
    "metrics": set(),
    "data": set(),
    "models": {"data"},
    "training": {"losses", "metrics", "models", "data"},
    "reproduce": {"losses", "metrics", "models", "data", "training"},
    "search": {"losses", "metrics", "models", "data"},
}


def imported_rooms(path):
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


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room):
    for path in (SOURCE / room).rglob("*.py"):
        reached = {name for name in imported_rooms(path) if (SOURCE / name).is_dir()}
        assert reached <= ALLOWED[room] | {room}, path


@pytest.mark.parametrize("room", ["losses", "metrics"])
def test_losses_and_metrics_need_torch_and_numpy_alone(room):
    code = f"""
import sys
import torch, numpy
before = set(sys.modules)
import proximetry.{room}
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
third = new - set(sys.stdlib_module_names) - {{"proximetry", "torch", "numpy"}}
assert not third, third
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_short():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, f"{path} is too long; split it"
