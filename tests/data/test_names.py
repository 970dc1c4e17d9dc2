"""Classes from the names of images, in folders without class folders."""

import pytest
from PIL import Image

from proximetry.data import Catalog, open_dataset
from proximetry.data.folders import label_of_name
from proximetry.training import Recipe


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("boxer_12.jpg", "boxer"),
        ("saint_bernard_103.jpg", "saint_bernard"),
        ("boxer-1.final.jpg", ""),
        ("great dane (3).png", "great dane"),
        ("boxer.007.jpeg", "boxer"),
        ("route 66 - 5.jpg", "route 66"),
        ("boxer12.jpg", ""),
        ("boxer.jpg", ""),
        ("12.jpg", ""),
    ],
)
def test_label_is_before_the_last_separator_and_number(name, label):
    assert label_of_name(name, "auto") == label


def write(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    return root


def test_flat_folder_is_labeled_by_names(tmp_path):
    root = write(tmp_path / "flat", "pug_1.png", "pug_2.png", "boxer_1.png", "more/boxer_2.png")
    catalog = Catalog.from_folder(root, labels_from_name="auto")
    assert dict(zip(catalog.paths, catalog.labels, strict=True)) == {
        "boxer_1.png": "boxer",
        "more/boxer_2.png": "boxer",
        "pug_1.png": "pug",
        "pug_2.png": "pug",
    }
    assert set(catalog.splits) == {"all"}
    assert catalog.layout == "images: 2 classes: boxer, pug"
    first = Catalog.from_folder(root, labels_from_name=r"^(\w)")
    assert first.class_names == ("b", "p")


def test_folders_of_splits_apply_to_names_too(tmp_path):
    root = write(tmp_path / "flat", "train/pug_1.png", "test/boxer_1.png")
    catalog = open_dataset("folder", root, labels_from_name="auto")
    assert list(zip(catalog.splits, catalog.labels, strict=True)) == [
        ("test", "boxer"),
        ("train", "pug"),
    ]


def test_names_without_a_class_are_an_error(tmp_path):
    root = write(tmp_path / "flat", "pug_1.png", "IMG.png")
    with pytest.raises(ValueError, match=r"no class in 1 of 2 images of .*IMG\.png"):
        Catalog.from_folder(root, labels_from_name="auto")
    with pytest.raises(ValueError, match=r"flat holds no images.*labels-from-name auto"):
        Catalog.from_folder(root)
    with pytest.raises(ValueError, match="for folders, not for the dataset csv"):
        open_dataset("csv", root / "a.csv", labels_from_name="auto")
    for rule, reason in (("(", "not a regular expression"), (r"\w+", "has no group")):
        with pytest.raises(ValueError, match=rf"data.labels_from_name.*{reason}"):
            Recipe.load({"data.labels_from_name": rule})


def test_commands_take_labels_from_names(call, tmp_path):
    root = write(tmp_path / "flat", *(f"{name}_{i}.png" for name in "abc" for i in range(2)))
    words = ("train", root, tmp_path / "run", "--labels-from-name", "auto", "--dry-run")
    small = ("--model", "small_convnet", "--model.weights", "none", "--model.image-size", "16")
    assert "3 classes to train on" in call(*words, *small)
    assert "6 images of 3 classes" in call("datasets", root, "--labels-from-name", "auto")
