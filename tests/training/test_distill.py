"""Distill a run into another network: the crops of the teacher, the recipe, resuming, errors."""

import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import proximetry as px
from proximetry._util.errors import UsageError
from proximetry.data import VectorCatalog
from proximetry.losses import RelationalLoss
from proximetry.models import Embedder, Preprocessing
from proximetry.recipe.loading import RecipeError
from proximetry.training import Recipe, RunError, RunFolder, distill, train, updater
from proximetry.training.distillation import plan_distillation
from tests.training.runs import assert_same_run, killed_at
from tests.training.tiny import make_recipe

STUDENT = {"model.dim": 5, "model.image_size": 16, "training.epochs": 2}


@pytest.fixture(scope="module")
def teacher(images, cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("distill") / "teacher"
    train(make_recipe(images, cache, training={"epochs": 8}), out, device="cpu")
    return out


def vectors(folder, images):
    return Embedder.load(folder, "cpu").encode(sorted(images.glob("*/*.png")))


def test_student_follows_the_teacher_more_closely_than_one_trained_alone(teacher, images, tmp_path):
    expected, before = vectors(teacher, images), Embedder.load(teacher, "cpu").fingerprint()
    divergence = {}
    for weight in (0.0, 30.0):
        settings = {**STUDENT, "loss.relational": weight, "training.epochs": 6}
        settings["evaluation.protocol"] = "last"
        distill(teacher, tmp_path / str(weight), settings, device="cpu")
        student = vectors(tmp_path / str(weight), images)
        divergence[weight] = RelationalLoss()(student, expected).item()
    assert divergence[30.0] < 0.6 * divergence[0.0]
    losses = [line["loss"] for line in RunFolder(tmp_path / "30.0").history()[1:]]
    assert losses[-1] < losses[0]
    assert Embedder.load(teacher, "cpu").fingerprint() == before


def test_distillation_resumes_bit_exactly(teacher, tmp_path, monkeypatch):
    settings = {**STUDENT, "training.checkpoint_steps": 1}
    distill(teacher, tmp_path / "whole", settings, device="cpu")
    recipe = plan_distillation(teacher, tmp_path / "killed", settings).recipe
    killed_at(3, recipe, tmp_path / "killed", device="cpu")
    distill(teacher, tmp_path / "killed", settings, device="cpu")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    other = tmp_path / "other" / teacher.name
    train(
        Recipe.load(teacher / "recipe.yaml").override({"training.epochs": 1}), other, device="cpu"
    )
    with pytest.raises(RunError, match=r"different recipe: loss\.teacher"):
        distill(other, tmp_path / "killed", settings, device="cpu")


def test_teacher_gets_the_crops_in_its_own_size_and_normalization(teacher, tmp_path, monkeypatch):
    seen, taught = [], []
    features, normalize = Embedder.features, Preprocessing.normalize
    own = Embedder.load(teacher, "cpu").preprocessing

    def watch_features(self, batch, stage="normalized"):
        if batch.dtype == torch.uint8 and self.training:
            seen.append(batch)
        elif batch.dtype == torch.uint8 and self.dim == 8:
            taught.append((batch, normalize(self.preprocessing, batch)))
        return features(self, batch, stage)

    monkeypatch.setattr(Embedder, "features", watch_features)
    distill(teacher, tmp_path / "out", {**STUDENT, "training.max_steps": 1}, device="cpu")
    (pixels,), (resized, normalized) = seen, taught[0]
    assert pixels.shape[2:] == (16, 16)
    assert resized.shape[2:] == own.crop == (24, 24)
    smooth = F.interpolate(pixels.float(), (24, 24), mode=own.interpolation, antialias=True)
    assert (resized.float() - smooth.clamp(0, 255)).abs().max() <= 0.5
    torch.testing.assert_close(normalized, own.normalize(resized))


def test_crops_of_the_right_size_are_unchanged():
    sizes = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}
    pixels = torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8)
    same = Preprocessing(resize=20, crop=(20, 20), **sizes)
    assert updater.resize_crops(pixels, same) is pixels
    small = updater.resize_crops(pixels, Preprocessing(resize=10, crop=(10, 8), **sizes))
    assert (small.shape, small.dtype) == ((2, 3, 10, 8), torch.uint8)
    gray = torch.full((1, 3, 20, 20), 77, dtype=torch.uint8)
    assert (updater.resize_crops(gray, replace_crop(same, 31)) == 77).all()


def replace_crop(preprocessing, side):
    values = {key: getattr(preprocessing, key) for key in ("mean", "std", "interpolation")}
    return Preprocessing(resize=side, crop=(side, side), **values)


def test_recipe_is_that_of_the_teacher_or_a_named_one(teacher, images, tmp_path):
    trained = Recipe.load(teacher / "recipe.yaml")
    plan = plan_distillation(teacher, tmp_path, {"model.backbone": "resnet18"})
    changed = {"model.backbone", "loss.teacher", "loss.relational", "data.cache"}
    changed |= {"training.precision", "training.cuda_graph"}
    before, after = (r.keys_without_roles(without=()) for r in (trained, plan.recipe))
    assert {k for k in before if before[k] != after[k]} - {"name"} <= changed
    assert plan.recipe.loss.teacher == str(teacher)
    assert plan.recipe.name == "tiny, distilled"
    named = plan_distillation(teacher, tmp_path, {"training.epochs": 1}, "default-cpu").recipe
    assert named.model == Recipe.load("default-cpu").model
    assert (named.data.root, named.data.batch_size) == (str(images), 64)


