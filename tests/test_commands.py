"""What the commands besides `train` give, to people and to scripts."""

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
from proximetry.metrics import Metrics, evaluate_queries
from proximetry.models import Embedder
from proximetry.recipe.schema import shipped_recipes
from proximetry.training import Recipe
from tests.training.tiny import make_images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    torch.manual_seed(0)
    made = Embedder.create("small_convnet", 8, weights="none", image_size=24)
    return made.save(tmp_path_factory.mktemp("saved") / "embedder")


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
    """The one JSON document on stdout."""
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
    told = {line.split()[0].removeprefix("--").replace("-", "_") for line in text.splitlines()}
    assert {name.replace("-", "_") for name in names} <= told
    assert set(names) <= data(call, *words).keys()


@pytest.mark.parametrize("name", [*LOSSES, "pairs/margin"])
def test_a_loss_is_shown_with_its_settings(call, name):
    text, found = call("losses", name), data(call, "losses", name)
    assert max(map(len, text.splitlines())) <= 80
    assert found["about"]
    assert " ".join(found["use"].split()) in " ".join(text.split())
    assert found["use"]
    assert {key: one["default"] for key, one in found["settings"].items()} == {
        key: one.default for key, one in loss_settings(name).items()
    }
    assert all(f"\n{key} " in text for key in found["settings"])


def test_a_recipe_is_printed_as_a_start_for_ones_own(call):
    text = call("recipes", "cub-mpa")
    assert yaml.safe_load(text)["base"]
    assert data(call, "recipes", "cub-mpa") == Recipe.load("cub-mpa").to_dict()


def test_own_backbones_come_first_and_a_part_of_a_name_is_enough(call):
    lines = call("backbones").splitlines()
    assert [line.split()[0] for line in lines if line[:1].strip()][:3] == [
        "bn_inception",
        "small_convnet",
        "sphereface20",
    ]
    assert "proximetry backbones 'resnet*'" in lines[-1]
    found = call("backbones", "inception").splitlines()
    assert found[0].startswith("bn_inception")
    assert "inception_v4" in found
    assert "'zzz'" in call("backbones", "zzz", code=2)


def test_an_unknown_backbone_gets_advice_for_the_shell():
    with pytest.raises(ValueError, match=r"proximetry backbones 'resnet\*'"):
        Embedder.create("rsnet50")


def test_a_dataset_is_described_by_its_name_or_where_it_lies(call, images):
    assert "100 classes for training" in call("datasets", "cub")
    for words in ([images], ["folder", images], ["folder", "--root", images]):
        assert "48 images of 12 classes" in call("datasets", *words)
    found = data(call, "datasets", images)
    assert found["images"] == 48
    assert found["splits"] == {"all": 48}
    assert "no folder or file" in call("datasets", images / "nothing", code=2)


@pytest.fixture(scope="module")
def sources(images, tmp_path_factory):
    """The same images in every form; the second half of the classes for test, where it is said."""
    home = tmp_path_factory.mktemp("sources")
    catalog = Catalog.from_folder(images)
    test = tuple("test" if label >= "class04" else "train" for label in catalog.labels)
    divided = dataclasses.replace(catalog, splits=test)
    divided.to_csv(images / "divided.csv")
    catalog.to_parquet(images / "all.parquet")
    with tarfile.open(home / "shard.tar", "w") as tar:
        for path in catalog.paths:
            tar.add(images / path, path)
    return {
        "folder": ([images], "all"),
        "name": (["folder", "--root", images], "all"),
        "csv": ([images / "divided.csv"], "test"),
        "parquet": ([images / "all.parquet"], "all"),
        "tar": ([home / "shard.tar"], "all"),
        "shards": ([home], "all"),
    }


