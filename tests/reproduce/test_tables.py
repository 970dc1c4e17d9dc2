"""The shipped tables, and what is said about a table that cannot be used."""

import itertools

import pytest
import yaml
from proximetry.losses.pairs import PAIR_LOSSES

from proximetry.losses import create
from proximetry.reproduce import ReproduceError, Row, Table, list_tables, shipped_tables
from proximetry.reproduce.plan import Options, make_run, plan
from proximetry.training import Recipe, RecipeError
from tests.reproduce.small import make_table, table_values, write_table

NAMES = [
    "mpa-table4",
    "mpa-table5",
    "mpa-table7",
    "mpa-table8",
    "proxy-anchor-alpha",
    "proxy-anchor-batch",
    "proxy-anchor-convergence",
    "proxy-anchor-delta",
    "proxy-anchor-width",
    "proxynca-pp-cars",
    "proxynca-pp-cub",
    "record-cars",
    "record-cub",
]


def test_all_tables_are_shipped_and_listed():
    assert list(shipped_tables()) == NAMES
    lines = list_tables().splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert "5 runs per seed + 5 for selection" in lines[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_table_is_whole(name):
    table = Table.load(name)
    assert table.name == name
    assert table.title
    assert table.source
    assert table.published.backbone
    assert table.published.protocol
    assert table.dataset in ("cub", "cars")
    assert len({row.slug for row in table.rows}) == len(table.rows)
    for cuda in (False, True):
        for run in plan(table, (0, 1), Options(cuda=cuda), selection=True):
            recipe = run.recipe
            assert recipe.model.backbone == "tf_efficientnet_lite2"
            assert recipe.evaluation.protocol == ("last" if run.kind == "full" else "held_out")
            assert recipe.evaluation.watch_test == (run.kind == "full")
            assert recipe.training.epochs % recipe.evaluation.every == 0
            assert recipe.training.precision == ("bfloat16" if cuda else "float32")
            assert recipe.training.capture == cuda
            assert recipe.data.cache == ("gpu" if cuda else "disk")
            if not recipe.loss.name.startswith("pairs/"):
                create(recipe.loss.name, 4, 8, **recipe.loss.settings)
            else:
                assert recipe.loss.name.removeprefix("pairs/") in PAIR_LOSSES
            computed = [f"recall@{k}" for k in recipe.evaluation.recall_at]
            computed += [f"ndcg@{k}" for k in recipe.evaluation.ndcg_at]
            computed += ["map@r", "r_precision", "mrr"]
            cuts = [f"{m}[:{cut}]" for m in computed for cut in recipe.evaluation.cuts]
            assert set(table.metrics) <= {*computed, *cuts}
    for row in table.rows:
        assert set(row.published) <= set(table.metrics)
        assert all(0 < value < 100 for value in row.published.values())


def test_the_published_figures_of_the_mpa_paper():
    """Spot checks against the tables of the paper, and orders that it states in words."""
    four, five = Table.load("mpa-table4"), Table.load("mpa-table5")
    assert four.row("MPA").published["recall@1"] == 69.2
    assert four.row("Proxy-Anchor").published["map@r"] == 26.7
    assert five.row("MPA-AP").published["ndcg@8"] == 78.8
    for table in (four, five):  # "ProxyAnchor loss was the highest MAP@R"
        best = max(table.rows, key=lambda row: row.published["map@r"])
        assert best.name == "Proxy-Anchor"
    for name, best in (("mpa-table7", "K = 12"), ("mpa-table8", "K = 8")):
        rows = Table.load(name).rows
        assert max(rows, key=lambda row: row.published["recall@1"]).name == best
        assert [row.x for row in rows] == [1, 4, 8, 12, 16]
    for table in (four, five):  # what is claimed is what was published
        for claim in table.claims:
            better, worse = table.row(claim.better), table.row(claim.worse)
            assert better.published[claim.metric] > worse.published[claim.metric]


def test_the_published_settings():
    four, five = Table.load("mpa-table4"), Table.load("mpa-table5")
    for table, batch in ((four, 180), (five, 64)):
        for row in table.rows:
            recipe = make_run(table, row, 0, "full", Options()).recipe
            assert (recipe.data.batch_size, recipe.model.pooling) == (batch, "gem")
            assert (recipe.schedule.every, recipe.schedule.factor) == (20, 0.5)
            assert recipe.optimizer.lr * recipe.optimizer.proxy_multiplier == pytest.approx(1e-2)
            assert recipe.loss.settings.get("proxies_per_class", 1) == (
                1 if row.name == "Proxy-Anchor" else 10
            )


@pytest.mark.parametrize("name", ["proxynca-pp-cub", "proxynca-pp-cars"])
def test_the_six_steps_each_change_one_thing_and_end_at_the_recipe(name):
    table = Table.load(name)
    recipes = [make_run(table, row, 0, "full", Options()).recipe for row in table.rows]

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
    assert steps[-1] == {
        "loss": "proxy_nca_plus_plus",
        "temperature": 0.1111111111,
        "layer_norm": True,
        "sampler": "balanced",
        "pooling": "max",
        "proxies": 100000.0,
    }
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
    assert Row(name).slug == slug
    assert "/" not in slug


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rowz": []}, "unknown key 'rowz', did you mean 'rows'"),
        ({"rows": []}, "at least one"),
        ({"rows": "many"}, "rows must be a list"),
        ({"rows": [{"name": "a", "x": 1}, {"name": "A", "x": 2}]}, "names of their own"),
        ({"rows": [{"name": "a", "publishd": {}}]}, "unknown key 'rows[0].publishd'"),
        ({"rows": [{"name": "a", "published": {"recall@1": 101}}]}, "must be a percentage"),
        ({"rows": [{"name": "!"}]}, "at least one letter"),
        ({"rows": [{"name": "a"}], "claims": []}, "a sweep needs x"),
        ({"claims": [{"better": "MPA", "worse": "Proxy-Anchor"}]}, "no row 'MPA'"),
        (
            {"claims": [{"better": "MPA, K = 2", "worse": "Proxy-Anchor", "metric": "nmi"}]},
            "not in metrics",
        ),
        ({"figure": {"kind": "swep", "label": "K"}}, "did you mean 'sweep'"),
        ({"name": "../up"}, "small letters"),
        ({"selection": "perhaps"}, "selection must be bool"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, changes, message):
    path = write_table(tmp_path / "wrong.yaml", table_values(tmp_path, **changes))
    with pytest.raises(ReproduceError) as error:
        Table.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_table_that_is_no_table(tmp_path):
    for text in ("[1, 2]", "{{{", "title: only"):
        (tmp_path / "t.yaml").write_text(text)
        with pytest.raises(ReproduceError, match="holds no table"):
            Table.load(tmp_path / "t.yaml")
    with pytest.raises(ReproduceError, match="did you mean 'mpa-table4'"):
        Table.load("mpa-tabel4")
    assert yaml.safe_load("a: 1") == {"a": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.nme": "mpa"}, "unknown key 'loss.nme', did you mean 'name'"),
        ({"data.batch_size.x": 1}, "leads into a value"),
        ({"evaluation.protocol": "paper"}, "protocol last"),
    ],
)
def test_a_row_that_makes_no_recipe_is_named(tmp_path, changes, message):
    table = make_table(tmp_path, rows=[{"name": "odd", "changes": changes, "x": 1}], claims=[])
    with pytest.raises((ReproduceError, RecipeError), match="'odd'") as error:
        plan(table, (0,), Options(), selection=False)
    assert message in str(error.value)


