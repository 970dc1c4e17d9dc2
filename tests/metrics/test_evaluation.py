from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from proximetry.metrics import Metrics, cluster, evaluate, retrieve, score_result, verify_classes
from proximetry.metrics.scores import score_lists

from . import brute

CUTOFFS = (1, 2, 3, 10, 100)
EVERYTHING = Metrics(recall_at=CUTOFFS, precision_at=CUTOFFS, ndcg_at=CUTOFFS, map_at=CUTOFFS)
RECALL = Metrics(recall_at=(1,), ndcg_at=(), at_r=False, mrr=False)


def assert_equal(result, expected, without):
    actual = result.mean()
    assert actual.pop("queries_without_positive") == without
    actual.pop("queries")
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, abs=1e-12), name


@settings(max_examples=80)
@given(
    rows=st.integers(2, 40),
    classes=st.integers(1, 30),
    seed=st.integers(0, 10**6),
    similarity=st.sampled_from(["dot", "euclidean", "hamming"]),
    kind=st.sampled_from(["plain", "huge", "text"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    grouped=st.booleans(),
)
def test_equals_brute_force(rows, classes, seed, similarity, kind, dtype, grouped):
    draw = np.random.default_rng(seed)
    if similarity == "hamming":
        vectors = torch.from_numpy(draw.integers(0, 256, (rows, 2), dtype=np.uint8))
    else:
        # Few small whole numbers: duplicates and ties, and exact in every type.
        vectors = torch.from_numpy(draw.integers(-2, 3, (rows, 3))).to(dtype)
    numbers = draw.integers(0, classes, rows)
    labels: Any = {
        "plain": numbers,
        "huge": (numbers - classes // 2) * 2 + 2**53,
        "text": [f"class {n}" for n in numbers],
    }[kind]
    groups = draw.integers(0, 5, rows) if grouped else None
    plain = vectors.float().numpy() if similarity != "hamming" else vectors.numpy()
    lists = brute.rankings(
        plain, plain, similarity, same_set=True, query_groups=groups, groups=groups
    )
    expected, without = brute.evaluate(lists, numbers, numbers, CUTOFFS)
    options = {"similarity": similarity, "ignore_groups": groups, "metrics": EVERYTHING}
    if without == rows:
        with pytest.raises(ValueError, match=f"none of the {rows} queries has a positive"):
            evaluate(vectors, labels, **options)
        return
    actual = evaluate(vectors, labels, **options)
    assert actual["queries"] == rows - without
    assert_equal(actual, expected, without)


TABLE_3 = [
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 0], (100, 10, 25.0, 10.0, 39.0)),
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 1], (100, 20, 25.0, 12.0, 50.3)),
    ([1, 0, 1, 0, 0, 0, 0, 0, 0, 0], (100, 20, 41.7, 16.7, 58.6)),
    ([1, 0, 1, 0, 0, 0, 1, 0, 0, 1], (100, 40, 41.7, 25.0, 82.9)),
    ([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], (100, 40, 100.0, 40.0, 100.0)),
]


@pytest.mark.parametrize(("places", "expected"), TABLE_3)
def test_published_example(places, expected):
    """One query with four positives, of which the list shows some: to a tenth of a percent."""
    order = np.array(places, dtype=bool)
    missing = 4 - int(order.sum())
    gallery = np.zeros((10 + missing, 1), dtype=np.float32)
    gallery[:, 0] = -np.arange(10 + missing)
    labels = [int(hit) for hit in order] + [1] * missing
    actual = evaluate(
        gallery,
        labels,
        queries=np.ones((1, 1), dtype=np.float32),
        query_labels=[1],
        similarity="dot",
        metrics=Metrics(recall_at=(10,), precision_at=(10,), map_at=(10,), ndcg_at=(10,)),
    )
    names = ("recall@10", "precision@10", "map@r", "map@10", "ndcg@10")
    assert [round(100 * actual[name], 1) for name in names] == list(expected)


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=2, max_size=30), st.integers(1, 40))
def test_ndcg_equals_scikit_learn(relevant, k):
    relevant[0] = relevant[0] or not any(relevant)
    hits = torch.tensor([relevant])
    positives = hits.sum(1)
    ranks = torch.tensor([relevant.index(True) + 1])
    chosen = Metrics(recall_at=(), ndcg_at=(k,))
    actual = float(score_lists(hits, positives, ranks, chosen)[f"ndcg@{k}"])
    falling = np.arange(len(relevant), 0, -1)[None]
    outside = ndcg_score(np.array([relevant], dtype=float), falling, k=k)
    assert actual == pytest.approx(outside, abs=1e-12)