@pytest.mark.parametrize("form", ["folder", "name", "csv", "parquet", "tar", "shards"])
def test_evaluate_takes_images_in_any_form(call, embedder, sources, vectors, images, form):
    words, split = sources[form]
    found = data(call, "evaluate", embedder, *words)
    labels = np.asarray(Catalog.from_folder(images).labels)
    chosen = labels >= "class04" if split == "test" else labels >= ""
    expected = evaluate_queries(vectors[chosen], labels[chosen])
    assert found["split"] == split
    assert found["images"] == chosen.sum()
    assert found["metrics"] == pytest.approx(expected.mean(), abs=1e-6)
    low, high = found["intervals"]["map@r"]
    assert (low, high) == pytest.approx(expected.bootstrap()["map@r"][1:], abs=1e-6)
    assert "resampled by class" in found["interval_method"]
    assert split in call("evaluate", embedder, *words).splitlines()[0]


def test_evaluate_shows_the_worst_classes_and_confusions(call, embedder, tmp_path):
    images = make_images(tmp_path / "images", classes=12, each=4)
    for i in range(2):  # two pictures of a class also stand in another one
        copy = (images / "class00" / f"{i}.png").read_bytes()
        (images / "class02" / f"copy{i}.png").write_bytes(copy)
    words = ["evaluate", embedder, images, "--per-class", "--confusions", "99"]
    found = data(call, *words, "--out", tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == found
    counts = {(one["query"], one["nearest"]): one["count"] for one in found["confusions"]}
    assert counts["class00", "class02"] == counts["class02", "class00"] == 2
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    assert len(data(call, *words[:-1], "1")["confusions"]) == 1
    rows = found["per_class"]
    assert {row["label"] for row in rows} == {f"class{number:02d}" for number in range(12)}
    recall = {row["label"]: row["recall@1"] for row in rows}
    assert recall["class00"] <= 0.5
    assert [row["map@r"] for row in rows] == sorted(row["map@r"] for row in rows)
    text = call(*words)
    assert max(map(len, text.partition("note: ")[0].splitlines())) <= 80
    assert "class00 (4 queries)" in text
    assert f"{rows[-1]['label']} (" not in text, "of twelve classes the worst ten are shown"
    assert "class00 → class02" in text
    assert "95 % bootstrap confidence interval, resampled by class:\n  recall@1 " in text


def test_evaluate_one_class_has_no_intervals(call, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.savez(tmp_path / "one.npz", vectors=vectors, labels=["a"] * 6)
    assert data(call, "evaluate", tmp_path / "one.npz")["intervals"] == {}
    text = call("evaluate", tmp_path / "one.npz", "--per-class")
    assert "No confidence intervals" in text


def test_an_image_that_is_query_and_gallery_never_finds_itself(call, embedder, images):
    catalog = Catalog.from_folder(images)
    shuffled = np.random.default_rng(0).permutation(catalog.labels).tolist()
    plain = dataclasses.replace(catalog, labels=shuffled)
    both = dataclasses.replace(plain, queries=(True,) * 48, galleries=(True,) * 48)
    words = ["--per-class", "--confusions", "99", "--clustering"]
    found = []
    for number, table in enumerate((plain, both)):
        table.to_csv(images / f"roles{number}.csv")
        found.append(data(call, "evaluate", embedder, images / f"roles{number}.csv", *words))
    assert found[0] == found[1]
    assert found[0]["metrics"]["recall@1"] < 0.5


def test_evaluate_says_what_cannot_be_measured_before_it_reads_an_image(call, embedder, tmp_path):
    def told(*rows, code=1, words=()):
        table = tmp_path / "table.csv"
        table.write_text("\n".join(["path,label,query,gallery", *rows]))
        return call("evaluate", embedder, table, *words, code=code)

    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(b"no image")
    pairs = [f"{i}.png,{i // 2}" for i in range(4)]
    assert "one image each" in told(*(f"{i}.png,{i},true,true" for i in range(4)))
    err = told(*(f"{row},true,false" for row in pairs))
    assert "none of the 4 images" in err
    assert "gallery" in err
    assert "clustering needs one set" in told(
        pairs[0] + ",true,false", *(f"{row},true,true" for row in pairs[1:]), words=["--clustering"]
    )
    make_images(tmp_path / "images", classes=2, each=2)
    text = call("evaluate", embedder, tmp_path / "images", "--recall-at", "1", "3")
    assert "note: recall@3 is 100 % for any embedder: the gallery of a query has 3" in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--recall-at", "1.5"], 2, "--recall-at takes whole numbers, got 1.5"),
        (["--recall-at", "1", "2.5"], 2, "--recall-at takes whole numbers, got 2.5"),
        (["--recall_at=1.5"], 2, "--recall-at takes whole numbers, got 1.5"),
        (["--batch-size", "2.5"], 2, "--batch-size takes whole numbers, got 2.5"),
        (["--eval-dims", "8"], 2, "--eval-dims must be below the embedding's 8 dimensions, got 8"),
        (["--root", "elsewhere"], 2, "a root goes with the name of a dataset"),
        (["--split", "test"], 2, "Try --split all"),
    ],
    ids=str,
)
def test_mistakes_of_evaluate_are_one_sentence(call, embedder, images, words, code, message):
    assert message in call("evaluate", embedder, images, *words, code=code)


