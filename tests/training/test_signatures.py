"""The number of parameters of functions in `proximetry.training`."""

import ast
from pathlib import Path

from proximetry import training

MAX_POSITIONAL = 6


def test_functions_have_at_most_six_positional_parameters():
    too_many, functions = [], 0
    for path in Path(training.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                functions += 1
                if len(node.args.posonlyargs + node.args.args) > MAX_POSITIONAL:
                    too_many.append(f"{path.name}: {node.name}")
    assert too_many == []
    assert functions > 100
