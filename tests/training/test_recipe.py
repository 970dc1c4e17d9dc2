"""Recipes: round trip through YAML, inheritance, overrides, errors with suggestions."""

import inspect
import math
import os
import re
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

from proximetry.models import Embedder, weights
from proximetry.models.backbones import load_timm
from proximetry.recipe.loading import (
    describe_resets,
    merge,
    parse_yaml,
    plain_values,
    read_yaml,
)
from proximetry.recipe.schema import recipe_keys
from proximetry.reproduce import ReproduceError, Table
from proximetry.training import Recipe, RecipeError, RunError, RunFolder, shipped_recipes
from proximetry.training.build import make_embedder


def test_shipped_recipes_round_trip(tmp_path):
    assert Recipe.load(yaml.safe_load(Recipe().to_yaml())) == Recipe()
    for name in shipped_recipes():
        recipe = Recipe.load(name)
        assert recipe.name == name
        assert recipe.about.endswith(".")
        recipe.save(tmp_path / "r.yaml")
        assert Recipe.load(tmp_path / "r.yaml") == recipe
        own = ("default", "default-cpu", "dinov2", "dinov3", "glyphs", "siglip", "vectors")
        expected = "map@r" if name in own else "recall@1"
        evaluation = recipe.evaluation
        assert evaluation.protocol == "last" or evaluation.select_by == expected, name


def test_every_dataset_has_recipes_of_the_papers():
    names = set(shipped_recipes())
    for data in ("cub", "cars", "sop", "inshop"):
        for loss in ("proxy-anchor", "proxy-nca-plus-plus", "soft-triple", "mpa", "mpa-ap"):
            assert f"{data}-{loss}" in names
            assert Recipe.load(f"{data}-{loss}").data.dataset == data


def test_published_settings_of_proxy_anchor():
    """Kim et al. 2020, section 4.2 and the authors' commands."""
    cub, sop = Recipe.load("cub-proxy-anchor"), Recipe.load("sop-proxy-anchor")
    for recipe in (cub, sop):
        assert recipe.data.batch_size == 180
        assert recipe.model.pooling == "avg+max"
        assert recipe.optimizer.proxy_multiplier == 100
        assert recipe.loss.settings == {"alpha": 32.0, "margin": 0.1}
    assert (cub.optimizer.lr, cub.schedule.every, cub.schedule.factor) == (1e-4, 10, 0.5)
    assert (sop.optimizer.lr, sop.schedule.every, sop.schedule.factor) == (6e-4, 20, 0.25)
    assert (cub.model.freeze_batchnorm, sop.model.freeze_batchnorm) == (True, False)


def test_yaml_numbers_in_any_form(tmp_path):
    text = "optimizer: {lr: 1e-4, clip_norm: 3}\nloss: {settings: {margin: 1e-2}}\n"
    (tmp_path / "r.yaml").write_text(text)
    recipe = Recipe.load(tmp_path / "r.yaml")
    assert recipe.optimizer.lr == 1e-4
    assert recipe.optimizer.clip_norm == 3.0
    assert isinstance(recipe.optimizer.clip_norm, float)
    assert recipe.loss.settings == {"margin": 0.01}


def test_base_is_inherited(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "base: cub-mpa\nmodel.dim: 64\nloss: {settings: {tau: 0.0}}\nabout: Mine.\n"
    )
    (tmp_path / "other.yaml").write_text("base: mine.yaml\nloss: {name: arcface}\n")
    published, mine = Recipe.load("cub-mpa"), Recipe.load(tmp_path / "mine.yaml")
    assert (mine.name, mine.about, mine.model.dim) == ("mine", "Mine.", 64)
    assert mine.loss.settings == {**published.loss.settings, "tau": 0.0}
    assert mine.optimizer == published.optimizer
    other = Recipe.load(tmp_path / "other.yaml")
    assert other.model == mine.model
    assert other.loss.settings == {}, "another loss leaves the settings of the old one behind"


