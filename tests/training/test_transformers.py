"""Runs with transformers: layer-wise learning rates, LoRA, crop sizes, the shipped recipes."""

import pytest
import timm
import torch

from proximetry.models import Embedder
from proximetry.models.constants import POOLINGS
from proximetry.training import Recipe, RunError, RunFolder, train
from proximetry.training.checkpoint import read_part
from proximetry.training.dry_run import dry_run
from proximetry.training.evaluator import evaluate_embedder
from proximetry.training.sources.training_data import open_catalog
from tests.models import transformers  # noqa: F401 (importing registers tiny_dinov3)
from tests.training.ranks import RUN, Ranks
from tests.training.runs import assert_same_run, killed_at, tensors
from tests.training.tiny import make_recipe

RECIPES = ("dinov2", "dinov3", "siglip")


def recipe_for(images, cache, backbone="test_vit", **changes):
    """A transformer with two by two patches."""
    changes["data"] = {"short_side": 32, **changes.get("data", {})}
    model = {"backbone": backbone, "image_size": 32, "resize": 32, "pooling": "auto"}
    changes["model"] = model | changes.get("model", {})
    changes["training"] = {"epochs": 2, **changes.get("training", {})}
    return make_recipe(images, cache, **changes)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_match_timm_networks(name):
    model = Recipe.load(name).model
    config = timm.get_pretrained_cfg(model.backbone)
    assert config.hf_hub_id == f"timm/{model.backbone}"
    assert timm.is_model_pretrained(model.backbone)
    with torch.device("meta"):
        network = timm.create_model(model.backbone, num_classes=0)
    assert model.image_size % network.patch_embed.patch_size[0] == 0
    assert (model.pooling == "cls-avg") == (network.cls_token is not None)
    assert network.global_pool == {"siglip": "map", "dinov2": "token", "dinov3": "avg"}[name]
    assert model.pooling in POOLINGS
    recipe = Recipe.load(name)
    assert "not measured" in recipe.about
    assert recipe.optimizer.lr * recipe.optimizer.proxy_multiplier == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("dinov2", "test_vit"), ("dinov3", "tiny_dinov3"), ("siglip", "test_vit3")],
)
def test_transformer_recipes_train(name, backbone, images, cache, tmp_path):
    """With a smaller network of the same kind and random weights."""
    changes = {
        "model": {"backbone": backbone, "weights": "none", "image_size": 32, "dim": 8},
        "data": {"root": str(images), "cache_dir": str(cache), "batch_size": 8},
        "training": {"epochs": 1},
        "evaluation": {"untrained": False},
    }
    recipe = Recipe.load(name, changes)
    results = train(recipe, tmp_path / "run", device="cpu")
    embedder = Embedder.load(tmp_path / "run")
    assert embedder.architecture.pooling == recipe.model.pooling
    assert torch.isfinite(embedder.encode(sorted(images.rglob("*.png"))[:2])).all()
    assert results["selected"]["held_out"]["recall@1"] > 0


def rates(folder):
    return [line["lr"] for line in RunFolder(folder).history() if line["epoch"]]


def test_layer_decay_resumes_bit_exact(images, cache, tmp_path):
    """With initially frozen layers, drops and clipping; the reported rate is the last layer's."""
    recipe = recipe_for(
        images,
        cache,
        optimizer={"layer_decay": 0.5, "clip_norm": 1.0},
        schedule={"every": 1, "freeze_backbone_epochs": 1},
        training={"epochs": 3, "checkpoint_steps": 1},
    )
    train(recipe, tmp_path / "whole", device="cpu")
    killed_at(6, recipe, tmp_path / "parts")
    train(recipe, tmp_path / "parts", device="cpu")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert rates(tmp_path / "whole") == [1e-3, 0.5e-3, 0.25e-3]
    plain = recipe.override({"optimizer.layer_decay": 1.0})
    with pytest.raises(RunError, match=r"layer_decay 0\.5 → 1\.0"):
        train(plain, tmp_path / "parts", device="cpu")


def test_layer_decay_slows_early_layers(images, cache, tmp_path):
    moved = []
    for decay in (1.0, 0.1):
        recipe = recipe_for(
            images,
            cache,
            optimizer={"layer_decay": decay, "weight_decay": 0.0},
            training={"epochs": 1},
            evaluation={"untrained": False},
        )
        torch.manual_seed(recipe.training.seed)
        before = Embedder.create("test_vit", 8, weights="none", image_size=32).state_dict()
        train(recipe, tmp_path / str(decay), device="cpu")
        after = read_part(tmp_path / str(decay) / "checkpoints" / "last.safetensors", "embedder")[1]
        keys = ("backbone.patch_embed.proj.weight", "backbone.blocks.5.mlp.fc2.weight")
        moved.append([float((after[key] - before[key]).abs().mean()) for key in keys])
    (first, last), (slow, same) = moved
    assert same == pytest.approx(last, rel=0.5)
    assert slow < 1e-4 * first  # six blocks: a millionth of the rate


