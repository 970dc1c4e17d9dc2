"""Tables of metrics on a terminal of 80 columns."""

import pytest

from proximetry.metrics import Metrics
from proximetry.training.metrics_table import WITH_DISTRACTORS, metrics_table


def default_scores(clustering=False):
    names = Metrics(clustering=clustering).names()
    return dict.fromkeys(names, 1.0) | {"queries_without_positive": 0.0}


@pytest.mark.parametrize("clustering", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ["test"],
        ["untrained", "last epoch (20), held-out", "selected epoch (12), held-out", "x" * 30],
        ["a folder with a very long name " * 5],
    ],
    ids=["short", "usual", "long"],
)
def test_tables_fit_80_columns(names, clustering):
    scores = default_scores(clustering)
    text = metrics_table(dict.fromkeys(names, scores))
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    for metric in scores.keys() - {"queries", "queries_without_positive"}:
        assert words.count(metric) == 1
    assert words.count("100.0") == len(names) * (len(scores) - 2)


def test_metrics_of_one_kind_stay_in_one_block():
    blocks = metrics_table({"x" * 30: default_scores(clustering=True)}).split("\n\n")
    first = [block.split()[0] for block in blocks]
    assert first == ["recall@1", "r_precision", "ndcg@2", "nmi"]


@pytest.mark.parametrize(
    ("counts", "message"),
    [((3, 3), "3 queries"), ((0, 3), "up to 3 queries"), ((5, 0), "up to 5 queries"), ((0, 0), "")],
)
def test_queries_without_positives_are_counted(counts, message):
    rows = {
        f"row {i}": {"recall@1": 0.5, "queries_without_positive": float(count)}
        for i, count in enumerate(counts)
    }
    last = metrics_table(rows).splitlines()[-1]
    if message:
        assert last == f"{message} without another image of their class are excluded"
    else:
        assert last.startswith("row 1")


def test_rows_without_values_are_skipped():
    rows = {"test": default_scores() | {"with_distractors": {"map@r": 0.5}}}
    blocks = metrics_table(rows).split("\n\n")
    there = [(WITH_DISTRACTORS in block, "map@r" in block) for block in blocks]
    assert sorted(there) == [(False, False), (True, True)]


def test_missing_metric_is_a_dash_and_eval_dims_have_lines():
    trained = {"recall@1": 0.5, "map@r": 0.125, "dims": {"8": {"recall@1": 0.25}}}
    table = metrics_table({"untrained": {"recall@1": 0.25}, "trained": trained})
    assert [line.split() for line in table.splitlines()] == [
        ["recall@1", "map@r"],
        ["untrained", "25.0", "–"],
        ["trained", "50.0", "12.5"],
        ["first", "8", "dimensions", "25.0", "–"],
    ]
