"""`gallery.json`: the files of a gallery's current version.

It is the only file that is ever replaced; replacing it commits a change. All other files are
written first, under new names, and never change.
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
from typing import Any

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.files import (
    CHECKSUM,
    acquire_lock,
    atomic_write,
    check_format,
    final_name,
    json_with_checksum,
    name_write_errors,
    read_json,
)
from proximetry._util.formatting import format_value, join_first
from proximetry.models.constants import Similarity

FORMAT = "proximetry gallery"
VERSION = 1
GALLERY = "gallery"
"""Default folder of a gallery."""
MANIFEST = "gallery.json"
LOCK = "gallery.lock"
LOCK_SECONDS = 60.0  # how long a writer waits for another one
GRACE = 86_400.0
"""Seconds for which replaced versions, for readers on other hosts, and staged vectors are kept."""
EMBEDDER, STAGING, SEGMENTS, VERSIONS = "embedder", "staging", "segments", "versions"
FILES = {
    "vectors": "vectors.npy",
    "ids": "ids.npy",
    "rows": "metadata.arrow",
    "squares": "squares.npy",
    "index": "index.faiss",
}
_MAX_BYTES = 10_000_000
_NAME = re.compile("[0-9a-f]{32}")
_DELETED = re.compile(r"deleted-[0-9a-f]{32}\.npy")
_VERSION = re.compile(r"(\d+)-(\d+)\.json")  # number, and the time when it was replaced

Report = Callable[[str], None]


def ignore(*values: object) -> None:
    """Discard progress or a message."""


class DamagedGalleryError(ValueError):
    """A file of a gallery is corrupt."""

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
    """Rows that were written together."""

    name: str  # of its folder
    rows: int  # number of rows
    index: str  # the faiss index, "" for an exact scan
    longest: float  # the length of the longest vector
    files: Mapping[str, FileInfo]  # by the names of `FILES`
    effort: int  # the search effort of the index (`indexes.Index`)
    recall: float | None  # its recall@10 with that effort, measured when it was built

    def paths(self, folder: Path) -> dict[str, Path]:
        """Return the files, by the names of `FILES`."""
        return {kind: folder / SEGMENTS / self.name / FILES[kind] for kind in self.files}


@dataclass(frozen=True)
class DeletedIds:
    """The file of ids that were removed."""

    name: str
    count: int
    file: FileInfo


@dataclass(frozen=True)
class Manifest:
    """The current version of a gallery."""

    embedder: str  # its fingerprint
    similarity: Similarity
    dim: int
    index: str  # "auto" or a faiss factory string, as passed to `build`
    next_id: int = 0
    segments: tuple[SegmentInfo, ...] = ()  # in ascending order of ids
    deleted: DeletedIds | None = None  # removed ids that are still in a segment
    # Time of each replaced segment, and file of deleted ids.
    retired: Mapping[str, float] = field(default_factory=dict)
    number: int = 1  # of the version
    created: float = 0.0  # time of the change

    @property
    def version(self) -> str:
        """An identifier that differs after every change."""
        return hashlib.sha256(repr((self.embedder, self.number, self._files)).encode()).hexdigest()

    @property
    def _files(self) -> list[str]:
        """The names of the files that only some versions have."""
        deleted = [self.deleted.name] if self.deleted else []
        return [info.name for info in self.segments] + deleted

    @property
    def images(self) -> int:
        """The number of images."""
        total = sum(info.rows for info in self.segments)
        return total - (self.deleted.count if self.deleted else 0)


def is_milvus(path: str | os.PathLike[str]) -> bool:
    """Return whether this is the address of a gallery on Milvus, not a folder."""
    return os.fspath(path).startswith(("milvus:", "milvuss:"))


def read_manifest(folder: Path) -> Manifest:
    """Read and validate `gallery.json`."""
    path = folder / MANIFEST
    if not path.is_file():
        if not folder.exists():
            raise UsageError(f"no gallery {folder}. Build one with `proximetry index`.")
        from proximetry.models.storage import DESCRIPTION, find_embedder  # imports torch

        reason = f"it has no {MANIFEST}"
        if (folder / LOCK).exists():
            reason = "the build is not finished. Run it again."
        elif (find_embedder(folder) / DESCRIPTION).exists():
            reason = f"it is an embedder. Build one: proximetry index IMAGES --model {folder}"
        raise UsageError(f"{folder} is not a gallery: {reason}")
    return _read(path)


def _read(path: Path) -> Manifest:
    try:
        content = read_json(path, _MAX_BYTES)
    except ValueError as error:
        raise DamagedGalleryError(path, str(error).removeprefix(f"{path} is damaged: ")) from error
    check_format(path, content, FORMAT, VERSION)
    if CHECKSUM not in content:
        raise DamagedGalleryError(path, "it has no checksum")
    try:
        return _parse(content["gallery"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedGalleryError(path, error) from error


def write_manifest(folder: Path, manifest: Manifest, name: str = MANIFEST) -> None:
    """Replace the manifest, which commits a change, or write a replaced one."""
    content = {"format": FORMAT, "version": VERSION, "proximetry": __version__}
    atomic_write(folder / name, json_with_checksum({**content, "gallery": asdict(manifest)}))


def _parse(values: dict[str, Any]) -> Manifest:
    """Build a manifest; validate its names, which become paths."""
    segments = [
        SegmentInfo(**{**info, "files": {kind: FileInfo(**f) for kind, f in info["files"].items()}})
        for info in values["segments"]
    ]
    deleted = values["deleted"]
    if deleted:
        deleted = DeletedIds(**{**deleted, "file": FileInfo(**deleted["file"])})
        if not _DELETED.fullmatch(deleted.name):
            raise ValueError(f"invalid file of deleted ids {format_value(deleted.name)}")
    manifest = Manifest(**{**values, "segments": tuple(segments), "deleted": deleted})
    retired = [name for name in manifest.retired if not _DELETED.fullmatch(name)]
    names = [*(segment.name for segment in segments), *retired]
    if invalid := [name for name in names if not _NAME.fullmatch(name)]:
        raise ValueError(f"invalid segment {format_value(invalid[0])}")
    return manifest


def read_file_info(path: Path) -> FileInfo:
    """Return size and checksum of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileInfo(stream.tell(), digest)


