"""The state of a run besides weights and optimizer; saving and restoring it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from proximetry.recipe.loading import differences
from proximetry.recipe.schema import Recipe
from proximetry.training.checkpoint import (
    CheckpointError,
    link_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from proximetry.training.fingerprint import may_have_changed, refuse_others
from proximetry.training.run_folder import RunError

if TYPE_CHECKING:
    from proximetry.training.loop import Run


@dataclass
class TrainState:
    """Counters of the loop and what was selected so far.

    Attributes:
        loss_sum: losses of the present epoch, on the device.
        bad_step: the first step whose loss was not finite, on the device; -1 for none.
        epoch: complete epochs.
        batch: steps of the present epoch.
        step: steps of the run.
        best_epoch: the selected epoch so far.
        best_value: its selection metric.
        stale: evaluations since the last improvement.
        finished: ``training.epochs`` of the recipe when a callback ended the run, if one did.
        lines: of metrics.jsonl, which a continued run writes again.
    """

    loss_sum: Tensor
    bad_step: Tensor = field(init=False)
    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_epoch: int | None = None
    best_value: float | None = None
    stale: int = 0
    finished: int | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bad_step = torch.full_like(self.loss_sum, -1, dtype=torch.long)

    def advance(self, loss: Tensor) -> None:
        """Count a step and its loss, without waiting for the device."""
        self.loss_sum += loss
        first_bad = (self.bad_step < 0) & ~torch.isfinite(loss)
        self.bad_step = torch.where(first_bad, self.step, self.bad_step)
        self.batch += 1
        self.step += 1

    def end_epoch(self, batches: int) -> dict[str, Any]:
        """Count an epoch of this number of batches; return epoch, step and mean loss."""
        self.epoch += 1
        self.batch = 0
        mean = self.loss_sum.item() / batches
        self.loss_sum.zero_()
        return {"epoch": self.epoch, "step": self.step, "loss": mean}

    def observe(self, value: float) -> bool:
        """Take the selection metric after an epoch; return whether it is better than any before.

        Of equal epochs the last one is selected: it has been trained for longer. For the patience
        of schedule and early stopping it is no improvement.
        """
        improved = self.best_value is None or value > self.best_value
        if improved or value == self.best_value:
            self.best_epoch, self.best_value = self.epoch, value
        self.stale = 0 if improved else self.stale + 1
        return improved


def save_state(path: Path, run: "Run") -> None:
    """Write a checkpoint; only of a run whose losses and weights were finite."""
    run.check_finite(weights=True)
    if run.world.leads:
        save_checkpoint(path, run.modules(), run.updater.optimizer, _plain_state(run))


def _plain_state(run: "Run") -> dict[str, Any]:
    """Return a copy of the state in plain values."""
    state = {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in vars(run.state).items()
    }
    return {
        "state": state | {"lines": [*run.state.lines]},
        "rates": {"stale": run.rates.stale, "drops": [*run.rates.drops]},
        "seconds": run.clock.so_far(),
        "scaler": run.updater.scaler.state_dict(),
        "recipe": run.recipe.to_dict(),
        "images": run.data.fingerprint,
    }


def restore_state(path: Path, run: "Run") -> None:
    """Resume from a checkpoint."""
    with _explain(path):
        plain = load_checkpoint(
            path, run.modules(), run.updater.optimizer, lambda plain: _check_same(path, plain, run)
        )
        for name, value in plain["state"].items():
            now = getattr(run.state, name)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                setattr(run.state, name, value)
        vars(run.rates).update(plain["rates"])
        for phase, seconds in plain["seconds"].items():
            run.clock.seconds[phase] += seconds
        if plain["scaler"]:
            run.updater.scaler.load_state_dict(plain["scaler"])


@contextmanager
def _explain(path: Path) -> Iterator[None]:
    """Add the remedy to errors about a checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise RunError(f"{error}. Put {path} back, or start over with --fresh.") from error
    except (LookupError, AttributeError, TypeError) as error:
        raise RunError(
            f"{path} is no checkpoint of this version of Proximetry ({error!r}); use the one that "
            "wrote it, or start over with --fresh"
        ) from error


def is_kept(run: "Run") -> bool:
    """Return whether the checkpoint of this epoch is kept."""
    every = run.recipe.training.keep_checkpoint_every
    return every > 0 and run.state.epoch % every == 0


def link_checkpoints(run: "Run") -> None:
    """Link ``last`` as the checkpoint of the selected and of the kept epoch, where it is that."""
    folder, state = run.folder, run.state
    if not run.world.leads or state.batch or not state.epoch:
        return
    if state.best_epoch == state.epoch:
        link_checkpoint(folder.last, folder.best)
    if is_kept(run):
        link_checkpoint(folder.last, folder.of_epoch(state.epoch))


def restore_best(run: "Run") -> None:
    """Load the weights of the selected epoch."""
    path, wanted = run.folder.best, run.state.best_epoch

    def check(plain: dict[str, Any]) -> None:
        _check_same(path, plain, run)
        epoch, batch = plain["state"]["epoch"], plain["state"]["batch"]
        if (epoch, batch) != (wanted, 0):
            raise CheckpointError(f"{path} is not of the selected epoch {wanted}, but of {epoch}")

    with _explain(path):
        load_checkpoint(path, run.modules(), check=check)


def _check_same(path: Path, plain: dict[str, Any], run: "Run") -> None:
    """Reject a checkpoint of another recipe or other images, or with impossible counters."""
    changed = differences(Recipe.load(plain["recipe"]).essence(), run.recipe.essence())
    if changed:
        raise RunError(
            f"{path} is of a run with another recipe: {', '.join(changed)}; put the right one "
            "back, or start over with --fresh"
        )
    refuse_others(run.folder.path, plain["images"], run.data.fingerprint)
    epoch, batch, step = (plain["state"][name] for name in ("epoch", "batch", "step"))
    length = len(run.data.sampler)
    if not 0 <= batch <= length or step != epoch * length + batch:
        raise CheckpointError(
            f"{path} is damaged: step {step} is not batch {batch} of epoch {epoch} with {length} "
            "batches each"
        )
    doubt = may_have_changed(plain["images"], run.data.fingerprint)
    if doubt and doubt not in run.data.notes:
        run.report(doubt)
        run.data.notes.append(doubt)
