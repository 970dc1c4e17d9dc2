"""Means and deviations compared with NumPy; verdicts compared with SciPy."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.statistics import Sample, ci_half_width, compare_claim, sample
from proximetry.reproduce.table import Claim
from tests.reproduce.small import make_table

percent = st.floats(0, 100)
MPA, ANCHOR = "MPA, K = 2", "Proxy-Anchor"
TABLE = make_table("cache")


def compare(records, metric="recall@1"):
    return compare_claim(Claim(better=MPA, worse=ANCHOR, metric=metric), Results(TABLE, records))


def record(row, seed, value, **changes):
    """A record with only a recall."""
    given_values = {
        "table": "small",
        "row": row,
        "seed": seed,
        "kind": "full",
        "recipe": {},
        "device": "CPU",
        "environment": {},
        "weights": {},
        "protocol": "last",
        "notes": [],
        "last": {"epoch": 2, "test": {"recall@1": value}},
        "selected_epoch": None,
        "seconds": 1.0,
        "startup_seconds": 0.0,
        "curve": [
            {"epoch": 1, "seconds": 0.5, "loss": 1.0, "test": {"recall@1": value / 2}},
            {"epoch": 2, "seconds": 1.0, "loss": 0.5, "test": {"recall@1": value}},
        ],
        "parallel": 1,
        "images": None,
        "views": None,
        "epochs_overridden": False,
    }
    return Record(**{**given_values, **changes})


@given(st.lists(percent, min_size=1, max_size=12))
def test_mean_and_deviation_equal_numpy(values):
    sampled = Sample(tuple(values))
    assert sampled.mean == pytest.approx(np.mean(values), abs=1e-9)
    if len(values) == 1:
        assert sampled.std is None
        assert str(sampled) == f"{values[0]:.1f}"
    else:
        assert sampled.std == pytest.approx(np.std(values, ddof=1), abs=1e-9)
        assert "±" in str(sampled)


hundredths = st.integers(0, 10000).map(lambda number: number / 100)
pairs = st.lists(st.tuples(hundredths, hundredths), min_size=2, max_size=40)


@given(pairs)
def test_welch_verdict_equals_scipy(values):
    a, b = (Sample(column) for column in zip(*values, strict=True))
    assume(a.std > 0 and b.std > 0)
    test = stats.ttest_ind(a.values, b.values, equal_var=False)
    low, high = test.confidence_interval(0.95)
    assert ci_half_width(a, b) == pytest.approx((high - low) / 2, rel=1e-6)
    assume(abs(test.pvalue - 0.05) > 1e-6)
    records = [
        record(row, seed, value / 100)
        for row, column in ((MPA, a), (ANCHOR, b))
        for seed, value in enumerate(column.values)
    ]
    significant = "holds" if test.statistic > 0 else "does not hold"
    expected = significant if test.pvalue < 0.05 else "no significant difference"
    assert compare(records).verdict == expected


def test_confidence_interval_needs_two_values_with_spread():
    assert ci_half_width(Sample((1.0,)), Sample((2.0,))) is None
    assert ci_half_width(Sample((1.0, 1.0)), Sample((2.0, 2.0))) is None
    assert ci_half_width(Sample((1.0, 1.0)), Sample((2.0, 4.0))) == pytest.approx(12.706, abs=1e-3)
    assert ci_half_width(Sample((0.0, 2.0)), Sample((5.0, 7.0))) == pytest.approx(
        4.303 * 2**0.5, rel=1e-4
    )


def test_claim_is_compared_over_common_seeds():
    ours = [record(MPA, seed, v) for seed, v in enumerate((0.90, 0.92, 0.50))]
    others = [record(ANCHOR, seed, v) for seed, v in ((1, 0.60), (0, 0.62), (7, 0.99))]
    finding = compare(ours + others)
    assert finding.published == pytest.approx(0.6)
    assert finding.seeds == (0, 1)  # the others have no counterpart
    assert finding.difference == pytest.approx(30.0)
    assert finding.ci_half_width == pytest.approx(4.303 * 2**0.5, rel=1e-4)
    assert finding.verdict == "holds"
    assert compare(ours).verdict == "not run"
    assert compare(ours[2:] + others).verdict == "no seed in common"
    finding = compare(ours[:2] + others[:1])
    assert finding.verdict == "one seed, not tested"
    assert finding.difference == pytest.approx(32.0)
    assert finding.ci_half_width is None
    assert compare(ours + others, "map@r").published is None


def test_sample_at_an_epoch_and_at_the_end():
    runs = [record("a", 0, 0.5), record("a", 1, 0.7)]
    assert sample(runs, "recall@1").values == pytest.approx((50, 70))
    assert sample(runs, "recall@1", 1).values == pytest.approx((25, 35))
    assert sample(runs, "recall@1", 2).values == pytest.approx((50, 70))
    assert sample(runs, "recall@1", 7) is None
    assert sample(runs, "map@r") is None
    assert sample([], "recall@1") is None
    short = {"recall@1": 0.5, "dims": {"4": {"recall@1": 0.25}}}
    runs = [record("a", 0, 0.5, last={"epoch": 2, "test": short})]
    assert sample(runs, "recall@1", dim=4).values == (25.0,)
    assert sample(runs, "recall@1", dim=3) is None
