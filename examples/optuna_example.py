"""A search for better settings with Optuna: trials are compared on held-out classes.

    python -m examples.optuna_example

Needs optuna (pip install optuna). Weak trials end early. The test set is evaluated once, with the
best settings.
"""

import tempfile
from pathlib import Path
from typing import Any

import optuna

from proximetry.training import Callback, Recipe, train
from proximetry.training.evaluator import selection_value

RECIPE = Recipe.load(
    "glyphs",
    {
        "data": {"short_side": 24},
        "model": {"dim": 32, "image_size": 24},
        "training": {"epochs": 3, "tracker": "none"},
        "evaluation": {"every": 1, "final_test": False, "untrained": False},
    },
)


class Prune(Callback):
    """Ends a trial that is worse than the median of the others at the same epoch."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.pruned = trial, False

    def on_epoch_end(self, run: Any, line: dict[str, Any]) -> None:
        """Report the metric that selects the epoch."""
        self.trial.report(selection_value(line["held_out"], "map@r"), line["epoch"])
        if self.trial.should_prune():
            self.pruned = True
            run.finish()


def search(folder: Path, trials: int = 6, recipe: Recipe = RECIPE) -> optuna.Study:
    """Train each trial in its own folder; return the study."""

    def objective(trial: optuna.Trial) -> float:
        changes = {
            "optimizer.lr": trial.suggest_float("optimizer.lr", 1e-4, 1e-2, log=True),
            "loss.settings.alpha": trial.suggest_float("loss.settings.alpha", 8, 64, log=True),
        }
        prune = Prune(trial)
        results = train(
            recipe.override(changes), folder / f"trial-{trial.number}", callbacks=[prune]
        )
        if prune.pruned:
            raise optuna.TrialPruned
        return selection_value(results["selected"]["held_out"], "map@r")

    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=trials)
    return study


def main() -> None:
    """Search, print a table of the trials, and test the best settings."""
    folder = Path(tempfile.mkdtemp())
    study = search(folder)
    for trial in sorted(study.trials, key=lambda trial: trial.value or 0.0, reverse=True):
        score = "pruned" if trial.value is None else f"{100 * trial.value:.1f}"
        settings = "  ".join(f"{key} {value:.3g}" for key, value in trial.params.items())
        print(f"trial {trial.number:2d}  MAP@R {score:>6}  {settings}")
    best = RECIPE.override({**study.best_params, "evaluation.final_test": True})
    results = train(best, folder / "best")
    print(f"test MAP@R of the best: {100 * results['selected']['test']['map@r']:.1f}")


if __name__ == "__main__":
    main()
