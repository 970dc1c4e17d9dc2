"""How far a run has come: what a checkpoint holds besides weights and optimiser."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from proximetry.training.callbacks import Callback
from proximetry.training.checkpoint import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from proximetry.training.loop import Run


@dataclass
class TrainState:
    """Counters of the loop and what was selected so far.

    Attributes:
        epoch: complete epochs.
        batch: steps of the present epoch.
        step: steps of the run.
        loss_sum: losses of the present epoch, on the device.
        best_epoch: the selected epoch so far.
        best_value: its selection metric.
        stale: evaluations since then.
    """

    loss_sum: Tensor
    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_epoch: int | None = None
    best_value: float | None = None
    stale: int = 0

    def observe(self, value: float) -> bool:
        """Take the selection metric after an epoch; return whether it is the best so far."""
        if self.best_value is not None and value <= self.best_value:
            self.stale += 1
            return False
        self.best_epoch, self.best_value, self.stale = self.epoch, value, 0
        return True


def save_state(path: "Path", run: "Run") -> None:
    """Write a checkpoint; only of a run whose losses were finite."""
    run.check_finite()
    if not run.world.leads:
        return
    state = {name: value for name, value in vars(run.state).items() if name != "loss_sum"}
    plain = {
        "state": state | {"loss_sum": run.state.loss_sum.item()},
        "rates": run.rates.state_dict(),
        "seconds": run.clock.seconds,
        "scaler": run.updater.scaler.state_dict(),
    }
    save_checkpoint(path, run.modules(), run.optimizer, plain)


def restore_state(path: "Path", run: "Run") -> None:
    """Continue from a checkpoint."""
    plain = load_checkpoint(path, run.modules(), run.optimizer)
    values: dict[str, Any] = plain["state"]
    run.state.loss_sum.fill_(values.pop("loss_sum"))
    for name, value in values.items():
        setattr(run.state, name, value)
    run.rates.load_state_dict(plain["rates"])
    for phase, seconds in plain["seconds"].items():
        run.clock.seconds[phase] += seconds
    if plain["scaler"]:
        run.updater.scaler.load_state_dict(plain["scaler"])


class Checkpoints(Callback):
    """Saves the last and the best state where the recipe says so."""

    def on_step_end(self, run: "Run", loss: Tensor) -> None:
        """Save within an epoch."""
        every = run.recipe.training.checkpoint_steps
        if every and run.state.step % every == 0 and run.state.batch < len(run.data.sampler):
            save_state(run.folder.last, run)

    def on_improvement(self, run: "Run") -> None:
        """Save the selected epoch."""
        save_state(run.folder.best, run)

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Save at the end of an epoch."""
        t, epoch = run.recipe.training, run.state.epoch
        if epoch % t.checkpoint_epochs == 0 or run.is_over():
            save_state(run.folder.last, run)
        if t.keep_checkpoint_every and epoch % t.keep_checkpoint_every == 0:
            save_state(run.folder.of_epoch(epoch), run)

    def on_stop(self, run: "Run") -> None:
        """Save where the run was stopped."""
        save_state(run.folder.last, run)
