"""The check of the committed results notices what is wrong with them."""

import json
import shutil

import pytest

from benchmarks import check_results
from benchmarks.results_page import (
    HOME,
    STUDIES,
    TOLERANCES,
    in_short,
    repeats,
    same_losses,
    spread,
    twins,
)
from proximetry.reproduce import ReproduceError, ReproduceOptions, Table, reproduce
from proximetry.reproduce.records import RUNS, Results, read_records, read_runs, write_records
from proximetry.training import Recipe
from tests.reproduce.small import edit_run
from tests.reproduce.test_statistics import record

RECORD = STUDIES[0]
RECIPE = {"optimizer": {"lr": 1e-4}}


def changed(values, **changes):
    return {**values, **changes}


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
    two = record("b", 0, 0.6, recipe=changed(RECIPE, model=views), seconds=13.0)
    slow = record("c", 0, 0.5, recipe={"optimizer": {"lr": 2e-4}})
    assert twins([one, two, slow]) == [[one, two]]
    assert twins([one, one]) == []  # evaluated alike too: a repeat
    assert twins([one, two.model_copy(update={"seconds": one.seconds})]) == []  # one training
    assert same_losses([one, two])
    line = changed(two.curve[1], loss=two.curve[1]["loss"] * (1 + 1e-15))
    assert not same_losses([one, two.model_copy(update={"curve": [two.curve[0], line]})])


def test_the_summary_counts_every_claim():
    rows = [{"name": name} for name in "abc"]
    claims = [{"better": "a", "worse": name} for name in "bc"]
    table = Table.load({"name": "t", "title": "T", "rows": rows, "claims": claims})
    results = Results(table, [record("a", 0, 0.5), record("b", 0, 0.4)])
    assert in_short([results]).splitlines() == [
        "| claims | one seed, not tested | not run |",
        "|---|---|---|",
        "| T | 1 | 1 |",
    ]


@pytest.fixture
def copied(tmp_path):
    home = tmp_path / "record-cars"
    shutil.copytree(HOME / home.name, home)
    return home


def test_an_edited_figure_is_noticed(copied):
    table = Table.load(copied.name)
    assert list(check_results.check_folder(copied, table)) == []
    page = (copied / "README.md").read_text()
    (copied / "README.md").write_text(page.replace("95.2 ± 0.1", "95.3 ± 0.1"))
    (complaint,) = check_results.check_folder(copied, table)
    assert "does not match runs.jsonl" in complaint


def test_a_run_of_a_row_that_is_no_more_is_noticed(copied):
    edit_run(copied, "best-cars-seed1", row="gone", slug="gone")
    (complaint,) = check_results.check_folder(copied, Table.load(copied.name))
    assert complaint.startswith(f"{copied / RUNS}: gone-seed1: ")
    options = ReproduceOptions(render=True)
    with pytest.raises(ReproduceError, match=r"gone-seed1: .*'gone'"):
        reproduce(copied.name, out=copied.parent, options=options)


def test_a_page_says_how_images_are_scaled():
    whole, centre = (
        (HOME / f"record-{name}" / "README.md").read_text() for name in ("cars", "cub")
    )
    assert "Test images: both sides to 448, centre crop 448." in whole
    assert "One view per image: the weights are those of best-cars" in whole
    assert "Training crops are 0.75 to 1.8 times as wide as high" in whole
    assert "Test images: short side to 448, centre crop 448." in centre
    assert "as wide as high" not in centre


@pytest.mark.parametrize("part", ["figure", "recipe"])
def test_an_edited_run_is_noticed(copied, part):
    run = read_records(copied)["best-cars-seed1"]
    if part == "figure":
        run.last["test"]["recall@1"] += 0.01
    else:
        run.recipe["optimizer"]["lr"] *= 2
    run.write(copied)
    said = " ".join(check_results.check_folder(copied, Table.load(copied.name)))
    assert ("does not match" if part == "figure" else "optimizer.lr") in said


def test_search_that_uses_the_test_set_is_reported(tmp_path):
    home = tmp_path / "record"
    shutil.copytree(RECORD, home)
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
def test_a_best_recipe_that_was_not_tried_is_noticed(changes, same):
    (run,) = (run for run in read_runs(RECORD) if run.row == "lr-wide-whole")
    tried = Recipe.load(run.recipe)
    best = Recipe.load("best-cars").override(changes)
    assert check_results.trains_alike(best, tried) == same


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/data/cub", "/data/cub"),
        ("left out /home/me/cub/a.jpg: no image", "/home/me/cub/a.jpg:"),
        ("root:/data", "/data"),
        ("--weights=~/bn.pth", "~/bn.pth"),
        ("C:\\Users\\me\\cub", r"C:\\Users\\me\\cub"),
        ("10 classes in train/, T = 1/9, pairs/contrastive, https://a.org/b", None),
    ],
)
def test_a_path_of_a_machine_is_noticed_in_any_file(tmp_path, text, path):
    file = tmp_path / "results" / RUNS
    file.parent.mkdir()
    file.write_text(json.dumps({"notes": [text]}))
    said = list(check_results.check_paths(tmp_path))
    place = f"{file} names a place on somebody's machine: {path}"
    assert said == ([] if path is None else [place])
