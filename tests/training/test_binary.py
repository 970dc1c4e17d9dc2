"""Binary codes are trained, resumed, evaluated, indexed and searched."""

import json

import numpy as np
import pytest
import torch

from proximetry.data import open_dataset
from proximetry.metrics import Metrics, evaluate
from proximetry.models import Embedder
from proximetry.models.embedder import extract_features
from proximetry.search import Gallery, indexes
from proximetry.training import Recipe, RecipeError
from proximetry.training.evaluator import evaluate_embedder
from tests.training.tiny import make_recipe, tiny_values

BITS = {"bits": 16, "dim": 16}


@pytest.fixture(scope="module")
def recipe(images, cache):
    changes = {"model": BITS, "training": {"checkpoint_steps": 2}}
    return make_recipe(images, cache, **changes)


def plain(scores):
    return {key: value for key, value in scores.items() if not isinstance(value, dict)}


def test_run_reports_metrics_of_codes(whole, recipe, images):
    results = json.loads((whole / "results.json").read_text())
    found = results["selected"]["held_out"]
    assert set(found["codes"]) == set(plain(found))
    assert results["codes"].startswith("16 bits, the signs of the dimensions; Hamming distance")
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all("codes" in line["held_out"] for line in lines)
    embedder = Embedder.load(whole)
    assert embedder.bits == 16
    # `evaluate` and the run agree with a direct computation.
    catalog = open_dataset("folder", images)
    held = sorted({*catalog.class_names} - {*embedder.class_names})
    part = catalog.subset(np.flatnonzero(np.isin(catalog.labels, held)))
    again = evaluate_embedder(embedder, part)
    assert again["codes"] == found["codes"]
    files = [part.file(row) for row in range(len(part))]
    packed = np.packbits(embedder.encode(files).numpy() > 0, axis=1)
    labels = np.asarray(part.labels)
    assert evaluate(packed, labels, similarity="hamming") == found["codes"]