@pytest.fixture
def hostile(tmp_path):
    """Splits beside a stray folder, with a class in both and a file that never ends."""
    root = make_images(tmp_path / "hostile" / "train", classes=4, each=3).parent
    make_images(root / "test", classes=3, each=3, seed=1)
    (root / "docs").mkdir()
    (root / "test" / "class01" / "zero.png").symlink_to("/dev/zero")
    return root


def test_evaluate_tells_what_it_took_for_what(call, embedder, hostile):
    message = call("evaluate", embedder, hostile, code=1)
    assert "test/class01/zero.png: cannot be opened: a device, not a file" in message
    (hostile / "test" / "class01" / "zero.png").unlink()
    found = data(call, "evaluate", embedder, hostile)
    assert (found["split"], found["images"]) == ("test", 9)
    assert found["layout"] == "images: 4 classes in train/, 3 classes in test/; left out: docs"
    assert found["notes"][0].startswith("train and test share 3 classes, so test does not")
    text = call("evaluate", embedder, hostile)
    assert found["layout"] in text
    assert f"note: {found['notes'][0]}" in text


def test_evaluate_tells_of_known_classes_and_copies(call, embedder, images, tmp_path):
    classes = sorted({*Catalog.from_folder(images).labels})
    trained = Embedder.load(embedder).save(tmp_path / "e", class_names=["other", *classes[:2]])
    table = tmp_path / "t.csv"
    rows = [f"{name}/{i}.png" for name in classes for i in range(2)]
    shutil.copytree(images, tmp_path / "images")
    shutil.copy(images / rows[0], tmp_path / "images" / classes[1] / "copy.png")
    os.link(tmp_path / "images" / rows[4], tmp_path / "images" / classes[2] / "link.png")
    rows += [f"{classes[1]}/copy.png", f"{classes[2]}/link.png"]
    lines = [f"images/{path},{path.partition('/')[0]}" for path in rows]
    table.write_text("\n".join(["path,label", *lines]))
    known, copies, mistaken = data(call, "evaluate", trained, table)["notes"]
    assert known.startswith(f"the embedder was trained on 2 of {len(classes)} classes")
    assert copies == (f"1 image is a copy, byte for byte: images/{rows[-1]} (of images/{rows[4]})")
    assert mistaken == (
        "1 image is a copy of one in another class, byte for byte, so one of the two labels is "
        f"wrong: images/{rows[-2]} (of images/{rows[0]})"
    )
    table.write_text("\n".join(["path,label", *lines[:-2]]))
    assert data(call, "evaluate", embedder, table)["notes"] == []


def test_evaluate_rejects_a_table_without_rows(call, embedder, tmp_path):
    (tmp_path / "t.csv").write_text("path,label\n")
    assert "no rows" in call("evaluate", embedder, tmp_path / "t.csv", code=2)


