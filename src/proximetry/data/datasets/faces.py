"""Aligned faces, one folder per person."""

import os
import re
from pathlib import Path, PurePosixPath

from proximetry._common import some
from proximetry.data.catalog import Catalog
from proximetry.data.datasets.counts import finish
from proximetry.data.folders import class_folders, is_image


def faces(root: str | os.PathLike[str], *, strict: bool = False) -> Catalog:
    """Read <person>/<person>_0001.jpg, as LFW and its aligned versions come.

    `root` may also be the folder around it. Images named otherwise are kept and noted.
    """
    home = Path(root)
    if not home.is_dir():
        raise ValueError(f"{home} is not a folder; expected <person>/<person>_0001.jpg in it")
    folders = class_folders(home)
    if len(folders) == 1 and not any(is_image(p.name) for p in folders[0].iterdir()):
        home = folders[0]
    catalog = Catalog.from_folder(home)
    odd = [path for path in catalog.paths if not _regular(path)]
    notes = [f"{len(odd)} images are not named <person>_<number>: {some(odd)}"] if odd else []
    return finish(catalog, notes, strict)


def _regular(path: str) -> bool:
    place = PurePosixPath(path)
    return re.fullmatch(re.escape(place.parent.name) + r"_\d+", place.stem) is not None
