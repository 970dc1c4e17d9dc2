"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Give a name beside to write to; at the end it becomes the file, or the old one stays.

    All of it is on the disk before it gets its name, so this holds for a killed process and for a
    failing computer alike.
    """
    part = file.with_name(f".{file.name}.{uuid4().hex}.part")
    try:
        yield part
        with part.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(part, file)
        _sync_folder(file.parent)
    finally:
        part.unlink(missing_ok=True)


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the new one is there, whole."""
    with written_whole(file) as part:
        part.write_bytes(content)


def _sync_folder(folder: Path) -> None:
    """See to it that the new name is on the disk too; only POSIX systems can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
