"""`Gallery`: images, their vectors and an index, in a folder with atomic changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first, pluralize
from proximetry._util.machine import resolve_device
from proximetry._util.types import IntArray, Progress, is_integer
from proximetry.metrics.calibration import Calibration
from proximetry.models import Embedder
from proximetry.models.constants import Similarity
from proximetry.models.storage import read_calibration, read_description
from proximetry.search import indexes, metadata
from proximetry.search.changes import add_rows, merge_segments, remove_rows
from proximetry.search.conditions import Where
from proximetry.search.duplicates import Duplicates, find_duplicates
from proximetry.search.effort import Effort, measure_recall
from proximetry.search.exact import FloatArray, Hits, Mask, as_similarities
from proximetry.search.manifest import (
    EMBEDDER,
    Manifest,
    Report,
    commit,
    commit_first,
    ignore,
    is_milvus,
    lock_new_folder,
    write_lock,
)
from proximetry.search.merge import merge_snapshots
from proximetry.search.new_images import (
    BadImages,
    Images,
    Labels,
    NewImages,
    SkippedImage,
    Vectors,
)
from proximetry.search.outliers import LabelError, Outlier, find_label_errors, find_outliers
from proximetry.search.prediction import Prediction
from proximetry.search.queries import (
    Box,
    Combine,
    Queries,
    as_ids,
    check_options,
    embed_queries,
    run_queries,
)
from proximetry.search.relocation import remap_paths
from proximetry.search.search_result import SearchResult
from proximetry.search.segment import check_segment
from proximetry.search.snapshot import Snapshot
from proximetry.search.sync import Changes, check_files, plan_sync
from proximetry.search.versions import Version, find_version, list_versions, prune_versions

if TYPE_CHECKING:
    from proximetry.search.milvus import Collection

    AnySnapshot: TypeAlias = Snapshot | Collection


class Gallery:
    """A searchable collection of images, built by `Gallery.build` or opened by `Gallery.open`.

    Both accept a folder, or the address of a collection on Milvus (`search/milvus.py`), with
    different guarantees. In a folder, an open gallery stays at its version until it is changed
    through this object or `refresh` is called. Every change is atomic, and one process writes at
    a time. Several threads may search.

    Attributes:
        path: the folder; for a gallery on Milvus, the local folder of staged vectors.
        name: the folder or the address.
        skipped: the images that the last `build` or `add` could not read.

    Examples:
        With vectors that are already computed (without ``vectors=`` the files are embedded):

        >>> import numpy as np
        >>> from proximetry import Embedder, Gallery
        >>> embedder = Embedder.create("vectors", None, weights="none", input_dim=2)
        >>> gallery = Gallery.build(
        ...     embedder,
        ...     ["a.jpg", "b.jpg", "c.jpg"],
        ...     "gallery",
        ...     labels=["jay", "jay", "crow"],
        ...     vectors=np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]),
        ... )
        >>> gallery.search(np.array([1.0, 0.1]), k=2).labels.tolist()
        [['jay', 'jay']]
    """

    def __init__(self, path: Path, name: str, snapshot: AnySnapshot) -> None:
        self.path, self.name = path, name
        self.skipped: list[SkippedImage] = []
        self._snapshot = snapshot
        self._embedder: Embedder | None = None
        self._scan_device: torch.device | None = None
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
        """Embed images and build a gallery in a new or empty folder.

        Call it again to resume an interrupted build.

        Args:
            embedder: computes the vectors, and is saved in the folder.
            images: a catalog; image files; or a folder, table or tar file.
            path: the folder, or ``milvus://host:port/collection``, or ``milvus:file.db``.
            index: "Flat" is exact; "HNSW32", "IVF1024,PQ64" and other faiss factory strings are
                approximate; "BFlat" searches binary codes. "auto" is exact up to 100 000 images,
                HNSW32 up to 2 million, and IVF with 8-bit codes beyond; for an embedder with
                `bits` it is "BFlat". The search effort of an approximate index is doubled until
                recall@10, measured on a sample, reaches 0.98.
            labels: the class of each image file, or None.
            vectors: embeddings of the images, if already computed.
            bad_images: "error" stops at unreadable images, "skip" lists them in `skipped`.
            batch_size: images per forward pass.
            progress: called with (done, total) while images are embedded and indexed.
            report: called with messages, such as the chosen index.
        """
        new_images = NewImages(
            images, embedder.dim, labels, vectors, bad_images, batch_size, progress, report
        )
        if is_milvus(path):
            from proximetry.search.milvus import MilvusGallery

            return MilvusGallery.create(embedder, new_images, path, index)
        folder = Path(path)
        if index == "auto" and embedder.bits is not None:
            index = indexes.BINARY
        indexes.check(index, embedder.dim, len(new_images.table))
        with lock_new_folder(folder, new_images.report):
            fingerprint = embedder.fingerprint()
            embedder.save(folder / EMBEDDER)
            manifest = Manifest(fingerprint, embedder.architecture.similarity, embedder.dim, index)
            new_images.embed(embedder, fingerprint, folder, required=True)
            segment = new_images.write(folder, manifest)
            prefix = "auto → " if index == "auto" else ""
            new_images.report(indexes.describe(segment.index, segment.rows, segment.recall, prefix))
            manifest = commit_first(folder, manifest, segment)
            built = cls(folder, str(folder), Snapshot(folder, manifest))
            built._embedder, built.skipped = embedder, new_images.skipped
            return built

    @classmethod
    def open(cls, path: str | os.PathLike[str], embedder: Embedder | None = None) -> Gallery:
        """Open a gallery.

        Args:
            path: the folder, or the address on Milvus.
            embedder: the embedder that built the gallery; by default loaded from the folder on
                first use. Milvus does not store it.

        Examples:
            >>> Gallery.open("gallery")
            Gallery('gallery': 3 images, 2 dimensions, cosine, index Flat)
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

    @classmethod
    def merge(
        cls,
        galleries: Sequence[Gallery | str | os.PathLike[str]],
        path: str | os.PathLike[str],
        index: str | None = None,
        *,
        progress: Progress | None = None,
        report: Report | None = None,
    ) -> Gallery:
        """Merge galleries of one embedder into a new one, in a new or empty folder.

        Images get new ids. Of an image in several galleries, the first is kept.

        Args:
            galleries: galleries or their folders.
            path: the new folder.
            index: as in `build`; by default that of the galleries if it is the same, else "auto".
            progress: called with (done, total) while the index is built.
            report: called with messages, such as the index.
        """
        if isinstance(galleries, str | os.PathLike):
            raise UsageError(f"galleries must be a list, got {str(galleries)!r}")
        opened = [one if isinstance(one, Gallery) else cls.open(one) for one in galleries]
        snapshots = [one._check_local("merge") for one in opened]
        merge_snapshots(snapshots, path, index, progress or ignore, report or ignore)
        return cls.open(path)

    @property
    def version(self) -> str:
        """An identifier that differs after every change."""
        return self._snapshot.manifest.version

    def refresh(self) -> None:
        """Switch to the current version, even if the gallery was rebuilt with another embedder."""
        snapshot = self._read_snapshot()
        with self._load_lock:
            if snapshot.manifest.embedder != self._snapshot.manifest.embedder:
                self._embedder = None
                self.__dict__.pop("_stored_calibration", None)
            self._switch_to(snapshot, self._scan_device)

    def to(self, device: str | torch.device) -> Self:
        """Search on a GPU: copy the vectors there, in bfloat16, and scan all of them exactly.

        Results equal those of exact searches on the CPU. "cpu" removes the copy.

        Examples:
            >>> Gallery.open("gallery").to("cpu").search(np.eye(2), k=1).ids.tolist()
            [[0], [2]]
        """
        chosen, snapshot = resolve_device(device), copy(self._check_local("to"))
        self._switch_to(snapshot, None if chosen.type == "cpu" else chosen)
        return self

    def _switch_to(self, snapshot: AnySnapshot, device: torch.device | None) -> None:
        if isinstance(snapshot, Snapshot) and isinstance(self._snapshot, Snapshot):
            snapshot.copy_to(device, self._snapshot)
        self._snapshot, self._scan_device = snapshot, device

    def _read_snapshot(self) -> AnySnapshot:
        return Snapshot.open(self.path)

    def __len__(self) -> int:
        return len(self._snapshot)

    @property
    def dim(self) -> int:
        """The dimension of the vectors."""
        return self._snapshot.manifest.dim

    @property
    def similarity(self) -> Similarity:
        """The similarity of vectors: "cosine" or "euclidean"."""
        return self._snapshot.manifest.similarity

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(self._snapshot.index_kinds)) or indexes.EXACT
        return (
            f"Gallery({self.name!r}: {pluralize(len(self), 'image')}, {self.dim} dimensions, "
            f"{self.similarity}, index {kinds})"
        )

    @property
    def embedder(self) -> Embedder:
        """The embedder that built the gallery, loaded on first use."""
        with self._load_lock:
            if self._embedder is None:
                loaded = Embedder.load(self.path / EMBEDDER, device=resolve_device())
                self._check_embedder(loaded, str(self.path / EMBEDDER))
                self._embedder = loaded
            return self._embedder

    @property
    def calibration(self) -> Calibration | None:
        """What similarities mean, if the embedder was calibrated (`Embedder.calibrate`)."""
        loaded = self._embedder
        return self._stored_calibration if loaded is None else loaded.calibration

    @cached_property
    def _stored_calibration(self) -> Calibration | None:
        folder = self.path / EMBEDDER
        return read_calibration(read_description(folder), folder) if folder.exists() else None

    @property
    def index(self) -> str:
        """The index as passed to `build`: "auto", "Flat", a factory string."""
        return self._snapshot.manifest.index

    def _check_embedder(self, embedder: Embedder, name: str) -> None:
        if embedder.fingerprint() != self._snapshot.manifest.embedder:
            raise UsageError(
                f"{name} did not build the gallery {self.name}: network, preprocessing or weights "
                "differ. Use the gallery's embedder, or build another gallery."
            )

    def ids(self, where: Where | None = None) -> IntArray:
        """Return the ids of all images, or of those that match `where`, in ascending order."""
        snapshot = self._snapshot
        return snapshot.ids(snapshot.allowed_positions(snapshot.select(where or {})))

    def exists(self, ids: Sequence[int] | IntArray) -> Mask:
        """Return whether each id is in the gallery."""
        return np.asarray(self._snapshot.positions(np.asarray(ids, np.int64)) >= 0)

    def sample_ids(self, count: int) -> IntArray:
        """Return the ids of up to `count` random images, in ascending order."""
        return np.sort(self._snapshot.sample_ids(count))

    @property
    def columns(self) -> list[str]:
        """The names of the metadata columns."""
        return self._snapshot.columns

    def rows(
        self, ids: Sequence[int] | IntArray, columns: Iterable[str] | None = None
    ) -> dict[str, list[Any]]:
        """Return the metadata of images by column, by default of all columns."""
        snapshot = self._snapshot
        columns = snapshot.columns if columns is None else columns
        return snapshot.take(self._positions(snapshot, ids), columns)

    def vectors(self, ids: Sequence[int] | IntArray) -> FloatArray:
        """Return the vectors of images, [n, dim]; of unit length if compared by cosine."""
        snapshot = self._snapshot
        return snapshot.vectors(self._positions(snapshot, ids))

    def _positions(self, snapshot: AnySnapshot, ids: Sequence[int] | IntArray) -> IntArray:
        numbers = np.asarray(ids)
        if numbers.size and numbers.dtype.kind not in "iu":  # such as a mask
            raise UsageError(f"ids must be integers, got {numbers.dtype}")
        numbers = numbers.astype(np.int64).reshape(-1)
        positions = snapshot.positions(numbers)
        if (positions < 0).any():
            missing = join_first(map(str, numbers[positions < 0]))
            raise UsageError(f"no image of the gallery {self.name} has the id {missing}")
        return positions

    def _check_local(self, method: str) -> Snapshot:
        """Return the snapshot of a gallery in a folder; raise UsageError for one on Milvus."""
        snapshot, _ = self._snapshot, self._snapshot.manifest  # raises if the gallery is closed
        if not isinstance(snapshot, Snapshot):
            raise UsageError(f"{method} is not supported on Milvus: {self.name}")
        return snapshot

    def count_labels(self) -> dict[str, int]:
        """Return the number of images of each class; on Milvus, in a sample of 16 384."""
        return self._snapshot.count_labels()

    def contains(
        self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
    ) -> list[bool]:
        """Return whether the image of each file is in the gallery."""
        files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        table = metadata.from_images(files)
        existing = self._snapshot.find_paths(table)
        return [path in existing for path in table["path"].to_pylist()]

    def check_files(self, folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
        """Find images of the gallery below a folder whose files are missing or have changed.

        Galleries on Milvus do not support this.

        Returns:
            The paths of missing files, and of files whose size or modification time has changed
            since they were embedded.
        """
        return check_files(self._check_local("check_files"), folder)

    def sync(
        self,
        images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Any,
        *,
        folders: Iterable[str | os.PathLike[str]] | None = None,
        bad_images: BadImages = "error",
        batch_size: int = 64,
        progress: Progress | None = None,
        report: Report | None = None,
    ) -> Changes:
        """Update the gallery to the files of folders, in one atomic change.

        Adds new files, embeds changed ones again, and removes images below the folders whose files
        are missing. Moved files, which have the same content as a missing one, keep their vectors
        and metadata. All of these get new ids. Galleries on Milvus do not support this.

        Args:
            images: folders, image files and tables; or, with `folders`, a table as in `build`.
            folders: images below these are removed if their file is missing; by default those of
                `images`.
            bad_images: as in `build`, like the following.
            batch_size: images per forward pass.
            progress: called with (done, total) while images are embedded and indexed.
            report: called with messages, such as the index.
        """
        self._check_local("sync")
        if folders is None:
            names = [images] if isinstance(images, str | os.PathLike) else images
            sources = [*map(os.path.expanduser, names)]
            images, _ = metadata.from_sources(sources, allow_missing=bad_images == "skip")
            folders = [*filter(os.path.isdir, sources)]
        snapshot = Snapshot.open(self.path)
        self._check_not_rebuilt(snapshot)
        plan = plan_sync(snapshot, images, folders, bad_images, batch_size, progress, report)
        self.skipped = []
        if plan.new_images is not None:
            plan.new_images.embed(self.embedder, snapshot.manifest.embedder, self.path)
            self.skipped = plan.new_images.skipped
        if plan.new_images is not None and len(plan.new_images.table):
            self._write(plan.new_images, replace=True)
        elif len(plan.missing):
            self.remove(snapshot.ids(plan.missing))
        return plan.changes()

    def remap_paths(
        self, new: str | os.PathLike[str], old: str | os.PathLike[str] | None = None
    ) -> int:
        """Replace the start of paths after images were moved; return the number of images.

        Ids do not change. Galleries on Milvus do not support this.

        Args:
            new: the folder of the images now.
            old: the folder before; by default the common folder of all images.
        """
        with self._change("remap_paths") as snapshot:
            former = None if old is None else os.fspath(old)
            manifest, count = remap_paths(snapshot, former, os.path.abspath(new))
            self._commit(manifest)
            return count

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
        """Add images and return their ids; arguments as in `build`.

        With `replace`, images that are already in the gallery are embedded again under new ids;
        files without `labels` keep their metadata. Without it, such images raise UsageError,
        but are replaced on Milvus.

        Examples:
            >>> gallery = Gallery.open("gallery")
            >>> gallery.add(["d.jpg"], labels=["crow"], vectors=np.array([[0.6, 0.8]]))
            array([3])
            >>> len(gallery)
            4
        """
        new_images = NewImages(
            images, self.dim, labels, vectors, bad_images, batch_size, progress, report
        )
        snapshot = self._read_snapshot()
        self._check_not_rebuilt(snapshot)
        if replace and new_images.only_files:
            existing, paths = snapshot.find_paths(new_images.table), new_images.table["path"]
            positions = np.array([existing.get(path, -1) for path in paths.to_pylist()], np.int64)
            stored = snapshot.take(positions, snapshot.columns)
            new_images.table = metadata.fill_missing(new_images.table, stored)
        return self._add(new_images, snapshot, replace=replace)

    def _add(self, new_images: NewImages, snapshot: Any, *, replace: bool) -> IntArray:
        self._check_new(snapshot, new_images.table, replace)
        if not new_images.embedded:
            new_images.embed(self.embedder, snapshot.manifest.embedder, self.path)
        self.skipped = new_images.skipped
        if not len(new_images.table):
            return np.arange(0)
        unlabeled = 0 if replace or new_images.has_labels else new_images.table["label"].null_count
        if unlabeled and snapshot.count_labels():
            new_images.warn(
                f"{pluralize(unlabeled, 'new image')} without a class in the gallery {self.name}, "
                "which has classes. Pass labels=, a class folder or a table."
            )
        return self._write(new_images, replace=replace)

    def _write(self, new_images: NewImages, *, replace: bool) -> IntArray:
        with self._change("add", new_images.report) as snapshot:
            self._check_new(snapshot, new_images.table, replace)
            manifest = add_rows(snapshot, new_images)
            self._commit(manifest)
        new_images.discard()
        return np.arange(snapshot.manifest.next_id, manifest.next_id)

    def _check_not_rebuilt(self, snapshot: AnySnapshot) -> None:
        if snapshot.manifest.embedder != self._snapshot.manifest.embedder:
            raise UsageError(
                f"the gallery {self.name} was rebuilt with another embedder. Call refresh()."
            )

    def _check_new(self, snapshot: Snapshot, table: Any, replace: bool) -> None:
        metadata.concat([snapshot.table, table])  # raises if types of columns differ
        if not replace and (existing := snapshot.find_paths(table)):
            names = join_first([os.fsdecode(path) for path in sorted(existing)])
            raise UsageError(
                f"{pluralize(len(existing), 'image')} already in the gallery {self.name}: {names}. "
                "Pass replace=True to embed them again."
            )

    def remove(self, ids: Sequence[int] | IntArray, *, report: Report | None = None) -> None:
        """Remove images by their ids; `ids(where)` returns them."""
        with self._change("remove", report) as snapshot:
            self._commit(remove_rows(snapshot, self._positions(snapshot, ids)))

    @contextmanager
    def _change(self, method: str, report: Report | None = None) -> Iterator[Snapshot]:
        """Lock the gallery, and open its current version to change it."""
        self._check_local(method)
        with write_lock(self.path, report or ignore):
            snapshot = Snapshot.open(self.path)
            self._check_not_rebuilt(snapshot)
            snapshot.check_tables()
            yield snapshot

    def compact(self, *, progress: Progress | None = None, report: Report | None = None) -> None:
        """Rewrite all images as one segment, without removed rows, and index it."""
        with self._change("compact", report) as snapshot:
            self._commit(merge_segments(snapshot, 0, self.index, progress or ignore))
        for info in self._snapshot.manifest.segments:
            (report or ignore)(indexes.describe(info.index, info.rows, info.recall))

    @property
    def needs_compaction(self) -> bool:
        """Whether many images are removed, or another index fits their number."""
        return self._snapshot.needs_compaction

    def _commit(self, manifest: Manifest) -> None:
        """Commit a change; requires the lock."""
        snapshot = Snapshot(self.path, commit(self.path, manifest))
        self._switch_to(snapshot, self._scan_device)

    def versions(self) -> list[Version]:
        """Return the current version, last, and those replaced within a day."""
        self._check_local("versions")
        return list_versions(self.path)

    def rollback(self, number: int | None = None) -> None:
        """Return to an earlier version of `versions`, by default the one before the current one.

        The result is a new version, so a rollback can be undone.
        """
        self._check_local("rollback")
        with write_lock(self.path, ignore):
            self._commit(find_version(self.path, number))

    def prune(self, keep: float = 0.0) -> None:
        """Remove versions that were replaced at least `keep` seconds ago, to free disk space."""
        self._check_local("prune")
        with write_lock(self.path, ignore):
            prune_versions(self.path, keep)

    def close(self) -> None:
        """Close all files; the gallery cannot be used afterwards."""
        closed: Any = _Closed(self.name)
        self._snapshot, self._embedder = closed, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def verify(self, progress: Progress | None = None) -> None:
        """Verify the checksums of all files of the current version; raise ValueError if damaged.

        Galleries on Milvus do not support this.
        """
        self._check_local("verify")
        segments = Snapshot.open(self.path).manifest.segments
        for number, info in enumerate(segments):
            check_segment(self.path, info)
            (progress or ignore)(number + 1, len(segments))

    def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        where: Where | None = None,
        combine: Combine | None = None,
        box: Box | None = None,
        expand: int = 0,
        rerank: bool = False,
        nprobe: int | None = None,
        ef: int | None = None,
        refine: int | None = None,
        exact: bool = False,
        batch_size: int = 64,
        progress: Progress | None = None,
    ) -> SearchResult:
        """Return the k nearest images of every query.

        Args:
            queries: one or several images (paths, PIL images, uint8 arrays); ids of the gallery,
                which are excluded from their own results; or vectors of the gallery's embedder as a
                float array or tensor, [dim] or [n, dim].
            k: number of results per query.
            where: by column, a value, several values combined with OR, or operators; all must
                match: ``{"label": ["jay", "crow"], "year": {">=": 1999, "<": 2005}}``. Operators
                are ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=`` and ``^=`` (prefix).
            combine: search with all queries as one: "mean" of their vectors, or "max" similarity
                to any of them.
            box: search with a rectangle of the only image: left, top, right, bottom in pixels.
            expand: query expansion with this number of neighbors (`metrics.expand_queries`).
            rerank: order the nearest images by `metrics.k_reciprocal_distances`. With `expand` or
                `rerank`, results are ordered by their `scores`; `similarities` are still those to
                the original query.
            nprobe: number of lists of an IVF index to search.
            ef: number of candidates that an HNSW index keeps (efSearch).
            refine: number of candidates per result to score with the full vectors, for indexes of
                compressed vectors.
            exact: scan all vectors instead of using the index.
            batch_size: images per forward pass.
            progress: called with (done, total) while images are embedded.

        Examples:
            >>> result = Gallery.open("gallery").search(np.eye(2), k=2, where={"label": "jay"})
            >>> result.ids.tolist()
            [[0, 1], [1, 0]]
        """
        check_options(self.similarity, k, combine, expand, rerank)
        snapshot, effort = self._snapshot.view(), Effort(nprobe, ef, refine, exact)
        effort.check(snapshot.index_kinds)
        allowed, ids = snapshot.select(where or {}), as_ids(queries)
        positions = None if ids is None else self._positions(snapshot, ids)
        embedded = embed_queries(
            self, snapshot, queries, positions, box, combine, batch_size, progress or ignore
        )

        def find(vectors: FloatArray, count: int) -> Hits:
            return snapshot.search(vectors, count, allowed, effort)

        hits, scores = run_queries(snapshot, find, embedded, int(k), combine, int(expand), rerank)
        calibration = self.calibration
        prior = 0.5
        if calibration is not None:  # without classes, as many as in the calibration
            prior = snapshot.class_share or 1 / calibration.gallery_classes
        return SearchResult(
            snapshot.ids(hits.positions),
            as_similarities(hits.scores, self.similarity),
            self.similarity,
            tuple(snapshot.columns),
            scores,
            embedded.images,
            calibration,
            prior,
            _positions=hits.positions,
            _take=snapshot.take,
        )

    def recall(
        self,
        sample: int = 1000,
        k: int = 10,
        *,
        nprobe: int | None = None,
        ef: int | None = None,
        refine: int | None = None,
    ) -> float:
        """Return recall@k of searches compared with exact ones, for a sample of the images.

        Arguments are as in `search`. A neighbor as near as the exact k-th one is right.

        Examples:
            >>> Gallery.open("gallery").recall(k=2)
            1.0
        """
        for name, value in (("sample", sample), ("k", k)):
            if not is_integer(value):
                raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")
        snapshot, effort = self._check_local("recall"), Effort(nprobe, ef, refine)
        effort.check(snapshot.index_kinds)
        return measure_recall(snapshot, int(sample), int(k), effort)

    def predict(self, queries: Queries, k: int = 10, **options: Any) -> list[Prediction]:
        """Predict the class of every query by a majority vote of its k nearest images.

        Images without a class do not vote; ties go to the class of the nearer image. Arguments are
        as in `search`.

        Examples:
            >>> Gallery.open("gallery").predict(np.array([0.9, 0.3]), k=3)
            [Prediction(label='jay', votes=2, neighbors=3)]
        """
        return self.search(queries, k, **options).predictions

    def serve(self, host: str = "127.0.0.1", port: int = 8000, token: str | None = None) -> None:
        """Serve the search page of the gallery until Ctrl-C; see `proximetry.web.serve`.

        Searches of a gallery on a GPU stay there, and do not see changes by other processes.
        """
        import proximetry  # web is a higher package, used by this method only

        source = self if self._scan_device or is_milvus(self.name) else self.path
        proximetry.web.serve(source, host, port, token)

    def duplicates(
        self, threshold: float | None = None, *, progress: Progress | None = None
    ) -> Duplicates:
        """Find near-duplicate images.

        Compares all pairs of images. With an index and more than 250 000 images, and on Milvus,
        compares each image with its nearest neighbors.

        Args:
            threshold: the minimum cosine, or the maximum Euclidean distance, of a pair. By
                default it is measured on up to 50 of the images: 90 % of their altered copies
                (half size, recompressed, mirrored, brightened, cropped) meet it, and few different
                images do. If no image can be read, it is a cosine of 0.99.
            progress: called with (done, total).

        Examples:
            >>> Gallery.open("gallery").duplicates(threshold=0.95).pairs.tolist()
            [[1, 3]]
        """
        snapshot = self._snapshot
        stored = isinstance(snapshot, Snapshot) or self._embedder is not None
        load_embedder = (lambda: self.embedder) if stored else None
        return find_duplicates(snapshot, load_embedder, threshold, progress or ignore)

    def outliers(self, *, progress: Progress | None = None) -> list[Outlier]:
        """Find images that are far from all others, the farthest first.

        Their mean distance to the 5 nearest images, as a logarithm, is over 5 robust standard
        deviations above the median, as in `proximetry check`.
        """
        return find_outliers(self._snapshot, progress or ignore)

    def label_errors(self, *, progress: Progress | None = None) -> list[LabelError]:
        """Find images whose label disagrees with those of their neighbors, most probable first.

        Returns those whose label is wrong with a probability above one half, by the model of
        `proximetry check`.
        """
        return find_label_errors(self._snapshot, progress or ignore)


class _Closed:
    """In place of the snapshot of a closed gallery."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise UsageError(f"the gallery {self._name} is closed. Open it again.")

    def __len__(self) -> int:
        return int(self.__getattr__("__len__"))
