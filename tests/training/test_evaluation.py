"""`train` and `evaluate` report the same metrics, with PCA, truncated embeddings and flip TTA."""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from proximetry import metrics
from proximetry.data import open_dataset
from proximetry.models import Embedder
from proximetry.models.pca import regularized_moments
from proximetry.recipe.loading import shipped_recipes
from proximetry.training import Recipe, RunError, RunFolder, evaluator, train
from proximetry.training.evaluator import Evaluator, evaluate_embedder
from proximetry.training.metrics_table import WITH_DISTRACTORS, metrics_table
from proximetry.training.reporting import describe_epoch
from proximetry.training.sources.training_data import split_rows
from tests.training.ranks import RUN, Ranks
from tests.training.runs import set_selection_values
from tests.training.tiny import make_images, make_recipe, with_


@pytest.fixture
def reduced(tmp_path, cache):
    for seed, split in enumerate(("train", "test")):
        make_images(tmp_path / "images" / split, classes=6, each=6, seed=seed)
    return make_recipe(
        tmp_path / "images",
        cache,
        model={"dim": 12, "pca_dim": 5},
        training={"ema": 0.9},
        evaluation={"protocol": "last", "watch_test": True, "eval_dims": [1, 3]},
    )


def encoded(folder, recipe, split):
    """Return the saved embedder's vectors of the image files, and their labels."""
    catalog = open_dataset("folder", recipe.data.root)
    rows = np.flatnonzero(np.asarray(catalog.splits) == split)
    files = [catalog.root / catalog.paths[row] for row in rows]
    vectors = Embedder.load(folder / "embedder").encode(files, 128)
    return vectors, np.asarray(catalog.labels)[rows]


def by_hand(folder, recipe, dim=None):
    """Return the metrics of the saved embedder on the test images."""
    vectors, labels = encoded(folder, recipe, "test")
    return vectors, metrics.evaluate(vectors[:, :dim], labels)


def crosstalk(vectors):
    """Return the largest correlation (about the origin) of two dimensions; 0 for principal axes."""
    second = torch.mm(vectors.t(), vectors)
    strength = second.diagonal().sqrt()
    return (second / torch.outer(strength, strength) - torch.eye(len(second))).abs().max().item()


def test_saved_embedder_has_the_evaluated_metrics(reduced, tmp_path):
    results = train(reduced, tmp_path / "run", device="cpu")
    scores = results["last"]["test"]
    vectors, found = by_hand(tmp_path / "run", reduced)
    assert vectors.shape[1] == 5
    assert {key: scores[key] for key in found} == found
    for dim in (1, 3):
        assert scores["dims"][str(dim)] == by_hand(tmp_path / "run", reduced, dim)[1]
    assert scores["recall@1"] != scores["dims"]["1"]["recall@1"]
    assert RunFolder(tmp_path / "run").history()[-1]["test"] == scores
    # Dimensions are sorted by variance.
    strength = vectors.square().mean(0)
    assert strength[0] > strength[-1]


def test_pca_is_fitted_on_the_training_images(reduced, tmp_path):
    recipe = with_(reduced, "model", normalize=False, whitening=1.0)
    train(recipe, tmp_path / "run", device="cpu")
    vectors = encoded(tmp_path / "run", recipe, "train")[0]
    assert crosstalk(vectors) < 1e-3
    strength = vectors.square().mean(0)
    assert torch.allclose(strength, strength[:1], rtol=1e-2)
    assert crosstalk(encoded(tmp_path / "run", recipe, "test")[0]) > 1e-2


