"""Segments: rows that were written together, and all of them as one opened version."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from proximetry._util.errors import Steps
from proximetry._util.files import sync_folder, writing
from proximetry._util.tensors import chunks
from proximetry.metrics._search.inputs import IntArray, normalize
from proximetry.search import exact, indexes, rows
from proximetry.search.exact import FloatArray, Found, Mask, Part, Scores, Store, join
from proximetry.search.manifest import (
    FILES,
    SEGMENTS,
    DamagedGalleryError,
    Deleted,
    Digest,
    FileInfo,
    Manifest,
    SegmentInfo,
    new_file,
    new_name,
    read_digest,
    read_manifest,
)

# All pairs of so many rows are compared for duplicates: at 512 dimensions on one core 10 minutes.
COMPARED = 250_000
# Neighbors that an index proposes at first for each of more rows.
_ALIKE = 32
# A filter that allows so many rows × dimensions is scanned exactly: on one core 10 ms for one
# query, 70 ms for 100.
SCANNED = 1 << 24
# A list of more than this share of the rows is found by a scan as fast as by an index.
SHORTEST = 64
# Neighbors that show whether the rows around a query are allowed.
_NEAR = 10
# Allowed rows are gathered below this share of a segment, and masked above.
_GATHERED = 0.5
# Rows that recall is measured with.
_SAMPLE = 256
# Vectors whose squares would overflow float32.
_LONGEST = 1e15


def quiet(what: str, done: int, total: int) -> None:
    """Steps that nobody looks at."""


class Vectors(Protocol):
    """The vectors of a gallery, by place."""

    def take(self, places: IntArray) -> FloatArray:
        """The vectors at places, [n, dim]."""

    def scores(self, queries: FloatArray, places: IntArray) -> Scores:
        """The similarity of each query to the rows at its places; −inf at −1."""


class Version(Protocol):
    """One version of a gallery, ready to be searched.

    Rows have places, in the order of their ids; −1 is no place.
    """

    @property
    def manifest(self) -> Manifest:
        """What made the vectors, and how they are compared."""

    @property
    def store(self) -> Vectors:
        """The vectors."""

    @property
    def columns(self) -> list[str]:
        """The names of all columns."""

    def __len__(self) -> int: ...

    def select(self, where: rows.Where) -> Any:
        """What `chosen` and `search` take to mean the rows that meet the conditions."""

    def chosen(self, allowed: Any) -> IntArray:
        """The places of these rows, rising."""

    def ids(self, places: IntArray) -> IntArray:
        """The ids at places; −1 for none."""

    def places(self, ids: IntArray) -> IntArray:
        """The places of ids that are there; −1 for all others."""

    def take(self, places: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Columns of the rows at places, which are all there."""

    def paths_there(self, table: Any) -> dict[bytes, int]:
        """Those of a table's paths that are in the gallery, and their places."""

    def check_fits(self, table: Any) -> None:
        """Refuse rows that cannot be added on account of what their columns hold."""

    def search(self, queries: FloatArray, k: int, allowed: Any) -> Found:
        """The k nearest of the allowed rows, by place."""

    def similar_pairs(self, least: float, steps: Steps) -> tuple[IntArray, Scores]:
        """Pairs of places, smaller one first, that are at least so similar."""


