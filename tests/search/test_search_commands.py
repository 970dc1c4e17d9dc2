"""The commands `index`, `search` and `duplicates`: text and JSON."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from proximetry.cli.search import _table
from proximetry.data import open_image
from proximetry.models import Embedder
from proximetry.search import Gallery, SearchResult, contact_sheet
from tests.search.conftest import make_embedder


@pytest.fixture
def home(images, tmp_path, monkeypatch):
    """A working folder with images and an embedder."""
    shutil.copytree(images, tmp_path / "images")
    shutil.copy(tmp_path / "images/class00/0.png", tmp_path / "images/class00/copy.png")
    make_embedder().save(tmp_path / "model")
    make_embedder().save(tmp_path / "run" / "embedder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_index_search_and_duplicates(home, call):
    text = call("index", "images", "--model", "model")
    assert "index: auto → Flat for 49 images: every search is exact" in text
    assert "gallery: 49 images, 49 new" in text
    assert "proximetry search QUERY.jpg" in text
    query = "images/class00/0.png"
    lines = call("search", query, "-k", "3").splitlines()
    assert lines[0] == query
    assert lines[1].split() == ["cosine", "class", "image"]
    assert lines[2].split() == ["1", "1.0000", "class00", query]
    assert lines[3].split() == ["2", "1.0000", "class00", "images/class00/copy.png"]
    assert len(lines) == 5
    result = json.loads(call("search", query, "images/class01/1.png", "--k", "2", "--json"))
    assert [one["query"] for one in result["queries"]] == [query, "images/class01/1.png"]
    assert result["queries"][0]["results"][1] == {
        "id": 4,
        "similarity": 1.0,
        "path": str(home / "images/class00/copy.png"),
        "label": "class00",
    }
    where = ["--where", "label=class04", "--where=label=class05", "--where=label=x"]
    other = call("search", *where, query)
    assert {line.split()[2] for line in other.splitlines()[2:]} == {"class04", "class05"}
    assert "score" in call("search", query, "--rerank", "--expand", "2")
    votes = result["queries"][0]["prediction"]
    assert votes == {"label": "class00", "votes": 2, "neighbors": 2}
    assert "class: class00 (2 of 2)" in call("search", query, "-k", "2", "--predict")
    copies = json.loads(call("duplicates", "--threshold", "0.999999", "--json"))
    assert [str(home / query), str(home / "images/class00/copy.png")] in copies["groups"]
    assert "images/class00/copy.png" in call("duplicates")


def test_index_adds_new_images(home, call):
    call("index", "images/class00", "images/class01/0.png", "--model", "model")
    again = call("index", "images", "images/class00")
    assert "6 images are already in gallery" in again
    assert "gallery: 49 images, 43 new" in again
    assert "49 images, 0 new" in call("index", "images", "--model", "model")
    document = json.loads(call("index", "images", "--json"))
    assert tuple(document[key] for key in ("images", "added", "dim", "index")) == (49, 0, 8, "auto")


def test_index_reports_missing_and_changed_files(home, call):
    call("index", "images", "--model", "model")
    assert "missing" not in call("index", "images")
    (home / "images/class00/0.png").unlink()
    shutil.copy("images/class02/0.png", "images/class03/1.png")
    text = call("index", "images", "images/class00")
    assert "1 missing and 1 changed files since indexing: images/class00/0.png" in text
    document = json.loads(call("index", "images", "--json"))
    assert (document["missing"], document["changed"]) == (1, 1)
    document = json.loads(call("index", "images/class01", "--json"))
    assert (document["missing"], document["changed"]) == (0, 0)
    gallery = Gallery.open("gallery")
    missing, changed = gallery.check_files("images")
    gallery.add(changed, replace=True)
    gallery.remove(gallery.ids({"path": missing}))
    gallery.compact()
    assert gallery.check_files(home) == ([], [])
    (updated,) = gallery.ids({"path": changed})
    assert gallery.rows([updated])["label"] == ["class03"]
    assert "missing" not in call("index", "images")


@pytest.mark.parametrize("kind", ["html", "png"])
def test_contact_sheets_are_self_contained(home, call, kind):
    (home / "images/class00/<b>.png").write_bytes((home / "images/class02/0.png").read_bytes())
    (home / "images/class01/0.png").rename(home / "images/class01/a\nb\t.png")
    call("index", "images", "--model", "model")
    (home / "images/class00/copy.png").unlink()  # then it has no thumbnail
    text = call("search", "images/class00/0.png", "-k", "50", "--sheet", f"out.{kind}")
    assert f"contact sheet: out.{kind}" in text
    if kind == "png":
        with Image.open("out.png") as sheet:
            assert sheet.format == "PNG"
            assert sheet.width < 2000
            assert sheet.height > 1000
        return
    page = (home / "out.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == 50  # the query and 49 of 50
    assert page.count("not readable") == 1
    assert "&lt;b&gt;.png" in page
    assert "<b>" not in page
    assert "http" not in page
    assert 'src="/' not in page


@pytest.mark.parametrize(
    ("words", "token"),
    [
        (["index", "--model", "model"], "no images"),
        (["index", "nowhere", "--model", "model"], "nowhere"),
        (["index", "images", "--model", "nowhere"], "nowhere"),
        (["index", "images", "--model", "model", "--index", "HSNW"], "HSNW"),
        (["search", "images/class00/0.png"], "no gallery gallery"),
        (["search"], "QUERIES is missing"),
        (["search", "a.png", "--sheet", "out.gif"], ".html or .png"),
        (["search", "a.png", "--sheet", "no/out.png"], "folder no"),
        (["duplicates", "images"], "gallery.json"),
        (["duplicates", "model"], "--model model"),
        (["serve", "run"], "--model run"),
    ],
)
def test_invalid_arguments_write_nothing(home, call, words, token):
    before = sorted(home.rglob("*"))
    assert token in call(*words, code=2)
    assert sorted(home.rglob("*")) == before


def test_invalid_arguments_with_a_gallery(home, call):
    call("index", "images", "--model", "model")
    (home / "bad.jpg").write_text("no image")
    for words, code, token in (
        (["index", "images", "--index", "HNSW32"], 2, "--index auto"),
        (["index", "bad.jpg"], 1, "--bad-images skip"),
        (["search", "bad.jpg"], 2, "bad.jpg: not an image"),
        (["search", "images/class00/0.png", "--where", "label"], 2, "COLUMN=VALUE"),
        (["search", "gallery", "images/class00/0.png"], 2, "--gallery gallery"),
    ):
        assert token in call(*words, code=code)
    assert len(Gallery.open(home / "gallery")) == 49


def test_columns_of_a_table_are_stored_and_filtered(home, call):
    table = home / "images" / "table.csv"
    lines = ["path,label,year,color"]
    for row in range(12):
        color = ["red", "blue", ""][row % 3]
        lines.append(f"class{row // 4:02d}/{row % 4}.png,{row // 4},{1999 + row % 2},{color}")
    table.write_text("\n".join(lines))
    assert "not used" not in call("index", table, "--model", "model")
    query = "images/class00/0.png"

    def find(*where):
        words = [word for one in where for word in ("--where", one)]
        (answer,) = json.loads(call("search", query, "-k", "20", "--json", *words))["queries"]
        return {one["id"]: one for one in answer["results"]}

    assert len(find()) == 12
    assert (find()[2]["year"], find()[2]["color"]) == (1999, None)
    assert sorted(find("color=red", "year=1999")) == [0, 6]
    assert sorted(find("color=red", "color=blue", "year=2000")) == [1, 3, 7, 9]
    other = home / "images" / "other.csv"
    other.write_text("path,label,similarity\nclass03/1.png,x,1\n")
    assert "similarity" in call("index", other, code=2)
    other.write_text("path,label,year,price\nclass03/0.png,x,,7\n")
    assert "13 images, 1 new" in call("index", other)
    assert [one["price"] for one in find("price=7").values()] == [7]


def test_removed_results_are_marked(tmp_path):
    result = SearchResult(
        np.array([[5]]),
        np.array([[0.5]], np.float32),
        "cosine",
        ("path", "label"),
        scores=None,
        queries=["query.png"],
        calibration=None,
        prior=0.5,
        _positions=np.array([[5]]),
        _take=lambda places, columns: {name: [None] for name in columns},
    )
    removed = {"similarity": 0.5, "label": None, "path": None}
    assert "(removed)" in _table("query.png", [removed], "cosine")
    contact_sheet(tmp_path / "sheet.html", ["query.png"], result)
    assert "(removed)" in (tmp_path / "sheet.html").read_text()


@pytest.fixture
def near_copies(tmp_path, monkeypatch):
    """Sixty drawn images and six altered copies of the first, in a gallery."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "drawn"
    folder.mkdir()
    draw = np.random.default_rng(0)

    def color():
        return tuple(draw.integers(0, 256, 3).tolist())

    for number in range(60):
        image = Image.new("RGB", (64, 64), color())
        for _ in range(draw.integers(2, 7)):
            box = np.sort(draw.integers(0, 64, (2, 2)), 0).ravel().tolist()
            pen = ImageDraw.Draw(image)
            (pen.ellipse if draw.random() < 0.5 else pen.rectangle)(box, fill=color())
        image.save(folder / f"{number:02d}.png")
    with Image.open(folder / "00.png") as first:
        first.save(folder / "00 copy.png")
        first.save(folder / "00 jpeg.jpg", quality=30)
        first.resize((32, 32)).save(folder / "00 half.png")
        ImageOps.mirror(first).save(folder / "00 mirrored.png")
        first.crop((3, 3, 61, 61)).save(folder / "00 cropped.png")
        ImageEnhance.Brightness(first).enhance(1.2).save(folder / "00 brighter.png")
    torch.manual_seed(0)
    embedder = Embedder.create("small_convnet", 64, weights="none", image_size=64)
    return Gallery.build(embedder, sorted(map(str, folder.iterdir())), "gallery")