@contextmanager
def write_lock(folder: Path, report: Report) -> Iterator[None]:
    """Lock a gallery for writing; the lock ends with the process."""
    try:
        lock = acquire_lock(folder / LOCK, LOCK_SECONDS, report)
    except TimeoutError as error:
        raise ValueError(
            f"{error} has been writing to the gallery {folder} for more than {LOCK_SECONDS:g} s. "
            "Try again later."
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_new_folder(folder: Path) -> None:
    """Raise UsageError for a folder in which no gallery can be built."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file. A gallery is a folder.")
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder} is already a gallery. Add to it: Gallery.open({str(folder)!r}).add(…)"
        )
    names = {path.name for path in folder.iterdir() if final_name(path) != MANIFEST}
    if foreign := sorted(names - {LOCK, EMBEDDER, STAGING, SEGMENTS}):
        raise UsageError(
            f"{folder} has other files: {join_first(foreign, 3)}. Choose a new or empty folder."
        )


@contextmanager
def lock_new_folder(folder: Path, report: Report) -> Iterator[None]:
    """Create and lock the folder of a new gallery."""
    check_new_folder(folder)
    with name_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with write_lock(folder, report):
        check_new_folder(folder)  # another process may have built it meanwhile
        yield


def commit_first(folder: Path, manifest: Manifest, segment: SegmentInfo) -> Manifest:
    """Write the first version of a gallery; requires the lock."""
    now = time.time()
    manifest = replace(manifest, next_id=segment.rows, segments=(segment,), created=now)
    write_manifest(folder, manifest)
    # No other process has staged vectors before the manifest exists.
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    remove_stale_files(folder, manifest, GRACE)
    return manifest


def commit(folder: Path, manifest: Manifest) -> Manifest:
    """Replace the current version, which is kept for `GRACE` seconds; requires the lock."""
    before, now = read_manifest(folder), time.time()
    retired = {**before.retired, **dict.fromkeys(before._files, now)}
    retired = {
        name: since
        for name, since in retired.items()
        if name not in manifest._files and now - since < GRACE
    }
    manifest = replace(manifest, retired=retired, number=before.number + 1, created=now)
    with name_write_errors(folder / VERSIONS):
        (folder / VERSIONS).mkdir(exist_ok=True)
    kept = replace(before, retired={})  # else many versions would take much space
    write_manifest(folder, kept, f"{VERSIONS}/{before.number}-{int(now)}.json")
    write_manifest(folder, manifest)
    remove_stale_files(folder, manifest, GRACE)
    return manifest


def _kept_versions(folder: Path) -> dict[int, tuple[Path, int]]:
    """Return the files of the replaced versions, and when they were replaced, by number."""
    matches = [(path, _VERSION.fullmatch(path.name)) for path in (folder / VERSIONS).glob("*.json")]
    return {int(match[1]): (path, int(match[2])) for path, match in matches if match}


def read_versions(folder: Path) -> list[Manifest]:
    """Return the kept versions, the current one last."""
    current = read_manifest(folder)
    kept = sorted(_kept_versions(folder).items())
    return [*(_read(path) for number, (path, _) in kept if number < current.number), current]


def remove_stale_files(folder: Path, manifest: Manifest, grace: float) -> None:
    """Remove versions after `grace` seconds, and old staged vectors; requires the lock."""
    for path, since in _kept_versions(folder).values():
        if time.time() - since >= grace:
            path.unlink(missing_ok=True)
    current = {*manifest._files, *manifest.retired}
    for path in (folder / SEGMENTS).glob("*"):
        if _NAME.fullmatch(path.name) and path.name not in current:
            shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.iterdir(), *(folder / VERSIONS).glob(".*")):
        stale = _DELETED.fullmatch(path.name) and path.name not in current
        if stale or (path.is_file() and final_name(path)):
            with suppress(OSError):
                path.unlink()
    # Vectors of interrupted additions that were not repeated.
    for path in (folder / STAGING).glob("*/*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= GRACE:
                path.unlink()
    for path in (*(folder / STAGING).glob("*"), folder / STAGING):
        with suppress(OSError):  # it does not exist, or is not empty
            path.rmdir()
