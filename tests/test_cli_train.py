"""`proximetry train`: choice of recipe and run folder, resuming, dry runs, printed summary."""

import json
import os
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
import yaml

from proximetry import cli
from proximetry.cli import train as train_command
from proximetry.models import Embedder
from proximetry.training import Recipe, RunFolder
from proximetry.training.plan import make_plan
from tests.training.tiny import make_images

# With these the default recipes train on squares in a second.
SMALL = {
    "model.backbone": "small_convnet",
    "model.weights": "none",
    "model.dim": "8",
    "model.pca-dim": "null",
    "model.image-size": "24",
    "model.resize": "24",
    "data.batch-size": "8",
    "training.epochs": "1",
}


def small(**others):
    """Return the options, updated by others: model_backbone for --model.backbone."""
    changes = {key.replace("_", ".", 1).replace("_", "-"): value for key, value in others.items()}
    options = SMALL | changes
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [*words, "--device", "cpu"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make_images(tmp_path / "flowers")
    return tmp_path


@pytest.fixture
def call(call):
    return partial(call, "train")


def run_command(capsys, *words):
    """Return the exit code, standard output and standard error of a command."""
    code = cli.main(["train", *(str(word) for word in words)])
    return code, *capsys.readouterr()


def config(call, *words):
    return yaml.safe_load(call(*words, "--print-config"))


def test_train_needs_only_images(call, home):
    out = call(home / "flowers", *small())
    assert "on the CPU: recipe default-cpu (small_convnet, 24 px)\n" in out, "what will run"
    assert "run folder runs/flowers\n" in out
    for line in (
        "protocol held_out: epoch 1 is saved, selected by held-out MAP@R with training",
        "  proximetry report runs/flowers",
        "embedder: runs/flowers/embedder",
        "  proximetry export runs/flowers flowers.onnx",
    ):
        assert line in out.splitlines()
    assert Embedder.load("runs/flowers/embedder").dim == 8
    recipe = Recipe.load("runs/flowers/recipe.yaml")
    assert recipe.data.root == str(home / "flowers")
    out = call(home / "flowers", *small())
    assert "runs/flowers is already complete" in out


def test_run_folder_depends_on_images_and_recipe(call, home):
    make_images(home / "other" / "flowers", seed=1)
    taken = home / "here" / "runs" / "flowers-3"
    taken.mkdir(parents=True)
    (taken / "letter.txt").write_text("mine")
    for images, more, folder in (
        (home / "flowers", [], "flowers"),
        (home / "other" / "flowers", [], "flowers-2"),
        (home / "flowers", [], "flowers"),
        (home / "flowers", ["--recipe", "default"], "flowers-4"),
    ):
        out = call(images, *small(), *more)
        assert f"run folder runs/{folder}\n" in out
    shutil.rmtree(home / "here" / "runs")
    (home / "here" / "runs").write_text("a file")
    assert "runs is a file" in call(home / "flowers", *small(), code=2)


def test_recipe_of_another_device_is_resumed_or_replaced(call, home):
    words = [home / "flowers", "mine", *small()]
    call(*words, "--recipe", "default")
    out = call(*words)
    assert "run in mine: recipe default (" in out
    assert "mine is already complete" in out
    assert "recipe default-cpu" in call(*words, "--fresh")


def test_folder_of_a_starting_run_is_not_available(home):
    here, other = home / "flowers", make_images(home / "other" / "flowers", seed=1)
    plan = make_plan(str(here), None, None, {}, "cpu")
    folder = RunFolder(plan.out)
    folder.acquire()
    folder.begin(plan.recipe, torch.device("cpu"))
    for images, place in ((here, "runs/flowers"), (other, "runs/flowers-2")):
        assert str(make_plan(str(images), None, None, {}, "cpu").out) == place
    folder.release()  # it was killed before its first checkpoint
    assert str(make_plan(str(other), None, None, {}, "cpu").out) == "runs/flowers"


@pytest.mark.parametrize("way", ["default", "--recipe", "first word"])
def test_run_resumes_with_its_own_recipe(call, home, way):
    (home / "mine.yaml").write_text(f"base: default-cpu\ndata.root: {home / 'flowers'}\n")
    words = {
        "default": [home / "flowers", "mine"],
        "--recipe": [home / "flowers", "mine", "--recipe", "default-cpu"],
        "first word": [home / "mine.yaml", "mine"],
    }[way]
    more = ["--device", "cpu"]
    call(*words, *small(optimizer_lr="2e-4"))
    out = call(*words, *more)
    assert "run in mine: recipe" in out
    assert "(small_convnet, 24 px)" in out
    assert "optimizer.lr 0.0002" in out, "which differs from the recipe"
    assert "is already complete" in out
    out = call(*words, "--training.epochs", "2", *more)
    assert "extended from 1 to 2 epochs" in out
    err = call(*words, "--optimizer.lr", "0.5", *more, code=1)
    assert "a different recipe: optimizer.lr 0.0002 → 0.5. " in err, "and nothing else"


@pytest.mark.parametrize(
    ("cuda", "device", "recipe", "line"),
    [
        (True, None, "default", "recipe default (tf_efficientnet_lite2, 288 px)"),
        (False, None, "default-cpu", "no CUDA device: recipe default-cpu"),
        (True, "cpu", "default-cpu", "on the CPU: recipe default-cpu"),
    ],
)
def test_default_recipe_depends_on_the_device(home, monkeypatch, cuda, device, recipe, line):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    changes = {"model": {"dim": 8}}
    plan = make_plan(str(home / "flowers"), None, None, changes, device)
    assert plan.recipe.name == recipe
    assert plan.lines[0].startswith(line)
    assert "model.dim 8 also resets model.pca_dim (512), model.whitening (0.25)" in plan.lines


def test_table_and_dataset_as_images(call, home):
    rows = [f"{path},{path.parent.name}" for path in (home / "flowers").rglob("*.png")]
    table = home / "roses.csv"
    table.write_text("\n".join(["path,label", *rows]))
    result = config(call, table)
    assert (result["data"]["dataset"], result["data"]["root"]) == ("csv", str(table))
    result = config(call, "cub", "--data.root", home)
    assert (result["data"]["dataset"], result["data"]["root"]) == ("cub", str(home))
    assert result["name"].startswith("default")
    result = config(call, home / "flowers", "--data.dataset", "faces")
    assert result["data"]["dataset"] == "faces"


def test_recipe_by_name_or_file(call, home):
    assert config(call, "glyphs") == Recipe.load("glyphs").to_dict()
    (home / "mine.yaml").write_text("base: glyphs\nmodel.dim: 16\n")
    assert config(call, home / "mine.yaml")["model"]["dim"] == 16
    result = config(call, home / "flowers", "--recipe", home / "mine.yaml")
    assert (result["name"], result["data"]["dataset"]) == ("mine", "folder")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["glyps"], "'glyphs'"),
        (["nowhere/t.csv"], "'nowhere/t.csv'"),
        (["./mime.yaml"], "'mine.yaml'"),
        (["glyphs"], "Pass ./glyphs"),
        (["mine.yaml", "--recipe", "default"], "two recipes"),
        (["IMAGES", "--data.root", "elsewhere"], "elsewhere"),
        (["cub", "--data.dataset", "cars", "--data.root", "IMAGES"], "--data.dataset cars"),
        (["IMAGES", "--config", "config.yaml"], "'photos'"),
        (["IMAGES", "--recipe", "defalt"], "'default'"),
        (["link"], "unplugged"),
        (["IMAGES", "training.epochs=2"], "--training.epochs 2"),
        (["IMAGES", "lr=1"], "--optimizer.lr 1"),
        (["IMAGES", "batch-size=8"], "--data.batch-size 8"),
    ],
)
def test_ambiguous_or_missing_images_are_usage_errors(call, home, words, message):
    (home / "here" / "glyphs").mkdir()
    (home / "here" / "mine.yaml").write_text("base: glyphs\n")
    (home / "here" / "config.yaml").write_text("data: photos\n")
    (home / "here" / "link").symlink_to(home / "unplugged")
    places = {"IMAGES": home / "flowers"}
    err = call(*(places.get(word, word) for word in words), code=2)
    assert message in err
    assert not (home / "here" / "runs").exists()


