"""Pictures: the same bytes from the same numbers, and the numbers in them."""

import sys

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from proximetry.reproduce import figures, page
from proximetry.reproduce.figures import curve, draw, picture_names, why_no_seconds
from proximetry.reproduce.records import Results
from tests.reproduce.small import make_table, no_training, run_table
from tests.reproduce.test_statistics import record

MODEL = {"model": {"backbone": "net"}}


def make_records(table, seeds=(0, 1)):
    return [
        record(row.name, s, 0.5 + 0.1 * i + 0.01 * s, recipe=MODEL)
        for i, row in enumerate(table.rows)
        for s in seeds
    ]


def draw_in(folder, table, records):
    """Draw, and return the bytes of the pictures that are there by their names."""
    results = Results(table, records)
    draw(results, folder)
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    assert list(found) == sorted(picture_names(results))
    return found


@pytest.mark.parametrize("kind", ["sweep", "curves"])
@pytest.mark.parametrize("log", [True, False])
def test_the_same_bytes(tmp_path, kind, log):
    table = make_table(tmp_path, figure={"kind": kind, "label": "K", "log": log})
    first = draw_in(tmp_path, table, make_records(table))
    assert list(first) == (["sweep.svg"] if kind == "sweep" else ["epochs.svg", "seconds.svg"])
    assert draw_in(tmp_path, table, make_records(table)) == first
    assert all(b"<svg" in content and b"dc:date" not in content for content in first.values())
    assert draw_in(tmp_path, table, make_records(table, seeds=(0,))) != first


def test_nothing_to_draw(tmp_path):
    table = make_table(tmp_path, figure=None)
    assert draw_in(tmp_path, table, make_records(table)) == {}
    assert draw_in(tmp_path, make_table(tmp_path), []) == {}


def test_a_row_that_is_missing_leaves_a_gap(tmp_path):
    table = make_table(tmp_path, figure={"kind": "curves"})
    assert list(draw_in(tmp_path, table, make_records(table)[2:])) == ["epochs.svg", "seconds.svg"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel": 4}, "up to 4 runs shared the device"),
        ({"device": "another"}, "several devices (CPU, another)"),
    ],
)
def test_seconds_that_cannot_be_compared_are_not_drawn(tmp_path, changes, why):
    table = make_table(tmp_path, figure={"kind": "curves"})
    records = make_records(table)
    assert why_no_seconds(Results(table, records)) == ""
    assert list(draw_in(tmp_path, table, records)) == ["epochs.svg", "seconds.svg"]
    assert "| 2 | 1 |" in "\n".join(page._convergence(Results(table, records)))
    records[1] = records[1].model_copy(update=changes)
    reason = why_no_seconds(Results(table, records))
    assert why in reason
    assert list(draw_in(tmp_path, table, records)) == ["epochs.svg"]
    said = "\n".join(page._convergence(Results(table, records)))
    assert f"neither drawn nor compared: {reason}." in said
    assert "| epochs |\n" in said


def test_epochs_until_a_row_comes_near_the_best(tmp_path):
    def points(*recalls):
        return [
            {"epoch": i, "seconds": 10.0 * i, "test": {"recall@1": r}}
            for i, r in enumerate(recalls, 1)
        ]

    table = make_table(tmp_path, figure={"kind": "curves"})
    records = [
        record("MPA, K = 2", 0, 0.80, curve=points(0.5, 0.77, 0.80)),
        record("MPA, K = 2", 1, 0.80, curve=points(0.5, 0.73, 0.80)),
        record("Proxy-Anchor", 0, 0.70, curve=points(0.2, 0.6, 0.7)),
    ]
    grid, caption = page._convergence(Results(table, records))
    assert grid.splitlines()[0] == "|  | epochs | seconds of training |"
    assert grid.splitlines()[2:] == [
        "| Proxy-Anchor | not reached | not reached |",
        "| MPA, K = 2 | 3 | 30 |",  # 0.75 after two epochs, 0.76 is near enough
    ]
    assert "reaches 76.0 % on the test set" in caption
    assert "| Proxy-Anchor | — | — |" in page._convergence(Results(table, records[:2]))[0]


def test_a_sweep_breaks_where_a_point_is_missing(tmp_path):
    rows = [{"name": f"K = {k}", "x": k, "published": {"recall@1": 50}} for k in (1, 2, 3)]
    del rows[1]["published"]
    table = make_table(tmp_path, rows=rows, claims=[])
    records = [record("K = 1", 0, 0.5, recipe=MODEL), record("K = 3", 0, 0.7, recipe=MODEL)]
    axes = Canvas().add_subplot()
    figures._sweep(axes, Results(table, records))
    for line in axes.lines:
        assert list(np.isnan(np.asarray(line.get_ydata(), float))) == [False, True, False]
        assert line.get_marker() not in ("", "None", None)


def test_epochs_have_whole_ticks(tmp_path):
    axes = Canvas().add_subplot()
    table = make_table(tmp_path, figure={"kind": "curves"})
    figures._curves(axes, Results(table, make_records(table)), "epoch", "epochs")
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_curves_are_means_over_the_seeds():
    lines = [
        [{"epoch": 1, "seconds": 1.0, "test": {"recall@1": 0.2}}, {"epoch": 2, "seconds": 2.0}],
        [{"epoch": 1, "seconds": 3.0, "test": {"recall@1": 0.4}}],
    ]
    runs = [record("a", seed, 0.0, curve=points) for seed, points in enumerate(lines)]
    assert curve(runs, "epoch") == [(1.0, pytest.approx(30.0))]
    assert curve(runs, "seconds") == [(2.0, pytest.approx(30.0))]
    assert curve([], "epoch") == []


def test_without_matplotlib_it_says_so_before_training(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="extra 'train'"):
        run_table(make_table(tmp_path), data, tmp_path / "out", start=no_training)
    assert not (tmp_path / "out").exists()
