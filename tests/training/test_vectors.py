"""Vectors instead of images: files, training, evaluation; frozen backbones."""

import json

import numpy as np
import pytest
import torch

from proximetry.cli import main
from proximetry.data import Catalog, VectorCatalog, resolve_source
from proximetry.metrics import evaluate as evaluate_metrics
from proximetry.metrics import verify_classes
from proximetry.models import Embedder
from proximetry.reports import run_sections
from proximetry.training import Recipe, RecipeError, RunFolder, evaluate_embedder, train
from proximetry.training.dry_run import dry_run
from tests.training.runs import Messages, assert_same_run, killed_at
from tests.training.tiny import make_recipe

CLASSES, EACH, DIM = 12, 6, 10


def make_vectors(seed=0):
    """Linearly separable classes with noise dimensions that training must suppress."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), EACH)
    signal = draw.normal(size=(CLASSES, DIM // 2))[labels]
    noise = 2 * draw.normal(size=(len(labels), DIM // 2))
    vectors = np.concatenate([signal + 0.1 * draw.normal(size=signal.shape), noise], 1)
    return vectors.astype(np.float32), labels


def split_of(labels):
    return np.where(labels < 9, "train", "test")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same vectors in each kind of file."""
    import pyarrow
    from pyarrow import parquet

    home = tmp_path_factory.mktemp("vectors")
    vectors, labels = make_vectors()
    splits = split_of(labels)
    np.savez(home / "v.npz", vectors=vectors, labels=labels, splits=splits)
    np.save(home / "v.npy", vectors)
    beside = {"labels": labels.tolist(), "splits": splits.tolist()}
    (home / "v.npy.json").write_text(json.dumps(beside))
    columns = {"vector": list(vectors), "label": labels, "split": splits}
    parquet.write_table(pyarrow.table(columns), home / "v.parquet")
    return home


def recipe_for(file, **changes):
    values = {"data.root": str(file), "data.batch_size": 18, "model.dim": 8, "training.epochs": 3}
    return Recipe.load("vectors", values | {"evaluation.held_out": 0.34} | changes)


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet"])
def test_vector_file_formats_are_equal(suffix, files):
    found = VectorCatalog.read(files / f"v{suffix}")
    vectors, labels = make_vectors()
    np.testing.assert_array_equal(found.vectors, vectors)
    assert found.labels == tuple(map(str, labels))
    assert found.class_names == tuple(map(str, range(CLASSES)))
    assert found.splits == tuple(split_of(labels))
    part = found.filter(split="test")
    np.testing.assert_array_equal(part.vectors, vectors[labels >= 9])
    assert resolve_source(files / f"v{suffix}")[0] == "vectors"
    again = VectorCatalog.from_arrays(vectors, labels, splits=split_of(labels))
    assert (again.labels, again.splits) == (found.labels, found.splits)
    assert again.file(1) == "vectors/row 2"