def test_duplicates_measures_its_threshold(near_copies, call):
    result = json.loads(call("duplicates", "--sheet", "groups.html", "--json"))
    copies = {path for group in result["groups"] for path in group if "00" in path}
    different = sum(len(group) for group in result["groups"]) - len(copies)
    assert len(copies) >= 6  # of seven
    assert different <= 4
    assert 0.9 < result["threshold"] < 1
    assert "measured on 50 images" in result["threshold_source"]
    page = Path("groups.html").read_text()
    assert page.count("<section>") == len(result["groups"])
    assert "00 mirrored.png" in page
    text = call("duplicates", "--threshold", "0.99999")
    assert "1 group, 2 of 66 images" in text
    assert "measured" not in text


def thumbnails(images, *_, **__):
    """Embed images as their pixels at 8 × 8."""
    small = [np.asarray(open_image(one).convert("L").resize((8, 8)), float) for one in images]
    centered = np.stack(small).reshape(-1, 64)
    return torch.from_numpy(centered - centered.mean(1, keepdims=True)).float()


def test_duplicates_lowers_its_threshold_for_distinct_images(near_copies, tmp_path):
    files = sorted(map(str, (tmp_path / "drawn").iterdir()))
    embedder = near_copies.embedder
    gallery = Gallery.build(embedder, files, tmp_path / "g", vectors=thumbnails(files))
    embedder.encode = thumbnails
    assert len(gallery.duplicates(0.99).groups[0]) <= 5
    result = gallery.duplicates()
    (group,) = (one for one in result.groups if Path(result.paths[one[-1]]).name == "00.png")
    assert result.threshold < 0.97
    assert len(group) == 6  # all but the mirrored one
    assert sum(map(len, result.groups)) <= 12


