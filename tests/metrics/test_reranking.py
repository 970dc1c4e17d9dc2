"""Query expansion and k-reciprocal re-ranking against computations written from the papers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proximetry.metrics import expand_queries, k_reciprocal_distances


def unit(vector):
    return vector / np.sqrt((vector**2).sum())


def k_reciprocal_by_loops(queries, gallery, k1, k2, weight):
    """Zhong et al. 2017 with sets and dictionaries, one item after the other."""
    items = [*queries, *gallery]
    count = len(items)
    squared = [[float(((a - b) ** 2).sum()) for b in items] for a in items]
    distance = [[d / max(*row, 1e-300) for d in row] for row in squared]
    order = [sorted(range(count), key=lambda j, i=i: (distance[i][j], j)) for i in range(count)]

    def reciprocal(i, k):
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    encoded = []
    for i in range(count):
        members = reciprocal(i, k1)
        expanded = set(members)
        for j in members:
            others = reciprocal(j, int(np.around(k1 / 2)))
            if 3 * len(others & members) > 2 * len(others):
                expanded |= others
        total = sum(np.exp(-distance[i][j]) for j in expanded)
        encoded.append({j: np.exp(-distance[i][j]) / total for j in expanded})
    averaged = []
    for i in range(count):
        near = order[i][:k2]
        keys = {key for j in near for key in encoded[j]}
        averaged.append(
            {key: sum(encoded[j].get(key, 0) for j in near) / len(near) for key in keys}
        )
    actual = np.empty((len(queries), len(gallery)))
    for q in range(len(queries)):
        for g in range(len(gallery)):
            a, b = averaged[q], averaged[len(queries) + g]
            keys = a.keys() | b.keys()
            least = sum(min(a.get(key, 0), b.get(key, 0)) for key in keys)
            most = sum(max(a.get(key, 0), b.get(key, 0)) for key in keys)
            jaccard = 1 - least / most
            actual[q, g] = (1 - weight) * jaccard + weight * distance[q][len(queries) + g]
    return actual


@given(
    seed=st.integers(0, 10**6),
    query_rows=st.integers(1, 4),
    gallery_rows=st.integers(1, 25),
    k1=st.integers(1, 12),
    k2=st.integers(1, 8),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_k_reciprocal_distances_equal_loops(seed, query_rows, gallery_rows, k1, k2, weight):
    draw = np.random.default_rng(seed)
    everything = np.stack([unit(v) for v in draw.standard_normal((query_rows + gallery_rows, 3))])
    queries, gallery = everything[:query_rows], everything[query_rows:]
    actual = k_reciprocal_distances(queries, gallery, k1=k1, k2=k2, weight=weight)
    expected = k_reciprocal_by_loops(queries, gallery, k1, k2, weight)
    np.testing.assert_allclose(actual, expected, atol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_k_reciprocal_distances_of_copies_are_equal(offset):
    draw = np.random.default_rng(0)
    gallery = draw.standard_normal((60, 37)) + offset
    gallery[40:] = gallery[:20]
    actual = k_reciprocal_distances(gallery[:3], gallery)
    assert np.array_equal(actual[:, 40:], actual[:, :20])
    assert actual.argmin(1).tolist() == [0, 1, 2]


@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.0, 1.0, 3.0]), n=st.integers(1, 5))
def test_expanded_queries_equal_loops(seed, alpha, n):
    draw = np.random.default_rng(seed)
    queries, neighbors = draw.standard_normal((3, 4)), draw.standard_normal((3, n, 4))
    actual = expand_queries(torch.from_numpy(queries), torch.from_numpy(neighbors), alpha=alpha)
    for query, near, moved in zip(queries, neighbors, actual, strict=True):
        total = unit(query)
        for one in near:
            cosine = float(unit(query) @ unit(one))
            total = total + max(0.0, cosine) ** alpha * unit(one)
        np.testing.assert_allclose(moved, unit(total), atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: k_reciprocal_distances(x, x, k1=0), "k1 must be an integer"),
        (lambda x: k_reciprocal_distances(x, x, k1=20.0), "k1 must be an integer"),
        (lambda x: k_reciprocal_distances(x, x, weight=2), "weight must be between 0 and 1"),
        (lambda x: k_reciprocal_distances(x, x[:, :2]), "queries have 3 dimensions"),
        (lambda x: expand_queries(x, x), r"neighbors must be \[4, n, 3\]"),
        (lambda x: expand_queries(x, x[:, None], alpha=-1), "alpha must not be negative"),
    ],
)
def test_reranking_rejects_invalid_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((4, 3)))
