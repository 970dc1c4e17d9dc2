"""Add classes to trained runs of images and of vectors."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import proximetry as px
from proximetry._util.errors import UsageError
from proximetry.cli import main
from proximetry.data import VectorCatalog
from proximetry.losses import Proxies
from proximetry.metrics import evaluate
from proximetry.models import Embedder
from proximetry.search import Gallery
from proximetry.training import Recipe, RunError, RunFolder, extend, extension, train
from proximetry.training.checkpoint import read_part
from proximetry.training.evaluator import encode_catalog
from proximetry.training.extension import default_out, describe_extension
from tests.training.runs import Messages, OnStep, assert_same_run, fail, killed_at
from tests.training.test_vectors import make_vectors
from tests.training.tiny import make_images, make_recipe

OLD, NEW = 9, 3


def proxies_of(folder, name="last"):
    part = read_part(folder / "checkpoints" / f"{name}.safetensors", "loss")[1]
    weight = part["proxies.weight"]
    proxies = Proxies(len(weight), weight.shape[2], weight.shape[1])
    proxies.load_state_dict({key: part[f"proxies.{key}"] for key in ("weight", "names_utf8")})
    return dict(zip(proxies.names, proxies.weight.detach(), strict=True))


def write(file, vectors, labels):
    """Write vectors; every third row is in the split test."""
    splits = np.where(np.arange(len(labels)) % 3 == 2, "test", "train")
    np.savez(file, vectors=vectors, labels=labels, splits=splits)
    return file


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Files of old and new vectors, and a run on the old ones."""
    home = tmp_path_factory.mktemp("extend")
    vectors, labels = make_vectors()
    parts = {"old": labels < OLD, "new": labels >= OLD, "ten": labels == OLD}
    parts |= {"eleven": labels > OLD, "few": labels == 0}
    for name, rows in parts.items():
        write(home / f"{name}.npz", vectors[rows], labels[rows])
    train(recipe_of(home), home / "run", device="cpu")
    return home


def recipe_of(home, **changes):
    values = {"data.root": str(home / "old.npz"), "data.batch_size": 18, "model.dim": 8}
    values |= {"training.epochs": 4, "training.checkpoint_steps": 2}
    return Recipe.load("vectors", values | changes)


def start(home, run, new, out, step=None, **options):
    """Extend a run, killed after a step if one is passed."""
    if step is None:
        return extend(run, home / f"{new}.npz", out, device="cpu", **options)
    kill = OnStep(step, lambda: fail(SystemError("killed")))
    with pytest.raises(SystemError):
        extend(run, home / f"{new}.npz", out, device="cpu", callbacks=[kill], **options)


@pytest.fixture(scope="module")
def extended(home):
    start(home, home / "run", "new", home / "extended")
    return home / "extended"


def test_old_proxies_are_kept_and_new_ones_start_at_class_means(home, tmp_path):
    start(home, home / "run", "new", tmp_path / "out", keep_space=True)
    before, after = proxies_of(home / "run"), proxies_of(tmp_path / "out")
    assert [*after] == [str(c) for c in range(OLD + NEW)]
    for name, proxy in before.items():
        assert torch.equal(after[name], proxy)
    length = torch.stack([*before.values()]).norm(dim=-1).mean()
    catalog = VectorCatalog.read(home / "new.npz").filter(split="train")
    vectors = F.normalize(encode_catalog(Embedder.load(home / "run", "cpu"), catalog))
    for name in catalog.class_names:
        rows = torch.from_numpy(np.asarray(catalog.labels) == name)
        mean = F.normalize(vectors[rows].mean(0, keepdim=True)) * length
        torch.testing.assert_close(after[name], mean)


def test_extended_run_knows_all_classes_and_compares_unseen_images(home, extended):
    results = RunFolder(extended).read_results()["extension"]
    assert results["new_classes"] == ["9", "10", "11"]
    embedders = {"before": home / "run", "after": extended}
    catalogs = [VectorCatalog.read(home / f"{n}.npz").filter(split="test") for n in ("old", "new")]
    vectors = np.concatenate([catalog.vectors for catalog in catalogs])
    labels = np.concatenate([catalog.labels for catalog in catalogs])
    for time, folder in embedders.items():
        scored = evaluate(Embedder.load(folder, "cpu").encode(vectors), labels).scores["map@r"]
        for name, rows in (
            ("old", slice(len(catalogs[0]))),
            ("new", slice(len(catalogs[0]), None)),
        ):
            value = results["unseen"][name][time]["map@r"]
            assert value == pytest.approx(scored[rows].mean(), abs=1e-6)
    assert "new classes, after" in describe_extension({"extension": results})
    assert px.Run(extended, "cpu").embedder.class_names == [str(c) for c in range(OLD + NEW)]
    recipe = Recipe.load(extended / "recipe.yaml")
    assert recipe.optimizer.lr < recipe_of(home).optimizer.lr
    again = Messages()
    start(home, home / "run", "new", extended, display=again)
    assert any("already complete" in line for line in again.lines)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_killed_extension_resumes_bit_exactly(home, extended, tmp_path, step):
    start(home, home / "run", "new", tmp_path / "out", step)
    start(home, home / "run", "new", tmp_path / "out")
    assert_same_run(extended, tmp_path / "out")


