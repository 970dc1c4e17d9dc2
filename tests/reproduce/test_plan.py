"""Runs from tables: identities, scaled schedules, what a card and a person change."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proximetry.reproduce import ReproduceError, Table
from proximetry.reproduce.plan import Options, command_for, falls, make_run, plan, scale
from proximetry.reproduce.records import check_same, read_record
from proximetry.training import Recipe
from proximetry.training.schedule import LearningRates
from tests.reproduce.small import make_table, table_values, with_base

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json"))


def test_runs_have_names_of_their_own_and_come_seed_by_seed(tmp_path):
    table = make_table(tmp_path)
    runs = plan(table, (3, 1), Options(), selection=True)
    assert [run.id for run in runs] == [
        "proxy-anchor-seed3",
        "mpa-k-2-seed3",
        "proxy-anchor-seed1",
        "mpa-k-2-seed1",
        "proxy-anchor-selection",
        "mpa-k-2-selection",
    ]
    assert [run.recipe.training.seed for run in runs] == [3, 3, 1, 1, 3, 3]
    assert str(runs[1]) == "MPA, K = 2, seed 3"


@pytest.mark.parametrize("seeds", [(), (1, 1), (-1,)])
def test_wrong_seeds(tmp_path, seeds):
    with pytest.raises(ReproduceError, match="seeds must be different"):
        plan(make_table(tmp_path), seeds, Options(), selection=False)


def test_half_the_epochs():
    table = Table.load("mpa-table4")
    recipe = make_run(table, table.rows[0], 0, "full", Options(epochs=30)).recipe
    assert recipe.training.epochs == 30
    assert recipe.schedule.every == 10
    assert recipe.evaluation.every == 2
    assert recipe.schedule.warmup_epochs == 1
    steps = Table.load("proxynca-pp-cub")
    recipe = make_run(steps, steps.rows[0], 0, "full", Options(epochs=20)).recipe
    assert recipe.schedule.at == (10, 15)
    with pytest.raises(ReproduceError, match="Take at least 6"):
        make_run(steps, steps.rows[0], 0, "full", Options(epochs=5))


def test_a_step_that_is_no_whole_number_becomes_milestones():
    table = Table.load("proxy-anchor-alpha")
    third = make_run(table, table.rows[0], 0, "full", Options(epochs=20)).recipe
    assert (third.schedule.name, third.schedule.at) == ("milestones", (3, 7, 10, 13, 17))
    assert third.evaluation.every == 3
    half = make_run(table, table.rows[0], 0, "full", Options(epochs=30)).recipe
    assert (half.schedule.name, half.schedule.every) == ("step", 5)
    assert half.schedule.at == ()


@given(published=st.integers(1, 80), epochs=st.integers(1, 160), every=st.integers(1, 40))
def test_scaled_steps_fall_where_they_should(published, epochs, every):
    """The rates of every epoch, beside those of the table at the same part of the way."""
    recipe = Recipe.from_dict(
        {"training": {"epochs": published}, "schedule": {"name": "step", "every": every}}
    )
    scaled = scale(recipe, epochs)
    wanted = [k * every * epochs / published for k in range(1, published) if k * every < published]
    found = falls(scaled)
    for fall in found:
        assert min(abs(fall - w) for w in wanted) <= (1 if fall == 1 else 0.5)
    for w in wanted:  # every fall is there, unless it was rounded to the end
        assert min(abs(fall - w) for fall in (*found, epochs)) <= 1
    rates = LearningRates(scaled.schedule, epochs, [1.0])
    for epoch in range(epochs):
        expected = scaled.schedule.factor ** sum(epoch >= fall for fall in found)
        assert rates.factor(epoch) == pytest.approx(expected)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_shipped_results_belong_to_their_tables(path):
    record = read_record(path)
    table = Table.load(path.parent.name)
    ran = record.recipe["training"]["epochs"]
    options = Options(epochs=ran, cuda=record.card != "CPU")
    run = make_run(table, table.row(record.row), record.seed, record.kind, options)
    check_same(path, record.recipe, run)
    assert run.id == path.stem


@given(
    published=st.integers(1, 200),
    epochs=st.integers(1, 400),
    every=st.integers(1, 60),
    at=st.sets(st.integers(1, 200)),
)
def test_scaling_keeps_the_shape(published, epochs, every, at):
    recipe = Recipe.from_dict(
        {
            "training": {"epochs": published},
            "schedule": {"name": "milestones", "every": every, "at": sorted(at)},
            "evaluation": {"every": every},
        }
    )
    scaled = scale(recipe, epochs)
    assert scaled.training.epochs == epochs
    assert scaled.schedule.every >= 1
    assert list(scaled.schedule.at) == sorted(set(scaled.schedule.at))
    for old in at:
        if old >= published:  # never came, and never comes
            continue
        nearest = min(abs(new - old * epochs / published) for new in scaled.schedule.at)
        assert nearest <= 1
    same = scale(recipe, published)
    assert falls(same) == falls(recipe)
    assert same.evaluation == recipe.evaluation


def test_no_epochs_at_all():
    with pytest.raises(ReproduceError, match="at least 1, got 0"):
        scale(Recipe(), 0)


def test_a_table_may_decide_what_a_card_does(tmp_path):
    values = with_base(table_values(tmp_path), "data", cache="memory")
    table = Table.from_dict(with_base(values, "training", precision="float32"))
    recipe = make_run(table, table.rows[0], 0, "full", Options(cuda=True)).recipe
    assert recipe.data.cache == "memory"
    assert recipe.training.precision == "float32"
    assert recipe.training.capture


def test_the_command_says_what_differs_from_the_table():
    table = Table.load("mpa-table5")
    plain = command_for(table, [0, 1], "tf_efficientnet_lite2", "auto", None, True)
    assert plain == "proximetry reproduce mpa-table5 --data CARS --seeds 0 1"
    other = command_for(table, [0], "bn_inception", "/home/me/bn.pth", 30, False)
    words = "--backbone bn_inception --weights bn.pth --epochs 30 --selection false"
    assert other.endswith(f"--seeds 0 {words}")
    sweep = Table.load("mpa-table7")
    chosen = command_for(sweep, [0], "tf_efficientnet_lite2", "auto", None, True)
    assert chosen.endswith("--seeds 0 --selection true")
