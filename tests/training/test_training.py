"""Training: it learns, continues bit for bit, stops when told, and says what went wrong."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from proximetry.losses import LOSSES
from proximetry.models import Embedder
from proximetry.training import (
    Callback,
    Recipe,
    RunError,
    RunFolder,
    Stopped,
    run_folder,
    train,
)
from proximetry.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from proximetry.training.clock import Stopwatch
from proximetry.training.state import TrainState
from tests.training.tiny import make_recipe, with_


def tensors(folder, name="last"):
    return load_file(folder / "checkpoints" / f"{name}.safetensors")


def state_of(checkpoint):
    return load_checkpoint(checkpoint, {})


def assert_same_run(one, two):
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key
    drop = ("images_per_second", "seconds", "evaluation_seconds")
    lines = [
        [{k: v for k, v in line.items() if k not in drop} for line in RunFolder(f).history()]
        for f in (one, two)
    ]
    assert lines[0] == lines[1]
    timings = ("seconds", "startup_seconds")
    results = [
        {k: v for k, v in RunFolder(f).read_results().items() if k not in timings}
        for f in (one, two)
    ]
    assert results[0] == results[1]


def test_a_run_writes_everything_down(recipe, tmp_path):
    out = tmp_path / "run"
    recipe = with_(recipe, "training", keep_checkpoint_every=2)
    results = train(recipe, out, device="cpu")
    assert results["protocol"] == "held_out"
    assert results["last"]["epoch"] == 3
    assert "test" not in results["selected"]
    chosen = {"data.cache": "disk", "training": {"precision": "float32", "cuda_graph": False}}
    recipe = recipe.override(chosen)
    assert Recipe.load(out / "recipe.yaml") == recipe
    environment = json.loads((out / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["seed"] == 0
    history = RunFolder(out).history()
    assert [line["epoch"] for line in history] == [1, 2, 3]
    assert [line["lr"] for line in history] == [1e-3, 1e-3, 5e-4]
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["best.safetensors", "epoch-0002.safetensors", "last.safetensors"]
    embedder = Embedder.load(out / "embedder")
    assert embedder.recipe == recipe.to_dict()
    assert embedder.metrics["protocol"] == "held_out"
    assert len(embedder.class_names) == 6
    assert not list(out.rglob("*.part"))


def test_the_test_set_can_be_watched_without_choosing_by_it(images, cache, tmp_path):
    table = tmp_path / "table.csv"
    rows = [
        f"{path},{path.parent.name},{'train' if path.parent.name < 'class05' else 'test'}"
        for path in sorted(images.rglob("*.png"))
    ]
    table.write_text("\n".join(["path,label,split", *rows]))
    base = make_recipe(
        images,
        cache,
        data={"dataset": "csv", "root": str(table)},
        training={"epochs": 4},
        evaluation={"protocol": "last", "watch_test": True, "every": 3},
    )
    results = train(base, tmp_path / "watched")
    history = RunFolder(tmp_path / "watched").history()
    assert ["test" in line for line in history] == [False, False, True, True]
    assert history[-1]["test"] == results["last"]["test"]
    assert results["selected"] == results["last"]
    assert not (tmp_path / "watched" / "checkpoints" / "best.safetensors").exists()
    train(with_(base, "evaluation", watch_test=False), tmp_path / "blind")
    watched, blind = tensors(tmp_path / "watched"), tensors(tmp_path / "blind")
    assert all(torch.equal(watched[key], blind[key]) for key in watched)


def test_seconds_of_training_and_of_the_start_are_told_apart(recipe, tmp_path):
    phases = []

    class Watch(Callback):
        def on_step_end(self, run, loss):
            phases.append(run.clock.phase)

    recipe = with_(recipe, "schedule", warmup_epochs=1)  # so there are two beginnings
    results = train(recipe, tmp_path / "run", callbacks=[Watch()])
    seconds = [line["seconds"] for line in RunFolder(tmp_path / "run").history()]
    assert seconds == sorted(seconds)
    assert results["seconds"] == seconds[-1]
    assert results["startup_seconds"] > 0
    assert set(phases) == {"training"}


def test_a_stopwatch_gives_every_moment_to_one_phase(monkeypatch):
    now = iter([0.0, 3.0, 4.0, 9.0, 11.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    clock = Stopwatch()
    assert clock.enter("training") == 3
    assert clock.enter("evaluation") == 1
    assert clock.enter("training") == 5
    assert clock.enter("other") == 2
    assert clock.seconds == {"startup": 3, "training": 3, "evaluation": 5, "other": 0}


def test_a_checkpoint_says_how_far_the_run_has_come(recipe, tmp_path):
    recipe = with_(recipe, "training", checkpoint_steps=1)
    killed_at(6, recipe, tmp_path / "run")
    state = state_of(RunFolder(tmp_path / "run").last)
    assert {key: state["state"][key] for key in ("epoch", "batch", "step")} == {
        "epoch": 1,
        "batch": 2,
        "step": 6,
    }
    assert "sampler" not in state, "it has no state of its own"


def test_checkpoints_can_be_rarer_than_epochs(recipe, tmp_path):
    recipe = with_(recipe, "training", epochs=5, checkpoint_epochs=2)
    recipe = with_(recipe, "evaluation", protocol="last")
    saved = []

    class Watch(Callback):
        def on_epoch_end(self, run, line):
            exists = run.folder.last.exists()
            saved.append(state_of(run.folder.last)["state"]["epoch"] if exists else None)

    train(recipe, tmp_path / "run", callbacks=[Watch()])
    assert saved == [None, 2, 2, 4, 5]
    saved.clear()
    recipe = recipe.override({"evaluation.protocol": "held_out"})
    train(recipe, tmp_path / "selected", callbacks=[Watch()])
    best = state_of(RunFolder(tmp_path / "selected").best)["state"]["epoch"]
    assert saved[best - 1] == best, "a run never continues from before its best checkpoint"


def test_cuda_graph_changes_nothing_without_a_gpu(recipe, tmp_path):
    train(recipe, tmp_path / "plain", device="cpu")
    train(with_(recipe, "training", cuda_graph=True), tmp_path / "graphed", device="cpu")
    assert_same_run(tmp_path / "plain", tmp_path / "graphed")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_on_the_gpu_learns_the_same(images, cache, tmp_path):
    recipe = make_recipe(
        images,
        cache,
        data={"cache": "gpu"},
        model={"backbone": "tf_efficientnet_lite0", "freeze_batchnorm": True, "image_size": 64},
        schedule={"warmup_epochs": 1},
        evaluation={"protocol": "last"},
    )
    losses = {}
    for name, graph in (("plain", False), ("graphed", True), ("again", True)):
        train(with_(recipe, "training", cuda_graph=graph), tmp_path / name)
        losses[name] = [line["loss"] for line in RunFolder(tmp_path / name).history()]
    assert losses["again"] == losses["graphed"]
    # Other kernels round otherwise: not much while the backbone stands still, more as it learns.
    assert losses["graphed"][0] == pytest.approx(losses["plain"][0], rel=1e-3)
    assert losses["graphed"] == pytest.approx(losses["plain"], rel=1e-2)


class OnStep(Callback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, run, loss):
        if run.state.step == self.step:
            self.action()


def fail(error):
    raise error


def test_too_little_memory_is_said_in_a_sentence(recipe, tmp_path):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    with pytest.raises(RunError, match=r"not enough memory.*training\.accumulate"):
        train(recipe, tmp_path / "run", callbacks=[OnStep(1, lambda: fail(error))])


def test_a_loss_without_parameters_can_be_clipped(recipe, tmp_path):
    pytest.importorskip("pytorch_metric_learning")
    recipe = with_(recipe, "loss", name="pairs/multi_similarity")
    recipe = with_(recipe, "optimizer", clip_value=10.0, clip_norm=1.0)
    train(recipe, tmp_path / "run")
    assert RunFolder(tmp_path / "run").history()[-1]["epoch"] == 3


def test_training_crops_may_be_smaller_than_those_of_evaluation(recipe, tmp_path):
    sizes = set()

    class Watch(Callback):
        def on_start(self, run):
            run.updater.embedder.backbone.layers.register_forward_pre_hook(
                lambda module, inputs: sizes.add((module.training, *inputs[0].shape[2:]))
            )

    train(with_(recipe, "data", crop_size=16), tmp_path / "run", callbacks=[Watch()])
    assert sizes == {(True, 16, 16), (False, 24, 24)}
    assert Embedder.load(tmp_path / "run" / "embedder").preprocessing.crop == (24, 24)


@pytest.mark.parametrize("leftovers", [[], ["environment.json"], [".environment.json.7.part"]])
def test_a_run_killed_before_it_began_begins_again(recipe, tmp_path, leftovers):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in leftovers:
        (tmp_path / "run" / name).write_text("{}")
    train(recipe, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["seed"] == 0


def test_training_learns_unseen_classes(images, cache, tmp_path):
    recipe = make_recipe(images, cache, training={"epochs": 12}, evaluation={"held_out": 0.4})
    results = train(recipe, tmp_path / "run")
    history = RunFolder(tmp_path / "run").history()
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert results["selected"]["held_out"]["recall@1"] > 0.8


def test_the_same_seed_gives_the_same_run_and_another_does_not(recipe, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(with_(recipe, "training", seed=seed, epochs=2), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    a, c = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    assert any(not torch.equal(a[key], c[key]) for key in a)


def killed_at(step, recipe, folder):
    """Train until after a step, and no further."""
    with pytest.raises(SystemError):
        train(recipe, folder, callbacks=[OnStep(step, lambda: fail(SystemError("killed")))])


@pytest.mark.parametrize("stop_at", [1, 5, 11])
def test_a_run_killed_anywhere_continues_bit_for_bit(recipe, tmp_path, stop_at):
    """Killed between any two steps: nothing after the last checkpoint is kept, nothing is lost."""
    recipe = with_(recipe, "training", checkpoint_steps=2, ema=0.9)
    train(recipe, tmp_path / "whole")
    killed_at(stop_at, recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@contextmanager
def killed_at_call(number, monkeypatch, *names):
    """Fail at the n-th call of functions of `os`; the list it gives says whether it did."""
    calls, failed = itertools.count(1), []

    def failing(function):
        def call(*args, **options):
            if next(calls) == number:
                failed.append(number)
                raise SystemError("killed")
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, failing(getattr(os, name)))
        try:
            yield failed
        except SystemError:
            assert failed


def test_a_run_killed_at_any_write_continues_bit_for_bit(recipe, tmp_path, monkeypatch):
    """Also between a line of metrics.jsonl, the best checkpoint, the last one and the results."""
    recipe = recipe.override({"training": {"epochs": 2, "checkpoint_epochs": 2}})
    train(recipe, tmp_path / "whole")
    for number in itertools.count(1):
        with killed_at_call(number, monkeypatch, "replace") as killed:
            train(recipe, tmp_path / f"cut{number}")
        if not killed:
            break
        train(recipe, tmp_path / f"cut{number}")
        assert_same_run(tmp_path / "whole", tmp_path / f"cut{number}")
    assert number > 7, "recipe, environment, checkpoints, embedder, results"


def test_starting_over_killed_anywhere_mixes_no_runs(recipe, tmp_path, monkeypatch):
    recipe = with_(recipe, "training", epochs=1)
    changed = with_(recipe, "optimizer", lr=0.5)
    train(changed, tmp_path / "whole")
    train(recipe, tmp_path / "old")
    for number in itertools.count(1):
        out = tmp_path / f"cut{number}"
        shutil.copytree(tmp_path / "old", out)
        with killed_at_call(number, monkeypatch, "unlink", "rmdir") as killed:
            train(changed, out, resume=False)
        assert killed
        folder = RunFolder(out)
        if folder.recipe.exists() and Recipe.load(folder.recipe).optimizer == changed.optimizer:
            break  # begun anew
        if folder.last.exists():  # what is left of the old one can be continued
            with pytest.raises(RunError, match="started with another recipe"):
                train(changed, out)
            train(recipe, out)
            assert_same_run(tmp_path / "old", out)
        else:
            train(changed, out)
            assert_same_run(tmp_path / "whole", out)
    assert number > 6


def test_a_plateau_is_remembered_over_a_restart(recipe, tmp_path):
    # One held-out class cannot be confused with another: no epoch is better than the first.
    recipe = recipe.override(
        {
            "schedule": {"name": "plateau", "patience": 1},
            "training.epochs": 6,
            "evaluation.held_out": 0.1,
        }
    )
    results = train(recipe, tmp_path / "whole")
    assert results["drops"] == [3, 5]
    killed_at(5 * 4, recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


SCRIPT = """
import sys, time
from pathlib import Path
import torch
from proximetry.training import Callback, Recipe, train
torch.set_num_threads(1)

