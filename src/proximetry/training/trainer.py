"""`train`: a recipe and a folder in, results out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from proximetry.data import Catalog
from proximetry.data.images import ImageError
from proximetry.kernels.cuda_graphs import ignore_stream_mismatch
from proximetry.models import Embedder
from proximetry.models.storage import SECOND_STAGE
from proximetry.recipe.schema import Recipe
from proximetry.training.build import RunContext, build
from proximetry.training.callbacks import Callback, check_callbacks
from proximetry.training.checkpoint import (
    CheckpointError,
    RunError,
    check_same_images,
    link_checkpoints,
    restore_state,
)
from proximetry.training.components import Components, custom_components
from proximetry.training.distributed import World, join_processes, process_group
from proximetry.training.loop import Run, fit
from proximetry.training.reporting import Display, Trackers
from proximetry.training.run_folder import FIRST_STAGE, FolderError, RunFolder, SavedRun
from proximetry.training.sources.base import fingerprint, open_catalog


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data: Catalog | Dataset[Any] | Mapping[str, Dataset[Any]] | None = None,
    embedder: Embedder | None = None,
    loss: nn.Module | Callable[[Tensor, Tensor], Tensor] | None = None,
    device: str | None = None,
    resume: bool = True,
    display: Display | None = None,
    callbacks: Sequence[Callback | Any] = (),
) -> dict[str, Any]:
    """Train a recipe, write everything to the folder ``out``, return the results.

    An interrupted run resumes from its last checkpoint; a complete one returns its results
    immediately. Under torchrun all processes call this alike; when one of them is lost, the others
    raise a `RankError`. All input is validated before the folder is written to, and torch's global
    state is restored at the end. Do not train in several threads of a process at a time.

    Args:
        recipe: the recipe, from `Recipe.load`.
        out: folder of the run.
        data: replaces the recipe's data: a `Catalog`; or a map-style torch Dataset of
            (image, label), where an image is a PIL image or uint8 [H, W, 3], augmented and
            preprocessed like files, or a float tensor, passed to the network unchanged; or a
            mapping of such datasets by "train", "val" and "test".
        embedder: replaces the recipe's model: any `Embedder`, also of a custom network
            (`Embedder.wrap`). It is copied; the trained one is in ``out``.
        loss: replaces the recipe's loss: a callable ``loss(embeddings, labels)`` that returns a
            scalar. Labels are 0…C−1 in the order of the names of the training classes. Its
            parameters have the learning rate of proxies. It is copied.
        device: cpu, cuda or cuda:1; None selects CUDA if there is a GPU.
        resume: whether to resume a run in the folder; else it is removed.
        display: shows progress.
        callbacks: called during the run; see `Callback`.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe (see Recipe.load), got {type(recipe).__name__}")
    callbacks = check_callbacks(callbacks) if callbacks else ()
    components = Components()
    if any(part is not None for part in (data, embedder, loss)):
        recipe, components = custom_components(recipe, data, embedder, loss)
    world = join_processes(device)
    run_display = display if display is not None and world.leads else Display()
    context = RunContext(world, run_display, callbacks, components, resume)
    with preserve_torch_state(world, out), run_display:
        if recipe.training.two_stages:
            return _train_two_stages(recipe, Path(out), context)
        return _train_run(recipe, RunFolder(Path(out)), context)


def _train_run(
    recipe: Recipe, folder: RunFolder, context: RunContext, second: RunFolder | None = None
) -> dict[str, Any]:
    """Train one recipe in one folder, from the start or from its last checkpoint.

    A first stage that starts over removes the run in the folder of the ``second`` stage.
    """
    display, first = context.display, context.world.first
    trackers = Trackers()
    with ExitStack() as stack:
        stack.callback(folder.release)
        if first(folder.lock.exists):  # of an existing run: before hours of decoding
            first(lambda: folder.acquire(display.message))
        recipe, saved = first(lambda: folder.resolve(recipe, context.resume))
        if saved is not None:
            results = first(partial(_complete_results, saved, recipe, context))
            if results is not None:
                return results
        run = build(recipe, folder, context)  # validates; writes nothing to the folder
        run.callbacks = [trackers, display, *context.callbacks]
        if first(lambda: folder.acquire(display.message)):  # another process may have been faster
            _, saved = first(lambda: folder.resolve(run.recipe, context.resume))
        if saved is not None:
            _resume(run, saved)
        else:
            _begin(run, context, second)
        with trackers, run.stop_requests:
            try:
                return fit(run)
            except ImageError as error:
                raise RunError(
                    f"{error} (after step {run.state.step}). Replace the file, or skip it with "
                    "--data.bad-images skip in a new run. The same command resumes the run in "
                    f"{folder.path}."
                ) from error


def _complete_results(
    saved: SavedRun, recipe: Recipe, context: RunContext
) -> dict[str, Any] | None:
    """Return the results of a complete run; raise if it was trained on other images."""
    if saved.results is None or not saved.is_complete(recipe):
        return None
    catalog, message = context.components.data, context.display.message
    if catalog is None:
        with suppress(ValueError, OSError, ImportError):  # the results do not need the images
            catalog = open_catalog(recipe, partial(context.display.progress, "scanning images"))
    if isinstance(catalog, Catalog):
        check_rows(saved, recipe, catalog)
    message(f"{saved.path} is complete already")
    if why := saved.results.get("stopped_early"):
        key = "epochs" if "run.finish" in why else "stop_after"
        message(f"{why}; a larger training.{key} resumes it")
    return saved.results


