"""RegularFace (Zhao et al. 2019): its optimization, its terms, its recipes."""

import json

import pytest
import torch
from PIL import Image

from proximetry.losses import AngularCenterLoss, ExclusiveRegularizer
from proximetry.recipe.schema import LossConfig
from proximetry.training import Callback, Recipe, RecipeError, shipped_recipes, train
from proximetry.training.updater import Objective

RECIPES = [name for name in shipped_recipes() if name.startswith("regularface/")]


class Lengths(Callback):
    """Records the distance of the proxies from the unit sphere after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, run, loss):
        length = run.updater.objective.proxies.weight.detach().norm(dim=-1)
        self.seen.append((length - 1).abs().max().item())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_projected_proxies_have_unit_length(name, recipe, tmp_path):
    changes = {
        "loss": {"exclusive": 5.0, "optimization": "projected"},
        "optimizer": {"name": name, "lr": 0.01},
    }
    projected, free = Lengths(), Lengths()
    train(recipe.override(changes), tmp_path / "a", device="cpu", callbacks=[projected])
    changes["loss"]["optimization"] = "normalized"
    train(recipe.override(changes), tmp_path / "b", device="cpu", callbacks=[free])
    assert len(projected.seen) > 10
    assert max(projected.seen) < 1e-6
    assert min(free.seen) > 1e-3  # their norm is free


def objective(**config):
    torch.manual_seed(0)
    return Objective(LossConfig(**config), [f"class {c}" for c in range(6)], 4)


def test_exclusive_term_grows_with_annealing():
    settings = {"margin": 4, "lambda_base": 100.0, "lambda_rate": 0.5}
    whole = objective(name="sphereface", settings=settings, exclusive=15.0)
    bare = objective(name="sphereface", settings=settings)
    x, y = torch.randn(8, 4), torch.arange(8) % 6
    term = ExclusiveRegularizer(1.0)(whole.proxies).item()
    for step in range(1, 60):
        annealed = max(5.0, 100.0 / (1 + 0.5 * step))
        added = (whole(x, y) - bare(x, y)).item()
        assert added == pytest.approx(15.0 * 5.0 / annealed * term, rel=1e-4, abs=1e-5)
    assert annealed == 5.0
    plain = objective(name="cosface", exclusive=6.0)
    without = objective(name="cosface")(x, y)
    expected = 6.0 * ExclusiveRegularizer(1.0)(plain.proxies)
    torch.testing.assert_close(plain(x, y) - without, expected, atol=1e-5, rtol=1e-4)


def test_angular_center_loss_uses_the_proxy_of_the_class():
    whole = objective(name="norm_softmax", angular_center=5.0)
    bare = objective(name="norm_softmax")
    x, y = torch.randn(8, 4), torch.arange(8) % 6
    expected = AngularCenterLoss(5.0)(x, y, whole.proxies)
    torch.testing.assert_close(whole(x, y) - bare(x, y), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("exclusive", 1.0), ("angular_center", 1.0), ("optimization", "projected")],
)
def test_keys_that_need_proxies_are_rejected(key, value):
    with pytest.raises(RecipeError, match=rf"loss\.{key} needs proxies; loss pairs/triplet has"):
        objective(name="pairs/triplet", **{key: value})


def test_regularface_recipes():
    losses = ["softmax", "center", "sphereface", "cosface", "arcface"]
    assert sorted(RECIPES) == sorted(
        f"regularface/{name}{more}" for name in losses for more in ("", "-exclusive")
    )
    for name in losses:
        bare, whole = (Recipe.load(f"regularface/{name}{more}") for more in ("", "-exclusive"))
        assert bare.loss.exclusive == 0 < whole.loss.exclusive
        changed = whole.override({"loss.exclusive": 0.0, "name": bare.name, "about": bare.about})
        assert changed == bare
        assert whole.name == f"regularface/{name}-exclusive"
        assert whole.model.backbone == "sphereface20"
        assert whole.loss.optimization == "projected"


def test_regularface_recipe_trains_on_aligned_faces(tmp_path, cache):
    """Center crops of 112 × 96 with flips, SphereFace's network."""
    draw = torch.Generator().manual_seed(0)
    for person in ("Ann", "Bo", "Cy"):
        (tmp_path / "faces" / person).mkdir(parents=True)
        for i in range(2):
            pixels = torch.randint(256, (112, 96, 3), generator=draw, dtype=torch.uint8).numpy()
            file = tmp_path / "faces" / person / f"{person}_{i + 1:04d}.png"
            Image.fromarray(pixels).save(file)
    changes = {
        "data": {"root": str(tmp_path / "faces"), "batch_size": 6, "cache_dir": str(cache)},
        "training": {"epochs": 1},
    }
    lengths = Lengths()
    recipe = Recipe.load("regularface/sphereface-exclusive", changes)
    results = train(recipe, tmp_path / "run", device="cpu", callbacks=[lengths])
    assert max(lengths.seen) < 1e-6
    proxies = json.loads((tmp_path / "run" / "results.json").read_text())["last"]["proxies"]
    assert proxies == results["last"]["proxies"]
    assert 0 < proxies["smallest_angle"] <= proxies["mean_angle"] < 180


def test_square_faces_are_rejected_with_advice(tmp_path, cache):
    for person in ("Ann", "Bo"):
        (tmp_path / "faces" / person).mkdir(parents=True)
        for i in range(2):
            file = tmp_path / "faces" / person / f"{person}_{i + 1:04d}.png"
            Image.new("RGB", (112, 112), (i * 50, 0, len(person))).save(file)
    changes = {
        "data": {"root": str(tmp_path / "faces"), "batch_size": 4, "cache_dir": str(cache)},
        "training": {"epochs": 1},
    }
    recipe = Recipe.load("regularface/softmax", changes)
    message = r"too few for a crop of 112×96. Use a short side of 112 \(model.resize\)"
    with pytest.raises(ValueError, match=message):
        train(recipe, tmp_path / "run", device="cpu")
