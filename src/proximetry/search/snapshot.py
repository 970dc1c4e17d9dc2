"""`Snapshot`: one version of a gallery, with all its segments."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from proximetry._util.types import IntArray
from proximetry.search import indexes, metadata
from proximetry.search.conditions import Where
from proximetry.search.effort import DEFAULT_EFFORT, Effort
from proximetry.search.exact import FloatArray, Hits, Mask, Part, Scores, Store, merge_hits, take
from proximetry.search.gpu_scan import GpuScan
from proximetry.search.manifest import DamagedGalleryError, Manifest, read_manifest
from proximetry.search.segment import Segment, check_file, open_array

if TYPE_CHECKING:
    from proximetry.search.new_images import Stamp

MAX_SCAN_ENTRIES = 1 << 24
"""Maximum rows × dimensions for scanning the rows that a filter allows: 10 ms per query."""
SCAN_FACTOR = 64
"""Scan if (allowed rows)² < SCAN_FACTOR × k × rows, where an index is not faster."""
_MIN_FILTERED_K = 10  # of a search in an index, to estimate the allowed share near a query
_MAX_GATHERED = 0.5  # share of a segment up to which allowed rows are gathered, else masked


class StoredFile(NamedTuple):
    """The file of an image when it was embedded; unknown values are None."""

    position: int
    path: str
    size: int | None
    modified: int | None
    digest: str | None

    def is_changed(self, stamp: Stamp) -> bool:
        """Return whether size or modification time differ."""
        return self.size is not None and (self.size, self.modified) != stamp[:2]


class Snapshot:
    """One version of a gallery, with every file open, so that later changes have no effect.

    Rows have positions, in the order of their ids over all segments; −1 means none.
    """

    gpu_scan: GpuScan | None = None

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
            check_file(file, manifest.deleted.file)  # else removed images could reappear
            self.deleted = open_array(file, (manifest.deleted.count,), np.int64).copy()
        if (np.diff(self._ids[:-1], prepend=-1, append=manifest.next_id) <= 0).any():
            raise DamagedGalleryError(folder, "ids are not in ascending order")
        self.store = Store(
            [segment.part.vectors for segment in self.segments],
            self.starts,
            manifest.similarity,
            max([info.longest for info in infos], default=0.0),
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
                previous, manifest = manifest, read_manifest(folder)
                if manifest == previous:
                    raise DamagedGalleryError(folder, f"{error.filename} is missing") from None

    def check_tables(self) -> None:
        """Verify the checksums of the metadata files, which changes depend on."""
        for info in self.manifest.segments:
            check_file(info.paths(self.folder)["rows"], info.files["rows"])

    def __len__(self) -> int:
        return int(self.starts[-1]) - len(self.deleted)

    @property
    def max_k(self) -> int:
        """The largest k of a search."""
        return max(1, len(self))

    @cached_property
    def table(self) -> Any:
        """The metadata of all rows."""
        return metadata.concat(
            [metadata.from_columns({"path": []}), *(segment.table for segment in self.segments)]
        )

    @cached_property
    def alive(self) -> Mask:
        """A mask of the rows that are not removed."""
        return ~np.isin(self._ids[:-1], self.deleted)

    def select(self, where: Where) -> Any:
        """Return a mask of the rows that match the conditions."""
        if where and self.segments:
            return metadata.select(self.table, where) & self.alive
        return self.alive

    def allowed_positions(self, allowed: Any) -> IntArray:
        """Return the positions of the allowed rows, in ascending order."""
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
        positions = np.searchsorted(self._ids[:-1], ids)
        exists = (ids >= 0) & (self._ids[positions] == ids) & ~np.isin(ids, self.deleted)
        return np.where(exists, positions, -1)

    def vectors(self, positions: IntArray) -> FloatArray:
        """Return the vectors at positions, [n, dim]; zeros at −1."""
        vectors, valid = np.zeros((len(positions), self.manifest.dim), np.float32), positions >= 0
        if valid.any():
            vectors[valid] = take(self.store.vectors, self.starts, positions[valid])
        return vectors

    def scores(self, queries: FloatArray, positions: IntArray) -> Scores:
        """Return the scores of each query with the rows at its positions; −inf at −1."""
        return self.store.scores(queries, positions)

    def take(self, positions: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns of the rows at positions; None at −1."""
        result = {name: np.full(len(positions), None, np.object_) for name in columns}
        owners = np.searchsorted(self.starts, positions, "right") - 1
        for number in np.unique(owners[owners >= 0]):
            table, mask = self.segments[number].table, owners == number
            rows = metadata.arrow().array(positions[mask] - self.starts[number])
            for name in result:
                if name in table.column_names:
                    column = metadata.values(table[name].take(rows))  # may have lists
                    result[name][mask] = np.fromiter(column, np.object_, len(column))
        return {name: values.tolist() for name, values in result.items()}

    def find_paths(self, table: Any) -> dict[bytes, int]:
        """Return the paths of a table that are in the gallery, and their positions."""
        paths = self.table["path"]
        mask = metadata.contains(paths, table["path"].combine_chunks()) & self.alive
        return dict(zip(paths.filter(mask).to_pylist(), np.flatnonzero(mask).tolist(), strict=True))

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns."""
        return [name for name in self.table.column_names if name not in metadata.HIDDEN]

    def count_labels(self) -> dict[str, int]:
        """Return the number of images of each class."""
        labels = self.table["label"].filter(self.alive).drop_null()
        pairs = metadata.arrow("pyarrow.compute").value_counts(labels)
        names = metadata.values(pairs.field("values"))
        return dict(zip(names, pairs.field("counts").to_pylist(), strict=True))

    def sample_ids(self, count: int) -> IntArray:
        """Return the ids of up to `count` random images."""
        ids = self.ids(self.allowed_positions(self.alive))
        return np.random.default_rng(0).permutation(ids)[:count]

    @property
    def index_kinds(self) -> list[str]:
        """The index of each segment."""
        return [info.index or indexes.EXACT for info in self.manifest.segments]

    @property
    def needs_compaction(self) -> bool:
        """Whether many rows are removed, or scanned although the gallery has an index."""
        total, count = int(self.starts[-1]), len(self)
        scanned = sum(info.rows for info in self.manifest.segments if not info.index)
        large = indexes.resolve(self.manifest.index, count) != ""
        return total - count > max(1000, total // 4) or (large and scanned > total // 4)

    def view(self) -> Snapshot:
        """Return what a search reads."""
        return self

    @cached_property
    def class_share(self) -> float:
        """The share of the images that are of the class of one of them, on average; 0 if unknown.

        Images of one class, or without classes, say nothing about a query's.
        """
        counts = np.array([*self.count_labels().values()], np.float64)
        return float(np.square(counts / counts.sum()).sum()) if len(counts) > 1 else 0.0

    def positions_below(self, folder: str | os.PathLike[str]) -> IntArray:
        """Return the positions of the images below a folder."""
        root = os.path.dirname(metadata.absolute(os.path.join(folder, "image")))
        prefix = metadata.encode(os.path.join(root, ""))
        mask = metadata.arrow("pyarrow.compute").starts_with(self.table["path"], prefix)
        return np.flatnonzero(np.asarray(mask) & self.alive)

    def files(self, positions: IntArray) -> Iterator[StoredFile]:
        """Yield the files at positions, as they were when they were embedded."""
        columns = self.take(positions, ["path", *metadata.STAMP, metadata.DIGEST]).values()
        return map(StoredFile, positions.tolist(), *columns)

    def copy_to(self, device: torch.device | None, previous: Snapshot) -> None:
        """Copy the vectors to a GPU, or remove the copy; reuse those of the previous version."""
        names, scan = [info.name for info in self.manifest.segments], previous.gpu_scan
        self.gpu_scan = None if device is None else GpuScan(self.store, names, device, scan)

    def search(
        self, queries: FloatArray, k: int, allowed: Any, effort: Effort = DEFAULT_EFFORT
    ) -> Hits:
        """Return the k nearest of the allowed rows, by an index or an exact scan."""
        k = min(k, self.max_k)
        if self.gpu_scan is not None:
            is_filtered = allowed is not self.alive or len(self.deleted) > 0
            return self.gpu_scan.search(queries, k, allowed if is_filtered else None)
        scanned: list[Part] = []
        hits: list[Hits] = []
        for segment in self.segments:
            part, total = segment.part, len(segment.ids)
            mask = allowed[part.start : part.start + total]
            count = int(np.count_nonzero(mask))
            if count < _MAX_GATHERED * total:
                part = part._replace(rows=np.flatnonzero(mask))
            elif count < total:
                part = part._replace(allowed=mask)
            few = count < total and count * self.manifest.dim <= MAX_SCAN_ENTRIES
            few |= count**2 < SCAN_FACTOR * k * total
            if segment.index is None or few or effort.exact:
                scanned.append(part)
            else:
                hits.append(self._search_index(segment.index, part, mask, queries, k, effort))
        if scanned or not hits:
            hits.append(self.store.search(scanned, queries, k))
        return hits[0] if len(hits) == 1 else merge_hits(hits, k)

    def _search_index(
        self,
        index: indexes.Index,
        part: Part,
        mask: Mask,
        queries: FloatArray,
        k: int,
        effort: Effort,
    ) -> Hits:
        """Return the k nearest of the allowed rows among the candidates of an index.

        If an index returns less than half the expected number of allowed candidates for a query,
        all allowed rows are scanned instead.
        """
        count = int(np.count_nonzero(mask))
        share, n = count / len(mask), k if count == len(mask) else max(k, _MIN_FILTERED_K)
        nprobe, ef, refine, _ = effort
        rows = index.candidates(queries, n, share, nprobe=nprobe, ef=ef, refine=refine)
        matches = (rows >= 0) & mask[rows]
        expected = n if nprobe else index.count(n, refine)
        few = matches.sum(1) < min(expected, count)
        few |= matches[:, : math.ceil(2 * n / share)].sum(1) < min(n, count)
        # In descending order, the positions of allowed candidates come before the −1 of others.
        positions = np.sort(np.where(matches, rows + part.start, -1), axis=1)[:, ::-1]
        hits = self.store.rescore(queries, positions[:, : matches.sum(1).max(initial=0)], k)
        if few.any():
            hits.positions[few], hits.scores[few] = self.store.search([part], queries[few], k)
        return hits
