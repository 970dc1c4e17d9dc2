"""`check` finds injected problems; its page, its suggestions, its command and its exit code."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageOps

import proximetry as px
from proximetry._util.errors import UsageError
from proximetry.data import Catalog, VectorCatalog
from proximetry.health import Finding
from proximetry.health.finding import KINDS
from proximetry.health.page import select
from proximetry.models import Embedder
from tests.training.tiny import make_recipe


def draw_textures(root, classes=6, each=12, side=64, seed=0):
    """Class folders of soft random patterns; a class is a color."""
    random = np.random.default_rng(seed)
    for c in range(classes):
        color = np.array([(c & 1), (c >> 1) & 1, (c >> 2) & 1]) * 120.0 + 60
        for i in range(each):
            pattern = color + random.normal(0, 32, (6, 6, 3))
            image = Image.fromarray(pattern.clip(0, 255).astype(np.uint8))
            file = root / f"class{c}" / f"{i:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.resize((side, side), Image.Resampling.BICUBIC).save(file)
    return root


@pytest.fixture(scope="module")
def embedder():
    import torch

    torch.manual_seed(0)
    return Embedder.create("small_convnet", None, weights="none", image_size=48)


@pytest.fixture(scope="module")
def saved(embedder, tmp_path_factory):
    return embedder.save(tmp_path_factory.mktemp("saved") / "embedder")


@pytest.fixture
def photos(tmp_path):
    return draw_textures(tmp_path / "photos")


def found(health, kind):
    """The paths of the findings of a kind."""
    return [tuple(health.paths(one)) for one in health.findings if one.kind == kind]


def suggestion(health, path):
    return next(one for one in health.suggested() if one.path == path)


def test_clean_images_have_no_findings(photos, embedder):
    health = px.check(photos, embedder)
    assert health.findings == ()
    assert health.counts == {}
    assert health.errors == 0
    assert 0 <= health.label_noise < 0.1
    assert health.wrong_labels.shape == (72,)
    assert "no findings" in repr(health)


def test_exact_and_altered_copies_are_found(photos, embedder):
    shutil.copy(photos / "class0/00.png", photos / "class0/exact.png")
    original = Image.open(photos / "class1/00.png")
    altered = {
        "half": original.resize((32, 32)),
        "mirror": ImageOps.mirror(original),
        "crop": original.crop((0, 3, 60, 63)),
    }
    for name, image in altered.items():
        image.save(photos / f"class1/{name}.png")
    original.save(photos / "class1/jpeg.jpg", quality=50)
    health = px.check(photos, embedder)
    assert found(health, "exact duplicate") == [("class0/exact.png", "class0/00.png")]
    near = {paths[0] for paths in found(health, "near-duplicate")}
    assert near == {f"class1/{name}.png" for name in altered} | {"class1/jpeg.jpg"}
    assert set(health.counts) == {"exact duplicate", "near-duplicate"}
    assert suggestion(health, "class0/exact.png").action == "drop"
    assert health.errors == 0


def test_copy_in_another_class_is_a_conflict(photos, embedder):
    shutil.copy(photos / "class2/03.png", photos / "class4/copy.png")
    health = px.check(photos, embedder)
    assert found(health, "label conflict") == [("class4/copy.png", "class2/03.png")]
    assert health.errors == 1
    assert "of the class class2" in health.findings[0].reason


def test_training_image_with_a_copy_in_the_test_set_is_dropped(tmp_path, embedder):
    photos = draw_textures(tmp_path / "photos" / "train")
    draw_textures(photos.parent / "test", seed=1)
    shutil.copy(photos / "class0/05.png", photos.parent / "test/class0/copy.png")
    health = px.check(photos.parent, embedder)
    expected = ("train/class0/05.png", "test/class0/copy.png")
    assert found(health, "leakage") == [expected]
    assert suggestion(health, expected[0])[2:5] == ("drop", "", "")


def test_test_image_of_a_training_series_is_moved(tmp_path, embedder):
    photos = draw_textures(tmp_path / "photos" / "train")
    draw_textures(photos.parent / "test", seed=1)
    image = Image.open(photos / "class0/05.png")
    image.save(photos / "class0/series.jpg", quality=60)
    ImageOps.mirror(image).save(photos.parent / "test/class0/series.jpg", quality=80)
    health = px.check(photos.parent, embedder)
    moved = suggestion(health, "test/class0/series.jpg")
    assert (moved.kind, moved.action, moved.split) == ("leakage", "move", "train")
    file = health.suggestions(tmp_path / "s.csv")
    applied = health.catalog.apply_suggestions(file)
    assert applied.splits[[*applied.paths].index("test/class0/series.jpg")] == "train"


def test_wrong_labels_are_found_and_relabeled(photos, embedder):
    names = ["class0/00.png", "class1/01.png", "class5/02.png"]
    for name, target in zip(names, ("class3", "class4", "class2"), strict=True):
        (photos / name).rename(photos / target / "wrong.png")
    health = px.check(photos, embedder)
    errors = {paths[0] for paths in found(health, "label error")}
    assert errors == {"class3/wrong.png", "class4/wrong.png", "class2/wrong.png"}
    assert suggestion(health, "class3/wrong.png").label == "class0"
    assert suggestion(health, "class3/wrong.png").action == "relabel"
    assert "5 of 5 nearest images are class0" in suggestion(health, "class3/wrong.png").reason
    rows = [row for row, path in enumerate(health.catalog.paths) if path in errors]
    assert health.wrong_labels[rows].min() > 0.5 > np.delete(health.wrong_labels, rows).max()
    assert health.errors == 0  # a probable error does not make `--strict` fail


def test_flipped_labels_of_vectors_are_ranked_first():
    random = np.random.default_rng(0)
    codes = np.repeat(np.arange(20), 30)
    vectors = random.normal(0, 1, (20, 64))[codes] + random.normal(0, 1, (600, 64))
    labels, flipped = codes.copy(), random.choice(600, 60, replace=False)
    labels[flipped] = (labels[flipped] + random.integers(1, 20, 60)) % 20
    health = px.check(VectorCatalog.from_arrays(vectors, labels))
    first = np.argsort(-health.wrong_labels)[:60]
    assert np.isin(first, flipped).mean() > 0.95
    assert health.label_noise == pytest.approx(0.1, abs=0.03)
    right = [one for one in health.suggested() if one.action == "relabel"]
    rows = [int(one.path.removeprefix("row ")) - 1 for one in right]
    assert np.mean(codes[rows] == [int(one.label) for one in right]) > 0.95


def test_one_class_in_two_folders_is_found(photos, embedder):
    (photos / "again").mkdir()
    for number in range(0, 12, 2):
        (photos / f"class3/{number:02d}.png").rename(photos / f"again/{number:02d}.png")
    health = px.check(photos, embedder)
    (finding,) = [one for one in health.findings if one.kind == "similar classes"]
    assert {health.catalog.labels[row] for row in finding.rows} == {"again", "class3"}
    assert finding.action is None
    assert finding.suggestion == ""


def test_small_and_large_classes_and_outliers_are_found(embedder):
    random = np.random.default_rng(0)
    sizes = [5] * 8 + [1, 80]
    codes = np.repeat(np.arange(10), sizes)
    vectors = random.normal(0, 1, (10, 32))[codes] + random.normal(0, 0.3, (len(codes), 32))
    vectors[3] = -100 * vectors.mean(0) + random.normal(0, 1, 32)
    health = px.check(VectorCatalog.from_arrays(vectors, codes))
    (small,) = [one.reason for one in health.findings if one.kind == "small classes"]
    assert "1 class of 10 with fewer than 3 images: 8 (1)" in small
    (large,) = [one.reason for one in health.findings if one.kind == "unbalanced classes"]
    assert "9 (80)" in large
    assert "row 4" in {paths[0] for paths in found(health, "outlier")}


def test_unreadable_and_tiny_files_are_found(photos, embedder):
    content = (photos / "class0/00.png").read_bytes()
    (photos / "class0/00.png").write_bytes(content[: len(content) // 2])
    (photos / "class1/00.png").write_text("<html>")
    Image.effect_noise((9, 12), 60).convert("RGB").save(photos / "class2/00.png")
    health = px.check(photos, embedder)
    assert sorted(found(health, "unreadable")) == [("class0/00.png",), ("class1/00.png",)]
    assert found(health, "tiny") == [("class2/00.png",)]
    assert health.errors == 2
    assert "9 × 12 pixels" in suggestion(health, "class2/00.png").reason


def test_missing_files_of_a_table_are_unreadable(photos, embedder, tmp_path):
    catalog = Catalog.from_folder(photos)
    catalog.to_csv(photos / "table.csv")
    (photos / "class0/00.png").unlink()
    health = px.check(photos / "table.csv", embedder)
    assert found(health, "unreadable") == [("class0/00.png",)]
    assert "no such file" in health.findings[0].reason


def test_all_unreadable_images_and_one_class_are_reported(tmp_path, embedder):
    photos = draw_textures(tmp_path / "photos", classes=1)
    health = px.check(photos, embedder)
    assert health.label_noise is None
    assert "only one class" in health.notes[-1]
    for file in photos.rglob("*.png"):
        file.write_bytes(b"")
    health = px.check(photos, embedder)
    assert health.counts == {"unreadable": 12}
    assert "nothing to compare" in health.notes[-1]
    assert b"unreadable images" in health.page(tmp_path / "h.html").read_bytes().lower()


def test_vectors_without_information_accuse_no_label():
    vectors = np.random.default_rng(0).normal(0, 1, (200, 8))
    health = px.check(VectorCatalog.from_arrays(vectors, np.arange(200) % 4))
    assert health.label_noise < 0.1
    assert "label error" not in health.counts


def test_labels_of_pairs_are_not_checked():
    vectors = np.random.default_rng(0).normal(0, 1, (20, 8))
    health = px.check(VectorCatalog.from_arrays(vectors, np.arange(20) // 2))
    assert health.label_noise is None
    assert "none has 3 images" in health.notes[-1]


def test_invalid_input_is_rejected(tmp_path, embedder, photos):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images"):
        px.check(tmp_path / "empty", embedder)
    with pytest.raises(ValueError, match="no images in sub-folders"):
        px.check(photos / "class0", embedder)
    with pytest.raises(UsageError, match="no folder or file"):
        px.check(tmp_path / "nothing", embedder)
    np.savez(tmp_path / "v.npz", vectors=np.eye(4))
    with pytest.raises(ValueError, match="label"):
        px.check(tmp_path / "v.npz")
    vectors = VectorCatalog.from_arrays(np.eye(4), [0, 0, 1, 1])
    with pytest.raises(UsageError, match="holds vectors"):
        px.check(vectors, embedder)
    with pytest.raises(UsageError, match="takes"):
        px.check(photos, Embedder.create("vectors", None, weights="none", input_dim=4))


def test_health_of_a_catalog_is_that_of_check(photos, embedder):
    from proximetry import data

    assert repr(data.health(Catalog.from_folder(photos), embedder)) == repr(
        px.check(photos, embedder)
    )


def test_page_shows_findings_without_scripts_from_names(tmp_path, embedder):
    photos = draw_textures(tmp_path / "photos")
    (photos / "class0").rename(photos / "<b>evil")
    shutil.copy(photos / "class2/03.png", photos / "<b>evil/copy.png")
    (photos / "class3/01.png").write_bytes(b"x")
    page = px.check(photos, embedder).page(tmp_path / "h.html").read_text()
    assert "<b>evil" not in page
    assert "&lt;b&gt;evil" in page
    assert page.count("data:image/webp") == 2
    for text in ("Health of photos", "Labels", "Files", "→ drop", "not readable"):
        assert text in page
    assert "http" not in page.replace("http-equiv", "")


def test_page_shows_every_kind():
    many = [Finding("leakage", (i, i + 1), "", 1.0) for i in range(300)]
    few = [Finding("outlier", (i,), "", 0.5) for i in range(20)]
    shown = select([*many, *few])
    assert len(shown) == 200
    assert sum(one.kind == "outlier" for one in shown) == 20
    assert shown == sorted(shown, key=lambda one: -one.gain)


def test_suggestions_round_trip_and_train(photos, embedder, tmp_path):
    (photos / "class0/00.png").rename(photos / "class3/wrong.png")
    shutil.copy(photos / "class1/00.png", photos / "class1/exact.png")
    (photos / "class2/00.png").write_bytes(b"")
    health = px.check(photos, embedder)
    file = health.suggestions(tmp_path / "s.csv")
    with file.open() as stream:
        lines = {line["path"]: line for line in csv.DictReader(stream)}
    assert lines.keys() == {"class3/wrong.png", "class1/exact.png", "class2/00.png"}
    assert lines["class3/wrong.png"]["label"] == "class0"
    applied = health.catalog.apply_suggestions(file)
    assert len(applied) == len(health.catalog) - 2
    assert applied.labels[[*applied.paths].index("class3/wrong.png")] == "class0"
    assert "drop 2, relabel 1" in applied.notes[-1]
    recipe = make_recipe(photos, tmp_path / "cache", data={"suggestions": str(file)})
    results = px.training.train(recipe, tmp_path / "run")
    assert any("suggestions applied" in note for note in results["notes"])


def test_suggestions_accept_full_paths_and_confirmed_labels(photos, tmp_path):
    catalog = Catalog.from_folder(photos)
    full = photos.absolute() / "class0/00.png"
    (tmp_path / "s.csv").write_text(
        f"path,action,label\n{full},relabel,class3\nclass1/00.png,keep,\n"
    )
    applied = catalog.apply_suggestions(tmp_path / "s.csv")
    assert applied.paths == catalog.paths
    labels = dict(zip(applied.paths, applied.labels, strict=True))
    assert (labels["class0/00.png"], labels["class1/00.png"]) == ("class3", "class1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na,b\n", "missing columns: action"),
        ("path,action\nclass0/00.png,remove\n", "unknown action 'remove'"),
        ("path,action,label\nclass0/00.png,relabel,\n", "relabel without a label"),
        ("path,action,split\nclass0/00.png,move,nowhere\n", "'nowhere' is not one of"),
        ("path,action\nclass9/00.png,drop\n", "no image 'class9/00.png' .row 1."),
        ("path,action\nclass0/00.png,drop\nclass0/00.png,drop\n", "two suggestions for"),
    ],
)
def test_invalid_suggestions_are_rejected(photos, tmp_path, text, message):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        Catalog.from_folder(photos).apply_suggestions(tmp_path / "s.csv")
    with pytest.raises(UsageError, match="No such file"):
        Catalog.from_folder(photos).apply_suggestions(tmp_path / "missing.csv")


def test_suggestions_of_vectors_are_applied(tmp_path):
    vectors = VectorCatalog.from_arrays(np.eye(4), [0, 0, 1, 1])
    (tmp_path / "s.csv").write_text("path,action,label\nrow 1,drop,\nrow 2,relabel,1\n")
    applied = vectors.apply_suggestions(tmp_path / "s.csv")
    assert [*applied.labels] == ["1", "1", "1"]
    np.testing.assert_array_equal(applied.vectors, np.eye(4)[1:])
    assert replace(vectors, notes=()).labels[1] == "0"  # catalogs do not change


def test_command_prints_json_and_writes_page_and_suggestions(call, photos, saved, tmp_path):
    shutil.copy(photos / "class2/03.png", photos / "class4/copy.png")
    page, table = tmp_path / "h.html", tmp_path / "s.csv"
    words = ("check", photos, "--model", saved, "--out", page, "--suggestions", table)
    document = json.loads(call(*words, "--json"))
    assert document["counts"] == {"label conflict": 1}
    assert document["errors"] == 1
    (finding,) = document["findings"]
    assert finding["paths"] == ["class4/copy.png", "class2/03.png"]
    assert finding["action"] == "drop"
    assert page.stat().st_size > 5000
    assert "class4/copy.png" in table.read_text()
    text = call(*words)
    assert "73 images, 1 finding" in text
    assert "1 suggestion" in text
    assert {*document["counts"]} <= KINDS.keys()


def test_strict_exits_with_code_1(photos, saved):
    command = [sys.executable, "-m", "proximetry", "check", str(photos), "--model", str(saved)]

    def run(*options):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert run("--strict")[0] == 0
    (photos / "class0/00.png").write_bytes(b"")
    assert run()[0] == 0
    code, message = run("--strict")
    assert code == 1
    assert "1 error in" in message


def test_command_reports_wrong_paths(call, photos, tmp_path):
    assert "no folder or file" in call("check", tmp_path / "nothing", code=2)
    assert ".html" in call("check", photos, "--out", "page.pdf", code=2)
    assert ".csv" in call("check", photos, "--suggestions", "s.txt", code=2)