def test_pca_is_fitted_to_the_selected_epoch(reduced, tmp_path, monkeypatch):
    set_selection_values(monkeypatch, [0.1, 0.9, 0.2, 0.2, 0.2, 0.2])
    recipe = with_(reduced, "evaluation", protocol="paper", watch_test=False)
    recipe = with_(with_(recipe, "training", epochs=6, ema=0.0), "optimizer", lr=0.03)
    recipe = with_(recipe, "model", normalize=False)
    results = train(recipe, tmp_path / "run", device="cpu")
    assert results["selected"]["epoch"] == 2
    # The untrained embedder is reduced too.
    assert results["untrained"]["test"]["dims"].keys() == {"1", "3"}
    assert crosstalk(encoded(tmp_path / "run", recipe, "train")[0]) < 1e-3
    _, found = by_hand(tmp_path / "run", recipe)
    assert {key: results["selected"]["test"][key] for key in found} == found


def test_pca_for_euclidean_distances_is_about_the_mean(reduced, tmp_path):
    recipe = with_(reduced, "model", normalize=False)
    recipe = with_(recipe, "evaluation", similarity="euclidean")
    train(recipe, tmp_path / "run", device="cpu")
    vectors, _ = encoded(tmp_path / "run", recipe, "train")
    assert crosstalk(vectors - vectors.mean(0)) < 1e-3
    assert crosstalk(vectors) > 1e-2


def test_pca_to_more_dimensions_than_images(reduced, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "regularized_moments", mock.Mock(wraps=regularized_moments))
    recipe = reduced.override(
        {"model": {"dim": 64, "pca_dim": 40}, "evaluation.eval_dims": [3, 38]}
    )
    results = train(recipe, tmp_path / "run", device="cpu")
    assert evaluator.regularized_moments.called
    assert Embedder.load(tmp_path / "run" / "embedder").dim == 40
    assert list(results["last"]["test"]["dims"]) == ["3", "38"]
    assert train(recipe, tmp_path / "run", device="cpu") == results, "and resumes"


@pytest.mark.slow
def test_pca_on_two_ranks_equals_one(server, reduced, tmp_path):
    reduced = with_(reduced, "model", freeze_batchnorm=True)  # else statistics differ by rank
    reduced = with_(reduced, "evaluation", eval_dims=[3])
    train(reduced, tmp_path / "one", device="cpu")
    reduced.save(tmp_path / "recipe.yaml")
    ranks = Ranks(server, tmp_path, RUN, tmp_path / "recipe.yaml", tmp_path / "two")
    assert ranks.ended() == [0, 0], ranks.output(0)
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text())["last"]["test"]
        for name in ("one", "two")
    )
    assert one.pop("dims")["3"] == pytest.approx(two.pop("dims")["3"], abs=0.05)
    assert one == pytest.approx(two, abs=0.05)
    heads = [Embedder.load(tmp_path / name / "embedder").head for name in ("one", "two")]
    assert torch.allclose(heads[0].weight, heads[1].weight, atol=1e-3)


SIZES = sorted(
    {
        (r.data.short_side, r.model.image_size, r.model.resize, r.data.crop_size, r.model.squash)
        for r in map(Recipe.load, shipped_recipes())
    },
    key=str,
)


@pytest.mark.parametrize(("short_side", "image_size", "resize", "crop_size", "squash"), SIZES)
def test_train_and_evaluate_agree_on_recipe_sizes(
    tmp_path, cache, short_side, image_size, resize, crop_size, squash
):
    """For the sizes of every shipped recipe; images are larger and not square."""
    sides = {"short_side": short_side, "crop_size": crop_size}
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for number in range(2):
            folder = tmp_path / "images" / split / f"{split}{number}"
            folder.mkdir(parents=True)
            for i in range(3):
                noise = draw.normal(draw.integers(60, 190, 3), 40, (70, 90, 3)).clip(0, 255)
                image = Image.fromarray(noise.astype(np.uint8))
                image.resize((560, 452)).save(folder / f"{i}.jpg")
    recipe = make_recipe(
        tmp_path / "images",
        cache,
        data=sides,
        model={
            "image_size": image_size or 224,
            "resize": resize,
            "squash": squash,
            "pca_dim": 6,
        },
        training={"epochs": 1},
        evaluation={
            "protocol": "last",
            "untrained": False,
            "metrics": {"recall_at": [1, 2], "precision_at": [2]},
        },
    )
    results = train(recipe, tmp_path / "run", device="cpu")
    embedder = Embedder.load(tmp_path / "run" / "embedder")
    catalog = open_dataset("folder", tmp_path / "images").filter(split="test")
    scores = evaluate_embedder(embedder, catalog, metrics=recipe.evaluation.metrics)
    assert scores == results["last"]["test"]


