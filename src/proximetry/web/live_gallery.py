"""`LiveGallery`: the current version of a gallery, with relative paths only."""

import hashlib
import io
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import numpy as np
from fastapi import HTTPException

from proximetry._util.errors import UsageError
from proximetry.data.folders import file_state, split_shard_path
from proximetry.data.images import thumbnail
from proximetry.search import Gallery
from proximetry.search.manifest import EMBEDDER, MANIFEST, read_manifest
from proximetry.search.milvus import MilvusGallery
from proximetry.search.vector_files import is_row

log = logging.getLogger("proximetry.web")

SIZES = (16, 2048)  # minimum and maximum longer side of a thumbnail in pixels
_CHECK_INTERVAL = 1.0  # seconds between two checks for changes by other processes
_COUNT_INTERVAL = 60.0
_CALL_SECONDS = 10.0  # for an answer of Milvus
_SAMPLE_SIZE = 1000  # images whose paths determine the common folder
_SUGGESTIONS = 12
_COLUMN_SAMPLE, _MAX_VALUES = 10_000, 500  # images that describe a column, and its values
_MAX_CACHED_SIDE, _MAX_CACHED = 320, 2048  # of cached thumbnails: pixels and number
_MAX_PNG_SIDE = 96  # JPEG blurs very small images

EncodedImage = tuple[bytes, str]  # the content and its media type


class Column(NamedTuple):
    """A column to filter by; its values are from a sample of the images."""

    name: str
    kind: str  # "number" or "text"
    values: list[Any]  # of a text column, if they are few
    minimum: Any  # of a number
    maximum: Any


class Summary(NamedTuple):
    """A description of one version of a gallery."""

    gallery: Gallery
    root: str  # the common folder of its images, which is never sent
    classes: dict[str, int]  # by name, the number of images; most frequent first
    suggested: list[int]  # ids for the start page
    columns: list[Column]
    has_images: bool  # else the items are vectors of texts or other data


