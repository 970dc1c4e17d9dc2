"""Resumable embedding: vectors are staged on disk until they are in the gallery.

Under torchrun only rank 0 knows the gallery. It broadcasts a job to the other ranks
(`distributed_workers`, `worker_loop`), which stage their share of the vectors in the same folder,
and then continues as if these had been there before.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist

from proximetry._util.files import atomic_write
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.data import ImageError
from proximetry.data.folders import split_shard_path
from proximetry.models import Embedder
from proximetry.search import rows
from proximetry.search.exact import FloatArray
from proximetry.search.manifest import STAGING, read_digest

BadImages = Literal["error", "skip"]
# Images that are embedded before they are written.
CHUNK = 1024
BLOCK = 65_536


class Stamp(NamedTuple):
    """Identifies a file; ctime and inode also change if size and mtime are set back."""

    path: bytes
    size: int
    modified: int
    changed: int
    inode: int


class SkippedImage(NamedTuple):
    """An image that could not be read."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Staged:
    """Embedded images: chunks in memory or on disk, and the chunk and row of each image, or −1."""

    def __init__(self, folder: Path, stamps: Sequence[Stamp | None], dim: int) -> None:
        self.skipped: list[SkippedImage] = []
        self._stamps, self._dim = stamps, dim
        self._vectors: list[FloatArray] = []
        self._files: dict[int, Path] = {}
        self._sources = np.full((len(stamps), 2), -1, np.int64)
        staged: dict[Stamp, tuple[int, int]] = {}
        for file in sorted(folder.glob("[!.]*.arrow")):
            with suppress(KeyError, OSError, ValueError):  # its images are embedded again
                known, vectors = _load(file, dim)
                staged |= {stamp: (len(self._vectors), row) for row, stamp in enumerate(known)}
                self._files[len(self._vectors)] = file
                self._vectors.append(vectors)
        for image, stamp in enumerate(stamps):
            if stamp is not None:
                self._sources[image] = staged.get(stamp, (-1, -1))

    @property
    def waiting(self) -> list[IntArray]:
        """Images that are not embedded, in chunks.

        They are split by their numbers, whatever was embedded before, so that batches, on which
        the last bits depend, are the same after an interruption.
        """
        images = np.flatnonzero(self._sources[:, 0] < 0)
        parts = np.split(images, np.flatnonzero(np.diff(images // CHUNK)) + 1)
        return parts if len(images) else []

    @property
    def images(self) -> IntArray:
        """The indices of the readable images."""
        return np.flatnonzero(self._sources[:, 0] >= 0)

    @property
    def stamps(self) -> list[tuple[int, int] | None]:
        """Size and time of modification of the readable images."""
        stamps = (self._stamps[image] for image in self.images)
        return [stamp and (stamp.size, stamp.modified) for stamp in stamps]

    def append(self, images: IntArray, vectors: FloatArray, folder: Path | None) -> None:
        """Add a chunk, and write it unless there is no folder."""
        number = len(self._vectors)
        self._sources[images] = np.stack([np.full(len(images), number), range(len(images))]).T
        if folder and len(images):
            file = _write(folder, vectors, [self._stamps[image] for image in images])
            self._files[number] = file
            _, vectors = _load(file, self._dim)
        self._vectors.append(vectors)

    def blocks(self) -> Iterator[FloatArray]:
        """Yield the vectors of the readable images."""
        images = self.images
        for part in chunks(len(images), BLOCK):
            source = self._sources[images[part]]
            block = np.empty((len(source), self._dim), np.float32)
            for number in np.unique(source[:, 0]):
                here = source[:, 0] == number
                block[here] = self._vectors[number][source[here, 1]]
            yield block

    def discard(self) -> None:
        """Remove the files of these vectors, which are in the gallery now."""
        used = np.unique(self._sources[self.images, 0]).tolist()
        files = [self._files[number] for number in used if number in self._files]
        for file in files:
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in files}:
            with suppress(OSError):  # another process may have files there
                folder.rmdir()
                folder.parent.rmdir()


def embed(
    embedder: Embedder,
    fingerprint: str,
    paths: Sequence[str],
    gallery: Path,
    *,
    batch_size: int,
    bad_images: BadImages,
    progress: Progress,
) -> Staged:
    """Embed images for a gallery, and reuse the vectors staged in its folder."""
    folder = gallery / STAGING / fingerprint[:32]
    stamps = [stamp_of(path) for path in paths]
    staged = Staged(folder, stamps, embedder.dim)
    waiting = sum(map(len, staged.waiting))
    if _idle_workers and waiting > CHUNK:
        parts = [[paths[image] for image in part] for part in staged.waiting]
        job = _Job(parts, folder, fingerprint, batch_size)
        _broadcast(job)
        job.run(embedder, progress)
        staged = Staged(folder, stamps, embedder.dim)  # unreadable images still wait
    skipped: dict[int, SkippedImage] = {}
    done = len(paths) - sum(map(len, staged.waiting))
    for images in staged.waiting:

        def skip(i: int, error: Exception, images: IntArray = images) -> None:
            reason = error.reason if isinstance(error, ImageError) else str(error)
            skipped[int(images[i])] = SkippedImage(paths[images[i]], reason)

        try:
            vectors = embedder.encode(
                [paths[image] for image in images],
                batch_size,
                progress=lambda count, done=done: progress(done + count, len(paths)),  # type: ignore[misc]
                on_error=None if bad_images == "error" else skip,
            ).numpy()
        except ValueError as error:  # which names the index of the image; its cause names the file
            if not isinstance(error.__cause__, ValueError):
                raise
            raise error.__cause__ from None
        read = np.array([image for image in images.tolist() if image not in skipped], np.int64)
        # Without further chunks there is nothing to resume.
        staged.append(read, vectors, folder if waiting > CHUNK else None)
        done += len(images)
        progress(done, len(paths))
    staged.skipped = [skipped[image] for image in sorted(skipped)]
    return staged


class _Job(NamedTuple):
    """Chunks of images that all ranks embed together."""

    parts: Sequence[Sequence[str]]
    folder: Path
    fingerprint: str
    batch_size: int

    def run(self, embedder: Embedder, progress: Progress) -> None:
        """Embed the chunks of this rank, in the batches of a single process."""
        rank, size = dist.get_rank(), dist.get_world_size()
        done, total = 0, sum(map(len, self.parts))
        for paths in self.parts[rank::size]:
            stamps = dict(enumerate(map(stamp_of, paths)))
            with suppress(ValueError):  # rank 0 embeds these images again, and reports the error
                vectors = embedder.encode(
                    paths,
                    self.batch_size,
                    on_error=lambda i, error, stamps=stamps: stamps.pop(i),  # type: ignore[misc]
                ).numpy()
                if len(vectors):
                    _write(self.folder, vectors, list(stamps.values()))
            done += len(paths)
            progress(min(size * done, total), total)
        dist.barrier()


_idle_workers: list[str] = []  # not empty while the other ranks wait for a job


def _broadcast(job: _Job | None) -> _Job | None:
    """Send a job from rank 0 to all ranks; None dismisses them."""
    _idle_workers.clear()
    box: list[Any] = [job]
    dist.broadcast_object_list(box, src=0)
    received: _Job | None = box[0]
    return received


@contextmanager
def distributed_workers() -> Iterator[None]:
    """Share the embedding of images with the other ranks, which call `worker_loop`."""
    _idle_workers.append("all")
    try:
        yield
    except (ValueError, OSError):
        if _idle_workers:
            _broadcast(None)
        raise
    if _idle_workers:
        _broadcast(None)


def worker_loop(load: Callable[[], Embedder]) -> None:
    """Embed the share of this rank when rank 0 broadcasts a job."""
    job = _broadcast(None)
    if job is None:
        return
    embedder = load()
    if embedder.fingerprint() != job.fingerprint:
        raise ValueError(f"rank {dist.get_rank()} has another embedder than rank 0")
    job.run(embedder, lambda done, total: None)


def stamp_of(path: str) -> Stamp | None:
    """Return what identifies a file; None for a missing one."""
    try:
        status = os.stat(split_shard_path(path)[0])
    except OSError:  # reported when the image is opened
        return None
    return Stamp(
        os.fsencode(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    )


def _write(folder: Path, vectors: FloatArray, stamps: Sequence[Stamp | None]) -> Path:
    """Write a chunk; its name is the checksum of its content."""
    pa = rows.arrow()
    columns = zip(*(stamp or [None] * len(Stamp._fields) for stamp in stamps), strict=True)
    kinds = dict.fromkeys(Stamp._fields, pa.int64())
    kinds |= {"path": pa.large_binary(), "inode": pa.uint64()}
    data = pa.py_buffer(np.ascontiguousarray(vectors, np.float32))
    binary = pa.binary(4 * vectors.shape[1])
    table = pa.table(
        {
            "vector": pa.Array.from_buffers(binary, len(vectors), [None, data]),
            **{
                name: pa.array(column, kinds[name])
                for name, column in zip(Stamp._fields, columns, strict=True)
            },
        }
    )
    stream = io.BytesIO()
    rows.write(table, stream)
    content = stream.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hashlib.sha256(content).hexdigest()}.arrow"
    atomic_write(file, content)
    return file


def _load(file: Path, dim: int) -> tuple[list[Stamp], FloatArray]:
    """Return the images of a chunk and their vectors; raises ValueError for a damaged one."""
    if read_digest(file).sha256 != file.stem:
        raise ValueError(f"{file} is damaged")
    table = rows.read(file)
    (column,) = table["vector"].chunks
    data = np.frombuffer(column.buffers()[1], np.float32, len(table) * dim)
    if column.type.byte_width != 4 * dim or not np.isfinite(data).all():
        raise ValueError(f"{file} has other vectors than this embedder computes")
    columns = (table[name].to_pylist() for name in Stamp._fields)
    return [Stamp(*values) for values in zip(*columns, strict=True)], data.reshape(-1, dim)
