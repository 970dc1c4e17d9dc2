"""Training learns, resumes bit for bit, stops on request, and reports errors."""

import itertools
import json
import os
import shutil
import signal
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from proximetry._util import files
from proximetry.losses import LOSSES
from proximetry.models import Embedder
from proximetry.training import Callback, Recipe, RunError, RunFolder, Stopped, run_folder, train
from proximetry.training.checkpoint import load_checkpoint, save_checkpoint
from proximetry.training.dry_run import dry_run
from proximetry.training.evaluator import Evaluator
from proximetry.training.metrics_table import WITH_DISTRACTORS
from proximetry.training.reporting import PlainDisplay
from proximetry.training.run import TrainState
from proximetry.training.run_folder import FolderError
from tests.processes import Process
from tests.training.runs import (
    OnStep,
    assert_same_run,
    fail,
    killed_at,
    set_selection_values,
    state_of,
    tensors,
)
from tests.training.tiny import make_recipe, with_


def test_run_folder_contents(recipe, tmp_path):
    out = tmp_path / "run"
    recipe = with_(recipe, "training", keep_checkpoint_every=2)
    results = train(recipe, out, device="cpu")
    assert results["protocol"] == "held_out"
    assert results["last"]["epoch"] == 3
    assert "test" not in results["selected"]
    training = {"precision": "float32", "cuda_graph": False, "checkpoint_epochs": 1}
    recipe = recipe.override({"data.cache": "pixels", "training": training})
    assert Recipe.load(out / "recipe.yaml") == recipe
    environment = json.loads((out / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["seed"] == 0
    history = RunFolder(out).history()
    assert [line["epoch"] for line in history] == [0, 1, 2, 3]
    assert [line["lr"] for line in history[1:]] == [1e-3, 1e-3, 5e-4]
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["best.safetensors", "epoch-0002.safetensors", "last.safetensors"]
    embedder = Embedder.load(out / "embedder")
    assert embedder.recipe == recipe.without_paths().to_dict()
    assert embedder.metrics["protocol"] == "held_out"
    assert len(embedder.class_names) == 9
    assert not list(out.rglob("*.part"))


def test_watch_test_does_not_change_training(images, cache, tmp_path):
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
    history = RunFolder(tmp_path / "watched").history()[1:]
    assert ["test" in line for line in history] == [False, False, True, True]
    assert history[-1]["test"] == results["last"]["test"]
    assert results["selected"]["test"] == results["last"]["test"]
    assert not (tmp_path / "watched" / "checkpoints" / "best.safetensors").exists()
    train(with_(base, "evaluation", watch_test=False), tmp_path / "blind")
    watched, blind = tensors(tmp_path / "watched"), tensors(tmp_path / "blind")
    assert all(torch.equal(watched[key], blind[key]) for key in watched)


def test_checkpoint_epochs(recipe, tmp_path):
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


def test_cuda_graph_has_no_effect_on_the_cpu(recipe, tmp_path):
    train(recipe, tmp_path / "plain", device="cpu")
    train(with_(recipe, "training", cuda_graph=True), tmp_path / "graphed", device="cpu")
    assert_same_run(tmp_path / "plain", tmp_path / "graphed")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "loss",
    [
        {"name": "proxy_anchor"},
        {"name": "sphereface"},  # counts its steps
        {"name": "adaface"},  # running statistics
        {"name": "curricularface"},  # adjusted negatives, streamed
        {"name": "elasticface"},  # random margins
        {"name": "cosface", "exclusive": 0.1},  # only the network is in the graph
    ],
    ids=lambda loss: loss["name"],
)
def test_cuda_graph_trains_like_eager_mode(images, cache, tmp_path, loss):
    recipe = make_recipe(
        images,
        cache,
        loss=loss,
        data={"cache": "gpu"},
        model={"backbone": "tf_efficientnet_lite0", "freeze_batchnorm": True, "image_size": 64},
        schedule={"freeze_backbone_epochs": 1},
        evaluation={"protocol": "last"},
        training={"precision": "float32"},
    )
    losses = {}
    for name, graph in (("plain", False), ("graphed", True), ("again", True)):
        train(with_(recipe, "training", cuda_graph=graph), tmp_path / name)
        losses[name] = [line["loss"] for line in RunFolder(tmp_path / name).history()]
    assert losses["again"] == losses["graphed"]
    # Kernels in the graph round differently, which training amplifies.
    assert losses["graphed"][0] == pytest.approx(losses["plain"][0], rel=1e-5)
    assert losses["graphed"] == pytest.approx(losses["plain"], rel=1e-2)


def test_out_of_memory_error_names_remedies(recipe, tmp_path):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    with pytest.raises(RunError, match=r"not enough memory.*training\.accumulate"):
        train(recipe, tmp_path / "run", callbacks=[OnStep(1, lambda: fail(error))])


def test_training_crop_size_differs_from_evaluation(recipe, tmp_path):
    sizes = set()

    class Watch(Callback):
        def on_start(self, run):
            run.updater.embedder.backbone.layers.register_forward_pre_hook(
                lambda module, inputs: sizes.add((module.training, *inputs[0].shape[2:]))
            )

    train(with_(recipe, "data", crop_size=16), tmp_path / "run", callbacks=[Watch()])
    assert sizes == {(True, 16, 16), (False, 24, 24)}
    assert Embedder.load(tmp_path / "run" / "embedder").preprocessing.crop == (24, 24)


HALF_WRITTEN = f".proximetry-{32 * 'b'}-environment.json.part"


@pytest.mark.parametrize("leftovers", [[], ["environment.json"], [HALF_WRITTEN]])
def test_run_killed_before_its_recipe_starts_again(recipe, tmp_path, leftovers):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in leftovers:
        (tmp_path / "run" / name).write_text("{}")
    train(recipe, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["seed"] == 0
    assert not (tmp_path / "run" / HALF_WRITTEN).exists()


def test_training_learns_unseen_classes(images, cache, tmp_path):
    recipe = make_recipe(images, cache, training={"epochs": 12}, evaluation={"held_out": 0.4})
    results = train(recipe, tmp_path / "run")
    history = RunFolder(tmp_path / "run").history()
    assert history[-1]["loss"] < 0.5 * history[1]["loss"]
    assert results["selected"]["held_out"]["recall@1"] > 0.8
    assert (
        results["selected"]["held_out"]["map@r"] > 0.1 + results["untrained"]["held_out"]["map@r"]
    )


def test_seed_determines_the_run(recipe, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(with_(recipe, "training", seed=seed, epochs=2), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    a, c = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    assert any(not torch.equal(a[key], c[key]) for key in a)


def test_resume_is_bit_exact(recipe, images, tmp_path):
    """Also with moved images, other checkpoint intervals and another cache."""
    recipe = with_(recipe, "training", checkpoint_steps=2, ema=0.9)
    train(recipe, tmp_path / "whole")
    moved = shutil.copytree(images, tmp_path / "elsewhere")
    paths = {"data.root": str(moved), "data.cache_dir": str(tmp_path / "c"), "data.cache": "none"}
    for stop_at, changes in ((1, {}), (5, paths), (11, {"training.checkpoint_steps": 1})):
        out = tmp_path / f"cut{stop_at}"
        killed_at(stop_at, recipe, out)
        train(recipe.override(changes), out)
        assert_same_run(tmp_path / "whole", out)
    recorded = Recipe.load(out / "recipe.yaml")
    assert recorded.training.checkpoint_steps == 1
    steps = []
    results = train(recipe, out, callbacks=[OnStep(1, lambda: steps.append(1))])
    assert (results["epochs"], steps) == (3, []), "a complete run returns its results"


def quick(recipe):
    """A recipe for tests with many runs."""
    return recipe.override({"data.batch_size": 18, "evaluation.untrained": False})


@contextmanager
def killed_at_call(number, monkeypatch, *names):
    """Fail at the n-th call of functions of `os`; yield a list that is empty if none failed."""
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


def test_run_killed_at_any_write_resumes_bit_exact(recipe, tmp_path, monkeypatch):
    """Also between writing metrics.jsonl, the best and the last checkpoint, and the results."""
    recipe = quick(recipe).override({"training": {"epochs": 2, "checkpoint_epochs": 2}})
    train(recipe, tmp_path / "whole")
    for number in itertools.count(1):
        with killed_at_call(number, monkeypatch, "replace") as killed:
            train(recipe, tmp_path / f"cut{number}")
        if not killed:
            break
        evaluated = [line["epoch"] for line in RunFolder(tmp_path / f"cut{number}").history()]
        if evaluated and evaluated[-1] > 0:  # the embedder so far is usable
            Embedder.load(tmp_path / f"cut{number}" / "embedder")
        train(recipe, tmp_path / f"cut{number}")
        assert_same_run(tmp_path / "whole", tmp_path / f"cut{number}")
    assert number > 7, "recipe, environment, checkpoints, embedder, results"


def test_interrupted_fresh_start_mixes_no_runs(recipe, tmp_path, monkeypatch):
    recipe = with_(quick(recipe), "training", epochs=1)
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
            break  # started over
        if folder.last.exists():  # the rest of the old run can be resumed
            with pytest.raises(RunError, match="started with a different recipe"):
                train(changed, out)
            train(recipe, out)
            assert_same_run(tmp_path / "old", out)
        else:
            train(changed, out)
            assert_same_run(tmp_path / "whole", out)
    assert number > 6


def test_plateau_schedule_resumes(recipe, tmp_path, monkeypatch):
    set_selection_values(monkeypatch, [0.5, 0.4, 0.5, 0.3, 0.5, 0.2])  # a tie is no improvement
    recipe = recipe.override({"schedule": {"name": "plateau", "patience": 1}, "training.epochs": 6})
    results = train(recipe, tmp_path / "whole")
    assert results["drops"] == [3, 5]
    killed_at(5 * 4, recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


SCRIPT = """
import sys, time
from pathlib import Path
from proximetry.training import Callback, Recipe, train

class Wait(Callback):
    def on_step_end(self, run, loss):
        if run.state.step == int(sys.argv[3]):
            Path(sys.argv[2], "..", "waiting").touch()
            while Path(sys.argv[2], "..", "hold").exists():
                time.sleep(0.01)

train(Recipe.load(sys.argv[1]), sys.argv[2], callbacks=[Wait()])
"""
CHILD = """
import os
os.environ["PROXIMETRY_FOLLOW_PARENT"] = str(os.getpid())
if os.fork():
    os.wait()
    raise SystemExit
"""


def start_and_wait(server, recipe, home, step, code=SCRIPT):
    """Train in another process; return it when it waits after a step."""
    recipe.save(home / "recipe.yaml")
    (home / "hold").touch()
    process = Process(server, home / "log", code, home / "recipe.yaml", home / "run", step)
    process.until((home / "waiting").exists)
    return process


@pytest.mark.slow
def test_sigkill_resumes_bit_exact(server, recipe, tmp_path, monkeypatch):
    recipe = with_(recipe, "training", epochs=4, checkpoint_steps=2)
    process = start_and_wait(server, recipe, tmp_path, 7)
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.1)
    us = f"process {process.pid} on {socket.gethostname()}"
    with pytest.raises(RunError, match=rf"^{us} is training in"):
        train(recipe, tmp_path / "run")
    process.kill()
    assert torch.get_num_threads() == 1
    assert state_of(RunFolder(tmp_path / "run").last)["state"]["step"] == 6
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_a_checkpoint(server, recipe, tmp_path, number):
    recipe = with_(recipe, "training", epochs=200)
    process = start_and_wait(server, recipe, tmp_path, 5)
    process.send(number)
    (tmp_path / "hold").unlink()
    assert process.ended() == 1
    assert "Stopped: stopped after step" in process.output()
    state = state_of(RunFolder(tmp_path / "run").last)["state"]
    assert f"stopped after step {state['step']}" in process.output()
    with pytest.raises(RunError, match=r"epoch 2, past training\.epochs 1"):
        train(with_(recipe, "training", epochs=1), tmp_path / "run")


@pytest.mark.slow
def test_run_stops_when_its_parent_exits(server, recipe, tmp_path, monkeypatch):
    """With PROXIMETRY_FOLLOW_PARENT the run stops and saves when the parent process exits."""
    recipe = with_(recipe, "training", epochs=200)
    parent = start_and_wait(server, recipe, tmp_path, 5, CHILD + SCRIPT)
    parent.kill()
    (tmp_path / "hold").unlink()
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 600)
    folder = RunFolder(tmp_path / "run")
    folder.acquire()  # waits for the run to exit
    folder.release()
    assert state_of(folder.last)["state"]["step"] in (5, 6)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_sigint_raises_stopped_and_run_resumes(recipe, tmp_path, capsys):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match=r"stopped after step 4, saved in .*resumes it"):
        train(recipe, tmp_path / "run", callbacks=[OnStep(4, interrupt)])
    with pytest.raises(Stopped, match="after step 6"):
        train(recipe, tmp_path / "run", callbacks=[OnStep(6, interrupt)])
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(Stopped, match=r"without --fresh"):
        train(
            recipe,
            tmp_path / "run",
            resume=False,
            display=PlainDisplay(),
            callbacks=[OnStep(2, interrupt)],
        )
    assert f"removing the unfinished run in {tmp_path / 'run'}:" in capsys.readouterr().out
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_embedder_is_saved_ten_times_without_evaluation(recipe, tmp_path):
    last = with_(recipe, "evaluation", protocol="last")
    train(with_(last, "training", epochs=20), tmp_path / "run")
    lines = RunFolder(tmp_path / "run").history()
    saved = [line["epoch"] for line in lines if "evaluation_seconds" in line]
    assert saved == [*range(2, 21, 2)]


def test_torch_state_is_restored(recipe, tmp_path, monkeypatch):
    cudnn = torch.backends.cudnn

    def state():
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        flags = cudnn.deterministic, cudnn.benchmark
        return torch.get_num_threads(), flags, handlers, torch.get_rng_state().tolist()

    def change():
        torch.set_num_threads(3)
        cudnn.deterministic = cudnn.benchmark = False

    recipe, threads = with_(recipe, "training", epochs=1), torch.get_num_threads()
    monkeypatch.setattr(cudnn, "deterministic", True)
    monkeypatch.setattr(cudnn, "benchmark", True)
    torch.manual_seed(7)
    torch.set_num_threads(2)
    try:
        before = state()
        train(recipe, tmp_path / "run", callbacks=[OnStep(1, change)])
        assert state() == before
        killed_at(2, recipe, tmp_path / "failed", [OnStep(1, change)])
        assert state() == before
    finally:
        torch.set_num_threads(threads)


def test_process_group_of_the_caller_is_not_destroyed(recipe, tmp_path, monkeypatch):
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
    class Watch(Callback):
        def on_start(self, run):
            self.initial = run.updater.objective.proxies.weight.detach().clone()

    watch = Watch()
    recipe = make_recipe(
        images, cache, loss={"name": name}, training={"epochs": 2}, evaluation={"untrained": False}
    )
    train(recipe, tmp_path / "run", device="cpu", callbacks=[watch])
    first, last = (line["loss"] for line in RunFolder(tmp_path / "run").history())
    assert last < 0.97 * first
    trained = tensors(tmp_path / "run")["loss.loss.proxies.weight"]
    assert (trained - watch.initial).abs().amax(-1).min() > 1e-4, "every proxy moves"


def test_moving_average_equals_float64_mean(recipe, tmp_path):
    """An average of the weights that starts as a plain mean; buffers are those of the last step."""

    class Mean(Callback):
        def on_start(self, run):
            embedder = run.updater.embedder
            self.means = {k: p.detach().double() for k, p in embedder.named_parameters()}

        def on_step_end(self, run, loss):
            step = run.state.step - 1
            decay = min(0.8, (1 + step) / (10 + step))
            for name, parameter in run.updater.embedder.named_parameters():
                self.means[name] = decay * self.means[name] + (1 - decay) * parameter.double()

    mean = Mean()
    recipe = recipe.override({"training.ema": 0.8, "training.epochs": 10})
    recipe = recipe.override({"schedule.freeze_backbone_epochs": 1})
    train(recipe, tmp_path / "run", device="cpu", callbacks=[mean])
    saved = tensors(tmp_path / "run")
    for name, value in Embedder.load(tmp_path / "run" / "embedder").state_dict().items():
        average, last = saved[f"average.{name}"], saved[f"embedder.{name}"]
        if name not in mean.means:
            assert torch.equal(average, last)
            continue
        torch.testing.assert_close(
            average.double(), mean.means[name].detach(), rtol=1e-5, atol=1e-7
        )
        assert value.shape == average.shape


@pytest.mark.parametrize(
    "changes",
    [
        {
            "loss": {"name": "pairs/multi_similarity"},
            "optimizer": {"clip_value": 10.0, "clip_norm": 1.0},
        },
        {"loss": {"name": "pairs/contrastive", "settings": {"memory": 32}}},
        {"loss": {"exclusive": 1.0, "angular_center": 0.003, "optimization": "projected"}},
        {"data": {"sampler": "balanced", "images_per_class": 2}},
        {"data": {"cache": "none"}},
        {"optimizer": {"name": "adam", "eps": 1.0, "clip_norm": 1.0}},
        {"optimizer": {"name": "sgd", "clip_value": 1.0}},
        {"schedule": {"name": "cosine", "freeze_backbone_epochs": 1}},
        {"training": {"precision": "bfloat16", "epochs": 1}},
        {"training": {"ema": 0.99, "epochs": 2}},
        {"training": {"accumulate": 3, "ema": 0.9, "epochs": 2}, "model": {"dropout": 0.3}},
        {"model": {"layer_norm": True, "normalize": False, "freeze_batchnorm": True}},
        {"model": {"bits": 16, "dim": 16}},
        {"model": {"dim": 12, "pca_dim": 5, "whitening": 0.5}},
        {"model": {"backbone": "test_resnet", "drop_path": 0.5}, "training": {"epochs": 1}},
        {"evaluation": {"protocol": "last"}},
        {"loss": {"settings": {"sampled_negatives": 0.6}}, "data": {"batch_size": 3}},
    ],
    ids=str,
)
def test_options_resume_bit_exact(images, cache, tmp_path, changes):
    recipe = make_recipe(images, cache, **{"training": {"epochs": 2}, **changes})
    recipe = with_(recipe, "training", checkpoint_steps=2)
    train(recipe, tmp_path / "whole")
    killed_at(4 * recipe.training.epochs - 1, recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_accumulate_equals_whole_batch(images, cache, tmp_path):
    runs = {}
    for parts in (1, 2, 3):
        recipe = make_recipe(
            images,
            cache,
            training={"epochs": 1, "accumulate": parts},
            model={"freeze_batchnorm": True},
            optimizer={"name": "sgd", "lr": 1e-3},
        )
        train(recipe, tmp_path / str(parts), device="cpu")
        runs[parts] = tensors(tmp_path / str(parts))
    for parts in (2, 3):
        for key, value in runs[1].items():
            if key.startswith(("embedder.", "loss.")) and value.is_floating_point():
                torch.testing.assert_close(runs[parts][key], value, rtol=1e-4, atol=1e-6)


def test_accumulate_drops_the_same_units_in_both_passes(recipe, tmp_path):
    embedded = []

    class Watch(Callback):
        def on_start(self, run):
            run.updater.network.register_forward_hook(lambda *call: embedded.append(call[-1]))

    recipe = recipe.override({"training": {"accumulate": 2, "epochs": 1}, "model.dropout": 0.5})
    train(recipe, tmp_path / "run", callbacks=[Watch()])
    assert torch.equal(torch.cat(embedded[:2]), torch.cat(embedded[2:4]))


def test_freeze_backbone_epochs(images, cache, tmp_path):
    recipe = make_recipe(
        images,
        cache,
        schedule={"freeze_backbone_epochs": 2},
        training={"epochs": 3, "keep_checkpoint_every": 1},
    )
    train(recipe, tmp_path / "run")
    epochs = [load_file(RunFolder(tmp_path / "run").epoch_checkpoint(e)) for e in (1, 2, 3)]
    weight, head = "embedder.backbone.layers.0.weight", "embedder.head.weight"
    assert torch.equal(epochs[0][weight], epochs[1][weight])
    assert not torch.equal(epochs[1][weight], epochs[2][weight])
    assert not torch.equal(epochs[0][head], epochs[1][head])


def test_last_of_equal_epochs_is_selected():
    state = TrainState(torch.zeros(()), torch.full((), -1))
    improved = []
    for value in (0.5, 0.6, 0.4, 0.6, 0.3):  # a tie is selected but is no improvement
        state.epoch += 1
        improved.append(state.observe(value))
    assert improved == [True, True, False, False, False]
    assert (state.best_epoch, state.best_value, state.stale) == (4, 0.6, 3)


def test_early_stopping_saves_the_selected_epoch(images, cache, tmp_path, monkeypatch, capsys):
    set_selection_values(monkeypatch, [0.9, 0.8, 0.7, 0.6])
    recipe = make_recipe(images, cache, training={"epochs": 20, "stop_after": 3})
    results = train(recipe, tmp_path / "run", display=PlainDisplay())
    assert results["epochs"] == 4
    assert "no improvement of held-out MAP@R" in results["stopped_early"]
    assert results["stopped_early"] in capsys.readouterr().out.splitlines()
    assert results["selected"]["epoch"] == 1
    saved = Embedder.load(tmp_path / "run" / "embedder", device="cpu").state_dict()
    best, last = tensors(tmp_path / "run", "best"), tensors(tmp_path / "run")
    assert all(torch.equal(value, best[f"embedder.{key}"]) for key, value in saved.items())
    names = [f"embedder.{key}" for key in saved]
    assert any(not torch.equal(best[name], last[name]) for name in names)


def test_two_stages_repeat_learning_rate_drops(images, cache, tmp_path):
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
    assert [len(names) for names in stages] == [6, 12]
    assert results["first_stage"] == first["selected"]
    for begin in (train, dry_run):
        with pytest.raises(RunError, match=r"cannot be trained longer.*--fresh"):
            begin(with_(recipe, "training", epochs=9), tmp_path / "run")
        with pytest.raises(FolderError, match="without two stages"):
            begin(recipe, tmp_path / "run" / "second-stage")
    # A first stage that starts over invalidates the second one.
    killed_at(1, recipe, tmp_path / "run", resume=False)
    assert not (tmp_path / "run" / "second-stage" / "results.json").exists()
    assert train(recipe, tmp_path / "run")["last"] == results["last"]


def test_evaluation_protocols(images, cache, tmp_path):
    rows = [f"{p.relative_to(images)},{p.parent.name}" for p in sorted(images.rglob("*.png"))]
    lines = [f"{row},{'train' if row < 'class10' else 'test'}" for row in rows]
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
        unseen = with_(recipe, "evaluation", final_test=False)
        scores = train(unseen, tmp_path / f"{protocol} unseen")["selected"]
        assert ("test" in scores) == (protocol == "paper"), "what selects the epoch is reported"
        history = RunFolder(tmp_path / protocol).history()
        assert ("test" in history[1]) == (protocol == "paper")
        assert ("held_out" in history[1]) == (protocol == "held_out")
        saved = Embedder.load(tmp_path / protocol / "embedder")
        assert saved.metrics["protocol"] == protocol
        assert len(saved.class_names) == (6 if protocol == "held_out" else 10)
    table.unlink()


def test_loss_that_is_not_finite_raises(recipe, tmp_path):
    class Poison(Callback):
        def on_step_end(self, run, loss):
            if run.state.step == 5:
                run.updater.objective.proxies.weight.data.fill_(torch.nan)

    with pytest.raises(RunError, match=r"step 5 \(epoch 2.*class0\d.*last good"):
        train(recipe, tmp_path / "run", callbacks=[Poison()])
    state = state_of(RunFolder(tmp_path / "run").last)
    assert state["state"]["epoch"] == 1
    for tensor in tensors(tmp_path / "run").values():
        assert torch.isfinite(tensor.double()).all()


def test_unusable_run_folders_are_rejected(recipe, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match="file is a file"):
            train(recipe, out)
    with pytest.raises(RunError, match="file is a file"):
        train(with_(recipe, "training", two_stages=True), tmp_path / "file")
    two_stages = with_(recipe, "training", two_stages=True)
    for begin in (train, dry_run):
        with pytest.raises(FolderError, match="is not empty"):
            begin(two_stages, tmp_path / "mine")
    unwritable = [Path("/proc/run")] if sys.platform == "linux" else []  # not even by root
    with monkeypatch.context() as patch:
        denied = PermissionError(13, "Permission denied")
        patch.setattr(files, "TemporaryFile", lambda dir: fail(denied))
        for out in (tmp_path / "new" / "run", *unwritable):
            with pytest.raises(FolderError, match="is not writable"):
                RunFolder(out).check_folder()
    for out in unwritable:
        with pytest.raises(FolderError, match="is not writable"):
            train(recipe, out)
    assert not (tmp_path / "new").exists()
    train(with_(recipe, "training", epochs=1), tmp_path / "run")
    changed = with_(with_(recipe, "training", epochs=1), "optimizer", lr=0.5)
    with pytest.raises(RunError, match=r"optimizer.lr 0.001 → 0.5.*--fresh"):
        train(changed, tmp_path / "run")
    # Checkpoints and results without a recipe may belong to another run.
    (tmp_path / "run" / "recipe.yaml").unlink()
    with pytest.raises(RunError, match="is not empty"):
        train(changed, tmp_path / "run")


def test_run_folder_is_locked(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.1)
    folder = RunFolder(tmp_path / "run")
    folder.acquire()
    us = f"process {os.getpid()} on {socket.gethostname()}"
    messages = []
    display = PlainDisplay()
    display.message = messages.append
    with pytest.raises(RunError, match=f"^{us} is training in"):
        train(recipe, tmp_path / "run", display=display)
    assert messages == [f"waiting up to 0.1 s for {us}, which uses {tmp_path / 'run'}"]
    folder.release()
    train(with_(recipe, "training", epochs=1), tmp_path / "run")


MISTAKES = [
    ({"data": {"root": None}}, "data.root is missing"),
    ({"data": {"root": "nowhere"}}, "nowhere"),
    ({"data": {"batch_size": 16, "sampler": "balanced", "images_per_class": 1}}, "16"),
    ({"loss": {"name": "pairs/triplet", "exclusive": 1.0}}, "needs proxies"),
    ({"evaluation": {"protocol": "paper"}}, "needs a test set"),
    ({"model": {"backbone": "small_convnett"}}, "small_convnet"),
    ({"model": {"weights": "nowhere.pth"}}, "nowhere.pth"),
    ({"training": {"tracker": "wandb"}}, "wandb"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=str)
def test_invalid_recipe_creates_no_folder(images, cache, tmp_path, monkeypatch, changes, message):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises((ValueError, ImportError, OSError), match=message):
        train(make_recipe(images, cache, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_recipe_can_change_before_the_first_checkpoint(recipe, tmp_path):
    """Also if the first run wrote its recipe before it was killed: nothing was trained."""
    out = tmp_path / "run"
    killed_at(1, recipe, out)
    assert (out / "recipe.yaml").exists()
    corrected = recipe.override({"optimizer.lr": 2e-3, "training.epochs": 1})
    train(corrected, out)
    assert Recipe.load(out / "recipe.yaml").optimizer == corrected.optimizer


def test_optimizer_state_keeps_memory_format(tmp_path):
    """A fused optimizer ignores strides: state in another memory format would be permuted."""
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


def test_dropout_is_active_in_training_only(recipe, tmp_path):
    for name, share in (("none", 0.0), ("some", 0.5), ("again", 0.5)):
        train(with_(recipe, "model", dropout=share), tmp_path / name)
    assert_same_run(tmp_path / "some", tmp_path / "again")
    none, some = (RunFolder(tmp_path / name).history()[1]["loss"] for name in ("none", "some"))
    assert none != some
    embedder = Embedder.load(tmp_path / "some" / "embedder", device="cpu")
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    assert torch.equal(embedder.embed(pixels), embedder.embed(pixels))


class Interrupted(Callback):
    """Requests a stop in the evaluation before the first step or after the last one."""

    def __init__(self, monkeypatch, *, epoch):
        evaluate = Evaluator.evaluate

        def interrupted(evaluator, *args, **options):
            if self.run.state.epoch == epoch and options.get("full_precision"):
                interrupt()
            return evaluate(evaluator, *args, **options)

        monkeypatch.setattr(Evaluator, "evaluate", interrupted)

    def on_start(self, run):
        self.run = run


@pytest.mark.parametrize(("epoch", "when"), [(0, "before the first step"), (2, "in the final")])
def test_signal_interrupts_first_and_final_evaluation(recipe, tmp_path, monkeypatch, epoch, when):
    recipe = recipe.override({"training": {"epochs": 2, "precision": "bfloat16"}})
    with monkeypatch.context() as patch:
        stop = Interrupted(patch, epoch=epoch)
        with pytest.raises(Stopped, match=rf"stopped {when}.*resumes it"):
            train(recipe, tmp_path / "run", callbacks=[stop])
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_untrained_evaluation_does_not_change_training(recipe, tmp_path, monkeypatch):
    set_selection_values(monkeypatch, [0.0, 0.0])  # worse than the baseline
    recipe = recipe.override({"training": {"epochs": 2, "ema": 0.9}, "model": {"dropout": 0.3}})
    results = train(recipe, tmp_path / "with")
    without = train(with_(recipe, "evaluation", untrained=False), tmp_path / "without")
    assert "untrained" not in without
    assert results["selected"] == without["selected"]
    one, two = tensors(tmp_path / "with"), tensors(tmp_path / "without")
    assert all(torch.equal(one[key], two[key]) for key in one)
    line = RunFolder(tmp_path / "with").history()[0]
    assert (line["epoch"], line["step"], "loss" in line) == (0, 0, False)
    assert results["untrained"] == {"epoch": 0, "held_out": line["held_out"]}
    # The network initialized from the seed.
    frozen = recipe.override({"optimizer.lr": 1e-20, "training.ema": 0.0})
    still = train(with_(frozen, "model", freeze_batchnorm=True), tmp_path / "still")
    assert still["last"]["held_out"] == results["untrained"]["held_out"]


def test_saturated_metric_is_reported(recipe, tmp_path, monkeypatch, capsys):
    set_selection_values(monkeypatch, [0.9, 1.0, 0.9, 1.0])
    recipe = with_(with_(recipe, "training", epochs=4), "evaluation", select_by="recall@1")
    message = f"held-out recall@1 {WITH_DISTRACTORS} is 100 %: the metric is saturated"
    results = train(recipe, tmp_path / "run", display=PlainDisplay())
    assert message in results["notes"]
    assert capsys.readouterr().out.count(message) == 1
    best = with_(recipe, "training", epochs=1)  # 90 % is not saturated
    notes = train(best, tmp_path / "other")["notes"]
    assert not any("saturated" in note for note in notes)


def test_embedder_is_saved_after_each_selected_epoch(recipe, tmp_path, monkeypatch):
    set_selection_values(monkeypatch, [0.2, 0.1, 0.2])
    saved = []

    class Watch(Callback):
        def on_epoch_end(self, run, line):
            saved.append(Embedder.load(run.folder.embedder).metrics["epoch"])

    train(recipe, tmp_path / "held_out", callbacks=[Watch()])
    assert saved == [1, 1, 3]
    saved.clear()
    train(with_(recipe, "evaluation", protocol="last"), tmp_path / "last", callbacks=[Watch()])
    assert saved == [1, 2, 3]


def test_fresh_start_keeps_other_files(recipe, tmp_path):
    recipe = with_(recipe, "training", epochs=1)
    out = tmp_path / "run"
    train(recipe, out)
    (out / "wandb" / "run-20261117-abc").mkdir(parents=True)
    (out / "wandb" / "latest-run").symlink_to("run-20261117-abc")
    names = ("checkpoints/epoch=3.ckpt", "notes.txt", "tensorboard/mine.txt", "wandb/mine.txt")
    for name in names:
        (out / name).write_text("mine")
    train(with_(recipe, "optimizer", lr=0.5), out, resume=False)
    assert Recipe.load(out / "recipe.yaml").optimizer.lr == 0.5
    assert [line["epoch"] for line in RunFolder(out).history()] == [0, 1]
    assert [(out / name).read_text() for name in names] == ["mine"] * 4
    assert [*out.glob("wandb/*run*")] == []


@pytest.mark.parametrize("schedule", ["step", "plateau"])
def test_extended_run_equals_longer_run(recipe, tmp_path, capsys, schedule):
    recipe = recipe.override({"schedule.name": schedule, "schedule.patience": 1})
    short, long = (with_(recipe, "training", epochs=epochs) for epochs in (2, 4))
    train(long, tmp_path / "whole")
    first = train(short, tmp_path / "run")
    killed_at(10, long, tmp_path / "run", display=PlainDisplay())  # still incomplete
    assert "extended from 2 to 4 epochs" in capsys.readouterr().out
    assert RunFolder(tmp_path / "run").read_results() == first
    train(long, tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert Recipe.load(tmp_path / "run" / "recipe.yaml").training.epochs == 4
    with pytest.raises(RunError, match=r"training\.epochs 2.*--fresh"):
        train(short, tmp_path / "run")


def test_impossible_extension_is_rejected(recipe, tmp_path):
    cosine = recipe.override({"schedule.name": "cosine", "training.epochs": 1})
    train(cosine, tmp_path / "run")
    longer = with_(cosine, "training", epochs=2)
    with pytest.raises(RunError, match=r"cosine.*--fresh"):
        train(longer, tmp_path / "run")
    assert train(longer, tmp_path / "run", resume=False)["epochs"] == 2
    constant = recipe.override({"schedule.name": "constant", "training.epochs": 1})
    train(constant, tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    with pytest.raises(RunError, match="no checkpoint"):
        train(with_(constant, "training", epochs=2), tmp_path / "other")
    assert train(constant, tmp_path / "other")["epochs"] == 1


def test_early_stopped_run_resumes_with_more_patience(recipe, tmp_path, monkeypatch, capsys):
    set_selection_values(monkeypatch, [0.9, 0.8, 0.7, 0.95, 0.6, 0.5])
    recipe = with_(recipe, "training", epochs=5, stop_after=2)
    stopped = train(recipe, tmp_path / "run")
    assert stopped["epochs"] == 3
    # With only more epochs it stops immediately, which is reported.
    longer = with_(recipe, "training", epochs=6)
    assert train(longer, tmp_path / "run", display=PlainDisplay()) == stopped
    assert "a larger training.stop_after resumes it" in capsys.readouterr().out
    patient = with_(longer, "training", stop_after=3)
    results = train(patient, tmp_path / "run")
    assert (results["epochs"], results["selected"]["epoch"]) == (6, 4)
    assert results["stopped_early"] is None
    train(patient, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


class FinishAfterTwoEpochs(Callback):
    def on_epoch_end(self, run, line):
        if line["epoch"] == 2:
            run.finish()


def test_callback_finishes_a_run_with_results(recipe, tmp_path, capsys):
    recipe = with_(recipe, "training", epochs=5, checkpoint_epochs=5)
    out = tmp_path / "run"
    results = train(recipe, out, callbacks=[FinishAfterTwoEpochs()])
    assert results["epochs"] == 2
    assert "run.finish" in results["stopped_early"]
    assert Embedder.load(out / "embedder").metrics["epoch"] == results["selected"]["epoch"]
    assert train(recipe, out) == results  # it is complete
    longer = train(with_(recipe, "training", epochs=6), out)
    assert (longer["epochs"], longer["stopped_early"]) == (6, None)
    train(with_(recipe, "training", epochs=6), tmp_path / "whole")
    assert_same_run(tmp_path / "whole", out)


def test_no_improvement_over_untrained_is_reported(recipe, tmp_path, capsys):
    changes = {"optimizer.lr": 1e-12, "training.epochs": 1, "model.freeze_batchnorm": True}
    still = recipe.override(changes)
    results = train(still, tmp_path / "run", display=PlainDisplay())
    assert results["selected"]["held_out"]["map@r"] == results["untrained"]["held_out"]["map@r"]
    note = next(note for note in results["notes"] if "no improvement over the untrained" in note)
    assert note.startswith(f"held-out MAP@R {WITH_DISTRACTORS} is ")
    assert note in capsys.readouterr().out