def test_circular_base_is_rejected(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(RecipeError, match=r"circular `base` recipes: a.yaml → b.yaml → a.yaml"):
        Recipe.load(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("base: cub-mpaa")
    with pytest.raises(RecipeError, match="did you mean 'cub-mpa'"):
        Recipe.load(tmp_path / "a.yaml")


def test_overrides_by_dotted_and_nested_keys():
    recipe = Recipe.load("glyphs", {"optimizer.lr": 0.5, "data": {"flip": True}})
    assert (recipe.optimizer.lr, recipe.data.flip) == (0.5, True)
    assert recipe.optimizer.proxy_multiplier == 10.0
    again = recipe.override({"loss.settings.alpha": 16.0, "evaluation.metrics.map_at": [5]})
    assert again.loss.settings == {"alpha": 16.0, "margin": 0.1}
    assert again.evaluation.metrics.map_at == (5,)
    assert again.optimizer == recipe.optimizer
    assert recipe.loss.settings["alpha"] == 32.0, "a recipe does not change"
    assert again.override({"loss.name": "mpa"}).loss.settings == {}
    assert again.override({"loss.name": "proxy_anchor"}).loss == again.loss


def test_override_keeps_unset_keys_unset():
    recipe = Recipe.load("glyphs").override({"training.epochs": 2})
    assert "epochs" in recipe.training.model_fields_set
    assert "precision" not in recipe.training.model_fields_set


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimzer": {}}, "'optimizer'"),
        ({"optimizer": {"lrr": 1}}, "'optimizer.lrr', did you mean 'lr'"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr .* 'fast'"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr .* greater than 0"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr .* finite"),
        ({"optimizer": {"lr": True}}, "optimizer.lr .* True"),
        ({"optimizer": {"name": "adamW"}}, "'adamw'"),
        ({"optimizer": 3}, "optimizer .* dictionary"),
        ({"training": {"epochs": 2.5}}, "training.epochs .* 2.5"),
        ({"training": {"epochs": "many"}}, "training.epochs .* 'many'"),
        ({"training": {"precision": "bf16"}}, "'bfloat16'"),
        ({"training": {"cuda_graph": 1}}, "training.cuda_graph .* boolean"),
        ({"data": {"dataset": "cubs"}}, "data.dataset .* 'cub'"),
        ({"data": {"root": 3}}, "data.root .* string"),
        ({"data": {"cache": "encoded"}}, "data.cache .* 'encoded'"),
        ({"data": {"columns": {"lable": "x"}}}, "data.columns .* 'label'"),
        ({"data": {"crop_ratio": [1.5, 0.5]}}, r"data.crop_ratio .* \[1.5, 0.5\]"),
        ({"data": {"crop_scale": [0.9, 0.1]}}, r"data.crop_scale .* \[0.9, 0.1\]"),
        ({"data": {"sampler": "balanced", "batch_size": 10}}, "data.batch_size 10"),
        ({"loss": {"name": "proxy_ancor"}}, "loss.name: .* 'proxy_anchor'"),
        ({"loss": {"center": 1.0}}, "unknown key 'loss.center'"),
        ({"loss": {"name": "pairs/nonsense"}}, "nonsense"),
        ({"loss": {"settings": {"alhpa": 3}}}, "alhpa.*did you mean 'alpha'"),
        ({"loss": {"settings": {"alpha": -1}}}, "alpha must be positive"),
        ({"evaluation": {"protocol": "papers"}}, "did you mean 'paper'"),
        ({"evaluation": {"select_by": "recall@3"}}, "'recall@3' is not computed"),
        ({"evaluation": {"metrics": {"recall_att": [1]}}}, "did you mean 'recall_at'"),
        ({"evaluation": {"metrics": {"recall_at": [0]}}}, "recall_at"),
        ({"evaluation": {"protocol": "last"}, "schedule": {"name": "plateau"}}, "schedule.name"),
        ({"schedule": {"name": "milestones", "at": [3, 2]}}, r"schedule.at .* \[3, 2\]"),
        ({"model": {"pca_dim": 13, "dim": 12}}, "model.pca_dim 13 is more than dim 12"),
        ({"model": {"pca_dim": 0}}, "model.pca_dim must be greater than or equal to 1, got 0"),
        ({"model": {"whitening": 0.25}}, "model.whitening 0.25 needs pca_dim"),
        ({"model": {"whitening": 1.5}}, r"model\.whitening must be less .* got 1\.5"),
        ({"model": {"tta_crops": [0.5, 1]}}, r"model\.tta_crops\.1 must be less than 1, got 1"),
        ({"model": {"tta_crops": 17 * [0.5]}}, "tta_crops.* 16"),
        ({"model": {"bits": 63}}, "multiple of 8"),
        ({"model": {"bits": 8000}}, "4096"),
        ({"model": {"bits": True}}, "integer"),
        ({"model": {"bits": 64, "dim": 32}}, "differ"),
        ({"model": {"bits": 64, "dim": 64, "pca_dim": 8}}, "pca_dim 8"),
        ({"model": {"bits": 64, "dim": 64}, "evaluation": {"eval_dims": [8]}}, "eval_dims"),
        ({"model": {"bits": 64, "dim": 64}, "evaluation.similarity": "euclidean"}, "cosine"),
        ({"model": {"freeze_backbone": True, "pooling": "gem-learned"}}, "needs pooling gem"),
        ({"model": {"backbone": "vectors", "freeze_backbone": True}}, "freeze_backbone is for"),
        ({"model": {"backbone": "vectors", "flip_tta": True}}, "flip_tta is for images"),
        ({"model": {"backbone": "vectors", "tta_crops": [0.9]}}, "tta_crops is for images"),
        ({"model": {"backbone": "vectors", "drop_path": 0.2}}, "drop_path is for images"),
        ({"model": {"lora_alpha": 4}}, "lora_alpha needs lora_rank"),
        ({"loss": {"optimization": "projection"}}, "loss.optimization is 'projection'"),
        ({"optimizer": {"layer_decay": 1.5}}, "optimizer.layer_decay must be less than or equal"),
        ({"evaluation": {"eval_dims": [512]}}, "evaluation.eval_dims must be distinct"),
        ({"evaluation": {"eval_dims": [0]}}, "eval_dims.0 must be greater than or equal to 1"),
        ({"evaluation": {"eval_dims": [2, 2]}}, "evaluation.eval_dims must be distinct"),
        ({"model.dim.x": 3}, "model.dim must be a valid integer"),
        ({3: 4}, "keys must be text"),
    ],
)
def test_invalid_values_name_their_key(values, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.load(values)


def test_image_size_resets_the_sizes_that_belong_to_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: default\nmodel: {image_size: 112}\n")
    for recipe in (
        Recipe.load("default", {"model.image_size": 112}),
        Recipe.load(tmp_path / "mine.yaml"),
    ):
        sizes = recipe.model.resize, recipe.data.crop_size, recipe.data.short_side
        assert sizes == (None, None, None)
    same = Recipe.load("default", {"model.image_size": 288})
    assert (same.model.resize, same.data.crop_size) == (320, 256)
    both = Recipe.load("default", {"model": {"image_size": 112, "resize": 128}})
    assert (both.model.resize, both.data.crop_size) == (128, None)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"dim": 512}, (512, None, 0.0, 0.2, (128, 64))),
        ({"dim": 128}, (128, None, 0.0, 0.2, (64,))),
        ({"dim": 1024}, (1024, 512, 0.25, 0.2, (128, 64))),
        ({"dim": 512, "pca_dim": 512}, (512, 512, 0.25, 0.2, (128, 64))),
        ({"dim": 2048}, (2048, 512, 0.25, 0.2, (128, 64))),
        ({"pca_dim": None}, (2048, None, 0.0, 0.2, (128, 64))),
        ({"pca_dim": 64}, (2048, 64, 0.25, 0.2, ())),
        ({"backbone": "vgg16"}, (2048, 512, 0.25, 0.2, (128, 64))),
        ({"freeze_backbone": True}, (2048, 512, 0.25, 0.0, (128, 64))),
        ({"freeze_backbone": False}, (2048, 512, 0.25, 0.2, (128, 64))),
    ],
)
def test_change_resets_keys_it_invalidates(changes, left, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"base": "best-cub", "model": changes}))
    for recipe in (
        Recipe.load("best-cub", {"model": changes}),
        Recipe.load("best-cub").override({f"model.{key}": changes[key] for key in changes}),
        Recipe.load(tmp_path / "mine.yaml"),
    ):
        m = recipe.model
        result = m.dim, m.pca_dim, m.whitening, m.drop_path, recipe.evaluation.eval_dims
        assert result == left


