"""`Run`: all parts of a run, its state, its clock and its stop requests."""

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
from torch import Tensor, nn

from proximetry._util.formatting import parse_seconds
from proximetry.recipe.schema import Recipe
from proximetry.training.distributed import World
from proximetry.training.errors import RunError
from proximetry.training.evaluator import Evaluator, SplitScores, selection_value
from proximetry.training.metrics_table import selection_title
from proximetry.training.run_folder import RunFolder
from proximetry.training.schedule import LearningRates
from proximetry.training.sources.training_data import TrainingData
from proximetry.training.updater import Updater

FOLLOW_PARENT = "PROXIMETRY_FOLLOW_PARENT"
"""Environment variable: id of the parent process; the run stops when that process exits."""
RESUME_HINT = "The same command (without --fresh) resumes it."
Phase = Literal["startup", "training", "evaluation", "other"]


class Stopped(Exception):  # noqa: N818
    """A run was stopped and saved; the message explains how to resume it."""


@dataclass
class StopRequests(AbstractContextManager[Any]):
    """Context that turns the first SIGINT or SIGTERM into a request to stop the run."""

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
        """Return whether a signal arrived or the parent process exited."""
        return self.requested or os.environ.get(FOLLOW_PARENT) not in (None, str(os.getppid()))

    def _handle(self, number: int, frame: object) -> None:
        signal.signal(number, self._handlers[number])
        self.requested = True
        if self._message is not None:
            raise Stopped(self._message)

    @contextmanager
    def raise_on_request(self, message: str) -> Iterator[None]:
        """Within the context, raise `Stopped` with this message on a request."""
        if self():
            raise Stopped(message)
        self._message = message
        try:
            yield
        finally:
            self._message = None


class Stopwatch:
    """Seconds by phase, one phase at a time; `enter` begins the next.

    Startup includes loading data and weights, and the first step of a network, which compiles
    kernels and records CUDA graphs.
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

    def elapsed(self) -> dict[str, float]:
        """Return the seconds by phase up to now; the current phase continues."""
        duration = time.monotonic() - self.since
        return {**self.seconds, self.phase: self.seconds[self.phase] + duration}


@dataclass
class TrainState:
    """Counters of the loop and the epoch selected so far.

    Attributes:
        loss_sum: sum of the losses of the current epoch, on the device.
        bad_step: the first step whose loss was not finite, on the device; -1 for none.
        epoch: complete epochs.
        batch: steps of the current epoch.
        step: steps of the run.
        best_epoch: the selected epoch so far.
        best_value: its selection metric.
        stale: evaluations since the last improvement.
        finished: `TrainingConfig.duration` at the time a limit or a callback ended the run, if any.
        lines: the lines of metrics.jsonl, which a resumed run rewrites.
    """

    loss_sum: Tensor
    bad_step: Tensor
    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_epoch: int | None = None
    best_value: float | None = None
    stale: int = 0
    finished: list[Any] | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def advance(self, loss: Tensor) -> None:
        """Count a step and its loss, without waiting for the device."""
        self.loss_sum += loss
        first_bad = (self.bad_step < 0) & ~torch.isfinite(loss)
        self.bad_step = torch.where(first_bad, self.step, self.bad_step)
        self.batch += 1
        self.step += 1

    def end_epoch(self) -> dict[str, Any]:
        """Count an epoch; return epoch, step and mean loss."""
        mean = self.loss_sum.item() / self.batch
        self.loss_sum.zero_()
        self.epoch += 1
        self.batch = 0
        return {"epoch": self.epoch, "step": self.step, "loss": mean}

    def observe(self, value: float) -> bool:
        """Record the selection metric of an epoch; return whether it is the best so far.

        In a tie the later epoch is selected, since it was trained for longer; it does not count as
        an improvement for the patience of the schedule and of early stopping.
        """
        improved = self.best_value is None or value > self.best_value
        if improved or value == self.best_value:
            self.best_epoch, self.best_value = self.epoch, value
        self.stale = 0 if improved else self.stale + 1
        return improved


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
    """The resolved ``auto`` values, as lines of text."""
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
        """Return whether all epochs are done, or a limit or a callback ends the run."""
        t, state = self.recipe.training, self.state
        return state.finished == t.duration() or t.is_over(state.epoch, state.stale)

    def reached_limit(self) -> str:
        """Return which limit ends the run now, training.max_steps or max_time; "" for neither."""
        t, step = self.recipe.training, self.state.step
        if t.max_steps is not None and step >= t.max_steps:
            return f"stopped after step {step}: training.max_steps {t.max_steps}"
        if t.max_time is None:
            return ""
        evaluations = (line.get("evaluation_seconds", 0.0) for line in self.state.lines)
        needed = sum(self.clock.elapsed().values()) + max(evaluations, default=0.0)
        if not self.world.any(needed >= parse_seconds(t.max_time)):
            return ""
        return f"stopped after step {step}: training.max_time {t.max_time}"

    def early_stop_reason(self) -> str:
        """Return why the run ended before its last epoch, "" if it did not."""
        state, selection = self.state, self.selection()
        if state.epoch >= self.recipe.training.epochs or self.reached_limit():
            return ""
        stopped = f"stopped early after epoch {state.epoch}"
        if selection is None or state.finished == self.recipe.training.duration():
            return f"{stopped}: a callback called run.finish()"
        return (
            f"{stopped}: no improvement of {selection_title(*selection)} in {state.stale} "
            f"evaluations; best epoch {state.best_epoch}"
        )

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
        epoch = self.state.epoch
        every = self.recipe.evaluation_interval(bool(self.watched_splits()))
        return epoch % every == 0 or self.is_over()

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

    def select(self, split_scores: SplitScores) -> bool:
        """Update the selected epoch and the schedule; return whether this epoch is selected."""
        selection = self.selection()
        if selection is None:
            return True
        split, metric = selection
        improved = self.state.observe(selection_value(split_scores.scores[split], metric))
        self.rates.observe(improved, self.state.epoch - 1)
        return self.state.best_epoch == self.state.epoch

    def notify(self, event: str, *values: Any) -> None:
        """Call a method of every callback that has it."""
        for callback in self.callbacks:
            getattr(callback, event, lambda *_: None)(self, *values)

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self.world.is_main:
            self.folder.log(line)

    def stoppable(self, when: str) -> AbstractContextManager[None]:
        """Return a context in which a stop request interrupts an evaluation, with one rank only."""
        if self.world.size > 1:
            return nullcontext()
        message = f"stopped {when} of the run in {self.folder.path}. {RESUME_HINT}"
        return self.stop_requests.raise_on_request(message)

    def check_finite(self, *, weights: bool = False) -> None:
        """Raise if a loss was not finite, with its step and images; waits for the device.

        With ``weights``, also check the weights: the last update can make them non-finite.
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
            # A sum is finite only if every term is, so only one number is read from the device.
            sums = [parameter.detach().sum(dtype=torch.float64) for parameter in parameters]
            finite = not sums or bool(torch.isfinite(torch.stack(sums).sum()))
            if self.world.any(not finite):  # sharded proxies differ by rank
                problem = f"the weights are not finite after step {self.state.step}"
        if problem:
            last = self.folder.last
            raise RunError(
                f"training diverged: {problem}. Try a smaller --optimizer.lr (now "
                f"{self.recipe.optimizer.lr:g}), --optimizer.clip-norm or --training.precision "
                "float32, in another folder or with --fresh."
                + (f" The last good checkpoint is {last}." if last.exists() else "")
            )
