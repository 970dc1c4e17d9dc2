"""Embedding that goes on where it was cut off: vectors are kept until they are in the gallery.

Under torchrun rank 0 alone knows of the gallery. It calls the other ranks to embed a share of the
images into the same place (`with_helpers`, `help_out`), and then goes on as if all of that had been
there before.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist

from proximetry._util.files import atomic_write
from proximetry._util.tensors import chunks
from proximetry.data.shards import split_shard_path
from proximetry.metrics._search.inputs import IntArray
from proximetry.models import Embedder
from proximetry.search import rows
from proximetry.search.exact import FloatArray
from proximetry.search.manifest import STAGING, read_digest

BadImages = Literal["error", "skip"]
# Images that are embedded before they are written down.
CHUNK = 1024
_BLOCK = 65_536


class Stamp(NamedTuple):
    """What a file is recognized by.

    The last two also change where size and time of modification are set to what they were.
    """

    path: bytes
    size: int
    modified: int
    changed: int
    inode: int


@dataclass
class Staged:
    """Embedded images, in memory or on disk.

    Attributes:
        kept: which of the images could be read.
        left_out: why others could not.
        stamps: of the kept images, size and time of modification; None if not known.
    """

    kept: IntArray
    left_out: list[str]
    stamps: list[tuple[int, int] | None]
    _chunks: list[FloatArray]
    _sources: IntArray  # of each kept image, its chunk and its row there
    _files: dict[int, Path]  # of each chunk that is on disk

    def blocks(self) -> Iterator[FloatArray]:
        """The vectors of the kept images, some after others."""
        for part in chunks(len(self.kept), _BLOCK):
            source = self._sources[part]
            block = np.empty((len(source), self._chunks[0].shape[1]), np.float32)
            for number in np.unique(source[:, 0]):
                here = source[:, 0] == number
                block[here] = self._chunks[number][source[here, 1]]
            yield block

    def discard(self) -> None:
        """Remove the files that were used, as these vectors are in the gallery now."""
        used = set(self._sources[:, 0].tolist())
        files = [file for number, file in self._files.items() if number in used]
        for file in files:
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in files}:
            with suppress(OSError):  # another process may keep something there too
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
    progress: Callable[[int, int], None],
) -> Staged:
    """Embed images for a gallery, and take what was embedded before from its folder."""
    folder = gallery / STAGING / fingerprint[:32]
    stamps = [stamp_of(path) for path in paths]
    arrays, files, sources = _find(folder, stamps, embedder.dim)
    waiting = np.flatnonzero(sources[:, 0] < 0)
    helpers = _helpers.get()
    if helpers is not None and helpers.waiting and len(waiting) > CHUNK:
        wanted = [[paths[image] for image in part.tolist()] for part in _parts(waiting)]
        helpers.share(embedder, _Job(wanted, folder, fingerprint, batch_size), progress)
        arrays, files, sources = _find(folder, stamps, embedder.dim)
        waiting = np.flatnonzero(sources[:, 0] < 0)  # what could not be read, which is now told
    left_out: dict[int, str] = {}
    done = len(paths) - len(waiting)
    for images in _parts(waiting):
        bad: dict[int, str] = {}
        try:
            vectors = embedder.encode(
                [paths[image] for image in images],
                batch_size,
                progress=lambda count: progress(done + count, len(paths)),  # noqa: B023
                on_error=None
                if bad_images == "error"
                else lambda i, error: bad.update({i: str(error)}),  # noqa: B023
            ).numpy()
        except ValueError as error:  # which names the number of the image and, inside, the file
            if not isinstance(error.__cause__, ValueError):
                raise
            raise error.__cause__ from None
        read = np.array([image for i, image in enumerate(images) if i not in bad], np.int64)
        sources[read, 0], sources[read, 1] = len(arrays), np.arange(len(read))
        if len(waiting) > CHUNK and len(read):  # else there is nothing to resume
            file = _write(folder, vectors, [stamps[image] for image in read])
            files[len(arrays)] = file
            _, vectors = _load(file, embedder.dim)
        arrays.append(vectors)
        left_out |= {int(images[i]): reason for i, reason in bad.items()}
        done += len(images)
        progress(done, len(paths))
    kept = np.flatnonzero(sources[:, 0] >= 0)
    reasons = [left_out[image] for image in sorted(left_out)]
    seen = [stamp and (stamp.size, stamp.modified) for stamp in (stamps[i] for i in kept)]
    return Staged(kept, reasons, seen, arrays, sources[kept], files)


class _Job(NamedTuple):
    """Images to be embedded by several ranks together."""

    parts: Sequence[Sequence[str]]
    folder: Path
    fingerprint: str
    batch_size: int

    def stage(self, embedder: Embedder, progress: Callable[[int, int], None]) -> None:
        """Embed the share of this rank: whole chunks, so that batches are those of one process."""
        rank, size = dist.get_rank(), dist.get_world_size()
        done, total = 0, sum(map(len, self.parts))
        for paths in self.parts[rank::size]:
            stamps = [stamp_of(path) for path in paths]
            bad: set[int] = set()
            with suppress(ValueError):  # rank 0 will come upon it again, and tell
                vectors = embedder.encode(
                    paths,
                    self.batch_size,
                    on_error=lambda i, error: bad.add(i),  # noqa: B023
                ).numpy()
                if len(vectors):
                    read = [stamp for i, stamp in enumerate(stamps) if i not in bad]
                    _write(self.folder, vectors, read)
            done += len(paths)
            progress(min(size * done, total), total)


class _Helpers:
    """The other ranks, as rank 0 sees them: they wait for one job and then end."""

    def __init__(self) -> None:
        self.waiting = True

    def share(self, embedder: Embedder, job: _Job, progress: Callable[[int, int], None]) -> None:
        """Embed images together."""
        self.waiting = False
        _broadcast(job)
        job.stage(embedder, progress)
        dist.barrier()

    def dismiss(self) -> None:
        """End the ranks that still wait for a job."""
        if self.waiting:
            _broadcast(None)


_helpers: ContextVar[_Helpers | None] = ContextVar("_helpers", default=None)


def _broadcast(job: _Job | None) -> _Job | None:
    """Send a job from rank 0 to all ranks; None ends them."""
    box: list[Any] = [job]
    dist.broadcast_object_list(box, src=0)
    received: _Job | None = box[0]
    return received


@contextmanager
def with_helpers() -> Iterator[None]:
    """Share the embedding of images with the other ranks, which call `help_out`."""
    helpers = _Helpers()
    token = _helpers.set(helpers)
    try:
        yield
    except (ValueError, OSError):
        helpers.dismiss()
        raise
    else:
        helpers.dismiss()
    finally:
        _helpers.reset(token)


def help_out(load: Callable[[], Embedder]) -> None:
    """Embed the share of this rank; rank 0 builds the gallery without the others."""
    job = _broadcast(None)
    if job is None:
        return
    embedder = load()
    if embedder.fingerprint() != job.fingerprint:
        raise ValueError(f"rank {dist.get_rank()} has another embedder than rank 0")
    job.stage(embedder, lambda done, total: None)
    dist.barrier()


def _parts(images: IntArray) -> list[IntArray]:
    """Images that are embedded together: cut by their numbers, whatever was embedded before.

    So batches, on which the last bits depend, are the same after an interruption.
    """
    if not len(images):
        return []
    return np.split(images, np.flatnonzero(np.diff(images // CHUNK)) + 1)


def stamp_of(path: str) -> Stamp | None:
    """Return what a file is recognized by; None for one that is not there."""
    try:
        status = os.stat(split_shard_path(path)[0])
    except OSError:  # whoever opens the image will say why it cannot be opened
        return None
    return Stamp(
        os.fsencode(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    )


def _write(folder: Path, vectors: FloatArray, stamps: Sequence[Stamp | None]) -> Path:
    """Write a chunk; its name is the checksum of its content."""
    pa = rows.arrow()
    columns = zip(*(stamp or [None] * len(Stamp._fields) for stamp in stamps), strict=True)
    path, *numbers = (list(column) for column in columns)
    data = pa.py_buffer(np.ascontiguousarray(vectors, np.float32))
    table = pa.table(
        {
            "vector": pa.Array.from_buffers(
                pa.binary(4 * vectors.shape[1]), len(vectors), [None, data]
            ),
            "path": pa.array(path, pa.large_binary()),
            **{
                name: pa.array(column, pa.uint64() if name == "inode" else pa.int64())
                for name, column in zip(Stamp._fields[1:], numbers, strict=True)
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
    """The images of a chunk and their vectors; raises ValueError for a damaged one."""
    if read_digest(file).sha256 != file.stem:
        raise ValueError(f"{file} is damaged")
    table = rows.read(file)
    (column,) = table["vector"].chunks
    data = np.frombuffer(column.buffers()[1], np.float32, len(table) * dim)
    if column.type.byte_width != 4 * dim or not np.isfinite(data).all():
        raise ValueError(f"{file} holds other vectors than this embedder makes")
    columns = (table[name].to_pylist() for name in Stamp._fields)
    return [Stamp(*values) for values in zip(*columns, strict=True)], data.reshape(-1, dim)


def _find(
    folder: Path, stamps: Sequence[Stamp | None], dim: int
) -> tuple[list[FloatArray], dict[int, Path], IntArray]:
    """What was embedded before, and of each image its chunk and its row there, or −1."""
    arrays: list[FloatArray] = []
    files: dict[int, Path] = {}
    places: dict[Stamp, tuple[int, int]] = {}
    for file in sorted(folder.glob("[!.]*.arrow")):
        with suppress(KeyError, OSError, ValueError):  # its images are embedded again
            there, vectors = _load(file, dim)
            places |= {stamp: (len(arrays), row) for row, stamp in enumerate(there)}
            files[len(arrays)] = file
            arrays.append(vectors)
    sources = np.full((len(stamps), 2), -1, np.int64)
    for image, stamp in enumerate(stamps):
        if stamp is not None:
            sources[image] = places.get(stamp, (-1, -1))
    return arrays, files, sources
