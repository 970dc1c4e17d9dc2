"""`resolve_source`: names of datasets and paths."""

from pathlib import Path

import pytest

from proximetry.data import open_dataset, resolve_source


def fill(root, *names):
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return root


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ant/0.png", "bee/1.png"], "folder"),
        (["train/ant/0.png", "test/bee/1.png"], "folder"),
        (["images.txt", "ant/0.png"], "folder"),
        (["images.txt", "image_class_labels.txt", "images/001.Bird/0.jpg"], "cub"),
        (["CUB_200_2011/images.txt", "CUB_200_2011/image_class_labels.txt"], "cub"),
        (["cars_annos.mat", "car_ims/1.jpg"], "cars"),
        (["devkit/cars_train_annos.mat"], "cars"),
        (["Ebay_train.txt", "Ebay_test.txt"], "sop"),
        (["Eval/list_eval_partition.txt"], "inshop"),
        (["a.tar", "b.tar"], "shards"),
        (["a.tar", "ant/0.png"], "folder"),
        ("a.csv", "csv"),
        ("b.PARQUET", "parquet"),
        ("c.tar", "shards"),
    ],
)
def test_folder_is_identified_by_its_files_and_file_by_its_suffix(tmp_path, names, expected):
    fill(tmp_path, *([names] if isinstance(names, str) else names))
    path = tmp_path / names if isinstance(names, str) else tmp_path
    assert resolve_source(path) == (expected, path)


def test_name_with_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source("cub", tmp_path) == ("cub", tmp_path)
    assert resolve_source("cub", "~/birds") == ("cub", tmp_path / "birds")
    assert resolve_source("cub") == ("cub", None)
    assert resolve_source("glyphs") == ("glyphs", None)
    fill(tmp_path, "pictures/ant/0.png")
    assert resolve_source("~/pictures") == ("folder", tmp_path / "pictures")


def test_folder_named_like_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(tmp_path, "cub/ant/0.png", "glyphs/ant/0.png"))
    assert resolve_source("cub") == ("folder", Path("cub"))
    assert resolve_source("cub", "elsewhere") == ("cub", Path("elsewhere"))
    assert resolve_source("glyphs") == ("glyphs", None)
    assert resolve_source("./glyphs") == ("folder", Path("glyphs"))


def test_unknown_sources_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"no folder or file 'cubs', did you mean 'cub'\?"):
        resolve_source("cubs")
    with pytest.raises(ValueError, match=r"'nope' and no dataset of that name"):
        resolve_source("nope")
    fill(tmp_path, "notes.txt", "ant/0.png", "images.zip")
    with pytest.raises(ValueError, match="Unzip"):
        resolve_source(tmp_path / "images.zip")
    with pytest.raises(ValueError, match=r"notes\.txt is neither a folder nor a \.csv, \.parquet"):
        resolve_source(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="root only with the name of a dataset"):
        resolve_source(tmp_path, "elsewhere")


def test_table_without_rows_is_rejected(tmp_path):
    (tmp_path / "t.csv").write_text("path,label\n")
    with pytest.raises(ValueError, match="no rows"):
        open_dataset("csv", tmp_path / "t.csv")