@pytest.mark.parametrize(
    "metrics",
    [
        Metrics(),
        EVERYTHING,
        RECALL,
        Metrics(recall_at=(), ndcg_at=(), precision_at=(2,), at_r=False, mrr=False),
        Metrics(clustering=True),
    ],
)
def test_names_are_the_keys_of_the_result(metrics):
    actual = evaluate(np.eye(6, dtype=np.float32), [0, 0, 1, 1, 2, 2], metrics=metrics)
    assert list(actual) == metrics.names()


def test_cutoffs_are_sorted_integers_of_any_type():
    assert all(field.metadata["help"] for field in fields(Metrics))
    assert Metrics(recall_at=[10, 1, 10]).recall_at == (1, 10)
    assert Metrics(recall_at=np.int64(5), ndcg_at=np.array([2, 1])).names()[0] == "recall@5"


def test_fewer_metrics_give_the_same_values():
    """Short lists and counted ranks give what long lists give."""
    draw = np.random.default_rng(0)
    vectors, labels = draw.integers(-2, 3, (120, 3)).astype(np.float32), draw.integers(0, 50, 120)
    long = evaluate(vectors, labels, similarity="dot", metrics=EVERYTHING)
    less = [Metrics(recall_at=CUTOFFS, ndcg_at=(), at_r=False)]
    less += [Metrics(recall_at=(k,), ndcg_at=(k,), at_r=False, mrr=False) for k in CUTOFFS]
    for metrics in less:
        for name, value in evaluate(vectors, labels, similarity="dot", metrics=metrics).items():
            assert long[name] == value, name


def test_queries_without_positive_are_skipped_and_counted():
    vectors = np.array([[0.0], [1.0], [5.0], [6.0], [20.0]], dtype=np.float32)
    evaluation = evaluate(vectors, ["a", "a", "b", "c", "d"], similarity="euclidean")
    means = evaluation.mean()
    assert (means["queries"], means["queries_without_positive"]) == (2, 3)
    assert means["recall@1"] == 1.0
    assert np.isnan(evaluation.scores["recall@1"]).tolist() == [False, False, True, True, True]
    assert evaluation.is_scored.tolist() == [True, True, False, False, False]


def test_per_class_table():
    draw = np.random.default_rng(0)
    vectors, labels = draw.normal(size=(90, 6)), draw.integers(0, 25, 90)
    evaluation = evaluate(vectors, labels)
    table = evaluation.per_class()
    for row, label in enumerate(table["label"]):
        chosen = labels == label
        assert table["queries"][row] == chosen.sum()
        for name in ("recall@1", "map@r", "ndcg@4"):
            assert table[name][row] == pytest.approx(evaluation.scores[name][chosen].mean())
    shown = {label for label in labels if (labels == label).sum() > 1}
    assert set(table["label"]) == shown


def test_bootstrap_intervals():
    draw = np.random.default_rng(0)
    vectors, labels = draw.normal(size=(400, 3)), draw.integers(0, 8, 400)
    evaluation = evaluate(vectors, labels)
    intervals = evaluation.bootstrap(by="query", samples=2000, seed=1)
    for name, interval in intervals.items():
        assert interval.mean == pytest.approx(evaluation.mean()[name])
    # For a mean of many values the bounds are those of the normal distribution.
    values = evaluation.scores["recall@1"]
    spread = 1.96 * values.std() / math.sqrt(len(values))
    assert intervals["recall@1"].low == pytest.approx(values.mean() - spread, abs=0.006)
    assert intervals["recall@1"].high == pytest.approx(values.mean() + spread, abs=0.006)
    assert evaluation.bootstrap(samples=50, seed=3) == evaluation.bootstrap(samples=50, seed=3)
    narrow = evaluation.bootstrap(by="query", confidence=0.5, samples=2000, seed=1)["mrr"]
    assert intervals["mrr"].low < narrow.low < narrow.high < intervals["mrr"].high
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        evaluation.bootstrap(confidence=95)
    with pytest.raises(ValueError, match="at least 2, got 0"):
        evaluation.bootstrap(samples=0)


