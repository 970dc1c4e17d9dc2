"""Figures are deterministic and show the right numbers."""

import re

import pytest

from proximetry.reproduce.figures import curve, draw, explain_missing_seconds, figure_names
from proximetry.reproduce.records import Results
from proximetry.reproduce.table_page import _convergence
from tests.reproduce.small import make_table
from tests.reproduce.test_statistics import record

MODEL = {"model": {"backbone": "net"}}


def make_records(table, seeds=(0, 1)):
    return [
        record(row.name, s, 0.5 + 0.1 * i + 0.01 * s, recipe=MODEL)
        for i, row in enumerate(table.rows)
        for s in seeds
    ]


def draw_in(folder, table, records):
    """Draw, and return the figures by name."""
    results = Results(table, records)
    draw(results, folder)
    drawn = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    assert list(drawn) == sorted(figure_names(results))
    return drawn


@pytest.mark.parametrize("kind", ["sweep", "curves"])
@pytest.mark.parametrize("log", [True, False])
def test_figures_are_deterministic(tmp_path, kind, log):
    table = make_table(tmp_path, figure={"kind": kind, "label": "K", "log": log})
    first = draw_in(tmp_path, table, make_records(table))
    assert list(first) == (["sweep.svg"] if kind == "sweep" else ["epochs.svg", "seconds.svg"])
    assert draw_in(tmp_path, table, make_records(table)) == first
    assert all(text.startswith("<svg xmlns=") for text in first.values())
    assert draw_in(tmp_path, table, make_records(table, seeds=(0,))) != first
    # A row without runs is skipped.
    assert list(draw_in(tmp_path, table, make_records(table)[2:])) == list(first)


def test_outdated_figures_are_removed(tmp_path):
    table = make_table(tmp_path)
    assert list(draw_in(tmp_path, table, make_records(table))) == ["sweep.svg"]
    assert draw_in(tmp_path, table, []) == {}
    assert draw_in(tmp_path, make_table(tmp_path, figure=None), make_records(table)) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": 4}, "up to 4 runs shared the device"),
        ({"device": "another"}, "several devices (CPU, another)"),
    ],
)
def test_incomparable_seconds_are_not_drawn(tmp_path, changes, reason):
    table = make_table(tmp_path, figure={"kind": "curves"})
    records = make_records(table)
    assert explain_missing_seconds(Results(table, records)) == ""
    assert list(draw_in(tmp_path, table, records)) == ["epochs.svg", "seconds.svg"]
    assert "| 2 | 1 |" in _convergence(Results(table, records))["table_of_convergence"]
    records[1] = records[1].model_copy(update=changes)
    assert reason in explain_missing_seconds(Results(table, records))
    assert list(draw_in(tmp_path, table, records)) == ["epochs.svg"]
    assert "| epochs |\n" in _convergence(Results(table, records))["table_of_convergence"]


def test_epochs_until_a_row_reaches_the_target(tmp_path):
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
    convergence = _convergence(Results(table, records))
    assert convergence["table_of_convergence"].splitlines() == [
        "|  | epochs | seconds of training |",
        "|---|---|---|",
        "| Proxy-Anchor | not reached | not reached |",
        "| MPA, K = 2 | 3 | 30 |",  # 0.75 after two epochs, target 0.76
    ]
    assert convergence["target"] == pytest.approx(76)
    without = _convergence(Results(table, records[:2]))
    assert "| Proxy-Anchor | — | — |" in without["table_of_convergence"]


def test_sweep_has_a_gap_at_a_missing_point(tmp_path):
    rows = [{"name": f"K = {k}", "x": k, "published": {"recall@1": 50}} for k in (1, 2, 3, 4)]
    del rows[1]["published"]
    table = make_table(tmp_path, rows=rows, claims=[])
    records = [record(f"K = {k}", s, 0.5 + k / 10, recipe=MODEL) for k in (1, 3, 4) for s in (0, 1)]
    (text,) = draw_in(tmp_path, table, records).values()
    lines = re.findall(r'<polyline points="([^"]*)"', text)
    assert [len(line.split()) for line in lines] == [1, 2, 1, 2]
    assert "proxies per class K 3: 80" in text


def test_curves_are_means_over_the_seeds():
    lines = [
        [{"epoch": 1, "seconds": 1.0, "test": {"recall@1": 0.2}}, {"epoch": 2, "seconds": 2.0}],
        [{"epoch": 1, "seconds": 3.0, "test": {"recall@1": 0.4}}],
    ]
    runs = [record("a", seed, 0.0, curve=points) for seed, points in enumerate(lines)]
    assert curve(runs, "epoch") == [(1.0, pytest.approx(30.0))]
    assert curve(runs, "seconds") == [(2.0, pytest.approx(30.0))]
    assert curve([], "epoch") == []
