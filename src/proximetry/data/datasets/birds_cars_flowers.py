"""CUB-200-2011, Cars196, Oxford Flowers 102: trained on the first half of the classes, tested on
the second.

The datasets' own division into train and test images is another one (every class is in both) and
is not used: for metric learning the classes decide. So a copy that comes as train/ and test/
folders is merged and re-split by class.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from proximetry import data
from proximetry._util.errors import need, some
from proximetry.data.registry import (
    Home,
    Size,
    dataset,
    drop_missing,
    fields_of,
    split_by_class,
    wrong_folder,
)

_CUB, _CARS, _FLOWERS = "CUB-200-2011", "Cars196", "Oxford Flowers 102"
_CARS_TRAIN, _CARS_TEST = Size(8054, 98), Size(8131, 98)
_CUB_HOME = Home(("images.txt", "image_class_labels.txt"), ("CUB_200_2011",))
_CARS_HOME = Home(("cars_annos.mat",), ("stanford_cars", "cars196"))
_FLOWERS_HOME = Home(("imagelabels.mat",), ("flowers-102", "flowers102"))
_DEVKIT = Home(("devkit/cars_train_annos.mat",))


@dataset(
    "cub",
    title=_CUB,
    about="birds",
    layout="CUB_200_2011/images.txt with images/, or <class>/<image>.jpg, or tar shards",
    train=Size(5864, 100),
    test=Size(5924, 100),
    homes=(_CUB_HOME,),
)
def cub(root: Path) -> data.Catalog:
    """Read CUB-200-2011: classes 1 to 100 for training, 101 to 200 for test.

    `root` is the official folder (images.txt, image_class_labels.txt, images/), or holds
    <class>/<image> in folders, below train/ and test/ or not, or in tar shards.
    """
    home = _CUB_HOME.find(root)
    if home is not None:
        return drop_missing(_CUB, _cub_lists(home))
    merged = _merged(_CUB, root, "images.txt and image_class_labels.txt, or <class>/<image>.jpg")
    return split_by_class(merged, *_first_birds(merged))


def _cub_lists(home: Path) -> data.Catalog:
    names = dict(fields_of(home / "images.txt", 2))
    numbers = {image: int(label) for image, label in fields_of(home / "image_class_labels.txt", 2)}
    unlabeled = [image for image in names if image not in numbers]
    if unlabeled:
        raise ValueError(f"{home / 'image_class_labels.txt'} lacks images {some(unlabeled)}")
    return data.Catalog(
        paths=tuple(f"images/{name}" for name in names.values()),
        labels=tuple(name.split("/")[0] for name in names.values()),
        splits=tuple("train" if numbers[image] <= 100 else "test" for image in names),
        root=home,
    )


def _first_birds(merged: data.Catalog) -> tuple[set[str], list[str]]:
    """Return the classes 1 to 100: by the number in their name, else in sorted order."""
    numbers = {name: re.match(r"(\d+)\.", name) for name in merged.class_names}
    if all(numbers.values()):
        return {name for name, match in numbers.items() if match and int(match[1]) <= 100}, []
    note = (
        f"{_CUB}: class folders are not numbered (001.Black_footed_Albatross, …); the first 100 "
        "in sorted order are taken for training, which need not be the official ones"
    )
    return set(merged.class_names[:100]), [note]


@dataset(
    "cars",
    title=_CARS,
    about="car models",
    layout="cars_annos.mat with car_ims/, or devkit/ with cars_train/ and cars_test/, "
    "or <class>/<image>.jpg, or tar shards",
    train=_CARS_TRAIN,
    test=_CARS_TEST,
    homes=(_CARS_HOME, _DEVKIT),
)
def cars(root: Path) -> data.Catalog:
    """Read Cars196: classes 1 to 98 for training, 99 to 196 for test.

    `root` holds cars_annos.mat and car_ims/, or devkit/ with cars_train/ and cars_test/, or
    <class>/<image> in folders, below train/ and test/ or not, or in tar shards. In the latter
    three the classes are put in order by their smallest image number.
    """
    home = _CARS_HOME.find(root)
    if home is not None:
        return drop_missing(_CARS, _cars_annotations(home))
    if _DEVKIT.find(root):
        return drop_missing(_CARS, _cars_devkit(root))
    merged = _merged(_CARS, root, "cars_annos.mat, or devkit/, or <class>/<image>.jpg")
    return split_by_class(merged, *_first_cars(merged))


def _cars_annotations(home: Path) -> data.Catalog:
    data = _load_mat(home / "cars_annos.mat")
    images = [(r["relative_im_path"], r["class"]) for r in data["annotations"].ravel()]
    return _cars_catalog(home, images, data["class_names"])


def _cars_devkit(home: Path) -> data.Catalog:
    kit = home / "devkit"
    labeled = "cars_test_annos_withlabels.mat"
    test = next((f for f in (kit / labeled, home / labeled) if f.is_file()), None)
    if test is None:
        raise wrong_folder(_CARS, kit, f"{labeled} (the test images' classes)")
    images = [
        (f"{folder}/{r['fname']}", r["class"])
        for file, folder in ((kit / "cars_train_annos.mat", "cars_train"), (test, "cars_test"))
        for r in _load_mat(file)["annotations"].ravel()
    ]
    return _cars_catalog(home, images, _load_mat(kit / "cars_meta.mat")["class_names"])


def _load_mat(file: Path) -> Any:
    if not file.is_file():
        raise wrong_folder(_CARS, file.parent, file.name)
    return need("scipy.io", "cars", "Reading .mat files").loadmat(file, squeeze_me=True)


def _cars_catalog(home: Path, images: list[tuple[Any, Any]], class_names: Any) -> data.Catalog:
    names = class_names.ravel()
    return data.Catalog(
        paths=tuple(str(path) for path, _ in images),
        # A slash ("Ram C/V Cargo Van Minivan 2012") stays: labels are not file names.
        labels=tuple(str(names[int(number) - 1]) for _, number in images),
        splits=tuple("train" if int(number) <= 98 else "test" for _, number in images),
        root=home,
    )


def _first_cars(merged: data.Catalog) -> tuple[set[str], list[str]]:
    """Return the classes 1 to 98 of a merged copy, and notes on missing images.

    The images are numbered through, class by class, from 1 to 16185; so the smallest number
    of a class is its place. When classes are missing, the number still gives the half:
    the classes 1 to 98 have the images 1 to 8054.
    """
    total = _CARS_TRAIN.images + _CARS_TEST.images
    digits = [re.findall(r"\d+", Path(path).stem) for path in merged.paths]
    numbers = [int(d[-1]) if d else 0 for d in digits]
    if len(set(numbers)) < len(numbers) or not 1 <= min(numbers) <= max(numbers) <= total:
        note = (
            f"{_CARS}: images are not numbered through from 1 to {total}; the first 98 classes in "
            "sorted order are taken for training, which need not be the official ones"
        )
        return set(merged.class_names[:98]), [note]
    smallest: dict[str, int] = {}
    for label, number in zip(merged.labels, numbers, strict=True):
        smallest[label] = min(number, smallest.get(label, number))
    order = sorted(smallest, key=lambda label: smallest[label])
    if len(order) == _CARS_TRAIN.classes + _CARS_TEST.classes:
        first = set(order[: _CARS_TRAIN.classes])
    else:
        first = {label for label in order if smallest[label] <= _CARS_TRAIN.images}
    missing = [str(number) for number in sorted(set(range(1, total + 1)) - set(numbers))]
    note = (
        f"{_CARS}: {len(merged)} of {total} images, {len(missing)} missing: "
        f"numbers {some(missing, 20)}"
    )
    return first, [note] if missing else []


@dataset(
    "flowers",
    title=_FLOWERS,
    about="flowers",
    layout="imagelabels.mat with jpg/, or <number of the class>/<image>.jpg, or tar shards",
    train=Size(3493, 51),
    test=Size(4696, 51),
    homes=(_FLOWERS_HOME,),
)
def flowers(root: Path) -> data.Catalog:
    """Read Oxford Flowers 102: classes 1 to 51 for training, 52 to 102 for test.

    `root` is the official folder (imagelabels.mat, jpg/), or holds <number of the class>/<image> in
    folders, below train/, valid/ and test/ or not, or in tar shards.
    """
    home = _FLOWERS_HOME.find(root)
    if home is not None:
        numbers = [str(number) for number in _load_mat(home / "imagelabels.mat")["labels"].ravel()]
        catalog = data.Catalog(
            paths=tuple(f"jpg/image_{i:05d}.jpg" for i in range(1, len(numbers) + 1)),
            labels=tuple(numbers),
            splits=("all",) * len(numbers),
            root=home,
        )
        catalog = drop_missing(_FLOWERS, catalog)
    else:
        expected = "imagelabels.mat, or <number of the class>/<image>.jpg"
        catalog = _merged(_FLOWERS, root, expected)
        if not all(name.isdecimal() for name in catalog.class_names):
            raise wrong_folder(_FLOWERS, root, f"{expected}, or tar shards")
    return split_by_class(catalog, {name for name in catalog.class_names if int(name) <= 51})


def _merged(title: str, home: Path, expected: str) -> data.Catalog:
    """Return all images of class folders or shards, without their splits."""
    tars = sorted(home.glob("*.tar"))
    inner = home / "images"
    try:
        folder = inner if inner.is_dir() else home
        catalog = data.Catalog.from_shards(tars) if tars else data.Catalog.from_folder(folder)
    except ValueError:
        if tars:
            raise
        raise wrong_folder(title, home, f"{expected}, or tar shards") from None
    return replace(catalog, splits=("all",) * len(catalog), layout="")