def test_json_prints_only_the_document(capsys, home):
    code, out, err = run_command(capsys, home / "flowers", *small(), "--json")
    assert code == 0
    assert json.loads(out)["selected"]["epoch"] == 1
    assert json.loads(out)["folder"] == "runs/flowers"
    assert "epoch   1" in err


def files(folder):
    return sorted(folder.rglob("*"))


def test_dry_run_estimates_and_writes_nothing(call, home):
    words = [home / "flowers", *small(training_epochs=7), "--dry-run"]
    before = files(home)
    out = call(*words)
    for text in (
        "36 images of 9 classes",
        "small_convnet, 24 px, 8-d, proxy_anchor",
        "7 epochs, batches of 8",
        "runs/flowers (new)",
        "83 kB",
        "images/s",
    ):
        assert text in out
    out = call(*words, "--json")
    result = json.loads(out)
    assert result["data"]["held_out"] == {"images": 12, "classes": 3}
    assert result["cache"]["missing_bytes"] == 48 * 24 * 24 * 3
    assert result["seconds"]["training"] == pytest.approx(7 * 32 / result["images_per_second"])
    assert files(home) == before


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_backbone_frozen_for_all_epochs_warns(call, home, more):
    out = call(home / "flowers", *small(training_epochs=1), *more)
    assert "the backbone is frozen for all epochs: 1" in out
    trained = small(training_epochs=1, schedule_freeze_backbone_epochs=0)
    out = call(home / "flowers", "other", *trained, *more)
    assert "the backbone is frozen" not in out


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_backbone": "small_convnett"},
        {"model_weights": "missing.pth"},
        {"data_sampler": "balanced", "data_batch_size": 40},
        {"loss_name": "pairs/triplet", "loss_exclusive": 1},
    ],
)
def test_dry_run_rejects_what_a_run_rejects(capsys, home, wrong):
    start = [home / "flowers", "out", *small(**wrong)]
    run, dry = (run_command(capsys, *start, *more) for more in ([], ["--dry-run"]))
    assert run[0] == dry[0] > 0
    assert run[2] == dry[2]


