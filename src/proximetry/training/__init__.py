"""Training: recipes, the loop, checkpoints, several processes.

recipe = Recipe.load("glyphs")
results = train(recipe, "runs/first")
embedder = Embedder.load("runs/first/embedder")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from proximetry.training.recipe import Recipe, RecipeError, shipped_recipes

if TYPE_CHECKING:
    from proximetry.training.callbacks import Callback
    from proximetry.training.evaluator import evaluate_embedder
    from proximetry.training.run import train
    from proximetry.training.run_folder import RunError, RunFolder
    from proximetry.training.stopping import Stopped

# Imported when they are asked for: with torch and timm they take seconds, recipes do not.
_LAZY = {
    "Callback": "callbacks",
    "RunError": "run_folder",
    "RunFolder": "run_folder",
    "Stopped": "stopping",
    "evaluate_embedder": "evaluator",
    "train": "run",
}

__all__ = [
    "Callback",
    "Recipe",
    "RecipeError",
    "RunError",
    "RunFolder",
    "Stopped",
    "evaluate_embedder",
    "shipped_recipes",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a name of `_LAZY`."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
