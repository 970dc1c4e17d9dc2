"""Segments (rows that were written together), and all of them as one opened version."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from proximetry._util.files import sync_folder, writing
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.metrics._search.embeddings import normalize
from proximetry.search import indexes, rows
from proximetry.search.exact import FloatArray, Hits, Mask, Part, Scores, Store, merge_hits, take
from proximetry.search.manifest import (
    FILES,
    SEGMENTS,
    DamagedGalleryError,
    Deleted,
    FileInfo,
    Manifest,
    SegmentInfo,
    read_digest,
    read_manifest,
)

# A filter that allows this many rows × dimensions is scanned exactly: on one core 10 ms for one
# query, 70 ms for 100.
SCANNED = 1 << 24
# A scan is as fast as an index for a list of more than this share of the rows.
SHORTEST = 64
_NEAR = 10  # neighbors that show whether the rows around a query are allowed
_GATHERED = 0.5  # share of a segment below which allowed rows are gathered, else masked
_SAMPLE = 256  # rows that recall is measured with
_LONGEST = 1e15  # entries of vectors whose squares would overflow float32


def no_progress(done: int, total: int) -> None:
    """Ignore progress."""


def prepare_vectors(vectors: FloatArray, manifest: Manifest) -> FloatArray:
    """Return vectors as they are stored and searched for: unit length for cosines."""
    if manifest.similarity == "cosine":
        return normalize(torch.from_numpy(np.ascontiguousarray(vectors))).numpy()
    if len(vectors) and np.abs(vectors).max() > _LONGEST:
        raise ValueError(f"vectors have entries above {_LONGEST:g}: their squares overflow float32")
    return vectors


def write_segment(
    folder: Path,
    manifest: Manifest,
    table: Any,
    ids: IntArray,
    blocks: Iterable[FloatArray],
    index: str,
    progress: Progress,
) -> SegmentInfo:
    """Write rows with their prepared vectors, and an index unless `index` is ""."""
    name, count = uuid4().hex, len(ids)
    home = folder / SEGMENTS / name
    paths = {kind: home / file for kind, file in FILES.items()}
    with writing(home):
        home.mkdir(parents=True)
        with paths["vectors"].open("wb") as stream:
            header = {"descr": "<f4", "fortran_order": False, "shape": (count, manifest.dim)}
            np.lib.format.write_array_header_1_0(stream, header)
            for block in blocks:
                stream.write(np.ascontiguousarray(block, np.float32).data)
        vectors = _open_array(paths["vectors"], (count, manifest.dim), np.float32)
        parts = (vectors[part].astype(np.float64) for part in chunks(count, 4096))
        squares = np.concatenate([np.square(part).sum(1) for part in parts])
        longest = float(np.sqrt(squares.max()))
        _save(paths["ids"], ids)
        with paths["rows"].open("wb") as stream:
            rows.write(table, stream)
        lengths = squares.astype(np.float32) if manifest.similarity == "euclidean" else None
        if lengths is not None:
            _save(paths["squares"], lengths)
        effort, recall = 1, None
        if index:
            indexes.build(index, vectors, manifest.similarity, paths["index"], progress)
            store = Store([vectors], np.array([0, count]), manifest.similarity, _above(longest))
            built = indexes.Index(paths["index"], index)
            effort, recall = _calibrate(built, store, Part(vectors, lengths, 0))
        files = {kind: _seal(file) for kind, file in paths.items() if file.exists()}
    for changed in (home, home.parent):
        sync_folder(changed)
    return SegmentInfo(name, count, index, longest, files, effort, recall)


def _above(longest: float) -> float:
    """Return a bound on the length of vectors whatever its rounding."""
    return longest * (1 + 1e-6)


def _save(file: Path, array: npt.NDArray[Any]) -> None:
    buffer = io.BytesIO()  # np.save does not report a full disk
    np.save(buffer, array)
    file.write_bytes(buffer.getbuffer())


def _seal(file: Path) -> FileInfo:
    """Flush a new file to disk, and return its size and checksum."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    return read_digest(file)


