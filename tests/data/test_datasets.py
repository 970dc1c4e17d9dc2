"""Readers of the public datasets, on small trees in their layouts."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from proximetry.data import Catalog, PixelCache, list_datasets, open_dataset, open_image


def tiny():
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), (9, 8, 7)).save(buffer, "PNG")
    return buffer.getvalue()


TINY = tiny()


def place(root, *names):
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(TINY)


def pack(file, *names, data=TINY):
    with tarfile.open(file, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def splits(catalog):
    return dict(zip(catalog.paths, catalog.splits, strict=True))


def make_cub(home, classes=(1, 100, 101, 200)):
    lines, labels = [], []
    for number, code in enumerate(classes, start=1):
        name = f"{code:03d}.Bird/Bird_{number:04d}_77.jpg"
        place(home / "images", name)
        lines.append(f"{number} {name}")
        labels.append(f"{number} {code}")
    (home / "images.txt").write_text("\n".join(lines) + "\n")
    (home / "image_class_labels.txt").write_text("\n".join(labels) + "\n")


@pytest.mark.parametrize("around", [False, True])
def test_cub_official(tmp_path, around):
    make_cub(tmp_path / "CUB_200_2011")
    catalog = open_dataset("cub", tmp_path if around else tmp_path / "CUB_200_2011")
    assert catalog.splits == ("train", "train", "test", "test")
    assert catalog.labels[0] == "001.Bird"
    assert open_image(catalog.file(0)).size == (2, 2)
    assert catalog.notes == (
        "CUB-200-2011 train: 2 of 5864 images, 2 of 100 classes",
        "CUB-200-2011 test: 2 of 5924 images, 2 of 100 classes",
    )
    assert "note: CUB-200-2011 train: 2 of 5864" in catalog.describe()
    with pytest.raises(ValueError, match="2 of 5864 images"):
        open_dataset("cub", tmp_path, strict=True)


def test_cub_lists_that_do_not_fit(tmp_path):
    make_cub(tmp_path)
    (tmp_path / "images/100.Bird/Bird_0002_77.jpg").unlink()
    catalog = open_dataset("cub", tmp_path)
    assert len(catalog) == 3
    assert "images/100.Bird/Bird_0002_77.jpg" in catalog.notes[0]
    (tmp_path / "images").rename(tmp_path / "others")
    with pytest.raises(ValueError, match="none of the 4 listed images exist below"):
        open_dataset("cub", tmp_path)
    (tmp_path / "image_class_labels.txt").write_text("1 1\n2 100\n3 101\n")
    with pytest.raises(ValueError, match=r"image_class_labels\.txt lacks images 4"):
        open_dataset("cub", tmp_path)
    (tmp_path / "images.txt").write_text("1 a/b.jpg\n2\n")
    with pytest.raises(ValueError, match="line 2 has 1 fields, expected 2"):
        open_dataset("cub", tmp_path)


def test_cub_copy_is_split_by_class_not_by_folder(tmp_path):
    names = [f"{c:03d}.B/{s}.jpg" for c in (1, 100, 101, 200) for s in ("x", "y")]
    place(tmp_path, *(f"{'train' if 'x' in n else 'test'}/{n}" for n in names))
    for path, split in splits(open_dataset("cub", tmp_path)).items():
        assert split == ("train" if int(path.split("/")[1][:3]) <= 100 else "test")


def test_cub_complete_tree_has_the_published_counts(tmp_path):
    # 5864 and 5924 images of 100 classes each, in two shards: no notes.
    names = [f"{i % 100 + 1:03d}.B/{i}.webp" for i in range(5864)]
    names += [f"{i % 100 + 101:03d}.B/{i}.webp" for i in range(5924)]
    pack(tmp_path / "cub-00.tar", *names[:7000])
    pack(tmp_path / "cub-01.tar", *names[7000:])
    catalog = open_dataset("cub", tmp_path, strict=True)
    assert catalog.notes == ()
    assert (len(catalog.filter(split="train")), len(catalog.filter(split="test"))) == (5864, 5924)


# Cars196


def cars_names(sizes, folder=""):
    """One class per size, images numbered consecutively; names and numbers sort differently."""
    number, names = 0, []
    for i, size in enumerate(sizes):
        label = f"{(i * 37) % 1000:03d} Car {i}"
        for _ in range(size):
            number += 1
            part = folder if folder else ("train" if number % 2 else "test")
            names.append(f"{part}/{label}/{number:06d}.jpg")
    return names


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("cub", ["train/Albatross/1.jpg", "test/Wren/2.jpg"]),
        ("cars", ["train/a/00001.jpg", "test/b/00001.jpg"]),
    ],
)
def test_unnumbered_folders_are_noted(tmp_path, name, files):
    place(tmp_path, *files)
    assert "not numbered" in open_dataset(name, tmp_path).notes[0]


def test_cars_complete_and_incomplete_trees(tmp_path):
    sizes = [83] * 97 + [8054 - 83 * 97] + [83] * 97 + [8131 - 83 * 97]
    names = [n.replace("all/", "") for n in cars_names(sizes, "all")]
    pack(tmp_path / "cars.tar", *names)
    catalog = open_dataset("cars", tmp_path, strict=True)
    assert len(catalog.filter(split="train")) == 8054
    assert len(catalog.filter(split="test")) == 8131
    for label, split in zip(catalog.labels, catalog.splits, strict=True):
        assert split == ("train" if int(label.split()[-1]) < 98 else "test")
    lost = {5, 6, 9000, 16185}
    pack(tmp_path / "cars.tar", *(n for n in names if int(n[-10:-4]) not in lost))
    catalog = open_dataset("cars", tmp_path)
    assert catalog.notes == (
        "Cars196: 16181 of 16185 images, 4 missing: numbers 5, 6, 9000, 16185",
        "Cars196 train: 8052 of 8054 images, 98 of 98 classes",
        "Cars196 test: 8129 of 8131 images, 98 of 98 classes",
    )
    with pytest.raises(ValueError, match="4 missing: numbers 5"):
        open_dataset("cars", tmp_path, strict=True)


def test_cars_with_missing_classes_are_split_by_image_number(tmp_path):
    place(tmp_path, "b/008054.jpg", "c/008055.jpg", "a/016185.jpg", "d/000001.jpg")
    catalog = open_dataset("cars", tmp_path)
    found = dict(zip(catalog.labels, catalog.splits, strict=True))
    assert found == {"b": "train", "c": "test", "a": "test", "d": "train"}


def car_rows(rows, kind):
    fields = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", kind]
    table = np.zeros((1, len(rows)), dtype=[(f, "O") for f in fields])
    for i, row in enumerate(rows):
        table[0, i] = row
    return table


def cells(names):
    table = np.zeros((1, len(names)), dtype="O")
    table[0, :] = names
    return table


CAR_CLASSES = [f"Car {i}" for i in range(1, 197)]


def test_cars_annotations(tmp_path):
    rows = [(10, 20, 50, 60, c, f"car_ims/{i:06d}.jpg") for i, c in enumerate([1, 98, 99, 196], 1)]
    place(tmp_path, *(row[-1] for row in rows))
    table = {"annotations": car_rows(rows, "relative_im_path"), "class_names": cells(CAR_CLASSES)}
    savemat(tmp_path / "cars_annos.mat", table)
    catalog = open_dataset("cars", tmp_path)
    assert catalog.paths[0] == "car_ims/000001.jpg"
    assert catalog.labels == ("Car 1", "Car 98", "Car 99", "Car 196")
    assert catalog.splits == ("train", "train", "test", "test")


def test_cars_devkit(tmp_path):
    kit = tmp_path / "devkit"
    place(tmp_path, "cars_train/00001.jpg", "cars_train/00002.jpg", "cars_test/00001.jpg")
    kit.mkdir()
    train = car_rows([(1, 1, 2, 2, 150, "00001.jpg"), (1, 1, 2, 2, 3, "00002.jpg")], "fname")
    test = car_rows([(1, 1, 2, 2, 7, "00001.jpg"), (1, 1, 2, 2, 8, "00002.jpg")], "fname")
    savemat(kit / "cars_train_annos.mat", {"annotations": train})
    savemat(kit / "cars_meta.mat", {"class_names": cells(CAR_CLASSES)})
    with pytest.raises(ValueError, match=r"expected cars_test_annos_withlabels\.mat"):
        open_dataset("cars", tmp_path)
    savemat(tmp_path / "cars_test_annos_withlabels.mat", {"annotations": test})
    catalog = open_dataset("cars", tmp_path)
    assert splits(catalog) == {
        "cars_train/00001.jpg": "test",
        "cars_train/00002.jpg": "train",
        "cars_test/00001.jpg": "train",
    }
    assert "1 listed images do not exist: cars_test/00002.jpg" in catalog.notes[0]


# Oxford Flowers 102


def test_flowers_official(tmp_path):
    place(tmp_path, *(f"jpg/image_{number:05d}.jpg" for number in (1, 2, 4)))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[51, 52, 1, 102]], np.uint8)})
    catalog = open_dataset("flowers", tmp_path)
    assert catalog.labels == ("51", "52", "102")
    assert catalog.splits == ("train", "test", "test")
    assert any("image_00003.jpg" in note for note in catalog.notes)


def test_flowers_in_folders_are_split_by_class_number(tmp_path):
    place(tmp_path, "train/9/a.jpg", "valid/51/b.jpg", "test/9/c.jpg", "test/100/d.jpg")
    catalog = open_dataset("flowers", tmp_path)
    found = {Path(path).stem: split for path, split in splits(catalog).items()}
    assert found == {"a": "train", "b": "train", "c": "train", "d": "test"}


# Stanford Online Products, In-Shop


def test_sop(tmp_path):
    home = tmp_path / "Stanford_Online_Products"
    place(home, "bicycle_final/1_0.JPG", "chair_final/2_0.JPG", "chair_final/2_1.JPG")
    head = "image_id class_id super_class_id path\n"
    (home / "Ebay_train.txt").write_text(head + "1 1 1 bicycle_final/1_0.JPG\n")
    rows = "2 11319 4 chair_final/2_0.JPG\n3 11319 4 chair_final/2_1.JPG\n"
    (home / "Ebay_test.txt").write_text(head + rows)
    catalog = open_dataset("sop", tmp_path)
    assert catalog.labels == ("1", "11319", "11319")
    assert catalog.splits == ("train", "test", "test")
    assert catalog.groups == ("bicycle", "chair", "chair")
    assert "train: 1 of 59551 images, 1 of 11318 classes" in catalog.notes[0]


def test_lists_of_names_that_are_not_utf8(tmp_path):
    place(tmp_path, "caf\udce9_final/1_0.JPG", "chair_final/2_0.JPG")
    head = b"image_id class_id super_class_id path\n"
    (tmp_path / "Ebay_train.txt").write_bytes(head + b"1 1 1 caf\xe9_final/1_0.JPG\n")
    (tmp_path / "Ebay_test.txt").write_bytes(head + b"2 2 4 chair_final/2_0.JPG\n")
    assert open_dataset("sop", tmp_path).groups == ("caf\udce9", "chair")


def make_inshop(root, images="Img"):
    rows = [
        ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
        ("img/MEN/Denim/id_00000080/01_1_front.jpg", "id_00000080", "query"),
        ("img/MEN/Denim/id_00000080/01_2_side.jpg", "id_00000080", "gallery"),
    ]
    place(root / images, *(row[0] for row in rows))
    lines = ["3", "image_name item_id evaluation_status", *("   ".join(r) for r in rows)]
    (root / "Eval").mkdir()
    (root / "Eval" / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("images", ["Img", ""])
def test_inshop(tmp_path, images):
    make_inshop(tmp_path, images)
    catalog = open_dataset("inshop", tmp_path)
    assert catalog.splits == ("train", "test", "test")
    assert catalog.queries == (False, True, False)
    assert catalog.galleries == (False, False, True)
    assert catalog.groups == ("WOMEN/Dresses", "MEN/Denim", "MEN/Denim")
    assert "1 queries, 1 gallery images" in catalog.describe()
    title = "In-Shop Clothes Retrieval"
    assert f"{title} query: 1 of 14218 images, 1 of 3985 classes" in catalog.notes
    assert f"{title} test: 2 of 26830 images, 1 of 3985 classes" in catalog.notes


def test_inshop_errors(tmp_path):
    make_inshop(tmp_path)
    partition = tmp_path / "Eval" / "list_eval_partition.txt"
    text = partition.read_text()
    partition.write_text(text.replace("query", "quarry"))
    with pytest.raises(ValueError, match="'quarry' of img/MEN"):
        open_dataset("inshop", tmp_path)
    partition.write_text(text)
    (tmp_path / "Img" / "img").rename(tmp_path / "Img" / "images")
    with pytest.raises(ValueError, match=r"expected Img/img/ \(unpack Img/img.zip\)"):
        open_dataset("inshop", tmp_path)


# Faces, shards, the list of datasets


@pytest.mark.parametrize("around", [False, True])
def test_faces(tmp_path, around):
    place(tmp_path / "lfw", "Ann_B/Ann_B_0001.jpg", "Ann_B/Ann_B_0002.jpg", "C/C_0001.jpg")
    catalog = open_dataset("faces", tmp_path if around else tmp_path / "lfw", strict=True)
    assert catalog.labels == ("Ann_B", "Ann_B", "C")
    assert set(catalog.splits) == {"all"}
    place(tmp_path / "lfw", "C/photo.jpg")
    catalog = open_dataset("faces", tmp_path)
    assert catalog.notes == ("1 images are not named <person>_<number>: C/photo.jpg",)


def test_lfw_is_split_by_people_with_three_images(tmp_path):
    people = {"Ann_B": 3, "C": 2, "D_E": 5, "F": 1, "G": 4}
    files = [f"{n}/{n}_{i + 1:04d}.jpg" for n, images in people.items() for i in range(images)]
    place(tmp_path / "lfw", *files)
    catalog = open_dataset("lfw", tmp_path / "lfw")
    split = dict(zip(catalog.labels, catalog.splits, strict=True))
    assert split == {"Ann_B": "train", "D_E": "test", "G": "train"}
    assert len(catalog) == 12
    assert any("2 of 451 classes" in note for note in catalog.notes)
    assert repr(catalog).startswith("Catalog(12 images, 3 classes, root=")


def test_shards_are_read_in_place(tmp_path):
    pack(tmp_path / "a-00.tar", "x/1.png", "y/2.png", "notes.txt", "lonely.png")
    pack(tmp_path / "a-01.tar", "x/3.png")
    catalog = Catalog.from_shards([tmp_path / "a-00.tar", tmp_path / "a-01.tar"])
    assert catalog.paths == ("a-00.tar::x/1.png", "a-00.tar::y/2.png", "a-01.tar::x/3.png")
    assert catalog.labels == ("x", "y", "x")
    assert catalog.missing_files() == []
    assert np.asarray(open_image(catalog.file(2)))[0, 0].tolist() == [9, 8, 7]
    cache = PixelCache.build(catalog, 2, tmp_path / "cache")
    assert cache[1].shape == (2, 2, 3)
    assert open_dataset("shards", tmp_path) == catalog
    assert open_dataset("shards", tmp_path / "a-01.tar").labels == ("x",)


def test_replaced_shard_is_read_again(tmp_path):
    pack(tmp_path / "a.tar", "x/1.png")
    before = Catalog.from_shards([tmp_path / "a.tar"])
    pack(tmp_path / "a.tar", "x/2.png", "x/3.png")
    assert before.missing_files() == [0]
    with pytest.raises(ValueError, match=r"no member 'x/1\.png'"):
        open_image(before.file(0))


def test_shard_errors(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    (tmp_path / "text.tar").write_text("not a tar file" * 100)
    pack(tmp_path / "flat.tar", "0.png")
    for names, message in (
        ([], "no shards"),
        (["none.tar"], "is not a file"),
        (["a.tar.gz"], r"not a \.tar file"),
        (["text.tar"], "not an uncompressed tar"),
        (["flat.tar"], "no <class>/<image> in the shards"),
    ):
        with pytest.raises(ValueError, match=message):
            Catalog.from_shards([tmp_path / name for name in names])
    pack(tmp_path / "cut.tar", "x/1.png", "x/2.png", data=b"?" * 3000)
    data = (tmp_path / "cut.tar").read_bytes()
    for length in (4096, 4000, 1024):  # between two members, inside one, inside the first
        (tmp_path / "cut.tar").write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"truncated|not an uncompressed tar"):
            Catalog.from_shards([tmp_path / "cut.tar"])


def test_members_cannot_reach_outside(tmp_path):
    (tmp_path / "secret.png").write_bytes(TINY)
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        link = tarfile.TarInfo("x/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "../secret.png"
        tar.addfile(link)
        info = tarfile.TarInfo("../x/up.png")
        info.size = len(TINY)
        tar.addfile(info, io.BytesIO(TINY))
    catalog = Catalog.from_shards([tmp_path / "evil.tar"])
    assert catalog.paths == ("evil.tar::../x/up.png",)
    assert open_image(catalog.file(0)).size == (2, 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cub", r"expected images\.txt and image_class_labels\.txt"),
        ("cars", r"expected cars_annos\.mat, or devkit/"),
        ("sop", r"expected Ebay_train\.txt and Ebay_test\.txt"),
        ("inshop", r"expected Eval/list_eval_partition\.txt"),
        ("folder", r"expected .*<class>/<image>\.jpg"),
        ("faces", r"expected .*<class>/<image>\.jpg"),
        ("shards", "tar files that hold"),
        ("flowers", "or <number of the class>"),
    ],
)
def test_wrong_folder_names_expected_and_actual_files(tmp_path, name, expected):
    (tmp_path / "holiday.txt").write_text("x")
    with pytest.raises(ValueError, match=expected) as caught:
        open_dataset(name, tmp_path)
    assert "holiday.txt" in str(caught.value) or name == "shards"
    with pytest.raises(ValueError, match=r"not a (folder|file)"):
        open_dataset(name, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"'{name}' needs its folder"):
        open_dataset(name)


def test_names(tmp_path, monkeypatch):
    names = "cub cars flowers faces lfw sop inshop glyphs folder csv parquet vectors shards records"
    known = list_datasets()
    assert list(known) == names.split()
    assert all(info.name == name for name, info in known.items())
    assert known["cub"].train == (5864, 100)
    assert known["inshop"].test.classes == 3985
    assert str(known["cars"]).startswith(
        "Cars196: car models, 98 classes for training and 98 for test (cars_annos.mat with"
    )
    assert str(known["folder"]).startswith("your own images (<class>/<image>.jpg")
    with pytest.raises(ValueError, match="unknown dataset 'car', did you mean 'cars'"):
        open_dataset("car", tmp_path)
    monkeypatch.setattr("proximetry.data.datasets.glyphs.characters", lambda: tuple("AB"))
    assert open_dataset("glyphs", tmp_path).class_names == ("A", "B")


def test_listing_datasets_imports_no_heavy_package():
    code = """
import sys
from proximetry.data import list_datasets
assert all(map(str, list_datasets().values()))
assert not {"torch", "PIL", "numpy", "pyarrow"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