def test_embed_leaves_out_what_never_ends_and_names_it(call, embedder, hostile, tmp_path):
    os.mkfifo(hostile / "docs" / "pipe.png")
    Image.new("1", (1, 4_000_000)).save(hostile / "docs" / "line.png")
    (hostile / "loop").symlink_to(".")
    words = ["embed", embedder, hostile, "--out", tmp_path / "v.npz", "--bad-images", "skip"]
    found = data(call, *words)
    assert found["images"] == 21
    assert found["notes"] == [f"left out in {hostile}: loop (leads to {hostile})"]
    reasons = ("the limit is 65535 a side", "a named pipe, not a file", "a device, not a file")
    for told, reason in zip(found["left_out"], reasons, strict=True):
        assert told.endswith(reason)
    labels = read_npz(tmp_path / "v.npz")["labels"]
    assert set(labels) == {f"class0{i}" for i in range(4)}
    assert f"loop (leads to {hostile})" in call(*words)


def test_embed_does_without_classes_where_they_are_not_clear(call, embedder, tmp_path):
    root = make_images(tmp_path / "mixed" / "train", classes=2, each=2).parent
    make_images(root / "others", classes=1, each=2)
    found = data(call, "embed", embedder, root, "--out", tmp_path / "v.npz")
    assert found["images"] == 6
    assert "without classes" in found["notes"][0]
    assert "is train/ a split or a class?" in found["notes"][0]
    assert "labels" not in read_npz(tmp_path / "v.npz")


@pytest.mark.parametrize("suffix", ["npz", "npy", "parquet"])
def test_names_that_are_not_utf8_reach_every_file(call, tmp_path, suffix):
    sys.stdout.reconfigure(errors="backslashreplace")
    root = make_images(tmp_path / "images", classes=2, each=2)
    (root / "class00").rename(root / os.fsdecode(b"cl\xe4ss"))
    made = Embedder.create("small_convnet", 8, weights="none", image_size=24)
    names = Catalog.from_folder(root).class_names
    made.save(tmp_path / "embedder", class_names=names)
    assert Embedder.load(tmp_path / "embedder").class_names == list(names)
    out = tmp_path / f"v.{suffix}"
    call("embed", tmp_path / "embedder", root, "--out", out)
    found = {"npz": read_npz, "npy": read_npy, "parquet": read_parquet}[suffix](out)
    labels = [os.fsencode(label) for label in found["labels"]]
    assert labels == [b"class01", b"class01", b"cl\xe4ss", b"cl\xe4ss"]
    assert os.path.exists(found["paths"][-1])
    call("evaluate", tmp_path / "embedder", root, "--per-class", "--out", tmp_path / "e.json")
    told = json.loads((tmp_path / "e.json").read_text())
    assert {row["label"] for row in told["per_class"]} == set(names)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,1,0\na,1,0\nb,1,0", "gallery"),
        ("a,0,1\na,0,1\nb,0,1", "query"),
        ("a,1,0\nb,0,1\nb,0,1", "another image of its class in the gallery"),
        ("a,1,1\nb,1,1\nc,1,1", "one image each"),
        ("a,0,0\nb,0,0\nc,0,0", "one image each"),
    ],
)
def test_what_cannot_be_measured_is_told_before_images_are_embedded(
    call, embedder, images, tmp_path, monkeypatch, rows, message
):
    lines = [f"{images}/class00/{number}.png,{row}" for number, row in enumerate(rows.splitlines())]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,query,gallery", *lines]))
    monkeypatch.setattr(Embedder, "encode", lambda *_, **__: pytest.fail("embedded"))
    found = call("evaluate", embedder, tmp_path / "t.csv", code=1)
    assert message in found


def read_npz(out):
    with np.load(out) as file:
        return {name: file[name] for name in file}


def read_npy(out):
    return {"vectors": np.load(out), **json.loads(out.with_name(f"{out.name}.json").read_text())}


def read_parquet(out):
    from pyarrow import parquet

    table = parquet.read_table(out).to_pydict()
    found = {"vectors": np.array(table.pop("vector")), "paths": table.pop("path")}
    return found | ({"labels": table.pop("label")} if table else {})


