"""`Gallery`: images, their vectors and an index, in a folder that is never half-written.

Galleries on Milvus (`search/milvus.py`) are searched by the same code, and changed by their own.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.errors import Steps, UsageError, some, spaced
from proximetry._util.files import writing
from proximetry._util.machine import resolve_device
from proximetry._util.tensors import chunks
from proximetry.data import Catalog
from proximetry.metrics._search.inputs import IntArray, as_embeddings
from proximetry.metrics.reranking import RERANKED, expand_queries, k_reciprocal_distances
from proximetry.models import Embedder
from proximetry.models.preprocessing import ImageSource
from proximetry.search import exact, indexes, rows
from proximetry.search.duplicates import measure
from proximetry.search.exact import Duplicates, FloatArray, Found, Mask, Scores
from proximetry.search.manifest import (
    EMBEDDER,
    STAGING,
    Manifest,
    Report,
    SegmentInfo,
    check_place,
    is_milvus,
    locked,
    read_manifest,
    retire,
    sweep,
    write_manifest,
)
from proximetry.search.result import SearchResult
from proximetry.search.snapshot import (
    Segment,
    Snapshot,
    Version,
    check_digests,
    prepared,
    quiet,
    write_deleted,
    write_segment,
)
from proximetry.search.staging import BadImages, embed, stamp_of

Where = rows.Where
Images = Catalog | Sequence[str | os.PathLike[str]] | Any
"""A catalogue, image files, or the rows that `rows.table` makes."""
Labels = Sequence[str | None] | None
Queries = Sequence[ImageSource] | Tensor | npt.NDArray[Any]

_FLOATING = {*map(np.dtype, ("f2", "f4", "f8")), torch.float32, torch.float64}
_FLOATING |= {torch.float16, torch.bfloat16}

LEFT_OUT = "left out "
"""How a report on an image that was left out begins."""
# Segments of up to so many rows are merged as they pile up: writing them takes a second.
MERGED = 65_536
_BLOCK = 65_536
# The cosine of a float32 unit vector with its own copy falls short of 1 by less than this.
ROUNDING = 2.0**-22
_DEFAULT_THRESHOLD = 0.99
# Lists up to this length may be ordered anew: twice as many images are then compared.
_MOST_RERANKED = 1000


class Gallery:
    """Images that can be searched. Made by `Gallery.build`, read by `Gallery.open`.

    Both take a folder, or the address of a collection on Milvus (`search/milvus.py`), where some
    promises are others. In a folder, a gallery that is open stays at the version it was opened at
    until it is changed through this object or `refresh` is called, whatever other processes do.
    Every change is atomic, and made by one process at a time. It may be searched by several
    threads at once.

    Attributes:
        path: its folder; of a gallery on Milvus, what this machine keeps while it is written to.
        name: what messages call it, the folder or the address.
    """

    def __init__(self, path: Path, version: Version, embedder: Embedder | None) -> None:
        self.path = path
        self.name = str(path)
        self._now = version
        self._embedder = embedder
        self._loading = Lock()

    @classmethod
    def build(
        cls,
        embedder: Embedder,
        images: Images,
        path: str | os.PathLike[str],
        index: str = "auto",
        *,
        labels: Labels = None,
        vectors: Tensor | npt.NDArray[Any] | None = None,
        bad_images: BadImages = "error",
        batch_size: int = 64,
        steps: Steps | None = None,
        report: Report | None = None,
    ) -> Gallery:
        """Embed images and make a gallery of them in a new or empty folder.

        A build that was cut off goes on where it was, if it is called again.

        Args:
            embedder: makes the vectors, and is kept in the folder.
            images: a catalogue, or image files.
            labels: the class of each image file, or None; without them files have no class.
            path: the folder, or ``milvus://host:port/collection``, or ``milvus:file.db``.
            index: "Flat" searches exactly; "HNSW32", "IVF1024,PQ64" and other factory strings of
                faiss approximately; "BFlat" by binary codes. "auto" is exact up to 100 000
                images, HNSW32 up to 2 million, and IVF with 8-bit codes beyond; for an embedder
                with `bits` it is "BFlat". Recall@10 is measured on a sample, and the search
                effort raised until it is 0.98.
            vectors: what the embedder makes of the images, where that is known.
            bad_images: "error" stops at images that cannot be read, "skip" leaves them out.
            batch_size: images per forward pass.
            steps: called with (what, done, total) now and then.
            report: called with what there is to say: the index, images that were left out.
        """
        new = NewImages(
            images, labels, vectors, embedder.dim, bad_images, batch_size, steps, report
        )
        if is_milvus(path):
            from proximetry.search.milvus import MilvusGallery

            return MilvusGallery.make(embedder, new, path, index)
        folder = Path(path)
        if index == "auto" and embedder.bits is not None:
            index = indexes.BINARY
        check_place(folder)
        indexes.check(index, embedder.dim, len(new.table))
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, new.report):
            check_place(folder)  # another process may have built it meanwhile
            fingerprint = embedder.fingerprint()
            embedder.save(folder / EMBEDDER)
            manifest = Manifest(fingerprint, embedder.architecture.similarity, embedder.dim, index)
            embedded = new.embed(embedder, fingerprint, folder)
            segment = embedded.write(folder, manifest, index, new.steps)
            new.report(describe_segment(segment, "auto → " if index == "auto" else ""))
            manifest = replace(manifest, next_id=segment.rows, segments=(segment,))
            write_manifest(folder, manifest)
            # Nothing is added to a gallery before it is there, so no one else has anything here.
            shutil.rmtree(folder / STAGING, ignore_errors=True)
            sweep(folder, manifest)
            return cls(folder, Snapshot(folder, manifest), embedder)

    @classmethod
    def open(cls, path: str | os.PathLike[str], embedder: Embedder | None = None) -> Gallery:
        """Open a gallery.

        Args:
            path: its folder, or its address on Milvus.
            embedder: the one that built it, if it is at hand; without it the gallery reads its
                own when images are to be embedded, which one on Milvus does not have. Any other
                is refused.
        """
        if is_milvus(path):
            from proximetry.search.milvus import MilvusGallery

            return MilvusGallery.open(path, embedder)
        found = cls(Path(path), Snapshot.open(Path(path)), None)
        found.use(embedder)
        return found

    def use(self, embedder: Embedder | None) -> None:
        """Embed images with this embedder, which must be the one that built the gallery."""
        if embedder is not None:
            self._check_embedder(embedder, "the given embedder")
            self._embedder = embedder

    def refresh(self) -> None:
        """Go on to the version that is there now, whichever embedder it was built by."""
        newest = self._newest()
        with self._loading:
            if newest.manifest.embedder != self._now.manifest.embedder:
                self._embedder = None
            self._now = newest

    def _newest(self) -> Version:
        return Snapshot.open(self.path)

    def __len__(self) -> int:
        return len(self._now)

    @property
    def version(self) -> str:
        """A name for the state it is in: another one after every change."""
        return self._now.manifest.version

    @property
    def dim(self) -> int:
        """The dimension of the vectors."""
        return self._now.manifest.dim

    @property
    def similarity(self) -> str:
        """How vectors are compared: "cosine" or "euclidean"."""
        return self._now.manifest.similarity

    @property
    def index(self) -> str:
        """The index that was asked for: "auto", "Flat", a factory string."""
        return self._now.manifest.index

    @property
    def columns(self) -> list[str]:
        """The names of what is known of the images."""
        return self._now.columns

    def _indexes(self) -> list[str]:
        return [info.index or indexes.EXACT for info in self._now.manifest.segments]

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(self._indexes())) or indexes.EXACT
        return (
            f"Gallery({self.name!r}: {spaced(len(self))} images, {self.dim} dimensions, "
            f"{self.similarity}, index {kinds})"
        )

    @property
    def embedder(self) -> Embedder:
        """The embedder that made the vectors, read when it is first asked for."""
        with self._loading:
            if self._embedder is None:
                found = Embedder.load(self.path / EMBEDDER, device=resolve_device())
                self._check_embedder(found, str(self.path / EMBEDDER))
                self._embedder = found
            return self._embedder

    def _check_embedder(self, embedder: Embedder, name: str) -> None:
        if embedder.fingerprint() != self._now.manifest.embedder:
            raise UsageError(
                f"{name} is not the one that built the gallery {self.name}: network, preprocessing "
                "or weights differ, so that vectors cannot be compared; name none where the "
                "gallery keeps its own, as one in a folder does, or build another gallery"
            )

    def ids(self, where: Where | None = None) -> IntArray:
        """Return the ids of all images, or of those that `where` means, in rising order."""
        now = self._now
        return now.ids(now.chosen(now.select(where or {})))

    def rows(
        self, ids: Sequence[int] | IntArray, columns: Iterable[str] | None = None
    ) -> dict[str, list[Any]]:
        """Return what is known of images, by column: all of it, or some columns."""
        now = self._now
        return now.take(self._places(now, ids), now.columns if columns is None else columns)

    def vectors(self, ids: Sequence[int] | IntArray) -> FloatArray:
        """Return the vectors of images, [n, dim]; of unit length if cosines are compared."""
        now = self._now
        places = self._places(now, ids)
        empty = np.empty((0, now.manifest.dim), np.float32)
        return now.store.take(places) if len(places) else empty

    def _places(self, now: Version, ids: Sequence[int] | IntArray) -> IntArray:
        wanted = as_ids(ids)
        found = now.places(wanted)
        if (found < 0).any():
            missing = some([str(one) for one in wanted[found < 0]])
            raise UsageError(f"no image of the gallery {self.name} has the id {missing}")
        return found

    def known(self, paths: Iterable[str | os.PathLike[str]]) -> list[bool]:
        """Say of each file whether its image is in the gallery."""
        table = rows.make_rows(list(paths))
        there = self._now.paths_there(table)
        return [path in there for path in table["path"].to_pylist()]

    def outdated(self, folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
        """Compare the images below a folder with their files.

        Returns the paths of files that are missing, and of those whose size or time of
        modification has changed since they were embedded. Galleries on Milvus do not keep these.
        """
        now = self._now
        if not isinstance(now, Snapshot):
            raise UsageError(f"the gallery {self.name} does not keep sizes of files")
        missing: list[str] = []
        changed: list[str] = []
        below = os.path.dirname(rows.absolute(os.path.join(folder, "image")))
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
        vectors: Tensor | npt.NDArray[Any] | None = None,
        bad_images: BadImages = "error",
        batch_size: int = 64,
        steps: Steps | None = None,
        report: Report | None = None,
    ) -> IntArray:
        """Add images, and return their ids; arguments as those of `build`.

        Images that are there already are refused; `update` embeds them again. What is there is
        not written anew. Where all have to be left out, there is no id.
        """
        new = NewImages(images, labels, vectors, self.dim, bad_images, batch_size, steps, report)
        return self._extend(new, renew=False)

    def update(
        self,
        images: Images,
        *,
        labels: Labels = None,
        vectors: Tensor | npt.NDArray[Any] | None = None,
        bad_images: BadImages = "error",
        batch_size: int = 64,
        steps: Steps | None = None,
        report: Report | None = None,
    ) -> IntArray:
        """Embed images again that are in the gallery, add others, and return their ids.

        An id names one state of an image for ever, so those that are embedded again get new ones.
        Files without `labels` keep the class and the other columns that they have in the gallery.
        """
        new = NewImages(images, labels, vectors, self.dim, bad_images, batch_size, steps, report)
        return self._extend(new, renew=True)

    def _extend(self, new: NewImages, *, renew: bool) -> IntArray:
        newest = self._newest()
        self._check_same(newest)
        if renew and new.only_files:
            new.table = _with_known(newest, new.table)
        newest.check_fits(new.table)
        if not renew:
            self._refuse_known(newest, new.table)
        embedder = self.embedder if new.vectors is None else None
        try:
            embedded = new.embed(embedder, newest.manifest.embedder, self.path)
        except NothingToAddError:
            return np.arange(0)
        unlabeled = 0 if renew or new.has_labels else embedded.table["label"].null_count
        if unlabeled and isinstance(newest, Snapshot) and newest.has_labels:
            new.warn(
                f"{spaced(unlabeled)} of the images have no class, others in the gallery "
                f"{self.name} do. Pass labels=, a class folder or a table."
            )
        return self._write(new, embedded, renew=renew)

    def _check_same(self, now: Version) -> None:
        if now.manifest.embedder != self._now.manifest.embedder:
            raise UsageError(
                f"the gallery {self.name} was built anew by another embedder since it was opened: "
                "refresh() goes on to it"
            )

    def _refuse_known(self, now: Version, table: Any) -> None:
        there = now.paths_there(table)
        if there:
            names = some([os.fsdecode(path) for path in sorted(there)])
            raise UsageError(
                f"{len(there)} of the images are in the gallery {self.name} already: {names}; "
                "update() embeds them again"
            )

    def _write(self, new: NewImages, embedded: EmbeddedImages, *, renew: bool) -> IntArray:
        """Put images into the gallery that are embedded, and return their ids."""
        with locked(self.path, new.report):
            now = Snapshot.open(self.path)
            self._check_same(now)
            now.check_digests()
            now.check_fits(embedded.table)
            if not renew:
                self._refuse_known(now, embedded.table)
            manifest = now.manifest
            if renew:
                old = now.paths_there(embedded.table)
                if old:
                    manifest = now.without(now.ids(np.array(sorted(old.values()))))
            segment = embedded.write(self.path, manifest, manifest.index, new.steps)
            first = manifest.next_id
            manifest = replace(
                manifest,
                next_id=first + segment.rows,
                segments=(*manifest.segments, *([segment] if segment.rows else [])),
            )
            self._commit(self._merged(manifest, new.steps))
            if segment.index:
                new.report(describe_segment(segment))
            embedded.discard()
            return np.arange(first, first + segment.rows)

    def remove(self, ids: Sequence[int] | IntArray, *, report: Report | None = None) -> None:
        """Remove images by their ids; `ids(where)` finds them."""
        wanted = np.unique(as_ids(ids))
        with locked(self.path, report):
            now = Snapshot.open(self.path)
            self._check_same(now)
            now.check_digests()
            self._places(now, wanted)
            self._commit(now.without(wanted))

    def compact(self, *, steps: Steps | None = None, report: Report | None = None) -> None:
        """Write everything anew as one segment, without what is removed, and index it."""
        with locked(self.path, report):
            manifest = Snapshot.open(self.path).manifest
            self._commit(self._merge(manifest, 0, manifest.index, steps or quiet))
        if report is not None:
            for info in self._now.manifest.segments:
                report(describe_segment(info))

    @property
    def needs_compaction(self) -> bool:
        """Whether much of the gallery is removed, or scanned though there is an index."""
        now = self._now
        total = sum(info.rows for info in now.manifest.segments)
        large = indexes.resolve(self.index, len(now)) != ""
        scanned = sum(info.rows for info in now.manifest.segments if not info.index)
        return total - len(now) > max(1000, total // 4) or (large and scanned > total // 4)

    def _commit(self, manifest: Manifest) -> None:
        """Make a change take place, under the lock."""
        manifest = retire(read_manifest(self.path), manifest)
        write_manifest(self.path, manifest)
        self._now = Snapshot(self.path, manifest)
        sweep(self.path, manifest)

    def _merged(self, manifest: Manifest, steps: Steps) -> Manifest:
        """Merge small segments at the end, each with one that is not much larger.

        As every row is written anew only when its segment doubles, that happens seldom.
        """
        while len(manifest.segments) > 1:
            one, two = manifest.segments[-2:]
            if one.index or two.index or one.rows > 2 * two.rows or one.rows + two.rows > MERGED:
                return manifest
            manifest = self._merge(manifest, len(manifest.segments) - 2, indexes.EXACT, steps)
        return manifest

    def _merge(self, manifest: Manifest, first: int, index: str, steps: Steps) -> Manifest:
        """Write the segments from this one on as one, without what is removed."""
        for info in manifest.segments[first:]:  # damage must not get a new checksum
            check_digests(self.path, info)
        now = Snapshot(self.path, manifest)
        taken = list(zip(now.segments, now.alive, strict=True))[first:]
        kept = [
            np.arange(len(segment.ids)) if mask is None else np.flatnonzero(mask)
            for segment, mask in taken
        ]
        tables = [
            segment.rows.take(rows.arrow().array(chosen))
            for (segment, _), chosen in zip(taken, kept, strict=True)
        ]
        ids = [segment.ids[chosen] for (segment, _), chosen in zip(taken, kept, strict=True)]
        old = np.concatenate([np.empty(0, np.int64), *(segment.ids for segment, _ in taken)])
        together = np.concatenate([np.empty(0, np.int64), *ids])
        segments = manifest.segments[:first]
        if len(together):
            merged = write_segment(
                self.path,
                manifest,
                rows.stack(tables),
                together,
                _rows_of(taken, kept),
                indexes.resolve(index, len(together)),
                steps,
            )
            segments = (*segments, merged)
        gone = write_deleted(self.path, np.setdiff1d(now.deleted, old))
        return replace(manifest, segments=segments, deleted=gone)

    def verify(self, steps: Steps | None = None) -> None:
        """Read every file that is there now and compare it with its checksum.

        Raises ValueError for damage.
        """
        while True:
            now = Snapshot.open(self.path)
            try:
                for info in now.manifest.segments:
                    check_digests(self.path, info, steps=steps or quiet)
                return
            except (FileNotFoundError, ValueError):
                if read_manifest(self.path) == now.manifest:  # else the files were replaced
                    raise

    def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        where: Where | None = None,
        expand: int = 0,
        rerank: bool = False,
        batch_size: int = 64,
        steps: Steps | None = None,
    ) -> SearchResult:
        """Find the k nearest images of every query.

        Args:
            queries: images (paths, PIL images, uint8 arrays), or vectors of the gallery's
                embedder as a float array or tensor [n, dim].
            k: how many images each list holds.
            where: by column, the value that is wanted, or several of which one is:
                ``{"label": "jay"}``, ``{"label": ["jay", "crow"], "split": "test"}``.
            expand: search again for each query moved towards so many of its neighbours
                (`metrics.expand_queries`).
            rerank: order the nearest images by `metrics.k_reciprocal_distances`. With either,
                `similarities` are still those of the query, and `scores` what decides.
            batch_size: images per forward pass.
            steps: called with (what, done, total) now and then while images are embedded.
        """
        if isinstance(k, bool) or int(k) != k or k < 1:
            raise UsageError(f"k must be a whole number from 1 up, got {k!r}")
        if isinstance(expand, bool) or int(expand) != expand or expand < 0:
            raise UsageError(f"expand must be a whole number from 0 up, got {expand!r}")
        if expand and self.similarity != "cosine":
            raise UsageError("expand is for galleries that are compared by the cosine")
        if rerank and k > _MOST_RERANKED:
            raise UsageError(f"rerank is for lists of up to {_MOST_RERANKED}, got k = {k}")
        now = self._now
        allowed = now.select(where or {})
        asked = self._as_queries(queries, batch_size, steps or quiet)
        size = max(1, len(now))

        def nearest(queries: FloatArray, count: int) -> Found:
            return now.search(queries, min(count, size), allowed)

        moved = _expanded(now, asked, nearest(asked, int(expand))) if expand else asked
        found = nearest(moved, max(RERANKED, 2 * int(k)) if rerank else int(k))
        if rerank:
            found = _reranked(now, moved, found, int(k))
        if not expand and not rerank:
            return _result(now, found)
        plain = Found(found.places, now.store.scores(asked, found.places))
        return replace(_result(now, plain), scores=found.scores.astype(np.float32))

    def _as_queries(self, queries: Queries, batch_size: int, steps: Steps) -> FloatArray:
        given: Any = queries
        floating = getattr(given, "dtype", None) in _FLOATING
        if floating and given.ndim == 2:
            vectors = as_vectors(given, len(given), self.dim)
        else:
            try:
                vectors = self.embedder.encode(
                    given, batch_size, progress=lambda done: steps("embedding", done, len(given))
                ).numpy()
            except ValueError as error:
                cause = error.__cause__
                raise UsageError(str(cause if isinstance(cause, ValueError) else error)) from error
        return prepared(vectors, self._now.manifest)

    def duplicates(
        self, threshold: float | None = None, *, steps: Steps | None = None
    ) -> Duplicates:
        """Find images that are alike.

        Compares all pairs of images. With an index and more than 250 000 images, compares each
        with those that the index proposes.

        Args:
            threshold: the smallest cosine, or the largest Euclidean distance, of a pair. By
                default it is measured on up to 50 of the images: 90 % of their altered copies
                (half size, recompressed, mirrored, brightened, cropped) meet it, and few different
                images do. Where no image can be read, it is a cosine of 0.99.
            steps: called with (what, done, total) now and then.
        """
        now, steps = self._now, steps or quiet
        chosen = ""
        if threshold is None:
            threshold, chosen = self._copy_threshold(now, steps)
        cosine = self.similarity == "cosine"
        if not (-1 <= threshold <= 1 if cosine else threshold >= 0):
            kind = "a cosine, from −1 to 1" if cosine else "a distance, from 0 up"
            raise UsageError(f"threshold must be {kind}, got {threshold:g}")
        least = float(threshold) - ROUNDING if cosine else -(float(threshold) ** 2)
        places, scores = now.similar_pairs(least, steps)
        similarities = _shown(scores, self.similarity)
        order = np.lexsort((*places.T[::-1], -similarities))
        pairs = now.ids(places[order])
        groups = exact.group_pairs(pairs)
        members = np.unique(pairs)
        named = now.take(now.places(members), ["path"])["path"]
        return Duplicates(
            pairs,
            similarities[order],
            groups,
            dict(zip(members.tolist(), named, strict=True)),
            float(threshold),
            chosen,
        )

    def _copy_threshold(self, now: Version, steps: Steps) -> tuple[float, str]:
        """The default threshold of `duplicates`, and how it was chosen."""
        cosine = self.similarity == "cosine"
        if self._embedder is None and not isinstance(now, Snapshot):
            found, reason = None, "the gallery keeps no embedder"
        else:
            found, reason = measure(now, lambda: self.embedder, steps), "no image can be read"
        if found is None and cosine:
            return _DEFAULT_THRESHOLD, f"cosine {_DEFAULT_THRESHOLD}, not measured: {reason}"
        if found is None:
            raise UsageError(f"the threshold cannot be measured: {reason}. Give a threshold.")
        scores = np.array([max(found[:2]), *found[:2]])
        values = np.minimum(scores, 1.0) if cosine else np.sqrt(-scores)
        threshold, copies, others = values.tolist()
        return threshold, (
            f"{'cosine' if cosine else 'distance'} {threshold:.4f}, measured on {found.images} "
            f"images: 90 % of altered copies reach {copies:.4f}, few different images reach "
            f"{others:.4f}"
        )


def _with_known(now: Version, table: Any) -> Any:
    """The rows of files, with what the gallery knows of those that are in it."""
    there = now.paths_there(table)
    places = [there.get(path, -1) for path in table["path"].to_pylist()]
    chosen = [row for row, place in enumerate(places) if place >= 0]
    known = now.take(np.array([places[row] for row in chosen], np.int64), now.columns)
    columns: dict[str, list[Any]] = {name: [None] * len(places) for name in known}
    for name, values in known.items():
        for row, value in zip(chosen, values, strict=True):
            columns[name][row] = value
    return rows.table({**columns, "path": rows.values(table["path"])})


def _result(now: Version, found: Found) -> SearchResult:
    return SearchResult(
        now.ids(found.places),
        _shown(found.scores, now.manifest.similarity),
        now.manifest.similarity,
        tuple(now.columns),
        _places=found.places,
        _take=now.take,
    )


def _expanded(now: Version, queries: FloatArray, found: Found) -> FloatArray:
    """Queries moved towards what was found for them."""
    moved = queries.copy()
    counts = (found.places >= 0).sum(1)
    for count in np.unique(counts[counts > 0]):
        rows = counts == count
        places = found.places[rows, :count]
        vectors = now.store.take(places.ravel()).reshape(*places.shape, -1)
        moved[rows] = expand_queries(queries[rows], vectors)
    return moved


def _reranked(now: Version, queries: FloatArray, found: Found, k: int) -> Found:
    """The k nearest of what was found, by k-reciprocal distances."""
    scores = np.full(found.places.shape, -np.inf)
    for query, places, row in zip(queries, found.places, scores, strict=True):
        there = places >= 0
        if there.any():
            row[there] = -k_reciprocal_distances(query[None], now.store.take(places[there]))[0]
    return Found(found.places, scores).top(k)


def _shown(scores: Scores, similarity: str) -> FloatArray:
    """Return the similarities that users see: cosines up to 1, or negative distances."""
    shown = scores.clip(-1, 1) if similarity == "cosine" else -np.sqrt(-scores)
    return np.where(scores == -np.inf, scores, shown).astype(np.float32)


class NewImages:
    """Images that are to be put into a gallery, after checking them, and how to embed them.

    Attributes:
        table: what is known of them.
        vectors: theirs, where an embedder need not make them.
        has_labels: whether classes were given with a list of files.
        only_files: whether they are files of which nothing else is known.
    """

    def __init__(
        self,
        images: Images,
        labels: Labels,
        vectors: Tensor | npt.NDArray[Any] | None,
        dim: int,
        bad_images: BadImages,
        batch_size: int,
        steps: Steps | None,
        report: Report | None,
    ) -> None:
        self.table = checked_rows(images, labels)
        self.has_labels = labels is not None
        self.only_files = not self.has_labels and self.table.column_names == ["path", "label"]
        self.only_files &= self.table["label"].null_count == len(self.table)
        self.vectors = None if vectors is None else as_vectors(vectors, len(self.table), dim)
        self.bad_images, self.batch_size = bad_images, batch_size
        self.steps, self.report = steps or quiet, report or (lambda line: None)
        self.warn = report or (lambda line: warnings.warn(line, stacklevel=4))

    def embed(self, embedder: Embedder | None, fingerprint: str, folder: Path) -> EmbeddedImages:
        """Return them with their vectors, less those that cannot be read."""
        table, given = self.table, self.vectors
        if given is not None:
            return EmbeddedImages(
                table, lambda: (given[part] for part in chunks(len(given), _BLOCK))
            )
        assert embedder is not None
        staged = embed(
            embedder,
            fingerprint,
            rows.values(table["path"]),
            folder,
            batch_size=self.batch_size,
            bad_images=self.bad_images,
            progress=lambda done, total: self.steps("embedding", done, total),
        )
        for reason in staged.left_out:
            self.report(f"{LEFT_OUT}{reason}")
        if not len(staged.kept):
            raise NothingToAddError(
                f"none of the {len(table)} images can be read: {staged.left_out[0]}"
            )
        kept = table.take(rows.arrow().array(staged.kept))
        return EmbeddedImages(kept, staged.blocks, staged.stamps, staged.discard)


class NothingToAddError(ValueError):
    """All images had to be left out."""


class EmbeddedImages(NamedTuple):
    """Images that are embedded and not yet in the gallery.

    Attributes:
        table: what is known of them.
        vectors: gives their vectors, some after others.
        stamps: size and time of modification of their files, where known.
        discard: removes what was kept of them until they are in the gallery.
    """

    table: Any
    vectors: Callable[[], Iterable[FloatArray]]
    stamps: Sequence[tuple[int, int] | None] = ()
    discard: Callable[[], None] = lambda: None

    def blocks(self, manifest: Manifest) -> Iterator[FloatArray]:
        """Their vectors as a gallery stores them, some after others."""
        return (prepared(block, manifest) for block in self.vectors())

    def write(self, folder: Path, manifest: Manifest, index: str, steps: Steps) -> SegmentInfo:
        """Write them as a segment with the next ids."""
        count, first = len(self.table), manifest.next_id
        return write_segment(
            folder,
            manifest,
            rows.with_stamps(self.table, self.stamps),
            np.arange(first, first + count),
            self.blocks(manifest),
            indexes.resolve(index, count),
            steps,
        )


def describe_segment(info: SegmentInfo, prefix: str = "") -> str:
    """Describe in one line how new images are searched."""
    index = f"{prefix}{info.index or indexes.EXACT}"
    return describe_index(index, info.rows, exact=not info.index, recall=info.recall)


def describe_index(index: str, count: int, *, exact: bool, recall: float | None = None) -> str:
    """Describe in one line how this number of new images is searched."""
    accuracy = "every search is exact" if exact else "approximate, with exact similarities"
    if recall is not None:
        accuracy += f", recall@10 {math.floor(1000 * recall) / 1000:.3f}"
        if recall < indexes.RECALL:
            accuracy += f", below {indexes.RECALL}; auto and Flat find more"
    return f"index: {index} for {spaced(count)} image{'s' if count != 1 else ''}: {accuracy}"


def checked_rows(images: Images, labels: Labels = None) -> Any:
    """The table of the images, of which each stands there once."""
    table: Any = images if hasattr(images, "column_names") else rows.make_rows(images, labels)
    paths = table["path"].to_pylist()
    if not paths:
        raise UsageError("there are no images")
    if len(set(paths)) < len(paths):
        seen: set[bytes] = set()
        twice = [path for path in paths if path in seen or seen.add(path)]  # type: ignore[func-returns-value]
        names = some([os.fsdecode(path) for path in twice])
        raise UsageError(f"images are listed twice: {names}")
    return table


def as_ids(ids: Sequence[int] | IntArray) -> IntArray:
    """Return ids that were given; a mask or fractions would name other images than were meant."""
    found = np.asarray(ids)
    if found.size and found.dtype.kind not in "iu":
        raise UsageError(f"ids must be whole numbers, got {found.dtype}")
    return found.astype(np.int64).reshape(-1)


def as_vectors(values: Any, count: int, dim: int) -> FloatArray:
    """Return vectors that were given, after checking them."""
    if count == 0:
        return np.empty((0, dim), np.float32)
    found = as_embeddings(values, "vectors").float().cpu().numpy()
    if found.shape != (count, dim):
        raise UsageError(
            f"vectors must be [{count}, {dim}] for these images and this embedder, got "
            f"{list(found.shape)}"
        )
    return np.asarray(found)


def _rows_of(
    taken: Sequence[tuple[Segment, Mask | None]], kept: Sequence[IntArray]
) -> Iterator[FloatArray]:
    for (segment, _), chosen in zip(taken, kept, strict=True):
        for part in chunks(len(chosen), _BLOCK):
            yield segment.vectors[chosen[part]]
