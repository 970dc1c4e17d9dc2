"""Trackers: TensorBoard where it is installed, Weights & Biases where the recipe asks for it."""

from pathlib import Path
from typing import Any

from proximetry.training.recipe import Recipe
from proximetry.training.recipe_values import RecipeError


class Trackers:
    """Passes the lines of metrics.jsonl on."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._board: Any = None
        self._wandb: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))
        except ImportError:
            pass  # metrics.jsonl has everything
        if recipe.training.wandb:
            try:
                import wandb
            except ImportError as error:
                raise RecipeError("training.wandb needs wandb: pip install wandb") from error
            self._wandb = wandb.init(
                project=recipe.training.wandb, config=recipe.to_dict(), dir=str(folder)
            )

    def log(self, line: dict[str, Any]) -> None:
        """Report one epoch."""
        flat = dict(_flatten(line))
        if self._board is not None:
            for name, value in flat.items():
                self._board.add_scalar(name, value, line["epoch"])
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(flat, step=line["step"])

    def close(self) -> None:
        """Finish."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _flatten(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    pairs: list[tuple[str, float]] = []
    for key, value in line.items():
        if isinstance(value, dict):
            pairs += _flatten(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            pairs.append((prefix + key, value))
    return pairs
