"""Trackers of a run: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from proximetry._util.files import name_write_errors, read_json
from proximetry._util.imports import import_optional
from proximetry.recipe.loading import flatten
from proximetry.recipe.schema import Recipe

if TYPE_CHECKING:
    from proximetry.training.run import Run

_MAX_PARAMS = 100  # per request to MLflow


class Tracker(Protocol):
    """Logs the epochs of a run; opened on rank 0."""

    def log(self, values: dict[str, float], epoch: int, step: int) -> None:
        """Log the metrics of an epoch, unless they were logged before the run was resumed."""

    def close(self, error: type[BaseException] | None) -> None:
        """Close the tracker of a complete, stopped or failed run."""


class TensorBoard:
    """Event files in the folder of the run."""

    def __init__(self, run: Run) -> None:
        self.folder = run.folder.path / "tensorboard"
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run hides the epochs since its checkpoint.
        next_epoch = run.state.epoch + 1 if run.state.step else None
        self.writer = SummaryWriter(str(self.folder), purge_step=next_epoch)

    def log(self, values: dict[str, float], epoch: int, step: int) -> None:
        """Write the metrics of an epoch."""
        with name_write_errors(self.folder):
            for name, value in values.items():
                self.writer.add_scalar(name, value, epoch)
            self.writer.flush()

    def close(self, error: type[BaseException] | None) -> None:
        """Close the file."""
        self.writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, with the id of the run folder."""

    def __init__(self, run: Run) -> None:
        self.run = import_optional("wandb", None, "Weights & Biases").init(
            project=_project(run),
            name=run.folder.path.name,
            config=run.recipe.to_dict(),
            dir=str(run.folder.path),
            id=_run_id(run),
            resume="allow",
        )

    def log(self, values: dict[str, float], epoch: int, step: int) -> None:
        """Log the metrics of an epoch at its last step."""
        if step >= self.run.starting_step:
            self.run.log(values, step=step)

    def close(self, error: type[BaseException] | None) -> None:
        """Finish the run."""
        self.run.finish(exit_code=0 if error is None else 1)


class MLflow:
    """A run at MLflow, with the id of the run folder as a tag."""

    def __init__(self, run: Run) -> None:
        self.mlflow = import_optional("mlflow", None, "MLflow")
        self.client, project, tag = self.mlflow.MlflowClient(), _project(run), _run_id(run)
        experiment = self.client.get_experiment_by_name(project)
        folder = experiment.experiment_id if experiment else self.client.create_experiment(project)
        runs = self.client.search_runs([folder], f"tags.proximetry = '{tag}'")
        self.last_epoch = -1
        if runs:
            self.id = runs[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            logged = self.client.get_metric_history(self.id, "epoch")
            self.last_epoch = max((metric.step for metric in logged), default=-1)
            return
        name, tags = run.folder.path.name, {"proximetry": tag}
        self.id = self.client.create_run(folder, tags=tags, run_name=name).info.run_id
        keys = flatten(run.recipe.to_dict()).items()
        params = [self.mlflow.entities.Param(key, str(value)) for key, value in keys]
        for start in range(0, len(params), _MAX_PARAMS):
            self.client.log_batch(self.id, params=params[start : start + _MAX_PARAMS])

    def log(self, values: dict[str, float], epoch: int, step: int) -> None:
        """Log the metrics of an epoch; MLflow allows no @ in their names."""
        if epoch <= self.last_epoch:
            return
        now = int(1000 * time.time())
        names = {name.replace("@", "_at_"): value for name, value in values.items()}
        metrics = [self.mlflow.entities.Metric(*item, now, epoch) for item in names.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def close(self, error: type[BaseException] | None) -> None:
        """End the run as finished, stopped or failed."""
        from proximetry.training.run import Stopped

        stopped = error is not None and issubclass(error, Stopped | KeyboardInterrupt)
        status = "FINISHED" if error is None else "KILLED" if stopped else "FAILED"
        self.client.set_terminated(self.id, status)


def _tensorboard_if_installed(run: Run) -> Tracker | None:
    return TensorBoard(run) if find_spec("tensorboard") else None


_TRACKERS: dict[str, Callable[[Run], Tracker | None]] = {
    "tensorboard": _tensorboard_if_installed,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_tracker(recipe: Recipe) -> None:
    """Raise an error that names the package of the tracker if it is missing."""
    name = recipe.training.tracker
    if name in ("wandb", "mlflow"):
        import_optional(name, None, f"training.tracker {name}")


def _project(run: Run) -> str:
    return run.recipe.training.project or "proximetry"


def _run_id(run: Run) -> str:
    """Return the id of the run folder, which a resumed run keeps."""
    return str(read_json(run.folder.environment, 10**6).get("id"))


class RunTracker(AbstractContextManager[Any]):
    """The tracker of the recipe, if any, as a callback and a context that closes it."""

    _tracker: Tracker | None = None

    def on_start(self, run: Run) -> None:
        """Open the tracker."""
        make = _TRACKERS.get(run.recipe.training.tracker)
        if run.world.is_main and make is not None:
            self._tracker = make(run)

    def on_epoch_end(self, run: Run, line: dict[str, Any]) -> None:
        """Log the metrics of an epoch."""
        if self._tracker is not None:
            values = {key.replace(".", "/"): value for key, value in flatten(line).items()}
            numbers = {key: v for key, v in values.items() if isinstance(v, int | float)}
            self._tracker.log(numbers, line["epoch"], line["step"])

    on_untrained = on_epoch_end

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._tracker is not None:
            self._tracker.close(kind)
