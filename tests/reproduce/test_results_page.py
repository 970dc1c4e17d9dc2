"""The page of results says what the committed runs say."""

import copy
from functools import cache
from statistics import fmean

from proximetry.reproduce.markdown import page
from proximetry.reproduce.results import Results

from benchmarks.results_page import (
    HOME,
    PAGE,
    TOLERANCES,
    make_page,
    repeats,
    same_losses,
    spread,
    twins,
)
from proximetry.reproduce import Table
from proximetry.reproduce.records import read_records


def test_the_page_of_results_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == make_page()


def test_the_page_of_every_table_is_up_to_date():
    folders = [path for path in HOME.iterdir() if any(path.glob("*.json"))]
    assert folders
    for folder in folders:
        results = Results.of(Table.load(folder.name), read_records(folder))
        assert (folder / "README.md").read_text(encoding="utf-8") == page(results), folder.name


@cache
def full_runs():
    return [
        record
        for folder in HOME.iterdir()
        if folder.is_dir()
        for record in read_records(folder).values()
        if record.kind == "full"
    ]


def test_equal_runs_part_by_no_more_than_is_promised():
    groups = repeats(full_runs())
    assert any(len(group) == 4 for group in groups)
    for group in groups:
        found = spread(group)
        assert all(here <= most for here, most in zip(found, TOLERANCES, strict=True)), found
    # Another seed is another run, and a curve elsewhere is seen.
    one = copy.deepcopy(groups[0][0])
    one.recipe["training"]["seed"] = 7
    assert repeats([groups[0][0], one]) == []
    two = copy.deepcopy(groups[0][0])
    two.curve[-1]["test"]["recall@1"] += 0.02
    assert spread([groups[0][0], two])[2] > TOLERANCES[2]


def test_runs_that_train_alike_on_a_card_have_equal_losses():
    groups = twins(full_runs())
    assert {record.seed for group in groups for record in group} == {0, 1, 2}
    for group in groups:
        assert {record.card for record in group} == {"NVIDIA H200"}
        assert same_losses(group)
    one, two = groups[0]
    other = copy.deepcopy(two)
    other.curve[3]["loss"] *= 1 + 1e-15
    assert not same_losses([one, other])
    other.recipe["optimizer"]["lr"] *= 2  # trains differently: no twin
    assert twins([one, other]) == []
    assert twins([one, one]) == []  # judged alike too: a repeat


def test_the_readme_tells_the_figures_of_the_best_recipes():
    told = " ".join((HOME.parents[1] / "README.md").read_text(encoding="utf-8").split())

    def mean(row, metric="recall@1"):
        runs = [r for r in full_runs() if r.row == row]
        assert len(runs) == 3
        return f"{100 * fmean(r.test()[metric] for r in runs):.1f}"

    assert f"{mean('best-cub')} on CUB-200-2011 and {mean('best-cars')} on Cars196" in told
    short = [mean(row, "recall@1[:128]") for row in ("best-cub", "best-cars")]
    assert f"{' and '.join(short)} with 128" in told
    alone = mean("best-cub, one look per image")
    assert f"({alone} on CUB-200-2011 without)" in told
    training = (HOME.parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"{mean('best-cub')} with it and {alone} without" in " ".join(training.split())


def test_the_best_recipes_beat_what_was_published():
    for name, published in (("cub", 72.2), ("cars", 90.1)):
        runs = [r for r in full_runs() if r.row == f"best-{name}"]
        assert runs[0].recipe["model"]["keep"] == 512
        assert fmean(100 * r.test()["recall@1"] for r in runs) > published
