"""The scan of a copy in bfloat16 equals the exact scan. Without a GPU the copy is on the CPU."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from proximetry._util.errors import UsageError
from proximetry.models import Embedder
from proximetry.search import Gallery
from proximetry.search.exact import Part, Store
from proximetry.search.gpu_scan import GpuScan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDARIES = [0, 7000, 7100, 20000]  # of the segments


def make_store(similarity):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(20_000, 64)).astype(np.float32)
    vectors[5000:5200] = vectors[0]  # more duplicates than candidates
    vectors[6000:6400] = vectors[1] + 1e-5 * rng.normal(size=(400, 64))  # equal in bfloat16
    queries = np.concatenate([vectors[:5], rng.normal(size=(40, 64)).astype(np.float32)])
    if similarity == "cosine":
        for array in (vectors, queries):
            array /= np.linalg.norm(array, axis=1, keepdims=True)
    longest = float(np.linalg.norm(vectors.astype(np.float64), axis=1).max())
    segments = [vectors[a:b] for a, b in pairwise(BOUNDARIES)]
    return Store(segments, np.array(BOUNDARIES), similarity, longest), queries


def parts(store, mask=None):
    for vectors, start in zip(store.vectors, BOUNDARIES, strict=False):
        squares = np.square(vectors.astype(np.float64)).sum(1).astype(np.float32)
        allowed = None if mask is None else mask[start : start + len(vectors)]
        yield Part(
            vectors, squares if store.similarity == "euclidean" else None, start, None, allowed
        )


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
@pytest.mark.parametrize("k", [1, 10, 150])
@pytest.mark.parametrize("share", [None, 0.5, 0.001])
def test_gpu_scan_equals_exact_scan(similarity, k, share):
    store, queries = make_store(similarity)
    mask = None if share is None else np.random.default_rng(1).random(20_000) < share
    expected = store.search([*parts(store, mask)], queries, k)
    actual = GpuScan(store, ["a", "b", "c"], DEVICE).search(queries, k, mask)
    np.testing.assert_array_equal(actual.positions, expected.positions)
    np.testing.assert_array_equal(actual.scores, expected.scores)


def test_gpu_scan_with_fewer_rows_than_results():
    store, queries = make_store("cosine")
    mask = np.zeros(20_000, bool)
    mask[[3, 7050]] = True
    hits = GpuScan(store, ["a", "b", "c"], DEVICE).search(queries[3:4], 4, mask)
    assert hits.positions.tolist() == [[3, 7050, -1, -1]]
    assert GpuScan(store, ["a", "b", "c"], DEVICE).search(queries[:0], 4).positions.shape == (0, 4)
    empty = GpuScan(Store([], np.array([0]), "cosine", 0.0), [], DEVICE)
    assert empty.search(queries[:2], 1).positions.tolist() == [[-1], [-1]]


def test_gpu_scan_copies_new_segments_only():
    store, queries = make_store("cosine")
    first = GpuScan(store, ["a", "b", "c"], DEVICE)
    second = GpuScan(store, ["a", "b", "new"], DEVICE, first)
    shared = [second._copies[name] is first._copies.get(name) for name in ("a", "b", "new")]
    assert shared == [True, True, False]
    np.testing.assert_array_equal(
        second.search(queries, 5).positions, first.search(queries, 5).positions
    )
    first.device = torch.device("cuda:7")  # another one
    third = GpuScan(store, ["a", "b", "c"], DEVICE, first)
    assert third._copies["a"] is not first._copies["a"]


def test_gpu_scan_reports_too_little_memory(monkeypatch):
    store, _ = make_store("cosine")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    with pytest.raises(UsageError, match="GPU memory"):
        GpuScan(store, ["a", "b", "c"], "cuda")


def test_gallery_on_a_device_equals_exact_search(tmp_path):
    """Also with filters, and after changes by this process and another."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(3000, 16)).astype(np.float32)
    embedder = Embedder.create("vectors", None, weights="none", input_dim=16)
    paths = [f"{number}.jpg" for number in range(len(vectors))]
    labels = [str(number % 7) for number in range(len(vectors))]
    gallery = Gallery.build(
        embedder, paths[:2900], tmp_path / "g", labels=labels[:2900], vectors=vectors[:2900]
    )
    on_device = Gallery.open(tmp_path / "g").to(DEVICE)
    on_device._scan_device = torch.device(DEVICE)  # `to` uses a copy on a GPU only
    on_device.refresh()

    def check():
        for where in (None, {"label": "3"}, {"label": {"!=": "3"}}):
            expected = gallery.search(vectors[:50], 10, where=where, exact=True)
            actual = on_device.search(vectors[:50], 10, where=where)
            np.testing.assert_array_equal(actual.ids, expected.ids)
            np.testing.assert_array_equal(actual.similarities, expected.similarities)

    check()
    gallery.remove([0, 3, 2000])
    gallery.add(paths[2900:], labels=labels[2900:], vectors=vectors[2900:])
    copies = {id(copy) for copy in on_device._snapshot.gpu_scan._copies.values()}
    on_device.refresh()
    assert copies & {id(copy) for copy in on_device._snapshot.gpu_scan._copies.values()}
    check()
    on_device.remove([5])
    gallery.refresh()
    check()
    gallery.remove([6])
    count = len(on_device)
    assert on_device.to("cpu")._snapshot.gpu_scan is None
    assert len(on_device) == count  # at its version until it is refreshed
    on_device.refresh()
    check()