def test_dry_run_decodes_the_images(call, home, monkeypatch):
    images = home / "flowers"
    whole = (images / "class02" / "2.png").read_bytes()
    (images / "class02" / "2.png").write_bytes(whole[: len(whole) // 2])
    (images / "class00" / "0.png").write_bytes(b"oops")
    words = [images, *small(), "--dry-run"]
    err = call(*words, code=1)
    assert "class00/0.png" in err
    assert "class02/2.png" in err
    assert "--data.bad-images skip" in err
    words += ["--data.bad-images", "skip"]
    out = call(*words)
    assert "34 images of 9 classes" in out
    assert "class02/2.png" in out
    (images / "class03" / "0.png").write_bytes((images / "class04" / "0.png").read_bytes())
    assert "in different classes" in call(*words)
    monkeypatch.setattr("proximetry.training.dry_run.MAX_DECODED", 16)  # of 48, class00/0 first
    result = json.loads(call(*words, "--json"))
    assert result["decoded"] == 16
    assert [reason.partition(":")[0] for reason in result["skipped"]] == ["class00/0.png"]
    assert files(home / "here") == []


def test_full_disk_is_reported_before_decoding(call, home, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 1000}))
    for more in ([], ["--dry-run"]):
        start = [home / "flowers", *small(data_cache="pixels")]
        err = call(*start, *more, code=1)
        assert "83 kB" in err
        assert "data.cache_dir" in err
    assert not (home / "here" / "runs").exists()
    out = call(home / "flowers", *small(), "--dry-run")
    assert "cache    none" in out


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_crop_size_and_pooling_adapt_to_a_transformer(call, home, more):
    sizes = "model: {image_size: 32, resize: 32}\ndata: {crop_size: 16}\n"
    (home / "mine.yaml").write_text(f"base: default-cpu\n{sizes}")
    changes = {"model_backbone": "vit_tiny_patch16_224", "model_image_size": 32, "model_resize": 32}
    words = [home / "flowers", *small(**changes), "--recipe", home / "mine.yaml"]
    out = call(*words, *more)
    assert "training crops of 32×32 instead of 16: vit_tiny_patch16_224 takes one size" in out
    assert "pooling token instead of gem" in out
    if not more:
        assert "is already complete" in call(*words)
        assert Embedder.load("runs/flowers/embedder").architecture.pooling == "token"


