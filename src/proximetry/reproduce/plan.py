"""From a table to runs: one recipe for every row and seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from proximetry.reproduce.tables import Row, Table, shipped_tables
from proximetry.reproduce.trouble import ReproduceError
from proximetry.training.recipe import Data, Recipe
from proximetry.training.recipe_values import RecipeError

Kind = Literal["full", "selection"]

# What a card adds to a recipe that does not say otherwise.
_ON_CUDA: dict[str, dict[str, Any]] = {
    "data": {"cache": "gpu"},
    "training": {"precision": "bfloat16", "capture": True},
}


@dataclass(frozen=True)
class Options:
    """What a person changes about a whole table.

    Args:
        backbone: another network than the table's.
        weights: where its weights come from, as in a recipe.
        epochs: another number of epochs; falls and evaluations move along.
        cuda: whether the runs are made on a card.
    """

    backbone: str | None = None
    weights: str | None = None
    epochs: int | None = None
    cuda: bool = False


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        row: the name of its row.
        slug: the row as part of a file name.
        seed: of everything random in it.
        kind: full trains on all training classes; selection holds some out and chooses the epoch.
        recipe: without the place of the data.
    """

    row: str
    slug: str
    seed: int
    kind: Kind
    recipe: Recipe

    @property
    def id(self) -> str:
        """The name of its file and of its folder."""
        return run_id(self.slug, self.seed, self.kind)

    def __str__(self) -> str:
        return f"{self.row}, " + ("selection" if self.kind == "selection" else f"seed {self.seed}")


@dataclass(frozen=True)
class Job:
    """A run and everything its process needs to know.

    Args:
        table: its name.
        run: what to do.
        recipe: the run's, with the place of the data.
        command: that makes it again, without paths.
        out: folder of the table's results.
        images: how many images of which split the dataset has.
        device: to train on; None for a card where there is one.
        keep: whether checkpoints and embedder are kept.
        parallel: how many runs share the device.
    """

    table: str
    run: Run
    recipe: Recipe
    command: str
    out: Path
    images: dict[str, int]
    device: str | None = None
    keep: bool = False
    parallel: int = 1

    @property
    def work(self) -> Path:
        """Where it trains."""
        return self.out / "work" / self.run.id

    @property
    def shared(self) -> Path:
        """Where a run that was cut off keeps how many runs shared the device."""
        return self.out / "work" / f"{self.run.id}.parallel.txt"


def command_for(
    table: Table,
    seeds: Sequence[int],
    backbone: str,
    weights: str,
    epochs: int | None,
    selection: bool,
) -> str:
    """The command that makes runs again; what is as in the table is left out."""
    model = table.base.get("model", {})
    name = table.name if table.name in shipped_tables() else f"{table.name}.yaml"
    words = ["proximetry", "reproduce", name, "--data", table.dataset.upper()]
    words += ["--seeds", *map(str, seeds)]
    if backbone != model.get("backbone"):
        words += ["--backbone", backbone]
    if weights != model.get("weights", "auto"):
        words += ["--weights", Path(weights).name]
    if epochs is not None:
        words += ["--epochs", str(epochs)]
    if selection != table.selection:
        words += ["--selection", str(selection).lower()]
    return " ".join(words)


def run_id(slug: str, seed: int, kind: str) -> str:
    """Selection is made once per row, so its seed is not in its name."""
    return f"{slug}-selection" if kind == "selection" else f"{slug}-seed{seed}"


def plan(table: Table, seeds: Sequence[int], options: Options, selection: bool) -> list[Run]:
    """All runs of a table, seed by seed, so that a first complete column is there early."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ReproduceError(
            f"seeds must be different whole numbers from 0 on, at least one; got {list(seeds)}"
        )
    runs = [make_run(table, row, seed, "full", options) for seed in seeds for row in table.rows]
    if selection:
        runs += [make_run(table, row, seeds[0], "selection", options) for row in table.rows]
    return runs


def make_run(table: Table, row: Row, seed: int, kind: Kind, options: Options) -> Run:
    """The run of one row and seed."""
    try:
        recipe = _recipe(table, row, seed, options)
    except RecipeError as error:
        raise ReproduceError(f"table {table.name}, row {row.name!r}: {error}") from error
    evaluation = recipe.evaluation
    if kind == "selection":
        evaluation = replace(evaluation, protocol="held_out", watch_test=False)
    return Run(row.name, row.slug, seed, kind, replace(recipe, evaluation=evaluation))


def _recipe(table: Table, row: Row, seed: int, options: Options) -> Recipe:
    values = table.recipe_values(row)
    values |= {"name": f"{table.name}: {row.name}", "about": table.title}
    values["training"] = {**values.get("training", {}), "seed": seed}
    if options.cuda:
        for section, keys in _ON_CUDA.items():
            values[section] = {**keys, **values.get(section, {})}
        # One size of batch for training and evaluation: kernels are chosen for it once.
        size = {"batch_size": values["data"].get("batch_size", Data().batch_size)}
        values["evaluation"] = {**size, **values.get("evaluation", {})}
    chosen = {"backbone": options.backbone, "weights": options.weights}
    changed = {key: value for key, value in chosen.items() if value is not None}
    values["model"] = {**values.get("model", {}), **changed}
    recipe = Recipe.from_dict(values)
    _check_protocol(recipe)
    return recipe if options.epochs is None else scale(recipe, options.epochs)


def _check_protocol(recipe: Recipe) -> None:
    """Rows are judged at the last epoch and watched on the way; nothing else is comparable."""
    e = recipe.evaluation
    if e.protocol != "last" or recipe.training.two_stages:
        raise RecipeError("the rows of a table have evaluation.protocol last and no two_stages")


def scale(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe with another number of epochs; falls and evaluations move in proportion.

    A step that would not be a whole number of epochs becomes milestones.
    """
    if epochs < 1:
        raise ReproduceError(f"epochs must be at least 1, got {epochs}")
    schedule, published = recipe.schedule, recipe.training.epochs
    if epochs <= schedule.warmup_epochs:
        raise ReproduceError(
            f"{epochs} epochs end before the warm-up of {schedule.warmup_epochs} does, and the "
            f"backbone would never be trained. Take at least {schedule.warmup_epochs + 1}"
        )

    def moved(epoch: int) -> int:
        return max(1, round(epoch * epochs / published))

    if schedule.name == "step" and schedule.every * epochs % published == 0:
        schedule = replace(schedule, every=schedule.every * epochs // published)
    elif schedule.name in ("step", "milestones"):
        at = tuple(sorted({moved(epoch) for epoch in falls(recipe)}))
        schedule = replace(schedule, name="milestones", at=at)
    return replace(
        recipe,
        schedule=schedule,
        training=replace(recipe.training, epochs=epochs),
        evaluation=replace(recipe.evaluation, every=moved(recipe.evaluation.every)),
    )


def falls(recipe: Recipe) -> tuple[int, ...]:
    """The epochs (counted from 0) at whose start the learning rates fall."""
    schedule, epochs = recipe.schedule, recipe.training.epochs
    if schedule.name == "step":
        return tuple(range(schedule.every, epochs, schedule.every))
    return tuple(at for at in schedule.at if at < epochs) if schedule.name == "milestones" else ()
