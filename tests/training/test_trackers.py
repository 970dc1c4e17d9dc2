"""TensorBoard, Weights & Biases and MLflow logs are resumed and closed, without repeated epochs."""

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from proximetry.training import Callback, Stopped, trackers, train
from tests.training.runs import OnStep, fail, killed_at
from tests.training.tiny import with_


class FailOnceAfterThreeEpochs:
    """Kills a run after its trackers logged an epoch, before the next checkpoint."""

    def on_epoch_end(self, run, line):
        if line["epoch"] == 3:
            raise SystemError("killed")


class StopAfterTwoSteps(Callback):
    def on_step_end(self, run, loss):
        if run.state.step == 2:
            run.stop()


@pytest.fixture
def killed(recipe, tmp_path):
    """Return a function that trains, kills the run in epoch 4, and resumes it from epoch 2."""

    def run(**training):
        changed = with_(recipe, "training", epochs=4, checkpoint_epochs=2, **training)
        changed = with_(changed, "evaluation", protocol="last")  # else the best epoch is saved too
        with pytest.raises(SystemError, match="killed"):
            train(changed, tmp_path / "run", callbacks=[FailOnceAfterThreeEpochs()])
        train(changed, tmp_path / "run")
        return tmp_path / "run"

    return run


def test_tensorboard_events_are_written_when_it_is_installed(recipe, tmp_path):
    train(with_(recipe, "training", epochs=2), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("held_out/recall@1")] == [0, 1, 2]
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_tensorboard_of_resumed_run_shows_every_epoch_once(killed):
    events = EventAccumulator(str(killed() / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_tracker_may_be_none_or_not_installed(recipe, tmp_path, monkeypatch):
    short = with_(recipe, "training", epochs=1)
    train(with_(short, "training", tracker="none"), tmp_path / "none")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    train(short, tmp_path / "run")
    for name in ("none", "run"):
        assert not (tmp_path / name / "tensorboard").exists()


@pytest.fixture
def wandb_calls(monkeypatch):
    """Record the calls of a fake Weights & Biases, which keeps its runs by id."""
    calls, last_steps = [], {}

    def init(project, name, config, dir, id, resume):
        calls.append(("init", project, config["name"], id, resume))

        def log(values, step):
            last_steps[id] = step
            calls.append(("log", step, "loss" in values))

        return types.SimpleNamespace(
            starting_step=last_steps.get(id, -1) + 1,
            log=log,
            finish=lambda exit_code: calls.append(("finish", exit_code)),
        )

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_wandb_logs_every_epoch(recipe, tmp_path, wandb_calls):
    changes = {"epochs": 2, "tracker": "wandb", "project": "birds"}
    train(with_(recipe, "training", **changes), tmp_path / "run")
    name, project, recipe_name, _, resume = wandb_calls[0]
    assert (name, project, recipe_name, resume) == ("init", "birds", "tiny", "allow")
    logged = [("log", 0, False), ("log", 4, True), ("log", 8, True)]
    assert wandb_calls[1:] == [*logged, ("finish", 0)]


def test_wandb_run_is_closed_and_resumed(recipe, tmp_path, wandb_calls):
    recipe = with_(recipe, "training", epochs=2, tracker="wandb")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "run", callbacks=[StopAfterTwoSteps()])
    killed_at(6, recipe, tmp_path / "run")
    train(recipe, tmp_path / "run")
    finished = [call for call in wandb_calls if call[0] == "finish"]
    assert finished == [("finish", 1), ("finish", 1), ("finish", 0)]
    train(recipe, tmp_path / "run", resume=False)
    first, second, third, fresh = (call[3] for call in wandb_calls if call[0] == "init")
    assert first == second == third != fresh


def test_wandb_run_does_not_repeat_epochs(killed, wandb_calls):
    killed(tracker="wandb")
    steps = [call[1] for call in wandb_calls if call[0] == "log"]
    assert len(steps) == 4
    assert steps == sorted(set(steps))


class FakeClient:
    """A fake MLflow server."""

    experiments, runs = [], {}

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments.append(name)
        return name

    def create_run(self, folder, tags, run_name):
        id = f"run{len(self.runs)}"
        info = types.SimpleNamespace(run_id=id)
        self.runs[id] = types.SimpleNamespace(info=info, tags=tags, folder=folder, log=[], keys={})
        self.update_run(id, "RUNNING")
        return self.runs[id]

    def search_runs(self, folders, text):
        return [
            run
            for run in self.runs.values()
            if run.folder in folders and text == f"tags.proximetry = '{run.tags['proximetry']}'"
        ]

    def update_run(self, id, status):
        self.runs[id].status = status

    set_terminated = update_run

    def log_batch(self, id, metrics=(), params=()):
        assert len(params) <= 100
        self.runs[id].log += metrics
        self.runs[id].keys |= dict(params)

    def get_metric_history(self, id, name):
        return [metric for metric in self.runs[id].log if metric.key == name]


@pytest.fixture
def mlflow_runs(monkeypatch):
    def metric(key, value, timestamp, step):
        assert "@" not in key
        return types.SimpleNamespace(key=key, step=step)

    fake = types.ModuleType("mlflow")
    fake.MlflowClient = type("Client", (FakeClient,), {"experiments": [], "runs": {}})
    fake.entities = types.SimpleNamespace(Metric=metric, Param=lambda *pair: pair)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake.MlflowClient.runs


def test_mlflow_run_is_resumed_without_repeated_epochs(killed, mlflow_runs):
    killed(tracker="mlflow")
    (run,) = mlflow_runs.values()
    assert (run.folder, run.status) == ("proximetry", "FINISHED")
    assert run.keys["training.epochs"] == "4"
    assert [metric.step for metric in run.log if metric.key == "epoch"] == [1, 2, 3, 4]


def test_mlflow_run_ends_as_stopped_or_failed(recipe, tmp_path, mlflow_runs):
    recipe = with_(recipe, "training", epochs=1, tracker="mlflow", project="birds")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "run", callbacks=[StopAfterTwoSteps()])
    (run,) = mlflow_runs.values()
    assert (run.folder, run.status) == ("birds", "KILLED")
    with pytest.raises(SystemError):
        train(recipe, tmp_path / "run", callbacks=[OnStep(3, lambda: fail(SystemError("x")))])
    assert run.status == "FAILED"
    train(recipe, tmp_path / "run")
    assert (run.status, len(mlflow_runs)) == ("FINISHED", 1)
    assert "held_out/recall_at_1" in {metric.key for metric in run.log}