def test_weights_from_another_run(call, home):
    images = home / "flowers"
    call(images, *small())
    for number, folder in enumerate(("runs/flowers", "runs/flowers/embedder")):
        call(images, f"next{number}", *small(model_weights=folder))
        results = json.loads((home / "here" / f"next{number}" / "results.json").read_text())
        assert results["weights"]["source"] == "file"
    for wrong, message in (
        (
            {"model_weights": "runs/flowers", "model_backbone": "resnet18"},
            "weights for small_convnet, not for resnet18",
        ),
        ({"model_weights": "runs"}, "runs is not a saved embedder"),
    ):
        err = call(images, "out", *small(**wrong), code=2)
        assert message in err


def test_damaged_recipe_of_a_run_can_be_replaced(call, home):
    place = home / "here" / "runs" / "flowers"
    call(home / "flowers", *small())
    recipe = (place / "recipe.yaml").read_text()
    (place / "recipe.yaml").write_text(f"{recipe}\ngone: 1\n")
    out = call(home / "flowers", *small())
    assert "run folder runs/flowers-2" in out
    out = call(home / "flowers", place, *small(), "--fresh")


def test_fresh_reports_the_complete_run_that_it_removes(call, home):
    words = [home / "flowers", "mine", *small(schedule_freeze_backbone_epochs=0), "--fresh"]
    words.append("--training.two-stages")
    message = "removing the complete run in mine"
    assert message not in call(*words)
    assert call(*words).count(message) == 1
    assert Embedder.load("mine").dim == 8
    call(home / "flowers", "more", *small(model_weights="mine"))


def test_dry_run_reports_the_state_of_the_run(call, home):
    words = [home / "flowers", *small(training_epochs=2)]
    call(*words)
    result = json.loads(call(*words, "--dry-run", "--json"))
    assert result["folder"]["state"] == "already complete"
    assert result["seconds"] == {"decoding": 0, "training": 0, "evaluation": 0}
    assert result["decoded"] == 0, "there is nothing left to decode them for"
    longer = [home / "flowers", *small(training_epochs=3), "--dry-run", "--json"]
    result = json.loads(call(*longer))
    assert result["folder"]["state"] == "resumed"
    assert result["seconds"]["training"] == pytest.approx(32 / result["images_per_second"])
    result = json.loads(call(*words, "--fresh", "--dry-run", "--json"))
    assert result["folder"]["state"] == "new; the complete run there will be removed"
    (home / "flowers" / "class00" / "0.png").unlink()
    assert "different images" in call(*words, "--dry-run", code=1)