def proposed_pairs(
    version: Version,
    blocks: Iterable[tuple[IntArray, FloatArray]],
    everything: Any,
    least: float,
    steps: Steps,
    most: int,
) -> tuple[IntArray, Scores]:
    """Compare rows, given as places and vectors, with those that a search finds.

    Lists that end above the threshold are searched again with a larger k, up to `most`.
    """
    pairs: list[IntArray] = [np.empty((0, 2), np.int64)]
    scores: list[Scores] = [np.empty(0)]
    done, total = 0, len(version)
    for here, vectors in blocks:
        waiting, k = np.arange(len(here)), _ALIKE
        while len(waiting):
            k = min(k, total, most)
            found = version.search(vectors[waiting], k, everything)
            full = (found.scores[:, -1] >= least) & (k < min(total, most))
            own = np.broadcast_to(here[waiting, None], found.places.shape)
            near = (found.scores >= least) & (found.places >= 0) & (found.places != own)
            near[full] = False
            pairs.append(np.sort(np.stack([own[near], found.places[near]], 1), 1))
            scores.append(found.scores[near])
            exact.check_pairs(sum(map(len, scores)) // 2)
            waiting, k = waiting[full], 4 * k
        done += len(here)
        steps("comparing with what the index finds", done, total)
    unique, first = np.unique(np.concatenate(pairs), axis=0, return_index=True)
    return unique, np.concatenate(scores)[first]


def all_pairs(
    store: Store, parts: list[Part], least: float, steps: Steps
) -> tuple[IntArray, Scores]:
    """Compare all rows with all."""

    def progress(done: int, total: int) -> None:
        steps("comparing all images", done, total)

    return exact.similar_pairs(store, parts, least, progress)


def prepared(vectors: FloatArray, manifest: Manifest) -> FloatArray:
    """Vectors as they are stored and searched for: of unit length if angles are compared."""
    if manifest.similarity == "cosine":
        return normalize(torch.from_numpy(np.ascontiguousarray(vectors))).numpy()
    if len(vectors) and np.abs(vectors).max() > _LONGEST:
        raise ValueError(
            f"vectors have entries above {_LONGEST:g}, whose squares float32 does not hold"
        )
    return vectors


def write_segment(
    folder: Path,
    manifest: Manifest,
    table: Any,
    ids: IntArray,
    blocks: Iterable[FloatArray],
    index: str,
    steps: Steps,
) -> SegmentInfo:
    """Write rows with their vectors, which are prepared, and an index if one is asked for."""
    name, count = new_name(), len(ids)
    home = folder / SEGMENTS / name
    with writing(home):
        home.mkdir(parents=True)
    files: dict[str, FileInfo] = {}
    lengths = [np.empty(0)]
    with new_file(home / FILES["vectors"]) as stream:
        _header(stream, np.float32, (count, manifest.dim))
        done = 0
        for block in blocks:
            stream.write(np.ascontiguousarray(block, np.float32))
            lengths.append(np.square(block.astype(np.float64)).sum(1))
            done += len(block)
            steps("writing vectors", done, count)
        if done != count:
            raise RuntimeError(f"{done} vectors for {count} rows")
    files["vectors"] = stream.info
    squares = np.concatenate(lengths)
    for kind, array in (("ids", ids), ("squares", squares.astype(np.float32))):
        if kind == "ids" or manifest.similarity == "euclidean":
            with new_file(home / FILES[kind]) as stream:
                _header(stream, array.dtype.type, array.shape)
                stream.write(np.ascontiguousarray(array))
            files[kind] = stream.info
    with new_file(home / FILES["rows"]) as stream:
        rows.write(table, stream)
    files["rows"] = stream.info
    longest = float(np.sqrt(squares.max(initial=0.0)))
    effort, recall = 1, None
    if index:
        place = home / FILES["index"]
        vectors = _mapped(home / FILES["vectors"], (count, manifest.dim), np.float32)
        with writing(place):
            indexes.build(index, vectors, manifest.similarity, place, steps)
            with place.open("rb+") as file:
                os.fsync(file.fileno())
        files["index"] = read_digest(place)
        steps("measuring recall", 0, 1)
        store = Store([vectors], np.array([0, count]), manifest.similarity, longest * (1 + 1e-6))
        part = Part(vectors, squares.astype(np.float32) if "squares" in files else None, 0)
        effort, recall = _calibrate(indexes.Index(place, index), store, part)
        steps("measuring recall", 1, 1)
    for changed in (home, home.parent):
        sync_folder(changed)
    return SegmentInfo(name, count, index, longest, files, effort, recall)


def _calibrate(index: indexes.Index, store: Store, part: Part) -> tuple[int, float]:
    """Raise the effort of an index until its recall@10 suffices; return effort and recall.

    Recall is measured against an exact scan, for a sample of the rows as queries.
    """
    count = len(part.vectors)
    sample = np.random.default_rng(0).choice(count, min(count, _SAMPLE), replace=False)
    queries, k = part.vectors[np.sort(sample)], min(11, count)  # a row finds itself, which is free
    farthest = store.search([part], queries, k).scores[:, -1:]
    while True:
        scores = store.settle(queries, index.candidates(queries, k), k).scores
        recall = float((scores[:, 1:] >= farthest).mean())
        if recall >= indexes.RECALL or index.effort >= indexes.MOST_EFFORT:
            return index.effort, recall
        index.effort *= 2


def write_deleted(folder: Path, ids: IntArray) -> Deleted | None:
    """Write the ids that are removed."""
    if not len(ids):
        return None
    name = f"deleted-{new_name()}.npy"
    with new_file(folder / name) as stream:
        _header(stream, np.int64, ids.shape)
        stream.write(ids)
    return Deleted(name, len(ids), stream.info)


def _header(stream: Digest, dtype: Any, shape: tuple[int, ...]) -> None:
    about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, about)


