"""Images inside plain tar files, read in place: "shard.tar::class/image.webp".

A tar file is a row of 512-byte headers and contents, so one pass over the headers gives every
member's place, and an image is then one seek and one read. Nothing is ever unpacked, so a
member's name cannot reach outside the archive.
"""

import os
import tarfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath

from proximetry.data.folders import is_image

SEPARATOR = "::"


def split_shard_path(path: str) -> tuple[str, str]:
    """Split "shard.tar::member" into file and member; the member of a plain path is empty."""
    head, mark, member = path.partition(f".tar{SEPARATOR}")
    return (f"{head}.tar", member) if mark else (path, "")


def shard_members(shard: str | os.PathLike[str]) -> Mapping[str, tuple[int, int]]:
    """Return {member: (offset, size)} of the plain files in an uncompressed tar."""
    status = os.stat(shard)
    return _members(os.fspath(shard), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _members(shard: str, size: int, mtime_ns: int) -> Mapping[str, tuple[int, int]]:
    # Size and time are part of the key, so a shard that was replaced is read again.
    try:
        with tarfile.open(shard, "r:") as tar:
            found = {m.name: (m.offset_data, m.size) for m in tar if m.isreg()}
    except tarfile.TarError as error:
        raise ValueError(f"{shard} is not an uncompressed tar file: {error}") from error
    with open(shard, "rb") as file:
        file.seek(max(0, size - 1024))
        if file.read() != bytes(1024):  # the two empty blocks that every complete tar ends with
            raise ValueError(
                f"{shard} is cut short after {len(found)} members: its end mark is missing"
            )
    return found


def read_bytes(path: str) -> bytes:
    """Return the bytes of a file or of a shard's member."""
    name, member = split_shard_path(path)
    if not member:
        return Path(name).read_bytes()
    members = shard_members(name)
    if member not in members:
        raise ValueError(f"{name} has no member {member!r}")
    start, size = members[member]
    with open(name, "rb") as file:
        file.seek(start)
        return file.read(size)


def scan_shards(files: Sequence[Path]) -> tuple[Path, tuple[str, ...], tuple[str, ...]]:
    """Return the folder around the shards, and paths and labels; see Catalog.from_shards."""
    if not files:
        raise ValueError("no shards given; expected tar files that hold <class>/<image>")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not a file; expected a tar that holds <class>/<image>")
        if file.suffix != ".tar":
            raise ValueError(f"{file} is not a .tar file; compressed ones must be unpacked first")
    root = Path(os.path.commonpath([f.resolve().parent for f in files]))
    paths, labels = [], []
    for file in files:
        relative = file.resolve().relative_to(root).as_posix()
        for member in shard_members(file):
            place = PurePosixPath(member)
            if is_image(place.name) and place.parent.name:
                paths.append(f"{relative}{SEPARATOR}{member}")
                labels.append(place.parent.name)
    if not paths:
        raise ValueError(f"{files[0]} holds no <class>/<image>, nor do the other shards")
    return root, tuple(paths), tuple(labels)
