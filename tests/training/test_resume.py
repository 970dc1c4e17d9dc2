"""Resume with lost, changed, damaged or locked files: bit-exact, or an error with advice."""

import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

from proximetry._util.files import (
    CHECKSUM_PLACEHOLDER,
    WriteError,
    atomic_path,
    atomic_write,
    final_name,
    has_valid_checksum,
    with_checksum,
)
from proximetry.data import PixelCache, open_dataset
from proximetry.training import Callback, RunError, RunFolder, train, trainer
from proximetry.training.checkpoint import CheckpointError
from proximetry.training.dry_run import dry_run
from proximetry.training.updater import Updater
from tests.processes import Process
from tests.training.runs import (
    Messages,
    OnStep,
    assert_same_run,
    fail,
    killed_at,
    set_selection_values,
)
from tests.training.tiny import make_recipe, with_


@pytest.fixture(scope="module")
def recipe(images, cache):
    return make_recipe(images, cache, training={"checkpoint_steps": 2})


@pytest.fixture
def run(interrupted_run, tmp_path):
    return RunFolder(shutil.copytree(interrupted_run, tmp_path / "run"))


# Images and recipe of a run


def exchange_images(root):
    for here, there in (("class01/0.png", "t.png"), ("class02/0.png", "class01/0.png")):
        (root / here).rename(root / there)
    (root / "t.png").rename(root / "class02/0.png")


OTHER_IMAGES = {
    "class00.*zebra": lambda root: (root / "class00").rename(root / "zebra"),
    "52 images.*class99": lambda root: shutil.copytree(root / "class03", root / "class99"),
    "class05: 3 images instead of 4": lambda root: (root / "class05" / "1.png").unlink(),
    "different image files": exchange_images,
}


def test_run_does_not_resume_on_different_images(images, cache, tmp_path):
    recipe = make_recipe(shutil.copytree(images, tmp_path / "images"), cache)
    killed_at(5, recipe, tmp_path / "run")
    before = RunFolder(tmp_path / "run").last.read_bytes()
    for changes, change in OTHER_IMAGES.items():
        root = shutil.copytree(images, tmp_path / changes[:7])
        change(root)
        with pytest.raises(RunError, match=f"different images: .*{changes}.*--fresh"):
            train(with_(recipe, "data", root=str(root)), tmp_path / "run")
    assert RunFolder(tmp_path / "run").last.read_bytes() == before
    train(with_(recipe, "training", epochs=1), tmp_path / "run", resume=False)


def test_images_may_move_but_not_change_split(images, cache, tmp_path):
    def table(name, root, split):
        rows = [f"{path},{path.parent.name},train" for path in sorted(root.rglob("*.png"))]
        rows[-1] = rows[-1].replace("train", split)
        (tmp_path / name).write_text("\n".join(["path,label,split", *rows]))
        return make_recipe(tmp_path / name, cache, data={"dataset": "csv"}, training={"epochs": 2})

    killed_at(5, table("a.csv", images, "train"), tmp_path / "run")
    moved = shutil.copytree(images, tmp_path / "moved")
    with pytest.raises(RunError, match="split train: 47"):
        train(table("b.csv", moved, "test"), tmp_path / "run")
    train(table("c.csv", moved, "train"), tmp_path / "run")  # with absolute paths


def test_checkpoint_of_another_run_is_rejected(recipe, run, tmp_path):
    other = with_(recipe, "training", seed=7)
    killed_at(3, other, tmp_path / "other")
    shutil.copy(RunFolder(tmp_path / "other").last, run.last)
    run.best.unlink()
    with pytest.raises(RunError, match=r"last.safetensors .*a different recipe: .*seed"):
        train(recipe, run.path)
    run.recipe.write_text("data: [")
    with pytest.raises(RunError, match=r"recipe.yaml.*--fresh"):
        train(recipe, run.path)


@pytest.mark.parametrize("two_stages", [False, True])
def test_invalid_fresh_start_keeps_the_run(recipe, run, two_stages):
    """Also if the last part of a run rejects the recipe."""
    out = run.path
    if two_stages:
        out = run.path.rename(run.path.parent / "first-stage").parent
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    changes = {"loss": {"name": "pairs/triplet", "exclusive": 1.0}}
    invalid = recipe.override({**changes, "training.two_stages": two_stages})
    with pytest.raises(ValueError, match="needs proxies"):
        train(invalid, out, resume=False)
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert after == before