def test_scores_of_a_result_equal_those_of_evaluate():
    draw = np.random.default_rng(2)
    vectors, labels = draw.integers(-3, 4, (80, 3)).astype(np.float32), draw.integers(0, 9, 80)
    chosen = Metrics(recall_at=(1, 5), precision_at=(5,), ndcg_at=(20,))
    result = retrieve(vectors, labels, k=79, similarity="dot")
    actual = score_result(result, chosen)
    assert actual.mean() == evaluate(vectors, labels, similarity="dot", metrics=chosen)
    some = score_result(result[:10], chosen).scores["recall@5"]
    assert np.array_equal(some, actual.scores["recall@5"][:10])


def test_score_result_needs_long_lists():
    vectors = np.arange(20, dtype=np.float32)[:, None]
    labels = np.arange(20) % 2
    result = retrieve(vectors, labels, k=1, similarity="euclidean")
    for change, message in (
        ({"recall_at": (4,)}, "recall@4.*k=4"),
        ({"at_r": True}, "r_precision.* 9"),
        ({"mrr": True}, "mrr"),
        ({"clustering": True, "verification": True}, "clustering and verification"),
    ):
        with pytest.raises(ValueError, match=message):
            score_result(result, replace(RECALL, **change))
    assert score_result(result, RECALL).mean()["recall@1"] == 0.0


def test_complete_lists_support_any_k():
    result = retrieve(np.eye(4, dtype=np.float32), [0, 0, 1, 1], k=50)
    assert result.complete
    chosen = replace(RECALL, recall_at=(1000,), precision_at=(100,))
    assert score_result(result, chosen).mean()["recall@1000"] == 1.0
    groups = [0, 0, 1, 0, 0]
    few = retrieve(np.eye(5, dtype=np.float32), [0, 0, 0, 1, 1], k=2, ignore_groups=groups)[0]
    assert few.ids.tolist() == [[2, -1]]
    assert score_result(few, chosen).mean()["precision@100"] == 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recall_at": (0,)}, "recall_at .* 0"),
        ({"ndcg_at": (1.5,)}, "ndcg_at .* 1.5"),
        ({"map_at": (True,)}, "map_at .* True"),
        ({"recall_at": "5"}, "recall_at .* '5'"),
        ({"recall_at": None}, "recall_at .* None"),
        ({"recall_at": 10**9}, "recall_at .* 1000000000"),
        ({"recall_at": (), "ndcg_at": (), "at_r": False, "mrr": False}, "recall_at"),
    ],
)
def test_metrics_rejects_invalid_cutoffs(change, message):
    with pytest.raises(ValueError, match=message):
        Metrics(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "labels .* None"),
        ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, "labels.*meta"),
        ({"metrics": ["precision_at_1"]}, r"precision_at_1.*Metrics\("),
        ({"similarity": "l1"}, "'l1'"),
        ({"queries": np.eye(4), "query_labels": [0, 0, 1, 1]}, "one set"),
        ({"similarity": "hamming"}, "codes"),
    ],
)
def test_evaluate_rejects_invalid_arguments(change, message):
    for metrics in (Metrics(clustering=True), Metrics(verification=True)):
        request = {"embeddings": np.eye(4), "labels": [0, 0, 1, 1], "metrics": metrics} | change
        with pytest.raises(ValueError, match=message):
            evaluate(**request)


def test_progress_is_reported_and_nothing_is_printed(capfd):
    calls: list[tuple[int, int]] = []
    evaluate(np.eye(8), np.arange(8) % 2, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (8, 8)
    assert capfd.readouterr() == ("", "")


def test_verification_metric():
    draw = np.random.default_rng(0)
    vectors, labels = draw.normal(size=(80, 4)), np.repeat(list("abcdefgh"), 10)
    vectors += np.eye(8)[:, :4].repeat(10, axis=0) * 2
    for similarity in ("cosine", "euclidean"):
        actual = evaluate(
            vectors, labels, metrics=Metrics(verification=True), similarity=similarity
        )
        expected = verify_classes(vectors, labels, similarity=similarity)
        assert actual["verification"] == expected.accuracy
        assert 0.5 < expected.accuracy < 1


def test_clustering_metrics_of_cosines_are_those_of_unit_vectors():
    draw = np.random.default_rng(0)
    vectors, labels = draw.normal(size=(60, 3)), np.repeat(["x", "y", "z"], 20)
    vectors += 2 * np.eye(3).repeat(20, axis=0)
    actual = evaluate(vectors, labels, metrics=Metrics(clustering=True))
    expected = cluster(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels)
    assert 0.5 < expected["nmi"] < 1
    assert {name: actual[name] for name in expected} == pytest.approx(expected)