@pytest.mark.parametrize(
    ("suffix", "read"), [("npz", read_npz), ("npy", read_npy), ("parquet", read_parquet)]
)
def test_embed_writes_what_the_suffix_says(call, embedder, images, vectors, tmp_path, suffix, read):
    out = tmp_path / f"v.{suffix}"
    told = data(call, "embed", embedder, images, "--out", out)
    assert told == {"out": str(out), "images": 48, "dim": 8, "left_out": [], "notes": []}
    found = read(out)
    catalog = Catalog.from_folder(images)
    assert list(found["paths"]) == [catalog.file(row) for row in range(48)]
    assert list(found["labels"]) == list(catalog.labels)
    np.testing.assert_allclose(found["vectors"], vectors, atol=1e-6)
    call("embed", embedder, images / "class00", images / "class01" / "0.png", "--out", out)
    found = read(out)
    assert "labels" not in found
    assert len(found["vectors"]) == len(found["paths"]) == 5


def test_embed_touches_no_other_file_of_that_stem(call, embedder, images, tmp_path):
    (tmp_path / "results.json").write_text("of a run")
    told = call("embed", embedder, images, "--out", tmp_path / "results.npy")
    assert f"to {tmp_path}/results.npy and {tmp_path}/results.npy.json" in told
    assert (tmp_path / "results.json").read_text() == "of a run"
    call("evaluate", tmp_path / "results.npy")


def test_embed_takes_tables_and_shards(call, embedder, sources, tmp_path):
    for form in ("csv", "tar"):
        call("embed", embedder, *sources[form][0], "--out", tmp_path / "v.npz")
        assert read_npz(tmp_path / "v.npz")["labels"].tolist()[-1] == "class11"


def test_embed_refuses_an_unknown_suffix_before_the_work(call, tmp_path):
    words = ["embed", "nowhere", "nothing.png", "--out"]
    assert "must end in .npz, .npy, .parquet" in call(*words, tmp_path / "v.zip", code=2)
    assert "there is no folder" in call(*words, tmp_path / "new" / "v.npy", code=2)


def test_embed_stops_at_a_bad_image_or_leaves_it_out(call, embedder, tmp_path):
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
    found = read_npz(out)
    files = [f"{images}/{label}/{i}.png" for label in ("class00", "class01") for i in range(3)]
    del files[1]
    assert found["paths"].tolist() == files
    np.testing.assert_allclose(
        found["vectors"], Embedder.load(embedder).encode(files).numpy(), atol=1e-6
    )
    (only,) = data(call, *words)["left_out"]
    assert "class00/1.png" in only
    out.unlink()
    bad = images / "class00" / "1.png"
    err = call("embed", embedder, bad, "--out", out, "--bad-images", "skip", code=1)
    assert "none of the 1 images can be read" in err
    assert not out.exists()


def test_an_embedder_that_gives_nan_writes_nothing(call, embedder, images, tmp_path):
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


def test_help_of_a_command_in_words(call):
    assert call("help", "evaluate") == call("evaluate", "-h")
    assert "Usage: proximetry" in call("help")


def test_a_mistyped_option_is_found_by_what_it_is_about(call):
    words = ["train", "glyphs", "out", "--optimizer.learning-rate", "1e-3"]
    assert "Did you mean --optimizer.lr?" in call(*words, code=2)
    assert "Did you mean --recall-at?" in call("evaluate", "a", "b", "--recal-at", "1", code=2)


def test_null_means_none_for_text_too(call):
    words = ["--data.root", "null", "--training.wandb=null", "--data.cache-dir", "12"]
    found = yaml.safe_load(call("train", "folder", "out", *words, "--print-config"))
    assert found["data"]["root"] is None
    assert found["training"]["wandb"] is None
    assert found["data"]["cache_dir"] == "12"


def test_names_cannot_control_the_terminal(call, tmp_path, monkeypatch, embedder):
    """Class and file names hold an escape sequence and a right-to-left override."""
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
