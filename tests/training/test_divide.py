"""Folders with any number of classes can be trained on, or are rejected with advice."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from proximetry.data import Catalog
from proximetry.models import Embedder
from proximetry.training import RunError, train
from proximetry.training.reporting import PlainDisplay
from proximetry.training.sources.training_data import split_rows
from tests.training.tiny import make_recipe

SIDE = 12


def make_classes(root, images, split=""):
    """Make class folders with these numbers of images."""
    draw = np.random.default_rng(len(images))
    for number, count in enumerate(images):
        folder = root / split / f"{split}{number:03d}"
        folder.mkdir(parents=True)
        color = draw.integers(40, 216, 3)
        for i in range(count):
            image = draw.normal(color, 10, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(image).save(folder / f"{i}.png")
    return root


def recipe_for(root, cache, **changes):
    """Early stopping, as in the recipe for folders."""
    settings = {
        "data": {"short_side": SIDE, "batch_size": 32},
        "model": {"image_size": SIDE},
        "training": {"epochs": 2, "stop_after": 6},
    }
    for section, keys in changes.items():
        settings[section] = {**settings.get(section, {}), **keys}
    return make_recipe(root, cache, **settings)


@pytest.mark.parametrize("alone", [False, True], ids=["", "with classes of one image"])
@pytest.mark.parametrize("classes", [2, 3, 5, 9, 20, 500])
def test_folder_of_few_classes_trains(tmp_path, cache, capsys, classes, alone):
    images = [2 if classes == 500 else 4] * classes
    if alone:
        images[::2] = [1] * len(images[::2])
    recipe = recipe_for(make_classes(tmp_path / "images", images), cache)
    results = train(recipe, tmp_path / "run", display=PlainDisplay())
    embedder = Embedder.load(tmp_path / "run" / "embedder")
    assert results["epochs"] == 2
    few = f"{classes} training classes are too few to hold some out. "
    printed = capsys.readouterr().out
    if classes < 10:
        assert results["protocol"] == "last"
        assert "untrained" not in results, "there is nothing to evaluate it on"
        assert results["selected"] == {"epoch": 2}
        assert len(embedder.class_names) == classes
        assert f"{few}Training uses all classes and saves the last epoch" in results["notes"]
        assert "training.stop_after 6 has no effect" in printed
        assert few in printed
        return
    assert results["protocol"] == "held_out"
    assert few not in printed
    held_out = results["selected"]["held_out"]
    assert held_out["queries_without_positive"] == 0
    assert classes - len(embedder.class_names) == max(3, round(0.25 * sum(n > 1 for n in images)))


def test_one_class_is_rejected(tmp_path, cache):
    root = make_classes(tmp_path / "images", [5])
    for protocol in ("held_out", "last"):
        recipe = recipe_for(root, tmp_path / "cache", evaluation={"protocol": protocol})
        with pytest.raises(RunError, match="images of 1 classes"):
            train(recipe, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        assert not (tmp_path / "cache").exists()
    shutil.copytree(root / "000", root / "another")
    train(recipe_for(root, cache), tmp_path / "run")


def test_plateau_with_too_few_classes_is_rejected(tmp_path, cache):
    root = make_classes(tmp_path / "images", [4] * 9)
    recipe = recipe_for(root, cache, schedule={"name": "plateau"})
    for two_stages in (False, True):
        with pytest.raises(
            RunError, match=r"9 training classes .*schedule\.name.*two_stages false"
        ):
            train(recipe.override({"training.two_stages": two_stages}), tmp_path / "run")
        assert not list(tmp_path.glob("run/*"))
    followed = {"schedule.name": "step", "training.two_stages": False}
    assert train(recipe.override(followed), tmp_path / "run")["protocol"] == "last"


def test_unusable_split_val_is_rejected(tmp_path, cache):
    root = make_classes(tmp_path / "images", [3] * 4, "train")
    make_classes(root, [1, 1, 1], "val")
    make_classes(root, [5], "test")
    recipe = recipe_for(root, cache)
    with pytest.raises(RunError, match=r"split val needs two classes.*evaluation\.protocol last"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    results = train(recipe.override({"evaluation.protocol": "last"}), tmp_path / "run")
    assert results["selected"] == {"epoch": 2}
    for split in ("val", "test"):
        assert any(f"split {split} needs two classes" in note for note in results["notes"])
    with pytest.raises(RunError, match=r"split test needs two classes"):
        train(recipe.override({"evaluation.protocol": "paper"}), tmp_path / "paper")


@pytest.mark.parametrize(
    ("split", "protocol"), [("test", "paper"), ("val", "held_out"), ("all", "held_out")]
)
def test_roles_without_positives_are_reported(tmp_path, cache, split, protocol):
    root = make_classes(tmp_path / "images", [3] * 12)
    catalog = Catalog.from_folder(root)
    used = tuple(split if split == "all" or label > "006" else "train" for label in catalog.labels)
    idle = (False,) * len(catalog)
    queries = tuple(one == split for one in used)
    replace(catalog, splits=used, queries=queries, galleries=idle).to_csv(root / "t.csv")
    changes = {"data.dataset": "csv", "data.root": str(root / "t.csv")}
    recipe = recipe_for(root, cache, evaluation={"protocol": protocol}).override(changes)
    with pytest.raises(RunError, match=r"gallery.*evaluation\.protocol last"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    results = train(recipe.override({"evaluation.protocol": "last"}), tmp_path / "run")
    notes = [note for note in results["notes"] if "has gallery set" in note]
    assert len(notes) == (split != "all")


def test_split_val_of_two_classes_is_used(tmp_path, cache):
    root = make_classes(tmp_path / "images", [3] * 4, "train")
    make_classes(root, [1, 2], "val")
    results = train(recipe_for(root, cache), tmp_path / "run")
    assert results["protocol"] == "held_out"
    assert results["selected"]["held_out"]["queries"] == 2


def divided(images, fraction=0.2):
    labels = [f"{number:03d}" for number, count in enumerate(images) for _ in range(count)]
    catalog = Catalog(
        root=".",
        paths=tuple(map(str, range(len(labels)))),
        labels=tuple(labels),
        splits=("all",) * len(labels),
    )
    recipe = make_recipe(".", ".", data={"batch_size": 2}, evaluation={"held_out": fraction})
    found = split_rows(catalog, recipe)
    names = {key: {labels[row] for row in found.rows[key]} for key in ("train", "held_out")}
    assert not names["train"] & names["held_out"]
    assert len(names["train"] | names["held_out"]) == len(images)
    return len(names["held_out"]), found


@pytest.mark.parametrize(
    ("images", "fraction", "held", "why"),
    [
        ([2] * 9, 0.2, 0, "9 training classes are too few"),
        ([2] * 10, 0.2, 3, ""),
        ([2] * 10, 0.8, 8, ""),
        ([2] * 10, 0.9, 0, r"evaluation\.held_out 0\.9 leaves too few of 10 classes"),
        ([2] * 100, 0.2, 20, ""),
        ([2] * 2 + [1] * 98, 0.2, 0, "of 100 training classes only 2 have two images, too few"),
        ([2] * 3 + [1] * 97, 0.2, 3, ""),
        ([2] * 40 + [1] * 60, 0.2, 8, ""),
    ],
)
def test_at_least_three_classes_are_held_out_or_none(images, fraction, held, why):
    count, found = divided(images, fraction)
    assert count == held
    assert found.protocol == ("held_out" if held else "last")
    assert len(found.notes) == (held == 0)
    assert all(re.match(why, note) for note in found.notes)