def test_training_on_vectors_resumes_and_evaluates_alike(files, tmp_path, capsys):
    changes = {"training.epochs": 20, "optimizer.lr": 0.02, "evaluation.protocol": "last"}
    recipe = recipe_for(files / "v.npz", **changes)
    results = train(recipe, tmp_path / "run")
    assert results["selected"]["test"]["map@r"] > results["untrained"]["test"]["map@r"] + 0.05
    killed_at(5, recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "run", tmp_path / "cut")
    embedder = Embedder.load(tmp_path / "run")
    part = VectorCatalog.read(files / "v.parquet").filter(split="test")
    assert evaluate_embedder(embedder, part) == results["selected"]["test"]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), str(files / "v.npy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == results["selected"]["test"]
    # The embedded file has the same metrics without the embedder.
    for suffix in (".npz", ".npy", ".parquet"):
        out = tmp_path / f"out{suffix}"
        assert main(["embed", str(tmp_path / "run"), str(files / "v.npz"), "--out", str(out)]) == 0
        again = VectorCatalog.read(out)
        np.testing.assert_array_equal(again.vectors, embedder.encode(make_vectors()[0]).numpy())
        assert again.labels == tuple(map(str, make_vectors()[1]))


def test_evaluate_takes_metrics_and_eval_dims_of_the_run(files, tmp_path, capsys):
    metrics = {"recall_at": [1, 3], "ndcg_at": [], "map_at": [5]}
    changes = {"evaluation.metrics": metrics, "evaluation.eval_dims": [4]}
    results = train(recipe_for(files / "v.npz", **changes), tmp_path / "run")
    assert results["selected"]["test"]["dims"].keys() == {"4"}
    for place in (tmp_path / "run", tmp_path / "run" / "embedder"):
        words = ["evaluate", str(place), str(files / "v.npz"), "--json"]
        for more, expected in (
            ([], results["selected"]["test"]),
            (["--recall-at", "2", "--eval-dims", "2"], {"recall@2", "map@5", "dims"}),
        ):
            capsys.readouterr()
            assert main([*words, *more]) == 0
            found = json.loads(capsys.readouterr().out)["metrics"]
            if more:
                assert expected <= found.keys()
                assert not {"recall@1", "recall@3", "ndcg@2"} & found.keys()
            else:
                assert found == expected


def test_integer_labels_have_one_name_in_every_file(files, tmp_path, capsys):
    train(recipe_for(files / "v.npz"), tmp_path / "run")
    assert "7" in Embedder.load(tmp_path / "run").class_names
    vectors, labels = make_vectors()
    np.savez(tmp_path / "other.npz", vectors=vectors, labels=np.where(labels == 7, 7, 100 + labels))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), str(tmp_path / "other.npz"), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("trained on 1 of 12 classes" in note for note in notes)


def test_train_command_uses_the_vectors_recipe(files, tmp_path, capsys, monkeypatch):
    words = ["--training.epochs", "1", "--data.batch-size", "18", "--model.dim", "8"]
    assert main(["train", str(files / "v.parquet"), str(tmp_path / "run"), *words]) == 0
    output = capsys.readouterr().out
    assert "recipe vectors" in output
    assert "vectors from memory" in output
    assert RunFolder(tmp_path / "run").read_recipe().model.backbone == "vectors"
    monkeypatch.setattr(run_sections, "map_embeddings", lambda x, similarity: x.numpy()[:, :2])
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "missing" not in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    assert ">row 55</span>" in page
    assert "not readable" not in page
    found = dry_run(recipe_for(files / "v.npz"), tmp_path / "dry", device="cpu")
    assert found["data"]["test"] == {"images": 18, "classes": 3}
    assert not (tmp_path / "dry").exists()


