"""Means and errors beside NumPy; verdicts by their definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proximetry.reproduce import Claim
from proximetry.reproduce.records import Record
from proximetry.reproduce.statistics import Sample, examine, judge, sample, standard_error
from tests.reproduce.small import make_table

percent = st.floats(0, 100)


def record(row, seed, value, **changes):
    """A record with nothing in it but a recall."""
    given_values = {
        "table": "small",
        "row": row,
        "slug": row.lower(),
        "seed": seed,
        "kind": "full",
        "recipe": {},
        "command": "",
        "card": "CPU",
        "environment": {},
        "weights": {},
        "protocol": "last",
        "notes": [],
        "last": {"epoch": 2, "test": {"recall@1": value}},
        "chosen_epoch": None,
        "seconds": 1.0,
        "startup_seconds": 0.0,
        "curve": [{"epoch": 1, "seconds": 0.5, "loss": 1.0, "test": {"recall@1": value / 2}}],
    }
    return Record(**{**given_values, **changes})


@given(st.lists(percent, min_size=1, max_size=12))
def test_mean_and_deviation_are_numpys(values):
    found = Sample(tuple(values))
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    if len(values) == 1:
        assert found.std is None
        assert str(found) == f"{values[0]:.1f}"
    else:
        assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-9)
        assert "±" in str(found)


@given(st.lists(percent, min_size=2, max_size=9), st.lists(percent, min_size=2, max_size=9))
def test_standard_error_is_that_of_independent_means(a, b):
    expected = np.sqrt(np.var(a, ddof=1) / len(a) + np.var(b, ddof=1) / len(b))
    found = standard_error(Sample(tuple(a)), Sample(tuple(b)))
    assert found == pytest.approx(expected, abs=1e-9)
    assert standard_error(Sample((1.0,)), Sample(tuple(b))) is None


@pytest.mark.parametrize(
    ("difference", "error", "verdict"),
    [
        (2.1, 1.0, "holds"),
        (-2.1, 1.0, "does not hold"),
        (1.9, 1.0, "within the noise"),
        (-1.9, 1.0, "within the noise"),
        (0.6, None, "holds"),
        (-0.6, None, "does not hold"),
        (0.4, None, "within the noise"),
        (0.0, 0.0, "within the noise"),
        (0.1, 0.0, "holds"),
    ],
)
def test_verdicts(difference, error, verdict):
    assert judge(difference, error) == verdict


def test_a_claim_beside_the_runs(tmp_path):
    table = make_table(tmp_path)
    claim = Claim("MPA, K = 2", "Proxy-Anchor")
    ours = {
        "MPA, K = 2": [record("MPA", 0, 0.70), record("MPA", 1, 0.72)],
        "Proxy-Anchor": [record("PA", 0, 0.60), record("PA", 1, 0.64)],
    }
    found = examine(claim, table, ours)
    assert found.published == pytest.approx(0.6)
    assert found.difference == pytest.approx(9.0)
    assert found.error == pytest.approx(math.sqrt((2 + 8) / 2))
    assert found.verdict == "holds"
    assert examine(claim, table, {**ours, "Proxy-Anchor": []}).verdict == "not run"
    single = {name: runs[:1] for name, runs in ours.items()}
    assert examine(claim, table, single).error is None
    unpublished = Claim("MPA, K = 2", "Proxy-Anchor", "map@r")
    assert examine(unpublished, table, ours).published is None


def test_a_sample_at_an_epoch_and_at_the_end():
    runs = [record("a", 0, 0.5), record("a", 1, 0.7)]
    assert sample(runs, "recall@1").values == pytest.approx((50, 70))
    assert sample(runs, "recall@1", 1).values == pytest.approx((25, 35))
    assert sample(runs, "recall@1", 2).values == pytest.approx((50, 70))
    assert sample(runs, "recall@1", 7) is None
    assert sample(runs, "map@r") is None
    assert sample([], "recall@1") is None
