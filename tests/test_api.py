"""The Python API of the package itself, and the first steps of a new user."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image, ImageDraw

import proximetry as px
from proximetry import cli
from proximetry.metrics import evaluate
from proximetry.models import Embedder
from proximetry.search import Gallery
from tests.training.tiny import make_images

SETTINGS = {
    "model.backbone": "small_convnet",
    "model.weights": "none",
    "model.dim": 8,
    "model.pca_dim": None,
    "model.image_size": 24,
    "model.resize": 24,
    "data.batch_size": 8,
    "training.epochs": 1,
}


def draw(path, shape, seed):
    """Draw a shape of random size, position and color."""
    random = np.random.default_rng(seed)
    colors = [tuple(map(int, random.integers(0, 256, 3))) for _ in range(2)]
    image = Image.new("RGB", (160, 120), colors[0])
    x, y, side = random.integers(10, 50), random.integers(5, 30), random.integers(50, 80)
    pen = ImageDraw.Draw(image)
    box = (int(x), int(y), int(x + side), int(y + side))
    if shape == "circle":
        pen.ellipse(box, fill=colors[1])
    elif shape == "square":
        pen.rectangle(box, fill=colors[1])
    else:
        for at in range(0, int(side), 12):
            pen.line((box[0], box[1] + at, box[2], box[1] + at), fill=colors[1], width=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working folder with drawn images in class folders, and a query."""
    for shape in ("circle", "square", "stripes"):
        for number in range(6):
            draw(tmp_path / "photos" / shape / f"{number}.jpg", shape, number)
    draw(tmp_path / "query.jpg", "circle", 77)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(*words):
    """Run Python in a new process; return its output."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_three_lines_of_python_find_the_first_neighbor(home):
    code = """
import proximetry as px
gallery = px.index("photos")
print(gallery.search("query.jpg").labels[0, 0])
"""
    lines = run("-c", code).splitlines()
    assert lines[0].startswith("model: tf_efficientnet_lite0 with pretrained weights, ")
    assert lines[-1] == "circle"


def test_two_commands_find_the_first_neighbor(home):
    out = run("-m", "proximetry", "index", "photos")
    assert "model: tf_efficientnet_lite0 with pretrained weights" in out
    assert "proximetry search QUERY.jpg\n  proximetry serve\n" in out
    out = run("-m", "proximetry", "search", "query.jpg", "--predict")
    assert out.splitlines()[2].split()[2] == "circle"
    assert "class: circle (" in out


def test_index_again_adds_new_images_only(home):
    lines = []
    gallery = px.index("photos/circle", report=lines.append)
    assert (len(gallery), gallery.path.name) == (6, "gallery")
    gallery = px.index(["photos", "query.jpg"], report=lines.append)
    assert len(gallery) == 19
    assert "6 images are already in gallery" in lines
    assert px.index(os.path.abspath("query.jpg"), report=lines.append).contains("query.jpg")
    with pytest.raises(ValueError, match="did not build the gallery"):
        px.index("photos", model="tf_efficientnet_lite1")


def test_serve_indexes_a_folder_first(home, call, monkeypatch):
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    out = call("serve", "photos", "--port", "0")
    assert "model: tf_efficientnet_lite0" in out
    assert "gallery: 18 images. Serving at" in out
    assert "gallery: 18 images. Serving at" in call("serve", "--port", "0")
    (home / "gallery").rename(home / "other")
    assert "other: 18 images. Serving at" in call("serve", "--gallery", "other", "--port", "0")
    assert "other: 18 images. Serving at" in call("serve", "other", "--port", "0")
    other, printed = Gallery.open("other"), []
    other.serve(port=0)
    monkeypatch.setattr(px.web, "serve", lambda source, *rest: printed.append(source))
    other.serve(port=0)
    other._scan_device = torch.device("cuda")
    other.serve(port=0)
    assert printed == [other.path, other]


@pytest.fixture
def onnx_file(home):
    embedder = Embedder.create("small_convnet", 8, weights="none", image_size=32)
    return embedder.export_onnx("mine.onnx")


@pytest.mark.parametrize("model", ["tf_efficientnet_lite0", "mine.onnx"])
def test_backbones_and_onnx_files_are_models_of_commands(home, onnx_file, call, model):
    assert "recall@1" in call("evaluate", model, "photos")
    assert "wrote 18 embeddings" in call("embed", model, "photos")
    call("index", "photos", "--model", model)
    assert "circle" in call("search", "query.jpg", "-k", "18")
    assert "0 new" in call("index", "photos", "--model", model)
    assert len(Gallery.open("gallery").search("query.jpg", 3)) == 1


def test_train_returns_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    make_images(tmp_path / "photos")
    made = px.train("photos", settings=SETTINGS, device="cpu")
    assert made.path.as_posix() == "runs/photos"
    assert "epoch   1" in capsys.readouterr().out
    opened = px.Run("runs/photos")
    assert opened.results == made.results
    scores = made.results["selected"]["held_out"]
    assert opened.evaluate()["recall@1"] == pytest.approx(scores["recall@1"])
    vectors = opened.embedder.encode(
        [f"photos/class{c:02d}/{i}.png" for c in (0, 1) for i in (0, 1)]
    )
    assert set(px.evaluate(vectors, [0, 0, 1, 1])) == set(evaluate(vectors, [0, 0, 1, 1]))
    assert opened.evaluate("photos")["recall@1"] > 0
    assert opened.report() == opened.path / "report.html"
    assert opened.report().stat().st_size > 10_000
    gallery = opened.index("photos", "mine", report=lambda line: None)
    assert gallery.search("photos/class03/1.png", 1).labels[0, 0] == "class03"
    (tmp_path / "runs/photos/results.json").unlink()
    with pytest.raises(ValueError, match="not finished"):
        px.Run("runs/photos")


def test_public_names_are_listed_and_imported_on_first_use():
    assert set(px.__all__) <= set(dir(px))
    for name in px.__all__:
        assert getattr(px, name) is not None


def test_help_groups_the_commands(call):
    out = call("--help")
    titles = ("Train", "Evaluate", "Search", "Data", "Faces", "Advanced")
    places = [out.index(f"─ {title} ─") for title in titles]
    assert places == sorted(places)
    assert places[2] < out.index("serve ") < places[3]
    assert cli.main(["faces", "--help"]) == 0