def test_resets_lists_keys_that_no_change_names():
    values = plain_values("default")
    assert describe_resets(values, {"optimizer.lr": 1, "model": {"image_size": 288}}) == []
    sizes = {"model.image_size": 320, "model.resize": 340, "data": {"crop_size": 256}}
    assert describe_resets(values, sizes) == []
    result = describe_resets(
        values, {"model": {"pca_dim": None, "image_size": 320}, "model.resize": 320}
    )
    assert result == [
        "model.pca_dim None also resets model.whitening (0.25)",
        "model.image_size 320 also resets data.crop_size (256)",
    ]


@pytest.mark.parametrize("key", ["data.columns", "loss.settings", "evaluation.metrics"])
def test_empty_dictionary_replaces_the_old_one(key, tmp_path):
    section, name = key.split(".")
    values = {
        "data": {"columns": {"path": "file"}},
        "loss": {"settings": {"alpha": 16}},
        "evaluation": {"metrics": {"recall_at": [1, 3]}},
    }
    old, default = Recipe.load(values), Recipe()
    for changes in ({key: {}}, {section: {name: {}}}):
        recipe = old.override(changes)
        assert getattr(getattr(recipe, section), name) == getattr(getattr(default, section), name)
        assert old.override({section: {}}) == old, "which is a section"
    more = old.override({"loss.settings": {"margin": 0.2}})
    assert more.loss.settings == {"alpha": 16, "margin": 0.2}


