"""Galleries of vectors with any columns and without images; embedders from ONNX files."""

import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from proximetry import index
from proximetry._util.errors import UsageError
from proximetry.models import Embedder
from proximetry.search import Gallery, contact_sheet
from proximetry.search.vector_files import read_queries
from tests.search.conftest import make_embedder, make_vectors

COUNT, DIM = 40, 8
COLUMNS = {
    "text": [f"sentence number {number}" for number in range(COUNT)],
    "url": [f"https://example.org/{number}" for number in range(COUNT)],
    "year": [2000 + number % 10 for number in range(COUNT)],
    "day": [datetime.date(2024, 1, 1 + number % 30) for number in range(COUNT)],
    "tags": [["a", "b"][: number % 3] for number in range(COUNT)],
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(make_vectors(COUNT).ravel()), DIM)
    parquet.write_table(pa.table({**COLUMNS, "embedding": vectors}), tmp_path / "texts.parquet")
    np.savez(tmp_path / "queries.npz", vectors=make_vectors(COUNT)[[3, 17]])
    return tmp_path


def test_vectors_with_columns_are_indexed_and_searched(home, call):
    text = call("index", "texts.parquet")
    assert "gallery: 40 images, 40 new" in text
    assert "gallery: 40 images, 0 new" in call("index", "texts.parquet")
    lines = call("search", "queries.npz", "-k", 2).splitlines()
    assert lines[0] == "queries.npz#0"
    assert lines[2].split()[:3] == ["1", "1.0000", "texts.parquet#3"]
    assert "sentence number 3  https://example.org/3  2003" in lines[2]
    words = ["--where", "year>=2005", "--where", "text^=sentence", "--id", 17, "-k", 3, "--json"]
    (query,) = json.loads(call("search", *words))["queries"]
    assert query["query"] == f"{home}/texts.parquet#17"
    assert all(one["year"] >= 2005 for one in query["results"])
    assert {"text", "url", "year", "day", "tags"} <= query["results"][0].keys()
    gallery = Gallery.open("gallery")
    assert gallery.rows([5])["day"] == [datetime.date(2024, 1, 6)]
    assert gallery.rows([5])["tags"] == [["a", "b"]]
    result = gallery.search(make_vectors(2, seed=4), 3)
    contact_sheet(home / "s.html", result.queries, result)
    assert "texts.parquet#" in (home / "s.html").read_text()
    assert result.show().size[0] > 100
    assert gallery.outliers() is not None
    assert "0 groups" in call("duplicates", "--threshold", "0.9999")


@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_numpy_files_of_vectors(home, suffix):
    labels = [f"class{number % 4}" for number in range(COUNT)]
    if suffix == "npz":
        arrays = {"labels": labels, "url": COLUMNS["url"], "year": COLUMNS["year"]}
        np.savez("v.npz", vectors=make_vectors(COUNT), **arrays)
    else:
        np.save("v.npy", make_vectors(COUNT))
        text = json.dumps({"labels": labels, "url": COLUMNS["url"], "year": COLUMNS["year"]})
        (home / "v.npy.json").write_text(text)
    gallery = index(f"v.{suffix}", "g", report=lambda line: None)
    assert gallery.columns == ["path", "label", "url", "year"]
    assert gallery.count_labels()["class3"] == 10
    assert gallery.ids({"year": {"<": 2001}}).tolist() == [0, 10, 20, 30]
    assert gallery.predict(make_vectors(COUNT)[7], 1)[0].label == "class3"
    np.save("plain.npy", make_vectors(COUNT))
    assert index("plain.npy", "h", report=lambda line: None).columns == ["path", "label"]


def test_vectors_of_an_image_embedder_are_searched_with_images(home, images):
    embedder = make_embedder()
    files = sorted(map(str, images.rglob("*.png")))[:10]
    np.savez("v.npz", vectors=embedder.encode(files).numpy(), name=files)
    gallery = index("v.npz", "g", embedder, report=lambda line: None)
    assert gallery.search(files[4], 1).column("name").tolist() == [[files[4]]]
    with pytest.raises(UsageError, match="did not build"):
        index("v.npz", "g", make_embedder(seed=1), report=lambda line: None)
    np.save("short.npy", np.ones((4, 3)))
    with pytest.raises(UsageError, match="vectors of 3 dimensions"):
        index("short.npy", "h", embedder, report=lambda line: None)


