"""Runs of tables: ids, scaled schedules, options and devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proximetry.reproduce import ReproduceError, ReproduceOptions, Table
from proximetry.reproduce.plan import command_for, make_run, plan, scale
from proximetry.reproduce.records import Results
from proximetry.training import Recipe
from proximetry.training.schedule import LearningRates, drop_epochs
from tests.reproduce.small import make_table, table_values, with_base
from tests.reproduce.test_statistics import record


def test_runs_have_unique_ids_and_come_seed_by_seed(tmp_path):
    table = make_table(tmp_path)
    runs = plan(table, ReproduceOptions(seeds=(3, 1)))
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


def test_rows_by_name(tmp_path):
    table = make_table(tmp_path)
    runs = plan(table, ReproduceOptions(rows=("MPA, K = 2",), selection=False))
    assert [run.id for run in runs] == ["mpa-k-2-seed0"]
    assert len(plan(table, ReproduceOptions(rows=("Proxy-Anchor",) * 2, selection=False))) == 1
    with pytest.raises(ReproduceError, match=r"unknown row 'MPA, K = 3'\. Valid names: Proxy-A"):
        plan(table, ReproduceOptions(rows=("MPA, K = 3",)))


def test_selection_of_some_rows(tmp_path):
    table = make_table(tmp_path, selection=["MPA, K = 2"])
    ids = ["proxy-anchor-seed0", "mpa-k-2-seed0", "mpa-k-2-selection"]
    assert [run.id for run in plan(table, ReproduceOptions())] == ids
    full, selection = (
        record("Proxy-Anchor", 0, 0.5),
        record("Proxy-Anchor", 0, 0.5, kind="selection"),
    )
    assert Results(table, [full]).missing() == ids[1:2]
    assert Results(table, [full, selection]).missing() == ["mpa-k-2-seed0", "mpa-k-2-selection"]
    assert len(plan(table, ReproduceOptions(selection=True))) == 4
    recipe = recipe_of(table).to_dict()
    for rows, word in ((table.rows, " --selection"), (table.rows[1:], ""), ((), " --no-selection")):
        command = command_for(table, "MPA, K = 2", [0], recipe, rows, False)
        assert (
            command.removeprefix("proximetry reproduce small.yaml --data FOLDER --seeds 0") == word
        )
    others = plan(table, ReproduceOptions(rows=("Proxy-Anchor",)))
    assert [run.id for run in others] == ["proxy-anchor-seed0"]
    assert len(plan(table, ReproduceOptions(selection=False))) == 2
    with pytest.raises(ReproduceError, match="unknown row 'MPA, K = 3'"):
        make_table(tmp_path, selection=["MPA, K = 3"])


@pytest.mark.parametrize("seeds", [(), (1, 1), (-1,)])
def test_invalid_seeds(tmp_path, seeds):
    with pytest.raises(ReproduceError, match="seeds must be distinct"):
        plan(make_table(tmp_path), ReproduceOptions(seeds=seeds))


def drops(recipe):
    epochs = recipe.training.epochs
    return [at for at in drop_epochs(recipe.schedule, epochs) if at < epochs]


def recipe_of(table, row=0, **options):
    return make_run(table, table.rows[row], 0, "full", ReproduceOptions(**options)).recipe


def test_scaling_to_half_the_epochs():
    recipe = recipe_of(Table.load("mpa-table4"), epochs=30)
    assert recipe.training.epochs == 30
    assert recipe.schedule.every == 10
    assert recipe.evaluation.every == 2
    assert recipe.schedule.freeze_backbone_epochs == 1
    steps = Table.load("proxynca-pp-cub")
    assert recipe_of(steps).schedule.freeze_backbone_epochs == 5
    half = recipe_of(steps, epochs=20).schedule
    assert (half.at, half.freeze_backbone_epochs) == ((10, 15), 2)
    assert recipe_of(steps, epochs=80).schedule.freeze_backbone_epochs == 10
    assert recipe_of(steps, epochs=2).schedule.freeze_backbone_epochs == 1
    with pytest.raises(ReproduceError, match="the backbone is frozen"):
        recipe_of(steps, epochs=1)


@given(published=st.integers(1, 80), epochs=st.integers(1, 160), every=st.integers(1, 40))
def test_scaled_steps_drop_at_scaled_epochs(published, epochs, every):
    """Compare the rates of every epoch with the table's at the same fraction of training."""
    recipe = Recipe.load(
        {"training": {"epochs": published}, "schedule": {"name": "step", "every": every}}
    )
    scaled = scale(recipe, epochs)
    places = [k * every * epochs / published for k in range(1, published) if k * every < published]
    actual = drops(scaled)
    for drop in actual:
        assert min(abs(drop - w) for w in places) <= (1 if drop == 1 else 0.5)
    for w in places:  # every drop remains, unless rounded to the end
        assert min(abs(drop - w) for drop in (*actual, epochs)) <= 1
    rates = LearningRates(scaled.schedule, epochs, [1.0])
    for epoch in range(epochs):
        expected = scaled.schedule.factor ** sum(epoch >= drop for drop in actual)
        assert rates.factor(epoch) == pytest.approx(expected)


