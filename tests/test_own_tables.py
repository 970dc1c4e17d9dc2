"""One's own table, as it is: other names of columns, any labels, images that are missing or broken.

The same words go to every command that reads images.
"""

import json
from contextlib import redirect_stdout
from datetime import date
from io import StringIO

import numpy as np
import pytest
import yaml

from proximetry import cli
from proximetry.data import Catalog
from proximetry.models import Embedder
from tests.test_cli_train import small
from tests.training.tiny import make_images

arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
READ = ["--data.columns", "path=file,label=category", "--data.bad-images", "skip"]
BROKEN = [f"class{number:02d}/0.png" for number in range(7)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a table of images, of which seven are broken and one is missing."""
    home = tmp_path_factory.mktemp("own")
    make_images(home / "pictures", classes=12, each=5)
    files = [f"class{c:02d}/{i}.png" for c in range(12) for i in range(5)]
    for file in BROKEN:
        (home / "pictures" / file).write_bytes(b"no image")
    columns = {
        "file": [*files, "gone.png"],
        "category": [float(row // 5) for row in range(60)] + [0.0],
        "label": ["not what is meant"] * 61,
        "year": list(range(1960, 2021)),
    }
    parquet.write_table(arrow.table(columns), home / "pictures" / "table.parquet")
    return home


@pytest.fixture
def call(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.setenv("PROXIMETRY_CACHE", str(home / "cache"))

    def run(*words, code=0):
        got = cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        assert got == code, printed.err
        return printed.err if code else printed.out

    return run


@pytest.fixture(scope="module")
def told(home):
    """What `train` prints; the run is in the folder run."""
    words = ["train", home / "pictures" / "table.parquet", home / "run", *small(), *READ]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.chdir(home)
        patch.setenv("PROXIMETRY_CACHE", str(home / "cache"))
        assert cli.main([str(word) for word in words]) == 0
    return out.getvalue()


def test_train(home, told):
    assert told.count("skipped ") == 5
    assert "and 3 more; all are in results.json" in told
    # The next commands are to be told what this one was.
    command = " ".join(told.partition("Next:")[2].replace("\\\n", " ").split())
    assert "--columns path=file,label=category --bad-images skip" in command
    notes = json.loads((home / "run" / "results.json").read_text())["notes"]
    skipped = [note.split()[1] for note in notes if note.startswith("skipped ")]
    assert skipped == [f"{name}:" for name in [*BROKEN, "gone.png"]]
    assert "columns that are not used: label" in notes
    classes = Embedder.load(home / "run").class_names
    assert set(classes) < {str(number) for number in range(12)}


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "run", "pictures/table.parquet"],
        ["embed", "run", "pictures/table.parquet", "--out", "v.npz"],
        ["index", "pictures/table.parquet", "--model", "run", "--gallery", "GALLERY"],
    ],
)
def test_the_other_commands(call, home, told, words, tmp_path):
    words = [str(tmp_path / "gallery") if word == "GALLERY" else word for word in words]
    err = call(*words, *READ[:2], code=1)
    assert "1 of 61 images do not exist below" in err
    assert "'gone.png' (row 61); --data.bad-images skip" in err
    text = call(*words, *READ)
    assert text.count("left out ") == 5
    assert "and 3 more; all are in" in text
    # Given again, `index` finds all others there, and those that it cannot read once more.
    document = json.loads(call(*words, *READ, "--json"))
    assert document["images"] == 53
    assert [
        name in reason
        for name, reason in zip([*BROKEN, "gone.png"], document["left_out"], strict=True)
    ] == [True] * 8
    if words[0] == "embed":
        assert json.loads((home / "v.npz.left_out.json").read_text()) == document["left_out"]
        found = np.load(home / "v.npz")
        assert found["labels"].tolist() == [
            str(row // 5) for row in range(60) if row >= 35 or row % 5
        ]


def test_without_skip_the_broken_image_is_named(call, home, told):
    table = "path,label\nclass00/0.png,a\nclass00/1.png,a\nclass00/2.png,b\n"
    (home / "pictures" / "three.csv").write_text(table)
    err = call("evaluate", "run", "pictures/three.csv", code=1)
    assert "class00/0.png: not an image in a known format" in err
    assert err.endswith("; --bad-images skip leaves such images out\n")
    err = call("evaluate", "run", "pictures/three.csv", "--bad-images", "skip", code=1)
    assert "one image each, so there is nothing to find" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "'path'; it has file, category, label, year. Set --data.columns path=COLUMN"),
        (["--columns", "path=file,label=categry"], "there is no column 'categry' to be the label"),
        (["--columns", "path=file,lable=category"], "no 'lable', did you mean 'label'?"),
        (["--columns", "path=file,label=file"], "the column 'file' can be one thing only"),
        (["--columns", "path"], "expected pairs such as path=file,label=category, got 'path'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "datasets"])
def test_mistakes_about_columns_are_one_sentence(call, home, command, words, told):
    words = [word.replace("--columns", "--data.columns") for word in words]
    code = 2 if told.startswith(("no '", "the column 'file'", "expected")) else 1
    err = call(command, "pictures/table.parquet", *words, code=code)
    assert told in err
    assert len(err.splitlines()) == 1


def test_columns_are_for_tables(call, home):
    err = call("datasets", "pictures", "--columns", "path=file", code=2)
    assert "data.columns is for tables" in err


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([3, 1, 3], ("3", "1", "3")),
        ([3.0, 1.5, 3.0], ("3", "1.5", "3")),
        ([True, False, True], ("True", "False", "True")),
        (arrow.array(["x", "y", "x"]).dictionary_encode(), ("x", "y", "x")),
        (arrow.array([2**63, 1, 1], arrow.uint64()), (str(2**63), "1", "1")),
        ([date(1999, 1, 2), date(2000, 1, 2)] * 2, ("1999-01-02", "2000-01-02") * 2),
    ],
)
def test_labels_of_any_kind(tmp_path, values, labels):
    table = arrow.table({"path": ["a", "b", "c", "d"][: len(labels)], "label": values})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    found = Catalog.from_parquet(tmp_path / "t.parquet", check_files=False)
    assert found.labels == labels
    assert found.class_names == tuple(sorted(set(labels)))
    found.to_csv(tmp_path / "t.csv")
    assert Catalog.from_csv(tmp_path / "t.csv", check_files=False).labels == labels


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_columns_by_other_names(tmp_path, form):
    columns = {"file": ["a", "b"], "kind": ["x", "y"], "part": ["train", "test"], "year": [1, 2]}
    file = tmp_path / f"t.{form}"
    if form == "csv":
        lines = [
            ",".join(columns),
            *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
        ]
        file.write_text("\n".join(lines))
    else:
        parquet.write_table(arrow.table(columns), file)
    names = {"path": "file", "label": "kind", "split": "part"}
    found = getattr(Catalog, f"from_{form}")(file, columns=names, check_files=False)
    assert found == Catalog(
        ("a", "b"), ("x", "y"), ("train", "test"), tmp_path, columns={"year": (1, 2)}
    )


def test_a_recipe_says_it_too(call, home):
    (home / "more.yaml").write_text("data:\n  columns: {path: file, label: category}\n")
    words = ["train", "pictures/table.parquet", "--config", "more.yaml", "--print-config"]
    said = yaml.safe_load(call(*words))["data"]["columns"]
    assert said == {"path": "file", "label": "category"}
    said = yaml.safe_load(call(*words, "--data.columns", "split=part"))["data"]["columns"]
    assert said == {"path": "file", "label": "category", "split": "part"}