# Checkpoints that are lost or damaged


def damage(path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["last", "best"])
@pytest.mark.parametrize("lose", [os.unlink, damage])
def test_lost_or_damaged_checkpoint_is_an_error(recipe, run, monkeypatch, name, lose):
    set_selection_values(monkeypatch, [0.5, 0.9, 0.4])
    lose(getattr(run, name))
    with pytest.raises(ValueError, match=rf"{name}.safetensors.*--fresh"):
        train(recipe, run.path)
    train(with_(recipe, "training", epochs=1), run.path, resume=False)


@pytest.mark.parametrize("links", [True, False])
def test_best_checkpoint_is_a_link_to_the_last_one(recipe, tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: fail(OSError("no links")))
    set_selection_values(monkeypatch, [0.5])
    train(with_(recipe, "training", epochs=1, keep_checkpoint_every=1), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    for path in (run.best, run.epoch_checkpoint(1)):
        assert path.samefile(run.last) == links
        assert path.read_bytes() == run.last.read_bytes()


def test_run_killed_before_linking_the_best_checkpoint_resumes(recipe, tmp_path, monkeypatch):
    set_selection_values(monkeypatch, [0.5, 0.9, 0.4])
    train(recipe, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "link_checkpoints", lambda *_: fail(SystemError("killed")))
        with pytest.raises(SystemError):
            train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_missing_checkpoints_are_an_error(recipe, run):
    shutil.rmtree(run.last.parent)
    metrics = run.metrics.read_bytes()
    for attempt in (train, dry_run):
        with pytest.raises(RunError, match=r"last.safetensors is missing.*--fresh"):
            attempt(recipe, run.path)
    assert run.metrics.read_bytes() == metrics
    train(with_(recipe, "training", epochs=1), run.path, resume=False)


def test_run_without_checkpoint_starts_again(recipe, tmp_path):
    recipe = recipe.override(
        {"training": {"checkpoint_epochs": 3, "checkpoint_steps": 0}, "evaluation.protocol": "last"}
    )
    train(recipe, tmp_path / "whole")
    for step in (2, 6, 10, 11):
        killed_at(step, recipe, tmp_path / "run")
    messages = Messages()
    train(recipe, tmp_path / "run", display=messages)
    assert f"no checkpoint in {tmp_path / 'run'}: starting from the beginning" in messages.lines
    assert [line["epoch"] for line in RunFolder(tmp_path / "run").history()] == [1, 2, 3]
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("damaged", ["embedder/embedder.json", "results.json"])
def test_damaged_complete_run_is_an_error(recipe, whole, tmp_path, damaged):
    out = shutil.copytree(whole, tmp_path / "run")
    (out / damaged).write_text("{")
    with pytest.raises(RunError, match=rf"{damaged}.*--fresh"):
        train(recipe, out)
    (out / "results.json").unlink()
    steps = []
    train(recipe, out, callbacks=[OnStep(9, lambda: steps.append(9))])
    assert steps == []
    assert_same_run(whole, out)


def test_complete_run_without_checkpoints_is_not_trained_again(recipe, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    assert train(recipe, out) == RunFolder(whole).read_results()


def forge(path, change):
    """Write a checkpoint with a changed header and a valid checksum."""
    header = json.loads(safe_open(path, "pt").metadata()["proximetry"])
    change(header)
    header["checksum"] = CHECKSUM_PLACEHOLDER
    path.write_bytes(with_checksum(save(load_file(path), {"proximetry": json.dumps(header)})))


@pytest.mark.parametrize("key", ["state", "rates", "seconds", "scaler", "recipe", "images"])
def test_checkpoint_of_another_version_is_rejected(recipe, run, key):
    run.best.unlink()
    forge(run.last, lambda header: header["state"].pop(key))
    with pytest.raises(CheckpointError, match=r"last.safetensors .*not a checkpoint of.*--fresh"):
        train(recipe, run.path)
    forge(run.last, lambda header: header.update(format=99))
    with pytest.raises(CheckpointError, match=r"last.safetensors .*format 99.*--fresh"):
        train(recipe, run.path)


# metrics.jsonl


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + text.splitlines()[-1] + "\n",
        lambda text: text[:-30],
        lambda text: "",
        lambda text: "\udcff\0" + text,
    ],
)
def test_metrics_are_restored_from_the_checkpoint(recipe, run, whole, change):
    text = change(run.metrics.read_text())
    run.metrics.write_text(text, encoding="utf-8", errors="surrogateescape")
    train(recipe, run.path)
    assert_same_run(whole, run.path)


