"""CUB-200-2011 and Cars196: trained on the first half of the classes, tested on the second.

The datasets' own division into train and test images is another one (every class is in both) and
is not used: for metric learning the classes decide. So a copy that comes as train/ and test/
folders is merged and re-split by class.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from proximetry._common import need, some
from proximetry.data.catalog import Catalog
from proximetry.data.datasets._reading import (
    Size,
    dataset,
    drop_missing,
    fields_of,
    find_home,
    wrong_folder,
)

_CUB, _CARS = "CUB-200-2011", "Cars196"
_CARS_TRAIN, _CARS_TEST = Size(8054, 98), Size(8131, 98)


@dataset(
    "cub",
    title=_CUB,
    about="birds",
    layout="CUB_200_2011/images.txt with images/, or <class>/<image>.jpg, or tar shards",
    train=Size(5864, 100),
    test=Size(5924, 100),
)
def cub(root: Path) -> Catalog:
    """Read CUB-200-2011: classes 1 to 100 for training, 101 to 200 for test.

    `root` is the official folder (images.txt, image_class_labels.txt, images/), or holds
    <class>/<image> in folders, below train/ and test/ or not, or in tar shards.
    """
    home = find_home(root, ["CUB_200_2011"], ["images.txt", "image_class_labels.txt"])
    if (home / "images.txt").is_file() and (home / "image_class_labels.txt").is_file():
        return drop_missing(_CUB, _cub_lists(home))
    merged = _merged(_CUB, home, "images.txt and image_class_labels.txt, or <class>/<image>.jpg")
    return _split(merged, *_first_birds(merged))


def _cub_lists(home: Path) -> Catalog:
    names = dict(fields_of(home / "images.txt", 2))
    numbers = {image: int(label) for image, label in fields_of(home / "image_class_labels.txt", 2)}
    unlabelled = [image for image in names if image not in numbers]
    if unlabelled:
        raise ValueError(f"{home / 'image_class_labels.txt'} lacks images {some(unlabelled)}")
    return Catalog(
        paths=tuple(f"images/{name}" for name in names.values()),
        labels=tuple(name.split("/")[0] for name in names.values()),
        splits=tuple("train" if numbers[image] <= 100 else "test" for image in names),
        root=home,
    )


def _first_birds(merged: Catalog) -> tuple[set[str], list[str]]:
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
)
def cars(root: Path) -> Catalog:
    """Read Cars196: classes 1 to 98 for training, 99 to 196 for test.

    `root` holds cars_annos.mat and car_ims/, or devkit/ with cars_train/ and cars_test/, or
    <class>/<image> in folders, below train/ and test/ or not, or in tar shards. In the latter
    three the classes are put in order by their smallest image number.
    """
    home = find_home(root, ["stanford_cars", "cars196"], ["cars_annos.mat"])
    if (home / "cars_annos.mat").is_file():
        return drop_missing(_CARS, _cars_annotations(home))
    if (home / "devkit" / "cars_train_annos.mat").is_file():
        return drop_missing(_CARS, _cars_devkit(home))
    merged = _merged(_CARS, home, "cars_annos.mat, or devkit/, or <class>/<image>.jpg")
    return _split(merged, *_first_cars(merged))


def _cars_annotations(home: Path) -> Catalog:
    data = _load_mat(home / "cars_annos.mat")
    rows = data["annotations"].ravel()
    return _cars_catalog(
        home, [str(r["relative_im_path"]) for r in rows], rows, _names(data["class_names"])
    )


def _cars_devkit(home: Path) -> Catalog:
    kit = home / "devkit"
    labelled = "cars_test_annos_withlabels.mat"
    test = next((f for f in (kit / labelled, home / labelled) if f.is_file()), None)
    if test is None:
        raise wrong_folder(_CARS, kit, f"{labelled} (the test images' classes)")
    names = _names(_load_mat(kit / "cars_meta.mat")["class_names"])
    paths: list[str] = []
    rows: list[Any] = []
    for file, folder in ((kit / "cars_train_annos.mat", "cars_train"), (test, "cars_test")):
        part = _load_mat(file)["annotations"].ravel()
        paths += [f"{folder}/{r['fname']}" for r in part]
        rows += list(part)
    return _cars_catalog(home, paths, rows, names)


def _load_mat(file: Path) -> Any:
    if not file.is_file():
        raise wrong_folder(_CARS, file.parent, file.name)
    return need("scipy.io", "cars", "Reading .mat files").loadmat(file, squeeze_me=True)


def _names(cells: Any) -> list[str]:
    return [str(name) for name in cells.ravel()]


def _cars_catalog(home: Path, paths: list[str], rows: Any, names: list[str]) -> Catalog:
    numbers = [int(r["class"]) for r in rows]
    return Catalog(
        paths=tuple(paths),
        # A slash ("Ram C/V Cargo Van Minivan 2012") stays: labels are not file names.
        labels=tuple(names[n - 1] for n in numbers),
        splits=tuple("train" if n <= 98 else "test" for n in numbers),
        root=home,
    )


def _first_cars(merged: Catalog) -> tuple[set[str], list[str]]:
    """Return the classes 1 to 98 of a merged copy, and what can be said about missing images.

    The images are numbered through, class by class, from 1 to 16185; so the smallest number
    of a class tells its place. When classes are missing, the number still tells the half:
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
    return first, _missing_numbers(merged, set(numbers), total)


def _missing_numbers(merged: Catalog, found: set[int], total: int) -> list[str]:
    missing = [str(n) for n in range(1, total + 1) if n not in found]
    if not missing:
        return []
    return [
        f"{_CARS}: {len(merged)} of {total} images, {len(missing)} missing: "
        f"numbers {some(missing, 20)}"
    ]


def _merged(title: str, home: Path, expected: str) -> Catalog:
    """Return all images of class folders or shards, without their splits."""
    tars = sorted(home.glob("*.tar"))
    if tars:
        return Catalog.from_shards(tars)
    inner = home / "images"
    try:
        catalog = Catalog.from_folder(inner if inner.is_dir() else home)
    except ValueError:
        raise wrong_folder(title, home, f"{expected}, or tar shards") from None
    return replace(catalog, splits=("all",) * len(catalog))


def _split(merged: Catalog, train: set[str], notes: list[str]) -> Catalog:
    """Mark the given classes "train" and all others "test"."""
    splits = tuple("train" if label in train else "test" for label in merged.labels)
    return replace(merged, splits=splits, notes=(*merged.notes, *notes))
