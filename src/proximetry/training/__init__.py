"""Training: recipes, the training loop, checkpoints, distributed runs.

recipe = Recipe.load("glyphs")
results = train(recipe, "runs/first")
embedder = Embedder.load("runs/first/embedder")
"""

from typing import TYPE_CHECKING

from proximetry._util.imports import import_optional, lazy_exports

import_optional("pydantic", "train", "proximetry.training")

from proximetry.recipe.loading import RecipeError, shipped_recipes  # noqa: E402
from proximetry.recipe.schema import Recipe  # noqa: E402

if TYPE_CHECKING:
    from proximetry.training.callbacks import Callback
    from proximetry.training.distillation import distill
    from proximetry.training.embedding_transformer import EmbeddingTransformer
    from proximetry.training.errors import RankError, RunError
    from proximetry.training.evaluator import evaluate_embedder
    from proximetry.training.extension import extend
    from proximetry.training.run import Stopped
    from proximetry.training.run_folder import RunFolder
    from proximetry.training.trainer import train

__all__ = [
    "Callback",
    "EmbeddingTransformer",
    "RankError",
    "Recipe",
    "RecipeError",
    "RunError",
    "RunFolder",
    "Stopped",
    "distill",
    "evaluate_embedder",
    "extend",
    "shipped_recipes",
    "train",
]


# These import torch and timm, which takes seconds; recipes alone do not.
__getattr__ = lazy_exports(
    __name__,
    {
        "callbacks": ("Callback",),
        "distillation": ("distill",),
        "embedding_transformer": ("EmbeddingTransformer",),
        "evaluator": ("evaluate_embedder",),
        "errors": ("RankError", "RunError"),
        "extension": ("extend",),
        "run": ("Stopped",),
        "trainer": ("train",),
        "run_folder": ("RunFolder",),
    },
    extra="train",
)