def _calibrate(index: indexes.Index, store: Store, part: Part) -> tuple[int, float]:
    """Raise the effort of an index until its recall@10 suffices; return effort and recall.

    Recall is measured against an exact scan, for a sample of the rows as queries.
    """
    count = len(part.vectors)
    sample = np.random.default_rng(0).choice(count, min(count, _SAMPLE), replace=False)
    queries, k = part.vectors[np.sort(sample)], min(11, count)  # a row finds itself
    farthest = store.search([part], queries, k).scores[:, -1:]
    while True:
        scores = store.rescore(queries, index.candidates(queries, k), k).scores
        recall = float((scores[:, 1:] >= farthest).mean())
        if recall >= indexes.RECALL or index.effort >= indexes.MOST_EFFORT:
            return index.effort, recall
        index.effort *= 2


def write_deleted(folder: Path, ids: IntArray) -> Deleted | None:
    """Write the ids that are removed."""
    if not len(ids):
        return None
    file = folder / f"deleted-{uuid4().hex}.npy"
    with writing(file):
        _save(file, ids)
        return Deleted(file.name, len(ids), _seal(file))


def _open_array(file: Path, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    try:
        # Copy-on-write, as torch does not accept read-only arrays.
        array = np.lib.format.open_memmap(file, mode="c")
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy parses the header as Python, which raises anything
        raise DamagedGalleryError(file, error) from error
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise DamagedGalleryError(
            file, f"it has {array.dtype} of shape {array.shape}, not {np.dtype(dtype)} of {shape}"
        )
    return np.asarray(array)


def check_file(file: Path, info: FileInfo, *, digest: bool = True) -> None:
    """Compare a file with its size, and with its checksum."""
    size = file.stat().st_size
    if size != info.bytes:
        raise DamagedGalleryError(file, f"it has {size} bytes, not {info.bytes}")
    if digest and read_digest(file) != info:
        raise DamagedGalleryError(file, "its checksum differs from the manifest")


def check_segment(folder: Path, info: SegmentInfo) -> None:
    """Compare all files of a segment with their checksums."""
    for kind, file in info.paths(folder).items():
        check_file(file, info.files[kind])


@dataclass(frozen=True)
class Segment:
    """An open segment: nothing of it is read before it is needed."""

    part: Part  # all vectors
    ids: IntArray
    rows: Any
    index: indexes.Index | None

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, info: SegmentInfo, start: int) -> Segment:
        """Open every file of a segment; raises FileNotFoundError for a missing one."""
        files = info.paths(folder)
        for kind, about in info.files.items():
            # The ids are few bytes, on which everything else depends.
            check_file(files[kind], about, digest=kind == "ids")
        table = rows.read(files["rows"])
        if len(table) != info.rows:
            raise DamagedGalleryError(files["rows"], f"it has {len(table)} rows, not {info.rows}")
        for name in ("path", "label"):
            kind = rows.column_type(table, name)
            if kind is None or not rows.arrow().types.is_large_binary(kind):
                raise DamagedGalleryError(files["rows"], f"its column {name} is {kind}")
        squares = None
        if "squares" in files:
            squares = _open_array(files["squares"], (info.rows,), np.float32)
        vectors = _open_array(files["vectors"], (info.rows, manifest.dim), np.float32)
        return cls(
            Part(vectors, squares, start),
            _open_array(files["ids"], (info.rows,), np.int64),
            table,
            indexes.Index(files["index"], info.index, info.effort) if info.index else None,
        )


