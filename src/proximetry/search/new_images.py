"""`NewImages`: images to add to a gallery; their vectors are staged on disk until then.

Under torchrun only rank 0 opens the gallery. It broadcasts a job to the other ranks
(`distributed_workers`, `worker_loop`), which stage their share of the vectors in the same folder,
and then resumes from the staged vectors.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write
from proximetry._util.formatting import join_first, pluralize
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.data import Catalog, ImageError
from proximetry.data.folders import split_shard_path
from proximetry.metrics._search.validation import as_embeddings
from proximetry.models import Embedder
from proximetry.search import indexes, metadata
from proximetry.search.exact import FloatArray, take
from proximetry.search.manifest import (
    STAGING,
    Manifest,
    Report,
    SegmentInfo,
    ignore,
    read_file_info,
)
from proximetry.search.segment import BLOCK, prepare_vectors, write_segment

Images: TypeAlias = "Catalog | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Any"
"""A catalog, image files, a folder, table or tar file, or a table of `metadata.from_columns`."""
Labels = Sequence[str | None] | None
Vectors = Tensor | npt.NDArray[Any]
BadImages = Literal["error", "skip"]
CHUNK = 1024  # images whose vectors are staged in one file


class Stamp(NamedTuple):
    """Identifies a file."""

    size: int
    modified: int
    key: bytes  # also has ctime and inode, which change if size and mtime are set back


class SkippedImage(NamedTuple):
    """An image that could not be read."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class NewImages:
    """Images to add to a gallery: validated, then embedded.

    Vectors are in chunks, in memory or memory-mapped; each image has a row there, or −1.

    Attributes:
        table: their metadata; after `embed` without the unreadable images.
        skipped: the unreadable images.
        embedded: whether vectors were passed.
        has_labels: whether classes were passed with a list of files.
        only_files: whether the images are files without metadata.
        replaced: paths of other images of the gallery to remove in the same change.
    """

    def __init__(
        self,
        images: Images,
        dim: int,
        labels: Labels,
        vectors: Vectors | None,
        bad_images: BadImages,
        batch_size: int,
        progress: Progress | None,
        report: Report | None,
    ) -> None:
        source: Any = images
        self.table = (
            source if hasattr(source, "column_names") else metadata.from_images(source, labels)
        )
        counts = Counter(self.table["path"].to_pylist())
        if not counts:
            raise UsageError("no images. Pass at least one.")
        if repeated := [os.fsdecode(path) for path, count in counts.items() if count > 1]:
            raise UsageError(f"duplicate images: {join_first(repeated)}")
        self.has_labels = labels is not None
        self.only_files = not self.has_labels and self.table.column_names == ["path", "label"]
        self.only_files &= self.table["label"].null_count == len(self.table)
        self.progress, self.report = progress or ignore, report or ignore
        self.warn = report or (lambda line: warnings.warn(line, stacklevel=4))
        self.skipped: list[SkippedImage] = []
        self.replaced: Sequence[str] = ()
        self._bad_images, self._batch_size = bad_images, batch_size
        self._stamps: list[Stamp | None] = [None] * len(self.table)
        self._digests: list[str | None] = [None] * len(self.table)
        self._chunks: list[FloatArray] = []
        self._files: dict[int, Path] = {}
        self._rows = np.full(len(self.table), -1, np.int64)
        self.embedded = vectors is not None
        if self.embedded:
            all_images = np.arange(len(self.table))
            self._append(all_images, as_vectors(vectors, len(self.table), dim), None)

    def exclude(self, images: npt.NDArray[np.bool_]) -> None:
        """Drop images."""
        self._keep(np.flatnonzero(~images))

    def _keep(self, images: IntArray) -> None:
        self.table = self.table.take(metadata.arrow().array(images))
        self._rows, self._stamps = self._rows[images], [self._stamps[i] for i in images]

    def parts(self) -> Iterator[NewImages]:
        """Yield the images in parts, to embed one by one; unless other ranks help to embed."""
        size = len(self.table) if _workers_waiting.is_set() else CHUNK
        for rows in chunks(len(self.table), size):
            part = copy(self)
            part._keep(np.arange(rows.start, rows.stop))
            part.progress = partial(_shift_progress, self.progress, rows.start, len(self.table))
            yield part

    def embed(
        self, embedder: Embedder, fingerprint: str, gallery: Path, *, required: bool = False
    ) -> None:
        """Embed the images unless vectors were passed; skip unreadable ones.

        Vectors that are staged in the folder of the gallery are reused.
        """
        if self.embedded:
            return
        paths = metadata.values(self.table["path"])
        folder = gallery / STAGING / fingerprint[:32]
        self._stamps = [stamp_of(path) for path in paths]
        pending = self._reuse(folder)
        # A single chunk is not staged: there is nothing to resume.
        staged = folder if sum(map(len, pending)) > CHUNK else None
        if _workers_waiting.is_set() and staged:
            parts = [[paths[image] for image in part] for part in pending]
            job = _Job(parts, folder, fingerprint, self._batch_size)
            _broadcast(job)
            job.run(embedder, self.progress)
            pending = self._reuse(folder)  # unreadable images are still pending
        done = len(paths) - sum(map(len, pending))
        for images in pending:
            unreadable: dict[int, Exception] = {}
            try:
                vectors = embedder.encode(
                    [paths[image] for image in images],
                    self._batch_size,
                    progress=lambda count, done=done: self.progress(done + count, len(paths)),  # type: ignore[misc]
                    on_error=None if self._bad_images == "error" else unreadable.__setitem__,
                ).numpy()
            except ValueError as error:  # the error names the index, its cause the file
                if not isinstance(error.__cause__, ValueError):
                    raise
                raise error.__cause__ from None
            for row, problem in sorted(unreadable.items()):
                reason = problem.reason if isinstance(problem, ImageError) else str(problem)
                self.skipped.append(SkippedImage(paths[images[row]], reason))
            self._append(np.delete(images, [*unreadable]), vectors, staged)
            done += len(images)
            self.progress(done, len(paths))
        self._keep(np.flatnonzero(self._rows >= 0))
        with ThreadPoolExecutor() as pool:
            paths = metadata.values(self.table["path"])
            self._digests = [*pool.map(digest_of, paths, self._stamps)]
        if required and not len(self.table):
            count = pluralize(len(self.skipped), "image")
            raise ValueError(f"{count} cannot be read: {self.skipped[0]}")

    def stage(self, images: IntArray, vectors: FloatArray, fingerprint: str, gallery: Path) -> None:
        """Stage known vectors of some of the images for `embed`."""
        paths = metadata.values(self.table["path"].take(metadata.arrow().array(images)))
        _write(gallery / STAGING / fingerprint[:32], vectors, [*map(stamp_of, paths)])

    def _reuse(self, folder: Path) -> list[IntArray]:
        """Load the staged vectors; return the other images in chunks.

        Images are split by index, so that batches are the same after an interruption: the last
        bits of a vector depend on its batch.
        """
        self._chunks, self._files = [], {}
        keys: list[bytes] = []
        for file in sorted(folder.glob("[!.]*.arrow")):
            with suppress(KeyError, OSError, ValueError):  # its images are embedded again
                file_keys, vectors = _load(file)
                keys += file_keys
                self._files[len(self._chunks)] = file
                self._chunks.append(vectors)
        rows = {key: row for row, key in enumerate(keys)}
        self._rows = np.array([rows.get(stamp.key, -1) if stamp else -1 for stamp in self._stamps])
        images = np.flatnonzero(self._rows < 0)
        parts = np.split(images, np.flatnonzero(np.diff(images // CHUNK)) + 1)
        return parts if len(images) else []

    def _append(self, images: IntArray, vectors: FloatArray, folder: Path | None) -> None:
        """Add a chunk, and stage it in the folder, if any."""
        self._rows[images] = self._starts[-1] + np.arange(len(images))
        if folder and len(images):
            file = _write(folder, vectors, [self._stamps[i] for i in images])
            self._files[len(self._chunks)] = file
            _, vectors = _load(file)
        self._chunks.append(vectors)

    @property
    def _starts(self) -> IntArray:
        return np.cumsum([0, *map(len, self._chunks)])

    def blocks(self, manifest: Manifest) -> Iterator[FloatArray]:
        """Yield the vectors in the form that a gallery stores."""
        for part in chunks(len(self._rows), BLOCK):
            yield prepare_vectors(take(self._chunks, self._starts, self._rows[part]), manifest)

    def write(self, folder: Path, manifest: Manifest) -> SegmentInfo:
        """Write the images as a segment with the next ids."""
        count, first = len(self.table), manifest.next_id
        return write_segment(
            folder,
            manifest,
            metadata.with_files(self.table, self._stamps, self._digests),
            np.arange(first, first + count),
            self.blocks(manifest),
            indexes.resolve(manifest.index, count),
            self.progress,
        )

    def discard(self) -> None:
        """Remove the staged vectors, which are now in the gallery."""
        used = {*(np.searchsorted(self._starts, self._rows, "right") - 1).tolist()}
        files = [file for number, file in self._files.items() if number in used]
        for file in files:
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in files}:
            with suppress(OSError):  # another process may have files there
                folder.rmdir()
                folder.parent.rmdir()


def _shift_progress(progress: Progress, first: int, total: int, done: int, _: int) -> None:
    progress(first + done, total)


def as_vectors(values: Any, count: int, dim: int) -> FloatArray:
    """Return validated float32 vectors, [count, dim]."""
    if count == 0:
        return np.empty((0, dim), np.float32)
    vectors = as_embeddings(values, "vectors").float().cpu().numpy()
    if vectors.shape != (count, dim):
        raise UsageError(
            f"vectors must be [{count}, {dim}] for these images and this embedder, got "
            f"{list(vectors.shape)}"
        )
    return np.asarray(vectors)


class _Job(NamedTuple):
    """Chunks of images that the ranks embed together."""

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


_workers_waiting = Event()  # set while the other ranks wait for a job


def _broadcast(job: _Job | None) -> _Job | None:
    """Broadcast a job from rank 0 to all ranks; None if there is nothing to embed."""
    _workers_waiting.clear()
    objects: list[Any] = [job]
    dist.broadcast_object_list(objects, src=0)
    received: _Job | None = objects[0]
    return received


@contextmanager
def distributed_workers() -> Iterator[None]:
    """Share the embedding of images with the other ranks, which call `worker_loop`."""
    _workers_waiting.set()
    try:
        yield
    finally:
        if _workers_waiting.is_set():
            _broadcast(None)


def worker_loop(load: Callable[[], Embedder]) -> None:
    """Embed the share of this rank when rank 0 broadcasts a job."""
    job = _broadcast(None)
    if job is None:
        return
    embedder = load()
    if embedder.fingerprint() != job.fingerprint:
        raise ValueError(f"the embedder of rank {dist.get_rank()} differs from that of rank 0")
    job.run(embedder, ignore)


def stamp_of(path: str) -> Stamp | None:
    """Return the stamp of a file; None if it is missing."""
    try:
        status = os.stat(split_shard_path(path)[0])
    except OSError:  # reported when the image is opened
        return None
    size, modified = status.st_size, status.st_mtime_ns
    key = repr((size, modified, status.st_ctime_ns, status.st_ino, path))
    return Stamp(size, modified, metadata.encode(key))


def digest_of(path: str, stamp: Stamp | None) -> str | None:
    """Return the digest of a file with this stamp; None if it has changed, or for a shard."""
    if stamp is None or split_shard_path(path)[1]:
        return None
    try:
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
    except OSError:
        return None
    return digest if stamp_of(path) == stamp else None


def _write(folder: Path, vectors: FloatArray, stamps: Sequence[Stamp | None]) -> Path:
    """Write a chunk; its name is the checksum of its content."""
    pa = metadata.arrow()
    flat = pa.array(np.asarray(vectors, np.float32).ravel())
    columns = {
        "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
        "key": pa.array([stamp and stamp.key for stamp in stamps], pa.large_binary()),
    }
    stream = io.BytesIO()
    metadata.write(pa.table(columns), stream)
    content = stream.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hashlib.sha256(content).hexdigest()}.arrow"
    atomic_write(file, content)
    return file


def _load(file: Path) -> tuple[list[bytes], FloatArray]:
    """Return the keys and vectors of a chunk; raise ValueError if it is damaged."""
    if read_file_info(file).sha256 != file.stem:
        raise ValueError(f"{file} is damaged")
    table = metadata.read(file)
    vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
    return table["key"].to_pylist(), vectors
