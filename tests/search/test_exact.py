"""The exact scan against `metrics.retrieve` and plain computations, with all kinds of ties."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proximetry.metrics import retrieve
from proximetry.metrics._search.neighbors import largest
from proximetry.metrics._search.similarities import normalize
from proximetry.search import duplicates
from proximetry.search.duplicates import compare_all, group_pairs
from proximetry.search.exact import Part, Store
from proximetry.search.manifest import ignore


def make_store(vectors, similarity, edges=()):
    """Return a store of segments that start at these rows, and the parts to scan: all."""
    starts = np.array([0, *sorted(edges), len(vectors)])
    segments = [vectors[a:b] for a, b in pairwise(starts)]
    squares = [(s.astype(np.float64) ** 2).sum(1).astype(np.float32) for s in segments]
    longest = float(np.sqrt((vectors.astype(np.float64) ** 2).sum(1).max(initial=0)))
    store = Store(segments, starts, similarity, longest)
    parts = [
        Part(vectors, square if similarity == "euclidean" else None, int(start))
        for vectors, square, start in zip(segments, squares, starts, strict=False)
    ]
    return store, parts


def exact_vectors(draw, count, similarity):
    """Return vectors with exact float32 products and many ties and duplicates."""
    if similarity == "euclidean":
        return draw.integers(-2, 3, (count, 6)).astype(np.float32)
    vectors = np.zeros((count, 8), np.float32)
    for row in vectors:  # four entries of a half have length 1
        row[draw.choice(8, 4, replace=False)] = draw.choice([-0.5, 0.5], 4)
    return vectors


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 80),
    n=st.integers(1, 6),
    k=st.integers(1, 90),
    similarity=st.sampled_from(["cosine", "euclidean"]),
    edges=st.sets(st.integers(1, 79), max_size=3),
)
def test_exact_search_equals_retrieve_including_ties(seed, count, n, k, similarity, edges):
    draw = np.random.default_rng(seed)
    vectors = exact_vectors(draw, count, similarity)
    queries = exact_vectors(draw, n, similarity)
    store, parts = make_store(vectors, similarity, {edge for edge in edges if edge < count})
    k = min(k, count)
    result = store.search(parts, queries, k)
    expected = retrieve(vectors, queries=queries, k=k, similarity=similarity)
    assert np.array_equal(result.positions, expected.ids)
    scores = result.scores if similarity == "cosine" else -np.sqrt(-result.scores)
    np.testing.assert_allclose(scores, expected.similarities, rtol=2e-7)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-25, 1e-6, 1.0, 1e6]))
def test_ties_of_float32_products_are_ordered_in_float64(seed, scale):
    draw = np.random.default_rng(seed)
    center = draw.standard_normal(16) * 30  # far from the origin, and close together
    vectors = ((center + draw.standard_normal((200, 16)) * 1e-3) * scale).astype(np.float32)
    queries = ((center + draw.standard_normal((3, 16)) * 1e-3) * scale).astype(np.float32)
    store, parts = make_store(vectors, "euclidean", {77})
    result = store.search(parts, queries, 5)
    for query, places in zip(queries.astype(np.longdouble), result.positions, strict=True):
        distances = ((vectors.astype(np.longdouble) - query) ** 2).sum(1).astype(np.float64)
        assert places.tolist() == np.lexsort((np.arange(200), distances))[:5].tolist()


def test_scores_do_not_depend_on_the_batch():
    draw = np.random.default_rng(1)
    vectors = normalize(torch.from_numpy(draw.standard_normal((5000, 33)))).float().numpy()
    queries = normalize(torch.from_numpy(draw.standard_normal((1100, 33)))).float().numpy()
    store, parts = make_store(vectors, "cosine", {17, 4000})
    together = store.search(parts, queries, 7)
    for row in (0, 1, 500, 1099):
        alone = store.search(parts, queries[row : row + 1], 7)
        assert np.array_equal(alone.positions[0], together.positions[row])
        assert np.array_equal(alone.scores[0], together.scores[row])


@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), k=st.integers(1, 12))
def test_masked_and_gathered_rows_equal_retrieve(seed, share, k):
    draw = np.random.default_rng(seed)
    vectors = exact_vectors(draw, 60, "euclidean")
    allowed = draw.random(60) < share
    store, parts = make_store(vectors, "euclidean")
    rows = np.flatnonzero(allowed)
    result = store.search([parts[0]._replace(allowed=allowed)], vectors[:3], k)
    gathered = store.search([parts[0]._replace(rows=rows)], vectors[:3], k)
    assert np.array_equal(result.positions, gathered.positions)
    if not len(rows):
        assert (result.positions == -1).all()
        assert (result.scores == -np.inf).all()
        return
    expected = retrieve(vectors[rows], queries=vectors[:3], k=k, similarity="euclidean")
    assert np.array_equal(result.positions[:, : expected.k], rows[expected.ids])
    assert (result.positions[:, expected.k :] == -1).all()


@given(seed=st.integers(0, 10**6), width=st.integers(1, 3000), count=st.integers(1, 20))
def test_largest_equals_topk(seed, width, count):
    draw = np.random.default_rng(seed)
    values = torch.from_numpy(draw.integers(0, 1000, (3, width)).astype(np.float32))
    actual, columns = largest(values, count)
    expected = values.topk(min(count, width), 1).values
    assert torch.equal(actual.sort(1, descending=True).values, expected)
    assert torch.equal(values.gather(1, columns), actual)
    assert all(len(set(row)) == len(row) for row in columns.tolist())


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_pairs_above_a_threshold_equal_two_loops(similarity, monkeypatch):
    monkeypatch.setattr(duplicates, "_TILE", 16)
    draw = np.random.default_rng(3)
    vectors = exact_vectors(draw, 70, similarity)
    store, _ = make_store(vectors, similarity, {20, 40})
    positions = np.flatnonzero(draw.random(70) < 0.8)
    least = 0.5 if similarity == "cosine" else -8.0
    pairs, scores = compare_all(store, positions, least, ignore)
    expected = {}
    for i in positions.tolist():
        for j in positions[positions > i].tolist():
            difference = vectors[i] - vectors[j]
            near = vectors[i] @ vectors[j] if similarity == "cosine" else -difference @ difference
            if near >= least:
                expected[i, j] = float(near)
    assert len(expected) > 20
    assert dict(zip(map(tuple, pairs.tolist()), scores.tolist(), strict=True)) == expected


def test_group_pairs_returns_connected_components():
    pairs = np.array([[1, 5], [5, 9], [2, 3], [20, 21], [21, 22], [20, 22]])
    groups = [group.tolist() for group in group_pairs(pairs)]
    assert groups == [[1, 5, 9], [20, 21, 22], [2, 3]]
    assert group_pairs(np.empty((0, 2), np.int64)) == []


def test_too_many_pairs_are_rejected(monkeypatch):
    monkeypatch.setattr(duplicates, "_MAX_PAIRS", 100)
    store, _ = make_store(np.ones((40, 4), np.float32) / 2, "cosine")
    with pytest.raises(ValueError, match="more than 100 pairs"):
        compare_all(store, np.arange(40), 0.9, ignore)