def test_merging_partial_overrides_resets_only_known_keys():
    for more, then in (
        ({"model.whitening": 0.25}, {"model.dim": 1024}),
        ({"model.drop_path": 0.1}, {"model.backbone": "tf_efficientnet_lite2"}),
        ({"loss.settings": {"tau": 0.05}}, {"loss.name": "mpa"}),
        ({"model.pca_dim": 64}, {"model.dim": 64}),
        ({"model.resize": 256}, {"model.image_size": 112}),
    ):
        assert merge(more, then, is_complete=False) == merge({}, {**more, **then})
    other = {"loss": {"name": "arcface", "settings": {"margin": 0.3}}}
    assert merge(other, {"loss.name": "mpa"}, is_complete=False) == {"loss": {"name": "mpa"}}


def test_empty_section_is_rejected():
    assert Recipe.load({"model": None}, {"model.image_size": 32}).model.image_size == 32
    with pytest.raises(RecipeError, match="data"):
        Recipe.load({"data": None}, {"model.image_size": 32})


def test_path_of_weights_is_not_a_computation_key(tmp_path):
    paths = [tmp_path / "a/w", tmp_path / "b/w", tmp_path / "c"]
    first, moved, other = (Recipe.load("glyphs", {"model.weights": str(p)}) for p in paths)
    assert (
        first.computation_keys()
        == moved.computation_keys()
        == first.without_paths().computation_keys()
    )
    folder = RunFolder(tmp_path / "run")
    folder.begin(first, torch.device("cpu"))
    folder.write_results({})
    assert folder.inspect().recipe == first
    folder.resolve(moved)
    with pytest.raises(RunError, match="weights"):
        folder.resolve(other)
    for path in paths[:2]:
        path.parent.mkdir()
        path.write_text("")
    with pytest.raises(RunError, match=r"a different recipe: model\.weights .*a/w → .*b/w"):
        folder.resolve(moved)


def test_exclusive_keys_in_the_same_change_are_rejected():
    for changes, message in (
        ({"dim": 64, "pca_dim": 128}, "pca_dim 128 .* dim 64"),
        ({"dim": 64, "whitening": 0.5}, r"whitening 0\.5 needs pca_dim"),
        ({"freeze_backbone": True, "drop_path": 0.1}, "drop_path"),
    ):
        with pytest.raises(RecipeError, match=message):
            Recipe.load("best-cub", {"model": changes, "evaluation.eval_dims": []})


def test_unknown_key_of_a_file_suggests_a_name(tmp_path):
    (tmp_path / "key.yaml").write_text("modle: {}")
    with pytest.raises(RecipeError, match=r"key.yaml: unknown key 'modle', did you mean 'model'"):
        Recipe.load(tmp_path / "key.yaml")


def test_removed_keys_with_their_old_default_are_ignored():
    older = {"loss": {"center": 0.0, "quantization": 0.0, "exclusive": 2.0}}
    assert Recipe.load(older) == Recipe.load({"loss.exclusive": 2.0})


def test_keys_without_roles_exclude_these():
    one = Recipe.load("glyphs", {"data.root": "/a", "training.checkpoint_steps": 3})
    two = Recipe.load("glyphs", {"data.root": "/b", "name": "other"})
    assert one.keys_without_roles() != two.keys_without_roles()
    without = ("metadata", "path", "runtime")
    assert one.keys_without_roles(without=without) == two.keys_without_roles(without=without)
    assert one.keys_without_roles(without=without) != two.override(
        {"optimizer.lr": 1.0}
    ).keys_without_roles(without=without)


