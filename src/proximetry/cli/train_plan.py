"""What `proximetry train` works out by itself: recipe and run folder, and what to do next."""

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from proximetry._util.errors import shown
from proximetry.cli.output import wrap
from proximetry.data.datasets import list_datasets, not_found, resolve_source
from proximetry.recipe.schema import (
    DataConfig,
    Recipe,
    RecipeError,
    merge,
    plain_values,
    recipe_keys,
    resets,
    shipped_recipes,
)

ON_GPU, ON_CPU, FOR_VECTORS = "default", "default-cpu", "vectors"
RUNS = Path("runs")
_WIDTH = 80


class Plan(NamedTuple):
    """What to train and where; ``lines`` say what was decided and why."""

    recipe: Recipe
    out: Path
    lines: tuple[str, ...] = ()


def make_plan(
    source: str,
    out: Path | None,
    asked: str | None,
    changes: Mapping[str, Any],
    device: str | None,
    fresh: bool = False,
) -> Plan:
    """Find out what the first word of a command means, and what follows from it.

    Args:
        source: a folder, a table, a dataset's name, or a recipe.
        out: folder of the run, if given.
        asked: the recipe for images, if given.
        changes: overrides of the recipe.
        device: as `train` takes it.
        fresh: whether a run that is there will be removed.
    """
    word, sign, value = str(out or "").partition("=")
    for key, _ in recipe_keys():
        if sign and word.replace("-", "_") in (key, key.rpartition(".")[2]):
            option = f"--{key.replace('_', '-')}"
            raise RecipeError(f"{out} is no folder for the run; write {option} {value}")
    if _names_recipe(source, asked):
        recipe, reset = _load(source, changes)
        data = recipe.data.dataset, recipe.data.root
        folder, lines = _place(out, recipe.name, data, (recipe.name,))
        return Plan(recipe, folder, (*reset, *lines))
    given = merge({}, changes).get("data") or {}  # an empty section of a YAML file is None
    if not isinstance(given, Mapping):
        raise RecipeError(f"data must be a section of keys, got {shown(given)}")
    dataset, root = _find_images(source, given)
    changes = merge(changes, {"data": {"dataset": dataset, "root": root}})
    name = _name(root or dataset)
    if asked is not None:
        recipe, reset = _load(asked, changes)
        folder, lines = _place(out, name, (dataset, root), (recipe.name,))
        return Plan(recipe, folder, (*reset, *lines))
    if dataset == "vectors":
        folder, lines = _place(out, name, (dataset, root), (FOR_VECTORS,))
        recipe, reset = _load(FOR_VECTORS, changes)
        return Plan(recipe, folder, (f"recipe {FOR_VECTORS}", *reset, *lines))
    folder, lines = _place(out, name, (dataset, root), (ON_GPU, ON_CPU))
    recipe, why, advice = _choose_recipe(folder, device, fresh)
    reset = resets(recipe.model_dump(mode="json", exclude_unset=True), changes)
    recipe = recipe.override(changes)
    size = f", {recipe.model.image_size} px" if recipe.model.image_size else ""
    first = f"{why}recipe {recipe.name} ({recipe.model.backbone}{size})"
    return Plan(recipe, folder, (first, *advice, *reset, *lines))