def _mapped(file: Path, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    try:
        # Copy-on-write, as torch does not take what cannot be written to.
        array = np.lib.format.open_memmap(file, mode="c")
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy parses the header as Python, which raises anything
        raise DamagedGalleryError(file, error) from error
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise DamagedGalleryError(
            file, f"it holds {array.dtype} of shape {array.shape}, not {np.dtype(dtype)} of {shape}"
        )
    return np.asarray(array)


def check_digest(file: Path, info: FileInfo, steps: Steps = quiet) -> None:
    """Compare a file with the checksum it was written with."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        steps(f"checking {file.name}", done, info.bytes)

    _check_size(file, info)
    if read_digest(file, count) != info:
        raise DamagedGalleryError(file, "its checksum is not the one it was written with")


def check_digests(
    folder: Path, info: SegmentInfo, kinds: Container[str] = FILES, steps: Steps = quiet
) -> None:
    """Compare files of a segment with their checksums."""
    for kind, about in info.files.items():
        if kind in kinds:
            check_digest(folder / SEGMENTS / info.name / FILES[kind], about, steps)


@dataclass(frozen=True)
class Segment:
    """A segment that is open: nothing of it is read before it is needed."""

    info: SegmentInfo
    vectors: FloatArray
    ids: IntArray
    rows: Any
    squares: FloatArray | None
    index: indexes.Index | None

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, info: SegmentInfo) -> Segment:
        """Open every file of a segment; raises FileNotFoundError for one that is gone."""
        home = folder / SEGMENTS / info.name
        for kind, about in info.files.items():
            _check_size(home / FILES[kind], about)
        check_digests(folder, info, ("ids",))  # few bytes, on which everything else depends
        squared = manifest.similarity == "euclidean"
        found = cls(
            info,
            _mapped(home / FILES["vectors"], (info.rows, manifest.dim), np.float32),
            _mapped(home / FILES["ids"], (info.rows,), np.int64),
            rows.read(home / FILES["rows"]),
            _mapped(home / FILES["squares"], (info.rows,), np.float32) if squared else None,
            indexes.Index(home / FILES["index"], info.index, info.effort) if info.index else None,
        )
        table = home / FILES["rows"]
        if len(found.rows) != info.rows:
            raise DamagedGalleryError(table, f"it has {len(found.rows)} rows, not {info.rows}")
        for name in ("path", "label"):
            kind = rows.column_type(found.rows, name)
            if kind is None or not rows.arrow().types.is_large_binary(kind):
                raise DamagedGalleryError(table, f"its column {name} is {kind}")
        return found


def _check_size(file: Path, info: FileInfo) -> None:
    size = file.stat().st_size
    if size != info.bytes:
        raise DamagedGalleryError(file, f"it has {size} bytes, not {info.bytes}")


class Snapshot:
    """One version of a gallery, with every file open: later changes do not reach it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.segments = [Segment.open(folder, manifest, info) for info in manifest.segments]
        self.deleted: IntArray = np.empty(0, np.int64)
        if manifest.deleted:
            file = folder / manifest.deleted.name
            check_digest(file, manifest.deleted.file)  # else removed images could come back
            self.deleted = _mapped(file, (manifest.deleted.count,), np.int64).copy()
        self._check_ids()
        self.starts = np.cumsum([0, *(len(segment.ids) for segment in self.segments)])
        self.store = Store(
            [segment.vectors for segment in self.segments],
            self.starts,
            manifest.similarity,
            max([segment.info.longest for segment in self.segments], default=0.0) * (1 + 1e-6),
        )

    @classmethod
    def open(cls, folder: Path) -> Snapshot:
        """Open the version that is there now."""
        manifest = read_manifest(folder)
        while True:
            try:
                return cls(folder, manifest)
            except FileNotFoundError as error:
                # A writer may have replaced the manifest and removed the old files meanwhile.
                before, manifest = manifest, read_manifest(folder)
                if manifest == before:
                    raise DamagedGalleryError(folder, f"{error.filename} is missing") from None

    def _check_ids(self) -> None:
        """Check that ids rise through all segments, as their order is relied upon."""
        last = -1
        for segment in self.segments:
            ids = segment.ids
            if len(ids) and (ids[0] <= last or (np.diff(ids) <= 0).any()):
                raise DamagedGalleryError(self.folder, f"ids of segment {segment.info.name}")
            last = int(ids[-1]) if len(ids) else last
        if last >= self.manifest.next_id:
            raise DamagedGalleryError(self.folder, f"id {last} is above the next id")

    def check_digests(self) -> None:
        """Compare the files that changes depend on with their checksums, before a change."""
        for segment in self.segments:
            check_digests(self.folder, segment.info, ("rows",))

    def __len__(self) -> int:
        return int(self.starts[-1]) - len(self.deleted)

    @cached_property
    def alive(self) -> list[Mask | None]:
        """Of each segment, which rows are not removed; None where none is."""
        found: list[Mask | None] = []
        for segment in self.segments:
            gone = self.deleted[_between(self.deleted, segment.ids)]
            mask = np.ones(len(segment.ids), np.bool_)
            mask[np.searchsorted(segment.ids, gone)] = False
            found.append(mask if len(gone) else None)
        return found

    def select(self, where: rows.Where) -> list[Mask | None]:
        """Of each segment, which rows are there and meet the conditions."""
        if not where or not self.segments:
            return self.alive
        met = rows.select([segment.rows for segment in self.segments], where)
        return [
            mask if alive is None else mask & alive
            for mask, alive in zip(met, self.alive, strict=True)
        ]

    def chosen(self, allowed: list[Mask | None]) -> IntArray:
        """The places of the allowed rows."""
        found = [
            start + (np.arange(len(segment.ids)) if mask is None else np.flatnonzero(mask))
            for start, segment, mask in zip(self.starts, self.segments, allowed, strict=False)
        ]
        return np.concatenate([np.empty(0, np.int64), *found])

    def ids(self, places: IntArray) -> IntArray:
        """The ids at places; −1 for none."""
        found = np.full(places.shape, -1, np.int64)
        for start, end, segment in zip(
            self.starts[:-1], self.starts[1:], self.segments, strict=True
        ):
            here = (places >= start) & (places < end)
            found[here] = segment.ids[places[here] - start]
        return found

    def places(self, ids: IntArray) -> IntArray:
        """The places of ids that are not removed; −1 for all others."""
        found = np.full(ids.shape, -1, np.int64)
        for start, segment in zip(self.starts, self.segments, strict=False):
            row = np.searchsorted(segment.ids, ids).clip(max=len(segment.ids) - 1)
            here = segment.ids[row] == ids
            found[here] = start + row[here]
        found[np.isin(ids, self.deleted)] = -1
        return found

    def take(self, places: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Columns of the rows at places, which are all there."""
        found: dict[str, list[Any]] = {name: [None] * len(places) for name in columns}
        owner = np.searchsorted(self.starts, places, "right") - 1
        for number in np.unique(owner):
            table = self.segments[number].rows
            chosen = np.flatnonzero(owner == number)
            part = rows.arrow().array(places[chosen] - self.starts[number])
            for name in found:
                if name in table.column_names:
                    values = rows.values(table[name].take(part))
                    for place, value in zip(chosen, values, strict=True):
                        found[name][place] = value
        return found

    def paths_there(self, table: Any) -> dict[bytes, int]:
        """Those of the table's paths that are in the gallery, and their places."""
        there: dict[bytes, int] = {}
        wanted = table["path"].combine_chunks()
        for segment, start, mask in zip(self.segments, self.starts, self.alive, strict=False):
            met = rows.contains(segment.rows["path"], wanted)
            met = met if mask is None else met & mask
            found = np.flatnonzero(met)
            paths = segment.rows["path"].take(rows.arrow().array(found)).to_pylist()
            there |= dict(zip(paths, (found + start).tolist(), strict=True))
        return there

    def check_fits(self, table: Any) -> None:
        """Refuse rows whose columns hold something else than here."""
        rows.check_fits([segment.rows for segment in self.segments], table)

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns."""
        names = (name for segment in self.segments for name in segment.rows.column_names)
        return [name for name in dict.fromkeys(("path", "label", *names)) if name not in rows.STAMP]

    @property
    def has_labels(self) -> bool:
        """Whether any image has a class."""
        return any(segment.rows["label"].null_count < len(segment.ids) for segment in self.segments)

    def stamps_below(self, folder: str) -> Iterator[tuple[str, int | None, int | None]]:
        """Path, size and time of modification of the images below a folder, as embedded."""
        for segment, mask in zip(self.segments, self.alive, strict=True):
            met = rows.below(segment.rows, folder)
            part = rows.arrow().array(np.flatnonzero(met if mask is None else met & mask))
            there = [name for name in rows.STAMP if name in segment.rows.column_names]
            known = [rows.values(segment.rows[name].take(part)) for name in there]
            empty = [[None] * len(part)] * (len(rows.STAMP) - len(there))
            paths = rows.values(segment.rows["path"].take(part))
            yield from zip(paths, *known, *empty, strict=True)

    def search(self, queries: FloatArray, k: int, allowed: list[Mask | None]) -> Found:
        """Return the k nearest of the allowed rows, as good as the indexes are, by place."""
        scanned: list[Part] = []
        found: list[Found] = []
        for start, segment, mask in zip(self.starts, self.segments, allowed, strict=False):
            rows = len(segment.ids)
            count = rows if mask is None else int(np.count_nonzero(mask))
            part = Part(segment.vectors, segment.squares, int(start), allowed=mask)
            if mask is not None and count < _GATHERED * rows:
                part = part._replace(rows=np.flatnonzero(mask), allowed=None)
            few = mask is not None and count * segment.vectors.shape[1] <= SCANNED
            if segment.index is None or few or count**2 < SHORTEST * k * rows:
                scanned.append(part)
            else:
                found.append(self._search_index(segment.index, part, mask, count, queries, k))
        if scanned or not found:
            found.append(self.store.search(scanned, queries, k))
        return found[0] if len(found) == 1 else join(found, k)

    def _search_index(
        self,
        index: indexes.Index,
        part: Part,
        mask: Mask | None,
        count: int,
        queries: FloatArray,
        k: int,
    ) -> Found:
        """Return the k nearest of the allowed rows that an index proposes.

        All allowed rows are scanned for a query that has less than half of its share of them
        around it, so that the index proposes too few.
        """
        share, near = count / len(part.vectors), k if mask is None else max(k, _NEAR)
        rows = index.candidates(queries, near, share)
        hits = rows >= 0 if mask is None else (rows >= 0) & mask[rows]
        short = hits.sum(1) < min(index.count(near), count)
        short |= hits[:, : math.ceil(2 * near / share)].sum(1) < min(near, count)
        rows = -np.sort(np.where(hits, -rows, 1), axis=1)[:, : hits.sum(1).max(initial=0)]
        found = self.store.settle(queries, np.where(rows >= 0, rows + part.start, -1), k)
        if short.any():
            again = self.store.search([part], queries[short], k)
            found.places[short], found.scores[short] = again
        return found

    def parts(self) -> list[Part]:
        """All rows that are not removed, to be scanned."""
        return [
            Part(segment.vectors, segment.squares, int(start), allowed=mask)
            for start, segment, mask in zip(self.starts, self.segments, self.alive, strict=False)
        ]

    def similar_pairs(self, least: float, steps: Steps) -> tuple[IntArray, Scores]:
        """Return all pairs that are so similar or, of many rows, those that an index proposes."""
        if len(self) <= COMPARED or not any(segment.index for segment in self.segments):
            return all_pairs(self.store, self.parts(), least, steps)
        return proposed_pairs(self, self._blocks(), self.alive, least, steps, len(self))

    def _blocks(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """Places and vectors of all rows, some after others."""
        for segment, start, mask in zip(self.segments, self.starts, self.alive, strict=False):
            for part in chunks(len(segment.ids), 1024):
                here = np.arange(part.start, part.stop)
                here = here if mask is None else here[mask[part]]
                yield here + start, segment.vectors[here]

    def without(self, ids: IntArray) -> Manifest:
        """The manifest of this gallery with more ids removed; their file is written."""
        gone = np.union1d(self.deleted, ids)
        return replace(self.manifest, deleted=write_deleted(self.folder, gone))


def _between(ids: IntArray, all_ids: IntArray) -> Mask:
    """Which ids stand in a sorted array of ids."""
    if not len(all_ids):
        return np.zeros(len(ids), np.bool_)
    row = np.searchsorted(all_ids, ids).clip(max=len(all_ids) - 1)
    return np.asarray(all_ids[row] == ids)
