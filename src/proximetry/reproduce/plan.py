"""The runs of a table: one recipe for every row and seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proximetry.metrics.scores import SEPARABILITY
from proximetry.recipe.loading import RecipeError, merge
from proximetry.recipe.schema import AUTO, Recipe
from proximetry.reproduce.table import (
    DEFAULTS,
    ReproduceError,
    ReproduceOptions,
    Row,
    Table,
    shipped_tables,
)
from proximetry.training.metrics_table import WITH_DISTRACTORS
from proximetry.training.schedule import drop_epochs

OF_CODES = ", codes"
"""Suffix of a metric of binary codes (model.bits)."""

_NEVER = 1_000_000  # interval of evaluations beyond the epochs of any run

Kind = Literal["full", "selection", "held_out"]

# Explicit values of `auto`, so that runs of different devices are not mixed.
_ON_GPU = {"training.precision": "bfloat16", "training.cuda_graph": True}
_ON_CPU = {"training.precision": "float32", "training.cuda_graph": False}


@dataclass(frozen=True)
class PlannedRun:
    """One training of a row.

    Attributes:
        kind: "full" trains on all training classes; "selection" selects the epoch on held-out
            classes; "held_out" evaluates held-out classes at the last epoch.
    """

    row: Row
    seed: int
    kind: Kind
    recipe: Recipe

    @property
    def id(self) -> str:
        """Id within the table, and name of the run folder."""
        return run_id(self.row.slug, self.seed, self.kind)

    def __str__(self) -> str:
        which = "selection" if self.kind == "selection" else f"seed {self.seed}"
        return f"{self.row.name}, {which}"


def run_id(slug: str, seed: int, kind: str) -> str:
    """Return the id of a run; a row has one selection run, whatever its seed."""
    return f"{slug}-selection" if kind == "selection" else f"{slug}-seed{seed}"


def command_for(
    table: Table,
    row: str,
    seeds: Sequence[int],
    recipe: Mapping[str, Any],
    selected: Sequence[Row],
    epochs_overridden: bool,
) -> str:
    """Return the command that repeats runs, with the options that differ from the table.

    Args:
        selected: the rows whose epoch is also selected.
    """
    if table.comparison:
        names, numbers = " ".join(row.name for row in table.rows), " ".join(map(str, seeds))
        return f"proximetry compare IMAGES --losses {names} --seeds {numbers}"
    model, default = recipe["model"], table.recipe_values(table.row(row)).get("model", {})
    datasets = {table.dataset(row) for row in table.rows}
    data = datasets.pop().upper() if len(datasets) == 1 else "DATA"
    name = table.name if table.name in shipped_tables() else f"{table.name}.yaml"
    words = ["proximetry", "reproduce", name, "--data", data, "--seeds", *map(str, seeds)]
    if model["backbone"] != default.get("backbone"):
        words += ["--backbone", model["backbone"]]
    if model["weights"] != default.get("weights", "auto"):
        words += ["--weights", Path(model["weights"]).name]
    if epochs_overridden:
        words += ["--epochs", str(recipe["training"]["epochs"])]
    if tuple(selected) != table.selected_rows():
        words.append("--selection" if selected else "--no-selection")
    return " ".join(words)


def plan(table: Table, options: ReproduceOptions, on_gpu: bool = False) -> list[PlannedRun]:
    """Return all runs of a table, seed by seed."""
    seeds = options.seeds
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ReproduceError(
            f"seeds must be distinct integers of at least 0, got {list(seeds)}. Pass at least one."
        )
    if options.selection and table.protocol == "held_out":
        raise ReproduceError(
            f"table {table.name} is evaluated on held-out classes already. Omit --selection."
        )
    rows = [table.row(name) for name in dict.fromkeys(options.rows)] or table.rows
    kind: Kind = "full" if table.protocol == "last" else "held_out"
    runs = [make_run(table, row, seed, kind, options, on_gpu) for seed in seeds for row in rows]
    selected = [row for row in table.selected_rows(options.selection) if row in rows]
    runs += [make_run(table, row, seeds[0], "selection", options, on_gpu) for row in selected]
    return runs


def make_run(
    table: Table,
    row: Row,
    seed: int,
    kind: Kind,
    options: ReproduceOptions = DEFAULTS,
    on_gpu: bool = False,
) -> PlannedRun:
    """Return the run of one row and seed."""
    defaults: dict[str, Any] = {
        "evaluation": {"protocol": "last", "watch_test": True, "untrained": False}
    }
    changes = {
        "name": f"{table.name}: {row.name}",
        "about": table.title,
        "model.backbone": options.backbone,
        "model.weights": options.weights,
        "training.seed": seed,
        "evaluation.eval_dims": table.dims or None,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    try:
        values = merge(defaults | (_ON_GPU if on_gpu else _ON_CPU), table.recipe_values(row))
        recipe = Recipe.load(values, changes)
        # Rows are comparable only at the last epoch.
        if recipe.evaluation.protocol != "last" or recipe.training.two_stages:
            raise RecipeError("the rows of a table have evaluation.protocol last and no two_stages")
        computed = [*recipe.evaluation.metrics.names(), *SEPARABILITY]
        if kind == "held_out":
            computed.append(f"{recipe.evaluation.select_by} {WITH_DISTRACTORS}")
        missing = [m for m in table.metrics if m.removesuffix(OF_CODES) not in computed]
        if missing:
            raise RecipeError(f"evaluation.metrics has no {missing[0]}, a column of the table")
    except RecipeError as error:
        raise ReproduceError(f"table {table.name}, row {row.name!r}: {error}") from error
    if options.epochs is not None:
        recipe = scale(recipe, options.epochs)
    if kind != "full":
        evaluation: dict[str, Any] = {"protocol": "held_out", "watch_test": False}
        if kind == "held_out":  # only the last epoch can be selected
            epochs = recipe.training.epochs
            evaluation |= {"every": _NEVER if epochs == AUTO else epochs, "final_test": False}
        recipe = recipe.override({"evaluation": evaluation})
    return PlannedRun(row, seed, kind, recipe)


def scale(recipe: Recipe, epochs: int) -> Recipe:
    """Scale a recipe to another number of epochs.

    Frozen epochs, learning-rate drops and evaluation interval scale too and are rounded to at
    least one epoch; a step schedule whose interval is not an integer becomes milestones.
    """
    if epochs < 1:
        raise ReproduceError(f"epochs must be at least 1, got {epochs}")
    schedule, published = recipe.schedule, recipe.training.epochs

    def scaled(epoch: int) -> int:
        return epoch if published == AUTO else max(1, round(epoch * epochs / published))

    frozen = scaled(schedule.freeze_backbone_epochs) if schedule.freeze_backbone_epochs else 0
    if epochs <= frozen:
        raise ReproduceError(
            f"the backbone is frozen for all epochs: {epochs}. Use --epochs {frozen + 1} or more."
        )
    changes: dict[str, Any] = {
        "training.epochs": epochs,
        "schedule.freeze_backbone_epochs": frozen,
    }
    if recipe.evaluation.every != AUTO:
        changes["evaluation.every"] = scaled(recipe.evaluation.every)
    if published == AUTO or (schedule.name == "step" and schedule.every == AUTO):
        return recipe.override(changes)
    if schedule.name == "step" and schedule.every * epochs % published == 0:
        changes["schedule.every"] = schedule.every * epochs // published
    elif schedule.name in ("step", "milestones"):
        changes["schedule.name"] = "milestones"
        changes["schedule.at"] = sorted({scaled(at) for at in drop_epochs(schedule, published)})
    return recipe.override(changes)
