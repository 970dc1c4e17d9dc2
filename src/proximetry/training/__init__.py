"""Training: recipes, the loop, checkpoints, several processes.

recipe = Recipe.load("glyphs")
results = train(recipe, "runs/first")
embedder = Embedder.load("runs/first/embedder")
"""

from proximetry.training.folder import RunError, RunFolder
from proximetry.training.recipe import Recipe, shipped_recipes
from proximetry.training.recipe_values import RecipeError
from proximetry.training.run import train
from proximetry.training.stopping import Stopped
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