def test_comparison_is_made_after_a_kill_before_it(home, extended, tmp_path):
    folder = RunFolder(shutil.copytree(extended, tmp_path / "out"))
    results = folder.read_results()
    folder.write_results({key: results[key] for key in results if key != "extension"})
    assert start(home, home / "run", "new", folder.path) == results


def test_train_resumes_a_killed_extension_without_the_old_run(home, extended, tmp_path):
    run = shutil.copytree(home / "run", tmp_path / "run")
    start(home, run, "new", tmp_path / "out", 3)
    shutil.rmtree(run)
    recipe = Recipe.load(tmp_path / "out" / "recipe.yaml")
    train(recipe, tmp_path / "out", device="cpu")
    assert_same_run(extended, tmp_path / "out", but=("extension", "notes"))


def test_runs_are_extended_twice(home, tmp_path):
    start(home, home / "run", "ten", tmp_path / "mine-2")
    first = Recipe.load(tmp_path / "mine-2" / "recipe.yaml")
    run = px.Run(tmp_path / "mine-2", "cpu").extend(home / "eleven.npz")
    assert run.path == tmp_path / "mine-3"
    assert run.embedder.class_names == [str(c) for c in range(OLD + NEW)]
    assert run.results["extension"]["new_classes"] == ["10", "11"]
    keys = (run.recipe.name, run.recipe.optimizer, run.recipe.training.epochs)
    assert keys == (first.name, first.optimizer, first.training.epochs)


def test_keep_space_keeps_the_fingerprint_also_without_old_images(home, tmp_path):
    run = shutil.copytree(home / "run", tmp_path / "run")
    recipe = Recipe.load(run / "recipe.yaml").override({"data.root": str(tmp_path / "gone.npz")})
    recipe.save(run / "recipe.yaml")
    with pytest.raises(UsageError, match=r"cannot read the images.*--root.*--no-replay"):
        start(home, run, "new", tmp_path / "out")
    moved = start(home, run, "new", tmp_path / "out", root=home / "old.npz", epochs=1)
    assert moved["epochs"] == 1
    start(home, run, "new", tmp_path / "kept", keep_space=True, replay=False)
    before, after = (Embedder.load(folder, "cpu") for folder in (run, tmp_path / "kept"))
    assert before.fingerprint() == after.fingerprint()
    assert {*after.class_names} == {str(c) for c in range(OLD + NEW)}
    results = RunFolder(tmp_path / "kept").read_results()["extension"]["unseen"]
    assert results["new"]["before"] == results["new"]["after"]


def test_extension_without_old_images_follows_the_old_embedder(home, tmp_path, monkeypatch):
    def similarities(folder):
        catalog = VectorCatalog.read(home / "old.npz")
        vectors = encode_catalog(Embedder.load(folder, "cpu"), catalog)
        return vectors @ vectors.T

    changes = {}
    for weight in (1e-6, 1e3):
        monkeypatch.setattr(extension, "TEACHER_WEIGHT", weight)
        out = tmp_path / str(weight)
        start(home, home / "run", "eleven", out, replay=False, epochs=20)
        changes[weight] = (similarities(out) - similarities(home / "run")).abs().mean()
    assert changes[1e3] < 0.5 * changes[1e-6]
    assert Recipe.load(out / "recipe.yaml").loss.teacher == str(home / "run")
    assert {*Embedder.load(out, "cpu").class_names} == {*map(str, range(OLD)), "10", "11"}
    start(home, out, "ten", tmp_path / "again")
    assert Recipe.load(tmp_path / "again" / "recipe.yaml").loss.relational == 0.0


@pytest.mark.parametrize("options", [{"keep_space": True}, {"epochs": 1}])
def test_images_are_added_to_their_folder(home, tmp_path, cache, options):
    """New class folders in the folder of the old images; held-out classes remain held out."""
    photos = make_images(tmp_path / "photos", classes=12)
    for name in ("class10", "class11"):
        (photos / name).rename(tmp_path / name)
    recipe = make_recipe(photos, cache, evaluation={"held_out": 0.3})
    train(recipe, tmp_path / "run", device="cpu")
    old = px.Run(tmp_path / "run", "cpu")
    gallery = old.index(photos, tmp_path / "gallery")
    for name in ("class10", "class11"):
        (tmp_path / name).rename(photos / name)
    new = old.extend(photos, **options)
    assert new.path == tmp_path / "run-2"
    assert {*new.embedder.class_names} == {*old.embedder.class_names, "class10", "class11"}
    assert new.results["selected"]["held_out"]["queries"] == 12
    assert [*new.results["extension"]["unseen"]] == ["old"]
    same = old.embedder.fingerprint() == new.embedder.fingerprint()
    assert same == ("keep_space" in options)
    if same:
        assert len(Gallery.open(tmp_path / "gallery", embedder=new.embedder)) == len(gallery)
    assert (new.path / "images.parquet").exists()
    assert "unseen images of old classes" in new.report().read_text()


