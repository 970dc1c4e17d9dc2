"""Binary codes, query expansion and re-ranking of whole sets, against loops over the queries."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from proximetry.metrics import Metrics, binary_codes, evaluate, retrieve
from proximetry.metrics.reranking import RERANKED
from tests.metrics.brute import rankings, scores
from tests.metrics.test_reranking import k_reciprocal_by_loops, unit

CUTOFFS = (1, 2, 3, 7)
CHOSEN = Metrics(recall_at=CUTOFFS, precision_at=CUTOFFS, map_at=CUTOFFS, ndcg_at=CUTOFFS)


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 40)),
        elements=st.sampled_from([-1e30, -1.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, 1e30]),
    )
)
def test_binary_codes_are_packed_signs_and_hamming_counts_differing_bits(vectors):
    codes = binary_codes(vectors)
    assert codes.dtype == np.uint8
    assert codes.shape == (len(vectors), -(-vectors.shape[1] // 8))
    np.testing.assert_array_equal(codes, np.packbits(vectors > 0, axis=1))
    np.testing.assert_array_equal(codes, binary_codes(torch.from_numpy(vectors)))
    unpacked = np.unpackbits(codes, axis=1, count=vectors.shape[1])
    np.testing.assert_array_equal(unpacked == 1, vectors > 0)
    actual = retrieve(codes, queries=codes, similarity="hamming", k=len(codes))
    for query, ids, near in zip(vectors, actual.ids, actual.similarities, strict=True):
        differing = [int(((query > 0) != (vectors[i] > 0)).sum()) for i in ids]
        assert near.tolist() == [-count for count in differing]
        assert [*zip(differing, ids, strict=True)] == sorted(zip(differing, ids, strict=True))


def problem(seed, apart):
    """Return one set, or queries and a gallery that share some items."""
    draw = np.random.default_rng(seed)
    vectors = draw.standard_normal((40, 5)).astype(np.float32)
    vectors[:, 1] *= draw.integers(0, 2, 40)  # zeros
    vectors[draw.integers(0, 40, 6)] = vectors[:6]  # copies
    labels = draw.integers(0, 6, 40)
    if not apart:
        return {"embeddings": vectors, "labels": labels}, np.arange(40), np.arange(40)
    gallery_rows, query_rows = np.arange(0, 33), np.arange(20, 40)
    given = {
        "embeddings": vectors[gallery_rows],
        "labels": labels[gallery_rows],
        "ignore_groups": gallery_rows,
        "queries": vectors[query_rows],
        "query_labels": labels[query_rows],
        "query_ignore_groups": query_rows,
    }
    return given, query_rows, gallery_rows


def check(actual, lists, given):
    """Compare the score of each query with that of its complete list."""
    labels = given["labels"]
    query_rows = given.get("query_labels", labels)
    for place, near in enumerate(lists):
        relevant = [bool(labels[i] == query_rows[place]) for i in near]
        expected = scores(relevant, CUTOFFS) if any(relevant) else {}
        for name in actual.scores:
            value = actual.scores[name][place]
            assert np.isnan(value) if not expected else value == pytest.approx(expected[name]), name


def plain_lists(given, query_rows, gallery_rows, similarity):
    queries = given.get("queries", given["embeddings"])
    return rankings(
        queries,
        given["embeddings"],
        similarity,
        same_set=False,
        query_groups=query_rows,
        groups=gallery_rows,
    )


@pytest.mark.parametrize("apart", [False, True])
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), candidates=st.sampled_from([0, 1, 5, 12, 100]))
def test_codes_then_vectors(apart, seed, candidates):
    given, query_rows, gallery_rows = problem(seed, apart)
    for similarity in ("cosine", "euclidean"):
        coded = {
            key: np.packbits(value > 0, axis=1) if key in ("embeddings", "queries") else value
            for key, value in given.items()
        }
        lists = plain_lists(coded, query_rows, gallery_rows, "hamming")
        queries = given.get("queries", given["embeddings"])

        def near(place, i, similarity=similarity, queries=queries):
            a, b = queries[place].astype(np.float64), given["embeddings"][i].astype(np.float64)
            value = unit(a) @ unit(b) if similarity == "cosine" else -((a - b) ** 2).sum()
            return np.float32(value)

        expected = [
            sorted(order[:candidates], key=lambda i, p=place: (-near(p, i), i)) + order[candidates:]
            for place, order in enumerate(lists)
        ]
        options = {"candidates": candidates, "similarity": similarity, "metrics": CHOSEN}
        actual = evaluate(**given, binary=True, **options)
        check(actual, expected, given)


@pytest.mark.parametrize("apart", [False, True])
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), n=st.sampled_from([1, 3, 100]))
def test_expansion_excludes_the_query(apart, seed, n):
    given, query_rows, gallery_rows = problem(seed, apart)
    queries = given.get("queries", given["embeddings"]).astype(np.float64)
    gallery, moved = given["embeddings"].astype(np.float64), []
    for query, order in zip(
        queries, plain_lists(given, query_rows, gallery_rows, "cosine"), strict=True
    ):
        total = unit(query)
        for other in map(unit, gallery[order[:n]]):
            total = total + max(0.0, float(unit(query) @ other)) ** 3 * other
        moved.append(unit(total))
    again = {**given, "queries": np.stack(moved)}
    expected = plain_lists(again, query_rows, gallery_rows, "cosine")
    check(evaluate(**given, expand=n, metrics=CHOSEN), expected, given)


@pytest.mark.parametrize("apart", [False, True])
def test_reranking_equals_loops(apart):
    draw = np.random.default_rng(3)
    vectors, labels = draw.standard_normal((40, 5)).astype(np.float32), draw.integers(0, 6, 40)
    given, query_rows, gallery_rows = problem(0, apart)
    given["embeddings"], given["labels"] = vectors[gallery_rows], labels[gallery_rows]
    if apart:
        given["queries"], given["query_labels"] = vectors[query_rows], labels[query_rows]
    queries, expected = given.get("queries", given["embeddings"]), []
    for query, order in zip(
        queries, plain_lists(given, query_rows, gallery_rows, "cosine"), strict=True
    ):
        near = np.stack([unit(vectors[gallery_rows[i]].astype(np.float64)) for i in order])
        one = unit(query.astype(np.float64))[None]
        distance = k_reciprocal_by_loops(one, near, 20, 6, 0.3)[0]
        expected.append([order[i] for i in sorted(range(len(order)), key=lambda i: distance[i])])
    check(evaluate(**given, rerank=True, metrics=CHOSEN), expected, given)


def test_items_after_the_candidates_keep_their_rank():
    """A positive that is not among the candidates keeps its rank, however large."""
    draw = np.random.default_rng(0)
    vectors = torch.from_numpy(draw.standard_normal((RERANKED + 60, 6)))
    labels = np.arange(len(vectors)) // 2
    plain = evaluate(vectors, labels).scores
    actual = evaluate(vectors, labels, rerank=True).scores
    far = plain["mrr"] < 1 / RERANKED
    assert far.any()
    assert not far.all()
    np.testing.assert_array_equal(actual["mrr"][far], plain["mrr"][far])
    assert (actual["mrr"][~far] >= 1 / RERANKED).all()
    assert (actual["mrr"][~far] != plain["mrr"][~far]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expand": -1}, "expand .* -1"),
        ({"expand": True}, "expand .* True"),
        ({"expand": 2, "similarity": "euclidean"}, "expand .* euclidean"),
        ({"rerank": True, "similarity": "dot"}, "rerank .* dot"),
        ({"rerank": True, "metrics": Metrics(clustering=True)}, "clustering"),
        ({"binary": True, "candidates": -1}, "candidates .* -1"),
        ({"binary": True, "candidates": 2.0}, "candidates .* 2.0"),
        ({"binary": True, "rerank": True}, "rerank"),
        ({"binary": True, "similarity": "hamming"}, "hamming"),
        ({"binary": True, "metrics": Metrics(clustering=True)}, "clustering"),
    ],
)
def test_second_stage_rejects_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(np.eye(4), [0, 0, 1, 1], **options)
