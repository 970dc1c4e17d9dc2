"""Limits of a run, `training.max_steps` and `training.max_time`, and learning-rate warm-up."""

import pytest

from proximetry.training import Callback, RunError, RunFolder, train
from proximetry.training.run import Stopwatch
from tests.training.runs import assert_same_run, killed_at, tensors
from tests.training.tiny import make_recipe, with_


@pytest.fixture
def recipe(images, cache):
    """A recipe of 4 steps per epoch, with checkpoints within epochs."""
    return make_recipe(images, cache, training={"checkpoint_steps": 2})


@pytest.fixture
def clock(monkeypatch):
    """A clock that shows the number of calls."""
    elapsed = {"training": 0.0}

    def count(self):
        elapsed["training"] += 1.0
        return {"training": elapsed["training"]}

    monkeypatch.setattr(Stopwatch, "elapsed", count)
    return elapsed


def epochs_and_steps(out):
    return [(line["epoch"], line["step"]) for line in RunFolder(out).history()]


def test_max_steps_ends_training_within_an_epoch(recipe, tmp_path):
    out, limited = tmp_path / "run", with_(recipe, "training", max_steps=6)
    results = train(limited, out)
    per_epoch = epochs_and_steps(out)[1][1]
    assert epochs_and_steps(out) == [(0, 0), (1, per_epoch), (2, 6)]
    assert (results["epochs"], results["stopped_early"]) == (2, None)
    assert "held_out" in RunFolder(out).history()[-1]  # the last epoch is evaluated
    assert train(limited, out) == results  # it is complete


@pytest.mark.parametrize("step", [3, 6])
def test_killed_run_with_max_steps_resumes_bit_exactly(recipe, tmp_path, step):
    """Also if killed after the last step, before the end is saved."""
    limited = recipe.override({"training.max_steps": 6, "schedule.warmup_steps": 5})
    killed_at(step, limited, tmp_path / "run")
    train(limited, tmp_path / "run")
    train(limited, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_run_that_ended_within_an_epoch_cannot_be_extended(recipe, tmp_path):
    train(with_(recipe, "training", max_steps=6), tmp_path / "run")
    with pytest.raises(RunError, match="ended within epoch 2"):
        train(recipe, tmp_path / "run")
    with pytest.raises(RunError, match=r"step 6, past training.max_steps 5"):
        train(with_(recipe, "training", max_steps=5), tmp_path / "run")


def test_max_steps_can_be_raised_at_the_end_of_an_epoch(recipe, tmp_path):
    train(with_(recipe, "training", epochs=1), tmp_path / "epoch")
    per_epoch = epochs_and_steps(tmp_path / "epoch")[-1][1]
    train(with_(recipe, "training", max_steps=per_epoch), tmp_path / "run")
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_cosine_schedule_ends_at_max_steps(recipe, tmp_path):
    cosine = recipe.override({"schedule.name": "cosine", "training.epochs": 50})
    train(cosine.override({"training.max_steps": 6}), tmp_path / "run")
    rates = [line["lr"] for line in RunFolder(tmp_path / "run").history()[1:]]
    assert rates == [pytest.approx(1e-3), pytest.approx(0.5e-3)]


def test_max_time_ends_training(recipe, tmp_path, clock):
    out, limited = tmp_path / "run", recipe.override({"training.max_time": "6s"})
    limited = limited.override({"evaluation.untrained": False, "training.checkpoint_steps": 0})
    results = train(limited, out)
    (_, step), *_ = epochs_and_steps(out)
    assert results["epochs"] == 1
    assert results["stopped_early"] is None
    assert step < 6
    assert train(limited, out) == results  # it is complete
    train(limited.override({"training.max_time": None, "training.max_steps": step}), tmp_path / "s")
    one, two = tensors(out), tensors(tmp_path / "s")
    assert all(one[key].equal(two[key]) for key in two)


def test_killed_run_with_max_time_resumes_bit_exactly(recipe, tmp_path):
    limited = with_(recipe, "training", max_time="1h")
    killed_at(6, limited, tmp_path / "run")
    train(limited, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_max_time_leaves_time_for_the_final_evaluation(recipe, tmp_path, clock):
    class SlowEvaluation(Callback):
        def on_start(self, run):
            run.state.lines.append({"epoch": 0, "evaluation_seconds": 1000.0})

    limited = recipe.override({"training.max_time": "1005s", "evaluation.untrained": False})
    results = train(limited, tmp_path / "run", callbacks=[SlowEvaluation()])
    assert results["epochs"] < 3


def test_limits_are_validated(recipe):
    for value in ("10", "m", "0s", "-1m", "10 m"):
        with pytest.raises(ValueError, match=r"training.max_time must be a duration"):
            with_(recipe, "training", max_time=value)
    with pytest.raises(ValueError, match="max_steps and two_stages exclude each other"):
        with_(recipe, "training", max_steps=3, two_stages=True)