def test_codes_are_centered_on_the_training_images(whole, images):
    embedder, catalog = Embedder.load(whole), open_dataset("folder", images)
    rows = [r for r in range(len(catalog)) if catalog.labels[r] in embedder.class_names]
    pixels = torch.stack([embedder.preprocessing.pixels(catalog.file(row)) for row in rows])
    with torch.no_grad():
        free = embedder.project(extract_features(embedder, pixels), normalize=False)
    torch.testing.assert_close(free.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    share = (free > 0).float().mean(0)
    assert (share > 0).all()
    assert (share < 1).all()


def test_train_embed_index_and_search_codes(call, images, cache, tmp_path, monkeypatch):
    values = tiny_values(cache, training={"epochs": 1}, evaluation={"untrained": False})
    values["model"]["pca_dim"] = 4  # reset by bits, as is dim
    values["evaluation"]["eval_dims"] = [2]
    (tmp_path / "mine.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    output = call("train", images, "run", "--recipe", "mine.yaml", "--model.bits", "64")
    assert "binary codes, Hamming distance" in output
    assert Recipe.load("run/recipe.yaml").model.dim == 64

    document = json.loads(call("evaluate", "run", images, "--binary", "--json"))
    vectors, codes, both = document["rows"]
    assert vectors["metrics"] == plain(document["metrics"])
    assert codes["metrics"] == document["metrics"]["codes"]
    assert [row["bytes_per_image"] for row in document["rows"]] == [256, 8, 264]
    assert both["name"] == "binary codes, 200 re-ranked"
    # All 48 images are candidates, so only the vectors rank them.
    assert both["metrics"] == vectors["metrics"]

    monkeypatch.setattr(indexes, "MIN_INDEXED_ROWS", 10)
    assert "index: BFlat for 48 images" in call("index", images, "--model", "run")
    assert Gallery.open("gallery").index == "BFlat"
    query = next(images.rglob("*.png"))
    assert f"1.0000  {query.parent.name}" in call("search", query, "-k", "2")
    call("index", images, "--index", "auto")  # the original index


def test_bits_replace_dim():
    reduced = {"dim": 512, "pca_dim": 128, "whitening": 0.5}
    base = {"model": reduced, "evaluation": {"eval_dims": [64]}}
    recipe = Recipe.load(base, {"model.bits": 128})
    assert (recipe.model.dim, recipe.model.pca_dim, recipe.evaluation.eval_dims) == (128, None, ())
    assert recipe.override({"model.bits": 256}).model.dim == 256
    assert Recipe.load(recipe.to_dict()) == recipe
    with pytest.raises(RecipeError, match="differ"):
        recipe.override({"model.dim": 64})


@pytest.mark.parametrize("apart", [False, True])
def test_evaluate_compares_search_methods(call, whole, images, tmp_path, apart):
    catalog = open_dataset("folder", images)
    paths = [catalog.file(row) for row in range(len(catalog))]
    lines = ["path,label,split,query,gallery"] if apart else ["path,label,split"]
    for row, path in enumerate(paths):
        roles = f",{row % 2 == 0},{row % 3 != 0}".lower() if apart else ""
        lines.append(f"{path},{catalog.labels[row]},test{roles}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    plain_one = json.loads(call("evaluate", whole, tmp_path / "table.csv", "--json"))
    assert "rows" not in plain_one
    words = ("evaluate", whole, tmp_path / "table.csv", "--binary", "--expand", "3", "--rerank")
    document = json.loads(call(*words, "--json"))
    assert {key: document[key] for key in plain_one} == plain_one  # unchanged
    rows = {row["name"]: row for row in document["rows"]}
    assert [*rows] == [
        "vectors, cosine",
        "binary codes, Hamming distance",
        "binary codes, 200 re-ranked",
        "query expansion (α-QE, n = 3)",
        "k-reciprocal re-ranking (20, 6, 0.3)",
        "expansion, then re-ranking",
    ]
    who = "24 queries against a gallery of 32 images" if apart else "each of 48 images against all"
    assert all(row["protocol"].startswith(who) for row in document["rows"])
    # Computed directly.
    vectors, labels = Embedder.load(whole).encode(paths), np.asarray(catalog.labels)
    given = {"embeddings": vectors, "labels": labels}
    if apart:
        number = np.arange(48)
        queries, held = number[number % 2 == 0], number[number % 3 != 0]
        given = {
            "embeddings": vectors[held],
            "labels": labels[held],
            "ignore_groups": held,
            "queries": vectors[queries],
            "query_labels": labels[queries],
            "query_ignore_groups": queries,
        }
    expected = [
        evaluate(**given),
        evaluate(**given, binary=True),
        evaluate(**given, binary=True, candidates=200),
        evaluate(**given, expand=3),
        evaluate(**given, rerank=True),
        evaluate(**given, expand=3, rerank=True),
    ]
    for row, one in zip(document["rows"], expected, strict=True):
        assert row["metrics"] == pytest.approx(one.mean(), abs=1e-9), row["name"]
    output = call(*words)
    assert all(name in output for name in rows)
    assert "bytes per image" in output
    assert max(map(len, output.split("note: ")[0].splitlines())) <= 80


@pytest.mark.parametrize("method", [{"expand": 3}, {"rerank": True}, {"expand": 2, "rerank": True}])
def test_evaluate_equals_gallery_search(whole, images, tmp_path, method):
    """With queries outside the gallery, search results have the evaluated metrics."""
    embedder, catalog = Embedder.load(whole), open_dataset("folder", images)
    held = np.arange(len(catalog)) % 4 > 0
    gallery = Gallery.build(embedder, catalog.subset(np.flatnonzero(held)), tmp_path / "gallery")
    queries = [catalog.file(row) for row in np.flatnonzero(~held)]
    labels = np.asarray(catalog.labels)
    found = gallery.search(queries, k=7, **method)
    hits = found.labels == labels[~held][:, None]
    vectors = embedder.encode([catalog.file(row) for row in range(len(catalog))])
    metrics = Metrics(recall_at=(1, 3), precision_at=(1, 3, 7), at_r=False, mrr=False, ndcg_at=())
    scored = evaluate(
        vectors[torch.from_numpy(held)],
        labels[held],
        queries=vectors[torch.from_numpy(~held)],
        query_labels=labels[~held],
        metrics=metrics,
        **method,
    )
    for k in (1, 3, 7):
        np.testing.assert_allclose(scored.scores[f"precision@{k}"], hits[:, :k].mean(1))


def test_expand_requires_cosine_similarity(call, images, tmp_path):
    Embedder.create("small_convnet", 8, normalize=False, weights="none", image_size=24).save(
        tmp_path / "model"
    )
    output = call("evaluate", tmp_path / "model", images, "--expand", "3", code=2)
    assert "--expand requires cosine" in output
    assert "3 images" not in output