def test_truncated_pixel_cache_stops_the_run_and_is_rebuilt(recipe, tmp_path):
    recipe = recipe.override({"data.cache": "pixels", "data.cache_dir": str(tmp_path / "cache")})

    class Truncate(Callback):
        def on_epoch_end(self, run, line):  # no thread is prefetching
            (file,) = (tmp_path / "cache").glob("*/pixels.bin")
            os.truncate(file, 1000)

    with pytest.raises(OSError, match=r"pixels\.bin was truncated"):
        train(recipe, tmp_path / "run", callbacks=[Truncate()])
    assert train(recipe, tmp_path / "run")["epochs"] == recipe.training.epochs


@pytest.mark.parametrize("line", ["5", "{", '{"loss": 1}', "[]", 100_000 * "["])
def test_damaged_metrics_are_named_with_their_line(run, line):
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join([*lines, line, *lines]) + "\n")
    with pytest.raises(RunError, match=rf"metrics.jsonl is damaged in line {len(lines) + 1}"):
        run.history()


# Time


def test_seconds_of_training_survive_a_kill(recipe, tmp_path, monkeypatch):
    """A step takes a second; the first of a process or with an unfrozen backbone is startup."""
    now = [0.0]
    update = Updater.backward

    def tick(*args):
        now[0] += 1
        return update(*args)

    monkeypatch.setattr(Updater, "backward", tick)
    monkeypatch.setattr("proximetry.training.run.time.monotonic", lambda: now[0])
    recipe = with_(recipe, "schedule", freeze_backbone_epochs=1)
    for step in (6, 10):
        killed_at(step, with_(recipe, "training", checkpoint_steps=1), tmp_path / "run")
    results = train(recipe, tmp_path / "run")
    assert (results["seconds"], results["startup_seconds"]) == (12 - 4, 4)


# Kills


KILLED = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from proximetry.training import Recipe, train
from tests.interrupt import completes, kill_at

draw = random.Random(0)
for file in sys.argv[2:]:
    kills, out = 0, Path(file + ".run")

    def work():
        kill_at(draw.randrange(1, 60) if kills < 6 else 0, out)
        train(Recipe.load(file), out)

    while not completes(work):
        kills += 1
        draw.random()
    assert kills
