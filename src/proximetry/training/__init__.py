"""Training: recipes, the loop, checkpoints, several processes.

recipe = Recipe.load("glyphs")
results = train(recipe, "runs/first")
embedder = Embedder.load("runs/first/embedder")
"""

from typing import TYPE_CHECKING, Any

from proximetry.training.folder import RunError, RunFolder
from proximetry.training.recipe import Recipe, shipped_recipes
from proximetry.training.recipe_values import RecipeError
from proximetry.training.stopping import Stopped

if TYPE_CHECKING:
    from proximetry.training.run import train
    from proximetry.training.trainer import Trainer

__all__ = [
    "Recipe",
    "RecipeError",
    "RunError",
    "RunFolder",
    "Stopped",
    "Trainer",
    "shipped_recipes",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the loop when it is asked for: with the networks it takes seconds, recipes do not."""
    if name == "train":
        from proximetry.training.run import train

        return train
    if name == "Trainer":
        from proximetry.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
