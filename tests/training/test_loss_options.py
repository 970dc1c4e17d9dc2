"""Training with proxies by running mean, synthetic classes, random and nested dimensions."""

import pytest
import torch

from proximetry.recipe.loading import RecipeError
from proximetry.training import RunFolder, train
from tests.training.ranks import RUN, Ranks
from tests.training.runs import assert_same_run, killed_at, tensors
from tests.training.tiny import make_recipe

OPTIONS = {
    "mean": {"proxy_momentum": 0.5},
    "nested": {"nested_dims": [2, 4]},
    "random": {"settings": {"sampled_dims": 0.5}},
    "synthesis": {"settings": {"synthesis": 1.0}},
    "all": {
        "proxy_momentum": 0.5,
        "nested_dims": [2, 4],
        "settings": {"sampled_dims": 0.5, "synthesis": 1.0},
    },
}

DEFAULTS = {"proxy_momentum": None, "nested_dims": [], "settings": {}}


def recipe_with(images, cache, option, **training):
    """Without batch statistics, which differ by rank."""
    return make_recipe(
        images,
        cache,
        data={"cache": "none"},
        model={"freeze_batchnorm": True},
        optimizer={"name": "sgd", "lr": 1e-3},
        loss={"name": "norm_softmax", **OPTIONS[option]},
        training={"epochs": 2, "checkpoint_steps": 2, **training},
    )


def assert_close(folder, other):
    found, expected = tensors(folder), tensors(other)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if value.is_floating_point():
            assert (found[key] - value).norm() <= 1e-3 * value.norm(), key


@pytest.mark.parametrize("option", OPTIONS)
def test_resumed_run_is_bit_exact_and_accumulate_changes_nothing(option, images, cache, tmp_path):
    recipe = recipe_with(images, cache, option)
    train(recipe, tmp_path / "whole", device="cpu")
    killed_at(3, recipe, tmp_path / "resumed", device="cpu")
    train(recipe, tmp_path / "resumed", device="cpu")
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    train(recipe.override({"training.accumulate": 3}), tmp_path / "parts", device="cpu")
    assert_close(tmp_path / "parts", tmp_path / "whole")
    train(recipe.override({"loss": DEFAULTS}), tmp_path / "plain")
    histories = [RunFolder(tmp_path / name).history() for name in ("whole", "plain")]
    assert histories[0][-1]["loss"] != histories[1][-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_equal_one(sharded, server, images, cache, tmp_path):
    recipe = recipe_with(images, cache, "nested" if sharded else "all")
    recipe = recipe.override({"loss.sharded": sharded})
    recipe.save(tmp_path / "recipe.yaml")
    train(recipe, tmp_path / "one", device="cpu")
    ranks = Ranks(server, tmp_path, RUN, tmp_path / "recipe.yaml", tmp_path / "two")
    assert ranks.ended() == [0, 0], ranks.output(0)
    one, two = (RunFolder(tmp_path / name).history() for name in ("one", "two"))
    losses = [[line["loss"] for line in lines[1:]] for lines in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    if not sharded:
        assert_close(tmp_path / "two", tmp_path / "one")


def test_proxies_by_running_mean_are_not_in_the_optimizer(images, cache, tmp_path):
    train(recipe_with(images, cache, "mean"), tmp_path, device="cpu")
    weight = tensors(tmp_path)["loss.proxies.weight"]
    torch.testing.assert_close(weight.norm(dim=2), torch.ones(weight.shape[:2]))
    state = [v.shape for key, v in tensors(tmp_path).items() if key.startswith("optimizer.")]
    assert weight.shape not in state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.proxy_momentum": 1.0}, "proxy_momentum"),
        ({"loss": {"proxy_momentum": 0.9, "sharded": True}}, "proxy_momentum and sharded"),
        ({"loss": {"proxy_momentum": 0.9, "exclusive": 0.1}}, "exclusive .* proxy_momentum"),
        ({"loss.nested_dims": [4, 8]}, r"nested_dims .* below 8, got \[4, 8\]"),
        ({"loss.nested_dims": [4, 4]}, "nested_dims must be distinct"),
        ({"loss.nested_dims": [4], "model.pca_dim": 6}, "nested_dims and model.pca_dim"),
        ({"loss": {"name": "mpa", "settings": {"synthesis": 1.0}}}, "several proxies"),
        ({"loss": {"sharded": True, "settings": {"synthesis": 1.0}}}, "synthesis and sharded"),
        ({"loss.settings.synthesis": 2.0}, "synthesis must be between 0 and 1"),
    ],
)
def test_invalid_options_raise(recipe, changes, message):
    with pytest.raises(RecipeError, match=message):
        recipe.override(changes)


@pytest.mark.parametrize("option", [{"nested_dims": [4]}, {"proxy_momentum": 0.9}])
def test_options_need_proxies(recipe, tmp_path, option):
    pairs = recipe.override({"loss": {"name": "pairs/contrastive", **option}})
    with pytest.raises(RecipeError, match=f"{next(iter(option))} needs proxies"):
        train(pairs, tmp_path, device="cpu")


def test_running_mean_needs_one_proxy_per_class(recipe, tmp_path):
    several = recipe.override({"loss": {"name": "mpa", "proxy_momentum": 0.9}})
    with pytest.raises(RecipeError, match="proxy_momentum needs one proxy per class"):
        train(several, tmp_path, device="cpu")
