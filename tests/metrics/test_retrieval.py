from __future__ import annotations

import json
from array import array
from collections import deque
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from proximetry.metrics import Metrics, RetrievalResult, retrieve, score_result

from . import brute


def whole_numbers(seed, rows, columns=3, high=3):
    return np.random.default_rng(seed).integers(-high, high + 1, (rows, columns)).astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 25),
    k=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    similarity=st.sampled_from(["dot", "euclidean", "hamming"]),
    grouped=st.booleans(),
)
def test_self_search(rows, k, seed, similarity, grouped):
    vectors = whole_numbers(seed, rows)
    if similarity == "hamming":
        vectors = np.random.default_rng(seed).integers(0, 256, (rows, 2), dtype=np.uint8)
    labels = np.random.default_rng(seed + 1).integers(0, 5, rows)
    groups = np.random.default_rng(seed + 2).integers(0, 4, rows) if grouped else None
    lists = brute.rankings(
        vectors, vectors, similarity, same_set=True, query_groups=groups, groups=groups
    )
    result = retrieve(vectors, labels, k=k, similarity=similarity, ignore_groups=groups)
    matrix = brute.similarity_matrix(vectors, vectors, similarity)
    assert result.k == max(1, min(k, rows - 1))
    for i, order in enumerate(lists):
        remaining = order[: result.k]
        empty = result.k - len(remaining)
        assert result.ids[i].tolist() == remaining + [-1] * empty
        expected = [matrix[i, j] for j in remaining] + [-np.inf] * empty
        np.testing.assert_allclose(result.similarities[i], expected, rtol=1e-6)
        assert result.positives[i] == sum(labels[j] == labels[i] for j in order)
        assert (
            result.hits[i].tolist() == [labels[j] == labels[i] for j in remaining] + [False] * empty
        )


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_agrees_with_scikit_learn(similarity):
    vectors = np.random.default_rng(0).normal(size=(300, 20))
    result = retrieve(vectors, np.arange(300) % 10, k=5, similarity=similarity)
    outside = NearestNeighbors(n_neighbors=5, metric=similarity, algorithm="brute").fit(vectors)
    distances, ids = outside.kneighbors()
    assert np.array_equal(result.ids, ids)
    near = 1 - distances if similarity == "cosine" else -distances
    np.testing.assert_allclose(result.similarities, near, atol=1e-7)
    assert result.similarities.dtype == np.float64


