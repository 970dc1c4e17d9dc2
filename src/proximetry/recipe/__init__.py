"""Recipes: every setting of a run, validated; imports neither torch nor numpy."""

from proximetry._util.imports import import_optional

import_optional("pydantic", "train", "proximetry.recipe")

from proximetry.recipe.loading import RecipeError, shipped_recipes  # noqa: E402
from proximetry.recipe.schema import Recipe  # noqa: E402

__all__ = ["Recipe", "RecipeError", "shipped_recipes"]