@pytest.mark.slow
def test_lora_is_merged_saved_and_resumed(images, cache, tmp_path):
    """The moving average is merged."""
    pytest.importorskip("peft")
    recipe = recipe_for(
        images,
        cache,
        model={"lora_rank": 2, "drop_path": 0.3},
        training={"epochs": 2, "ema": 0.9, "checkpoint_steps": 1},
        optimizer={"layer_decay": 0.9},
    )
    results = train(recipe, tmp_path / "whole", device="cpu")
    killed_at(5, recipe, tmp_path / "parts")
    train(recipe, tmp_path / "parts", device="cpu")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    # `train` and `evaluate` report the same metrics; the saved embedder has no LoRA.
    embedder = Embedder.load(tmp_path / "whole")
    assert not any("lora" in name or "base_layer" in name for name in embedder.state_dict())
    catalog = open_catalog(recipe)
    held_out = {name for name in catalog.class_names if name not in embedder.class_names}
    rows = [row for row, label in enumerate(catalog.labels) if label in held_out]
    found = evaluate_embedder(embedder, catalog.subset(rows))
    expected = dict(results["selected"]["held_out"])
    del expected["with_distractors"]
    assert found == expected
    # The base weights are unchanged.
    torch.manual_seed(recipe.training.seed)
    start = Embedder.create("test_vit", 8, weights="none", image_size=32).backbone.state_dict()
    checkpoint = tensors(tmp_path / "whole")
    frozen = [key for key in checkpoint if key.startswith("embedder.backbone.")]
    for key in frozen:
        name = key.removeprefix("embedder.backbone.").replace(".base_layer.", ".")
        if ".lora_" not in name:
            assert torch.equal(checkpoint[key], start[name]), key
    key = "blocks.0.attn.qkv.weight"
    assert not torch.equal(embedder.backbone.state_dict()[key], start[key])


@pytest.mark.slow
def test_lora_on_two_ranks_equals_one(server, images, cache, tmp_path):
    pytest.importorskip("peft")
    recipe = recipe_for(
        images,
        cache,
        model={"lora_rank": 2},
        optimizer={"name": "sgd", "lr": 1e-2, "layer_decay": 0.9},
        training={"epochs": 1},
    )
    recipe.save(tmp_path / "recipe.yaml")
    train(recipe, tmp_path / "one", device="cpu")
    ranks = Ranks(server, tmp_path, RUN, tmp_path / "recipe.yaml", tmp_path / "two")
    assert ranks.ended() == [0, 0], ranks.output(0)
    one, two = (Embedder.load(tmp_path / name).state_dict() for name in ("one", "two"))
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=1e-5)


def test_unsupported_keys_are_rejected_before_decoding(images, tmp_path):
    cache = tmp_path / "cache"
    wrong = [
        (
            {"model": {"image_size": 40, "resize": 40}},
            "image_size 40 .* Use 32 or 48",
        ),
        (
            {"backbone": "tiny_dinov3", "data": {"crop_size": 24}},
            r"data\.crop_size 24 .* Use 16 or 32",
        ),
        (
            {"backbone": "small_convnet", "optimizer": {"layer_decay": 0.75}},
            "optimizer.layer_decay must be 1: small_convnet",
        ),
        (
            {"backbone": "small_convnet", "model": {"lora_rank": 4}},
            "LoRA .* small_convnet",
        ),
        (
            {"backbone": "small_convnet", "model": {"pooling": "cls-avg"}},
            "'cls-avg' needs a class token",
        ),
    ]
    for changes, message in wrong:
        recipe = recipe_for(images, cache, **changes)
        for attempt in (train, dry_run):
            with pytest.raises(ValueError, match=message):
                attempt(recipe, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    assert not cache.exists()


def test_rotary_positions_train_on_smaller_crops(images, cache, tmp_path):
    recipe = recipe_for(
        images, cache, "tiny_dinov3", data={"crop_size": 16}, training={"epochs": 1}
    )
    train(recipe, tmp_path / "run", device="cpu")
    assert Embedder.load(tmp_path / "run").preprocessing.crop == (32, 32)
