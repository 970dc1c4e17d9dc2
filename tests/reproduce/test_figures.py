"""Pictures: the same bytes from the same numbers, and the numbers in them."""

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from proximetry.reproduce import figures, page
from proximetry.reproduce.figures import curve, draw, picture_names, why_no_seconds
from proximetry.reproduce.records import Results
from tests.reproduce.small import make_table
from tests.reproduce.test_statistics import record

MODEL = {"model": {"backbone": "net"}}


def runs_of(table, seeds=(0, 1)):
    return {
        row.name: [record(row.name, s, 0.5 + 0.1 * i + 0.01 * s, recipe=MODEL) for s in seeds]
        for i, row in enumerate(table.rows)
    }


@pytest.mark.parametrize("kind", ["sweep", "curves"])
@pytest.mark.parametrize("log", [True, False])
def test_the_same_bytes(tmp_path, kind, log):
    table = make_table(tmp_path, figure={"kind": kind, "label": "K", "log": log})
    contents = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        names = draw(table, runs_of(table), folder)
        assert names == list(picture_names(table.figure, runs_of(table)))
        assert names == (["sweep.svg"] if kind == "sweep" else ["epochs.svg", "seconds.svg"])
        contents.append([(folder / name).read_bytes() for name in names])
    assert contents[0] == contents[1]
    assert all(b"<svg" in content and b"dc:date" not in content for content in contents[0])
    changed = runs_of(table, seeds=(0,))
    draw(table, changed, tmp_path / "a")
    assert [(tmp_path / "a" / name).read_bytes() for name in names] != contents[0]


def test_nothing_to_draw(tmp_path):
    assert draw(make_table(tmp_path, figure=None), {}, tmp_path) == []
    assert draw(make_table(tmp_path), {"MPA, K = 2": []}, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_is_missing_leaves_a_gap(tmp_path):
    table = make_table(tmp_path, figure={"kind": "curves"})
    runs = runs_of(table)
    runs["Proxy-Anchor"] = []
    assert draw(table, runs, tmp_path) == ["epochs.svg", "seconds.svg"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel": None}, "was not recorded"),
        ({"parallel": 4}, "up to 4 runs shared the device"),
        ({"device": "another"}, "several devices (CPU, another)"),
    ],
)
def test_seconds_that_cannot_be_compared_are_not_drawn(tmp_path, changes, why):
    table = make_table(tmp_path, figure={"kind": "curves"})
    runs = runs_of(table)
    assert why_no_seconds(runs) == ""
    assert draw(table, runs, tmp_path) == ["epochs.svg", "seconds.svg"]
    assert "| 2 | 1 |" in "\n".join(convergence(table, runs))
    runs["Proxy-Anchor"][1] = runs["Proxy-Anchor"][1].model_copy(update=changes)
    assert why in why_no_seconds(runs)
    assert draw(table, runs, tmp_path) == ["epochs.svg"]
    assert not (tmp_path / "seconds.svg").exists()
    said = "\n".join(convergence(table, runs))
    assert f"neither drawn nor compared: {why_no_seconds(runs)}." in said
    assert "| epochs |\n" in said


def convergence(table, runs):
    everyone = {f"{r.row}-{r.seed}": r for row in runs.values() for r in row}
    return page._convergence(Results.of(table, everyone))


def test_epochs_until_a_row_comes_near_the_best(tmp_path):
    def points(*recalls):
        return [
            {"epoch": i, "seconds": 10.0 * i, "test": {"recall@1": r}}
            for i, r in enumerate(recalls, 1)
        ]

    table = make_table(tmp_path, figure={"kind": "curves"})
    runs = {
        "MPA, K = 2": [
            record("MPA, K = 2", 0, 0.80, curve=points(0.5, 0.77, 0.80), parallel=1),
            record("MPA, K = 2", 1, 0.80, curve=points(0.5, 0.73, 0.80), parallel=1),
        ],
        "Proxy-Anchor": [record("Proxy-Anchor", 0, 0.70, curve=points(0.2, 0.6, 0.7), parallel=1)],
    }
    lines = convergence(table, runs)[0].splitlines()
    assert lines[0] == "|  | epochs | seconds of training |"
    assert lines[2:] == [
        "| Proxy-Anchor | not reached | not reached |",
        "| MPA, K = 2 | 3 | 30 |",  # 0.75 after two epochs, 0.76 is near enough
    ]
    assert "Until recall@1 on the test set is 76.0 %" in convergence(table, runs)[1]
    del runs["Proxy-Anchor"]
    assert "| Proxy-Anchor | — | — |" in convergence(table, runs)[0]


def lines_of(table, runs):
    axes = Canvas().add_subplot()
    figures._sweep(axes, table, runs)
    return axes


def test_a_sweep_breaks_where_a_point_is_missing(tmp_path):
    rows = [{"name": f"K = {k}", "x": k, "published": {"recall@1": 50}} for k in (1, 2, 3)]
    del rows[1]["published"]
    table = make_table(tmp_path, rows=rows, claims=[])
    runs = {"K = 1": [record("K = 1", 0, 0.5, recipe=MODEL)]}
    runs["K = 3"] = [record("K = 3", 0, 0.7, recipe=MODEL)]
    for line in lines_of(table, runs).lines:
        assert list(np.isnan(np.asarray(line.get_ydata(), float))) == [False, True, False]
        assert line.get_marker() not in ("", "None", None)


def test_epochs_have_whole_ticks(tmp_path):
    axes = Canvas().add_subplot()
    table = make_table(tmp_path, figure={"kind": "curves"})
    figures._curves(axes, table, runs_of(table), "epoch", "epochs")
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


def test_without_matplotlib_it_says_so_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"proximetry\[train\]"):
        figures.need_matplotlib()