def test_changes_do_not_leak_between_rows(tmp_path):
    table = make_table(tmp_path)
    before = yaml.safe_dump(table.base)
    values = table.recipe_values(table.rows[1])
    values["loss"]["settings"]["proxies_per_class"] = 99
    assert table.recipe_values(table.rows[1])["loss"]["settings"] == {"proxies_per_class": 2}
    assert yaml.safe_dump(table.base) == before


def test_a_table_over_a_shipped_recipe():
    values = {
        "name": "over",
        "recipe": "cub-proxy-anchor",
        "base": {"training": {"epochs": 7}, "evaluation": {"protocol": "last"}},
        "rows": [{"name": "plain"}, {"name": "narrow", "changes": {"model.dim": 64}}],
    }
    table = Table.from_dict(values)
    shipped = Recipe.load("cub-proxy-anchor")
    plain, narrow = (Recipe.from_dict(table.recipe_values(row)) for row in table.rows)
    assert plain.training.epochs == 7
    assert plain.evaluation.protocol == "last"
    assert (plain.loss, plain.optimizer, plain.model) == (
        shipped.loss,
        shipped.optimizer,
        shipped.model,
    )
    assert narrow.model.dim == 64
    assert table.dataset == "cub"
    assert Table("over", recipe="cub-proxy-anchor", rows=(Row("plain"),)).dataset == "cub"
    with pytest.raises(RecipeError, match="no recipe 'cub-proxy-anker', did you mean"):
        Table.from_dict({**values, "recipe": "cub-proxy-anker"})
