"""`train` and `fit`: from a recipe and a folder to results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from proximetry.data import Catalog
from proximetry.data.images import ImageError
from proximetry.models import Embedder
from proximetry.models.storage import SECOND_STAGE
from proximetry.recipe.schema import Recipe
from proximetry.training.build import RunContext, build
from proximetry.training.callbacks import Callback, check_callbacks
from proximetry.training.checkpoint import (
    check_same_images,
    link_checkpoints,
    restore_state,
    save_state,
)
from proximetry.training.custom_components import Components, custom_components
from proximetry.training.distributed import join_processes, preserve_torch_state
from proximetry.training.errors import CheckpointError, FolderError, RunError
from proximetry.training.final_evaluation import (
    calibrate_embedder,
    evaluate_final,
    evaluate_untrained,
    save_embedder,
)
from proximetry.training.reporting import Display
from proximetry.training.run import RESUME_HINT, Run, Stopped
from proximetry.training.run_folder import FIRST_STAGE, RunFolder, SavedRun
from proximetry.training.sources.training_data import fingerprint, open_catalog
from proximetry.training.trackers import RunTracker


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
    immediately. Under torchrun every process calls this with the same arguments; if one is lost,
    the others raise a `RankError`. All input is validated before anything is written, and torch's
    global state is restored at the end. Not thread-safe: train in one thread at a time.

    Args:
        recipe: the recipe, from `Recipe.load`.
        out: folder of the run.
        data: replaces the recipe's data: a `Catalog`; or a map-style torch Dataset of
            (image, label), where an image is a PIL image or uint8 [H, W, 3], augmented and
            preprocessed like files, or a float tensor, passed to the network unchanged; or a
            mapping of such datasets by "train", "val" and "test".
        embedder: replaces the recipe's model: any `Embedder`, also of a custom network
            (`Embedder.wrap`). A copy is trained and saved in ``out``.
        loss: replaces the recipe's loss: a callable ``loss(embeddings, labels)`` that returns a
            scalar. Labels are 0…C−1 in the order of the names of the training classes. Its
            parameters have the learning rate of proxies. A copy is trained.
        device: cpu, cuda or cuda:1; None selects CUDA if there is a GPU.
        resume: resume a run in the folder; False removes it.
        display: shows progress.
        callbacks: called during the run; see `Callback`.

    Returns:
        The contents of results.json: metrics by split for the selected and the last epoch.

    Examples:
        >>> import numpy as np
        >>> from tempfile import TemporaryDirectory
        >>> from proximetry.data import VectorCatalog
        >>> vectors = np.random.default_rng(0).normal(size=(40, 8))
        >>> data = VectorCatalog.from_arrays(vectors, np.arange(40) % 4)
        >>> overrides = {"model.dim": 2, "training.epochs": 1, "data.batch_size": 20}
        >>> with TemporaryDirectory() as out:
        ...     results = train(Recipe.load("vectors", overrides), out, data=data, device="cpu")
        >>> results["epochs"], results["protocol"]
        (1, 'last')
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe (see Recipe.load), got {type(recipe).__name__}")
    callbacks = check_callbacks(callbacks) if callbacks else ()
    components = Components()
    if any(component is not None for component in (data, embedder, loss)):
        recipe, components = custom_components(recipe, data, embedder, loss)
    world = join_processes(device)
    run_display = display if display is not None and world.is_main else Display()
    context = RunContext(world, run_display, callbacks, components, resume)
    with preserve_torch_state(world, out), run_display:
        if recipe.training.two_stages:
            return _train_two_stages(recipe, Path(out), context)
        return train_run(recipe, RunFolder(Path(out)), context)


def train_run(
    recipe: Recipe, folder: RunFolder, context: RunContext, second: RunFolder | None = None
) -> dict[str, Any]:
    """Train one recipe in one folder, from the start or from its last checkpoint.

    A first stage that starts over removes the run in the folder of the ``second`` stage.
    """
    on_main = context.world.on_main
    acquire = partial(folder.acquire, context.display.message)
    tracker = RunTracker()
    with ExitStack() as stack:
        stack.callback(folder.release)
        if on_main(folder.lock.exists):  # lock an existing run before hours of decoding
            on_main(acquire)
        recipe, saved = on_main(lambda: folder.resolve(recipe, context.resume))
        if saved is not None:
            results = on_main(partial(_complete_results, saved, recipe, context))
            if results is not None:
                return results
        run = build(recipe, folder, context)  # validates; writes nothing to the folder
        run.callbacks = [tracker, context.display, *context.callbacks]
        if on_main(acquire):  # another process may have been faster
            _, saved = on_main(lambda: folder.resolve(run.recipe, context.resume))
        if saved is not None:
            _resume(run, saved)
        else:
            _begin(run, context, second)
        with tracker, run.stop_requests:
            try:
                return fit(run)
            except ImageError as error:
                raise RunError(
                    f"{error} (after step {run.state.step}). Replace the file, or skip it with "
                    "--data.bad-images skip in a new run. The same command resumes the run in "
                    f"{folder.path}."
                ) from error


def fit(run: Run) -> dict[str, Any]:
    """Train from the current state to the end, save the embedder, return the results."""
    state, split_scores = run.state, None
    run.notify("on_start")
    if run.recipe.evaluation.untrained and state.step == 0 and run.final_splits():
        with run.stoppable("before the first step"):
            line = evaluate_untrained(run)
        state.lines.append(line)
        run.log(line)
        run.notify("on_untrained", line)
    while not run.is_over():
        line, split_scores = train_epoch(run), None
        if run.evaluates_now():
            run.clock.enter("evaluation")
            split_scores = run.evaluator.evaluate(run.watched_splits())
            line |= split_scores.scores
            if run.select(split_scores):
                save_embedder(run, {"epoch": state.epoch, **split_scores.scores}, split_scores)
            line["evaluation_seconds"] = round(run.clock.enter("other"), 3)
        state.lines.append(line)
        if run.saves_now():
            save_state(run)
            link_checkpoints(run)  # best.safetensors is a hard link to last.safetensors
        run.log(line)  # after the checkpoint: a logged epoch can be resumed from
        run.notify("on_epoch_end", line)
        if run.world.any(run.finish_requested or bool(run.reached_limit())) and not run.is_over():
            state.finished = run.recipe.training.duration()
            save_state(run)
    if reason := run.early_stop_reason() or run.reached_limit():
        run.report(reason)
    with run.stoppable("in the final evaluation"):
        results, selected_scores = evaluate_final(run, split_scores)
        calibrate_embedder(run, selected_scores)
    save_embedder(run, results["selected"], selected_scores)
    if run.world.is_main:
        run.folder.write_results(results)
    run.world.barrier()
    run.notify("on_end", results)
    return run.folder.read_results()


def train_epoch(run: Run) -> dict[str, Any]:
    """Train the rest of an epoch; return its line of metrics.jsonl, without metrics."""
    state, updater, clock = run.state, run.updater, run.clock
    checkpoint_steps = run.recipe.training.checkpoint_steps
    updater.embedder.train()
    updater.objective.train()
    changed = updater.freeze_backbone(state.epoch < run.recipe.schedule.freeze_backbone_epochs)
    if clock.phase != "startup":
        clock.enter("startup" if changed else "training")
    images = 0
    try:
        for pixels, labels in run.data.batches(state.epoch, state.batch):
            if state.batch and run.reached_limit():
                break
            run.rates.apply(updater.optimizer, state.epoch, state.step)
            loss = updater(pixels, labels, state.step)  # forward, loss, backward, update, EMA
            state.advance(loss)
            starting = clock.phase == "startup"
            if starting or run.world.device.type == "cpu":  # else this would wait for the GPU
                run.check_finite()
            if starting:
                clock.enter("training")
            else:
                images += len(labels) * run.world.size
            within = state.batch < len(run.data.sampler)
            if within and checkpoint_steps and state.step % checkpoint_steps == 0:
                save_state(run)
            run.notify("on_step_end", loss)
            if run.world.any(run.stop_requested or run.stop_requests()):
                clock.enter("other")
                save_state(run)
                run.notify("on_stop")
                raise Stopped(
                    f"stopped after step {state.step}, saved in {run.folder.path}. {RESUME_HINT}"
                )
    except ImageError:
        if run.world.size == 1:  # other ranks are already in the next step
            save_state(run)
        raise
    run.check_finite(weights=True)  # waits for the device
    if run.reached_limit():
        state.finished = run.recipe.training.duration()
    seconds = clock.enter("other")
    return {
        **state.end_epoch(),
        "lr": updater.optimizer.param_groups[0]["lr"],
        "images_per_second": round(images / seconds, 1) if images and seconds else None,
        "seconds": round(clock.seconds["training"], 3),
    }


def _complete_results(
    saved: SavedRun, recipe: Recipe, context: RunContext
) -> dict[str, Any] | None:
    """Return the results of a complete run; raise if it was trained on different images."""
    if saved.results is None or not saved.is_complete(recipe):
        return None
    catalog, message = context.components.data, context.display.message
    if catalog is None:
        with suppress(ValueError, OSError, ImportError):  # the results do not need the images
            catalog = open_catalog(recipe, partial(context.display.progress, "scanning images"))
    if isinstance(catalog, Catalog):
        check_rows(saved, recipe, catalog)
    message(f"{saved.path} is already complete")
    if reason := saved.results.get("stopped_early"):
        key = "epochs" if saved.was_finished(recipe) else "stop_after"
        hint = f"; a larger training.{key} resumes it" if saved.checkpoint else ""
        message(f"{reason}{hint}")
    return saved.results


def check_rows(saved: SavedRun, recipe: Recipe, catalog: Catalog) -> None:
    """Reject a catalog whose rows differ from those of the saved run."""
    if recipe.data.bad_images == "skip" or saved.checkpoint is None:
        return  # images to skip are unknown before they are read
    before, now = saved.checkpoint["images"], fingerprint(catalog)
    if before["rows"] != now["rows"]:
        check_same_images(saved.path, before, now)


def _begin(run: Run, context: RunContext, second: RunFolder | None) -> None:
    """Begin a run; remove the previous one in its folder."""
    folder, on_main, final = run.folder, run.world.on_main, second or run.folder
    has_results = on_main(final.results.exists)
    has_checkpoint = on_main(lambda: folder.last.exists() or final.last.exists())
    if context.resume and on_main(folder.recipe.exists):
        run.report(f"no checkpoint in {folder.path}: starting from the beginning")
    elif has_results or has_checkpoint:
        path = folder.path if second is None else folder.path.parent
        kind = "complete" if has_results else "unfinished"
        run.report(
            f"removing the {kind} run in {path}: embedder, results, checkpoints, report; choose "
            "another folder to keep it"
        )
    on_main(lambda: folder.begin(run.recipe, run.world.device))
    if second is not None:
        on_main(second.remove)


def _resume(run: Run, saved: SavedRun) -> None:
    """Restore the state of a saved run; only then write to its folder."""
    folder, state = run.folder, run.state
    restore_state(run)
    ended_within_epoch = not state.batch and state.step % len(run.data.sampler) > 0
    if ended_within_epoch and not run.is_over():
        raise RunError(
            f"the run in {folder.path} ended within epoch {state.epoch} and cannot be trained "
            "longer. Choose another folder, or start over with --fresh."
        )
    run.world.on_main(lambda: folder.resume(run.recipe, state.lines))
    link_checkpoints(run)  # a kill may have prevented it
    if state.best_epoch is not None and not run.world.on_main(folder.best.exists):
        raise CheckpointError(folder.best, f"of the selected epoch {state.best_epoch} is missing")
    before, now = saved.recipe.training.epochs, run.recipe.training.epochs
    if before != now:
        change = "extended" if now > before else "shortened"
        run.report(f"{change} from {before} to {now} epochs")
    run.report(f"resuming after step {state.step} (epoch {state.epoch})")


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
    selection = train_run(first_stage(recipe), first, context, second)
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
    results = train_run(recipe, second, context)
    return {**results, "protocol": "held_out", "first_stage": selection["selected"]}
