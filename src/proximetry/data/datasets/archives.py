"""Packed tar shards as a source of images."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from proximetry.data.catalog import Catalog
from proximetry.data.folders import is_image
from proximetry.data.tar_members import SEPARATOR, shard_members


def shards(paths: Sequence[str | os.PathLike[str]]) -> Catalog:
    """Read tar files that hold <class>/<image>; the images stay where they are.

    A class may be spread over several shards. The class is the folder next to the image.
    """
    files = [Path(p) for p in paths]
    if not files:
        raise ValueError("no shards given; expected tar files that hold <class>/<image>")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not a file; expected a tar that holds <class>/<image>")
        if file.suffix != ".tar":
            raise ValueError(f"{file} is not a .tar file; compressed ones must be unpacked first")
    root = Path(os.path.commonpath([f.resolve().parent for f in files]))
    names, labels = [], []
    for file in files:
        relative = file.resolve().relative_to(root).as_posix()
        for member in shard_members(file):
            place = PurePosixPath(member)
            if is_image(place.name) and place.parent.name:
                names.append(f"{relative}{SEPARATOR}{member}")
                labels.append(place.parent.name)
    if not names:
        raise ValueError(f"{files[0]} holds no <class>/<image>, nor do the other shards")
    return Catalog(tuple(names), tuple(labels), ("all",) * len(names), root)