@pytest.fixture
def difficult(tmp_path):
    """A table with queries and a gallery, rotated images, and one broken test image."""
    draw = np.random.default_rng(0)
    sideways = Image.Exif()
    sideways[0x0112] = 6
    rows = ["path,label,split,query,gallery"]
    for number in range(13):
        test = number >= 10
        for i in range(4):
            name = f"{number:02d}-{i}.jpg"
            noise = draw.normal(draw.integers(60, 190, 3), 40, (30, 47, 3)).clip(0, 255)
            Image.fromarray(noise.astype(np.uint8)).save(tmp_path / name, exif=sideways)
            roles = (str(test and i % 2 == odd).lower() for odd in (0, 1))
            split = "test" if test else "train"
            rows.append(",".join([name, f"class{number:02d}", split, *roles]))
    (tmp_path / "12-3.jpg").write_bytes(b"broken")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    return tmp_path / "table.csv"


@pytest.mark.parametrize(
    "changes",
    [
        {"training.precision": "bfloat16", "training.ema": 0.9},
        {"data.short_side": 40, "data.cache": "pixels", "evaluation.batch_size": 5},
        {
            "model": {"flip_tta": True, "tta_crops": [0.8], "pca_dim": 3, "whitening": 0.25},
            "evaluation.held_out": 0.4,
        },
        {"model.normalize": False, "evaluation.similarity": "euclidean", "training.ema": 0.9},
        {"evaluation.similarity": "euclidean"},
        {"model.squash": True, "data.crop_ratio": [0.5, 2.0]},
        {"model.squash": True, "data.random_crop": False, "data.cache": "none"},
    ],
    ids=str,
)
def test_train_and_evaluate_agree_on_difficult_data(difficult, cache, tmp_path, changes):
    data = {"dataset": "csv", "root": str(difficult), "bad_images": "skip"}
    recipe = make_recipe(difficult, cache, data=data).override(changes)
    results = train(recipe, tmp_path / "run", device="cpu")
    embedder = Embedder.load(tmp_path / "run" / "embedder")
    catalog = open_dataset("csv", difficult)
    with pytest.raises(ValueError, match=r"12-3\.jpg"):
        evaluate_embedder(embedder, catalog.filter(split="test"))
    test = [i for i, path in enumerate(catalog.paths) if path[0] == "1" and path != "12-3.jpg"]
    found = evaluate_embedder(embedder, catalog.subset(test))
    assert found == results["selected"]["test"]
    assert found["queries"] == 6
    # Held-out images have no roles: they are compared all against all.
    unseen = set(catalog.filter(split="train").class_names) - set(embedder.class_names)
    rows = [i for i, label in enumerate(catalog.labels) if label in unseen]
    found = evaluate_embedder(embedder, catalog.subset(rows))
    held_out = results["selected"]["held_out"]
    assert found == {name: held_out[name] for name in found}
    assert found["queries"] == len(rows) == 4 * len(unseen) > 0


