"""Custom losses as ``module:Class``, in recipes and on the command line."""

import sys

import pytest

from proximetry.training import RecipeError, RunFolder, train
from proximetry.training.checkpoint import read_part
from tests.training.tiny import make_recipe, with_

MODULE = """
import torch
from proximetry.losses import ArcFace

class Centers(torch.nn.Module):
    def __init__(self, num_classes, dim, scale=1.0):
        super().__init__()
        self.centers = torch.nn.Parameter(torch.randn(num_classes, dim))
        self.scale = scale

    def forward(self, embeddings, labels):
        return self.scale * (embeddings - self.centers[labels]).square().sum(1).mean()

class MyArcFace(ArcFace):
    pass

def spread(embeddings, labels):
    return embeddings.square().sum(1).mean()

class Fails(torch.nn.Module):
    def __init__(self, num_classes, margin):
        super().__init__()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working folder."""
    name = f"losses_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    return name


def test_loss_of_a_class_is_trained_with_its_settings(recipe, module, tmp_path):
    loss = {"name": f"{module}:Centers", "settings": {"scale": 0.5}}
    short = with_(recipe.override({"loss": loss}), "training", epochs=1)
    train(short, tmp_path / "run")
    _, tensors = read_part(RunFolder(tmp_path / "run").last, "loss")
    (centers,) = (tensor for name, tensor in tensors.items() if name.endswith("centers"))
    assert centers.shape == (9, 8)  # without the three held-out classes
    assert train(short, tmp_path / "run")["epochs"] == 1
    with pytest.raises(ValueError, match=r"loss.settings.*0.5.*2.0"):
        train(short.override({"loss.settings": {"scale": 2.0}}), tmp_path / "run")


@pytest.mark.parametrize("name", ["MyArcFace", "spread"])
def test_loss_may_be_a_proxy_loss_or_a_function(recipe, module, tmp_path, name):
    changes = {"loss.name": f"{module}:{name}", "training.epochs": 1}
    train(recipe.override(changes), tmp_path / "run")


def test_invalid_loss_classes_are_errors(recipe, module, tmp_path):
    for name, reason in (
        ("nowhere:Loss", "No module named 'nowhere'"),
        (f"{module}:Nothing", "no attribute 'Nothing'"),
        (f"{module}:Fails", "margin"),
        ("subprocess:Popen", "not a torch.nn.Module"),
    ):
        with pytest.raises(RecipeError, match=f"loss.name {name}: .*{reason}"):
            train(recipe.override({"loss.name": name}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match="unknown loss 'my:'"):
        recipe.override({"loss.name": "my:"})


def test_command_line_takes_a_loss_class(images, module, tmp_path, call):
    small = ("--model", "small_convnet", "--model.weights", "none", "--model.image-size", "16")
    words = ("--loss", f"{module}:Centers", "--loss.settings.scale", "0.1", "--dry-run")
    assert f"{module}:Centers" in call("train", images, tmp_path / "run", *words, *small)


def test_recipe_with_a_loss_class_loads_without_the_module(images, cache):
    recipe = make_recipe(images, cache, loss={"name": "nowhere.losses:Loss"})
    assert recipe.loss.name == "nowhere.losses:Loss"
