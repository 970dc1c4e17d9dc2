"""Confidence intervals: simulated coverage, edge cases, Student's t against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from proximetry.metrics import Evaluation
from proximetry.metrics.intervals import student_t

REPETITIONS = 1000


def evaluation_of(scores, codes):
    """An evaluation whose scores are the columns of a table, one row per query."""
    names = {str(i): np.ascontiguousarray(column) for i, column in enumerate(scores.T)}
    return Evaluation(names, codes, np.arange(codes.max() + 1), np.ones_like(codes))


def logistic(effects):
    return 1 / (1 + np.exp(-effects))


def simulate(classes, each, effect, seed=0, base=0.75):
    """0/1 scores of many repetitions with new classes each, and the true mean."""
    draw = np.random.default_rng(seed)
    codes = np.repeat(np.arange(classes), each)
    right = logistic(base + effect * draw.normal(size=(classes, REPETITIONS)))
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    truth = float(weights @ logistic(base + effect * nodes) / weights.sum())
    return evaluation_of(
        (draw.random((len(codes), REPETITIONS)) < right[codes]) * 1.0, codes
    ), truth


def coverage(evaluation, truth, by="class"):
    intervals = evaluation.bootstrap(by=by, samples=500).values()
    return float(np.mean([one.low <= truth <= one.high for one in intervals]))


@pytest.mark.parametrize(
    ("classes", "each", "effect", "base", "most"),
    [
        (100, 59, 0.0, 0.75, 0.98),
        (100, 59, 1.0, 0.75, 0.98),
        (12, 20, 0.0, 0.75, 0.98),
        (12, 20, 1.0, 0.75, 0.98),
        (3, 20, 1.0, 0.75, 0.98),
        (2, 20, 1.0, 0.75, 1.0),
        (12, 20, 1.0, 2.5, 0.98),
        (12, 20, 1.0, 4.0, 0.98),
    ],
)
def test_class_bootstrap_coverage(classes, each, effect, base, most):
    assert 0.92 <= coverage(*simulate(classes, each, effect, base=base)) <= most


def test_class_bootstrap_coverage_with_uneven_classes():
    whole, truth = simulate(50, 60, 1.0)
    sizes = np.random.default_rng(1).integers(5, 61, 50)
    remaining = np.tile(np.arange(60), 50) < np.repeat(sizes, 60)
    scores = np.stack([*whole.scores.values()], axis=1)[remaining]
    assert 0.92 <= coverage(evaluation_of(scores, whole.query_codes[remaining]), truth) <= 0.98


def test_query_bootstrap_covers_the_same_classes_only():
    assert 0.92 <= coverage(*simulate(50, 30, 0.0), by="query") <= 0.98
    assert coverage(*simulate(50, 30, 1.0), by="query") < 0.7


@pytest.mark.parametrize(("classes", "each"), [(100, 59), (50, 30), (12, 20)])
@pytest.mark.parametrize("effect", [0.0, 0.5])
def test_paired_comparison_false_positive_rate(classes, each, effect):
    """Two models of the same quality, each better at some classes."""
    draw = np.random.default_rng(2)
    codes = np.repeat(np.arange(classes), each)
    shared = 0.75 + draw.normal(size=(classes, REPETITIONS))
    models = []
    for _ in range(2):
        right = logistic(shared + effect * draw.normal(size=shared.shape))
        models.append(
            evaluation_of((draw.random((len(codes), REPETITIONS)) < right[codes]) * 1.0, codes)
        )
    for alpha, least, most in ((0.05, 0.02, 0.08), (0.05 / 10, 0.0, 0.015)):
        intervals = models[0].compare(models[1], samples=500, confidence=1 - alpha).values()
        assert least <= np.mean([one.low > 0 or one.high < 0 for one in intervals]) <= most


def test_paired_comparison_finds_a_difference():
    one, _ = simulate(100, 30, 1.0)
    more = simulate(100, 30, 0.0, seed=3, base=-3)[0].scores  # 5 % of the misses become hits
    scores = {name: np.maximum(values, more[name]) for name, values in one.scores.items()}
    other = Evaluation(scores, one.query_codes, one.classes, one.positives)
    assert all(interval.low > 0 for interval in one.compare(other).values())
    assert all(interval.high < 0 for interval in other.compare(one).values())


def test_equal_scores_have_an_interval():
    codes = np.repeat(np.arange(12), 3)
    right = evaluation_of(np.ones((36, 1)), codes)
    mean, low, high = right.bootstrap()["0"]
    assert (mean, high) == (1, 1)
    assert low == pytest.approx(stats.binomtest(12, 12).proportion_ci().low)
    wrong = evaluation_of(np.zeros((36, 1)), codes).bootstrap()["0"]
    assert wrong == pytest.approx((0, 0, 1 - low))
    # More classes, not more queries, narrow it.
    assert evaluation_of(np.ones((360, 1)), np.repeat(np.arange(12), 30)).bootstrap()["0"] == (
        pytest.approx((1, low, 1))
    )
    assert evaluation_of(np.ones((36, 1)), np.arange(36)).bootstrap()["0"].low > low
    mean, low, high = right.compare(right)["0"]
    assert mean == 0
    assert -0.3 < low < 0 < high < 0.3


def test_one_class_has_no_interval_by_class():
    one = evaluation_of(np.array([[1.0], [0.0], [1.0]]), np.zeros(3, int))
    assert one.bootstrap() == {}
    assert one.bootstrap(by="query").keys() == {"0"}


def test_intervals_reject_other_queries_and_unknown_units():
    scores = np.ones((4, 1))
    one = evaluation_of(scores, np.array([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="different queries"):
        one.compare(evaluation_of(scores, np.array([0, 1, 0, 1])))
    with pytest.raises(ValueError, match="'image'"):
        one.bootstrap(by="image")


@pytest.mark.parametrize("freedom", [1, 2, 3.7, 11, 99, 11_317, 60_000])
def test_student_t_equals_scipy(freedom):
    for probability in (0.6, 0.975, 0.9995):
        expected = stats.t.ppf(probability, freedom)
        assert student_t(probability, freedom) == pytest.approx(expected, rel=1e-4)
