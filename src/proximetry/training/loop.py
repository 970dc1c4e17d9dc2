"""The training loop: start at `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proximetry.data.images import ImageError
from proximetry.recipe.schema import Recipe
from proximetry.training.callbacks import Callback
from proximetry.training.clock import Stopwatch
from proximetry.training.distributed import World, any_rank
from proximetry.training.evaluator import Evaluated, Evaluator
from proximetry.training.results import (
    early_stop,
    evaluate_final,
    evaluate_untrained,
    final_splits,
    saturation,
    save_embedder,
    selection_value,
)
from proximetry.training.run_folder import RunError, RunFolder
from proximetry.training.schedule import LearningRates
from proximetry.training.sources.base import TrainingData
from proximetry.training.state import TrainState, is_kept, link_checkpoints, save_state
from proximetry.training.step import Updater
from proximetry.training.stopping import Stopped, StopRequests


@dataclass
class Run:
    """What a run consists of: the parts that the loop moves and that callbacks may look at."""

    recipe: Recipe
    folder: RunFolder
    world: World
    data: TrainingData
    updater: Updater
    evaluator: Evaluator
    rates: LearningRates
    clock: Stopwatch
    state: TrainState
    report: Callable[[str], None]
    callbacks: Sequence[Callback] = ()
    stopping: bool = False
    finishing: bool = False
    fresh: bool = False
    """Begun with ``resume=False``, with which it would begin again."""

    @property
    def again(self) -> str:
        """How to resume a stopped run."""
        how = " without --fresh (resume=False)" if self.fresh else ""
        return f"the same command{how} continues it"

    def stop(self) -> None:
        """End the run after the present step, with a checkpoint; the same call continues it."""
        self.stopping = True

    def finish(self) -> None:
        """End training after the present epoch; the run is then complete, and `train` returns.

        The same recipe with another ``training.epochs`` resumes it.
        """
        self.finishing = True

    def modules(self) -> dict[str, nn.Module]:
        """Return what a checkpoint holds besides the optimizer."""
        u = self.updater
        parts: dict[str, nn.Module] = {"embedder": u.embedder, "loss": u.objective}
        return parts if u.average is None else {**parts, "average": u.average}

    def is_over(self) -> bool:
        """Whether all epochs are done, or early stopping or a callback ends the run."""
        t, state = self.recipe.training, self.state
        return state.finished == t.epochs or t.is_over(state.epoch, state.stale)

    def selection(self) -> tuple[str, str] | None:
        """The split and the metric that select the epoch, if they do."""
        split = {"held_out": "held_out", "paper": "test"}.get(self.data.protocol)
        return None if split is None else (split, self.recipe.evaluation.select_by)

    def notify(self, event: str, *values: Any) -> None:
        """Tell every callback about an event."""
        for callback in self.callbacks:
            # One of the user's own need not have them all.
            getattr(callback, event, lambda *_: None)(self, *values)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self.world.leads:
            self.folder.log(line)

    def check_finite(self, *, weights: bool = False) -> None:
        """Stop if a loss was not finite, naming the step and its images; waits for the device.

        The weights may be looked at too: the last update can spoil them after a finite loss.
        """
        step = int(self.state.bad_step)
        if step >= 0:
            per_epoch = len(self.data.sampler)
            indices = self.data.sampler.batch(step // per_epoch, step % per_epoch)
            files = [self.data.catalog.file(row) for row in self.data.rows["train"][indices[:5]]]
            raise self.diverged(
                f"the loss was not finite at step {step} (epoch {step // per_epoch + 1}); its "
                f"{len(indices)} images begin with {', '.join(files)}"
            )
        if weights and not _all_finite(self.modules()):
            raise self.diverged(f"the weights are not finite after step {self.state.step}")

    def diverged(self, how: str) -> RunError:
        """The error that says what to do about numbers that are not finite."""
        kept = next(iter(self.folder.checkpoints()), None)
        return RunError(
            f"the training has diverged: {how}. A smaller learning rate (--optimizer.lr, now "
            f"{self.recipe.optimizer.lr:g}), --optimizer.clip-norm or --training.precision float32 "
            "usually helps, in another folder or with --fresh"
            + (f". The last good checkpoint is {kept}" if kept else "")
        )


def _all_finite(modules: dict[str, nn.Module]) -> bool:
    parameters = [p for module in modules.values() for p in module.parameters()]
    # A sum is finite only if every term is; one number to wait for.
    sums = [parameter.detach().sum(dtype=torch.float64) for parameter in parameters]
    return not sums or bool(torch.isfinite(torch.stack(sums).sum()))


def fit(run: Run, stop_requested: StopRequests) -> dict[str, Any]:
    """Train from the current state to the end, save the embedder, return the results."""
    try:
        return _fit(run, stop_requested)
    except ImageError as error:  # the last checkpoint stays
        skip = "" if run.state.step else " (--data.bad-images skip leaves it out)"
        raise RunError(
            f"{error}; put a readable file in its place{skip}; the same command continues the "
            f"run in {run.folder.path}"
        ) from error


def _fit(run: Run, stop_requested: StopRequests) -> dict[str, Any]:
    evaluated: Evaluated | None = None
    run.notify("on_start")
    if run.recipe.evaluation.untrained and run.state.step == 0 and final_splits(run):
        with _stopping(run, stop_requested, "stopped before the first step"):
            line = evaluate_untrained(run)
        run.state.lines.append(line)
        run.write(line)
        run.notify("on_untrained", line)
    while not run.is_over():
        line, evaluated = _train_epoch(run, stop_requested), None
        if _is_evaluated(run):
            run.clock.enter("evaluation")
            evaluated = run.evaluator.evaluate(_splits_to_watch(run))
            line |= evaluated.scores
            if _select(run, evaluated):
                save_embedder(run, {"epoch": run.state.epoch, **evaluated.scores}, evaluated)
            line["evaluation_seconds"] = round(run.clock.enter("other"), 3)
        run.state.lines.append(line)
        if _is_saved(run):
            save_state(run.folder.last, run)
            link_checkpoints(run)  # best.safetensors is a hard link to last.safetensors
        run.write(line)  # after the checkpoint: a logged epoch can be resumed from
        run.notify("on_epoch_end", line)
        if any_rank(run.finishing, run.world) and not run.is_over():
            run.state.finished = run.recipe.training.epochs
            save_state(run.folder.last, run)
    if why := early_stop(run):
        run.report(why)
    with _stopping(run, stop_requested, "stopped in the final evaluation"):
        results, selected = evaluate_final(run, evaluated)
    save_embedder(run, results["selected"], selected)
    if run.world.leads:
        run.folder.write_results(results)
    run.world.wait()
    run.notify("on_end", results)
    return run.folder.read_results()


def _train_epoch(run: Run, stop_requested: StopRequests) -> dict[str, Any]:
    """Train the rest of an epoch; return its line of metrics.jsonl without the evaluation."""
    state, checkpoint_steps = run.state, run.recipe.training.checkpoint_steps
    run.rates.apply(run.updater.optimizer, state.epoch)
    run.updater.embedder.train()
    run.updater.objective.train()
    frozen = state.epoch < run.recipe.schedule.freeze_backbone_epochs
    changed = run.updater.freeze_backbone(frozen)
    if run.clock.phase != "startup":
        run.clock.enter("startup" if changed else "training")
    timed = 0
    for pixels, labels in _readable(run):
        loss = run.updater(pixels, labels, state.step)
        state.advance(loss)
        starting = run.clock.phase == "startup"  # kernels are compiled, graphs recorded
        if starting or run.world.device.type == "cpu":  # else this would wait for the GPU
            run.check_finite()
        if starting:
            run.clock.enter("training")
        else:
            timed += len(labels) * run.world.size
        within = state.batch < len(run.data.sampler)
        if within and checkpoint_steps and state.step % checkpoint_steps == 0:
            save_state(run.folder.last, run)
        run.notify("on_step_end", loss)
        if any_rank(run.stopping or stop_requested(), run.world):
            run.clock.enter("other")
            raise Stopped(_stop(run))
    run.check_finite(weights=True)  # which waits for the device
    seconds = run.clock.enter("other")
    return {
        **state.end_epoch(len(run.data.sampler)),
        "lr": run.updater.optimizer.param_groups[0]["lr"],
        "images_per_second": round(timed / seconds, 1) if timed and seconds else None,
        "seconds": round(run.clock.seconds["training"], 3),
    }


def _readable(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of an epoch; if an image cannot be read, save the run first."""
    try:
        yield from run.data.batches(run.state.epoch, run.state.batch)
    except ImageError as error:
        if run.world.size > 1:  # the other ranks are in the next step
            raise
        saved = _stop(run)
        raise RunError(f"{error}; put a readable file in its place; {saved}") from error


