"""Aligned faces, one folder per person."""

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

from proximetry._common import some
from proximetry.data.catalog import Catalog
from proximetry.data.datasets._reading import dataset
from proximetry.data.folders import class_folders, is_image


@dataset("faces", title="aligned faces, as LFW comes", layout="<person>/<person>_0001.jpg")
def faces(root: Path) -> Catalog:
    """Read <person>/<person>_0001.jpg, as LFW and its aligned versions come.

    `root` may also be the folder around it. Images named otherwise are kept and noted.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected <person>/<person>_0001.jpg in it")
    folders = class_folders(root)
    if len(folders) == 1 and not any(is_image(p.name) for p in folders[0].iterdir()):
        root = folders[0]
    catalog = Catalog.from_folder(root)
    odd = [path for path in catalog.paths if not _regular(path)]
    notes = [f"{len(odd)} images are not named <person>_<number>: {some(odd)}"] if odd else []
    return replace(catalog, notes=(*catalog.notes, *notes))


def _regular(path: str) -> bool:
    place = PurePosixPath(path)
    return re.fullmatch(re.escape(place.parent.name) + r"_\d+", place.stem) is not None
