"""Commands besides `train`: lists, evaluate, embed; text and JSON."""

import dataclasses
import json
import os
import shutil
import sys
import tarfile

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from proximetry.data import Catalog, list_datasets
from proximetry.losses import LOSSES, PAIR_LOSSES, loss_settings
from proximetry.metrics import Metrics, evaluate
from proximetry.models import Embedder
from proximetry.recipe.loading import shipped_recipes
from proximetry.training import Recipe, train
from tests.training.tiny import make_images, make_recipe


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    torch.manual_seed(0)
    model = Embedder.create("small_convnet", 8, weights="none", image_size=24)
    return model.save(tmp_path_factory.mktemp("saved") / "embedder")


@pytest.fixture(scope="module")
def vectors(embedder, images):
    catalog = Catalog.from_folder(images)
    files = [catalog.file(row) for row in range(len(catalog))]
    return Embedder.load(embedder).encode(files, 128).numpy()


@pytest.fixture
def call(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return call


def data(call, *words):
    """Return the printed JSON document."""
    return json.loads(call(*words, "--json"))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["losses"], [*LOSSES, *(f"pairs/{name}" for name in PAIR_LOSSES)]),
        (["recipes"], shipped_recipes()),
        (["datasets"], list_datasets()),
        (["metrics"], [field.name for field in dataclasses.fields(Metrics)]),
        (["backbones", "resnet5*"], ["resnet50", "resnet51q"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_lists_name_everything_in_80_columns(call, words, names):
    text = call(*words)
    assert max(map(len, text.splitlines())) <= 80
    shown = {line.split()[0].removeprefix("--").replace("-", "_") for line in text.splitlines()}
    assert {name.replace("-", "_") for name in names} <= shown
    assert set(names) <= data(call, *words).keys()


@pytest.mark.parametrize("name", ["proxy_anchor", "sphereface", "pairs/margin"])
def test_loss_is_shown_with_its_settings(call, name):
    text, result = call("losses", name), data(call, "losses", name)
    assert max(map(len, text.splitlines())) <= 80
    assert result["about"]
    assert " ".join(result["use"].split()) in " ".join(text.split())
    assert result["use"]
    assert {key: one["default"] for key, one in result["settings"].items()} == {
        key: one.default for key, one in loss_settings(name).items()
    }
    assert all(f"\n{key} " in text for key in result["settings"])


def test_recipe_is_printed_as_its_file(call):
    text = call("recipes", "cub-mpa")
    assert yaml.safe_load(text)["base"]
    assert data(call, "recipes", "cub-mpa") == Recipe.load("cub-mpa").to_dict()


def test_backbones_by_part_of_a_name(call):
    lines = call("backbones").splitlines()
    assert lines[0].startswith("bn_inception")
    assert "proximetry backbones 'resnet*'" in lines[-1]
    assert "inception_v4" in call("backbones", "inception").splitlines()


def test_dataset_is_described_by_name_or_path(call, images):
    assert "100 classes for training" in call("datasets", "cub")
    for words in ([images], ["folder", images], ["folder", "--root", images]):
        assert "48 images of 12 classes" in call("datasets", *words)
    result = data(call, "datasets", images)
    assert (result["images"], result["splits"]) == (48, {"all": 48})
    assert "nothing" in call("datasets", images / "nothing", code=2)


@pytest.fixture(scope="module")
def sources(images, tmp_path_factory):
    """Return the same images as folder, CSV with a split, and tar file."""
    home = tmp_path_factory.mktemp("sources")
    catalog = Catalog.from_folder(images)
    test = tuple("test" if label >= "class04" else "train" for label in catalog.labels)
    divided = dataclasses.replace(catalog, splits=test)
    divided.to_csv(images / "divided.csv")
    with tarfile.open(home / "shard.tar", "w") as tar:
        for path in catalog.paths:
            tar.add(images / path, path)
    return {
        "folder": ([images], "all"),
        "csv": ([images / "divided.csv"], "test"),
        "tar": ([home / "shard.tar"], "all"),
    }


@pytest.mark.parametrize("form", ["folder", "csv", "tar"])
def test_evaluate_reads_folders_tables_and_shards(call, embedder, sources, vectors, images, form):
    words, split = sources[form]
    result = data(call, "evaluate", embedder, *words)
    labels = np.asarray(Catalog.from_folder(images).labels)
    chosen = labels >= "class04" if split == "test" else labels >= ""
    expected = evaluate(vectors[chosen], labels[chosen])
    assert result["split"] == split
    assert result["images"] == chosen.sum()
    assert result["metrics"] == pytest.approx(expected.mean(), abs=1e-6)
    low, high = result["intervals"]["map@r"]
    assert (low, high) == pytest.approx(expected.bootstrap()["map@r"][1:], abs=1e-6)
    assert "resampled by class" in result["interval_method"]
    assert split in call("evaluate", embedder, *words).splitlines()[0]


def test_evaluate_reports_the_metrics_that_train_recorded(call, tmp_path):
    """On the test split, with scaled and cropped images and Euclidean distances."""
    images = tmp_path / "images"
    make_images(images / "train", side=40)
    make_images(tmp_path / "test", side=40, seed=1)
    for folder in (tmp_path / "test").iterdir():
        shutil.copytree(folder, images / "test" / f"new {folder.name}")
    recipe = make_recipe(
        images,
        tmp_path / "cache",
        data={"short_side": 32},
        model={"resize": 28, "normalize": False},
        training={"epochs": 1},
        evaluation={"similarity": "euclidean", "protocol": "last"},
    )
    recorded = train(recipe, tmp_path / "run")["selected"]["test"]
    assert 0 < recorded["map@r"] < 1
    assert data(call, "evaluate", tmp_path / "run", images)["metrics"] == pytest.approx(recorded)


def test_evaluate_per_class_and_confusions(call, embedder, tmp_path):
    images = make_images(tmp_path / "images", classes=12, each=4)
    for i in range(2):  # two images of a class are also in another class
        copy = (images / "class00" / f"{i}.png").read_bytes()
        (images / "class02" / f"copy{i}.png").write_bytes(copy)
    words = ["evaluate", embedder, images, "--per-class", "--confusions", "99"]
    result = data(call, *words, "--out", tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == result
    counts = {(one["query"], one["nearest"]): one["count"] for one in result["confusions"]}
    assert counts["class00", "class02"] == counts["class02", "class00"] == 2
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    assert len(data(call, *words[:-1], "1")["confusions"]) == 1
    rows = result["per_class"]
    assert {row["label"] for row in rows} == {f"class{number:02d}" for number in range(12)}
    recall = {row["label"]: row["recall@1"] for row in rows}
    assert recall["class00"] <= 0.5
    assert [row["map@r"] for row in rows] == sorted(row["map@r"] for row in rows)
    text = call(*words)
    assert "class00 (4 queries)" in text
    assert f"{rows[-1]['label']} (" not in text, "of twelve classes the worst ten are shown"
    assert "class00 → class02" in text
    assert "95 % bootstrap confidence interval" in text


def test_evaluate_one_class_has_no_intervals(call, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.savez(tmp_path / "one.npz", vectors=vectors, labels=["a"] * 6)
    assert data(call, "evaluate", tmp_path / "one.npz")["intervals"] == {}
    text = call("evaluate", tmp_path / "one.npz", "--per-class")
    assert "No confidence intervals" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recall-at", "1", "2.5"], "2.5"),
        (["--batch-size", "2.5"], "2.5"),
        (["--eval-dims", "8"], "--eval-dims"),
        (["--root", "elsewhere"], "root"),
        (["--split", "test"], "--split all"),
        (["--recal-at", "1"], "Did you mean --recall-at?"),
    ],
    ids=str,
)
def test_evaluate_usage_errors(call, embedder, images, words, message):
    assert message in call("evaluate", embedder, images, *words, code=2)


@pytest.fixture
def hostile(tmp_path):
    """Make splits beside a stray folder, with shared classes and an endless file."""
    root = make_images(tmp_path / "hostile" / "train", classes=4, each=3).parent
    make_images(root / "test", classes=3, each=3, seed=1)
    (root / "docs").mkdir()
    (root / "test" / "class01" / "zero.png").symlink_to("/dev/zero")
    return root


def test_evaluate_prints_layout_and_notes(call, embedder, hostile):
    assert "test/class01/zero.png" in call("evaluate", embedder, hostile, code=1)
    (hostile / "test" / "class01" / "zero.png").unlink()
    result = data(call, "evaluate", embedder, hostile)
    assert (result["split"], result["images"]) == ("test", 9)
    assert result["layout"].startswith("images: 4 classes in train/, 3 classes in test/")
    assert "share 3 classes" in result["notes"][0]
    text = call("evaluate", embedder, hostile)
    assert result["layout"] in text
    assert f"note: {result['notes'][0]}" in text


def test_evaluate_warns_about_training_classes_and_duplicates(call, embedder, tmp_path):
    trained = Embedder.load(embedder).save(tmp_path / "e", class_names=["other", "class00"])
    images = make_images(tmp_path / "images")
    assert data(call, "evaluate", embedder, images)["notes"] == []
    shutil.copy(images / "class00" / "0.png", images / "class01" / "copy.png")
    leakage, duplicates = data(call, "evaluate", trained, images)["notes"]
    assert "1 of 12 classes" in leakage
    assert "different classes" in duplicates
    assert "class01/copy.png (of class00/0.png)" in duplicates


def test_embed_skips_endless_files(call, embedder, hostile, tmp_path):
    os.mkfifo(hostile / "docs" / "pipe.png")
    Image.new("1", (1, 4_000_000)).save(hostile / "docs" / "line.png")
    (hostile / "loop").symlink_to(".")
    words = ["embed", embedder, hostile, "--out", tmp_path / "v.npz", "--bad-images", "skip"]
    result = data(call, *words)
    assert result["images"] == 21
    assert "loop (a link" in result["notes"][0]
    for message, reason in zip(result["skipped"], ("65535", "pipe", "device"), strict=True):
        assert reason in message
    labels = read_npz(tmp_path / "v.npz")["labels"]
    assert set(labels) == {f"class0{i}" for i in range(4)}


def test_embed_without_classes_in_an_ambiguous_folder(call, embedder, tmp_path):
    root = make_images(tmp_path / "mixed" / "train", classes=2, each=2).parent
    make_images(root / "others", classes=1, each=2)
    result = data(call, "embed", embedder, root, "--out", tmp_path / "v.npz")
    assert result["images"] == 6
    assert "without classes" in result["notes"][0]
    assert "labels" not in read_npz(tmp_path / "v.npz")


@pytest.mark.parametrize("suffix", ["npz", "npy", "parquet"])
def test_names_that_are_not_utf8_reach_every_file(call, tmp_path, suffix):
    sys.stdout.reconfigure(errors="backslashreplace")
    root = make_images(tmp_path / "images", classes=2, each=2)
    (root / "class00").rename(root / os.fsdecode(b"cl\xe4ss"))
    model = Embedder.create("small_convnet", 8, weights="none", image_size=24)
    names = Catalog.from_folder(root).class_names
    model.save(tmp_path / "embedder", class_names=names)
    assert Embedder.load(tmp_path / "embedder").class_names == list(names)
    out = tmp_path / f"v.{suffix}"
    call("embed", tmp_path / "embedder", root, "--out", out)
    result = {"npz": read_npz, "npy": read_npy, "parquet": read_parquet}[suffix](out)
    labels = [os.fsencode(label) for label in result["labels"]]
    assert labels == [b"class01", b"class01", b"cl\xe4ss", b"cl\xe4ss"]
    assert os.path.exists(result["paths"][-1])


def test_impossible_evaluation_is_rejected_before_embedding(
    call, embedder, images, tmp_path, monkeypatch
):
    lines = [f"{images}/class00/{row}.png,{label},1,0" for row, label in enumerate("aab")]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,query,gallery", *lines]))
    monkeypatch.setattr(Embedder, "encode", lambda *_, **__: pytest.fail("embedded"))
    assert "has gallery set to true" in call("evaluate", embedder, tmp_path / "t.csv", code=1)


def read_npz(out):
    with np.load(out) as file:
        return {name: file[name] for name in file}


def read_npy(out):
    return {"vectors": np.load(out), **json.loads(out.with_name(f"{out.name}.json").read_text())}


def read_parquet(out):
    from pyarrow import parquet

    table = parquet.read_table(out).to_pydict()
    result = {"vectors": np.array(table.pop("vector")), "paths": table.pop("path")}
    return result | ({"labels": table.pop("label")} if table else {})


@pytest.mark.parametrize(
    ("suffix", "read"), [("npz", read_npz), ("NPY", read_npy), ("parquet", read_parquet)]
)
def test_embed_writes_the_format_of_the_suffix(
    call, embedder, images, vectors, tmp_path, suffix, read
):
    out = tmp_path / f"v.{suffix}"
    document = data(call, "embed", embedder, images, "--out", out)
    assert document == {"out": str(out), "images": 48, "dim": 8, "skipped": [], "notes": []}
    result = read(out)
    catalog = Catalog.from_folder(images)
    assert list(result["paths"]) == [catalog.file(row) for row in range(48)]
    assert list(result["labels"]) == list(catalog.labels)
    np.testing.assert_allclose(result["vectors"], vectors, atol=1e-6)
    call("embed", embedder, images / "class00", images / "class01" / "0.png", "--out", out)
    result = read(out)
    assert "labels" not in result
    assert len(result["vectors"]) == len(result["paths"]) == 5


def test_embed_reads_tables_and_shards(call, embedder, sources, tmp_path):
    for form in ("csv", "tar"):
        call("embed", embedder, *sources[form][0], "--out", tmp_path / "v.npz")
        assert read_npz(tmp_path / "v.npz")["labels"].tolist()[-1] == "class11"


def test_embed_rejects_or_skips_a_bad_image(call, embedder, tmp_path):
    images = make_images(tmp_path / "images", classes=2, each=3)
    (images / "class00" / "1.png").write_bytes(b"not an image")
    out = tmp_path / "v.npz"
    err = call("embed", embedder, images, "--out", out, code=1)
    assert "class00/1.png: not an image" in err
    assert "--bad-images skip" in err
    assert not out.exists()
    words = ["embed", embedder, images, "--out", out, "--bad-images", "skip", "--batch-size", "2"]
    text = call(*words)
    assert "class00/1.png: not an image" in text.splitlines()[0]
    assert "wrote 5 embeddings" in text
    result = read_npz(out)
    files = [f"{images}/{label}/{i}.png" for label in ("class00", "class01") for i in range(3)]
    del files[1]
    assert result["paths"].tolist() == files
    np.testing.assert_allclose(
        result["vectors"], Embedder.load(embedder).encode(files).numpy(), atol=1e-6
    )
    out.unlink()
    bad = images / "class00" / "1.png"
    err = call("embed", embedder, bad, "--out", out, "--bad-images", "skip", code=1)
    assert "none of the 1 images" in err
    assert not out.exists()


def test_nan_embeddings_write_nothing(call, embedder, images, tmp_path):
    broken = Embedder.load(embedder)
    broken.head.weight.data[0, 0] = float("nan")
    broken.save(tmp_path / "broken")
    for words in (
        ["embed", tmp_path / "broken", images, "--out", tmp_path / "v.npz"],
        ["evaluate", tmp_path / "broken", images, "--out", tmp_path / "e.json"],
        ["export", tmp_path / "broken", tmp_path / "e.onnx"],
    ):
        err = call(*words, code=1)
        assert "head.weight" in err
        assert words[0] == "export" or "class00/0.png" in err
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_names_are_escaped_on_the_terminal(call, tmp_path, monkeypatch, embedder):
    """Class and file names contain an escape sequence and a right-to-left override."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    make_images(tmp_path / "plain", classes=4, each=3)
    for number, folder in enumerate(sorted((tmp_path / "plain").iterdir())):
        place = tmp_path / "images\x1b[31m" / f"{number}\x1b[31m\u202e"
        place.mkdir(parents=True)
        for file in folder.iterdir():
            shutil.copy(file, place / f"\x9b\u2066{file.name}")
        shutil.copy(file, place / "copy\r.png")
    images, query = "images\x1b[31m", "images\x1b[31m/0\x1b[31m\u202e/copy\r.png"
    small = (
        "--recipe default-cpu --model.backbone small_convnet --model.weights none --model.dim 8 "
        "--model.image-size 24 --data.batch-size 8 --training.epochs 1 --evaluation.protocol last"
    )
    for words in (
        ["datasets", images],
        ["train", images, *small.split()],
        ["evaluate", embedder, images, "--per-class", "--confusions", "3"],
        ["index", images, "--model", embedder],
        ["search", query],
        ["duplicates"],
    ):
        text = call(*words)
        assert r"\x1b[31m" in text or words[0] == "index", words
        assert not {"\x1b", "\x9b", "\r", "\u202e", "\u2066"} & {*text}, words
    assert "\x1b" not in call("datasets", "nothing\x1b[31m", code=2)