@pytest.mark.parametrize(
    ("source", "changes", "command"),
    [
        ("faces", {"data.root": "images"}, "evaluate 'my run' faces --root images"),
        ("glyphs", {}, "evaluate 'my run' glyphs"),
        ("images", {}, "evaluate 'my run' images"),
        ("images", {}, "index images --model 'my run'"),
        ("images", {}, "serve"),
        ("vectors.npz", {}, "export 'my run' 'my run.onnx'"),
        ("vectors.npz", {}, "embed 'my run' vectors.npz --out embeddings.npz"),
    ],
)
def test_next_commands_are_quoted_and_name_the_images(home, source, changes, command):
    (home / "flowers").rename(home / "here" / "images")
    np.savez(home / "here" / "vectors.npz", vectors=np.eye(4), labels=np.arange(4) // 2)
    line = {"epoch": 1, "test": {"recall@1": 0.5}}
    results = {"protocol": "last", "selected": line, "last": line}
    plan = make_plan(source, home / "here" / "my run", None, changes, "cpu")
    assert f"  proximetry {command}" in train_command.summary(results, plan).splitlines()


def test_config_with_an_empty_section_and_home_in_a_path(call, home, monkeypatch):
    (home / "config.yaml").write_text("data:\nmodel.dim: 16\n")
    result = config(call, home / "flowers", "--config", home / "config.yaml")
    assert (result["data"]["dataset"], result["model"]["dim"]) == ("folder", 16)
    monkeypatch.setenv("HOME", str(home))
    (home / "mine.yaml").write_text("base: glyphs\ndata: {dataset: folder, root: ~/flowers}\n")
    assert config(call, home / "mine.yaml")["data"]["root"] == str(home / "flowers")
    assert config(call, home / "flowers", "runs/lr=1")


@pytest.mark.parametrize(
    ("images", "more", "message"),
    [
        ("few", [], "there is no test set"),
        (
            "split",
            ["--evaluation.protocol", "last", "--evaluation.no-final-test"],
            "evaluation.final_test is false",
        ),
        (
            "flowers",
            ["--training.two-stages", "--schedule.freeze-backbone-epochs", "0"],
            "mine/first-stage/results.json",
        ),
    ],
    ids=["few classes", "no final test", "two stages"],
)
def test_summary_without_metrics_gives_the_reason(call, home, images, more, message):
    make_images(home / "few", classes=4)
    make_images(home / "split" / "train", classes=4)
    make_images(home / "split" / "test", classes=2, seed=1)
    out = call(home / images, "mine", *small(), *more)
    assert message in " ".join(out.split())


def hostile(home):
    """Make splits beside stray folders and links, with shared classes and endless files."""
    root = make_images(home / "hostile" / "train", classes=3).parent
    make_images(root / "test", classes=2, seed=1)
    for name in ("__MACOSX", "docs"):
        (root / name).mkdir()
    (root / "loop").symlink_to(".")
    os.mkfifo(root / "train" / "class00" / "pipe.png")
    (root / "train" / "class01" / "zero.png").symlink_to("/dev/zero")
    return root


LAYOUT = "images: 3 classes in train/, 2 classes in test/"


def test_layout_of_a_folder_is_printed_first(call, capsys, home):
    words = [hostile(home), "mine", *small()]
    for more, begins in (["--dry-run"], "checking"), ([], "decoding"):
        code, out, err = run_command(capsys, *words, *more)
        assert code == 1
        assert out.index(LAYOUT) < out.index(begins)
        for name, reason in (("class00/pipe", "a named pipe"), ("class01/zero", "a device")):
            assert f"train/{name}.png: cannot be opened: {reason}" in err
        assert "--data.bad-images skip" in err
    assert not (home / "here" / "mine").exists()
    out = call(*words, "--data.bad-images", "skip")
    assert "train/class00/pipe.png" in out
    assert "--bad-images skip" in out.partition("Next:")[2]
    notes = json.loads((home / "here" / "mine" / "results.json").read_text())["notes"]
    assert notes[0].startswith(LAYOUT)
    assert "share 2 classes" in notes[1]


def test_names_that_are_not_utf8(call, home):
    sys.stdout.reconfigure(errors="backslashreplace")
    root = (home / "flowers").rename(home / os.fsdecode(b"b\xfcro"))
    (root / "class00").rename(root / os.fsdecode(b"cl\xe4ss"))
    (root / "class01" / "0.png").rename(root / "class01" / os.fsdecode(b"\xff.png"))
    for _ in range(2):  # the second time from existing results
        call(root, "mine", *small(evaluation_protocol="last"))
    assert "cl\udce4ss" in Embedder.load(home / "here" / "mine").class_names
