"""Copies of a vector tie and are ordered by index, with every search method."""

from __future__ import annotations

from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry.metrics import Metrics, evaluate, retrieve
from proximetry.metrics._search import neighbors, symmetric
from proximetry.metrics._search.problem import find_duplicates

from . import brute

CUTOFFS = (1, 3, 10)
CHOSEN = Metrics(recall_at=CUTOFFS, precision_at=CUTOFFS, ndcg_at=CUTOFFS, map_at=CUTOFFS)


def rankings(queries, distinct, which, similarity, own):
    """Full rankings of the gallery ``distinct[which]``, whose copies tie by construction."""
    nearness = brute.similarity_matrix(queries, distinct, similarity)[:, which]
    lists = []
    for place, row in enumerate(nearness):
        allowed = np.ones(len(row), dtype=bool)
        allowed[place if own else []] = False
        lists.append(brute.ranking(row, allowed))
    return lists


# The same examples every time: two vectors that are not copies may be equally near by chance.
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(2, 70),
    distinct=st.integers(1, 12),
    width=st.integers(2, 40),
    dtype=st.sampled_from([np.float32, np.float64]),
    similarity=st.sampled_from(["cosine", "euclidean", "dot", "hamming"]),
    query_rows=st.integers(0, 9),
    k=st.integers(1, 80),
    block=st.sampled_from([1, 5_000, 2**26]),
    seed=st.integers(0, 10**6),
)
def test_copies_are_ordered_by_index(
    rows, distinct, width, dtype, similarity, query_rows, k, block, seed
):
    draw = np.random.default_rng(seed)
    points = draw.normal(size=(distinct, width)).astype(dtype)
    queries = draw.normal(size=(query_rows, width)).astype(dtype)
    if similarity == "hamming":
        points, queries = (np.packbits(of > 0, axis=1) for of in (points, queries))
    which, labels = draw.integers(0, distinct, rows), draw.integers(0, 4, rows)
    query_labels = draw.integers(0, 4, query_rows)
    gallery = points[which]
    given = {"queries": queries, "query_labels": query_labels} if query_rows else {}
    lists = rankings(
        queries if query_rows else gallery, points, which, similarity, own=not query_rows
    )
    with patch.dict(neighbors.BLOCK_BYTES, cpu=block):
        result = retrieve(gallery, labels, k=k, similarity=similarity, **given)
        assert result.ids.tolist() == [order[: result.k] for order in lists]
        expected, without = brute.evaluate(
            lists, query_labels if query_rows else labels, labels, CUTOFFS
        )
        if not expected:
            return
        actual = evaluate(gallery, labels, similarity=similarity, metrics=CHOSEN, **given)
    assert actual["queries_without_positive"] == without
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "dot"])
@pytest.mark.parametrize("across", [False, True])
def test_copies_in_the_symmetric_search(similarity, across, monkeypatch):
    """Copies of one class, and copies that chain classes together."""
    monkeypatch.setattr(symmetric, "TILE", 64)
    draw = np.random.default_rng(0)
    points = draw.normal(size=(250, 67)).astype(np.float32)
    which = draw.permutation(np.concatenate([np.arange(250), np.arange(0, 250, 3)]))
    labels = which // 4
    if across:
        labels = np.where(np.arange(len(which)) % 2, which // 4, (which // 4) ^ 1)
    taken = Mock(wraps=symmetric.search_symmetric)
    monkeypatch.setattr(neighbors, "search_symmetric", taken)
    lists = rankings(points[which], points, which, similarity, own=True)
    result = retrieve(points[which], labels, k=15, similarity=similarity)
    assert result.ids.tolist() == [order[:15] for order in lists]
    expected, _ = brute.evaluate(lists, labels, labels, CUTOFFS)
    actual = evaluate(points[which], labels, similarity=similarity, metrics=CHOSEN)
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, abs=1e-12), name
    assert taken.call_count == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thousands_of_copies_beyond_the_end_of_the_lists(dtype):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(12_000, 24, generator=generator, dtype=dtype)
    copies = torch.randperm(12_000, generator=generator)[:10_000]
    vectors[copies] = vectors[copies[0]].clone()
    queries = vectors[copies[0]] + 0.05 * torch.randn(30, 24, generator=generator, dtype=dtype)
    result = retrieve(vectors, queries=queries, k=50)
    near = sorted(copies.tolist())[:50]
    assert result.ids.tolist() == [near] * 30


def test_copies_are_found_exactly():
    draw = np.random.default_rng(0)
    for dtype in (np.float32, np.float64, np.uint8):
        matrix = draw.integers(0, 3, (500, 6)).astype(dtype)
        matrix[:, :4] //= 2  # few rows differ in the first columns
        first: dict[bytes, int] = {}
        expected = [(i, first.setdefault(row.tobytes(), i)) for i, row in enumerate(matrix)]
        expected = [pair for pair in expected if pair[0] != pair[1]]
        assert expected
        later, earlier = find_duplicates(torch.from_numpy(matrix))
        assert list(zip(later.tolist(), earlier.tolist(), strict=True)) == expected
    zeros = torch.tensor([[0.0, -0.0, 1.0], [2.0, 0.0, 1.0], [-0.0, 0.0, 1.0]])
    later, earlier = find_duplicates(zeros)
    assert (later.tolist(), earlier.tolist()) == ([2], [0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_are_at_most_one(dtype):
    vectors = torch.randn(300, 48, generator=torch.Generator().manual_seed(0), dtype=dtype)
    result = retrieve(vectors, queries=torch.cat([vectors, -vectors]), k=300)
    assert result.similarities.max() == 1
    assert result.similarities.min() == -1
    assert (np.diff(result.similarities, axis=1) <= 0).all()
    # Lengths are irrelevant to a cosine: these are equally near but for rounding beyond 1.
    scales = torch.rand(40, 1, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.5
    alike = retrieve(vectors[:1] * scales, queries=vectors[:1], k=40)
    assert (np.diff(alike.ids[0])[np.diff(alike.similarities[0]) == 0] > 0).all()