class Column:
    """A column like that of pandas: not a sequence, but convertible to an array."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def __repr__(self):
        return "\n".join(map(str, self.values))


def test_inputs_of_all_kinds_agree():
    vectors = whole_numbers(3, 30)
    numbers = np.arange(30) % 7
    plain = retrieve(vectors, numbers, similarity="dot")
    kinds: list[Any] = [
        torch.from_numpy(numbers),
        torch.from_numpy(numbers).to(torch.int8),
        numbers.tolist(),
        (numbers - 3) * (2**40),
        numbers.astype(np.uint64),
        [f"class {n}" for n in numbers],
        np.array([f"class {n}" for n in numbers], dtype=object),
        Column(numbers),
        Column(numbers.astype(object)),  # as of a nullable integer column
        array("q", numbers),
        deque(numbers.tolist()),
        pyarrow.array(numbers),
        pyarrow.chunked_array([numbers[:10], numbers[10:]]),
        pyarrow.array([f"class {n}" for n in numbers]),
        pyarrow.array([f"class {n}" for n in numbers]).dictionary_encode(),
    ]
    if hasattr(np.dtypes, "StringDType"):  # from NumPy 2 on
        kinds.append(np.array(kinds[5], dtype=np.dtypes.StringDType()))
    for labels in kinds:
        again = retrieve(torch.from_numpy(vectors), labels, similarity="dot")
        assert np.array_equal(again.ids, plain.ids)
        assert np.array_equal(again.hits, plain.hits)
    flipped = np.ascontiguousarray(vectors[:, ::-1])[:, ::-1]
    assert np.array_equal(retrieve(flipped, numbers, similarity="dot").ids, plain.ids)
    swapped = vectors.astype(">f4")
    swapped.flags.writeable = False
    assert np.array_equal(retrieve(swapped, numbers, similarity="dot").ids, plain.ids)


def test_tiny_and_zero_vectors():
    vectors = torch.tensor([[1e-30, 0.0], [1e30, 0.0], [0.0, 2e-42], [0.0, 0.0]])
    result = retrieve(vectors, [0, 0, 1, 1], k=3)
    assert result.similarities[0].tolist() == [1.0, 0.0, 0.0]
    assert result.ids[0].tolist() == [1, 2, 3]
    assert result.ids[3].tolist() == [0, 1, 2]


def blobs(spread):
    draw = np.random.default_rng(0)
    labels = np.arange(400) % 80
    centers = draw.normal(size=(80, 16))
    return centers[labels] + spread * draw.normal(size=(400, 16)), labels


@pytest.mark.parametrize("offset", [0, 1_000, 10_000, -100_000])
def test_common_offset_keeps_precision(offset):
    vectors, labels = blobs(0.8)
    stored = (vectors + offset * np.linspace(0.5, 1, 16)).astype(np.float32)
    stored[7] = stored[:7].mean(0) * 3  # one item far from all others
    queries = stored[::3] + np.float32(0.25)
    actual = retrieve(stored, labels, k=20, similarity="euclidean")
    exact = retrieve(stored.astype(np.float64), labels, k=20, similarity="euclidean")
    np.testing.assert_allclose(actual.similarities, exact.similarities, rtol=2e-5)
    assert (actual.ids == exact.ids).mean() > 0.999
    actual = retrieve(stored, queries=queries, k=20, similarity="euclidean")
    matrix = brute.similarity_matrix(queries, stored, "euclidean")
    np.testing.assert_allclose(actual.similarities, -np.sort(-matrix, axis=1)[:, :20], rtol=2e-5)


def test_distances_of_near_items_have_all_their_digits():
    """They differ by less than the rounding error of the matrix product in the search."""
    draw = np.random.default_rng(0)
    query = (10 * draw.normal(size=(1, 64)) + 30).astype(np.float32)
    stored = np.concatenate([query + 1e-4 * draw.permutation(20)[:, None], -query])
    stored = stored.astype(np.float32)
    actual = retrieve(stored, queries=query, k=20, similarity="euclidean")
    distances = np.linalg.norm(stored.astype(np.float64) - query, axis=1)
    np.testing.assert_allclose(-actual.similarities[0], distances[actual.ids[0]], rtol=1e-7)
    assert actual.similarities[0].max() == 0  # a copy
    first = retrieve(stored, queries=query, k=1, similarity="euclidean")
    assert first.ids[0, 0] == actual.ids[0, 0], "the order does not depend on k"


@pytest.fixture
def result():
    return retrieve(whole_numbers(0, 12), [f"c{i % 4}" for i in range(12)], k=4, similarity="dot")


def test_saves_and_loads(result, tmp_path):
    path = result.save(tmp_path / "found.npz")
    again = RetrievalResult.load(path)
    for name in ("ids", "similarities", "query_codes", "gallery_codes", "classes", "positives"):
        assert np.array_equal(getattr(again, name), getattr(result, name)), name
    assert (again.similarity, again.is_self_search) == ("dot", True)
    assert [file.name for file in tmp_path.iterdir()] == ["found.npz"]


def test_load_rejects_object_arrays(result, tmp_path):
    path = result.save(tmp_path / "result.npz")
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | {"classes": arrays["classes"].astype(object)})  # a pickle
    with pytest.raises(ValueError, match=r"result\.npz .*allow_pickle"):
        RetrievalResult.load(path)


def test_load_rejects_other_files(tmp_path):
    path = tmp_path / "other.npz"
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"other\.npz"):
        RetrievalResult.load(path)
    np.savez(path, about=np.array(json.dumps({"format": "other"})))
    with pytest.raises(ValueError, match=r"other\.npz .* 'other'"):
        RetrievalResult.load(path)
    with pytest.raises(FileNotFoundError):
        RetrievalResult.load(tmp_path / "missing.npz")


def test_slices(result):
    assert len(result) == 12
    assert len(result[2:5]) == 3
    assert np.array_equal(result[2:5].ids, result.ids[2:5])
    assert np.array_equal(result[[7, 0]].query_labels, ["c3", "c0"])
    assert np.array_equal(result[result.positives > 0].ids, result.ids)
    assert np.array_equal(result[-1].ids, result.ids[-1:])
    assert len(result[[]]) == 0
    assert np.array_equal(result.top(2).similarities, result.similarities[:, :2])
    assert result[2:5].gallery_size == 12
    with pytest.raises(IndexError):
        result[12]
    with pytest.raises(ValueError, match="between 1 and 4, got 5"):
        result.top(5)


def test_repr_and_str_of_a_result(result):
    assert repr(result) == (
        "RetrievalResult(12 queries against each other, k=4, similarity='dot', 4 classes)"
    )
    text = str(result)
    assert "c0 → " in text
    assert "*" in text
    assert "and 7 more queries" in text


def test_searching_needs_no_labels(tmp_path):
    vectors, queries = whole_numbers(0, 12), whole_numbers(1, 7)
    for query_rows, labels in (({}, None), ({"queries": queries}, np.arange(7) % 4)):
        plain = retrieve(vectors, similarity="dot", **query_rows)
        if labels is not None:
            query_rows["query_labels"] = labels
        known = retrieve(vectors, np.arange(12) % 4, similarity="dot", **query_rows)
        assert np.array_equal(plain.ids, known.ids)
        assert np.array_equal(plain.similarities, known.similarities)
        assert plain.positives is None
        for name in ("hits", "labels", "query_labels", "gallery_labels"):
            with pytest.raises(ValueError, match="no labels"):
                getattr(plain, name)
        with pytest.raises(ValueError, match="no labels"):
            score_result(plain, Metrics(recall_at=(1,)))
        again = RetrievalResult.load(plain[2:5].save(tmp_path / "plain.npz"))
        assert np.array_equal(again.ids, plain.ids[2:5])
        assert again.gallery_size == 12
        assert again.classes is None
        assert "no labels" in repr(plain)
        assert f"  0 → {plain.ids[0, 0]} " in str(plain)


GOOD = np.eye(4, dtype=np.float32)
PAIRED = {"queries": GOOD, "query_labels": [0, 1, 0, 1]}
BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"embeddings": GOOD[0]}, "matrix"),
    ({"embeddings": GOOD[:0], "labels": []}, "embeddings is empty"),
    ({"embeddings": GOOD[:, :0]}, "embeddings is empty"),
    ({"embeddings": GOOD.tolist()}, "got list"),
    ({"embeddings": GOOD.astype(np.int64)}, "torch.int64"),
    ({"embeddings": GOOD.astype(np.complex64)}, "complex64"),
    ({"labels": [1, 2, 3]}, "labels has 3 entries for 4"),
    ({"labels": np.zeros((4, 1), dtype=int)}, r"\(4, 1\)"),
    ({"labels": [1.0, 2.0, 1.0, 2.0]}, "float64"),
    ({"labels": ["a", 1, "b", 2]}, "mixes"),
    ({"labels": ["a", "a\0", "b", "b"]}, "null characters"),
    ({"labels": "abcd"}, "abcd"),
    ({"labels": np.array([0, 1, 2, 2**63], dtype=np.uint64)}, "above 2"),
    ({"labels": [0, 1, 2, 2**70]}, f"{2**70}"),
    ({"labels": [[1], [2, 3], [4], [5]]}, "labels"),
    ({"labels": torch.tensor([1, 2, 1, 2]).bfloat16()}, "float32"),
    ({"k": 0}, "k .* 0"),
    ({"k": 3.0}, "k .* 3.0"),
    ({"similarity": "manhattan"}, "'manhattan'"),
    ({"similarity": "l2"}, "'euclidean'"),
    ({"similarity": "IP"}, "'dot'"),
    ({"similarity": "hamming"}, "uint8"),
    *(
        ({"embeddings": GOOD * scale, "similarity": similarity}, "overflow or underflow")
        for scale in (np.float64(1e160), np.float64(1e-160), np.float32(1e20), np.float32(1e-20))
        for similarity in ("dot", "euclidean")
    ),
    ({"queries": GOOD}, "labels without query_labels"),
    ({**PAIRED, "labels": None}, "labels without query_labels"),
    ({"query_labels": [1, 2, 3, 4]}, "query_labels without queries"),
    ({"query_ignore_groups": [1, 2, 3, 4]}, "query_ignore_groups without queries"),
    ({**PAIRED, "queries": GOOD[:, :3]}, "dimensions.* 3"),
    ({**PAIRED, "queries": GOOD.astype(np.float64)}, "float64"),
    ({**PAIRED, "query_labels": ["a", "b", "a", "b"]}, "Use one type"),
    ({"queries": GOOD[:0], "query_labels": []}, "queries is empty"),
    ({**PAIRED, "ignore_groups": [0, 1, 2, 3]}, "query_ignore_groups"),
    ({"ignore_groups": [0, 1]}, "ignore_groups has 2 entries for 4"),
]


@pytest.mark.parametrize(("change", "message"), BAD_INPUT)
def test_retrieve_rejects_invalid_input(change, message):
    arguments: dict[str, Any] = {"embeddings": GOOD, "labels": [0, 1, 0, 1]} | change
    with pytest.raises(ValueError, match=message):
        retrieve(**arguments)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_bad_rows_are_named(bad):
    vectors = np.ones((5000, 3), dtype=np.float32)
    vectors[[7, 4500, 4501, 4600, 4700, 4800, 4900], 1] = bad
    with pytest.raises(ValueError, match=r"7 of 5000 rows: 7, 4500, 4501, 4600, 4700 and 2 more"):
        retrieve(vectors, np.zeros(5000, dtype=int))
    with pytest.raises(ValueError, match=r"queries has NaN or infinite values in 1 of 1 rows: 0"):
        retrieve(
            GOOD.astype(np.float64), [0, 1, 0, 1], queries=np.full((1, 4), bad), query_labels=[0]
        )


def test_large_finite_values_are_accepted():
    vectors = np.full((4, 2), 3e38, dtype=np.float32)
    assert retrieve(vectors, [0, 0, 1, 1], k=1).similarities[0, 0] == pytest.approx(1.0)
    wide = np.full((4, 2), 1.7e308)
    assert retrieve(wide, [0, 0, 1, 1], k=1).similarities[0, 0] == pytest.approx(1.0)
