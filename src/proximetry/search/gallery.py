"""`Gallery`: images, their vectors and an index, in a folder that changes atomically.

Galleries on Milvus (`search/milvus.py`) share the code that searches.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from proximetry._util.errors import UsageError, is_integer
from proximetry._util.files import name_write_errors
from proximetry._util.formatting import join_first, pluralize
from proximetry._util.machine import resolve_device
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.metrics.reranking import RERANKED, expand_queries, k_reciprocal_distances
from proximetry.models import Embedder
from proximetry.models.constants import Similarity
from proximetry.models.preprocessing import ImageSource
from proximetry.search import duplicates, indexes, metadata
from proximetry.search.duplicates import Duplicates
from proximetry.search.exact import FloatArray, Hits, Scores, merge_hits
from proximetry.search.manifest import (
    EMBEDDER,
    STAGING,
    Manifest,
    Report,
    check_new_folder,
    is_milvus,
    locked,
    read_manifest,
    retire,
    sweep,
    write_manifest,
)
from proximetry.search.new_images import (
    BLOCK,
    BadImages,
    Images,
    Labels,
    NewImages,
    SkippedImage,
    Vectors,
    as_vectors,
    no_report,
    stamp_of,
)
from proximetry.search.search_result import SearchResult
from proximetry.search.segment import (
    check_segment,
    no_progress,
    prepare_vectors,
    write_deleted,
    write_segment,
)
from proximetry.search.snapshot import Snapshot

if TYPE_CHECKING:
    from proximetry.search.milvus import Collection

    Version: TypeAlias = Snapshot | Collection

Where = metadata.Where
Queries = Sequence[ImageSource] | Vectors

MAX_MERGE_ROWS = 65_536  # rows of a segment up to which small ones are merged: a second to write
ROUNDING = 2.0**-22  # bounds 1 − the cosine of a float32 unit vector with its copy
_MAX_RERANK_K = 1000  # the largest k of re-ranking, which compares twice as many images


class Gallery:
    """Images that can be searched. Created by `Gallery.build`, read by `Gallery.open`.

    Both accept a folder, or the address of a collection on Milvus (`search/milvus.py`), with
    different guarantees. In a folder, an open gallery stays at its version until it is changed
    through this object or `refresh` is called, whatever other processes do. Every change is
    atomic, and exclusive to one process. Several threads may search.

    Attributes:
        path: its folder; for a gallery on Milvus, the local folder of staged vectors.
        name: the folder or the address.
        skipped: the images that the last `build`, `add` or `update` could not read.
    """

    def __init__(self, path: Path, name: str, version: Version) -> None:
        self.path, self.name = path, name
        self.skipped: list[SkippedImage] = []
        self._version = version
        self._embedder: Embedder | None = None
        self._load_lock = Lock()

    @classmethod
    def build(
        cls,
        embedder: Embedder,
        images: Images,
        path: str | os.PathLike[str],
        index: str = "auto",
        *,
        labels: Labels = None,
        vectors: Vectors | None = None,
        bad_images: BadImages = "error",
        batch_size: int = 64,
        progress: Progress | None = None,
        report: Report | None = None,
    ) -> Gallery:
        """Embed images and build a gallery of them in a new or empty folder.

        An interrupted build resumes if it is called again.

        Args:
            embedder: computes the vectors, and is saved in the folder.
            images: a catalog, or image files.
            path: the folder, or ``milvus://host:port/collection``, or ``milvus:file.db``.
            index: "Flat" searches exactly; "HNSW32", "IVF1024,PQ64" and other factory strings of
                faiss approximately; "BFlat" by binary codes. "auto" is exact up to 100 000
                images, HNSW32 up to 2 million, and IVF with 8-bit codes beyond; for an embedder
                with `bits` it is "BFlat". Recall@10 is measured on a sample, and the search
                effort raised until it is 0.98.
            labels: the class of each image file, or None.
            vectors: embeddings of the images, if already computed.
            bad_images: "error" stops at unreadable images, "skip" lists them in `skipped`.
            batch_size: images per forward pass.
            progress: called with (done, total) while images are embedded and indexed.
            report: called with messages, such as the index.
        """
        new = NewImages(
            images, embedder.dim, labels, vectors, bad_images, batch_size, progress, report
        )
        if is_milvus(path):
            from proximetry.search.milvus import MilvusGallery

            return MilvusGallery.create(embedder, new, path, index)
        folder = Path(path)
        if index == "auto" and embedder.bits is not None:
            index = indexes.BINARY
        check_new_folder(folder)
        indexes.check(index, embedder.dim, len(new.table))
        with name_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, new.report):
            check_new_folder(folder)  # another process may have built it meanwhile
            fingerprint = embedder.fingerprint()
            embedder.save(folder / EMBEDDER)
            manifest = Manifest(fingerprint, embedder.architecture.similarity, embedder.dim, index)
            new.embed(embedder, fingerprint, folder, required=True)
            segment = new.write(folder, manifest)
            prefix = "auto → " if index == "auto" else ""
            new.report(describe_index(segment.index, segment.rows, segment.recall, prefix))
            manifest = dataclasses.replace(manifest, next_id=segment.rows, segments=(segment,))
            write_manifest(folder, manifest)
            # No other process adds images before the manifest exists.
            shutil.rmtree(folder / STAGING, ignore_errors=True)
            sweep(folder, manifest)
            built = cls(folder, str(folder), Snapshot(folder, manifest))
            built._embedder, built.skipped = embedder, new.skipped
            return built

    @classmethod
    def open(cls, path: str | os.PathLike[str], embedder: Embedder | None = None) -> Gallery:
        """Open a gallery.

        Args:
            path: its folder, or its address on Milvus.
            embedder: the one that built it; by default a folder's embedder is loaded when images
                are embedded. Milvus stores none.
        """
        if is_milvus(path):
            from proximetry.search.milvus import MilvusGallery

            opened: Gallery = MilvusGallery.connect(path)
        else:
            opened = cls(Path(path), str(path), Snapshot.open(Path(path)))
        if embedder is not None:
            opened._check_embedder(embedder, "the embedder")
            opened._embedder = embedder
        return opened

    @property
    def version(self) -> str:
        """An identifier of its state, which changes with every change."""
        return self._version.manifest.version

    def refresh(self) -> None:
        """Read the current version, whichever embedder it was built by."""
        newest = self._newest()
        with self._load_lock:
            if newest.manifest.embedder != self._version.manifest.embedder:
                self._embedder = None
            self._version = newest

    def _newest(self) -> Version:
        return Snapshot.open(self.path)

    def __len__(self) -> int:
        return len(self._version)

    @property
    def dim(self) -> int:
        """The dimension of the vectors."""
        return self._version.manifest.dim

    @property
    def similarity(self) -> Similarity:
        """The similarity of vectors: "cosine" or "euclidean"."""
        return self._version.manifest.similarity

    def _indexes(self) -> list[str]:
        return [info.index or indexes.EXACT for info in self._version.manifest.segments]

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(self._indexes())) or indexes.EXACT
        return (
            f"Gallery({self.name!r}: {pluralize(len(self), 'image')}, {self.dim} dimensions, "
            f"{self.similarity}, index {kinds})"
        )

    @property
    def embedder(self) -> Embedder:
        """The embedder that built the gallery, loaded at first use."""
        with self._load_lock:
            if self._embedder is None:
                loaded = Embedder.load(self.path / EMBEDDER, device=resolve_device())
                self._check_embedder(loaded, str(self.path / EMBEDDER))
                self._embedder = loaded
            return self._embedder

    @property
    def index(self) -> str:
        """The index as passed to `build`: "auto", "Flat", a factory string."""
        return self._version.manifest.index

    def _check_embedder(self, embedder: Embedder, name: str) -> None:
        if embedder.fingerprint() != self._version.manifest.embedder:
            raise UsageError(
                f"{name} did not build the gallery {self.name}: network, preprocessing or weights "
                "differ. Use the gallery's embedder, or build another gallery."
            )

    def ids(self, where: Where | None = None) -> IntArray:
        """Return the ids of all images, or of those that match `where`, in rising order."""
        now = self._version
        return now.ids(now.allowed_positions(now.select(where or {})))

    @property
    def columns(self) -> list[str]:
        """The names of the metadata columns."""
        return self._version.columns

    def rows(
        self, ids: Sequence[int] | IntArray, columns: Iterable[str] | None = None
    ) -> dict[str, list[Any]]:
        """Return the metadata of images by column: all columns, or some."""
        now = self._version
        return now.take(self._positions(now, ids), now.columns if columns is None else columns)

    def vectors(self, ids: Sequence[int] | IntArray) -> FloatArray:
        """Return the vectors of images, [n, dim]; of unit length for cosines."""
        now = self._version
        return now.vectors(self._positions(now, ids))

    def _positions(self, now: Version, ids: Sequence[int] | IntArray) -> IntArray:
        numbers = np.asarray(ids)
        if numbers.size and numbers.dtype.kind not in "iu":  # such as a mask
            raise UsageError(f"ids must be whole numbers, got {numbers.dtype}")
        numbers = numbers.astype(np.int64).reshape(-1)
        positions = now.positions(numbers)
        if (positions < 0).any():
            missing = join_first([str(one) for one in numbers[positions < 0]])
            raise UsageError(f"no image of the gallery {self.name} has the id {missing}")
        return positions

    def count_labels(self) -> dict[str, int]:
        """Return the number of images of each class; for galleries in folders."""
        assert isinstance(self._version, Snapshot)
        return self._version.count_labels()

    def known(self, paths: Iterable[str | os.PathLike[str]]) -> list[bool]:
        """Return for each file whether its image is in the gallery."""
        table = metadata.from_images(list(paths))
        known = self._version.find_paths(table)
        return [path in known for path in table["path"].to_pylist()]

    def outdated(self, folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
        """Compare the images below a folder with their files.

        Returns the paths of files that are missing, and of those whose size or time of
        modification has changed since they were embedded. Galleries on Milvus do not store these.
        """
        now = self._version
        if not isinstance(now, Snapshot):
            raise UsageError(f"the gallery {self.name} does not store sizes of files")
        missing: list[str] = []
        changed: list[str] = []
        below = os.path.dirname(metadata.absolute(os.path.join(folder, "image")))
        for path, size, modified in now.stamps_below(below):
            stamp = stamp_of(path)
            if stamp is None:
                missing.append(path)
            elif size is not None and (size, modified) != (stamp.size, stamp.modified):
                changed.append(path)
        return missing, changed

    def add(
        self,
        images: Images,
        *,
        labels: Labels = None,
        vectors: Vectors | None = None,
        replace: bool = False,
        bad_images: BadImages = "error",
        batch_size: int = 64,
        progress: Progress | None = None,
        report: Report | None = None,
    ) -> IntArray:
        """Add images and return their ids; arguments as those of `build`.

        Raises UsageError for images that are already in the gallery, unless `replace` is set:
        see `update`.
        """
        new = NewImages(images, self.dim, labels, vectors, bad_images, batch_size, progress, report)
        newest = self._newest()
        self._check_same(newest)
        if replace and new.only_files:
            new.table = _with_known_columns(newest, new.table)
        if isinstance(newest, Snapshot):  # on Milvus a column may have values of any type
            metadata.concat([newest.table, new.table])
        if not replace:
            self._check_unknown(newest, new.table)
        if not new.embedded:
            new.embed(self.embedder, newest.manifest.embedder, self.path)
        self.skipped = new.skipped
        if not len(new.table):
            return np.arange(0)
        unlabeled = 0 if replace or new.has_labels else new.table["label"].null_count
        if unlabeled and isinstance(newest, Snapshot) and newest.count_labels():
            new.warn(
                f"{pluralize(unlabeled, 'new image')} without a class in the gallery {self.name}, "
                "which has classes. Pass labels=, a class folder or a table."
            )
        return self._write(new, renew=replace)

    def update(self, images: Images, **options: Any) -> IntArray:
        """Embed images again that are in the gallery, add others, and return their new ids.

        Files without `labels` keep the class and the other columns that they have in the gallery.
        Other arguments are those of `add`.
        """
        return self.add(images, **options, replace=True)

    def _check_same(self, now: Version) -> None:
        if now.manifest.embedder != self._version.manifest.embedder:
            raise UsageError(
                f"the gallery {self.name} was rebuilt by another embedder. Call refresh()."
            )

    def _check_unknown(self, now: Version, table: Any) -> None:
        known = now.find_paths(table)
        if known:
            names = join_first([os.fsdecode(path) for path in sorted(known)])
            raise UsageError(
                f"{pluralize(len(known), 'image')} already in the gallery {self.name}: {names}. "
                "Use update() to embed them again."
            )

    def _write(self, new: NewImages, *, renew: bool) -> IntArray:
        with locked(self.path, new.report):
            now = Snapshot.open(self.path)
            self._check_same(now)
            now.check_tables()
            metadata.concat([now.table, new.table])  # raises if types of columns differ
            manifest = now.manifest
            if not renew:
                self._check_unknown(now, new.table)
            elif old := now.find_paths(new.table):
                manifest = now.without(now.ids(np.array(sorted(old.values()))))
            segment = new.write(self.path, manifest)
            first = manifest.next_id
            manifest = dataclasses.replace(
                manifest, next_id=first + segment.rows, segments=(*manifest.segments, segment)
            )
            self._commit(self._merge_small(manifest))
            if segment.index:
                new.report(describe_index(segment.index, segment.rows, segment.recall))
            new.discard()
            return np.arange(first, first + segment.rows)

    def remove(self, ids: Sequence[int] | IntArray, *, report: Report | None = None) -> None:
        """Remove images by their ids; `ids(where)` returns them."""
        with locked(self.path, report or no_report):
            now = Snapshot.open(self.path)
            self._check_same(now)
            now.check_tables()
            self._commit(now.without(now.ids(self._positions(now, ids))))

    def compact(self, *, progress: Progress | None = None, report: Report | None = None) -> None:
        """Rewrite everything as one segment, without removed rows, and index it."""
        report = report or no_report
        with locked(self.path, report):
            manifest = Snapshot.open(self.path).manifest
            self._commit(self._merge(manifest, 0, manifest.index, progress or no_progress))
        for info in self._version.manifest.segments:
            report(describe_index(info.index, info.rows, info.recall))

    @property
    def needs_compaction(self) -> bool:
        """Whether much of the gallery is removed, or scanned although there is an index."""
        now = self._version
        total = sum(info.rows for info in now.manifest.segments)
        large = indexes.resolve(self.index, len(now)) != ""
        scanned = sum(info.rows for info in now.manifest.segments if not info.index)
        return total - len(now) > max(1000, total // 4) or (large and scanned > total // 4)

    def _commit(self, manifest: Manifest) -> None:
        """Commit a change, under the lock."""
        manifest = retire(read_manifest(self.path), manifest)
        write_manifest(self.path, manifest)
        self._version = Snapshot(self.path, manifest)
        sweep(self.path, manifest)

    def _merge_small(self, manifest: Manifest) -> Manifest:
        """Merge small segments at the end, each with one that is not much larger.

        A row is rewritten only when its segment doubles, which is rare.
        """
        while len(manifest.segments) > 1:
            one, two = manifest.segments[-2:]
            if (
                one.index
                or two.index
                or one.rows > 2 * two.rows
                or one.rows + two.rows > MAX_MERGE_ROWS
            ):
                return manifest
            last = len(manifest.segments) - 2
            manifest = self._merge(manifest, last, indexes.EXACT, no_progress)
        return manifest

    def _merge(self, manifest: Manifest, first: int, index: str, progress: Progress) -> Manifest:
        """Write the segments from `first` on as one, without removed rows."""
        for info in manifest.segments[first:]:  # damage must not get a new checksum
            check_segment(self.path, info)
        now = Snapshot(self.path, manifest)
        start = int(now.starts[first])
        positions = now.allowed_positions(now.alive)
        positions = positions[positions >= start]
        segments = manifest.segments[:first]
        if len(positions):
            blocks = (now.vectors(positions[part]) for part in chunks(len(positions), BLOCK))
            merged = write_segment(
                self.path,
                manifest,
                now.table.take(metadata.arrow().array(positions)),
                now.ids(positions),
                blocks,
                indexes.resolve(index, len(positions)),
                progress,
            )
            segments = (*segments, merged)
        before = now.ids(np.arange(start))
        deleted = write_deleted(self.path, np.intersect1d(now.deleted, before))
        return dataclasses.replace(manifest, segments=segments, deleted=deleted)

    def verify(self, progress: Progress | None = None) -> None:
        """Compare every file of the current version with its checksum; raise ValueError."""
        segments = Snapshot.open(self.path).manifest.segments
        for number, info in enumerate(segments):
            check_segment(self.path, info)
            (progress or no_progress)(number + 1, len(segments))

    def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        where: Where | None = None,
        expand: int = 0,
        rerank: bool = False,
        batch_size: int = 64,
        progress: Progress | None = None,
    ) -> SearchResult:
        """Return the k nearest images of every query.

        Args:
            queries: images (paths, PIL images, uint8 arrays), or vectors of the gallery's
                embedder as a float array or tensor [n, dim].
            k: number of results per query.
            where: by column, a value, or several of which any matches:
                ``{"label": "jay"}``, ``{"label": ["jay", "crow"], "split": "test"}``.
            expand: query expansion with this number of neighbors (`metrics.expand_queries`).
            rerank: order the nearest images by `metrics.k_reciprocal_distances`. With either,
                `similarities` are still those of the query, and `scores` determine the order.
            batch_size: images per forward pass.
            progress: called with (done, total) while images are embedded.
        """
        if not is_integer(k):
            raise UsageError(f"k must be an integer of at least 1, got {k!r}")
        if not is_integer(expand, 0):
            raise UsageError(f"expand must be an integer of at least 0, got {expand!r}")
        if expand and self.similarity != "cosine":
            raise UsageError("expand requires a gallery with cosine similarity")
        if rerank and k > _MAX_RERANK_K:
            raise UsageError(f"rerank supports k up to {_MAX_RERANK_K}, got k = {k}")
        now = self._version
        allowed = now.select(where or {})
        vectors = self._embed_queries(queries, batch_size, progress or no_progress)
        expanded = vectors
        if expand:
            near = now.search(vectors, int(expand), allowed).positions
            neighbors = now.vectors(near.ravel()).reshape(*near.shape, -1)
            expanded = expand_queries(vectors, neighbors).astype(np.float32)
        hits = now.search(expanded, max(RERANKED, 2 * int(k)) if rerank else int(k), allowed)
        if rerank:
            hits = _rerank(now, expanded, hits, int(k))
        scores = None
        if expand or rerank:
            scores = hits.scores.astype(np.float32)
            hits = Hits(hits.positions, now.scores(vectors, hits.positions))
        return SearchResult(
            now.ids(hits.positions),
            _as_similarities(hits.scores, now.manifest.similarity),
            now.manifest.similarity,
            tuple(now.columns),
            scores,
            _positions=hits.positions,
            _take=now.take,
        )

    def _embed_queries(self, queries: Any, batch_size: int, progress: Progress) -> FloatArray:
        if "float" in str(getattr(queries, "dtype", "")) and queries.ndim == 2:
            vectors = as_vectors(queries, len(queries), self.dim)
        else:
            try:
                vectors = self.embedder.encode(
                    queries, batch_size, progress=lambda done: progress(done, len(queries))
                ).numpy()
            except ValueError as error:
                cause = error.__cause__
                raise UsageError(str(cause if isinstance(cause, ValueError) else error)) from error
        return prepare_vectors(vectors, self._version.manifest)

    def duplicates(
        self, threshold: float | None = None, *, progress: Progress | None = None
    ) -> Duplicates:
        """Find near-duplicate images.

        Compares all pairs of images. With an index and more than 250 000 images, and on Milvus,
        compares each image with its nearest neighbors.

        Args:
            threshold: the smallest cosine, or the largest Euclidean distance, of a pair. By
                default it is measured on up to 50 of the images: 90 % of their altered copies
                (half size, recompressed, mirrored, brightened, cropped) meet it, and few different
                images do. If no image can be read, it is a cosine of 0.99.
            progress: called with (done, total).
        """
        now, progress, threshold_source = self._version, progress or no_progress, ""
        if threshold is None:
            stored = isinstance(now, Snapshot) or self._embedder is not None
            load = (lambda: self.embedder) if stored else None
            threshold, threshold_source = duplicates.measure_threshold(now, load, progress)
        cosine = self.similarity == "cosine"
        if not (-1 <= threshold <= 1 if cosine else threshold >= 0):
            kind = "a cosine, from −1 to 1" if cosine else "a distance, from 0 up"
            raise UsageError(f"threshold must be {kind}, got {threshold:g}")
        least = float(threshold) - ROUNDING if cosine else -(float(threshold) ** 2)
        indexed = any(info.index for info in now.manifest.segments)
        if isinstance(now, Snapshot) and (len(now) <= duplicates.MAX_COMPARED_ROWS or not indexed):
            alive = now.allowed_positions(now.alive)
            positions, scores = duplicates.compare_all(now.store, alive, least, progress)
        else:
            positions, scores = duplicates.compare_neighbors(now, least, progress)
        similarities = _as_similarities(scores, self.similarity)
        order = np.lexsort((*positions.T[::-1], -similarities))
        members = np.unique(positions)
        paths = now.take(members, ["path"])["path"]
        pairs = now.ids(positions[order])
        return Duplicates(
            pairs,
            similarities[order],
            duplicates.group_pairs(pairs),
            dict(zip(now.ids(members).tolist(), paths, strict=True)),
            float(threshold),
            threshold_source,
        )


def _with_known_columns(now: Version, table: Any) -> Any:
    """Return the rows of files with the metadata of those that are in the gallery."""
    known = now.find_paths(table)
    positions = np.array([known.get(path, -1) for path in table["path"].to_pylist()], np.int64)
    columns = now.take(positions, now.columns)
    return metadata.from_columns({**columns, "path": metadata.values(table["path"])})


def _rerank(now: Version, queries: FloatArray, hits: Hits, k: int) -> Hits:
    """Return the k nearest hits by k-reciprocal distances."""
    scores = np.full(hits.positions.shape, -np.inf)
    for query, positions, row in zip(queries, hits.positions, scores, strict=True):
        there = positions >= 0
        if there.any():
            row[there] = -k_reciprocal_distances(query[None], now.vectors(positions[there]))[0]
    return merge_hits([Hits(hits.positions, scores)], min(k, hits.positions.shape[1]))


def _as_similarities(scores: Scores, similarity: str) -> FloatArray:
    """Return the similarities that users see: cosines up to 1, or negative distances."""
    similarities = scores.clip(-1, 1) if similarity == "cosine" else -np.sqrt(-scores)
    return np.where(scores == -np.inf, scores, similarities).astype(np.float32)


def describe_index(index: str, count: int, recall: float | None = None, prefix: str = "") -> str:
    """Describe in one line how this number of new images is searched."""
    exact = not index or index == indexes.EXACT
    accuracy = "every search is exact" if exact else "approximate, with exact similarities"
    if recall is not None:
        accuracy += f", recall@10 {math.floor(1000 * recall) / 1000:.3f}"
        if recall < indexes.RECALL:
            accuracy += f", below {indexes.RECALL}; auto and Flat have a higher recall"
    return f"index: {prefix}{index or indexes.EXACT} for {pluralize(count, 'image')}: {accuracy}"
