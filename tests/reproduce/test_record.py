"""The search for a better recipe: held-out classes alone, every candidate once."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks import record
from proximetry.training import Recipe
from tests.training.tiny import make_images, tiny_values


@pytest.fixture
def search(tmp_path):
    for split in ("train", "test"):  # a test set that is there, and not to be looked at
        make_images(tmp_path / "images" / split)
    file = tmp_path / "search.yaml"
    values = {
        "base": tiny_values(
            tmp_path / "cache",
            model={"resize": 24, "keep": 3},
            training={"ema": 0.9},
            evaluation={"held_out": 0.3, "every": 1, "cuts": [2]},
        ),
        "sizes": [[24, 24], [16, 24]],
        "candidates": {"base": {}, "narrow": {"model.dim": 3}},
    }
    file.write_text(yaml.safe_dump(values))
    return file


def run(monkeypatch, search, *words):
    out = search.parent / "out"
    given = [str(search), "--data", str(search.parent / "images"), "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", ["record", *given])
    record.main()
    return out


def test_candidates_are_judged_once_on_held_out_classes(search, monkeypatch, capsys):
    seen, real = [], record.judge

    def judge(trainer, embedder, crop, side):
        seen.append((crop, embedder.architecture.mirror))
        return real(trainer, embedder, crop, side)

    monkeypatch.setattr(record, "judge", judge)
    out = run(monkeypatch, search, "--only", "narrow")
    first = capsys.readouterr().out
    assert "narrow-seed0: held-out recall@1" in first
    assert "| base |" not in first
    run(monkeypatch, search)
    second = capsys.readouterr().out
    assert "base-seed0: held-out recall@1" in second
    assert "narrow-seed0:" not in second
    assert "| narrow |" in second
    found = json.loads((out / "base-seed0.json").read_text())
    assert found["recipe"]["evaluation"]["protocol"] == "held_out"
    assert not any("test" in line for line in found["curve"])
    own = {key: value for key, value in found["held_out"].items() if "[" not in key}
    assert found["otherwise"]["24 of 24"] == pytest.approx(own)
    assert found["otherwise"].keys() == {"24 of 24", "16 of 24", "mirror"}
    assert seen == 2 * [(24, False), (16, False), (24, True)]
    assert "recall@1[:2]" in second
    assert (out / "README.md").read_text() in second


def test_another_recipe_under_the_same_name_is_refused(search, monkeypatch):
    run(monkeypatch, search, "--only", "base")
    search.write_text(search.read_text().replace("ema: 0.9", "ema: 0.5"))
    with pytest.raises(SystemExit, match=r"was made with training\.ema 0\.9, now it is 0\.5"):
        run(monkeypatch, search, "--only", "base")


def test_a_name_that_is_none_is_said_so(search, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, search, "--only", "bse")
    assert "no candidate 'bse', did you mean 'base'?" in capsys.readouterr().err


def test_what_another_process_does_is_left_to_it(search, monkeypatch, capsys):
    out = search.parent / "out"
    with record.taken(out / "work" / "base-seed0.lock") as mine:
        assert mine
        run(monkeypatch, search)
    assert not (out / "base-seed0.json").exists()
    assert (out / "narrow-seed0.json").exists()


@pytest.mark.parametrize("name", ["cub", "cars"])
def test_the_searches_that_are_there_can_be_run(name):
    file = Path(record.__file__).parent / "record" / f"{name}.yaml"
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    for changes in values["candidates"].values():
        recipe = record.candidate_recipe(values, changes, 0)
        assert recipe.evaluation.protocol == "held_out"
        assert not recipe.evaluation.watch_test
        assert recipe.data.dataset == name


@pytest.mark.parametrize("name", ["cub", "cars"])
def test_the_committed_search_says_what_its_files_say(name):
    home = Path(record.__file__).parent / "record"
    search = yaml.safe_load((home / f"{name}.yaml").read_text())
    out = home / "results" / name
    found = record.read(out, search)
    assert sum(map(len, found.values())) == len(list(out.glob("*.json"))) > 0
    assert (out / "README.md").read_text() == record.summary(search, found)
    for candidate, runs in found.items():
        for run in runs:
            seed = run["recipe"]["training"]["seed"]
            wanted = record.candidate_recipe(search, search["candidates"][candidate], seed)
            assert run["recipe"] == wanted.to_dict()


@pytest.mark.parametrize(
    ("name", "candidate", "longer"), [("cub", "ln-90-288", 1), ("cars", "ln-90-colour", 2)]
)
def test_the_best_recipes_train_as_the_best_candidates_did(name, candidate, longer):
    home = Path(record.__file__).parent / "record"
    search = yaml.safe_load((home / f"{name}.yaml").read_text())
    tried = record.candidate_recipe(search, search["candidates"][candidate], 0)
    best = Recipe.load(f"best-{name}")
    assert (best.loss, best.optimizer) == (tried.loss, tried.optimizer)
    assert replace(best.data, cache="gpu") == tried.data
    judged = {"image_size": None, "resize": None, "mirror": False}
    assert replace(best.model, **judged) == replace(tried.model, **judged)
    assert best.training.ema == tried.training.ema
    assert best.training.epochs == longer * tried.training.epochs
    assert best.schedule == replace(tried.schedule, every=longer * tried.schedule.every)
    assert best.evaluation.protocol == "last"