def test_extension_of_a_keep_space_run_trains(home, tmp_path):
    start(home, home / "run", "ten", tmp_path / "kept", keep_space=True, replay=False)
    shown = Messages()
    results = start(home, tmp_path / "kept", "eleven", tmp_path / "out", epochs=2, display=shown)
    assert results["epochs"] == 2
    assert any("9 old classes have no images" in line for line in shown.lines)
    assert [*sorted(map(int, proxies_of(tmp_path / "out")))] == [*range(OLD + NEW)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.name": "pairs/multi_similarity"}, "has no proxies"),
        ({"model.pca_dim": 4, "keep_space": True}, "excludes model.pca_dim"),
        ({"new": "few"}, "no new classes"),
        ({"epochs": 2, "keep_space": True}, "trains no epochs"),
        ({"epochs": 0}, "must be at least 1"),
        ({"out": "run"}, "is the folder of the old run"),
        ({"out": "missing/../run"}, "is the folder of the old run"),
    ],
)
def test_unsuitable_runs_and_images_are_rejected(home, tmp_path, changes, message):
    options = {key: changes.pop(key) for key in [*changes] if "." not in key}
    new, out = options.pop("new", "new"), options.pop("out", "out")
    train(recipe_of(home, **changes, **{"training.epochs": 1}), tmp_path / "run", device="cpu")
    with pytest.raises(UsageError, match=message):
        start(home, tmp_path / "run", new, tmp_path / out, **options)
    assert not (tmp_path / "out").exists()


def test_missing_unfinished_and_custom_runs_are_rejected(home, tmp_path):
    with pytest.raises(UsageError, match="no run in"):
        start(home, tmp_path / "none", "new", tmp_path / "out")
    killed_at(3, recipe_of(home), tmp_path / "cut", device="cpu")
    with pytest.raises(UsageError, match="is not finished"):
        start(home, tmp_path / "cut", "new", tmp_path / "out")
    data = VectorCatalog.read(home / "old.npz")
    train(recipe_of(home), tmp_path / "custom", data=data, device="cpu")
    with pytest.raises(UsageError, match=r"custom component, data\.dataset"):
        start(home, tmp_path / "custom", "new", tmp_path / "out")


def test_extended_runs_have_all_images_and_no_label_noise(home, tmp_path):
    changes = {"data.label_noise": 0.2, "data.max_images_per_class": 4, "training.epochs": 1}
    train(recipe_of(home, **changes), tmp_path / "run", device="cpu")
    start(home, tmp_path / "run", "new", tmp_path / "out", epochs=1)
    data = Recipe.load(tmp_path / "out" / "recipe.yaml").data
    assert (data.label_noise, data.max_images_per_class) == (0.0, None)


def test_other_new_images_need_another_folder(home, tmp_path):
    start(home, home / "run", "ten", tmp_path / "out", epochs=1)
    with pytest.raises(RunError, match="started with different images"):
        start(home, home / "run", "eleven", tmp_path / "out", epochs=1)


def test_extended_runs_start_from_average_weights_and_several_proxies(home, tmp_path):
    changes = {"training.ema": 0.9, "loss.name": "mpa", "loss.settings.proxies_per_class": 2}
    train(recipe_of(home, **changes, **{"training.epochs": 1}), tmp_path / "run", device="cpu")
    out = tmp_path / "out"
    start(home, tmp_path / "run", "new", out, keep_space=True)
    prints = [Embedder.load(folder, "cpu").fingerprint() for folder in (tmp_path / "run", out)]
    assert prints[0] == prints[1]
    assert proxies_of(out)["11"].shape == (2, 8)


@pytest.mark.parametrize(
    ("run", "file", "out"),
    [
        ("a", "recipe.yaml", "a-2"),
        ("a-2", "images.parquet", "a-3"),
        ("flowers-102", "recipe.yaml", "flowers-102-2"),
    ],
)
def test_default_folder_has_a_number(tmp_path, run, file, out):
    (tmp_path / run).mkdir()
    (tmp_path / run / file).touch()
    assert default_out(tmp_path / run) == tmp_path / out


def test_command_prints_the_comparison_or_json(home, tmp_path, capsys):
    words = ["extend", home / "run", home / "new.npz", "--out", tmp_path / "out", "--keep-space"]
    words = [str(word) for word in (*words, "--no-replay", "--device", "cpu")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "new classes: 9, 10, 11" in out
    assert "new classes, after" in out
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["folder"] == str(tmp_path / "out")
    assert document["extension"]["new_classes"] == ["9", "10", "11"]
    assert main([*words[:-3], "--epochs", "0"]) == 2