def _load(source: str, changes: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe with overrides, and what these reset."""
    return Recipe.load(source, changes), resets(plain_values(source), changes)


def _find_images(source: str, given: Mapping[str, Any]) -> tuple[str, str | None]:
    """The dataset and the root that are meant by the first word and --data.dataset, --data.root."""
    dataset, root = given.get("dataset"), given.get("root")
    if source in list_datasets():
        twice = f"--data.dataset {dataset}" if dataset not in (None, source) else None
    else:
        twice = f"--data.root {root}" if root is not None else None
    if twice:
        raise RecipeError(f"the images are given twice: {source} and {twice}")
    try:
        found, place = resolve_source(source, root)
    except ValueError as error:
        known = [*shipped_recipes(), *list_datasets()]
        if Path(source).expanduser().exists():
            raise RecipeError(str(error)) from None
        raise RecipeError(not_found(source, known, "recipe or dataset")) from None
    return dataset or found, None if place is None else str(place.absolute())


def _names_recipe(word: str, asked: str | None) -> bool:
    """Whether the first word is a recipe, and not images."""
    path = Path(word).expanduser()
    file = path.suffix in (".yaml", ".yml") and path.is_file()
    shipped = word in shipped_recipes()
    if shipped and path.is_dir() and asked is None:
        raise RecipeError(
            f"{word!r} is a shipped recipe and a folder here; write ./{word} to train on the "
            "folder, or rename it to train with the recipe"
        )
    if file and asked is not None:
        raise RecipeError(f"two recipes are given: {word} and --recipe {asked}")
    return file or (shipped and asked is None)


def _choose_recipe(
    place: Path, device: str | None, fresh: bool
) -> tuple[Recipe, str, tuple[str, ...]]:
    """The default for the device, or that of the run that is continued; why, and advice."""
    from proximetry._util.machine import resolve_device
    from proximetry.training.run_folder import RunFolder

    begun = None if fresh else _begun(place)
    if begun is not None and begun.name in (ON_GPU, ON_CPU):
        kept = {}
        if (
            RunFolder(place).read_recipe() is not None
        ):  # that of a first stage says other things too
            kept = {**begun.essence(), "model.weights": begun.model.weights}
        return Recipe.load(begun.name, kept), f"as the run in {place} was begun: ", ()
    if resolve_device(device).type == "cuda":
        return Recipe.load(ON_GPU), "", ()
    why = "on the CPU: " if device else "no CUDA device: "
    return Recipe.load(ON_CPU), why, (f"--recipe {ON_GPU} is the larger one, for a GPU",)


def _name(source: str) -> str:
    """Return the name of a run on these images: that of their folder, file or dataset."""
    path = Path(os.path.abspath(source))
    return path.stem if path.is_file() else path.name


def _place(
    out: Path | None, name: str, data: tuple[str, str | None], recipes: tuple[str, ...]
) -> tuple[Path, tuple[str, ...]]:
    """The folder of the run: the one given, that of the same run before, or a free one."""
    if out is not None:
        return out, ()
    base = RUNS / (re.sub(r"[/\\\x00-\x1f]+", "-", name).strip(".- ")[:100] or "run")
    found = next(path for path in _numbered(base) if _is_free_or_ours(path, data, recipes))
    return found, (f"run folder {found}",)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def _is_free_or_ours(path: Path, data: tuple[str, str | None], recipes: tuple[str, ...]) -> bool:
    from proximetry.training.run_folder import RunError, RunFolder

    try:
        begun = _begun(path)
        if begun is None:
            RunFolder(path).check_place()
            if not (RunFolder(path).recipe.exists() and RunFolder(path).is_held()):
                return True
            begun = Recipe.load(RunFolder(path).recipe)  # of a run without a checkpoint yet
    except (RunError, RecipeError):
        if not path.exists():  # nor can a folder of another name be made there
            raise
        return False
    same = (begun.data.dataset, _absolute(begun.data.root)) == (data[0], _absolute(data[1]))
    return same and begun.name in recipes


def _absolute(root: str | None) -> Path | None:
    return None if root is None else Path(root).absolute()


def _begun(path: Path) -> Recipe | None:
    """The recipe of the run in a folder, by the name it was asked for."""
    from proximetry.training.run_folder import FIRST_STAGE, RunFolder

    begun = RunFolder(path).read_recipe() or RunFolder(path / FIRST_STAGE).read_recipe()
    if begun is None:
        return None
    return begun.override({"name": begun.name.removesuffix(", first stage")})


def summary(results: Mapping[str, Any], plan: Plan) -> str:
    """The table, where everything lies, and the next commands to type."""
    from proximetry.models.storage import SECOND_STAGE
    from proximetry.training.reporting import describe_protocol, metrics_table, result_rows

    rows = result_rows(results)
    home = plan.out / SECOND_STAGE if plan.recipe.training.two_stages else plan.out
    run, images = _short(plan.out), _short(Path(plan.recipe.data.root or "IMAGES"))
    tested = "test" in results["selected"]
    reading = _reading(plan.recipe.data)
    tests = [*_test_images(plan.recipe.data), *reading] if tested else ["OTHER_IMAGES"]
    # `embed` does not write over what it reads.
    same = Path(plan.recipe.data.root or "").absolute() == Path("vectors.npz").absolute()
    next_commands = [
        ["report", run],
        ["evaluate", run, *tests],
        ["embed", run, images, "--out", "embeddings.npz" if same else "vectors.npz", *reading],
        ["export", run, shlex.quote(f"{plan.out.name}.onnx")],
    ]
    return "\n".join(
        [
            metrics_table(rows) if rows else wrap(_nothing_measured(results, plan)),
            "",
            wrap(describe_protocol(results, plan.recipe.evaluation.select_by)),
            f"embedder: {_short(home / 'embedder')}",
            f"results:  {_short(home / 'results.json')}",
            "",
            "Next:",
            *(_command(words) for words in next_commands),
        ]
    )


def _nothing_measured(results: Mapping[str, Any], plan: Plan) -> str:
    """Why there are no figures of the embedder, and what to do."""
    from proximetry.training.run_folder import FIRST_STAGE

    tested = "there is no test set"
    if not plan.recipe.evaluation.final_test:
        tested = "evaluation.final_test is false"
    told = f"Nothing was measured: no classes were held out, and {tested}."
    if "first_stage" in results:
        first = _short(plan.out / FIRST_STAGE / "results.json")
        told = (
            f"The second stage was not measured: it trained on all classes, and {tested}; the "
            f"figures of the first are in {first}."
        )
    return f"{told} Evaluate the embedder on images of other classes."


def _reading(data: DataConfig) -> list[str]:
    """How other commands are told to read the images of a recipe."""
    pairs = ",".join(f"{field}={column}" for field, column in data.columns.items())
    return [
        *(["--columns", shlex.quote(pairs)] if pairs else []),
        *(["--bad-images", "skip"] if data.bad_images == "skip" else []),
    ]


def _test_images(data: DataConfig) -> list[str]:
    """How `evaluate` is told the images of a recipe."""
    if data.root is None:
        return [data.dataset]
    if resolve_source(data.root)[0] == data.dataset:
        return [_short(Path(data.root))]
    return [data.dataset, "--root", _short(Path(data.root))]


def _short(path: Path) -> str:
    """A path as one would type it: from here, or from one's home."""
    whole = path.absolute()
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if whole.is_relative_to(base) and whole != base:
            return f"{prefix}{shlex.quote(str(whole.relative_to(base)))}"
    return shlex.quote(str(whole))


def _command(words: list[str]) -> str:
    """A command to type, over several lines where it would be too long."""
    lines = ["  proximetry"]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"      {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)
