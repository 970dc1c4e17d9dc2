"""Recall of every index where labels are clusters: filters, removals, long lists, `auto`."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from proximetry.models import Embedder
from proximetry.search import Gallery, indexes, metadata, snapshot
from tests.search.conftest import names

COUNT, CLASSES, DIM = 12_000, 100, 32
KINDS = ["HNSW32", "IVF64,Flat", "IVF256,Flat", "IVF128,SQ8", "IVF64,PQ16x4", "BFlat", "SQ8"]


def draw_clusters(classes, seed):
    """Return vectors around the centers of these classes."""
    centers = np.random.default_rng(0).standard_normal((CLASSES, DIM))
    noise = np.random.default_rng(seed).standard_normal((len(classes), DIM))
    return (centers[classes] + 0.5 * noise).astype(np.float32)


LABELS = np.arange(COUNT) % CLASSES
VECTORS = draw_clusters(LABELS, seed=1)


def build(path, kind="auto", **options):
    torch.manual_seed(0)
    embedder = Embedder.create("small_convnet", DIM, weights="none", image_size=24)
    table = metadata.from_columns({"path": names(0, COUNT), "label": list(map(str, LABELS))})
    return Gallery.build(embedder, table, path, kind, vectors=VECTORS, **options)


@pytest.fixture(scope="module", params=KINDS)
def gallery(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("gallery") / "g", request.param)


def recall(result, queries, allowed, k=10):
    """Return recall@k of the allowed rows; all results must be allowed."""
    assert set(result.ids.ravel()) - {-1} <= set(np.flatnonzero(allowed))
    stored = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    scores = np.where(allowed, queries @ stored.T, -np.inf)
    nearest = np.argpartition(-scores, k, 1)[:, :k]
    return np.mean([np.isin(a, b).mean() for a, b in zip(nearest, result.ids, strict=True)])


@pytest.fixture(params=[0, snapshot.MAX_SCAN_ENTRIES])
def budget(request, monkeypatch):
    """Disable scans where there is an index, or use the default."""
    monkeypatch.setattr(snapshot, "MAX_SCAN_ENTRIES", request.param)
    monkeypatch.setattr(snapshot, "SCAN_FACTOR", 64 if request.param else 1)


@pytest.mark.parametrize("share", [0.05, 0.11, 0.2, 0.3, 0.5, 0.8])
def test_filter_by_cluster_keeps_recall(gallery, share, budget):
    inside = np.arange(CLASSES) < round(share * CLASSES)
    where = {"label": list(map(str, np.flatnonzero(inside)))}
    for classes in (np.flatnonzero(inside), np.flatnonzero(~inside)):  # near and far queries
        queries = draw_clusters(np.resize(classes, 50), seed=2)
        result = gallery.search(queries, 10, where=where)
        assert recall(result, queries, inside[LABELS]) >= 0.98


@pytest.mark.parametrize("remaining", [11, 90])
def test_removal_of_the_clusters_of_the_queries_keeps_recall(gallery, remaining, budget, tmp_path):
    shutil.copytree(gallery.path, tmp_path / "g")
    changed = Gallery.open(tmp_path / "g")
    allowed = np.isin(LABELS, np.arange(remaining))
    changed.remove(np.flatnonzero(~allowed))
    queries = draw_clusters(np.resize(np.arange(remaining, CLASSES), 50), seed=2)
    result = changed.search(queries, 10)
    assert recall(result, queries, allowed) >= 0.98


def test_long_lists_are_filled(gallery):
    queries = draw_clusters(np.arange(4), seed=2)
    for k in (1000, 5000):
        result = gallery.search(queries, k)
        assert recall(result, queries, LABELS >= 0, k) == 1
    few = gallery.search(queries, 200, where={"label": "7"})
    assert ((few.ids >= 0).sum(1) == 120).all()


def test_plain_recall_reaches_the_goal_with_every_index(gallery):
    queries = draw_clusters(np.arange(CLASSES), seed=2)
    assert recall(gallery.search(queries, 10), queries, LABELS >= 0) >= 0.97
    (info,) = gallery._snapshot.manifest.segments
    assert info.recall >= indexes.RECALL


@pytest.mark.parametrize(("graph", "kind"), [(COUNT, "HNSW32"), (0, "IVF512,SQ8")])
def test_auto_reports_recall_of_large_galleries(tmp_path, monkeypatch, graph, kind):
    monkeypatch.setattr(indexes, "MAX_FLAT_ROWS", 100)
    monkeypatch.setattr(indexes, "MAX_GRAPH_ROWS", graph)
    lines = []
    gallery = build(tmp_path / "g", report=lines.append)
    queries = draw_clusters(np.arange(CLASSES), seed=2)
    assert recall(gallery.search(queries, 10), queries, LABELS >= 0) >= 0.97
    (info,) = gallery._snapshot.manifest.segments
    assert info.index == kind
    assert info.recall >= indexes.RECALL
    assert len(lines) == 1
    assert f"auto → {kind} for 12 000 images" in lines[0]
    assert "recall@10 0.9" in lines[0] or "recall@10 1.000" in lines[0]


def test_low_recall_raises_the_effort_that_is_stored(tmp_path):
    gallery = build(tmp_path / "g", "PCA8,Flat")
    (info,) = gallery._snapshot.manifest.segments
    assert info.effort > 1
    assert info.recall >= indexes.RECALL
    assert Gallery.open(tmp_path / "g")._snapshot.segments[0].index.effort == info.effort


def test_recall_below_the_goal_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(indexes, "MAX_EFFORT", 1)
    lines = []
    gallery = build(tmp_path / "g", "PCA2,Flat", report=lines.append)
    (info,) = gallery._snapshot.manifest.segments
    assert info.recall < indexes.RECALL
    assert "below 0.98" in lines[0]


def test_search_after_import_of_torch_utils(tmp_path):
    """pytorch-metric-learning imports it, which replaces the methods of faiss for the process."""
    script = """
import sys
import numpy as np
import faiss.contrib.torch_utils
from proximetry.search import indexes

vectors = np.random.default_rng(0).normal(size=(500, 8)).astype("float32")
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
for kind in ("HNSW32", "IVF8,Flat", "BFlat"):
    file = __import__("pathlib").Path(sys.argv[1], kind.replace(",", "-"))
    indexes.build(kind, vectors, "cosine", file, lambda done, total: None)
    assert (indexes.Index(file, kind).candidates(vectors[:9], 1)[:, 0] == np.arange(9)).all()
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