def test_evaluate_vectors_equals_metrics(files, capsys):
    vectors, labels = make_vectors()
    part = labels >= 9
    for words, similarity in (([], "cosine"), (["--similarity", "euclidean"], "euclidean")):
        assert main(["evaluate", str(files / "v.npz"), "--json", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        plain = evaluate_metrics(torch.tensor(vectors[part]), labels[part], similarity=similarity)
        assert found["metrics"] == pytest.approx(plain)
        assert (found["embedder"], found["similarity"]) == (None, similarity)
        assert (found["images"], found["classes"], found["split"]) == (18, 3, "test")
        low, high = found["intervals"]["map@r"]
        assert low <= plain["map@r"] <= high
    options = ["--split", "all", "--per-class", "--confusions", "2", "--expand", "1", "--binary"]
    assert main(["evaluate", str(files / "v.parquet"), *options, "--eval-dims", "4"]) == 0
    output = capsys.readouterr().out
    assert "The worst 10 classes" in output
    assert "query expansion" in output


def write_parquet(file, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), file)
    return str(file)


@pytest.mark.parametrize(
    ("vectors_name", "labels_name"),
    [("embedding", "label"), ("embeddings", "y"), ("vector", "class"), ("vectors", "targets")],
)
def test_evaluate_accepts_common_names_of_columns(vectors_name, labels_name, tmp_path, capsys):
    vectors, labels = make_vectors()
    plain = evaluate_metrics(torch.tensor(vectors), labels)
    np.savez(tmp_path / "v.npz", **{vectors_name: vectors, labels_name: labels})
    columns = {vectors_name: list(vectors), labels_name: labels, "text": labels}
    write_parquet(tmp_path / "v.parquet", **columns)
    for name in ("v.npz", "v.parquet"):
        assert main(["evaluate", str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(plain)


def test_evaluate_names_the_columns_of_other_parquet_files(tmp_path, capsys):
    vectors, labels = make_vectors()
    files = [
        write_parquet(tmp_path / "a.parquet", features=list(vectors), label=labels),
        # With paths it is a table of images.
        write_parquet(tmp_path / "b.parquet", embedding=list(vectors), path=labels, label=labels),
        write_parquet(tmp_path / "c.parquet", embedding=labels, label=labels),
    ]
    for file, found in zip(files, ("features", "embedding", "embedding"), strict=True):
        assert main(["evaluate", file]) == 2
        assert f"has no column 'vector' of lists of numbers; it has {found}, " in (
            capsys.readouterr().err
        )
    assert main(["evaluate", write_parquet(tmp_path / "d.parquet", vector=list(vectors))]) == 2
    assert "has no column 'label'; it has vector" in capsys.readouterr().err


def test_evaluate_prints_verification_error_and_threshold(tmp_path, capsys):
    vectors, labels = make_vectors()
    np.savez(tmp_path / "v.npz", vectors=vectors, labels=labels)
    for similarity, words in (
        ("cosine", "cosine ≥ "),
        ("euclidean", "distance ≤ "),
    ):
        options = ["--verification", "--similarity", similarity]
        assert main(["evaluate", str(tmp_path / "v.npz"), *options, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        names = labels.astype(str)
        expected = verify_classes(torch.tensor(vectors), names, similarity=similarity)
        assert found["verification"]["accuracy"] == found["metrics"]["verification"]
        assert found["verification"]["standard_error"] == pytest.approx(expected.standard_error)
        assert found["verification"]["threshold"] == pytest.approx(expected.threshold)
        assert main(["evaluate", str(tmp_path / "v.npz"), *options]) == 0
        text = capsys.readouterr().out
        assert f"± {100 * expected.standard_error:.1f} %" in text
        assert f"{words}{abs(expected.threshold):.4g}" in text


def broken(home, name, **arrays):
    np.savez(home / name, **arrays)
    return home / name


def test_broken_vector_files_are_rejected(tmp_path, capsys):
    vectors, labels = make_vectors()
    nan = vectors.copy()
    nan[4, 2] = np.nan
    (tmp_path / "text.npz").write_text("no zip")
    np.save(tmp_path / "bare.npy", vectors)
    objects = np.array([{}] * len(labels))
    cases = {
        broken(tmp_path, "a.npz", vectors=vectors): "has no array 'labels'; it has vectors",
        broken(tmp_path, "b.npz", labels=labels): "has no array 'vectors'; it has labels",
        broken(tmp_path, "c.npz", vectors=vectors, labels=labels[:9]): "9 labels for 72 vectors",
        broken(
            tmp_path, "d.npz", vectors=nan, labels=labels
        ): "1 vectors contain NaN or infinity, first in row 5",
        broken(tmp_path, "e.npz", vectors=vectors[0], labels=labels): "must be numbers [rows, dim]",
        broken(tmp_path, "f.npz", vectors=vectors, labels=objects): "an array cannot be read",
        broken(tmp_path, "g.npz", vectors=vectors, labels=[*["x"] * 71, ""]): "no label in row 72",
        broken(tmp_path, "i.npz", vectors=vectors, labels=[*["x"] * 71, "NaT"]): "label in row 72",
        broken(
            tmp_path, "h.npz", vectors=vectors, labels=labels, splits=["tests"] * 72
        ): "'tests' is not one of all, train",
        tmp_path / "text.npz": "is not a NumPy file of plain arrays",
        tmp_path / "bare.npy": "bare.npy.json is missing beside it",
    }
    for file, message in cases.items():
        for words in (["evaluate", str(file)], ["train", str(file), str(tmp_path / "run")]):
            assert main(words) == 2, file
            error = capsys.readouterr().err
            assert message in error, error
            assert str(file) in error
            assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "not a file of vectors" in capsys.readouterr().err


def test_images_and_vectors_are_not_mixed(files, images, cache, recipe, tmp_path, capsys):
    of_images = make_recipe(
        images, cache, data={"dataset": "vectors", "root": str(files / "v.npz")}
    )
    with pytest.raises(RecipeError, match="small_convnet takes"):
        train(of_images, tmp_path / "run")
    with pytest.raises(RecipeError, match="takes vectors"):
        train(recipe_for(images, **{"data.dataset": "folder"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    Embedder.create("vectors", 4, input_dim=7).save(tmp_path / "e")
    for source, message in (
        (images, "takes vectors of 7 dimensions"),
        (files / "v.npz", "takes vectors of 7 dimensions"),
    ):
        assert main(["evaluate", str(tmp_path / "e"), str(source)]) == 2
        assert message in capsys.readouterr().err
    Embedder.create("small_convnet", 4, weights="none", image_size=24).save(tmp_path / "i")
    out, gallery = ["--out", str(tmp_path / "o.npz")], ["--gallery", str(tmp_path / "gallery")]
    for words, message in (
        (["evaluate", tmp_path / "i", files / "v.npz"], "this embedder takes images"),
        (["embed", tmp_path / "i", files / "v.npz", *out], "this embedder takes images"),
        (["embed", tmp_path / "e", files / "v.npz", *out], "7 dimensions"),
        (
            ["index", files / "v.npz", "--model", tmp_path / "i", *gallery],
            "vectors of 10 dimensions",
        ),
        (["index", images, "--model", tmp_path / "e", *gallery], "e takes vectors of 7 dimensions"),
    ):
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "o.npz").exists()
    assert not (tmp_path / "gallery").exists()
    # Files written by `embed` name their images.
    assert main(["embed", str(tmp_path / "i"), str(images), *out]) == 0
    again = tmp_path / "again.npz"
    assert main(["embed", str(tmp_path / "i"), str(tmp_path / "o.npz"), "--out", str(again)]) == 0
    np.testing.assert_array_equal(np.load(again)["vectors"], np.load(out[1])["vectors"])


@pytest.mark.parametrize("backbone", ["small_convnet", "vit_tiny_patch16_224"])
def test_frozen_backbone_trains_its_head_on_features(backbone, images, cache, tmp_path):
    side = 24 if backbone == "small_convnet" else 32
    model = {"backbone": backbone, "freeze_backbone": True, "pooling": "auto", "image_size": side}
    recipe = make_recipe(images, cache, model=model, data={"short_side": side})
    assert dry_run(recipe, tmp_path / "run", device="cpu")["images_per_second"] > 0
    messages = Messages()
    results = train(recipe, tmp_path / "run", display=messages)
    assert any("computing the features of 48 images once" in line for line in messages.lines)
    assert any("features from memory" in line for line in messages.lines)
    trained = Embedder.load(tmp_path / "run")
    torch.manual_seed(0)
    start = Embedder.create(backbone, 8, weights="none", image_size=side)
    same = {
        name: torch.equal(value, trained.state_dict()[name])
        for name, value in start.state_dict().items()
    }
    assert not same.pop("head.weight")
    assert not same.pop("head.bias")
    assert all(same.values())
    held = set(Catalog.from_folder(images).labels) - set(trained.class_names)
    part = Catalog.from_folder(images).filter(labels=held)
    figures = {k: v for k, v in results["selected"]["held_out"].items() if k != "with_distractors"}
    assert evaluate_embedder(trained, part) == figures
    killed_at(5, recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut")
    assert_same_run(tmp_path / "run", tmp_path / "cut")


@pytest.mark.parametrize("changes", [{"model.squash": True}, {"data.short_side": 40}], ids=str)
@pytest.mark.parametrize("protocol", ["last", "held_out"])
def test_frozen_features_are_those_of_evaluation(images, cache, tmp_path, changes, protocol):
    model = {"freeze_backbone": True, "image_size": 24, "resize": 28}
    data = {"short_side": None}
    recipe = make_recipe(images, cache, model=model, data=data).override(
        {**changes, "training.epochs": 1, "evaluation.protocol": protocol}
    )
    found = [
        train(recipe.override({"data.cache": place}), tmp_path / place)["last"]
        for place in ("none", "pixels")
    ]
    assert found[0] == found[1]
    assert_same_run(tmp_path / "none", tmp_path / "pixels")
