"""`make_plan`: the recipe and the run folder for a folder of images; imports torch lazily."""

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from proximetry._util.formatting import format_value, join_first
from proximetry.data.datasets import list_datasets, not_found_message, resolve_source
from proximetry.recipe.loading import (
    RecipeError,
    describe_resets,
    merge,
    plain_values,
    shipped_recipes,
)
from proximetry.recipe.schema import AUTO, Recipe, recipe_keys

GPU_RECIPE, CPU_RECIPE, VECTORS_RECIPE = "default", "default-cpu", "vectors"
RUNS = Path("runs")


class Plan(NamedTuple):
    """What to train and where; ``lines`` describe the choices."""

    recipe: Recipe
    out: Path
    lines: tuple[str, ...] = ()


def make_plan(
    source: str,
    out: Path | None,
    recipe_name: str | None,
    changes: Mapping[str, Any],
    device: str | None,
    fresh: bool = False,
) -> Plan:
    """Choose the recipe and the run folder from the images and settings of a user.

    A run in the folder is resumed with its own recipe, in which overrides are then applied,
    unless it will be removed (``fresh``).
    """
    word, sign, value = str(out or "").partition("=")
    for key, _ in recipe_keys() if sign else ():
        if word.replace("-", "_") in (key, key.rpartition(".")[2]):
            option = f"--{key.replace('_', '-')}"
            raise RecipeError(f"not a run folder: {out}. Write {option} {value}.")
    name, reason, lines = "", "", list[str]()
    if _names_recipe(source, recipe_name):
        recipe_name = source
    else:
        dataset, root = _find_images(source, changes)
        changes = merge(changes, {"data": {"dataset": dataset, "root": root}}, is_complete=False)
        images = Path(os.path.abspath(root or dataset))
        name = images.stem if images.is_file() else images.name
        recipe_name = recipe_name or (VECTORS_RECIPE if dataset == "vectors" else None)
    defaults: tuple[str, ...] = ()
    if recipe_name is None:
        from proximetry._util.machine import resolve_device  # torch; after checking paths

        recipe_name, defaults = GPU_RECIPE, (GPU_RECIPE, CPU_RECIPE)
        if resolve_device(device).type != "cuda":
            recipe_name, reason = CPU_RECIPE, "on the CPU: " if device else "no CUDA device: "
    recipe = Recipe.load(recipe_name, changes)
    names = defaults or (recipe.name,)
    from proximetry.training.run_folder import RunFolder

    if out is None:
        out = _choose_folder(name or recipe.name, recipe, names)
        lines.append(f"run folder {out}")
    saved = None if fresh else RunFolder(out).read_recipe()
    if saved is None or saved.name not in names:
        if defaults and recipe_name == CPU_RECIPE:
            lines.insert(0, f"use --recipe {GPU_RECIPE} on a GPU")
        lines += describe_resets(plain_values(recipe_name), changes)
    else:
        if saved.name != recipe.name:  # the default of another device
            recipe = Recipe.load(saved.name, changes)
        before, reason = recipe.computation_keys(), f"run in {out}: "
        cache = {"data.cache": recipe.data.cache}  # depends on the device
        recipe = Recipe.load(saved.to_dict(), merge(cache, changes, is_complete=False))
        now = recipe.computation_keys()
        differing = [
            f"{key} {format_value(now[key])}" for key in now if before[key] not in (AUTO, now[key])
        ]
        lines += [f"settings of the run: {join_first(differing, 20)}"] if differing else []
    size = f", {recipe.model.image_size} px" if recipe.model.image_size else ""
    first = f"{reason}recipe {recipe.name} ({recipe.model.backbone}{size})"
    return Plan(recipe, out, (first, *lines))


def _names_recipe(source: str, recipe_name: str | None) -> bool:
    """Return whether the first argument is a recipe, which names its images."""
    path = Path(source).expanduser()
    is_file = path.suffix in (".yaml", ".yml") and path.is_file()
    is_shipped = source in shipped_recipes() and recipe_name is None
    if is_shipped and path.is_dir():
        raise RecipeError(
            f"{source!r} is a shipped recipe and a folder here. Pass ./{source} to train on the "
            "folder, or rename the folder to train with the recipe."
        )
    if is_file and recipe_name is not None:
        raise RecipeError(f"two recipes: {source} and --recipe {recipe_name}. Pass one.")
    return is_file or is_shipped


def _find_images(source: str, changes: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return dataset and root from the first argument, --data.dataset and --data.root."""
    data = merge({}, changes).get("data") or {}  # an empty section of a YAML file is None
    if not isinstance(data, Mapping):
        raise RecipeError(f"data must be a section of keys, got {format_value(data)}")
    dataset, root = data.get("dataset"), data.get("root")
    duplicate = f"--data.root {root}" if root is not None else None
    if source in list_datasets():
        duplicate = f"--data.dataset {dataset}" if dataset not in (None, source) else None
    if duplicate:
        raise RecipeError(f"duplicate images: {source} and {duplicate}. Pass one of them.")
    try:
        name, path = resolve_source(source, root)
    except ValueError as error:
        if Path(source).expanduser().exists():
            raise RecipeError(str(error)) from None
        known = [*shipped_recipes(), *list_datasets()]
        raise RecipeError(not_found_message(source, known, "recipe or dataset")) from None
    return dataset or name, None if path is None else str(path.absolute())


def _choose_folder(name: str, recipe: Recipe, names: tuple[str, ...]) -> Path:
    """Return a free folder below `RUNS`, or one with a run of these recipes on these images."""
    name = re.sub(r"[/\\\x00-\x1f]+", "-", name).strip(".- ")[:100] or "run"
    numbered = (RUNS / f"{name}-{number}" for number in itertools.count(2))
    candidates = itertools.chain([RUNS / name], numbered)
    return next(path for path in candidates if _is_available(path, recipe, names))


def _is_available(path: Path, recipe: Recipe, names: tuple[str, ...]) -> bool:
    from proximetry.training.errors import RunError
    from proximetry.training.run_folder import FIRST_STAGE, RunFolder

    folder = RunFolder(path)
    try:
        saved = folder.read_recipe() or RunFolder(path / FIRST_STAGE).read_recipe()
        if saved is None:
            folder.check_folder()
            if not (folder.recipe.exists() and folder.is_locked()):
                return True
            saved = Recipe.load(folder.recipe)  # of a run that has no checkpoint yet
    except (RunError, RecipeError):
        if not path.exists():  # no folder can be created there
            raise
        return False
    sources = [
        (data.dataset, data.root and Path(data.root).absolute(), data.suggestions)
        for data in (saved.data, recipe.data)
    ]
    return sources[0] == sources[1] and saved.name.removesuffix(", first stage") in names