@given(
    published=st.integers(1, 200),
    epochs=st.integers(1, 400),
    every=st.integers(1, 60),
    at=st.sets(st.integers(1, 200)),
    warm=st.integers(0, 20),
)
def test_scaling_keeps_the_shape(published, epochs, every, at, warm):
    schedule = {"name": "milestones", "every": every, "at": sorted(at)}
    recipe = Recipe.load(
        {"schedule": {**schedule, "freeze_backbone_epochs": warm}},
        {"training.epochs": published, "evaluation.every": every},
    )
    expected = warm * epochs / published
    try:
        scaled = scale(recipe, epochs)
    except ReproduceError:
        assert max(expected, 1) >= epochs - 0.5
        return
    assert scaled.training.epochs == epochs
    assert scaled.schedule.every >= 1
    frozen = scaled.schedule.freeze_backbone_epochs
    assert frozen == 0 if warm == 0 else 1 <= frozen < epochs and abs(frozen - expected) <= 1
    assert list(scaled.schedule.at) == sorted(set(scaled.schedule.at))
    for old in at:
        if old >= published:  # never reached in either
            continue
        nearest = min(abs(new - old * epochs / published) for new in scaled.schedule.at)
        assert nearest <= 1
    if warm < published:
        same = scale(recipe, published)
        assert drops(same) == drops(recipe)
        assert same.schedule.freeze_backbone_epochs == warm
        assert same.evaluation == recipe.evaluation


@pytest.mark.parametrize("row", ["birds: default", "birds: default-cpu"])
def test_automatic_drops_stay_automatic(row):
    table = Table.load("default-recipes")
    recipe = recipe_of(table, table.rows.index(table.row(row)), epochs=6)
    assert (recipe.training.epochs, recipe.schedule.every) == (6, "auto")
    with pytest.raises(ReproduceError, match="the backbone is frozen"):
        recipe_of(table, table.rows.index(table.row(row)), epochs=1)


def test_table_overrides_gpu_defaults(tmp_path):
    table = Table.load(with_base(table_values(tmp_path), "training", precision="float32"))
    recipe = make_run(table, table.rows[0], 0, "full", on_gpu=True).recipe
    assert recipe.training.precision == "float32"
    assert recipe.training.cuda_graph


def test_search_holds_out_classes_and_skips_the_test_set(tmp_path):
    values = table_values(tmp_path, protocol="held_out", selection=False, claims=[], figure=None)
    table = Table.load({**values, "dims": [4, 2]})
    runs = plan(table, ReproduceOptions(epochs=6))
    assert [run.id for run in runs] == ["proxy-anchor-seed0", "mpa-k-2-seed0"]
    for run in runs:
        evaluation = run.recipe.evaluation
        assert (evaluation.protocol, evaluation.watch_test) == ("held_out", False)
        assert evaluation.every == run.recipe.training.epochs == 6  # no epoch can be selected
        assert evaluation.eval_dims == (4, 2)
    with pytest.raises(ReproduceError, match="evaluated on held-out classes already"):
        plan(table, ReproduceOptions(selection=True))


def test_command_has_the_options_that_differ_from_the_table():
    table = Table.load("mpa-table5")
    plain = recipe_of(table).to_dict()
    assert command_for(table, "MPA", [0, 1], plain, table.rows, False) == (
        "proximetry reproduce mpa-table5 --data CARS --seeds 0 1"
    )
    other = recipe_of(table, backbone="bn_inception", weights="/home/me/bn.pth", epochs=30)
    words = "--backbone bn_inception --weights bn.pth --epochs 30 --no-selection"
    command = command_for(table, "MPA", [0], other.to_dict(), (), True)
    assert command.endswith(f"--seeds 0 {words}")
    sweep = Table.load("mpa-table7")
    command = command_for(sweep, "K = 1", [0], recipe_of(sweep).to_dict(), sweep.rows, False)
    assert command.endswith("--seeds 0 --selection")
