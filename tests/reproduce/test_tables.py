"""The shipped tables, and errors of invalid tables."""

import itertools

import pytest

from proximetry.losses import LOSSES, PAIR_LOSSES, check_settings
from proximetry.metrics.scores import SEPARABILITY
from proximetry.reproduce import (
    ReproduceError,
    ReproduceOptions,
    Table,
    list_tables,
    shipped_tables,
)
from proximetry.reproduce.plan import make_run, plan
from proximetry.reproduce.table import Row
from proximetry.training import Recipe
from tests.reproduce.small import make_table, table_values, write_table

NAMES = list(shipped_tables())


def test_all_tables_are_listed():
    lines = list_tables().splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert "5 runs per seed + 5 for selection" in lines[NAMES.index("mpa-table4")]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "default-recipes"])
def test_shipped_table_is_complete(name):
    table = Table.load(name)
    assert table.name == name
    assert table.title
    assert table.source
    if any(row.published for row in table.rows):
        assert table.published.backbone
        assert table.published.protocol
    for on_gpu in (False, True):
        for run in plan(table, ReproduceOptions(selection=True), on_gpu):
            recipe = run.recipe
            assert recipe.model.backbone.startswith("tf_efficientnet_lite")
            assert recipe.evaluation.protocol == ("last" if run.kind == "full" else "held_out")
            assert recipe.evaluation.watch_test == (run.kind == "full")
            assert recipe.training.epochs % recipe.evaluation.every == 0
            assert recipe.training.precision == ("bfloat16" if on_gpu else "float32")
            assert recipe.training.cuda_graph == on_gpu
            assert recipe.data.cache == "auto"
            check_settings(recipe.loss.name, recipe.loss.settings)
            assert set(table.metrics) <= {*recipe.evaluation.metrics.names(), *SEPARABILITY}
            assert recipe.evaluation.eval_dims == table.dims
    for row in table.rows:
        assert set(row.published) <= set(table.metrics)
        assert all(0 < value < 100 for value in row.published.values())


@pytest.mark.parametrize("prefix", ["birds", "birds, noise", "cars", "cars, noise"])
def test_losses_2026_has_every_loss(prefix):
    table = Table.load("losses-2026")
    rows = [row for row in table.rows if row.name.startswith(f"{prefix}: ")]
    recipes = [make_run(table, row, 0, "full").recipe for row in rows]
    names = {*LOSSES, *(f"pairs/{name}" for name in PAIR_LOSSES)}
    assert {recipe.loss.name for recipe in recipes} == names
    assert {recipe.data.label_noise for recipe in recipes} == {0.2 * prefix.endswith("noise")}
    assert {recipe.data.dataset for recipe in recipes} == {"cub" if "birds" in prefix else "cars"}


@pytest.mark.parametrize("name", ["proxynca-pp-cub", "proxynca-pp-cars"])
def test_steps_of_proxynca_pp_each_change_one_key(name):
    table = Table.load(name)
    recipes = [make_run(table, row, 0, "full").recipe for row in table.rows]

    def parts(recipe):
        return {
            "loss": recipe.loss.name,
            "temperature": recipe.loss.settings["temperature"],
            "layer_norm": recipe.model.layer_norm,
            "sampler": recipe.data.sampler,
            "pooling": recipe.model.pooling,
            "proxies": recipe.optimizer.proxy_multiplier,
        }

    steps = [parts(recipe) for recipe in recipes]
    for before, after in itertools.pairwise(steps):
        assert sum(before[key] != after[key] for key in before) == 1
    dataset = name.removeprefix("proxynca-pp-")
    assert steps[-1] == parts(Recipe.load(f"{dataset}-proxy-nca-plus-plus"))
    assert recipes[0].schedule.at == (20, 30)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("K = 16", "k-16"),
        ("δ = 0.1", "delta-0.1"),
        ("+ fast proxies (ProxyNCA++)", "plus-fast-proxies-proxynca-plus-plus"),
        ("../../etc", "..-..-etc"),
    ],
)
def test_slugs_are_file_names(name, slug):
    assert Row(name=name).slug == slug
    assert "/" not in slug


HELD_OUT = {"protocol": "held_out", "selection": False, "claims": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rowz": []}, "unknown key 'rowz', did you mean 'rows'"),
        ({"rows": []}, "rows"),
        ({"rows": [{"name": "a", "x": 1}, {"name": "A", "x": 2}]}, "must differ in letters"),
        ({"rows": [{"name": "a", "publishd": {}}]}, "'rows.0.publishd', did you mean 'published'"),
        (
            {"rows": [{"name": "a", "x": 1, "published": {"recal@1": 69.2}}], "claims": []},
            "row 'a': 'recal@1' is not in metrics, did you mean 'recall@1'",
        ),
        ({"rows": [{"name": "a"}], "claims": []}, "a sweep needs x"),
        ({"claims": [{"better": "MPA", "worse": "Proxy-Anchor"}]}, "unknown row 'MPA'"),
        (
            {"claims": [{"better": "MPA, K = 2", "worse": "Proxy-Anchor", "metric": "nmi"}]},
            "not in metrics",
        ),
        ({"metrics": []}, "metrics"),
        ({"metrics": ["map@r"], "claims": []}, "'recall@1' is not in metrics"),
        ({"figure": {"kind": "swep", "label": "K"}}, "did you mean 'sweep'"),
        ({"name": "../up"}, "name"),
        ({"selection": "perhaps"}, "selection must be a valid boolean"),
        ({"recipe": "cub-proxy-anker"}, "no recipe 'cub-proxy-anker', did you mean"),
        ({"views": [[24, 24]]}, "views are for tables with protocol held_out"),
        (HELD_OUT, "no selection, claims or figure"),
    ],
)
def test_invalid_table_is_rejected(tmp_path, changes, message):
    path = write_table(tmp_path / "wrong.yaml", table_values(tmp_path, **changes))
    with pytest.raises(ReproduceError) as error:
        Table.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.nme": "mpa"}, "unknown key 'loss.nme', did you mean 'name'"),
        ({"data.batch_size.x": 1}, "data.batch_size must be a valid integer"),
        ({"evaluation.protocol": "paper"}, "protocol last"),
        ({"evaluation.metrics.recall_at": [1, 2]}, "has no recall@4"),
    ],
)
def test_invalid_recipe_of_a_row_is_reported(tmp_path, changes, message):
    table = make_table(tmp_path, rows=[{"name": "odd", "changes": changes, "x": 1}], claims=[])
    with pytest.raises(ReproduceError, match="'odd'") as error:
        plan(table, ReproduceOptions())
    assert message in str(error.value)


def test_table_overrides_a_shipped_recipe():
    rows = [{"name": "plain"}, {"name": "narrow", "changes": {"model.dim": 64}}]
    base = {"training.epochs": 7}
    table = Table.load({"name": "t", "recipe": "cub-proxy-anchor", "base": base, "rows": rows})
    shipped = Recipe.load("cub-proxy-anchor")
    plain, narrow = (make_run(table, row, 0, "full").recipe for row in table.rows)
    assert (plain.training.epochs, plain.evaluation.protocol) == (7, "last")
    assert (plain.loss, plain.optimizer) == (shipped.loss, shipped.optimizer)
    assert (plain.model.dim, narrow.model.dim) == (shipped.model.dim, 64)


def test_table_is_named_after_its_file(tmp_path):
    values = table_values(tmp_path)
    del values["name"]
    assert Table.load(write_table(tmp_path / "mine.yaml", values)).name == "mine"
