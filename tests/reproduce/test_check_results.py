"""The check of the committed results notices what is wrong with them."""

import json
import shutil

import pytest

from benchmarks import check_results
from benchmarks.results_page import HOME, TOLERANCES, repeats, same_losses, spread, twins
from proximetry.reproduce import Table
from tests.reproduce.test_statistics import record

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
    two = record("b", 0, 0.6, recipe=changed(RECIPE, model=views))
    slow = record("c", 0, 0.5, recipe={"optimizer": {"lr": 2e-4}})
    assert twins([one, two, slow]) == [[one, two]]
    assert twins([one, one]) == []  # evaluated alike too: a repeat
    assert same_losses([one, two])
    line = changed(two.curve[1], loss=two.curve[1]["loss"] * (1 + 1e-15))
    assert not same_losses([one, two.model_copy(update={"curve": [two.curve[0], line]})])


@pytest.fixture
def copied(tmp_path):
    home = tmp_path / "record-cars"
    shutil.copytree(HOME / home.name, home)
    return home


def test_an_edited_figure_is_noticed(copied):
    table = Table.load(copied.name)
    assert list(check_results.check_folder(copied, table)) == []
    page = (copied / "README.md").read_text()
    (copied / "README.md").write_text(page.replace("92.2 ± 0.1", "92.3 ± 0.1"))
    (complaint,) = check_results.check_folder(copied, table)
    assert "is not what its JSON files say" in complaint


@pytest.mark.parametrize("part", ["figure", "recipe"])
def test_an_edited_run_is_noticed(copied, part):
    path = copied / "best-cars-seed1.json"
    values = json.loads(path.read_text())
    if part == "figure":
        values["last"]["test"]["recall@1"] += 0.01
    else:
        values["recipe"]["optimizer"]["lr"] *= 2
    path.write_text(json.dumps(values))
    said = " ".join(check_results.check_folder(copied, Table.load(copied.name)))
    assert ("JSON files say" if part == "figure" else "optimizer.lr") in said
