"""A folder that holds decoded pixels: written whole under a lock, checked when it is opened.

    <key>/pixels.bin    the images one after another, each height × width × 3 bytes
    <key>/index.npy     offset, height and width of each
    <key>/header.json   what it is, how large, its checksums, and which images could not be read

The folder is filled under another name and renamed at the end, so one called <key> is complete.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt

FORMAT = "proximetry pixels 1"
_BLOCK = 1 << 26


class BrokenStoreError(ValueError):
    """The files are not what their header says."""


@dataclass(frozen=True)
class Header:
    """What a store says about itself."""

    format: str
    key: str
    images: int
    bytes: int
    index_crc: int
    pixels_crc: list[int]
    # Rows of the catalogue that could not be read, with the reason.
    bad: list[tuple[int, str]]


@contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Hold a lock that other processes wait for and that a killed process gives back.

    Gives False where the system has no such locks; renaming keeps the store whole even then.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # not a POSIX system
        yield False
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield True


def write_store(folder: Path, images: Iterable[tuple[int, npt.NDArray[np.uint8] | str]]) -> None:
    """Write (row, pixels or the reason why there are none) pairs into a new store."""
    part = folder.with_name(f".{folder.name}.{uuid4().hex}.part")
    part.mkdir(parents=True)
    try:
        index: list[tuple[int, int, int]] = []
        bad: list[tuple[int, str]] = []
        offset = 0
        with (part / "pixels.bin").open("wb") as stream:
            for row, image in images:
                if isinstance(image, str):
                    bad.append((row, image))
                    continue
                stream.write(np.ascontiguousarray(image).data)
                index.append((offset, *image.shape[:2]))
                offset += image.size
            stream.flush()
            os.fsync(stream.fileno())
        np.save(part / "index.npy", np.array(index, dtype=np.int64).reshape(-1, 3))
        _write_header(part, folder.name, len(index), offset, bad)
        _publish(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_header(part: Path, key: str, images: int, size: int, bad: list[tuple[int, str]]) -> None:
    index_crc = zlib.crc32((part / "index.npy").read_bytes())
    pixels_crc = block_checksums(part / "pixels.bin")
    header = Header(FORMAT, key, images, size, index_crc, pixels_crc, bad)
    with (part / "header.json").open("w", encoding="utf-8") as stream:
        # A reason may quote a file name that is not UTF-8: JSON escapes it.
        json.dump(asdict(header), stream)
        stream.flush()
        os.fsync(stream.fileno())


def _publish(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:
        # Without locks another process may have been quicker; its store is as good.
        if not (folder / "header.json").is_file():
            raise


def remove_leftovers(folder: Path) -> None:
    """Delete what killed builders of this store left; call with the lock held."""
    for part in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(part, ignore_errors=True)


def open_store(folder: Path, *, verify: bool) -> tuple[Header, npt.NDArray[np.int64]]:
    """Read header and index, and check them; with `verify` every byte of the pixels too."""
    header = _read_header(folder)
    try:
        data = (folder / "index.npy").read_bytes()
        size = (folder / "pixels.bin").stat().st_size
    except OSError as error:
        raise BrokenStoreError(f"{folder}: {error}") from error
    if zlib.crc32(data) != header.index_crc:
        raise BrokenStoreError(f"{folder}: the index does not match its checksum")
    if size != header.bytes:
        raise BrokenStoreError(f"{folder}: pixels.bin has {size} bytes instead of {header.bytes}")
    if verify and block_checksums(folder / "pixels.bin") != header.pixels_crc:
        raise BrokenStoreError(f"{folder}: the pixels do not match their checksums")
    index: npt.NDArray[np.int64] = np.load(folder / "index.npy", allow_pickle=False)
    return header, index


def _read_header(folder: Path) -> Header:
    try:
        fields = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        fields["bad"] = [(int(row), str(reason)) for row, reason in fields["bad"]]
        header = Header(**fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BrokenStoreError(f"{folder}: no readable header: {error}") from error
    if header.format != FORMAT or header.key != folder.name:
        raise BrokenStoreError(f"{folder}: the header is of {header.format!r}, {header.key!r}")
    return header


def block_checksums(file: Path) -> list[int]:
    """Return the CRC-32 of every block of a file; the blocks are read side by side."""
    starts = range(0, file.stat().st_size, _BLOCK)

    def checksum(start: int) -> int:
        crc, left = 0, _BLOCK
        with file.open("rb") as stream:
            stream.seek(start)
            while left and (piece := stream.read(min(left, 1 << 20))):
                crc, left = zlib.crc32(piece, crc), left - len(piece)
        return crc

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(checksum, starts))
