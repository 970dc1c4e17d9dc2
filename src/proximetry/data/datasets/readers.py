"""Readers of the public datasets.

CUB-200-2011, Cars196 and Oxford Flowers 102 are split by class: the first half for training, the
second for test. Their official train and test images, which share all classes, are merged first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first
from proximetry._util.imports import import_optional
from proximetry.data.catalog import Catalog
from proximetry.data.datasets import DATASETS, DatasetInfo
from proximetry.data.folders import class_folders, is_image

_CUB, _CARS, _FLOWERS = DATASETS["cub"], DATASETS["cars"], DATASETS["flowers"]
_SOP, _INSHOP = DATASETS["sop"], DATASETS["inshop"]


def cub(root: Path) -> Catalog:
    """Read CUB-200-2011: classes 1 to 100 for training, 101 to 200 for test.

    `root` is the official folder (images.txt, image_class_labels.txt, images/), or holds
    <class>/<image> in folders, optionally inside train/ and test/, or in tar shards.
    """
    home = _CUB.find(root)
    if home is None:
        expected = "images.txt and image_class_labels.txt, or <class>/<image>.jpg"
        return _split_birds(_merged(_CUB, root, expected))
    names = dict(fields_of(home / "images.txt", 2))
    numbers = {image: int(label) for image, label in fields_of(home / "image_class_labels.txt", 2)}
    if unlabeled := [image for image in names if image not in numbers]:
        raise ValueError(f"{home / 'image_class_labels.txt'} lacks images {join_first(unlabeled)}")
    catalog = Catalog(
        paths=tuple(f"images/{name}" for name in names.values()),
        labels=tuple(name.split("/")[0] for name in names.values()),
        splits=tuple("train" if numbers[image] <= 100 else "test" for image in names),
        root=home,
    )
    return drop_missing(_CUB, catalog)


def _split_birds(merged: Catalog) -> Catalog:
    """Assign classes 1 to 100 to the training split, by number, else in sorted order."""
    numbers = {name: re.match(r"(\d+)\.", name) for name in merged.class_names}
    if all(numbers.values()):
        first = {name for name, match in numbers.items() if match and int(match[1]) <= 100}
        return split_by_class(merged, first)
    note = (
        f"{_CUB.title}: class folders are not numbered (001.Black_footed_Albatross, …); the first "
        "100 in sorted order are used for training, which may differ from the official split"
    )
    return split_by_class(merged, set(merged.class_names[:100]), note)


def cars(root: Path) -> Catalog:
    """Read Cars196: classes 1 to 98 for training, 99 to 196 for test.

    `root` holds cars_annos.mat and car_ims/, or devkit/ with cars_train/ and cars_test/, or
    <class>/<image> in folders, optionally inside train/ and test/, or in tar shards. Without the
    official files, classes are ordered by their smallest image number.
    """
    home = _CARS.find(root)
    if home is None:
        expected = "cars_annos.mat, or devkit/, or <class>/<image>.jpg"
        return _split_cars(_merged(_CARS, root, expected))
    if (home / "cars_annos.mat").is_file():
        content = _load_mat(home / "cars_annos.mat")
        images = [(r["relative_im_path"], r["class"]) for r in content["annotations"].ravel()]
        names = content["class_names"].ravel()
    else:
        kit, labeled = home / "devkit", "cars_test_annos_withlabels.mat"
        test = next((f for f in (kit / labeled, home / labeled) if f.is_file()), None)
        if test is None:
            raise wrong_folder(_CARS, kit, f"{labeled} (the test images' classes)")
        images = [
            (f"{folder}/{r['fname']}", r["class"])
            for file, folder in ((kit / "cars_train_annos.mat", "cars_train"), (test, "cars_test"))
            for r in _load_mat(file)["annotations"].ravel()
        ]
        names = _load_mat(kit / "cars_meta.mat")["class_names"].ravel()
    catalog = Catalog(
        paths=tuple(str(path) for path, _ in images),
        # A slash ("Ram C/V Cargo Van Minivan 2012") stays: labels are not file names.
        labels=tuple(str(names[int(number) - 1]) for _, number in images),
        splits=tuple("train" if int(number) <= 98 else "test" for _, number in images),
        root=home,
    )
    return drop_missing(_CARS, catalog)


def _load_mat(file: Path) -> Any:
    if not file.is_file():
        raise wrong_folder(_CARS, file.parent, file.name)
    return import_optional("scipy.io", "cars", "Reading .mat files").loadmat(file, squeeze_me=True)


def _split_cars(merged: Catalog) -> Catalog:
    """Assign classes 1 to 98 to the training split, and report missing images.

    The images are numbered by class from 1 to 16185, so the smallest number of a class gives its
    position, and the classes 1 to 98 have the images 1 to 8054.
    """
    total = 16185
    digits = [re.findall(r"\d+", Path(path).stem) for path in merged.paths]
    numbers = [int(d[-1]) if d else 0 for d in digits]
    if len(set(numbers)) < len(numbers) or not 1 <= min(numbers) <= max(numbers) <= total:
        note = (
            f"{_CARS.title}: images are not numbered from 1 to {total}; the first 98 classes "
            "in sorted order are used for training, which may differ from the official split"
        )
        return split_by_class(merged, set(merged.class_names[:98]), note)
    smallest: dict[str, int] = {}
    for label, number in zip(merged.labels, numbers, strict=True):
        smallest[label] = min(number, smallest.get(label, number))
    order = sorted(smallest, key=smallest.__getitem__)
    complete = len(order) == 196
    first = order[:98] if complete else [label for label in order if smallest[label] <= 8054]
    missing = [str(number) for number in sorted(set(range(1, total + 1)) - set(numbers))]
    note = (
        f"{_CARS.title}: {len(merged)} of {total} images, {len(missing)} missing: "
        f"numbers {join_first(missing, 20)}"
    )
    return split_by_class(merged, set(first), note if missing else "")


def flowers(root: Path) -> Catalog:
    """Read Oxford Flowers 102: classes 1 to 51 for training, 52 to 102 for test.

    `root` is the official folder (imagelabels.mat, jpg/), or holds <number of the class>/<image> in
    folders, optionally inside train/, valid/ and test/, or in tar shards.
    """
    home = _FLOWERS.find(root)
    if home is not None:
        numbers = [str(number) for number in _load_mat(home / "imagelabels.mat")["labels"].ravel()]
        catalog = Catalog(
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


def _merged(info: DatasetInfo, home: Path, expected: str) -> Catalog:
    """Return all images of class folders or shards, without their splits."""
    tars = sorted(home.glob("*.tar"))
    folder = home / "images" if (home / "images").is_dir() else home
    try:
        catalog = Catalog.from_shards(tars) if tars else Catalog.from_folder(folder)
    except ValueError:
        if tars:
            raise
        raise wrong_folder(info, home, f"{expected}, or tar shards") from None
    return replace(catalog, splits=("all",) * len(catalog), layout="")


def sop(root: Path) -> Catalog:
    """Read Stanford Online Products by its lists; the kind of product is the group."""
    home = _SOP.find(root)
    if home is None:
        raise wrong_folder(_SOP, root, "Ebay_train.txt and Ebay_test.txt")
    rows = [
        (path, label, split, path.split("/")[0].removesuffix("_final"))
        for split, name in (("train", "Ebay_train.txt"), ("test", "Ebay_test.txt"))
        for _, label, _, path in fields_of(home / name, 4, skip=1)
    ]
    if not rows:
        raise ValueError(f"{_SOP.title}: the lists in {home} are empty")
    paths, labels, splits, groups = zip(*rows, strict=True)
    return drop_missing(_SOP, Catalog(paths, labels, splits, home, groups=groups))


def inshop(root: Path) -> Catalog:
    """Read In-Shop Clothes Retrieval by its partition; the kind of garment is the group."""
    base = _INSHOP.find(root) or root
    candidates = (base / "Eval" / "list_eval_partition.txt", base / "list_eval_partition.txt")
    partition = next((file for file in candidates if file.is_file()), None)
    if partition is None:
        raise wrong_folder(_INSHOP, base, "Eval/list_eval_partition.txt")
    # The paths in the list begin with img/.
    home = next((home for home in (base / "Img", base) if (home / "img").is_dir()), None)
    if home is None:
        raise wrong_folder(_INSHOP, base, "Img/img/ (unpack Img/img.zip)")
    # The first line is a count, the second the names of the columns.
    rows = list(fields_of(partition, 3, skip=2))
    for path, _, role in rows:
        if role not in ("train", "query", "gallery"):
            raise ValueError(f"{partition}: {role!r} of {path} is not one of train, query, gallery")
    catalog = Catalog(
        paths=tuple(path for path, _, _ in rows),
        labels=tuple(label for _, label, _ in rows),
        splits=tuple("train" if role == "train" else "test" for _, _, role in rows),
        root=home,
        queries=tuple(role == "query" for _, _, role in rows),
        galleries=tuple(role == "gallery" for _, _, role in rows),
        groups=tuple("/".join(path.split("/")[1:3]) for path, _, _ in rows),
    )
    return drop_missing(_INSHOP, catalog)


def faces(root: Path) -> Catalog:
    """Read <person>/<person>_0001.jpg, the layout of LFW; other names are noted.

    `root` may also be the parent folder.
    """
    catalog = Catalog.from_folder(people_folder(root))
    odd = [
        path
        for path, person in zip(catalog.paths, catalog.labels, strict=True)
        if not re.fullmatch(re.escape(person) + r"_\d+", PurePosixPath(path).stem)
    ]
    notes = [f"{len(odd)} images are not named <person>_<number>: {join_first(odd)}"] if odd else []
    return replace(catalog, notes=(*catalog.notes, *notes))


def people_folder(root: Path) -> Path:
    """Return the folder with one sub-folder per person: `root`, or its only sub-folder."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder; expected <person>/<person>_0001.jpg in it")
    folders = class_folders(root)
    if len(folders) == 1 and not any(is_image(p.name) for p in folders[0].iterdir()):
        return folders[0]
    return root


