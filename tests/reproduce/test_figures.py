"""Pictures: the same bytes from the same numbers, and the numbers in them."""

import pytest

from proximetry.reproduce import figures
from proximetry.reproduce.figures import curve, draw, picture_names
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
        assert names == list(picture_names(table.figure))
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
    with pytest.raises(ImportError, match="pip install"):
        figures.need_matplotlib()
