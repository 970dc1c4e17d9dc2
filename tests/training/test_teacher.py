"""Relational distillation in training: moving averages and saved embedders as teachers."""

import pytest
import torch

from proximetry.models import Embedder
from proximetry.recipe.loading import RecipeError
from proximetry.training import RunFolder, train
from proximetry.training.updater import as_teacher
from tests.training.runs import OnStep, assert_same_run, fail
from tests.training.tiny import make_recipe


def losses(folder):
    return [line["loss"] for line in RunFolder(folder).history()[1:]]


@pytest.fixture
def recipe(images, cache):
    return make_recipe(images, cache, training={"epochs": 2, "ema": 0.9}, loss={"relational": 5.0})


def test_moving_average_teacher_changes_training_and_resumes(recipe, tmp_path):
    train(recipe.override({"loss.relational": 0.0}), tmp_path / "without", device="cpu")
    train(recipe, tmp_path / "with", device="cpu")
    assert losses(tmp_path / "without") != losses(tmp_path / "with")
    killed = recipe.override({"training.checkpoint_steps": 1})
    with pytest.raises(SystemError):
        train(
            killed,
            tmp_path / "killed",
            device="cpu",
            callbacks=[OnStep(3, lambda: fail(SystemError("killed")))],
        )
    train(killed, tmp_path / "killed", device="cpu")
    assert_same_run(tmp_path / "with", tmp_path / "killed")


@pytest.mark.parametrize("teacher", ["ema", "saved"])
def test_accumulate_with_a_teacher_equals_the_whole_batch(recipe, tmp_path, teacher):
    model = {"freeze_batchnorm": True}
    if teacher == "saved":
        train(recipe, tmp_path / "teacher", device="cpu")
        recipe = recipe.override({"loss.teacher": str(tmp_path / "teacher")})
    for name, count in (("whole", 1), ("parts", 3)):
        changes = {"training.accumulate": count, "training.epochs": 1, "model": model}
        train(recipe.override(changes), tmp_path / name, device="cpu")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_embedder_distills_into_another_network(recipe, tmp_path):
    """A student of another dimension follows the teacher's similarities."""
    train(recipe, tmp_path / "teacher", device="cpu")
    student = recipe.override(
        {"loss.teacher": str(tmp_path / "teacher"), "loss.relational": 50.0, "model.dim": 5}
    )
    student = student.override({"training.ema": 0.0, "training.epochs": 4})
    train(student, tmp_path / "student", device="cpu")
    assert losses(tmp_path / "student")[-1] < losses(tmp_path / "student")[0]
    assert Embedder.load(tmp_path / "student", "cpu").recipe["loss"]["teacher"] == "teacher"


def test_invalid_teachers_raise(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"training\.ema.*loss\.teacher"):
        recipe.override({"training.ema": 0.0})
    with pytest.raises(RecipeError, match="relational and sharded"):
        recipe.override({"loss.sharded": True})
    train(recipe, tmp_path / "teacher", device="cpu")
    frozen = recipe.override(
        {"loss.teacher": str(tmp_path / "teacher"), "model.freeze_backbone": True}
    )
    with pytest.raises(RecipeError, match="another backbone"):
        train(frozen, tmp_path / "frozen", device="cpu")
    with pytest.raises(ValueError, match="nowhere"):
        train(recipe.override({"loss.teacher": "nowhere"}), tmp_path / "missing", device="cpu")


def test_teacher_uses_the_batch_statistics_of_the_student():
    embedder = Embedder.create("small_convnet", dim=4, weights="none", image_size=16)
    teacher = as_teacher(embedder)
    modes = {
        type(layer).__name__: layer.training for layer in teacher.modules() if layer is not teacher
    }
    assert modes["BatchNorm2d"]
    assert not any(mode for name, mode in modes.items() if name != "BatchNorm2d")
    with torch.no_grad():
        assert teacher(torch.rand(3, 3, 16, 16)).shape == (3, 4)
