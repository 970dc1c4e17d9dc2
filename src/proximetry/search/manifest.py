"""`gallery.json`: what a gallery consists of at this moment.

It is the one file that is ever replaced, and replacing it is the moment a change takes place.
All other files are written before, under names that were never used, and never change.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from proximetry import __version__
from proximetry._util.errors import UsageError, shown, some
from proximetry._util.files import (
    CHECKSUM,
    atomic_write,
    read_json,
    sealed_json,
    take_lock,
    writing,
    written_for,
)
from proximetry.models.names import LARGEST_DIM, SIMILARITIES, Similarity

FORMAT = "proximetry gallery"
VERSION = 1
MANIFEST = "gallery.json"
LOCK = "gallery.lock"
LOCK_SECONDS = 60.0
"""How long a writer waits for another one."""
GRACE = 86_400.0
"""Seconds that replaced segments and staged vectors are kept: readers on other hosts use them."""
EMBEDDER, STAGING, SEGMENTS = "embedder", "staging", "segments"
FILES = {
    "vectors": "vectors.npy",
    "ids": "ids.npy",
    "rows": "rows.arrow",
    "squares": "squares.npy",
    "index": "index.faiss",
}
_LARGEST = 10_000_000
_NAME = re.compile("[0-9a-f]{32}")
_DELETED = re.compile(r"deleted-[0-9a-f]{32}\.npy")
_DIGEST = re.compile("[0-9a-f]{64}")

Report = Callable[[str], None]


class DamagedGalleryError(ValueError):
    """A file of a gallery is not what was written."""

    def __init__(self, file: Path, reason: object) -> None:
        super().__init__(
            f"{file} is damaged: {reason}. Restore the gallery from a backup, or delete it and "
            "index the images again."
        )


@dataclass(frozen=True)
class FileInfo:
    """Size and checksum of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SegmentInfo:
    """Rows that were written together.

    Attributes:
        name: of its folder.
        rows: how many there are.
        index: the faiss index that was built of them, "" where they are searched exactly.
        longest: the length of the longest vector.
        files: by the names of `FILES`.
        effort: the search effort of the index (`indexes.Index`).
        recall: its recall@10 with that effort, measured when it was built.
    """

    name: str
    rows: int
    index: str
    longest: float
    files: Mapping[str, FileInfo]
    effort: int = 1
    recall: float | None = None


@dataclass(frozen=True)
class Deleted:
    """The file of ids that were removed."""

    name: str
    count: int
    file: FileInfo


@dataclass(frozen=True)
class Manifest:
    """What a gallery consists of.

    Attributes:
        embedder: the fingerprint of the embedder.
        similarity: how its vectors are compared.
        dim: their dimension.
        index: "auto" or a faiss factory string, as it was asked for.
        next_id: the id of the next image.
        segments: in rising order of ids.
        deleted: ids that are removed but still in a segment.
        retired: replaced segments that are still on disk, and when they were replaced.
    """

    embedder: str
    similarity: Similarity
    dim: int
    index: str
    next_id: int = 0
    segments: tuple[SegmentInfo, ...] = ()
    deleted: Deleted | None = None
    retired: Mapping[str, float] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """A name for what is there: another one after every change, as names of files are."""
        files = [info.name for info in self.segments], self.deleted and self.deleted.name
        return hashlib.sha256(repr((self.embedder, files)).encode()).hexdigest()


def is_milvus(path: str | os.PathLike[str]) -> bool:
    """Whether this is the address of a gallery on Milvus, not a folder."""
    return os.fspath(path).startswith(("milvus:", "milvuss:"))


def new_name() -> str:
    """Return a name that no file ever had."""
    return uuid4().hex


