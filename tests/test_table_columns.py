"""Tables with other column names, labels of any type, and missing or broken images.

Every command that reads images takes the same options.
"""

import json
from contextlib import redirect_stdout
from datetime import date
from io import StringIO

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import yaml

from proximetry import cli
from proximetry.data import Catalog
from proximetry.models import Embedder
from tests.test_cli_train import small
from tests.training.tiny import make_images

READ = ["--data.columns", "path=file,label=category", "--data.bad-images", "skip"]
BROKEN = [f"class{number:02d}/0.png" for number in range(7)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a table of images, of which seven are broken and one is missing."""
    home = tmp_path_factory.mktemp("own")
    make_images(home / "images", classes=12, each=5)
    files = [f"class{c:02d}/{i}.png" for c in range(12) for i in range(5)]
    for file in BROKEN:
        (home / "images" / file).write_bytes(b"no image")
    columns = {
        "file": [*files, "gone.png"],
        "category": [float(row // 5) for row in range(60)] + [0.0],
        "label": ["unused"] * 61,
        "year": list(range(1960, 2021)),
    }
    parquet.write_table(arrow.table(columns), home / "images" / "table.parquet")
    return home


@pytest.fixture
def call(call, home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("PROXIMETRY_CACHE", str(home / "cache"))
    return call


@pytest.fixture(scope="module")
def printed(home):
    """Train in the folder run; return what `train` prints."""
    words = ["train", home / "images" / "table.parquet", home / "run", *small(), *READ]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.chdir(home)
        patch.setenv("PROXIMETRY_CACHE", str(home / "cache"))
        assert cli.main([str(word) for word in words]) == 0
    return out.getvalue()


def test_train_skips_and_lists_bad_images(home, printed):
    assert "and 3 more; all are in results.json" in printed
    assert "--columns path=file,label=category --bad-images skip" in printed.partition("Next:")[2]
    notes = json.loads((home / "run" / "results.json").read_text())["notes"]
    for name in [*BROKEN, "gone.png"]:
        assert any(f" {name}:" in note for note in notes)
    assert "unused columns: label" in notes
    classes = Embedder.load(home / "run").class_names
    assert set(classes) < {str(number) for number in range(12)}


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "run", "images/table.parquet"],
        ["embed", "run", "images/table.parquet", "--out", "v.npz"],
        ["index", "images/table.parquet", "--model", "run", "--gallery", "GALLERY"],
    ],
)
def test_commands_skip_and_list_bad_images(call, home, printed, words, tmp_path):
    words = [str(tmp_path / "gallery") if word == "GALLERY" else word for word in words]
    err = call(*words, *READ[:2], code=1)
    assert "'gone.png' (row 61)" in err
    assert "and 3 more; all are in" in call(*words, *READ)
    document = json.loads(call(*words, *READ, "--json"))
    assert document["images"] == 53
    for name, reason in zip([*BROKEN, "gone.png"], document["skipped"], strict=True):
        assert name in reason
    if words[0] == "embed":
        assert json.loads((home / "v.npz.skipped.json").read_text()) == document["skipped"]
        labels = [str(row // 5) for row in range(60) if row >= 35 or row % 5]
        assert np.load(home / "v.npz")["labels"].tolist() == labels


def test_broken_image_is_named(call, home, printed):
    table = "path,label\nclass00/0.png,a\nclass00/1.png,a\nclass00/2.png,b\n"
    (home / "images" / "three.csv").write_text(table)
    err = call("evaluate", "run", "images/three.csv", code=1)
    assert "class00/0.png" in err
    assert "--bad-images skip" in err
    err = call("evaluate", "run", "images/three.csv", "--bad-images", "skip", code=1)
    assert "one image each" in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 1, "--data.columns path=COLUMN"),
        (["--data.columns", "path=file,label=categry"], 1, "'categry'"),
        (["--data.columns", "path=file,lable=category"], 2, "'label'"),
        (["--data.columns", "path=file,label=file"], 2, "'file'"),
        (["--data.columns", "path"], 2, "'path'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "datasets"])
def test_wrong_columns_are_one_line_errors(call, home, command, words, code, message):
    assert message in call(command, "images/table.parquet", *words, code=code)
    if not words:
        assert "data.columns" in call("datasets", "images", "--columns", "path=file", code=2)


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
def test_labels_of_any_type(tmp_path, values, labels):
    table = arrow.table({"path": ["a", "b", "c", "d"][: len(labels)], "label": values})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    result = Catalog.from_parquet(tmp_path / "t.parquet", check_files=False)
    assert result.labels == labels
    assert result.class_names == tuple(sorted(set(labels)))
    result.to_csv(tmp_path / "t.csv")
    assert Catalog.from_csv(tmp_path / "t.csv", check_files=False).labels == labels


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_columns_by_other_names(tmp_path, form):
    file = tmp_path / f"t.{form}"
    if form == "csv":
        file.write_text("file,kind,part,year\na,x,train,1\nb,y,test,2\n")
    else:
        columns = {"file": ["a", "b"], "kind": ["x", "y"], "part": ["train", "test"]}
        parquet.write_table(arrow.table({**columns, "year": [1, 2]}), file)
    names = {"path": "file", "label": "kind", "split": "part"}
    result = getattr(Catalog, f"from_{form}")(file, columns=names, check_files=False)
    assert result == Catalog(
        ("a", "b"), ("x", "y"), ("train", "test"), tmp_path, columns={"year": (1, 2)}
    )


def test_columns_of_config_and_option_are_merged(call, home):
    (home / "more.yaml").write_text("data:\n  columns: {path: file, label: category}\n")
    words = ["train", "images/table.parquet", "--config", "more.yaml", "--print-config"]
    columns = yaml.safe_load(call(*words))["data"]["columns"]
    assert columns == {"path": "file", "label": "category"}
    columns = yaml.safe_load(call(*words, "--data.columns", "split=part"))["data"]["columns"]
    assert columns == {"path": "file", "label": "category", "split": "part"}
