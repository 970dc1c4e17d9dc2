"""Recipes: YAML and back, and mistakes answered with a suggestion."""

import pytest

from proximetry.losses import LOSSES
from proximetry.training import Recipe, RecipeError, shipped_recipes


def test_defaults_survive_a_round_trip(tmp_path):
    recipe = Recipe()
    recipe.save(tmp_path / "r.yaml")
    assert Recipe.load(tmp_path / "r.yaml") == recipe


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_describe_themselves_and_round_trip(name, tmp_path):
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert recipe.about.endswith(".")
    recipe.save(tmp_path / "r.yaml")
    assert Recipe.load(tmp_path / "r.yaml") == recipe


def test_every_loss_of_the_seeds_has_a_recipe_for_every_dataset():
    kinds = ("proxy-anchor", "proxy-nca", "proxy-nca-plus-plus", "soft-triple")
    kinds += ("mpa", "mpa-dw", "mpa-ap")
    expected = {f"{data}-{kind}" for data in ("cub", "cars", "sop", "inshop") for kind in kinds}
    assert set(shipped_recipes()) == expected | {"glyphs", "folder", "best-cub", "best-cars"}


def test_published_numbers_of_proxy_anchor_on_cub():
    recipe = Recipe.load("cub-proxy-anchor")
    assert recipe.data.batch_size == 180
    assert recipe.model.pooling == "avg+max"
    assert recipe.model.freeze_batchnorm
    assert recipe.optimizer.lr == 1e-4
    assert recipe.optimizer.proxy_multiplier == 100
    assert (recipe.schedule.every, recipe.schedule.factor) == (10, 0.5)
    assert recipe.loss.settings == {"alpha": 32.0, "margin": 0.1}


def test_yaml_numbers_in_any_form(tmp_path):
    (tmp_path / "r.yaml").write_text("optimizer: {lr: 1e-4, clip_norm: 3}\ntraining: {epochs: 7}\n")
    recipe = Recipe.load(tmp_path / "r.yaml")
    assert recipe.optimizer.lr == 1e-4
    assert recipe.optimizer.clip_norm == 3.0
    assert isinstance(recipe.optimizer.clip_norm, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimzer": {}}, "unknown key 'optimzer', did you mean 'optimizer'"),
        ({"optimizer": {"lrr": 1}}, "unknown key 'optimizer.lrr', did you mean 'lr'"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr must be float, got 'fast'"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr must be positive, got 0"),
        ({"optimizer": {"name": "adamW"}}, "did you mean 'adamw'"),
        ({"optimizer": 3}, "optimizer must hold keys and values, got 3"),
        ({"training": {"compile": True, "capture": True}}, "choose one"),
        ({"training": {"checkpoint_epochs": 0}}, "checkpoint_epochs must be positive"),
        ({"training": {"epochs": 2.5}}, "training.epochs must be int, got 2.5"),
        ({"training": {"epochs": True}}, "training.epochs must be int, got True"),
        ({"training": {"ema": 1.0}}, "training.ema .* got 1.0"),
        ({"training": {"precision": "bf16"}}, "precision is 'bf16'"),
        ({"data": {"crop_scale": [0.5]}}, "crop_scale must be a list"),
        ({"data": {"crop_scale": [0.9, 0.1]}}, r"crop_scale .* got \[0.9, 0.1\]"),
        ({"data": {"sampler": "balanced", "batch_size": 10}}, "not a multiple"),
        ({"loss": {"name": "proxy_ancor"}}, "did you mean 'proxy_anchor'"),
        ({"evaluation": {"protocol": "papers"}}, "did you mean 'paper'"),
        ({"evaluation": {"metric": "recall@3"}}, "'recall@3' is not computed"),
        ({"evaluation": {"protocol": "last"}, "training": {"stop_after": 3}}, "use held_out"),
        ({"schedule": {"name": "milestones", "at": [3, 2]}}, r"must rise, got \[3, 2\]"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(values)


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'glyphs'"):
        Recipe.load("glyph")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(RecipeError, match="no valid YAML"):
        Recipe.load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(RecipeError, match="holds no recipe"):
        Recipe.load(tmp_path / "list.yaml")
    (tmp_path / "key.yaml").write_text("modle: {}")
    with pytest.raises(RecipeError, match=r"key.yaml: unknown key 'modle', did you mean 'model'"):
        Recipe.load(tmp_path / "key.yaml")


def test_recipes_name_known_losses_and_their_settings():
    from proximetry import losses

    for name in shipped_recipes():
        loss = Recipe.load(name).loss
        assert loss.name in LOSSES
        losses.create(loss.name, 3, 4, **loss.settings)
