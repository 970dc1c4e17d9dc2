"""The training loop: start at `fit`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from proximetry.data.images import ImageError
from proximetry.recipe.schema import Recipe
from proximetry.training.checkpoint import RunError, TrainState, link_checkpoints, save_state
from proximetry.training.distributed import World, any_rank
from proximetry.training.evaluator import Evaluator, SplitScores
from proximetry.training.results import (
    early_stop,
    evaluate_final,
    evaluate_untrained,
    save_embedder,
    selection_value,
)
from proximetry.training.run_folder import RunFolder
from proximetry.training.schedule import LearningRates
from proximetry.training.sources.base import TrainingData
from proximetry.training.step import Updater

FOLLOW_PARENT = "PROXIMETRY_FOLLOW_PARENT"
"""Environment variable: the id of a parent process; the run stops when that process is gone."""
RESUME = "The same command (without --fresh) resumes it."
Phase = Literal["startup", "training", "evaluation", "other"]


class Stopped(Exception):  # noqa: N818
    """A run that was stopped and saved, and how to resume it."""


@dataclass
class StopRequests(AbstractContextManager[Any]):
    """Within the context, turns the first SIGINT and SIGTERM into a request to stop the run."""

    requested: bool = False
    _message: str | None = None
    _handlers: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Return whether a signal arrived or the parent to follow is gone."""
        return self.requested or os.environ.get(FOLLOW_PARENT) not in (None, str(os.getppid()))

    def _handle(self, number: int, frame: object) -> None:
        signal.signal(number, self._handlers[number])
        self.requested = True
        if self._message is not None:
            raise Stopped(self._message)

    @contextmanager
    def immediate(self, message: str) -> Iterator[None]:
        """Raise `Stopped` with this message on a request, where nothing is lost by it."""
        if self():
            raise Stopped(message)
        self._message = message
        try:
            yield
        finally:
            self._message = None