class LiveGallery:
    """A gallery that is reloaded when another process has changed it; thread-safe.

    Each version is a `Gallery` object that never changes; versions of one build share an embedder.
    A gallery that was rebuilt is loaded in the background, and served once its embedder is ready.

    Args:
        source: the folder, or an open gallery, on Milvus (searches see every change) or a GPU.
        full_paths: whether clients may see full paths; else those relative to the common folder.
        prepare: called with a rebuilt gallery before it is served.
    """

    def __init__(
        self,
        source: Path | Gallery,
        full_paths: bool = False,
        prepare: Callable[[Gallery], None] = lambda gallery: None,
    ) -> None:
        self._folder = source if isinstance(source, Path) else None
        self._state: tuple[int, ...] = ()
        if self._folder and (self._folder / MANIFEST).is_file():
            self._state = file_state(self._folder / MANIFEST)
        self._gallery = Gallery.open(source) if isinstance(source, Path) else source
        if isinstance(source, MilvusGallery):
            self._gallery = source.limit_calls(_CALL_SECONDS)
        self.path, self.full_paths = self._gallery.path, full_paths
        self.reloads = {"ok": 0, "failed": 0}
        self._prepare = prepare
        self._loading: Thread | None = None
        self._lock = Lock()
        self._build_id = _build_id(self._folder) if self._folder else None
        self._checked = time.monotonic()
        self._summary_lock = Lock()
        self._summary: Summary | None = None
        self._counted: tuple[int, float] | None = None

    @property
    def name(self) -> str:
        """The name of the folder or collection."""
        if self._folder:
            return self._folder.resolve().name
        return self._gallery.name.partition("?")[0].rpartition("/")[2]

    def count(self) -> int:
        """Return the number of images; on Milvus, which scans for it, it may be a minute old."""
        if self._folder:
            return len(self.current())
        now = time.monotonic()
        if self._counted is None or now - self._counted[1] > _COUNT_INTERVAL:
            self._counted = len(self._gallery), now
        return self._counted[0]

    def current(self) -> Gallery:
        """Return the current version; may read files, so call it outside the event loop."""
        with self._lock:
            if self._folder and time.monotonic() - self._checked >= _CHECK_INTERVAL:
                self._reload()
                self._checked = time.monotonic()
            return self._gallery

    def _reload(self) -> None:
        try:
            state = file_state(self.path / MANIFEST)
            if state == self._state or (self._loading and self._loading.is_alive()):
                return
            build_id = _build_id(self.path)
            if build_id != self._build_id:
                self._loading = Thread(target=self._load, args=(build_id, state), daemon=True)
                self._loading.start()
                return
            newer = copy(self._gallery)
            newer.refresh()
            self._replace(newer, build_id, state)
        except (OSError, ValueError) as error:
            self._report_failure(error)

    def _load(self, build_id: Any, state: tuple[int, ...]) -> None:
        """Load a rebuilt gallery and its embedder, while the previous one is served."""
        try:
            newer = Gallery.open(self.path)
            self._prepare(newer)
        except (OSError, ValueError) as error:
            with self._lock:
                self._report_failure(error)
            return
        with self._lock:
            self._replace(newer, build_id, state)

    def _replace(self, newer: Gallery, build_id: Any, state: tuple[int, ...]) -> None:
        self._gallery, self._build_id, self._state = newer, build_id, state
        self.reloads["ok"] += 1
        log.info("serving a new version of the gallery: %d images", len(newer))

    def _report_failure(self, error: Exception) -> None:
        if self._state:  # logged once, until it can be read again
            log.warning("still serving the previous version of the gallery: %s", error)
            self.reloads["failed"] += 1
        self._state = ()

    def summary(self) -> Summary:
        """Return the description of the current version, computed once per version."""
        with self._summary_lock:
            gallery, summary = self.current(), self._summary
            if summary is None or summary.gallery is not gallery:
                self._summary = summary = _summarize(gallery)
            return summary

    def items(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the metadata of images, without those that do not exist."""
        gallery = self.current()
        known = np.asarray(ids, np.int64)
        known = known[gallery.exists(known)]
        return self.records(known.tolist(), gallery.rows(known, gallery.columns))

    def item(self, gallery: Gallery, item: int) -> dict[str, Any]:
        """Return the metadata of an image; raise HTTPException for an unknown id."""
        return self.records([item], _row(gallery, item, gallery.columns))[0]

    def path_of(self, gallery: Gallery, item: int | None) -> str:
        """Return the path of an image; raises HTTPException for an unknown id."""
        return _row(gallery, item, ["path"])["path"][0] or ""

    def records(self, ids: Sequence[int], columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
        """Return the metadata of images from their columns."""
        summary = self._summary
        if summary is None or not summary.suggested:  # the gallery was empty
            summary = self.summary()
        root = "" if self.full_paths else os.path.join(summary.root, "")
        others = [name for name in columns if name not in ("path", "label")]
        records = []
        for row, item in enumerate(ids):
            path = columns["path"][row] or ""
            file = path.removeprefix(root) if path.startswith(root) else os.path.basename(path)
            records.append(
                {
                    "id": int(item),
                    "label": to_json_value(columns["label"][row]),
                    "file": to_json_value(file),
                    "image": f"items/{int(item)}/image" if path and summary.has_images else None,
                    "details": {name: to_json_value(columns[name][row]) for name in others},
                }
            )
        return records

    def image(self, item: int, size: int, etag: str | None) -> tuple[str, EncodedImage | None]:
        """Return the ETag of an image and its thumbnail; None if the client has this ETag.

        The ETag depends on the file, not on the id: every gallery has an image 0.

        Raises:
            HTTPException: if the id is unknown.
            ImageError: if the file is missing or not an image.
        """
        path = self.path_of(self.current(), item)
        if not path:
            raise HTTPException(404, f"item {item} has no image")
        try:
            state = file_state(split_shard_path(path)[0])
        except OSError:
            state = ()
        current = f'"{hashlib.sha256(repr((path, state, size)).encode()).hexdigest()[:32]}"'
        if not state:
            return current, encode_thumbnail(path, size)  # raises ImageError
        if current == etag:
            return current, None
        encode = encode_thumbnail if size > _MAX_CACHED_SIDE else _cached_thumbnail
        return current, encode(path, size, state)


def _row(gallery: Gallery, item: int | None, columns: Sequence[str]) -> dict[str, list[Any]]:
    try:
        return gallery.rows(np.array([item]), columns)
    except UsageError:
        raise HTTPException(404, f"no image has the id {item}") from None


def _build_id(path: Path) -> tuple[str, tuple[int, ...]]:
    """Return values that change only if a gallery is rebuilt, with new ids."""
    return read_manifest(path).embedder, file_state(path / EMBEDDER)


def encode_thumbnail(path: str, size: int, state: tuple[int, ...] = ()) -> EncodedImage:
    """Re-encode an image, so that only its pixels are sent."""
    image = thumbnail(path, size)
    buffer = io.BytesIO()
    kind = "PNG" if max(image.size) <= _MAX_PNG_SIDE else "JPEG"
    image.save(buffer, kind, quality=85)  # PNG ignores the quality
    return buffer.getvalue(), f"image/{kind.lower()}"


_cached_thumbnail = lru_cache(maxsize=_MAX_CACHED)(encode_thumbnail)


def _summarize(gallery: Gallery) -> Summary:
    generator = np.random.default_rng(0)
    sample = gallery.sample_ids(_SAMPLE_SIZE)
    paths = gallery.rows(sample, ["path"])["path"]
    classes = Counter(gallery.count_labels()).most_common()
    folders = [os.path.dirname(split_shard_path(path)[0]) for path in paths if path]
    return Summary(
        gallery,
        os.path.commonpath(folders) if folders else "",
        {to_json_value(name): count for name, count in classes},
        generator.permutation(sample)[:_SUGGESTIONS].tolist(),
        [_describe_column(gallery, name) for name in gallery.columns if name != "path"],
        any(_may_be_image(gallery, path) for path in paths),
    )


def _may_be_image(gallery: Gallery, path: str | None) -> bool:
    if path is None or is_row(path):
        return False
    return gallery.embedder.takes_images or os.path.isfile(split_shard_path(path)[0])


def _describe_column(gallery: Gallery, name: str) -> Column:
    ids = gallery.sample_ids(_COLUMN_SAMPLE)
    values = [value for value in gallery.rows(ids, [name])[name] if value is not None]
    if values and all(type(value) in (int, float) for value in values):  # bool has no ranges
        finite = [value for value in values if math.isfinite(value)] or [0]
        return Column(name, "number", [], min(finite), max(finite))
    counts = Counter(str(to_json_value(value)) for value in values)
    few = sorted(counts) if len(counts) <= _MAX_VALUES else []
    return Column(name, "text", few, None, None)


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON: NaN and infinity become None, bytes that are not UTF-8 "�"."""
    if isinstance(value, dict):
        return {str(name): to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    return str(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
