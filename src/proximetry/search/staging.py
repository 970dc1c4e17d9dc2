"""Embedding that goes on where it was cut off: vectors are kept until they are in the gallery.

Under torchrun rank 0 alone knows of the gallery. It calls the other ranks to embed a share of the
images into the same place (`with_helpers`, `help_out`), and then goes on as if all of that had been
there before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist

from proximetry._common import atomic_path, chunks
from proximetry.data.tar_shards import split_shard_path
from proximetry.metrics.inputs import IntArray
from proximetry.models import Embedder
from proximetry.search import rows
from proximetry.search.exact import FloatArray
from proximetry.search.manifest import STAGING, new_name

BadImages = Literal["error", "skip"]
# Images that are embedded before they are written down.
CHUNK = 1024
_BLOCK = 65_536

Stamp = tuple[bytes, int, int]
"""Path, size and time of a file."""


@dataclass
class Staged:
    """Embedded images, in memory or on disk.

    Attributes:
        kept: which of the images could be read.
        left_out: why others could not.
    """

    kept: IntArray
    left_out: list[str]
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
            for path in (file, file.with_suffix(".npy")):
                path.unlink(missing_ok=True)
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
    stamps = [_stamp(path) for path in paths]
    arrays, files, sources = _find(folder, stamps)
    waiting = np.flatnonzero(sources[:, 0] < 0)
    helpers = _helpers.get()
    if helpers is not None and len(waiting) > CHUNK:
        wanted = [[paths[image] for image in part.tolist()] for part in _parts(waiting)]
        helpers.share(embedder, _Job(wanted, folder, fingerprint, batch_size), progress)
        arrays, files, sources = _find(folder, stamps)
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
        if len(waiting) > CHUNK:  # else there is nothing to go on with
            known = [(row, stamps[image]) for row, image in enumerate(read)]
            file = _write(folder, vectors, [(r, s) for r, s in known if s is not None])
            files[len(arrays)] = file
            vectors = np.load(file.with_suffix(".npy"), mmap_mode="r")
        arrays.append(vectors)
        left_out |= {int(images[i]): reason for i, reason in bad.items()}
        done += len(images)
        progress(done, len(paths))
    kept = np.flatnonzero(sources[:, 0] >= 0)
    reasons = [left_out[image] for image in sorted(left_out)]
    return Staged(kept, reasons, arrays, sources[kept], files)


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
            stamps = [_stamp(path) for path in paths]
            bad: set[int] = set()
            with suppress(ValueError):  # rank 0 will come upon it again, and tell
                vectors = embedder.encode(
                    paths,
                    self.batch_size,
                    on_error=lambda i, error: bad.add(i),  # noqa: B023
                ).numpy()
                read = [stamp for i, stamp in enumerate(stamps) if i not in bad]
                known = [(row, stamp) for row, stamp in enumerate(read) if stamp is not None]
                _write(self.folder, vectors, known)
            done += len(paths)
            progress(min(size * done, total), total)


class _Helpers:
    """The other ranks, as rank 0 sees them."""

    def __init__(self) -> None:
        self.listen = True

    def share(self, embedder: Embedder, job: _Job, progress: Callable[[int, int], None]) -> None:
        """Embed images together."""
        self.listen = False
        _tell(job)
        job.stage(embedder, progress)
        dist.barrier()
        self.listen = True

    def dismiss(self) -> None:
        """Send them home, unless they are at work: then they hear that this rank has failed."""
        if self.listen:
            _tell(None)


_helpers: ContextVar[_Helpers | None] = ContextVar("_helpers", default=None)


def _tell(job: _Job | None) -> _Job | None:
    """Let all ranks know what rank 0 wants done."""
    box: list[Any] = [job]
    dist.broadcast_object_list(box, src=0)
    found: _Job | None = box[0]
    return found


@contextmanager
def with_helpers() -> Iterator[None]:
    """Share with the other ranks what is embedded meanwhile; they call `help_out`."""
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
    """Embed what rank 0 wants embedded, until it is done."""
    embedder: Embedder | None = None
    while (job := _tell(None)) is not None:
        if embedder is None:
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


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(split_shard_path(path)[0])
    except OSError:  # whoever opens the image will say why it cannot be opened
        return None
    return os.fsencode(path), status.st_size, status.st_mtime_ns


def _write(folder: Path, vectors: FloatArray, stamps: Sequence[tuple[int, Stamp]]) -> Path:
    """Write a chunk; it counts from the moment its table is there."""
    file = folder / f"{new_name()}.arrow"
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(file.with_suffix(".npy")) as part, part.open("wb") as stream:
        np.save(stream, vectors)
    pa = rows.arrow()
    table = pa.table(
        {
            "row": [row for row, _ in stamps],
            "path": pa.array([stamp[0] for _, stamp in stamps], pa.large_binary()),
            "bytes": [stamp[1] for _, stamp in stamps],
            "time": [stamp[2] for _, stamp in stamps],
        }
    )
    with atomic_path(file) as part, part.open("wb") as stream:
        rows.write(table, stream)
    return file


def _find(
    folder: Path, stamps: Sequence[Stamp | None]
) -> tuple[list[FloatArray], dict[int, Path], IntArray]:
    """What was embedded before, and of each image its chunk and its row there, or −1."""
    arrays, places, files = _read(folder)
    sources = np.full((len(stamps), 2), -1, np.int64)
    for image, stamp in enumerate(stamps):
        if stamp is not None:
            sources[image] = places.get(stamp, (-1, -1))
    return arrays, files, sources


def _read(
    folder: Path,
) -> tuple[list[FloatArray], dict[Stamp, tuple[int, int]], dict[int, Path]]:
    """What was embedded before: vectors by chunk, and where each image is."""
    arrays: list[FloatArray] = []
    places: dict[Stamp, tuple[int, int]] = {}
    files: dict[int, Path] = {}
    for file in sorted(folder.glob("[!.]*.arrow")):
        try:
            table, vectors = rows.read(file), np.load(file.with_suffix(".npy"), mmap_mode="r")
        except (
            EOFError,
            OSError,
            ValueError,
        ):  # which costs no more than embedding these images again
            continue
        columns = (table[name].to_pylist() for name in ("path", "bytes", "time", "row"))
        for path, size, time, row in zip(*columns, strict=True):
            places[path, size, time] = len(arrays), row
        files[len(arrays)] = file
        arrays.append(vectors)
    return arrays, places, files