class Snapshot:
    """One version of a gallery, with every file open: later changes do not reach it.

    Rows have positions, in the order of their ids over all segments; −1 is none.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        infos = manifest.segments
        self.starts = np.cumsum([0, *(info.rows for info in infos)])
        self.segments = [
            Segment.open(folder, manifest, info, start)
            for info, start in zip(infos, self.starts.tolist(), strict=False)
        ]
        self.deleted: IntArray = np.empty(0, np.int64)
        if manifest.deleted:
            file = folder / manifest.deleted.name
            check_file(file, manifest.deleted.file)  # else removed images could come back
            self.deleted = _open_array(file, (manifest.deleted.count,), np.int64).copy()
        ids = self._ids[:-1]  # their order is relied upon
        if (np.diff(ids, prepend=-1, append=manifest.next_id) <= 0).any():
            raise DamagedGalleryError(folder, "ids are not in rising order")
        self.store = Store(
            [segment.part.vectors for segment in self.segments],
            self.starts,
            manifest.similarity,
            _above(max([info.longest for info in infos], default=0.0)),
        )

    @classmethod
    def open(cls, folder: Path) -> Snapshot:
        """Open the current version."""
        manifest = read_manifest(folder)
        while True:
            try:
                return cls(folder, manifest)
            except FileNotFoundError as error:
                # A writer may have replaced the manifest and removed the old files meanwhile.
                before, manifest = manifest, read_manifest(folder)
                if manifest == before:
                    raise DamagedGalleryError(folder, f"{error.filename} is missing") from None

    def check_tables(self) -> None:
        """Compare the files that changes depend on with their checksums, before a change."""
        for info in self.manifest.segments:
            check_file(info.paths(self.folder)["rows"], info.files["rows"])

    def __len__(self) -> int:
        return int(self.starts[-1]) - len(self.deleted)

    @property
    def largest_k(self) -> int:
        """The largest k of a search."""
        return max(1, len(self))

    @cached_property
    def table(self) -> Any:
        """The metadata of all rows."""
        return rows.stack([rows.table({"path": []}), *(segment.rows for segment in self.segments)])

    @cached_property
    def alive(self) -> Mask:
        """Which rows are not removed."""
        return ~np.isin(self._ids[:-1], self.deleted)

    def select(self, where: rows.Where) -> Any:
        """Return a mask of the rows that meet the conditions."""
        if where and self.segments:
            return rows.select(self.table, where) & self.alive
        return self.alive

    def allowed_positions(self, allowed: Any) -> IntArray:
        """Return the positions of the allowed rows, rising."""
        return np.flatnonzero(allowed)

    @cached_property
    def _ids(self) -> IntArray:
        """All ids, and −1 at the end."""
        return np.concatenate([*(segment.ids for segment in self.segments), [-1]])

    def ids(self, positions: IntArray) -> IntArray:
        """Return the ids at positions; −1 for none."""
        return self._ids[positions]

    def positions(self, ids: IntArray) -> IntArray:
        """Return the positions of ids; −1 for removed and unknown ones."""
        rows = np.searchsorted(self._ids[:-1], ids)
        known = (ids >= 0) & (self._ids[rows] == ids) & ~np.isin(ids, self.deleted)
        return np.where(known, rows, -1)

    def vectors(self, positions: IntArray) -> FloatArray:
        """Return the vectors at positions, [n, dim]; zeros at −1."""
        vectors, there = np.zeros((len(positions), self.manifest.dim), np.float32), positions >= 0
        if there.any():
            vectors[there] = take(self.store.vectors, self.starts, positions[there])
        return vectors

    def scores(self, queries: FloatArray, positions: IntArray) -> Scores:
        """Return the scores of each query with the rows at its positions; −inf at −1."""
        return self.store.scores(queries, positions)

    def take(self, positions: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns of the rows at positions; None at −1."""
        result = {name: np.full(len(positions), None, np.object_) for name in columns}
        owner = np.searchsorted(self.starts, positions, "right") - 1
        for number in np.unique(owner[owner >= 0]):
            table, here = self.segments[number].rows, owner == number
            part = rows.arrow().array(positions[here] - self.starts[number])
            for name in result:
                if name in table.column_names:
                    result[name][here] = rows.values(table[name].take(part))
        return {name: values.tolist() for name, values in result.items()}

    def find_paths(self, table: Any) -> dict[bytes, int]:
        """Return those of a table's paths that are in the gallery, and their positions."""
        paths = self.table["path"]
        mask = rows.contains(paths, table["path"].combine_chunks()) & self.alive
        return dict(zip(paths.filter(mask).to_pylist(), np.flatnonzero(mask).tolist(), strict=True))

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns."""
        return [name for name in self.table.column_names if name not in rows.STAMP]

    def count_labels(self) -> dict[str, int]:
        """Return the number of images of each class."""
        labels = self.table["label"].filter(self.alive).drop_null()
        pairs = rows.arrow("pyarrow.compute").value_counts(labels)
        names = rows.values(pairs.field("values"))
        return dict(zip(names, pairs.field("counts").to_pylist(), strict=True))

    def stamps_below(self, folder: str) -> Iterator[tuple[str, int | None, int | None]]:
        """Yield path, size and time of modification of the images below a folder, as embedded."""
        prefix = rows.encode(os.path.join(folder, ""))
        below = rows.arrow("pyarrow.compute").starts_with(self.table["path"], prefix)
        positions = np.flatnonzero(np.asarray(below) & self.alive)
        return zip(*self.take(positions, ["path", *rows.STAMP]).values(), strict=True)

    def search(self, queries: FloatArray, k: int, allowed: Any) -> Hits:
        """Return the k nearest of the allowed rows, by index or by an exact scan."""
        k = min(k, self.largest_k)
        scanned: list[Part] = []
        hits: list[Hits] = []
        for segment in self.segments:
            part, total = segment.part, len(segment.ids)
            mask = allowed[part.start : part.start + total]
            count = int(np.count_nonzero(mask))
            if count < _GATHERED * total:
                part = part._replace(rows=np.flatnonzero(mask))
            elif count < total:
                part = part._replace(allowed=mask)
            few = count < total and count * self.manifest.dim <= SCANNED
            if segment.index is None or few or count**2 < SHORTEST * k * total:
                scanned.append(part)
            else:
                hits.append(self._search_index(segment.index, part, mask, queries, k))
        if scanned or not hits:
            hits.append(self.store.search(scanned, queries, k))
        return hits[0] if len(hits) == 1 else merge_hits(hits, k)

    def _search_index(
        self, index: indexes.Index, part: Part, mask: Mask, queries: FloatArray, k: int
    ) -> Hits:
        """Return the k nearest of the allowed rows among the candidates of an index.

        All allowed rows are scanned for a query that has less than half of its share of them
        around it, so that the index returns too few.
        """
        count = int(np.count_nonzero(mask))
        share, near = count / len(mask), k if count == len(mask) else max(k, _NEAR)
        rows = index.candidates(queries, near, share)
        met = (rows >= 0) & mask[rows]
        short = met.sum(1) < min(index.count(near), count)
        short |= met[:, : math.ceil(2 * near / share)].sum(1) < min(near, count)
        rows = -np.sort(np.where(met, -rows, 1), axis=1)[:, : met.sum(1).max(initial=0)]
        hits = self.store.rescore(queries, np.where(rows >= 0, rows + part.start, -1), k)
        if short.any():
            hits.positions[short], hits.scores[short] = self.store.search([part], queries[short], k)
        return hits

    def blocks(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """Yield positions and vectors of all rows."""
        positions = self.allowed_positions(self.alive)
        for part in chunks(len(positions), 1024):
            yield positions[part], self.vectors(positions[part])

    def without(self, ids: IntArray) -> Manifest:
        """Return the manifest with more ids removed, after writing their file."""
        all_deleted = np.union1d(self.deleted, ids)
        return replace(self.manifest, deleted=write_deleted(self.folder, all_deleted))
