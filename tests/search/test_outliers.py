"""Outliers, label errors, and lists of duplicates to remove."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from proximetry._util.errors import UsageError
from proximetry.metrics import label_model
from proximetry.search import Gallery, metadata, outliers
from proximetry.search.exact import Hits
from tests.search.conftest import DIM, make_embedder, names


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """Ten clusters of 30 vectors; two wrong labels, five without labels and two outliers."""
    draw = np.random.default_rng(0)
    classes = np.arange(302) % 10
    centers = np.eye(10, DIM + 2)[classes]
    vectors = centers + 0.1 * draw.standard_normal(centers.shape)
    vectors[300:] = -1, 0.5, -1, 0.5, -1, 1, 0.5, -1, 0.5, -1
    vectors[301] *= np.linspace(-1, 1, DIM + 2)
    labels = [f"class{number}" for number in classes]
    labels[7], labels[100] = "class3", "class9"
    labels[20:25] = [None] * 5
    embedder = make_embedder().__class__.create("vectors", None, weights="none", input_dim=DIM + 2)
    table = metadata.from_columns({"path": names(0, 302), "label": labels})
    folder = tmp_path_factory.mktemp("clustered") / "g"
    return Gallery.build(embedder, table, folder, vectors=vectors.astype(np.float32))


def test_outliers_are_far_from_their_neighbors(clustered):
    found = clustered.outliers()
    assert {one.id for one in found[:2]} == {300, 301}
    assert len(found) < 12
    similarities = [one.similarity for one in found]
    assert similarities == sorted(similarities)
    first = clustered.search(found[0].id, 5)
    assert np.isclose(first.similarities.mean(), found[0].similarity, atol=1e-6)
    assert found[0].path == names(found[0].id, 1)[0]


def test_label_errors_disagree_with_their_neighbors(clustered):
    found = {one.id: one for one in clustered.label_errors()}
    assert (found[7].label, found[7].suggestion) == ("class3", "class7")
    assert (found[100].label, found[100].suggestion) == ("class9", "class0")
    assert found[7].probability > 0.9
    assert set(found) <= {7, 100, 300, 301}


@pytest.mark.parametrize("missing", [-1, 10**6])
def test_missing_neighbors_do_not_count(clustered, monkeypatch, missing):
    """On Milvus a search may find fewer images, or one that was added meanwhile."""
    find_nearest = outliers.find_nearest

    def find_few(search, queries, k):
        positions, scores = find_nearest(search, queries, k)
        positions[:, 3:], scores[:, 3:] = missing, -np.inf if missing < 0 else scores[:, 3:]
        return Hits(positions, scores)

    monkeypatch.setattr(outliers, "find_nearest", find_few)
    assert {one.id for one in clustered.outliers()[:2]} == {300, 301}
    of = label_model._Scores.of
    votes = []
    monkeypatch.setattr(
        label_model._Scores, "of", lambda *one: votes.append(of(*one)[1]) or of(*one)
    )
    found = {one.id: one.suggestion for one in clustered.label_errors()}
    assert torch.cat(votes).sum(1).max() < 0.31  # 3 votes of 10
    assert (found[7], found[100]) == ("class7", "class0")
    assert set(found) <= {7, 100, 300, 301}


def test_galleries_without_classes_or_neighbors(embedder, tmp_path):
    gallery = Gallery.build(embedder, ["a.png"], tmp_path / "g", vectors=np.ones((1, DIM)))
    assert gallery.outliers() == []
    with pytest.raises(UsageError, match="fewer than two classes"):
        gallery.label_errors()
    few = Gallery.build(
        embedder, ["a.png", "b.png"], tmp_path / "h", labels=["a", "b"], vectors=np.eye(2, DIM)
    )
    assert few.label_errors() == []


def test_outliers_command(clustered, call, tmp_path):
    text = call("outliers", clustered.path)
    assert "(mean cosine to the 5 nearest images)" in text
    assert "class3 → class7?" in text
    document = json.loads(call("outliers", clustered.path, "--json"))
    assert {one["id"] for one in document["outliers"][:2]} == {300, 301}
    assert {one["id"] for one in document["label_errors"]} >= {7, 100}
    call("outliers", clustered.path, "--sheet", tmp_path / "s.html")
    assert "00300.png" in (tmp_path / "s.html").read_text()


def test_duplicates_to_remove(images, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(images, "images")
    make_embedder().save("model")
    first, second = Path("images/class00/0.png"), Path("images/class02/1.png")
    shutil.copy(first, "images/class05/same size.png")
    Path("images/class06/large.png").write_bytes(second.read_bytes() + b"trailing bytes")
    call("index", "images", "--model", "model")
    text = call(
        "duplicates", "--threshold", 0.9999999, "--to-remove", "list.txt", "--sheet", "s.html"
    )
    paths = Path("list.txt").read_text().splitlines()
    kept = {str(tmp_path / one) for one in (first, "images/class06/large.png")}
    removed = {str(tmp_path / one) for one in (second, "images/class05/same size.png")}
    assert removed <= set(paths)
    assert not kept & set(paths)
    assert f"{len(paths)} files to remove: list.txt" in text
    assert "contact sheet: s.html" in text
    assert Path("s.html").read_text().count("data:image/jpeg") >= 4
    assert ".txt" in call("duplicates", "--to-remove", "list.csv", code=2)
