"""Runs that keep some of their numbers, cut them, or look into the mirror."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from proximetry import metrics
from proximetry.data import open_dataset
from proximetry.models import Embedder
from proximetry.training import Recipe, RecipeError, RunError, RunFolder, train
from proximetry.training.display import metrics_table
from tests.training.test_distributed import RUN, launch
from tests.training.test_trainer import assert_same_run, killed_at
from tests.training.tiny import make_images, make_recipe, with_


@pytest.fixture
def narrow(tmp_path, cache):
    for seed, split in enumerate(("train", "test")):
        make_images(tmp_path / "images" / split, classes=6, seed=seed)
    return make_recipe(
        tmp_path / "images",
        cache,
        model={"dim": 12, "keep": 5},
        training={"ema": 0.9},
        evaluation={"protocol": "last", "watch_test": True, "cuts": [1, 3]},
    )


def encoded(folder, recipe, split):
    """Vectors of the saved embedder, of images that are read anew, and their labels."""
    catalog = open_dataset("folder", recipe.data.root)
    rows = np.flatnonzero(np.asarray(catalog.splits) == split)
    files = [catalog.root / catalog.paths[row] for row in rows]
    vectors = Embedder.load(folder / "embedder").encode(files)
    return vectors, np.asarray(catalog.labels)[rows]


def by_hand(folder, recipe, numbers=None):
    """Metrics of the saved embedder on the test images."""
    vectors, labels = encoded(folder, recipe, "test")
    return vectors, metrics.evaluate(vectors[:, :numbers], labels)


def crosstalk(vectors):
    """The largest mean product of two numbers, beside their strengths: 0 along principal axes."""
    second = torch.mm(vectors.t(), vectors)
    strength = second.diagonal().sqrt()
    return (second / torch.outer(strength, strength) - torch.eye(len(second))).abs().max().item()


def test_what_is_judged_is_what_is_saved(narrow, tmp_path):
    results = train(narrow, tmp_path / "run", device="cpu")
    judged = results["last"]["test"]
    vectors, found = by_hand(tmp_path / "run", narrow)
    assert vectors.shape[1] == 5
    assert {key: judged[key] for key in found} == pytest.approx(found)
    _, cut = by_hand(tmp_path / "run", narrow, 1)
    of_cut = {key.removesuffix("[:1]"): v for key, v in judged.items() if key.endswith("[:1]")}
    asked = {key: value for key, value in cut.items() if not key.startswith("queries")}
    assert of_cut == pytest.approx(asked)
    assert judged["recall@1"] != judged["recall@1[:1]"]
    assert RunFolder(tmp_path / "run").history()[-1]["test"] == judged
    # The strongest numbers come first.
    strength = vectors.square().mean(0)
    assert strength[0] > strength[-1]


def test_keeping_all_numbers_changes_nothing_that_is_measured(narrow, tmp_path):
    whole = with_(with_(narrow, "evaluation", cuts=()), "model", keep=None)
    turned = with_(whole, "model", keep=12)
    one, two = (
        train(recipe, tmp_path / name, device="cpu")["last"]["test"]
        for name, recipe in (("whole", whole), ("turned", turned))
    )
    assert one == pytest.approx(two)


def test_the_axes_are_those_of_the_training_images(narrow, tmp_path):
    recipe = with_(narrow, "model", normalize=False)
    train(recipe, tmp_path / "run", device="cpu")
    assert crosstalk(encoded(tmp_path / "run", recipe, "train")[0]) < 1e-3
    assert crosstalk(encoded(tmp_path / "run", recipe, "test")[0]) > 1e-2


def test_the_chosen_epoch_gets_axes_of_its_own(narrow, tmp_path):
    recipe = with_(narrow, "evaluation", protocol="paper", watch_test=False)
    recipe = with_(with_(recipe, "training", epochs=6, ema=0.0), "optimizer", lr=0.03)
    recipe = with_(recipe, "model", normalize=False)
    results = train(recipe, tmp_path / "run", device="cpu")
    assert results["chosen"]["epoch"] < results["last"]["epoch"]
    assert crosstalk(encoded(tmp_path / "run", recipe, "train")[0]) < 1e-3
    _, found = by_hand(tmp_path / "run", recipe)
    assert {key: results["chosen"]["test"][key] for key in found} == pytest.approx(found)


def test_vectors_that_are_compared_by_distance_are_cut_about_their_mean(narrow, tmp_path):
    recipe = with_(narrow, "model", normalize=False)
    recipe = with_(recipe, "evaluation", similarity="euclidean")
    train(recipe, tmp_path / "run", device="cpu")
    vectors, _ = encoded(tmp_path / "run", recipe, "train")
    assert crosstalk(vectors - vectors.mean(0)) < 1e-3
    assert crosstalk(vectors) > 1e-2


def test_more_numbers_than_training_images_are_refused(narrow, tmp_path):
    recipe = with_(narrow, "model", dim=64, keep=40)
    with pytest.raises(RunError, match=r"keep 40 needs as many training images.*there are 36"):
        train(recipe, tmp_path / "run", device="cpu")


def test_a_killed_run_goes_on_the_same(narrow, tmp_path, monkeypatch):
    train(narrow, tmp_path / "whole", device="cpu")
    killed_at(5, narrow, tmp_path / "part", monkeypatch)
    train(narrow, tmp_path / "part", resume=True, device="cpu")
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_two_processes_find_the_axes_of_one(narrow, tmp_path):
    narrow = with_(narrow, "model", freeze_batchnorm=True)  # else each sees its own share
    narrow = with_(narrow, "evaluation", cuts=(3,))
    train(narrow, tmp_path / "one", device="cpu")
    narrow.save(tmp_path / "recipe.yaml")
    launch(RUN, tmp_path / "recipe.yaml", tmp_path / "two")
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text())["last"]["test"]
        for name in ("one", "two")
    )
    assert one == pytest.approx(two, abs=0.05)
    heads = [Embedder.load(tmp_path / name / "embedder").head for name in ("one", "two")]
    assert torch.allclose(heads[0].weight, heads[1].weight, atol=1e-3)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"keep": 13}, "model.keep 13 is more than model.dim 12"),
        ("model", {"keep": 0}, "model.keep must be positive, got 0"),
        ("evaluation", {"cuts": [5]}, r"evaluation.cuts must differ and lie between 0 and .* 5,"),
        ("evaluation", {"cuts": [0]}, r"evaluation.cuts must differ and lie between 0"),
        ("evaluation", {"cuts": [2, 2]}, r"evaluation.cuts must differ"),
        ("evaluation", {"metric": "recall@1[:4]"}, r"recall@1\[:4\]' is not computed"),
    ],
)
def test_what_cannot_be_kept_or_cut_is_said(narrow, section, values, message):
    told = narrow.to_dict()
    told[section] |= values
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(told)


def test_an_epoch_may_be_chosen_by_a_cut(narrow, tmp_path):
    recipe = with_(narrow, "evaluation", protocol="held_out", metric="map@r[:1]")
    recipe = Recipe.from_dict(recipe.to_dict())
    results = train(recipe, tmp_path / "run", device="cpu")
    curve = [line["held_out"]["map@r[:1]"] for line in RunFolder(tmp_path / "run").history()]
    assert results["chosen"]["epoch"] == 1 + curve.index(max(curve))


def test_a_mirrored_embedder_sees_both_sides_outside_training(narrow, tmp_path):
    torch.manual_seed(0)
    embedder = Embedder.create(
        "small_convnet", 6, weights="none", image_size=24, mirror=True, normalize=False
    )
    plain = Embedder.create("small_convnet", 6, weights="none", image_size=24, normalize=False)
    plain.load_state_dict(embedder.state_dict())
    pixels = torch.randn(4, 3, 24, 24)
    embedder.eval(), plain.eval()
    with torch.no_grad():
        both = (plain(pixels) + plain(pixels.flip(3))) / 2
        assert torch.allclose(embedder(pixels), both, atol=1e-5)
        assert torch.allclose(embedder(pixels), embedder(pixels.flip(3)), atol=1e-6)
        embedder.save(tmp_path / "saved")
        assert torch.equal(Embedder.load(tmp_path / "saved")(pixels), embedder(pixels))
        embedder.train(), plain.train()
        plain.load_state_dict(embedder.state_dict())
        assert torch.equal(embedder(pixels), plain(pixels))
    results = train(with_(narrow, "model", mirror=True), tmp_path / "run", device="cpu")
    vectors, found = by_hand(tmp_path / "run", narrow)
    assert Embedder.load(tmp_path / "run" / "embedder").architecture.mirror
    judged = results["last"]["test"]
    assert {key: judged[key] for key in found} == pytest.approx(found)
    assert F.normalize(vectors, dim=1).allclose(vectors, atol=1e-5)
    with pytest.raises(ValueError, match="mirror images by itself"):
        embedder.encode([], flip=True)


def test_cuts_are_lines_of_their_own_in_the_table():
    rows = {"test": {"recall@1": 0.5, "queries": 9.0, "recall@1[:64]": 0.25, "recall@1[:8]": 0.125}}
    told = [line.split() for line in metrics_table(rows).splitlines()]
    assert told == [
        ["recall@1"],
        ["test", "50.0"],
        ["first", "64", "numbers", "25.0"],
        ["first", "8", "numbers", "12.5"],
    ]