def lfw(root: Path) -> Catalog:
    """Read the people with at least three images; every second name is for test.

    This is not a published split; LFW publishes pairs.
    """
    catalog = faces(root)
    images = Counter(catalog.labels)
    catalog = catalog.subset([row for row, name in enumerate(catalog.labels) if images[name] >= 3])
    return split_by_class(catalog, set(sorted(set(catalog.labels))[::2]))


def drop_missing(info: DatasetInfo, catalog: Catalog) -> Catalog:
    """Exclude listed images that do not exist, and list them in a note."""
    missing = catalog.missing_files()
    if not missing:
        return catalog
    if len(missing) == len(catalog):
        raise ValueError(
            f"{info.title}: none of the {len(catalog)} listed images exist below {catalog.root}; "
            f"expected, for example, {catalog.file(0)}"
        )
    existing = catalog.subset(sorted(set(range(len(catalog))) - set(missing)))
    names = join_first([catalog.paths[i] for i in missing])
    note = f"{info.title}: {len(missing)} listed images do not exist: {names}"
    return replace(existing, notes=(note,))


def split_by_class(catalog: Catalog, train: set[str], note: str = "") -> Catalog:
    """Mark the given classes "train" and all others "test"."""
    splits = tuple("train" if label in train else "test" for label in catalog.labels)
    notes = (*catalog.notes, note) if note else catalog.notes
    return replace(catalog, splits=splits, notes=notes)


def wrong_folder(info: DatasetInfo, root: Path, expected: str) -> ValueError:
    """Return the error for a folder with other contents."""
    names = join_first([p.name for p in sorted(root.iterdir())]) or "nothing"
    return ValueError(f"{info.title}: expected {expected} in {root}, found {names}")


def fields_of(file: Path, count: int, skip: int = 0) -> Iterator[list[str]]:
    """Yield the fields of every line of a space-separated list, checked."""
    with file.open(encoding="utf-8", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, start=1):
            if number <= skip or not line.strip():
                continue
            # The last field may hold spaces: a file name.
            values = line.split(maxsplit=count - 1)
            if len(values) != count:
                raise ValueError(
                    f"{file}: line {number} has {len(values)} fields, expected {count}: {line!r}"
                )
            yield [value.strip() for value in values]