@pytest.mark.parametrize("suffix", ["npz", "npy", "parquet"])
def test_embedded_images_are_not_embedded_again(home, call, images, suffix, monkeypatch):
    embedder = make_embedder()
    embedder.save("model")
    call("embed", "model", images, "--out", f"e.{suffix}")
    files = sorted(map(str, images.rglob("*.png")))
    with monkeypatch.context() as patch:
        patch.delattr(Embedder, "encode")
        assert "gallery: 48 images, 48 new" in call("index", f"e.{suffix}", "--model", "model")
        assert "gallery: 48 images, 0 new" in call("index", f"e.{suffix}")
    text = call("index", f"e.{suffix}", "--gallery", "h")
    assert "cannot be searched with other images" in text
    gallery = Gallery.open("gallery")
    assert sorted(gallery.rows(gallery.ids())["path"]) == files
    assert gallery.search(files[7], 1).paths.tolist() == [[files[7]]]
    assert len(gallery.count_labels()) == 12
    Gallery.open("h").search(0, 1).show()


@pytest.mark.parametrize("suffix", ["npz", "npy", "parquet"])
def test_embed_writes_absolute_paths(home, call, images, suffix):
    (home / "photos").symlink_to(images)
    (home / "sub").mkdir()
    make_embedder().save("model")
    call("embed", "model", "photos/class00", "--out", f"sub/e.{suffix}")
    call("index", f"sub/e.{suffix}", "--model", "model")
    assert "gallery: 4 images, 0 new" in call("index", "photos/class00")


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_rows_without_path_are_named_by_number(home, suffix):
    def write(paths):
        np.save("v.npy", make_vectors(3))
        (home / "v.npy.json").write_text(json.dumps({"paths": paths}))
        table = pa.table({"vector": [*make_vectors(3)], "path": paths})
        parquet.write_table(table, "v.parquet")

    write(["a.png", None, ""])
    gallery = index(f"v.{suffix}", "g", report=lambda line: None)
    names = [f"{home}/v.{suffix}#{row}" for row in (1, 2)]
    assert gallery.rows(gallery.ids())["path"] == [f"{home}/a.png", *names]
    assert read_queries(gallery, Path(f"v.{suffix}"))[1][:2] == ["a.png", f"v.{suffix}#1"]
    write([1, 2, 3])
    with pytest.raises(UsageError, match="path of row 1 must be text, got 1"):
        index(f"v.{suffix}", "h", report=lambda line: None)


def test_embedders_of_vectors_embed_files_and_queries(home, call):
    Embedder.create("vectors", 4, weights="none", input_dim=DIM).save("model")
    call("index", "texts.parquet", "--model", "model")
    assert Gallery.open("gallery").dim == 4
    lines = call("search", "queries.npz", "-k", 1).splitlines()
    assert [line.split()[1:3] for line in (lines[2], lines[6])] == [
        ["1.0000", "texts.parquet#3"],
        ["1.0000", "texts.parquet#17"],
    ]


def test_onnx_embedders_of_images(home, call, images):
    make_embedder().export_onnx("images.onnx")
    call("index", images, "--model", "images.onnx", "--gallery", "h")
    query = sorted(images.rglob("*.png"))[5]
    assert str(query) in call("search", query, "--gallery", "h", "-k", 1)
    again = Gallery.open("h").search(query, 1)
    assert again.similarities[0, 0] > 0.9999


def test_invalid_files_of_vectors(home, call):
    table = parquet.read_table("texts.parquet")
    parquet.write_table(table.append_column("id", [[*range(COUNT)]]), "ids.parquet")
    assert "column 'id' is reserved" in call("index", "ids.parquet", code=2)
    np.savez("short.npz", vectors=np.eye(3), url=["a"])
    assert "1 url for 3 vectors" in call("index", "short.npz", code=2)
    (home / "bad.npz").write_bytes(b"no file")
    assert "bad.npz" in call("index", "bad.npz", code=2)
    assert "Index it separately" in call("index", "texts.parquet", "queries.npz", code=2)


def test_search_with_the_vectors_of_images(home, call):
    """`proximetry embed` writes their paths, too."""
    call("index", "texts.parquet")
    np.savez("images.npz", vectors=make_vectors(COUNT)[[3]], paths=np.array(["a.jpg"]))
    lines = call("search", "images.npz", "-k", 1).splitlines()
    assert lines[0] == "a.jpg"
    assert lines[2].split()[:3] == ["1", "1.0000", "texts.parquet#3"]
