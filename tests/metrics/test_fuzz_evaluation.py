"""Evaluation of random data of every kind against plain loops in float64.

Sizes, roles, labels with singletons, copies, k beyond the gallery, types and scales.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proximetry.metrics import Metrics, evaluate, retrieve, score_result

from . import brute

CUTOFFS = (1, 2, 5, 60)
EVERYTHING = Metrics(recall_at=CUTOFFS, precision_at=CUTOFFS, ndcg_at=CUTOFFS, map_at=CUTOFFS)
EXPONENTS = {
    torch.float16: (-4, 0, 4),
    torch.bfloat16: (-100, -40, 0, 40, 100),
    torch.float32: (-110, -70, -30, 0, 30, 70, 110),
    torch.float64: (-450, -200, 0, 200, 450),
}
Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    vectors: torch.Tensor
    labels: Array
    queries: Array  # rows of the queries
    gallery: Array  # rows of the gallery
    similarity: Any

    def arguments(self, text):
        labels = np.array([f"class {n}" for n in self.labels]) if text else self.labels
        given: dict[str, Any] = {"embeddings": self.vectors, "labels": labels}
        if len(self.queries) < len(labels) or len(self.gallery) < len(labels):
            given = {
                "embeddings": self.vectors[self.gallery],
                "labels": labels[self.gallery],
                "ignore_groups": self.gallery,
                "queries": self.vectors[self.queries],
                "query_labels": labels[self.queries],
                "query_ignore_groups": self.queries,
            }
        return given | {"similarity": self.similarity}


@st.composite
def cases(draw):
    similarity = draw(st.sampled_from(["cosine", "euclidean", "dot", "hamming"]))
    dtype = draw(st.sampled_from(list(EXPONENTS)))
    # Squares of entries must be in the range of the type; for cosines any scale is valid.
    most = 1000 if similarity == "cosine" or dtype == torch.float64 else 40
    exponent = draw(st.sampled_from([e for e in EXPONENTS[dtype] if abs(e) <= most]))
    whole, outlier = draw(st.booleans()), draw(st.booleans())
    count, classes = draw(st.integers(2, 40)), draw(st.sampled_from([1, 3, 10, 40]))
    roles = draw(st.sampled_from(["b", "qg", "bg", "bq", "bqg", "bqgn"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    role, labels = rng.choice(list(roles), count), rng.integers(0, classes, count)
    if similarity == "hamming":
        values = torch.from_numpy(rng.integers(0, 256, (count, 2), dtype=np.uint8))
    else:
        # Whole numbers are exact in every type and tie; for cosines all have length 2.
        choices = [-1, 1] if similarity == "cosine" else [-2, -1, 0, 1, 2]
        drawn = rng.choice(choices, (count, 4)) if whole else rng.normal(size=(count, 6))
        if outlier and not whole and dtype == torch.float32:
            drawn[0] *= 2.0 ** min(20, 120 - exponent)  # not a query
            role[0] = "g"
        values = (torch.from_numpy(drawn).double() * 2.0**exponent).to(dtype)
    to, of = rng.integers(1, count, (2, count // 4))
    values[to] = values[of]
    query_rows, gallery_rows = (np.flatnonzero((role == "b") | (role == one)) for one in "qg")
    return Case(values, labels, query_rows, gallery_rows, similarity)


def plain_similarity(query, item, similarity):
    pairs = list(zip(query, item, strict=True))
    if similarity == "hamming":
        return -sum((int(a) ^ int(b)).bit_count() for a, b in pairs)
    if similarity == "euclidean":
        return -math.dist(query, item)
    dot = math.fsum(a * b for a, b in pairs)
    if similarity == "cosine":
        dot /= math.hypot(*query) * math.hypot(*item) or 1.0
    return dot


def plain_ranking(row, case, vectors):
    """The gallery in the order of similarity to a row, without that row."""
    near = {
        item: plain_similarity(vectors[row], vectors[item], case.similarity)
        for item in case.gallery.tolist()
        if item != row
    }
    order = sorted(near, key=lambda item: (-near[item], item))
    for one, two in pairwise(order):
        # The order of two items may be below rounding; whole numbers and copies are exact.
        gap = near[one] - near[two]
        size = abs(near[two])
        if case.similarity == "dot":
            size = math.hypot(*vectors[row]) * max(math.hypot(*vectors[i]) for i in (one, two))
        assume(gap == 0 or gap > 1e-5 * size)
    return order


@settings(max_examples=150)
@given(case=cases(), k=st.integers(1, 60), text=st.booleans())
def test_random_evaluations_equal_plain_loops(case, k, text):
    vectors = case.vectors.double().tolist()
    lists = [plain_ranking(row, case, vectors) for row in case.queries]
    hits = [
        [bool(case.labels[item] == case.labels[row]) for item in order]
        for row, order in zip(case.queries, lists, strict=True)
    ]
    given = case.arguments(text)
    if not any(map(any, hits)):
        with pytest.raises(ValueError, match=r"has a positive|is empty"):
            evaluate(**given, metrics=EVERYTHING)
        return
    actual = evaluate(**given, metrics=EVERYTHING)
    assert actual.positives.tolist() == list(map(sum, hits))
    for query, relevant in enumerate(hits):
        scores = {name: values[query] for name, values in actual.scores.items()}
        if any(relevant):
            assert scores == pytest.approx(brute.scores(relevant, CUTOFFS), abs=1e-12)
        else:
            assert all(map(math.isnan, scores.values()))
    for depth in (k, len(vectors)):
        result = retrieve(**given, k=depth)
        assert [case.gallery[ids[ids >= 0]].tolist() for ids in result.ids] == [
            order[: result.k] for order in lists
        ]
        assert np.isneginf(result.similarities[result.ids < 0]).all()
        assert np.isfinite(result.similarities[result.ids >= 0]).all()
    # The last list is complete.
    again = score_result(result, EVERYTHING)
    for name, values in actual.scores.items():
        np.testing.assert_array_equal(values, again.scores[name])