def test_named_recipe_has_the_images_and_held_out_classes_of_the_teacher(teacher, tmp_path):
    folder = shutil.copytree(teacher, tmp_path / "noisy")
    changes = {"data.max_images_per_class": 3, "data.label_noise": 0.1, "evaluation.held_out": 0.3}
    Recipe.load(teacher / "recipe.yaml").override(changes).save(folder / "recipe.yaml")
    recipe = plan_distillation(folder, tmp_path / "out", {}, "default-cpu").recipe
    assert (recipe.data.max_images_per_class, recipe.data.label_noise) == (3, 0.1)
    assert recipe.evaluation.held_out == 0.3


def test_transformer_keys_of_the_teacher_are_reset(teacher, tmp_path):
    folder = shutil.copytree(teacher, tmp_path / "vit")
    changes = {"model": {"weights": str(folder), "lora_rank": 8, "pooling": "cls-avg"}}
    changes["optimizer.layer_decay"] = 0.7
    Recipe.load(teacher / "recipe.yaml").override(changes).save(folder / "recipe.yaml")
    recipe = plan_distillation(folder, tmp_path / "out", {"model.backbone": "resnet18"}).recipe
    assert (recipe.model.weights, recipe.model.pooling) == ("auto", "auto")
    assert (recipe.model.lora_rank, recipe.optimizer.layer_decay) == (None, 1.0)


def test_run_distills_from_python(teacher, tmp_path):
    small = {"model.weights": "none", "training.max_steps": 1}
    run = px.Run(teacher, "cpu").distill(tmp_path / "out", "small_convnet", settings=small)
    assert run.path == tmp_path / "out"
    assert run.recipe.loss.relational > 0


def test_any_embedder_is_a_teacher_with_a_recipe(teacher, images, cache, tmp_path):
    make_recipe(images, cache, training={"epochs": 1}).save(tmp_path / "recipe.yaml")
    recipe = str(tmp_path / "recipe.yaml")
    distill(teacher / "embedder", tmp_path / "out", {}, recipe=recipe, device="cpu")
    assert Recipe.load(tmp_path / "out" / "recipe.yaml").loss.teacher == str(teacher / "embedder")


def test_folder_that_contains_the_teacher_is_rejected(teacher, tmp_path):
    (tmp_path / "link").symlink_to(teacher)
    for source, out in (
        (teacher, tmp_path / "missing" / ".." / "link"),
        (tmp_path / "link", teacher),
        (teacher / "embedder", teacher),
    ):
        with pytest.raises(UsageError, match="is the folder of the teacher"):
            plan_distillation(source, out, STUDENT, "default-cpu")
    plan_distillation(teacher, teacher.with_name("teacher-2"), STUDENT)


@pytest.mark.parametrize(
    ("path", "name"), [("run", "tiny, extended"), ("run/second-stage", "tiny, second stage")]
)
def test_runs_with_the_schedule_of_an_extension_or_a_second_stage_need_a_recipe(
    teacher, tmp_path, path, name
):
    folder = shutil.copytree(teacher, tmp_path / path)
    Recipe.load(teacher / "recipe.yaml").override({"name": name}).save(folder / "recipe.yaml")
    with pytest.raises(UsageError, match=r"does not suit a new network.*--recipe"):
        plan_distillation(tmp_path / "run", tmp_path / "out", STUDENT)
    plan = plan_distillation(tmp_path / "run", tmp_path / "out", {}, "default-cpu")
    assert plan.recipe.schedule == Recipe.load("default-cpu").schedule


@pytest.mark.parametrize("key", ["data.dataset", "model.backbone", "loss.name"])
def test_custom_components_of_the_teacher_are_rejected(teacher, tmp_path, key):
    folder, changes = shutil.copytree(teacher, tmp_path / "custom"), {key: "custom:Mine"}
    Recipe.load(teacher / "recipe.yaml").override(changes).save(folder / "recipe.yaml")
    with pytest.raises(UsageError, match=f"custom component, {key} 'custom:Mine'"):
        plan_distillation(folder, tmp_path / "out", {"model.dim": 5})


def test_unsuitable_teachers_raise(teacher, images, cache, tmp_path):
    for source, out, settings, message in (
        (teacher, teacher, STUDENT, "folder of the teacher"),
        (teacher, tmp_path, {"training.epochs": 1}, "--backbone"),
        (teacher / "embedder", tmp_path, STUDENT, "no run in .*--recipe"),
        (tmp_path / "nowhere", tmp_path, STUDENT, "no run in .*nowhere"),
    ):
        with pytest.raises(UsageError, match=message):
            distill(source, out, settings, device="cpu")
    with pytest.raises(RecipeError, match="relational and sharded"):
        distill(teacher, tmp_path / "out", {**STUDENT, "loss.sharded": True}, device="cpu")
    vectors = VectorCatalog.from_arrays(
        np.random.default_rng(0).normal(size=(40, 6)), np.arange(40) % 4
    )
    recipe = Recipe.load("vectors", {"loss.relational": 1.0, "loss.teacher": str(teacher)})
    with pytest.raises(RecipeError, match=r"loss\.teacher .* vectors of 6 dimensions"):
        train(recipe, tmp_path / "vectors", data=vectors, device="cpu")
    assert not (tmp_path / "vectors").exists()


def test_command_distills_a_run_and_lists_the_teacher(teacher, tmp_path, call):
    words = (
        "distill",
        teacher,
        tmp_path / "small",
        "--backbone",
        "small_convnet",
        "--device",
        "cpu",
    )
    words += ("--model.image-size", "16", "--training.epochs", "1")
    assert "teacher" in call(*words, "--dry-run")
    assert not (tmp_path / "small").exists()
    out = call(*words)
    assert "teacher, held-out" in out
    assert "model.image_size 16 also resets" in out
    assert "already complete" in call(*words)
    assert "relational: 100.0" in call(*words, "--print-config")