"""


@pytest.mark.slow
def test_processes_killed_at_random_moments_end_with_the_same_run(server, recipe, tmp_path):
    """SIGKILL before a random file is written, renamed or removed."""
    rare = {"checkpoint_epochs": 3, "checkpoint_steps": 0}
    recipes = {
        "often": with_(recipe, "training", checkpoint_steps=1),
        "rarely": recipe.override({"training": rare, "evaluation.protocol": "last"}),
    }
    for name, one in recipes.items():
        one.save(tmp_path / name)
        train(one, tmp_path / f"whole-{name}")
    files = [tmp_path / name for name in recipes]
    process = Process(server, tmp_path / "log", KILLED, Path(__file__).parents[2], *files)
    assert process.ended() == 0, process.output()
    for name in recipes:
        out = tmp_path / f"{name}.run"
        assert_same_run(tmp_path / f"whole-{name}", out)
        epochs = [line["epoch"] for line in RunFolder(out).history()]
        assert epochs == sorted(set(epochs))
        assert not [path for path in out.rglob(".*") if final_name(path)]


def test_callback_may_train_another_run(recipe, tmp_path):
    recipe = recipe.override({"model.dropout": 0.3, "training.epochs": 1})
    train(recipe, tmp_path / "alone")
    inner = OnStep(2, lambda: train(with_(recipe, "training", seed=1), tmp_path / "inner"))
    train(recipe, tmp_path / "outer", callbacks=[inner])
    assert_same_run(tmp_path / "alone", tmp_path / "outer")


# Other people's files


@pytest.mark.parametrize(
    "name", [".movie.mkv.part", "letter.txt", "recipe.yaml", "checkpoints/epoch=3.ckpt"]
)
def test_folder_with_other_files_is_rejected(recipe, tmp_path, name):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    for resume in (True, False):
        with pytest.raises(RunError, match="is not empty"):
            train(recipe, tmp_path / "mine", resume=resume)
    assert file.read_text() == "mine"


def test_only_partial_files_of_runs_are_removed(recipe, run):
    ours = [
        run.path / f".proximetry-{32 * 'a'}-metrics.jsonl.part",
        run.last.parent / f".proximetry-{32 * 'b'}-last.safetensors.part",
        run.embedder / f".proximetry-{32 * 'c'}-embedder.json.part",
    ]
    theirs = [
        run.path / ".movie.mkv.part",
        run.path
        / f".proximetry-{32 * 'a'}-scores.json.part",  # of another command, which may be running
        run.last.parent / ".last.safetensors.part",
        run.path / "downloads" / f".proximetry-{32 * 'a'}-metrics.jsonl.part",
    ]
    theirs[-1].parent.mkdir()
    for path in (*ours, *theirs):
        path.write_text("half")
    train(recipe, run.path)
    assert [path.exists() for path in (*ours, *theirs)] == [False] * 3 + [True] * 4


# Writing


@contextmanager
def largest_file(size):
    """Limit the size of files, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_write_errors_name_the_file(recipe, run, images, tmp_path):
    too_large = "cannot be written: File too large"
    with largest_file(1000), pytest.raises(WriteError, match=rf"a.bin {too_large}"):
        atomic_write(tmp_path / "a.bin", bytes(2000))
    with pytest.raises(WriteError, match=r"none/a.bin cannot be written: No such file"):
        atomic_write(tmp_path / "none" / "a.bin", b"")
    with largest_file(1000), pytest.raises(WriteError, match=rf"cache/\w+ {too_large}"):
        PixelCache.build(open_dataset("folder", images), 24, tmp_path / "cache")
    size = run.metrics.stat().st_size
    with largest_file(size + 9), pytest.raises(WriteError, match=rf"metrics.jsonl {too_large}"):
        run.log({"epoch": 9, "loss": 1.0, "lr": 2.0})
    with largest_file(20_000), pytest.raises(WriteError, match=rf"last.safetensors {too_large}"):
        train(recipe, run.path)
    assert not [path for path in tmp_path.rglob(".*") if final_name(path)]


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "reset by peer"), FileNotFoundError(2, "gone", "nowhere")]
)
def test_atomic_path_keeps_errors_about_other_files(tmp_path, error):
    with pytest.raises(type(error)) as caught, atomic_path(tmp_path / "a"):
        raise error
    assert caught.value is error


@given(content=st.binary(max_size=60), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_flipped_bit_breaks_checksum(content, place, bit):
    whole = with_checksum(content + CHECKSUM_PLACEHOLDER.encode() + content)
    assert has_valid_checksum(whole)
    spoiled = bytearray(whole)
    spoiled[place % len(whole)] ^= 1 << bit
    assert not has_valid_checksum(bytes(spoiled))


# Divergence


def test_first_loss_not_finite_names_no_checkpoint(recipe, tmp_path):
    class Poison(Callback):
        def on_start(self, run):
            run.updater.objective.proxies.weight.data.fill_(torch.inf)

    with pytest.raises(RunError, match=r"diverged: the loss.*now 0\.001") as caught:
        train(recipe, tmp_path / "run", callbacks=[Poison()])
    assert "checkpoint" not in str(caught.value)


@pytest.mark.parametrize("step", [4, 8])
def test_weights_not_finite_after_the_last_step_of_an_epoch(recipe, tmp_path, step):
    class Poison(Callback):
        def on_step_end(self, run, loss):
            if run.state.step == step:
                next(run.updater.embedder.parameters()).data.fill_(torch.nan)

    with pytest.raises(RunError, match=rf"diverged: the weights are not.*step {step}") as caught:
        train(recipe, tmp_path / "run", callbacks=[Poison()])
    folder = RunFolder(tmp_path / "run")
    assert f"The last good checkpoint is {folder.last}" in str(caught.value)
    train(recipe, folder.path)  # not corrupted


def test_embeddings_not_finite_name_their_images(recipe, tmp_path):
    class Poison(Callback):
        def on_step_end(self, run, loss):
            if run.state.step == 4:  # finite, but the network overflows
                run.updater.embedder.head.weight.data.fill_(3e38)

    recipe = with_(recipe, "model", normalize=False)
    recipe = with_(recipe, "evaluation", similarity="euclidean")
    with pytest.raises(RunError, match=r"embeddings of \d+ images.*overflows"):
        train(recipe, tmp_path / "run", callbacks=[Poison()])