class Stopwatch:
    """Seconds by phase. Every moment belongs to one phase; `enter` begins the next.

    Startup is loading data and weights, and the first step of a network, which compiles kernels
    and records CUDA graphs.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(get_args(Phase), 0.0)
        self.phase: Phase = "startup"
        self.since = time.monotonic()

    def enter(self, phase: Phase) -> float:
        """Begin a phase; return the duration of the previous one in seconds."""
        now = time.monotonic()
        duration = now - self.since
        self.seconds[self.phase] += duration
        self.phase, self.since = phase, now
        return duration

    def so_far(self) -> dict[str, float]:
        """Return the seconds by phase up to now; the current phase continues."""
        duration = time.monotonic() - self.since
        return {**self.seconds, self.phase: self.seconds[self.phase] + duration}


@dataclass
class Run:
    """All parts of a run, for the loop and for callbacks."""

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
    choices: Sequence[str] = ()
    """What the ``auto`` values of the recipe became, in lines for people."""
    callbacks: Sequence[Any] = ()
    stop_requests: StopRequests = field(default_factory=StopRequests)
    stop_requested: bool = False
    finish_requested: bool = False

    def stop(self) -> None:
        """End the run after the current step with a checkpoint; the same call resumes it."""
        self.stop_requested = True

    def finish(self) -> None:
        """End training after the current epoch; the run is then complete, and `train` returns.

        The same recipe with another ``training.epochs`` resumes it.
        """
        self.finish_requested = True

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules of a checkpoint."""
        u = self.updater
        modules: dict[str, nn.Module] = {"embedder": u.embedder, "loss": u.objective}
        return modules if u.average is None else {**modules, "average": u.average}

    def is_over(self) -> bool:
        """Return whether all epochs are done, or early stopping or a callback ends the run."""
        t, state = self.recipe.training, self.state
        return state.finished == t.epochs or t.is_over(state.epoch, state.stale)

    def selection(self) -> tuple[str, str] | None:
        """Return the split and the metric that select the epoch, if any."""
        split = {"held_out": "held_out", "paper": "test"}.get(self.data.protocol)
        return None if split is None else (split, self.recipe.evaluation.select_by)

    def watched_splits(self) -> list[str]:
        """Return the splits that are evaluated after an epoch."""
        selection = self.selection()
        splits = [] if selection is None else [selection[0]]
        watched = self.recipe.evaluation.watch_test and len(self.data.rows["test"]) > 0
        return [*splits, "test"] if watched and "test" not in splits else splits

    def final_splits(self) -> list[str]:
        """Return the splits that are evaluated at the end."""
        with_test = self.recipe.evaluation.final_test or self.data.protocol == "paper"
        splits = ("held_out", "test") if with_test else ("held_out",)
        return [name for name in splits if len(self.data.rows[name])]

    def evaluates_now(self) -> bool:
        """Return whether the embedder is evaluated and saved after this epoch."""
        epoch, every = (
            self.state.epoch,
            self.recipe.evaluation_interval(bool(self.watched_splits())),
        )
        return epoch % every == 0 or epoch == self.recipe.training.epochs

    def keeps_checkpoint(self) -> bool:
        """Return whether the checkpoint of this epoch is kept."""
        every = self.recipe.training.keep_checkpoint_every
        return every > 0 and self.state.epoch % every == 0

    def saves_now(self) -> bool:
        """Return whether a checkpoint is written after this epoch."""
        epoch = self.state.epoch
        regular = epoch % self.recipe.training.checkpoint_epochs == 0
        selected = self.state.best_epoch == epoch
        return selected or regular or self.keeps_checkpoint() or self.is_over()

    def select(self, evaluated: SplitScores) -> bool:
        """Update the selected epoch and the schedule; return whether this epoch is selected."""
        selection = self.selection()
        if selection is None:
            return True
        split, metric = selection
        improved = self.state.observe(selection_value(evaluated.scores[split], metric))
        self.rates.observe(improved, self.state.epoch - 1)
        return self.state.best_epoch == self.state.epoch

    def notify(self, event: str, *values: Any) -> None:
        """Call a method of every callback that has it."""
        for callback in self.callbacks:
            getattr(callback, event, lambda *_: None)(self, *values)

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self.world.leads:
            self.folder.log(line)

    def stoppable(self, when: str) -> AbstractContextManager[None]:
        """Let a stop request interrupt an evaluation, unless there are several ranks."""
        if self.world.size > 1:
            return nullcontext()
        message = f"stopped {when} of the run in {self.folder.path}. {RESUME}"
        return self.stop_requests.immediate(message)

    def check_finite(self, *, weights: bool = False) -> None:
        """Raise if a loss was not finite, with its step and images; waits for the device.

        With ``weights``, also if a weight is not: the last update can break them after a finite
        loss.
        """
        problem, step = "", int(self.state.bad_step)
        if step >= 0:
            per_epoch = len(self.data.sampler)
            indices = self.data.sampler.batch(step // per_epoch, step % per_epoch)
            files = [self.data.catalog.file(row) for row in self.data.rows["train"][indices[:5]]]
            problem = (
                f"the loss was not finite at step {step} (epoch {step // per_epoch + 1}, "
                f"{len(indices)} images: {', '.join(files)}…)"
            )
        elif weights:
            parameters = [p for module in self.modules().values() for p in module.parameters()]
            # A sum is finite only if every term is: one number to wait for.
            sums = [parameter.detach().sum(dtype=torch.float64) for parameter in parameters]
            if sums and not torch.isfinite(torch.stack(sums).sum()):
                problem = f"the weights are not finite after step {self.state.step}"
        if problem:
            last = self.folder.last
            raise RunError(
                f"training diverged: {problem}. Try a smaller --optimizer.lr (now "
                f"{self.recipe.optimizer.lr:g}), --optimizer.clip-norm or --training.precision "
                "float32, in another folder or with --fresh."
                + (f" The last good checkpoint is {last}." if last.exists() else "")
            )


def fit(run: Run) -> dict[str, Any]:
    """Train from the current state to the end, save the embedder, return the results."""
    state, evaluated = run.state, None
    run.notify("on_start")
    if run.recipe.evaluation.untrained and state.step == 0 and run.final_splits():
        with run.stoppable("before the first step"):
            line = evaluate_untrained(run)
        state.lines.append(line)
        run.log(line)
        run.notify("on_untrained", line)
    while not run.is_over():
        line, evaluated = train_epoch(run), None
        if run.evaluates_now():
            run.clock.enter("evaluation")
            evaluated = run.evaluator.evaluate(run.watched_splits())
            line |= evaluated.scores
            if run.select(evaluated):
                save_embedder(run, {"epoch": state.epoch, **evaluated.scores}, evaluated)
            line["evaluation_seconds"] = round(run.clock.enter("other"), 3)
        state.lines.append(line)
        if run.saves_now():
            save_state(run)
            link_checkpoints(run)  # best.safetensors is a hard link to last.safetensors
        run.log(line)  # after the checkpoint: a logged epoch can be resumed from
        run.notify("on_epoch_end", line)
        if any_rank(run.finish_requested, run.world) and not run.is_over():
            state.finished = run.recipe.training.epochs
            save_state(run)
    if why := early_stop(run):
        run.report(why)
    with run.stoppable("in the final evaluation"):
        results, selected = evaluate_final(run, evaluated)
    save_embedder(run, results["selected"], selected)
    if run.world.leads:
        run.folder.write_results(results)
    run.world.wait()
    run.notify("on_end", results)
    return run.folder.read_results()


def train_epoch(run: Run) -> dict[str, Any]:
    """Train the rest of an epoch; return its line of metrics.jsonl without the evaluation."""
    state, updater, clock = run.state, run.updater, run.clock
    checkpoint_steps = run.recipe.training.checkpoint_steps
    run.rates.apply(updater.optimizer, state.epoch)
    updater.embedder.train()
    updater.objective.train()
    changed = updater.freeze_backbone(state.epoch < run.recipe.schedule.freeze_backbone_epochs)
    if clock.phase != "startup":
        clock.enter("startup" if changed else "training")
    images = 0
    try:
        for pixels, labels in run.data.batches(state.epoch, state.batch):
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
            if any_rank(run.stop_requested or run.stop_requests(), run.world):
                clock.enter("other")
                save_state(run)
                run.notify("on_stop")
                raise Stopped(
                    f"stopped after step {state.step}, saved in {run.folder.path}. {RESUME}"
                )
    except ImageError:
        if run.world.size == 1:  # other ranks are already in the next step
            save_state(run)
        raise
    run.check_finite(weights=True)  # which waits for the device
    seconds = clock.enter("other")
    return {
        **state.end_epoch(len(run.data.sampler)),
        "lr": updater.optimizer.param_groups[0]["lr"],
        "images_per_second": round(images / seconds, 1) if images and seconds else None,
        "seconds": round(clock.seconds["training"], 3),
    }
