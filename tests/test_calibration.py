"""Calibrated embedders: storage, search, commands, the search page, training."""

import json
import re

import numpy as np
import pytest
from PIL import Image

import proximetry as px
from proximetry.cli.same import compare_images
from proximetry.data import Catalog, VectorCatalog
from proximetry.metrics import Calibration, calibrate
from proximetry.models import Embedder
from proximetry.search import Gallery
from proximetry.training import Recipe, train
from tests.search.conftest import make_embedder
from tests.training.tiny import make_images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "classes", classes=14, each=8)


@pytest.fixture(scope="module")
def embedder(images):
    model = make_embedder()
    model.calibrate(Catalog.from_folder(images))
    return model


@pytest.fixture(scope="module")
def gallery(embedder, images, tmp_path_factory):
    catalog = Catalog.from_folder(images)
    return Gallery.build(embedder, catalog, tmp_path_factory.mktemp("gallery") / "g")


def test_calibrate_equals_that_of_the_vectors(embedder, images):
    catalog = Catalog.from_folder(images)
    assert embedder.calibration == calibrate(
        embedder.encode([catalog.file(row) for row in range(len(catalog))]), catalog.labels
    )
    assert (embedder.calibration.classes, embedder.calibration.images) == (14, 112)


def test_save_and_load_keep_the_calibration(embedder, tmp_path):
    embedder.save(tmp_path / "e")
    assert Embedder.load(tmp_path / "e").calibration == embedder.calibration
    assert make_embedder().save(tmp_path / "plain") is not None
    assert Embedder.load(tmp_path / "plain").calibration is None
    assert embedder.fingerprint() == make_embedder().fingerprint()


def test_onnx_files_keep_the_calibration(embedder, tmp_path):
    pytest.importorskip("onnxscript")
    embedder.export_onnx(tmp_path / "e.onnx")
    assert Embedder.load(tmp_path / "e.onnx").calibration == embedder.calibration


def test_training_classes_are_excluded(images):
    model = make_embedder()
    model.class_names = ["class00", "class01", "class02"]
    assert model.calibrate(Catalog.from_folder(images)).classes == 11
    model.class_names = Catalog.from_folder(images).class_names
    with pytest.raises(ValueError, match="trained on all classes"):
        model.calibrate(Catalog.from_folder(images))


def test_vectors_calibrate():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 5)
    vectors = (rng.normal(size=(20, 6))[labels] + rng.normal(size=(100, 6))).astype(np.float32)
    model = Embedder.create("vectors", None, weights="none", input_dim=6, normalize=False)
    calibration = model.calibrate(VectorCatalog.from_arrays(vectors, labels.astype(str)))
    assert calibration.similarity == "euclidean"
    assert all(point.threshold < 0 for point in calibration.pairs)


def test_search_has_probabilities_and_matches(gallery, embedder, images):
    result = gallery.search([images / "class03/0.png", images / "class09/2.png"], k=20)
    threshold = embedder.calibration.gallery[0].threshold
    assert result.threshold == threshold
    np.testing.assert_array_equal(result.is_match, result.similarities >= threshold)
    share = 1 / 14  # classes of equal size
    expected = embedder.calibration.probability(result.similarities, share)
    np.testing.assert_allclose(result.probabilities, expected)
    assert (np.diff(result.probabilities, axis=1) <= 0).all()


def test_gallery_reads_the_calibration_without_the_embedder(gallery, embedder):
    opened = Gallery.open(gallery.path)
    assert opened.calibration == embedder.calibration
    assert opened.search(np.ones(8, np.float32), k=2).probabilities.shape == (1, 2)
    assert opened._embedder is None


def test_uncalibrated_gallery_has_no_probabilities(images, tmp_path):
    plain = Gallery.build(make_embedder(), Catalog.from_folder(images), tmp_path / "g")
    result = plain.search(images / "class00/0.png", k=3)
    assert (result.calibration, result.probabilities, result.threshold) == (None, None, None)
    assert result.is_match.all()


def test_search_command_answers_no_match(gallery, tmp_path, call):
    Image.fromarray(np.random.default_rng(5).integers(0, 255, (24, 24, 3), np.uint8)).save(
        tmp_path / "noise.png"
    )
    document = json.loads(
        call("search", tmp_path / "noise.png", "--gallery", gallery.path, "-k", "3", "--json")
    )
    nearest = document["queries"][0]["results"][0]
    assert nearest["match"] == (nearest["similarity"] >= gallery.calibration.match_threshold)
    text = call("search", tmp_path / "noise.png", "--gallery", gallery.path)
    assert ("no match: cosine ≥" in text) == (not nearest["match"])
    assert re.search(r"same +class +image", text)
    assert " %  class" in text