def test_duplicates_without_images_keeps_the_default_threshold(near_copies, call):
    shutil.rmtree("drawn")
    assert "cosine 0.99, not measured" in call("duplicates")


def test_search_by_several_images_a_rectangle_and_ids(home, call):
    call("index", "images", "--model", "model")
    first, second = "images/class00/0.png", "images/class01/1.png"
    for combine in ("mean", "max"):
        lines = call("search", first, second, "--combine", combine, "-k", 3).splitlines()
        assert lines[0] == f"{combine} of {first}, {second}"
        assert len(lines) == 5
        assert {first, second, "images/class00/copy.png"} & {line.split()[-1] for line in lines}
    (one,) = json.loads(call("search", "--id", 4, "--sheet", "s.png", "--json"))["queries"]
    assert one["query"] == str(home / "images/class00/copy.png")
    assert one["results"][0]["path"] == str(home / first)
    whole = "0,0," + ",".join(map(str, open_image(first).size))
    assert call("search", first, "--box", whole) == call("search", first)
    assert call("search", first, "--exact") == call("search", first)
    ranges = ["--where", "label>=class01", "--where", "label!=class02", "--where", "label<class04"]
    text = call("search", first, *ranges)
    assert {line.split()[2] for line in text.splitlines()[2:]} == {"class01", "class03"}
    for arguments, token in (
        ([first, "--id", 4], "not both"),
        ([first, "--nprobe", 4], "nprobe has no effect on index Flat"),
        ([first, "--box", "3,3,2,2"], "is empty"),
    ):
        assert token in call("search", *arguments, code=2)
