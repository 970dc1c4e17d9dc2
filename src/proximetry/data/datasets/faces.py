"""Aligned faces, one folder per person."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath

from proximetry import data
from proximetry._util.errors import UsageError, some
from proximetry.data.folders import class_folders, is_image
from proximetry.data.registry import Size, dataset, split_by_class


@dataset("faces", title="aligned faces, as LFW comes", layout="<person>/<person>_0001.jpg")
def faces(root: Path) -> data.Catalog:
    """Read <person>/<person>_0001.jpg, as LFW and its aligned versions come.

    `root` may also be the folder around it. Images named otherwise are kept and noted.
    """
    catalog = data.Catalog.from_folder(people_folder(root))
    odd = [path for path in catalog.paths if not _regular(path)]
    notes = [f"{len(odd)} images are not named <person>_<number>: {some(odd)}"] if odd else []
    return replace(catalog, notes=(*catalog.notes, *notes))


def people_folder(root: Path) -> Path:
    """Return the folder that holds one folder per person: this one, or the only one in it."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder; expected <person>/<person>_0001.jpg in it")
    folders = class_folders(root)
    if len(folders) == 1 and not any(is_image(p.name) for p in folders[0].iterdir()):
        return folders[0]
    return root


def _regular(path: str) -> bool:
    place = PurePosixPath(path)
    return re.fullmatch(re.escape(place.parent.name) + r"_\d+", place.stem) is not None


@dataset(
    "lfw",
    title="Labeled Faces in the Wild, people with three images or more",
    layout="<person>/<person>_0001.jpg",
    about="celebrities, every second one of whom is for training",
    train=Size(images=3902, classes=451),
    test=Size(images=3704, classes=450),
)
def lfw(root: Path) -> data.Catalog:
    """Read the people with three images or more: of their sorted names every second is for test.

    This is no published split: those of LFW are of pairs, not of people to be found.
    """
    catalog = faces(root)
    images = Counter(catalog.labels)
    catalog = catalog.subset([row for row, name in enumerate(catalog.labels) if images[name] >= 3])
    return split_by_class(catalog, set(sorted(set(catalog.labels))[::2]))