def read_manifest(folder: Path) -> Manifest:
    """Read what `write_manifest` wrote; anything else is refused."""
    path = folder / MANIFEST
    if not path.is_file():
        if not folder.exists():
            raise UsageError(f"there is no gallery {folder}; `proximetry index` makes one")
        from proximetry.models.storage import DESCRIPTION, find_embedder  # which imports torch

        why = f"it has no {MANIFEST}"
        if (folder / LOCK).exists():
            why = "it was not finished; give the command that builds it again"
        elif (find_embedder(folder) / DESCRIPTION).exists():
            why = (
                f"it holds an embedder; proximetry index IMAGES --model {folder} makes one with it"
            )
        raise UsageError(f"{folder} is no gallery: {why}")
    try:
        content = read_json(path, _LARGEST)
    except ValueError as error:
        raise DamagedGalleryError(path, error) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe a gallery")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {shown(content.get('version'))}; this Proximetry "
            f"({__version__}) reads version {VERSION}: install the one that wrote it"
        )
    if CHECKSUM not in content:
        raise DamagedGalleryError(path, "it has no checksum")
    try:
        return _parsed(content["gallery"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedGalleryError(path, error) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest: the change takes place, or has not happened."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "proximetry": __version__,
        "gallery": asdict(manifest),
    }
    atomic_write(folder / MANIFEST, sealed_json(content))


def _parsed(values: dict[str, Any]) -> Manifest:
    deleted = values["deleted"]
    values.pop("generation", None)  # a count of changes that galleries once had
    manifest = Manifest(
        **{
            **values,
            "segments": tuple(
                SegmentInfo(
                    **{**one, "files": {name: _file(info) for name, info in one["files"].items()}}
                )
                for one in values["segments"]
            ),
            "deleted": deleted and Deleted(**{**deleted, "file": _file(deleted["file"])}),
        }
    )
    # Names become paths: nothing else may stand there.
    for segment in manifest.segments:
        files = {"vectors", "ids", "rows"} | ({"index"} if segment.index else set())
        files |= {"squares"} if manifest.similarity == "euclidean" else set()
        if not _NAME.fullmatch(segment.name) or set(segment.files) != files:
            raise ValueError(f"{shown(segment.name)} is no segment")
        if type(segment.rows) is not int or segment.rows < 0:
            raise ValueError(f"segment {segment.name} has {shown(segment.rows)} rows")
    names = [segment.name for segment in manifest.segments]
    if len({*names, *manifest.retired}) < len(names) + len(manifest.retired):
        raise ValueError("a segment is listed twice")
    if not all(_NAME.fullmatch(name) for name in manifest.retired):
        raise ValueError(f"{shown(manifest.retired)} are no segments")
    if manifest.deleted and not _DELETED.fullmatch(manifest.deleted.name):
        raise ValueError(f"{shown(manifest.deleted.name)} is no file of deleted ids")
    if manifest.similarity not in SIMILARITIES or not 1 <= manifest.dim <= LARGEST_DIM:
        raise ValueError(f"{shown(manifest.similarity)} in {shown(manifest.dim)} dimensions")
    return manifest


def _file(values: Mapping[str, Any]) -> FileInfo:
    found = FileInfo(**values)
    if type(found.bytes) is not int or not _DIGEST.fullmatch(found.sha256):
        raise ValueError(f"{shown(values)} is no size with a checksum")
    return found


class Digest:
    """A stream that knows size and checksum of what was written to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest, self._bytes = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write bytes, or anything that is laid out like bytes."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._bytes += len(view)
        return self._stream.write(view)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._stream.flush()

    @property
    def closed(self) -> bool:
        """Whether nothing can be written any more."""
        return self._stream.closed

    @property
    def info(self) -> FileInfo:
        """What was written so far."""
        return FileInfo(self._bytes, self._digest.hexdigest())


@contextmanager
def new_file(path: Path) -> Iterator[Digest]:
    """Write a file under a name that nobody knows yet; at the end it is on the disk."""
    with writing(path), path.open("wb") as stream:
        yield Digest(stream)
        stream.flush()
        os.fsync(stream.fileno())


def read_digest(path: Path, progress: Callable[[int], None] | None = None) -> FileInfo:
    """Return size and checksum of a file that is there."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
            if progress is not None:
                progress(len(block))
    return FileInfo(size, digest.hexdigest())


@contextmanager
def locked(folder: Path, report: Report | None) -> Iterator[None]:
    """Be the one process that writes here; a process that is killed gives that up."""
    try:
        lock = take_lock(folder / LOCK, LOCK_SECONDS, report or (lambda line: None))
    except TimeoutError as error:
        raise ValueError(
            f"{error} has been writing to the gallery {folder} for more than {LOCK_SECONDS:g} s; "
            "try again when it is done"
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_place(folder: Path) -> None:
    """Refuse a folder in which no gallery can be begun."""
    if not folder.exists():
        there = next(path for path in folder.absolute().parents if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"{folder} cannot be made: {there} cannot be written to")
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; a gallery is a folder")
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder} is a gallery already; Gallery.open({str(folder)!r}).add(…) adds to it"
        )
    ours = {LOCK, EMBEDDER, STAGING, SEGMENTS}
    names = (path.name for path in folder.iterdir() if written_for(path) != MANIFEST)
    foreign = sorted(name for name in names if name not in ours)
    if foreign:
        raise UsageError(
            f"{folder} holds other files ({some(foreign, 3)}); choose a new or empty folder"
        )


def retire(before: Manifest, after: Manifest) -> Manifest:
    """Keep the segments that a change replaces for `GRACE` seconds."""
    now = time.time()
    kept = {name: since for name, since in before.retired.items() if now - since < GRACE}
    names = {segment.name for segment in after.segments}
    replaced = [segment.name for segment in before.segments if segment.name not in names]
    return replace(after, retired=kept | dict.fromkeys(replaced, now))


def sweep(folder: Path, manifest: Manifest) -> None:
    """Remove files that the manifest does not name, and old staged vectors; under the lock.

    Files of others stay.
    """
    named = {*(segment.name for segment in manifest.segments), *manifest.retired}
    for path in (folder / SEGMENTS).glob("*"):
        if _NAME.fullmatch(path.name) and path.name not in named:
            shutil.rmtree(path, ignore_errors=True)
    kept = manifest.deleted.name if manifest.deleted else ""
    for path in folder.iterdir():
        if (_DELETED.fullmatch(path.name) and path.name != kept) or written_for(path) == MANIFEST:
            with suppress(OSError):
                path.unlink()
    sweep_staging(folder / STAGING)


def sweep_staging(staging: Path) -> None:
    """Remove the vectors of interrupted additions that were not repeated for `GRACE` seconds."""
    for path in staging.glob("*/*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= GRACE:
                path.unlink()
    for folder in (*staging.glob("*"), staging):
        with suppress(OSError):  # it is not there, or not empty
            folder.rmdir()