class Wait(Callback):
    def on_step_end(self, run, loss):
        if run.state.step == int(sys.argv[3]):
            Path(sys.argv[2], "..", "waiting").touch()
            while Path(sys.argv[2], "..", "hold").exists():
                time.sleep(0.01)

train(Recipe.load(sys.argv[1]), sys.argv[2], callbacks=[Wait()])
"""


def start_and_wait(recipe, home, step):
    """Train in another process; return it when it has made a step and waits there."""
    recipe.save(home / "recipe.yaml")
    (home / "hold").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, home / "recipe.yaml", home / "run", str(step)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while not (home / "waiting").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process


@pytest.mark.slow
def test_a_process_killed_with_sigkill_continues_bit_for_bit(recipe, tmp_path):
    recipe = with_(recipe, "training", epochs=4, checkpoint_steps=2)
    process = start_and_wait(recipe, tmp_path, 7)
    process.kill()
    process.wait()
    assert torch.get_num_threads() == 1
    assert state_of(RunFolder(tmp_path / "run").last)["state"]["step"] == 6
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves(recipe, tmp_path, number):
    recipe = with_(recipe, "training", epochs=200)
    process = start_and_wait(recipe, tmp_path, 5)
    process.send_signal(number)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate()
    assert "Stopped: stopped after step" in errors
    state = state_of(RunFolder(tmp_path / "run").last)["state"]
    assert f"stopped after step {state['step']}" in errors
    with pytest.raises(RunError, match=r"training\.epochs 200 → 1"):
        train(with_(recipe, "training", epochs=1), tmp_path / "run")


@pytest.mark.slow
def test_a_run_can_follow_its_parent(recipe, tmp_path, monkeypatch):
    """With PROXIMETRY_FOLLOW_PARENT it stops and saves when the process that started it is gone."""
    code = (
        "import os, subprocess, sys;"
        "os.environ['PROXIMETRY_FOLLOW_PARENT'] = str(os.getpid());"
        "child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]);"
        "print(child.pid, flush=True); child.wait()"
    )
    recipe = with_(recipe, "training", epochs=200)
    recipe.save(tmp_path / "recipe.yaml")
    (tmp_path / "hold").touch()
    parent = subprocess.Popen(
        [sys.executable, "-c", code, SCRIPT, tmp_path / "recipe.yaml", tmp_path / "run", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    while not (tmp_path / "waiting").exists():
        assert parent.poll() is None
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    (tmp_path / "hold").unlink()
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 600)
    folder = RunFolder(tmp_path / "run")
    folder.acquire()  # which waits for the run to leave
    folder.release()
    assert state_of(folder.last)["state"]["step"] in (5, 6)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_stopping_is_an_exception_that_says_how_to_go_on(recipe, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match=r"stopped after step 4, saved in .*continues it"):
        train(recipe, tmp_path / "run", callbacks=[OnStep(4, interrupt)])
    assert signal.getsignal(signal.SIGINT) is handler
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_complete_run_returns_its_results_at_once(recipe, tmp_path):
    first = train(recipe, tmp_path / "run")
    steps = []
    again = train(recipe, tmp_path / "run", callbacks=[OnStep(1, lambda: steps.append(1))])
    assert again == first
    assert steps == []


def test_a_notebook_finds_torch_as_it_left_it(recipe, tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    torch.set_num_threads(2)
    try:
        train(with_(recipe, "training", epochs=1), tmp_path / "run")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.rand(3), expected)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == flags
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    torch.manual_seed(7)
    killed_at(2, recipe, tmp_path / "other")
    assert torch.equal(torch.rand(3), expected)


def test_a_process_group_of_the_callers_stays(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        train(with_(recipe, "training", epochs=1), tmp_path / "run")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains(images, cache, tmp_path, name):
    recipe = make_recipe(images, cache, loss={"name": name}, training={"epochs": 1})
    train(recipe, tmp_path / "run")
    assert RunFolder(tmp_path / "run").history()[0]["loss"] > 0 or name == "proxy_nca"


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"name": "pairs/multi_similarity"}},
        {"loss": {"name": "pairs/contrastive", "settings": {"memory": 32}}},
        {"loss": {"exclusive": 1.0, "center": 0.003, "project": True}},
        {"data": {"sampler": "balanced", "images_per_class": 2}},
        {"data": {"cache": "memory"}},
        {"optimizer": {"name": "adam", "eps": 1.0, "clip_norm": 1.0}},
        {"optimizer": {"name": "sgd", "clip_value": 1.0}},
        {"schedule": {"name": "cosine", "warmup_epochs": 1}},
        {"training": {"precision": "bfloat16", "epochs": 1}},
        {"training": {"ema": 0.99, "epochs": 2}},
        {"model": {"layer_norm": True, "normalize": False, "freeze_batchnorm": True}},
        {"evaluation": {"protocol": "last"}},
    ],
    ids=str,
)
def test_every_option_runs_and_continues_bit_for_bit(images, cache, tmp_path, changes):
    recipe = make_recipe(images, cache, **{"training": {"epochs": 2}, **changes})
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", callbacks=[OnStep(2, interrupt)])
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_accumulation_gives_the_gradient_of_the_whole_batch(images, cache, tmp_path):
    runs = {}
    for parts in (1, 2, 3):
        recipe = make_recipe(
            images,
            cache,
            training={"epochs": 1, "accumulate": parts},
            model={"freeze_batchnorm": True},
            optimizer={"name": "sgd", "lr": 1e-3},
        )
        train(recipe, tmp_path / str(parts))
        runs[parts] = tensors(tmp_path / str(parts))
    for parts in (2, 3):
        for key, value in runs[1].items():
            if key.startswith(("embedder.", "loss.")) and value.is_floating_point():
                torch.testing.assert_close(runs[parts][key], value, rtol=1e-4, atol=1e-6)


def test_warm_up_leaves_the_backbone_alone(images, cache, tmp_path):
    recipe = make_recipe(
        images,
        cache,
        schedule={"warmup_epochs": 2},
        training={"epochs": 3, "keep_checkpoint_every": 1},
    )
    train(recipe, tmp_path / "run")
    epochs = [load_file(RunFolder(tmp_path / "run").of_epoch(e)) for e in (1, 2, 3)]
    weight, head = "embedder.backbone.layers.0.weight", "embedder.head.weight"
    assert torch.equal(epochs[0][weight], epochs[1][weight])
    assert not torch.equal(epochs[1][weight], epochs[2][weight])
    assert not torch.equal(epochs[0][head], epochs[1][head])


def test_frozen_statistics_stay(images, cache, tmp_path):
    recipe = make_recipe(images, cache, model={"freeze_batchnorm": True}, training={"epochs": 1})
    train(recipe, tmp_path / "run")
    mean = tensors(tmp_path / "run")["embedder.backbone.layers.1.running_mean"]
    assert (mean == 0).all()


def test_the_best_epoch_is_the_first_of_equals():
    state = TrainState(torch.zeros(()))
    improved = []
    for value in (0.5, 0.6, 0.4, 0.6, 0.3):
        state.epoch += 1
        improved.append(state.observe(value))
    assert improved == [True, True, False, False, False]
    assert (state.best_epoch, state.best_value, state.stale) == (2, 0.6, 3)


def test_early_stopping_saves_the_selected_epoch(images, cache, tmp_path):
    # One held-out class cannot be confused with another: the first epoch is never beaten.
    recipe = make_recipe(
        images,
        cache,
        training={"epochs": 20, "stop_after": 3},
        evaluation={"held_out": 0.1},
    )
    results = train(recipe, tmp_path / "run")
    assert results["epochs"] == 4
    assert results["selected"]["epoch"] == 1
    saved = Embedder.load(tmp_path / "run" / "embedder").state_dict()
    best, last = tensors(tmp_path / "run", "best"), tensors(tmp_path / "run")
    assert all(torch.equal(value, best[f"embedder.{key}"]) for key, value in saved.items())
    names = [f"embedder.{key}" for key in saved]
    assert any(not torch.equal(best[name], last[name]) for name in names)


def test_two_stages_replay_the_drops_on_all_classes(images, cache, tmp_path):
    recipe = make_recipe(
        images,
        cache,
        training={"two_stages": True, "epochs": 5},
        schedule={"name": "plateau", "patience": 1, "factor": 0.1},
        loss={"name": "proxy_nca_plus_plus"},
    )
    results = train(recipe, tmp_path / "run")
    first = json.loads((tmp_path / "run" / "first-stage" / "results.json").read_text())
    second = Recipe.load(tmp_path / "run" / "second-stage" / "recipe.yaml")
    assert second.training.epochs == first["selected"]["epoch"] == results["epochs"]
    assert second.schedule.name == "milestones"
    assert all(drop in first["drops"] for drop in second.schedule.at)
    stages = [
        Embedder.load(tmp_path / "run" / stage / "embedder").class_names
        for stage in ("first-stage", "second-stage")
    ]
    assert [len(names) for names in stages] == [4, 8]
    assert results["first_stage"] == first["selected"]
    # A first stage that begins anew makes the second one worthless.
    stop = OnStep(1, lambda: fail(SystemError("killed")))
    with pytest.raises(SystemError):
        train(recipe, tmp_path / "run", resume=False, callbacks=[stop])
    assert not (tmp_path / "run" / "second-stage" / "results.json").exists()
    assert train(recipe, tmp_path / "run")["last"] == results["last"]


def test_the_papers_protocol_chooses_on_the_test_set_and_says_so(images, cache, tmp_path):
    rows = [f"{p.relative_to(images)},{p.parent.name}" for p in sorted(images.rglob("*.png"))]
    lines = [f"{row},{'train' if row < 'class05' else 'test'}" for row in rows]
    table = images / "table.csv"
    table.write_text("path,label,split\n" + "\n".join(lines) + "\n")
    for protocol in ("paper", "held_out", "last"):
        recipe = make_recipe(
            images,
            cache,
            data={"dataset": "csv", "root": str(table)},
            evaluation={"protocol": protocol, "held_out": 0.4},
            training={"epochs": 2},
        )
        results = train(recipe, tmp_path / protocol)
        assert results["protocol"] == protocol
        assert "test" in results["selected"]
        history = RunFolder(tmp_path / protocol).history()
        assert ("test" in history[0]) == (protocol == "paper")
        assert ("held_out" in history[0]) == (protocol == "held_out")
        saved = Embedder.load(tmp_path / protocol / "embedder")
        assert saved.metrics["protocol"] == protocol
        assert len(saved.class_names) == (3 if protocol == "held_out" else 5)
    table.unlink()


def test_a_loss_that_is_not_finite_stops_the_run(recipe, tmp_path):
    class Poison(Callback):
        def on_step_end(self, run, loss):
            if run.state.step == 5:
                run.updater.objective.proxies.weight.data.fill_(torch.nan)

    with pytest.raises(RunError, match=r"not finite at step 5 \(epoch 2\).*class0\d.*last good"):
        train(recipe, tmp_path / "run", callbacks=[Poison()])
    state = state_of(RunFolder(tmp_path / "run").last)
    assert state["state"]["epoch"] == 1
    for tensor in tensors(tmp_path / "run").values():
        assert torch.isfinite(tensor.double()).all()


def test_folders_that_cannot_be_used(recipe, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="not empty and holds no run"):
        train(recipe, tmp_path / "mine")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=r"file is a file; choose"):
            train(recipe, out)
    with pytest.raises(RunError, match=r"file is a file; choose"):
        train(with_(recipe, "training", two_stages=True), tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(RunError, match="cannot be written to"):
            train(recipe, tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    train(with_(recipe, "training", epochs=1), tmp_path / "run")
    changed = with_(with_(recipe, "training", epochs=1), "optimizer", lr=0.5)
    with pytest.raises(RunError, match=r"optimizer.lr 0.001 → 0.5.*--fresh"):
        train(changed, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train(changed, tmp_path / "run", resume=False)
    assert Recipe.load(tmp_path / "run" / "recipe.yaml").optimizer == changed.optimizer
    assert len(RunFolder(tmp_path / "run").history()) == 1
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    # Checkpoints and results whose recipe is gone are not known to be of this one.
    (tmp_path / "run" / "recipe.yaml").unlink()
    with pytest.raises(RunError, match="not empty and holds no run"):
        train(changed, tmp_path / "run")


def test_two_runs_do_not_share_a_folder(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.1)
    folder = RunFolder(tmp_path / "run")
    folder.acquire()
    with pytest.raises(RunError, match="another process is training in"):
        train(recipe, tmp_path / "run")
    folder.release()
    train(with_(recipe, "training", epochs=1), tmp_path / "run")


MISTAKES = [
    ({"data": {"root": None}}, "data.root is missing"),
    ({"data": {"root": "nowhere"}}, "nowhere"),
    ({"data": {"batch_size": 16, "sampler": "balanced", "images_per_class": 1}}, "16"),
    ({"loss": {"name": "pairs/triplet", "exclusive": 1.0}}, "need proxies"),
    ({"evaluation": {"protocol": "paper"}}, "test set, but there is none"),
    ({"model": {"backbone": "small_convnett"}}, "small_convnet"),
    ({"model": {"weights": "nowhere.pth"}}, "nowhere.pth"),
    ({"training": {"wandb": "birds"}}, "wandb"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=str)
def test_a_mistake_is_one_sentence_and_leaves_no_folder(
    images, cache, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises((ValueError, ImportError, OSError), match=message):
        train(make_recipe(images, cache, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_corrected_command_runs_in_the_same_folder(recipe, tmp_path):
    """Also where the first one got as far as its recipe: nothing was trained yet."""
    out = tmp_path / "run"
    killed_at(1, recipe, out)
    assert (out / "recipe.yaml").exists()
    corrected = recipe.override({"optimizer.lr": 2e-3, "training.epochs": 1})
    train(corrected, out)
    assert Recipe.load(out / "recipe.yaml").optimizer == corrected.optimizer


def test_broken_checkpoints_are_named(recipe, tmp_path):
    train(with_(recipe, "training", epochs=1), tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    file = tmp_path / "run" / "checkpoints" / "last.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"last.safetensors is no readable checkpoint"):
        train(with_(recipe, "training", epochs=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "none.safetensors", {})


def test_bad_images_stop_the_run_or_are_left_out_and_named(images, cache, tmp_path):
    import shutil

    copy = tmp_path / "images"
    shutil.copytree(images, copy)
    (copy / "class00" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"broken.png"):
        train(make_recipe(copy, cache, training={"epochs": 1}), tmp_path / "run")
    recipe = make_recipe(copy, cache, training={"epochs": 1}, data={"bad_images": "skip"})
    results = train(recipe, tmp_path / "run2")
    assert any("broken.png" in note for note in results["notes"])


def test_the_optimisers_state_keeps_the_memory_format_of_its_parameter(tmp_path):
    """A fused optimiser goes through memory: state laid out otherwise would be another's."""
    layer = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    before = optimizer.state[layer.weight]["exp_avg"].clone()
    save_checkpoint(tmp_path / "c.safetensors", {"layer": layer}, optimizer, {})
    fresh = torch.optim.AdamW(layer.parameters())
    load_checkpoint(tmp_path / "c.safetensors", {"layer": layer}, fresh)
    after = fresh.state[layer.weight]["exp_avg"]
    assert after.stride() == layer.weight.stride()
    assert torch.equal(after, before)


def test_a_run_continues_when_its_data_have_moved(recipe, images, tmp_path):
    train(recipe, tmp_path / "whole")
    killed_at(6, recipe, tmp_path / "cut")
    shutil.copytree(images, tmp_path / "elsewhere")
    moved = with_(recipe, "data", root=str(tmp_path / "elsewhere"), cache_dir=str(tmp_path / "c"))
    train(moved, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_dropout_drops_while_training_alone(recipe, tmp_path):
    for name, share in (("none", 0.0), ("some", 0.5), ("again", 0.5)):
        train(with_(recipe, "model", dropout=share), tmp_path / name)
    assert_same_run(tmp_path / "some", tmp_path / "again")
    none, some = (RunFolder(tmp_path / name).history()[0]["loss"] for name in ("none", "some"))
    assert none != some
    embedder = Embedder.load(tmp_path / "some" / "embedder")
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    assert torch.equal(embedder.embed(pixels), embedder.embed(pixels))