def test_calibrate_command_saves_and_same_decides(images, tmp_path, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    make_embedder().save(tmp_path / "model")
    a, b, c = (images / name for name in ("class01/0.png", "class01/1.png", "class07/0.png"))
    error = call("same", a, b, "--model", tmp_path / "model", code=2)
    assert "proximetry calibrate" in error
    text = call("calibrate", tmp_path / "model", images)
    assert "112 images of 14 classes" in text
    assert "saved in" in text
    model = Embedder.load(tmp_path / "model")
    for second in (b, c):
        document = json.loads(
            call("same", a, second, "--model", tmp_path / "model", "--far", "0.01", "--json")
        )
        assert document == compare_images(model, str(tmp_path / "model"), a, second, 0.01)
        similarity = float(model.similarity(a, second))
        assert document["same"] == (similarity >= model.calibration.pairs[0].threshold)
    assert "false accept rate of 0.01" in call(
        "same", a, b, "--model", tmp_path / "model", "--far", "0.01"
    )
    error = call("same", a, b, "--model", tmp_path / "model", "--far", "0.5", code=2)
    assert "not calibrated for" in error
    decision = call("faces", "verify", tmp_path / "model", a, c, "--far", "0.01")
    assert "class: cosine" in decision


def test_calibrate_command_reports_unusable_input(images, tmp_path, call):
    make_embedder().save(tmp_path / "model")
    few = make_images(tmp_path / "few", classes=3)
    before = (tmp_path / "model" / "embedder.json").read_bytes()
    assert "at least 10 classes" in call("calibrate", tmp_path / "model", few, code=1)
    assert "is not a folder" in call("calibrate", "small_convnet", images, code=2)
    assert "not a run folder" in call("calibrate", tmp_path / "model", code=2)
    assert (tmp_path / "model" / "embedder.json").read_bytes() == before


def test_damaged_calibration_is_an_error(embedder):
    document = embedder.calibration.to_json()
    with pytest.raises(ValueError, match="calibration is damaged"):
        Calibration.from_json({key: document[key] for key in document if key != "pairs"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on vectors of 40 classes; the last 20 are the test set."""
    home = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(40), 8)
    vectors = (rng.normal(size=(40, 10))[labels] + rng.normal(size=(320, 10))).astype(np.float32)
    splits = np.where(labels < 20, "train", "test")
    np.savez(home / "v.npz", vectors=vectors, labels=labels, splits=splits)
    settings = {"data.root": str(home / "v.npz"), "training.epochs": 2, "model.dim": 8}
    train(Recipe.load("vectors", {**settings, "evaluation.protocol": "last"}), home / "run")
    return home


def test_training_calibrates_on_unseen_classes(run):
    calibration = Embedder.load(run / "run").calibration
    assert calibration.classes == 20
    result = px.Run(run / "run").embedder.calibration
    assert result == calibration


def test_calibrate_command_takes_the_unseen_images_of_a_run(run, call):
    before = Embedder.load(run / "run").calibration
    document = json.loads(call("calibrate", run / "run", "--json"))
    after = Embedder.load(run / "run").calibration
    assert Calibration.from_json(
        {key: value for key, value in document.items() if key not in ("embedder", "saved")}
    ) == (after)
    assert after.classes == before.classes
    assert after.pairs[0].threshold == pytest.approx(before.pairs[0].threshold, abs=1e-5)


def test_evaluate_and_report_show_the_rates(run, call, tmp_path):
    document = json.loads(call("evaluate", run / "run", run / "v.npz", "--json"))
    rates = document["calibration"]
    assert rates["pairs"][0]["target"] == 0.01
    assert rates["pairs"][0]["false_accepts"] == pytest.approx(0.01, abs=0.003)
    assert "calibration: expected error" in call("evaluate", run / "run", run / "v.npz")
    call("report", run / "run", "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "Calibration" in page
    assert "Reliability: share of same pairs" in page


def test_training_with_few_unseen_classes_is_not_calibrated(tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 6)
    vectors = (rng.normal(size=(12, 5))[labels] + rng.normal(size=(72, 5))).astype(np.float32)
    np.savez(tmp_path / "v.npz", vectors=vectors, labels=labels)
    settings = {"data.root": str(tmp_path / "v.npz"), "training.epochs": 1, "model.dim": 4}
    train(Recipe.load("vectors", settings), tmp_path / "run")
    assert Embedder.load(tmp_path / "run").calibration is None


def test_search_page_api_has_probabilities(gallery, images):
    from fastapi.testclient import TestClient

    from proximetry.web import make_app

    with TestClient(make_app(gallery.path)) as client:
        upload = {"image": ("q.png", (images / "class05/1.png").read_bytes())}
        answer = client.post("/search", files=upload, data={"k": 5}).json()
    expected = gallery.search(images / "class05/1.png", k=5)
    assert answer["match_threshold"] == pytest.approx(expected.threshold)
    probabilities = [one["probability"] for one in answer["results"]]
    np.testing.assert_allclose(probabilities, expected.probabilities[0], atol=1e-3)
    assert [one["match"] for one in answer["results"]] == expected.is_match[0].tolist()
