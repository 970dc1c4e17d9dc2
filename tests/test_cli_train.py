"""`proximetry train` with images alone: which recipe, which folder, what it says and writes."""

import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml

from proximetry import cli
from proximetry.cli import train_plan
from proximetry.models import Embedder
from proximetry.training import Recipe, RunFolder
from tests.training.tiny import make_images

# What makes the default recipes train on squares in a second.
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
    """The options, with others in their place: model_backbone for --model.backbone."""
    changes = {key.replace("_", ".", 1).replace("_", "-"): value for key, value in others.items()}
    given = SMALL | changes
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return [*words, "--device", "cpu"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make_images(tmp_path / "flowers")
    return tmp_path


def call(capsys, *words):
    code = cli.main(["train", *(str(word) for word in words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def config(capsys, *words):
    code, out, err = call(capsys, *words, "--print-config")
    assert code == 0, err
    return yaml.safe_load(out)


def test_images_are_enough(capsys, home):
    code, out, err = call(capsys, home / "flowers", *small())
    assert code == 0, err
    assert "on the CPU: recipe default-cpu (small_convnet, 24 px)\n" in out, "what will run"
    assert "run folder runs/flowers\n" in out
    for line in (
        "protocol held_out: epoch 1 is saved, selected by held-out MAP@R with training",
        "  proximetry report runs/flowers",
        "embedder: runs/flowers/embedder",
        "  proximetry export runs/flowers flowers.onnx",
    ):
        assert line in out.splitlines()
    commands = out.partition("Next:\n")[2]
    assert max(map(len, commands.splitlines())) <= 80 or "\\" in commands
    assert Embedder.load("runs/flowers/embedder").dim == 8
    recipe = Recipe.load("runs/flowers/recipe.yaml")
    assert recipe.data.root == str(home / "flowers")
    code, out, _ = call(capsys, home / "flowers", *small())
    assert code == 0
    assert "runs/flowers is complete already" in out


@pytest.mark.parametrize("name", ["pictures", "train", "data"])
def test_run_folder_is_named_after_the_image_folder(home, name):
    images = make_images(home / "alice" / name)
    for source in (images, images / ".." / name):
        plan = train_plan.make_plan(str(source), None, None, {}, "cpu")
        assert plan.out == train_plan.RUNS / name


def test_images_of_the_same_name_get_a_folder_of_their_own(capsys, home):
    make_images(home / "other" / "flowers", seed=1)
    for images, folder in (
        (home / "flowers", "runs/flowers"),
        (home / "other" / "flowers", "runs/flowers-2"),
        (home / "flowers", "runs/flowers"),
        (home / "other" / "flowers", "runs/flowers-2"),
    ):
        code, out, err = call(capsys, images, *small())
        assert code == 0, err
        assert f"run folder {folder}\n" in out


def test_a_folder_is_not_free_while_a_run_on_other_images_begins_there(home):
    here, other = home / "flowers", make_images(home / "other" / "flowers", seed=1)
    plan = train_plan.make_plan(str(here), None, None, {}, "cpu")
    folder = RunFolder(plan.out)
    folder.acquire()
    folder.begin(plan.recipe, torch.device("cpu"))
    for images, place in ((here, "runs/flowers"), (other, "runs/flowers-2")):
        assert str(train_plan.make_plan(str(images), None, None, {}, "cpu").out) == place
    folder.release()  # it was killed before its first checkpoint
    assert str(train_plan.make_plan(str(other), None, None, {}, "cpu").out) == "runs/flowers"


def test_a_run_goes_on_as_it_was_begun_without_its_options(capsys, home):
    images, more = home / "flowers", ["--device", "cpu"]
    assert call(capsys, images, "mine", *small(training_epochs=1))[0] == 0
    code, out, err = call(capsys, images, "mine", "--training.epochs", "2", *more)
    assert code == 0, err
    assert "as the run in mine was begun: recipe default-cpu (small_convnet, 24 px)" in out
    assert "extended from 1 to 2 epochs" in out
    code, _, err = call(capsys, images, "mine", "--optimizer.lr", "0.5", *more)
    assert code == 1
    assert "another recipe: optimizer.lr 0.0001 → 0.5." in err, "and nothing else"


def test_a_complete_run_is_not_that_of_other_images(capsys, home):
    images = home / "flowers"
    assert call(capsys, images, "mine", *small())[0] == 0
    shutil.rmtree(images / "class03")
    for more in ([], ["--dry-run"]):
        code, _, err = call(capsys, images, "mine", *small(), *more)
        assert code == 1
        assert "missing classes (class03)" in err


def test_another_recipe_gets_a_folder_of_its_own(capsys, home):
    images = home / "flowers"
    assert call(capsys, images, *small())[0] == 0
    assert "run folder runs/flowers-2" in call(capsys, images, *small(), "--recipe", "default")[1]
    assert "run folder runs/flowers\n" in call(capsys, images, *small())[1]


def test_a_folder_that_holds_something_else_is_left_alone(capsys, home):
    place = home / "here" / "runs" / "flowers"
    place.mkdir(parents=True)
    (place / "letter.txt").write_text("mine")
    code, out, err = call(capsys, home / "flowers", *small())
    assert code == 0, err
    assert "run folder runs/flowers-2" in out


def test_where_no_folder_can_be_made_none_is_looked_for(capsys, home):
    (home / "here" / "runs").write_text("a file")
    code, _, err = call(capsys, home / "flowers", *small())
    assert code == 2
    assert "runs is a file" in err


@pytest.mark.parametrize(
    ("cuda", "device", "recipe", "line"),
    [
        (True, None, "default", "recipe default (tf_efficientnet_lite2, 288 px)"),
        (False, None, "default-cpu", "no CUDA device: recipe default-cpu"),
        (True, "cpu", "default-cpu", "on the CPU: recipe default-cpu"),
    ],
)
def test_the_recipe_goes_by_the_device(home, monkeypatch, cuda, device, recipe, line):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    plan = train_plan.make_plan(str(home / "flowers"), None, None, {}, device)
    assert plan.recipe.name == recipe
    assert plan.lines[0].startswith(line)


def test_a_run_goes_on_with_the_default_it_was_begun_with(capsys, home):
    words = [home / "flowers", "mine", *small()]
    assert call(capsys, *words, "--recipe", "default")[0] == 0
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "as the run in mine was begun: recipe default (" in out
    assert "mine is complete already" in out


def test_a_table_and_a_dataset_are_images_too(capsys, home):
    rows = [f"{path},{path.parent.name}" for path in (home / "flowers").rglob("*.png")]
    table = home / "roses.csv"
    table.write_text("\n".join(["path,label", *rows]))
    found = config(capsys, table)
    assert (found["data"]["dataset"], found["data"]["root"]) == ("csv", str(table))
    found = config(capsys, "cub", "--data.root", home)
    assert (found["data"]["dataset"], found["data"]["root"]) == ("cub", str(home))
    assert found["name"].startswith("default")


def test_a_recipe_is_named_as_before(capsys, home):
    assert config(capsys, "glyphs") == Recipe.load("glyphs").to_dict()
    (home / "mine.yaml").write_text("base: glyphs\nmodel.dim: 16\n")
    assert config(capsys, home / "mine.yaml")["model"]["dim"] == 16
    found = config(capsys, home / "flowers", "--recipe", home / "mine.yaml")
    assert (found["name"], found["data"]["dataset"]) == ("mine", "folder")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["glyps"], "there is no folder or file 'glyps', did you mean 'glyphs'?"),
        (["./nowhere"], "there is no folder or file './nowhere': looked in "),
        (["nowhere/t.csv"], "there is no folder or file 'nowhere/t.csv', nor a folder "),
        (["t.csv", "mine"], "there is no folder or file 't.csv': looked in "),
        (["./mime.yaml"], "there is no folder or file './mime.yaml', did you mean 'mine.yaml'?"),
        (["glyphs"], "'glyphs' is a shipped recipe and a folder here; write ./glyphs"),
        (["mine.yaml", "--recipe", "default"], "two recipes are given"),
        (["IMAGES", "--data.root", "elsewhere"], "the images are given twice"),
        (["IMAGES", "--config", "config.yaml"], "data must be a section of keys, got 'photos'"),
        (["IMAGES", "--recipe", "defalt"], "no recipe 'defalt', did you mean 'default'"),
    ],
)
def test_what_cannot_be_meant(capsys, home, words, message):
    (home / "here" / "glyphs").mkdir()
    (home / "here" / "mine.yaml").write_text("base: glyphs\n")
    (home / "here" / "config.yaml").write_text("data: photos\n")
    places = {"IMAGES": home / "flowers"}
    code, _, err = call(capsys, *(places.get(word, word) for word in words))
    assert code == 2
    assert message in err
    assert not (home / "here" / "runs").exists()


def test_json_is_all_there_is_on_standard_output(capsys, home):
    code, out, err = call(capsys, home / "flowers", *small(), "--json")
    assert code == 0
    assert json.loads(out)["selected"]["epoch"] == 1
    assert "epoch   1" in err


def files(folder):
    return sorted(folder.rglob("*"))


def test_a_dry_run_writes_nothing_and_says_what_it_takes(capsys, home):
    words = [home / "flowers", *small(training_epochs=7), "--dry-run"]
    before = files(home)
    code, out, err = call(capsys, *words)
    assert code == 0, err
    for text in (
        "36 images of 9 classes to train on",
        "all 48 images decoded to check them",
        "default-cpu: small_convnet, 24 px, 8-d, proxy_anchor",
        "7 epochs, batches of 8",
        "runs/flowers (new)",
        "83 kB to decode",
        "images/s",
        "Nothing was written.",
    ):
        assert text in out
    code, out, _ = call(capsys, *words, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["data"]["held_out"] == {"images": 12, "classes": 3}
    assert found["cache"]["missing_bytes"] == 48 * 24 * 24 * 3
    assert found["seconds"]["training"] == pytest.approx(7 * 32 / found["images_per_second"])
    assert files(home) == before


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_backbone_frozen_for_all_epochs_warns(capsys, home, more):
    _, out, _ = call(capsys, home / "flowers", *small(training_epochs=1), *more)
    assert "the backbone is frozen for all epochs: 1" in out
    trained = small(training_epochs=1, schedule_freeze_backbone_epochs=0)
    _, out, _ = call(capsys, home / "flowers", "other", *trained, *more)
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
def test_a_dry_run_refuses_what_the_run_would(capsys, home, wrong):
    start = [home / "flowers", "out", *small(**wrong)]
    said = [call(capsys, *start, *more) for more in ([], ["--dry-run"])]
    assert said[0][0] == said[1][0] > 0
    assert said[0][2] == said[1][2]


def test_a_dry_run_decodes_the_images(capsys, home, monkeypatch):
    images = home / "flowers"
    for number, name in enumerate(("class00/0.png", "class02/2.png")):
        whole = (images / name).read_bytes()
        (images / name).write_bytes(whole[: len(whole) // 2] if number else b"oops")
    words = [images, *small(), "--dry-run"]
    code, out, err = call(capsys, *words)
    assert code == 1
    assert out.splitlines()[-1] == "checking 48 images…"
    assert "2 of 48 images cannot be read: class00/0.png: not an image" in err
    assert "class02/2.png: damaged or truncated" in err
    assert err.endswith("--data.bad-images skip leaves them out\n")

    code, out, err = call(capsys, *words, "--data.bad-images", "skip")
    assert code == 0, err
    assert "34 images of 9 classes to train on" in out
    assert "skipped class02/2.png: damaged or truncated" in out

    (images / "class03" / "0.png").write_bytes((images / "class04" / "0.png").read_bytes())
    told = "in another class, byte for byte, so one of the two labels is wrong: class04/0.png (of"
    assert told in call(capsys, *words, "--data.bad-images", "skip")[1]

    monkeypatch.setattr("proximetry.training.estimate.MAX_DECODED", 16)  # of 48, class00/0 first
    found = json.loads(call(capsys, *words, "--data.bad-images", "skip", "--json")[1])
    assert found["decoded"] == 16
    assert [reason.partition(":")[0] for reason in found["left_out"]] == ["class00/0.png"]
    code, out, _ = call(capsys, *words, "--data.bad-images", "skip")
    assert "16 images decoded to check them, evenly spaced" in out
    assert files(home / "here") == []


def test_too_little_disk_is_said_before_anything_is_decoded(capsys, home, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 1000}))
    for more in ([], ["--dry-run"]):
        start = [home / "flowers", *small(data_cache="pixels")]
        code, _, err = call(capsys, *start, *more)
        assert code == 1
        assert "the pixel cache needs 83 kB" in err
        assert "use data.cache none, name another folder as data.cache_dir" in err
    assert not (home / "here" / "runs").exists()
    code, out, err = call(capsys, home / "flowers", *small(), "--dry-run")
    assert code == 0, err
    assert "images decoded on the fly (a pixel cache of 83 kB exceeds the limit of" in out
    assert "cache    none" in out


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_crop_size_of_the_recipe_gives_way_to_a_fixed_size_backbone(capsys, home, more):
    sizes = "model: {image_size: 32, resize: 32}\ndata: {crop_size: 16}\n"
    (home / "mine.yaml").write_text(f"base: default-cpu\n{sizes}")
    changes = {"model_backbone": "vit_tiny_patch16_224", "model_image_size": 32, "model_resize": 32}
    words = [home / "flowers", *small(**changes), "--recipe", home / "mine.yaml"]
    code, out, err = call(capsys, *words, *more)
    assert code == 0, err
    assert "training crops of 32×32 instead of 16: vit_tiny_patch16_224 takes one size" in out
    if not more:
        assert "is complete already" in call(capsys, *words)[1]


def test_overrides_print_what_they_reset(capsys, home):
    words = [home / "flowers", "--model.image-size", "24", "--model.dim", "8", "--loss", "arcface"]
    more = ["--model.backbone", "small_convnet", "--model.weights", "none", "--dry-run"]
    for recipe in ([], ["--recipe", "default-cpu"]):
        code, out, err = call(capsys, *words, *more, *recipe, "--device", "cpu")
        assert code == 0, err
        lines = out.splitlines()
        assert "model.image_size 24 also resets data.crop_size (160), model.resize (256)" in lines
        assert "model.dim 8 also resets model.pca_dim (512), model.whitening (0.25)" in lines
        assert any(line.startswith("loss.name 'arcface' also resets loss.set") for line in lines)


def test_a_transformer_takes_the_place_of_a_convolutional_network(capsys, home):
    changes = {"model_backbone": "vit_tiny_patch16_224", "model_image_size": 32, "model_resize": 32}
    code, out, err = call(capsys, home / "flowers", *small(**changes))
    assert code == 0, err
    assert "pooling token instead of gem" in out
    assert Embedder.load("runs/flowers/embedder").architecture.pooling == "token"


def test_weights_come_from_the_folder_of_another_run(capsys, home):
    images = home / "flowers"
    assert call(capsys, images, *small())[0] == 0
    for number, folder in enumerate(("runs/flowers", "runs/flowers/embedder")):
        code, _, err = call(capsys, images, f"next{number}", *small(model_weights=folder))
        assert code == 0, err
        results = json.loads((home / "here" / f"next{number}" / "results.json").read_text())
        assert results["weights"]["source"] == "file"
    for wrong, message in (
        (
            {"model_weights": "runs/flowers", "model_backbone": "resnet18"},
            "weights for small_convnet, not for resnet18",
        ),
        ({"model_weights": "runs"}, "runs is not a saved embedder"),
    ):
        code, _, err = call(capsys, images, "out", *small(**wrong))
        assert code == 2
        assert message in err


def test_overrides_are_checked_against_the_recipe_that_is_taken(home, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    changes = {"model.pca_dim": 1024}  # more than default-cpu has
    plan = train_plan.make_plan(str(home / "flowers"), None, None, changes, None)
    assert plan.recipe.model.pca_dim == 1024


def test_a_given_dataset_says_how_the_folder_is_read(capsys, home):
    images = home / "flowers"
    assert config(capsys, images, "--data.dataset", "faces")["data"]["dataset"] == "faces"
    code, _, err = call(capsys, "cub", "--data.dataset", "cars", "--data.root", images)
    assert code == 2
    assert "the images are given twice: cub and --data.dataset cars" in err


def test_a_recipe_that_cannot_be_read_locks_no_folder(capsys, home):
    place = home / "here" / "runs" / "flowers"
    assert call(capsys, home / "flowers", *small())[0] == 0
    recipe = (place / "recipe.yaml").read_text()
    (place / "recipe.yaml").write_text(f"{recipe}\ngone: 1\n")
    code, out, err = call(capsys, home / "flowers", *small())
    assert code == 0, err
    assert "run folder runs/flowers-2" in out
    code, out, err = call(capsys, home / "flowers", place, *small(), "--fresh")
    assert code == 0, err


def test_starting_over_takes_the_recipe_of_the_device(capsys, home):
    words = [home / "flowers", "mine", *small()]
    assert call(capsys, *words, "--recipe", "default")[0] == 0
    code, out, err = call(capsys, *words, "--fresh")
    assert code == 0, err
    assert "recipe default-cpu" in out


@pytest.mark.parametrize("more", [[], ["--training.two-stages"]], ids=["one", "two stages"])
def test_starting_over_tells_of_the_complete_run_that_it_removes(capsys, home, more):
    words = [
        home / "flowers",
        "mine",
        *small(),
        "--schedule.freeze-backbone-epochs",
        "0",
        *more,
    ]
    told = "removing the complete run in mine: embedder, results, checkpoints, report;"
    code, out, err = call(capsys, *words, "--fresh")
    assert code == 0, err
    assert told not in out, "there is none yet"
    code, out, err = call(capsys, *words, "--fresh")
    assert code == 0, err
    assert out.count(told) == 1


def test_a_link_that_leads_nowhere_is_told(capsys, home):
    (home / "here" / "photos").symlink_to(home / "unplugged")
    code, _, err = call(capsys, "photos")
    assert code == 2
    assert f"photos is a link to {home}/unplugged, which is not there" in err


@pytest.mark.parametrize("word", ["auto", "true", "false"])
def test_a_key_that_may_be_auto_takes_a_word(capsys, home, word):
    found = config(capsys, home / "flowers", "--training.cuda-graph", word)
    assert found["training"]["cuda_graph"] == {"true": True, "false": False}.get(word, word)


def test_a_dry_run_knows_how_far_a_run_has_come(capsys, home):
    words = [home / "flowers", *small(training_epochs=2)]
    assert call(capsys, *words)[0] == 0
    found = json.loads(call(capsys, *words, "--dry-run", "--json")[1])
    assert found["folder"]["state"] == "complete already"
    assert found["seconds"] == {"decoding": 0, "training": 0, "evaluation": 0}
    assert found["decoded"] == 0, "there is nothing left to decode them for"
    longer = [home / "flowers", *small(training_epochs=3), "--dry-run", "--json"]
    found = json.loads(call(capsys, *longer)[1])
    assert found["folder"]["state"] == "resumed"
    assert found["seconds"]["training"] == pytest.approx(32 / found["images_per_second"])
    found = json.loads(call(capsys, *words, "--fresh", "--dry-run", "--json")[1])
    assert found["folder"]["state"] == "new; the complete run there will be removed"


def test_the_next_commands_name_images_as_evaluate_takes_them(home):
    images = home / "flowers"
    results = {
        "protocol": "last",
        "selected": {"epoch": 1, "test": {"recall@1": 0.5}},
        "last": {"epoch": 1, "test": {"recall@1": 0.5}},
    }
    for source, changes, expected in (
        ("faces", {"data.root": str(images)}, f"evaluate out faces --root {images}"),
        ("glyphs", {}, "evaluate out glyphs"),
        (str(images), {}, f"evaluate out {images}"),
    ):
        plan = train_plan.make_plan(source, home / "here" / "out", None, changes, "cpu")
        text = train_plan.summary(results, plan).replace(" \\\n     ", "")
        assert expected in text


def test_the_next_commands_can_be_typed_as_they_are(home):
    np.savez(home / "here" / "vectors.npz", vectors=np.eye(4), labels=np.arange(4) // 2)
    results = {"protocol": "last", "selected": {"epoch": 1}, "last": {"epoch": 1}}
    plan = train_plan.make_plan("vectors.npz", home / "here" / "my run", None, {}, "cpu")
    text = train_plan.summary(results, plan)
    assert "export 'my run' 'my run.onnx'" in text
    assert "embed 'my run' vectors.npz --out embeddings.npz" in text


def test_a_run_folder_serves_as_weights(capsys, home):
    images = home / "flowers"
    stages = {"training_epochs": 2, "schedule_freeze-backbone-epochs": 0}
    words = [images, "two", *small(**stages), "--training.two-stages"]
    code, _, err = call(capsys, *words)
    assert code == 0, err
    assert Embedder.load("two").dim == 8
    code, _, err = call(capsys, images, "more", *small(model_weights="two"))
    assert code == 0, err


def test_a_section_of_a_config_may_be_empty(capsys, home):
    (home / "config.yaml").write_text("data:\nmodel.dim: 16\n")
    found = config(capsys, home / "flowers", "--config", home / "config.yaml")
    assert (found["data"]["dataset"], found["model"]["dim"]) == ("folder", 16)


def test_home_is_understood_in_recipes(capsys, home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    (home / "mine.yaml").write_text("base: glyphs\ndata: {dataset: folder, root: ~/flowers}\n")
    assert config(capsys, home / "mine.yaml")["data"]["root"] == str(home / "flowers")


def test_what_looks_like_an_override_is_no_folder(capsys, home):
    for word, option in (
        ("training.epochs=2", "--training.epochs 2"),
        ("lr=1", "--optimizer.lr 1"),
        ("batch-size=8", "--data.batch-size 8"),
    ):
        code, _, err = call(capsys, home / "flowers", word)
        assert code == 2
        assert f"{word} is no folder for the run; write {option}\n" in err
        assert not (home / "here" / word).exists()
    assert config(capsys, home / "flowers", "runs/lr=1")


@pytest.mark.parametrize(
    ("images", "more", "told"),
    [
        ("few", [], "Nothing was measured: no classes were held out, and there is no test set."),
        (
            "split",
            ["--evaluation.protocol", "last", "--evaluation.no-final-test"],
            "Nothing was measured: no classes were held out, and evaluation.final_test is false.",
        ),
        (
            "flowers",
            ["--training.two-stages", "--schedule.freeze-backbone-epochs", "0"],
            "The second stage was not measured: it trained on all classes, and there is no test "
            "set; the figures of the first are in mine/first-stage/results.json.",
        ),
    ],
    ids=["few classes", "no final test", "two stages"],
)
def test_a_run_without_figures_says_why(capsys, home, images, more, told):
    make_images(home / "few", classes=4)
    make_images(home / "split" / "train", classes=4)
    make_images(home / "split" / "test", classes=2, seed=1)
    code, out, err = call(capsys, home / images, "mine", *small(), *more)
    assert code == 0, err
    assert f"{told} Evaluate the embedder on images of other classes." in " ".join(out.split())


def test_the_json_of_a_run_says_where_it_lies(capsys, home):
    out = call(capsys, home / "flowers", "mine", *small(), "--json")[1]
    assert json.loads(out)["folder"] == "mine"


def test_images_that_were_skipped_are_skipped_by_the_next_command(capsys, home):
    images = home / "flowers"
    (images / "class00" / "broken.png").write_bytes(b"no image")
    code, out, err = call(capsys, images, "mine", *small(data_bad_images="skip"))
    assert code == 0, err
    assert "--bad-images skip" in out.partition("Next:")[2]


def hostile(home):
    """Splits beside stray folders and links, with a class in both and files that never end."""
    root = make_images(home / "hostile" / "train", classes=3).parent
    make_images(root / "test", classes=2, seed=1)
    for name in ("__MACOSX", "docs"):
        (root / name).mkdir()
    (root / "loop").symlink_to(".")
    os.mkfifo(root / "train" / "class00" / "pipe.png")
    (root / "train" / "class01" / "zero.png").symlink_to("/dev/zero")
    return root


TAKEN = "images: 3 classes in train/, 2 classes in test/; left out: __MACOSX, docs, loop"


def test_what_the_folder_was_taken_for_is_told_first(capsys, home):
    words = [hostile(home), "mine", *small()]
    for more, begins in (["--dry-run"], "checking"), ([], "decoding"):
        code, out, err = call(capsys, *words, *more)
        assert code == 1
        assert out.index(TAKEN) < out.index(begins)
        for name, reason in (("class00/pipe", "a named pipe"), ("class01/zero", "a device")):
            assert f"train/{name}.png: cannot be opened: {reason}, not a file" in err
        assert err.endswith("--data.bad-images skip leaves them out\n")
    assert not (home / "here" / "mine").exists()
    code, out, err = call(capsys, *words, "--data.bad-images", "skip")
    assert code == 0, err
    assert "left out train/class00/pipe.png" in out
    notes = json.loads((home / "here" / "mine" / "results.json").read_text())["notes"]
    assert notes[0] == TAKEN
    assert notes[1].startswith("train and test share 2 classes, so test does not")


def test_a_folder_whose_names_are_not_utf8_trains(capsys, home):
    sys.stdout.reconfigure(errors="backslashreplace")
    root = (home / "flowers").rename(home / os.fsdecode(b"b\xfcro"))
    (root / "class00").rename(root / os.fsdecode(b"cl\xe4ss"))
    (root / "class01" / "0.png").rename(root / "class01" / os.fsdecode(b"\xff.png"))
    for _ in range(2):  # the second time from its results
        code, _, err = call(capsys, root, "mine", *small(evaluation_protocol="last"))
        assert code == 0, err
    assert "cl\udce4ss" in Embedder.load(home / "here" / "mine").class_names