def test_recipe_package_imports_neither_torch_nor_numpy():
    code = """
import sys, proximetry.recipe.auto
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pooling_defaults_to_token_for_transformers():
    recipe = Recipe.load({"model": {"backbone": "vit_tiny_patch16_224", "weights": "none"}})
    assert make_embedder(recipe.model).architecture.pooling == "token"
    default = inspect.signature(Embedder.create).parameters["pooling"].default
    assert Recipe().model.pooling == default == "auto"


def test_source_of_weights_and_dropped_layers_are_reported(tmp_path, monkeypatch):
    state = load_timm().create_model("test_convnext").state_dict()
    save_file(state, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "hf_hub_download", lambda repo, name, **_: str(tmp_path / name))
    model = {"backbone": "test_convnext", "dim": 8, "pooling": "gem", "weights": "auto"}
    lines = []
    make_embedder(Recipe.load({"model": model}).model, report=lines.append)
    dropped, source = lines
    assert "head.norm" in dropped
    assert source == "weights: hub, timm/test_convnext.r160_in1k: model.safetensors"


EXTREMES = [
    *(0, -1, 10**12, 16**5000, 1e300, -1e300, math.nan, math.inf, -math.inf),
    *("", " ", "x" * 100_000, "\0", "\ud800", "1e999", "2001-99-99", "auto"),
    *(None, True, [], [-1], [10**12], {}, {"x": 1}, [[["x"] * 1000] * 1000]),
]


@pytest.mark.parametrize(
    "key", [*dict(recipe_keys()), "loss.settings.alpha", "evaluation.metrics.recall_at"]
)
def test_extreme_values_are_rejected_by_key_or_round_trip(key):
    for value in EXTREMES:
        try:
            recipe, message = Recipe.load({}, {key: value}), ""
        except RecipeError as error:
            recipe, message = None, str(error)
        if recipe is None:
            assert key.rpartition(".")[2] in message, value
            assert len(message) < 1000
        else:
            assert Recipe.load(yaml.safe_load(recipe.to_yaml())) == recipe


BAD_FILES = {
    "latin-1": ("name: Bär\n".encode("latin-1"), "UTF-8"),
    "NUL": (b"name: \0", "not valid YAML"),
    "deep": (b"name: " + 90_000 * b"[", "recursion"),
    "circle": (b"name: &n [*n]", "file.yaml"),
    "duplicate": (b"name: a\n\nabout: b\nname: c", "line 4: duplicate key 'name'"),
    "large": (b"# " + 200_000 * b"x", "100 kB"),
    "date": (b"name: 2001-99-99", "not valid YAML"),
    "code": (b"name: !!python/object/apply:os.system [x]", "not valid YAML"),
    "two": (b"name: a\n---\nname: b", "line 2"),
    "broken": (b"name: [a", "line 1"),
    "list": (b"- 1", "expected keys and values"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("load", [Recipe.load, Table.load], ids=["recipe", "table"])
def test_invalid_files_are_rejected_by_path(tmp_path, kind, load):
    content, message = BAD_FILES[kind]
    file = tmp_path / "file.yaml"
    file.write_bytes(content)
    with pytest.raises((RecipeError, ReproduceError)) as caught:
        load(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(file))


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "missing", 300 * "x"):
        with pytest.raises(RecipeError, match=re.escape(str(tmp_path / name)[:100])):
            read_yaml(tmp_path / name, "recipe")


def test_yaml_aliases_and_merge_keys():
    assert parse_yaml("a: &s {b: 1}\nc: {<<: *s, d: 2}") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}
    assert parse_yaml("a: &s {b: 1}\nc: {<<: *s, b: 2}")["c"] == {"b": 2}


def test_without_paths_removes_paths():
    changes = {"data": {"root": "/home/me/images", "cache_dir": "/scratch/me"}}
    changes["model"] = {"weights": "/home/me/weights.pth"}
    recipe = Recipe.load("glyphs", changes).without_paths()
    assert "/" not in str(recipe.to_dict()).replace(recipe.about, "")
    assert recipe.model.weights == "weights.pth"
    assert Recipe.load("glyphs").without_paths() == Recipe.load("glyphs")