def with_distractors(folder, recipe, *, skip=1):
    """Return MAP@R of held-out queries by brute force, with every skip-th training image."""
    catalog = open_dataset("folder", recipe.data.root)
    rows = split_rows(catalog, recipe).rows
    gallery = np.concatenate([rows["held_out"], rows["train"][::skip]])
    vectors = Embedder.load(folder / "embedder").encode([catalog.file(row) for row in gallery], 128)
    labels, found = np.asarray(catalog.labels)[gallery], []
    for query in range(len(rows["held_out"])):
        near = (vectors @ vectors[query]).numpy()
        near[query] = -2
        hits = labels[np.argsort(-near, kind="stable")] == labels[query]
        positives = (labels == labels[query]).sum() - 1
        at = np.flatnonzero(hits[:positives])
        found.append(sum((i + 1) / (place + 1) for i, place in enumerate(at)) / positives)
    return np.mean(found)


@pytest.mark.parametrize("pca_dim", [None, 5])
def test_selection_metric_with_distractors_equals_brute_force(
    tmp_path, cache, monkeypatch, pca_dim
):
    images = make_images(tmp_path / "images", classes=12, each=5)
    recipe = make_recipe(
        images, cache, model={"dim": 12, "pca_dim": pca_dim}, training={"epochs": 1}
    )
    scores = train(recipe, tmp_path / "all", device="cpu")["selected"]["held_out"]
    expected = with_distractors(tmp_path / "all", recipe)
    assert scores["with_distractors"] == {"map@r": pytest.approx(expected)}
    assert scores["with_distractors"]["map@r"] < scores["map@r"]
    # Training images are sampled evenly.
    monkeypatch.setattr(evaluator, "MAX_DISTRACTORS", 15)
    scores = train(recipe, tmp_path / "few", device="cpu")["selected"]["held_out"]
    assert scores["with_distractors"]["map@r"] == pytest.approx(
        with_distractors(tmp_path / "few", recipe, skip=3)
    )


def test_epoch_is_selected_with_distractors(tmp_path, cache, monkeypatch):
    values = iter([0.5, 0.7, 0.6])
    score = Evaluator._search_with_distractors

    def search(self, *args):
        assert set(score(self, *args)["with_distractors"]) == {"map@r"}
        return {"with_distractors": {"map@r": next(values, 0.1)}}

    monkeypatch.setattr(Evaluator, "_search_with_distractors", search)
    recipe = make_recipe(make_images(tmp_path / "images"), cache, evaluation={"untrained": False})
    results = train(recipe, tmp_path / "run", device="cpu")
    assert results["selected"]["epoch"] == 2
    line = RunFolder(tmp_path / "run").history()[1]
    assert "with distractors  70.0" in describe_epoch(line)
    assert WITH_DISTRACTORS in metrics_table({"held-out": results["selected"]["held_out"]})


def test_trained_classes_of_split_val_are_no_distractors(tmp_path, cache):
    for seed, split in enumerate(("train", "val")):
        make_images(tmp_path / "images" / split, classes=4, each=4, seed=seed)
    recipe = make_recipe(tmp_path / "images", cache, training={"epochs": 1})
    scores = train(recipe, tmp_path / "run", device="cpu")["selected"]["held_out"]
    assert scores["with_distractors"]["map@r"] == scores["map@r"]


def test_select_by_verification_and_clustering(tmp_path, cache):
    changes = {
        "evaluation": {"metrics": {"verification": True}, "select_by": "verification"},
        "training": {"epochs": 1},
    }
    images = make_images(tmp_path / "images")
    with pytest.raises(RunError, match="got 3 classes"):
        train(make_recipe(images, cache, **changes), tmp_path / "few", device="cpu")
    assert not (tmp_path / "few").exists()
    changes["evaluation"]["held_out"] = 0.5
    results = train(make_recipe(images, cache, **changes), tmp_path / "run", device="cpu")
    assert 0.5 <= results["selected"]["held_out"]["verification"] <= 1
    assert "with_distractors" not in results["selected"]["held_out"]
    changes["evaluation"] = {"metrics": {"clustering": True}, "select_by": "nmi"}
    results = train(make_recipe(images, cache, **changes), tmp_path / "nmi", device="cpu")
    assert "with_distractors" not in results["selected"]["held_out"]
