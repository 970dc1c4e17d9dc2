"""The bytes of images: files, and members of plain tar files ("shard.tar::class/image.webp").

A tar file is a row of 512-byte headers and contents, so one pass over the headers gives every
member's place, and an image is then one seek and one read. Nothing is ever unpacked, so a
member's name cannot reach outside the archive.
"""

import errno
import io
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from proximetry.data.folders import Scan, by_place, is_image, layout, split_called

Stream: TypeAlias = io.BufferedReader | io.BytesIO

SEPARATOR = "::"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def split_shard_path(path: str) -> tuple[str, str]:
    """Split "shard.tar::member" into file and member; the member of a plain path is empty."""
    head, mark, member = path.partition(f".tar{SEPARATOR}")
    return (f"{head}.tar", member) if mark else (path, "")


def shard_members(shard: str | os.PathLike[str]) -> Mapping[str, tuple[int, int]]:
    """Return {member: (offset, size)} of the plain files in an uncompressed tar."""
    return _members(os.fspath(shard), file_state(shard))


def file_state(file: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return what changes when a file does: a new size, time or place on the disk.

    The time of the last change to a file cannot be set back as that of its contents can.
    """
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@lru_cache(maxsize=1024)
def _members(shard: str, state: tuple[int, ...]) -> Mapping[str, tuple[int, int]]:
    # The state is part of the key, so a shard that was replaced is read again.
    with open_file(shard) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                found = {m.name: (m.offset_data, m.size) for m in tar if m.isreg()}
        except tarfile.TarError as error:
            raise ValueError(f"{shard} is not an uncompressed tar file: {error}") from error
        file.seek(max(0, state[0] - 1024))
        if file.read() != bytes(1024):  # the two empty blocks that every complete tar ends with
            raise ValueError(
                f"{shard} is truncated after {len(found)} members: its end mark is missing"
            )
    return found


def open_file(name: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading; a pipe or a device might never end."""
    kind = stat.S_IFMT(os.stat(name).st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a special file')}, not a file", name)
    return open(name, "rb")


def open_path(path: str) -> Stream:
    """Open a file, or a copy of a shard's member."""
    name, member = split_shard_path(path)
    if not member:
        return open_file(name)
    members = shard_members(name)
    if member not in members:
        raise ValueError(f"{name} has no member {member!r}")
    start, size = members[member]
    with open_file(name) as file:
        file.seek(start)
        return io.BytesIO(file.read(size))


def scan_shards(files: Sequence[Path]) -> tuple[Path, Scan]:
    """Return the folder around the shards, and the images in them; see Catalog.from_shards."""
    if not files:
        raise ValueError("no shards given; expected tar files that hold <class>/<image>")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not a file; expected a tar that holds <class>/<image>")
        if file.suffix != ".tar":
            raise ValueError(f"{file} is not a .tar file; compressed ones must be unpacked first")
    root = Path(os.path.commonpath([f.resolve().parent for f in files]))
    rows: list[tuple[str, str, str]] = []
    for file in files:
        relative = file.resolve().relative_to(root).as_posix()
        for member in shard_members(file):
            place = PurePosixPath(member)
            if is_image(place.name) and place.parent.name:
                home = place.parent.parent.name
                rows.append((f"{relative}{SEPARATOR}{member}", place.parent.name, home))
    if not rows:
        raise ValueError(f"{files[0]} holds no <class>/<image>, nor do the other shards")
    named = {split_called(home) for _, _, home in rows}
    divided = None not in named or len(named) > 2
    stray = [path for path, _, home in rows if divided and not split_called(home)]
    rows = [row for row in rows if not divided or split_called(row[2])]
    return root, Scan(
        tuple(path for path, _, _ in rows),
        tuple(label for _, label, _ in rows),
        tuple(split_called(home) or "" if divided else "all" for _, _, home in rows),
        layout(by_place((f"{home}/" if divided else "", one) for _, one, home in rows), stray),
        (),
    )
