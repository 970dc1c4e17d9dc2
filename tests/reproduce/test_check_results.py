"""The check of the committed results reports errors in them."""

import json
import shutil

import pytest

from benchmarks import check_results
from benchmarks.results_page import TOLERANCES, repeats, same_losses, spread, summarize, twins
from benchmarks.studies import HOME
from proximetry.reproduce import Table
from proximetry.reproduce.records import RUNS, Results, read_records, read_runs, write_records
from proximetry.training import Recipe
from tests.reproduce.test_statistics import record

SEARCH = HOME / "best-recipe-search"
RECIPE = {"optimizer": {"lr": 1e-4}}


def test_repeated_runs_have_one_recipe_and_seed():
    one, two = (record("a", 0, value, recipe=RECIPE) for value in (0.500, 0.502))
    other = record("a", 0, 0.5, recipe={"training": {"seed": 7}})
    assert repeats([one, other, two]) == [[one, two]]
    assert spread([one, two]) == pytest.approx((0.0, 0.2, 0.2))
    far = record("a", 0, 0.506, recipe=RECIPE)
    assert spread([one, far])[2] > TOLERANCES[2]
    assert list(check_results.check_repeats([one, far]))


def test_twins_train_alike_and_are_evaluated_differently():
    one = record("a", 0, 0.5, recipe=RECIPE)
    views = {"flip_tta": True, "tta_crops": [0.875]}
    two = record("b", 0, 0.6, recipe={**RECIPE, "model": views}, seconds=13.0)
    slow = record("c", 0, 0.5, recipe={"optimizer": {"lr": 2e-4}})
    assert twins([one, two, slow]) == [[one, two]]
    assert twins([one, one]) == []  # same evaluation: a repeat
    assert twins([one, two.model_copy(update={"seconds": one.seconds})]) == []  # one training
    assert same_losses([one, two])
    line = {**two.curve[1], "loss": two.curve[1]["loss"] * (1 + 1e-15)}
    assert not same_losses([one, two.model_copy(update={"curve": [two.curve[0], line]})])


def test_the_summary_counts_every_claim():
    rows = [{"name": name} for name in "abc"]
    claims = [{"better": "a", "worse": name} for name in "bc"]
    table = Table.load({"name": "t", "title": "T", "rows": rows, "claims": claims})
    results = Results(table, [record("a", 0, 0.5), record("b", 0, 0.4)])
    assert summarize([results]).splitlines() == [
        "| table | one seed, not tested | not run |",
        "|---|---|---|",
        "| T | 1 | 1 |",
    ]


@pytest.fixture
def copied(tmp_path):
    home = tmp_path / "best-cars"
    shutil.copytree(HOME / home.name, home)
    return home


def test_edited_page_is_reported(copied):
    assert list(check_results.check_study(copied)) == []
    page = (copied / "README.md").read_text()
    (copied / "README.md").write_text(page.replace("95.2 ± 0.1", "95.3 ± 0.1"))
    (complaint,) = check_results.check_study(copied)
    assert "does not match runs.jsonl" in complaint


@pytest.mark.parametrize("part", ["figure", "recipe", "row"])
def test_edited_run_is_reported(copied, part):
    run = read_records(copied)["best-cars-seed1"]
    if part == "figure":
        run.last["test"]["recall@1"] += 0.01
    elif part == "recipe":
        run.recipe["optimizer"]["lr"] *= 2
    (run if part != "row" else run.model_copy(update={"row": "gone"})).write(copied)
    complaints = " ".join(check_results.check_study(copied))
    assert {"figure": "does not match", "recipe": "optimizer.lr", "row": "gone-seed1"}[
        part
    ] in complaints


def test_search_that_uses_the_test_set_is_reported(tmp_path):
    home = tmp_path / "search"
    shutil.copytree(SEARCH, home)
    assert list(check_results.check_study(home)) == []
    runs = read_runs(home)
    last = runs[0].last
    last["test"] = last["held_out"]
    write_records(home, runs)
    (complaint,) = check_results.check_study(home)
    assert f"{runs[0].id} uses the test set" in complaint
    last["held_out"] = {**last["held_out"], "recall@1": 0.1}
    write_records(home, runs)
    assert "README.md does not match" in next(check_results.check_study(home))


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"model.flip_tta": False}, True),  # chosen after training
        ({"training.epochs": 90, "schedule.every": 30}, True),
        ({"training.epochs": 90}, False),  # the learning rate drops elsewhere
        ({"optimizer.lr": 1e-4}, False),
        ({"data.crop_size": 288}, False),
    ],
)
def test_best_recipe_that_was_not_tried_is_reported(changes, same):
    (run,) = (run for run in read_runs(SEARCH) if run.row == "lr-wide-whole")
    tried = Recipe.load(run.recipe)
    best = Recipe.load("best-cars").override(changes)
    assert check_results.trains_alike(best, tried) == same


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/data/cub", "/data/cub"),
        ("skipped /home/me/cub/a.jpg: no image", "/home/me/cub/a.jpg:"),
        ("root:/data", "/data"),
        ("--weights=~/bn.pth", "~/bn.pth"),
        ("C:\\Users\\me\\cub", r"C:\\Users\\me\\cub"),
        ("10 classes in train/, T = 1/9, pairs/contrastive, https://a.org/b", None),
    ],
)
def test_absolute_path_is_reported_in_any_file(tmp_path, text, path):
    file = tmp_path / "results" / RUNS
    file.parent.mkdir()
    file.write_text(json.dumps({"notes": [text]}))
    complaints = list(check_results.check_paths(tmp_path))
    assert complaints == ([] if path is None else [f"{file} contains an absolute path: {path}"])