def _stop(run: Run) -> str:
    """Save a stopped run; return where it is and how to resume it."""
    save_state(run.folder.last, run)
    run.notify("on_stop")
    usable = ", and the embedder so far can be used" if run.folder.embedder.exists() else ""
    step, folder = run.state.step, run.folder.path
    return f"stopped after step {step}, saved in {folder}; {run.again}{usable}"


def _stopping(run: Run, stop_requested: StopRequests, what: str) -> AbstractContextManager[None]:
    """Let a stop request interrupt an evaluation, unless there are several ranks."""
    if run.world.size > 1:
        return nullcontext()
    return stop_requested.at_once(f"{what} of the run in {run.folder.path}; {run.again}")


def _is_evaluated(run: Run) -> bool:
    """Return whether there is an evaluation after this epoch."""
    epoch, every = run.state.epoch, run.recipe.evaluated_every(bool(_splits_to_watch(run)))
    return epoch % every == 0 or epoch == run.recipe.training.epochs


def _splits_to_watch(run: Run) -> list[str]:
    """Return the splits that are evaluated after an epoch."""
    selection = run.selection()
    splits = [] if selection is None else [selection[0]]
    watched = run.recipe.evaluation.watch_test and len(run.data.rows["test"]) > 0
    return [*splits, "test"] if watched and "test" not in splits else splits


def _select(run: Run, evaluated: Evaluated) -> bool:
    """Return whether this epoch is selected so far; update the state and the schedule."""
    state, selection = run.state, run.selection()
    if selection is None:
        return True
    split, metric = selection
    was_saturated = saturation(run)
    improved = state.observe(selection_value(evaluated.scores[split], metric))
    run.rates.observe(improved, state.epoch - 1)
    saturated = saturation(run)
    if saturated and not was_saturated:
        run.report(saturated)
    return state.best_epoch == state.epoch


def _is_saved(run: Run) -> bool:
    """Return whether there is a checkpoint after this epoch."""
    t, epoch = run.recipe.training, run.state.epoch
    return (
        run.state.best_epoch == epoch
        or epoch % t.checkpoint_epochs == 0
        or is_kept(run)
        or run.is_over()
    )
