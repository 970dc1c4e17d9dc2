"""`train`: a recipe and a folder in, results out."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from proximetry.training.display import Display
from proximetry.training.folder import RunError, RunFolder
from proximetry.training.recipe import Recipe
from proximetry.training.trainer import Trainer
from proximetry.training.world import World, enter_world, leave_world


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str | None = None,
    resume: bool = True,
    display: Display | None = None,
) -> dict[str, Any]:
    """Train as the recipe says, write everything to the folder ``out``, return the results.

    A run that was cut off continues where its last checkpoint stands; one that is complete
    returns its results at once. Under torchrun all processes call this alike.
    """
    world = enter_world(device)
    shown = display if display is not None and world.leads else Display()
    try:
        with shown:
            if recipe.training.two_stages:
                return _two_stages(recipe, Path(out), world, resume, shown)
            return _one_stage(recipe, Path(out), world, resume, shown)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"not enough memory on {world.device} for the run in {out}; a smaller "
            "data.batch_size, training.accumulate 2 or more (the same update in less memory), "
            "training.precision bfloat16 or data.cache memory needs less, or wait until others "
            f"have left the device ({str(error).split('. ')[0]})"
        ) from error
    finally:
        leave_world(world)


def _one_stage(
    recipe: Recipe, out: Path, world: World, resume: bool, display: Display
) -> dict[str, Any]:
    folder = RunFolder(out)
    if resume and folder.results.exists() and world.first(lambda: folder.open(recipe, resume)):
        display.message(f"{out} is complete already")
        return folder.read_results()
    return Trainer(recipe, folder, world, resume, display).run()


def _two_stages(
    recipe: Recipe, out: Path, world: World, resume: bool, display: Display
) -> dict[str, Any]:
    """ProxyNCA++'s schedule: learn when to stop and when to slow down, then use every class.

    The first stage trains on half of the training classes, lets the rates fall on plateaus of the
    other half, and notes the falls and the best epoch. The second trains on all training classes
    for as many epochs with the same falls.
    """
    replace = dataclasses.replace
    first = replace(
        recipe,
        name=f"{recipe.name}, first stage",
        schedule=replace(recipe.schedule, name="plateau"),
        training=replace(recipe.training, two_stages=False),
        evaluation=replace(recipe.evaluation, protocol="held_out", held_out=0.5),
    )
    found = _one_stage(first, out / "first-stage", world, resume, display)
    epochs = found["chosen"]["epoch"]
    second = replace(
        recipe,
        name=f"{recipe.name}, second stage",
        schedule=replace(
            recipe.schedule,
            name="milestones",
            at=tuple(fall for fall in found["falls"] if fall < epochs),
        ),
        training=replace(recipe.training, two_stages=False, epochs=epochs, stop_after=0),
        evaluation=replace(recipe.evaluation, protocol="last"),
    )
    display.message(f"second stage: {epochs} epochs, falls after {list(second.schedule.at)}")
    results = _one_stage(second, out / "second-stage", world, resume, display)
    return {**results, "protocol": "held_out", "first_stage": found["chosen"]}