def check_rows(saved: SavedRun, recipe: Recipe, catalog: Catalog) -> None:
    """Reject a catalog with other rows than those of the saved run."""
    if recipe.data.bad_images == "skip" or saved.checkpoint is None:
        return  # which images were skipped is not known before they are read
    before, now = saved.checkpoint["images"], fingerprint(catalog)
    if before["rows"] != now["rows"]:
        check_same_images(saved.path, before, now)


def _begin(run: Run, context: RunContext, second: RunFolder | None) -> None:
    """Begin a run; remove the previous one in its folder."""
    folder, first, final = run.folder, run.world.first, second or run.folder
    exists = first(lambda: [final.results.exists(), folder.last.exists() or final.last.exists()])
    if context.resume and first(folder.recipe.exists):
        run.report(f"no checkpoint in {folder.path} yet: starting again")
    elif any(exists):
        path = folder.path if second is None else folder.path.parent
        kind = "complete" if exists[0] else "unfinished"
        run.report(
            f"removing the {kind} run in {path}: embedder, results, checkpoints, report; choose "
            "another folder to keep it"
        )
    first(lambda: folder.begin(run.recipe, run.world.device))
    if second is not None:
        first(second.remove)


def _resume(run: Run, saved: SavedRun) -> None:
    """Restore the state of a saved run; only then write to its folder."""
    folder, state = run.folder, run.state
    restore_state(run)
    run.world.first(lambda: folder.resume(run.recipe, state.lines))
    link_checkpoints(run)  # a kill may have prevented it
    if state.best_epoch is not None and not run.world.first(folder.best.exists):
        raise CheckpointError(folder.best, f"of the selected epoch {state.best_epoch} is missing")
    before, now = saved.recipe.training.epochs, run.recipe.training.epochs
    if before != now:
        change = "extended" if now > before else "shortened"
        run.report(f"{change} from {before} to {now} epochs")
    run.report(f"continuing after step {state.step} (epoch {state.epoch})")


def first_stage(recipe: Recipe) -> Recipe:
    """Return the recipe of the first stage of ``training.two_stages``."""
    return recipe.override(
        {
            "name": f"{recipe.name}, first stage",
            "schedule.name": "plateau",
            "training.two_stages": False,
            "evaluation": {"protocol": "held_out", "held_out": 0.5},
        }
    )


def check_stages_folder(out: Path) -> None:
    """Reject a folder with another run or other files."""
    if RunFolder(out).holds_run():
        raise FolderError(f"{out} contains a run without two stages. Choose another folder.")
    if out.is_dir() and any(out.iterdir()) and not (out / FIRST_STAGE).is_dir():
        raise FolderError(f"{out} is not empty and contains no run. Choose another folder.")


def _train_two_stages(recipe: Recipe, out: Path, context: RunContext) -> dict[str, Any]:
    """Select the epochs and the learning-rate drops, then train on all classes (Teh et al. 2020).

    The first stage trains on half of the training classes and drops the rates on plateaus of the
    other half. The second trains on all training classes for the selected number of epochs with
    the same drops.
    """
    check_stages_folder(out)
    first, second = RunFolder(out / FIRST_STAGE), RunFolder(out / SECOND_STAGE)
    selection = _train_run(first_stage(recipe), first, context, second)
    epochs = selection["selected"]["epoch"]
    drops = [drop for drop in selection["drops"] if drop < epochs]
    recipe = recipe.override(
        {
            "name": f"{recipe.name}, second stage",
            "schedule": {"name": "milestones", "at": drops},
            "training": {"two_stages": False, "epochs": epochs, "stop_after": 0},
            "evaluation.protocol": "last",
        }
    )
    context.display.message(f"second stage: {epochs} epochs, learning-rate drops after {drops}")
    results = _train_run(recipe, second, context)
    return {**results, "protocol": "held_out", "first_stage": selection["selected"]}


@contextmanager
def preserve_torch_state(world: World, out: str | Path) -> Iterator[None]:
    """Restore torch's global state and leave the process group at the end.

    Turns too little memory and a lost rank into clear errors.
    """
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    flags = cudnn.deterministic, cudnn.benchmark
    every_gpu = range(torch.cuda.device_count())  # a seed is set on all of them
    current = world.device if world.device.type == "cuda" else -1  # Triton launches on it
    try:
        with (
            torch.random.fork_rng(every_gpu),
            torch.cuda.device(current),
            ignore_stream_mismatch() if world.device.type == "cuda" else nullcontext(),
            process_group(world),
        ):
            yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"not enough memory on {world.device} for the run in {out}: "
            f"{str(error).split('. ')[0]}. Use a smaller data.batch_size, training.accumulate 2 "
            "or more, training.precision bfloat16 or data.cache pixels."
        ) from error
    finally:
        cudnn.deterministic, cudnn.benchmark = flags
        torch.set_num_threads(threads)
