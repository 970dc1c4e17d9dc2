"""A gallery as the page sees it: the current version, without names of folders."""

import hashlib
import io
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from fastapi import HTTPException

from proximetry._util.errors import UsageError
from proximetry.data.folders import file_state, split_shard_path
from proximetry.data.images import thumbnail
from proximetry.search import Gallery
from proximetry.search.manifest import EMBEDDER, MANIFEST, read_manifest

log = logging.getLogger("proximetry.web")

SIZES = (16, 2048)  # minimum and maximum longer side of a thumbnail in pixels
_CHECK_EVERY = 1.0  # seconds between two checks for changes by other processes
_SAMPLED = 1000  # images whose paths determine the common folder
_SUGGESTED = 12
# Thumbnails up to these sizes are cached, and lossless: JPEG blurs very small images.
_THUMBNAIL, _LOSSLESS = 320, 96
_CACHED = 2048

EncodedImage = tuple[bytes, str]  # as it is sent, and its media type


class About(NamedTuple):
    """A description of one version of a gallery."""

    gallery: Gallery
    home: str  # the common folder of its images, which is never sent
    classes: dict[str, int]  # by name, the number of images; most frequent first
    suggested: list[int]  # ids for the start page


class LiveGallery:
    """A gallery that follows the changes of other processes; thread-safe.

    Each version is a `Gallery` object that never changes; versions of one build share an embedder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._state = file_state(path / MANIFEST) if (path / MANIFEST).is_file() else ()
        self._gallery = Gallery.open(path)
        self._build = _build(path)
        self._checked = time.monotonic()
        self._describing = Lock()
        self._about: About | None = None

    def current(self) -> Gallery:
        """Return the current version; it may read files, so it is not for the event loop."""
        with self._lock:
            if time.monotonic() - self._checked >= _CHECK_EVERY:
                self._follow()
                self._checked = time.monotonic()
            return self._gallery

    def _follow(self) -> None:
        try:
            state = file_state(self.path / MANIFEST)
            if state == self._state:
                return
            build = _build(self.path)
            if build == self._build:
                newer = copy(self._gallery)
                newer.refresh()
            else:
                newer = Gallery.open(self.path)
            self._gallery, self._build, self._state = newer, build, state
        except (OSError, ValueError) as error:
            if self._state:  # logged once, until it can be read again
                log.warning("the last version of the gallery is served: %s", error)
            self._state = ()

    def about(self) -> About:
        """Return the description of the current version, computed once per version."""
        with self._describing:
            gallery, about = self.current(), self._about
            if about is None or about.gallery is not gallery:
                self._about = about = _describe(gallery)
            return about

    def item(self, gallery: Gallery, item: int) -> dict[str, Any]:
        """Return the metadata of an image; raises HTTPException for an unknown id."""
        return self.records([item], _row(gallery, item, gallery.columns))[0]

    def records(self, ids: Sequence[int], columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
        """Return the metadata of images from their columns."""
        home = os.path.join((self._about or self.about()).home, "")
        others = [name for name in columns if name not in ("path", "label")]
        records = []
        for row, one in enumerate(ids):
            path = columns["path"][row]
            inside = path.removeprefix(home)  # else only the name is sent
            records.append(
                {
                    "id": int(one),
                    "label": to_json_value(columns["label"][row]),
                    "file": to_json_value(inside if inside != path else os.path.basename(path)),
                    "image": f"items/{int(one)}/image",
                    "details": {name: to_json_value(columns[name][row]) for name in others},
                }
            )
        return records

    def image(self, item: int, size: int, etag: str | None) -> tuple[str, EncodedImage | None]:
        """Return the ETag of an image and its thumbnail, None if the client has this ETag.

        The ETag depends on the file, not on the id: every gallery has an image 0.

        Raises:
            HTTPException: unknown id.
            ImageError: the file is missing, or not an image any more.
        """
        (path,) = _row(self.current(), item, ["path"])["path"]
        try:
            state = file_state(split_shard_path(path)[0])
        except OSError:
            state = ()
        current = f'"{hashlib.sha256(repr((path, state, size)).encode()).hexdigest()[:32]}"'
        if not state:
            return current, _encode(path, size)  # raises ImageError
        if current == etag:
            return current, None
        encode = _encode if size > _THUMBNAIL else _encode_cached
        return current, encode(path, size, state)


def _row(gallery: Gallery, item: int, columns: Sequence[str]) -> dict[str, list[Any]]:
    try:
        return gallery.rows([item], columns)
    except UsageError:
        raise HTTPException(404, f"no image has the id {item}") from None


def _build(path: Path) -> tuple[str, tuple[int, ...]]:
    """Return values that change only if a gallery is rebuilt, and its ids start again."""
    return read_manifest(path).embedder, file_state(path / EMBEDDER)


def _encode(path: str, size: int, state: tuple[int, ...] = ()) -> EncodedImage:
    """Decode and encode an image, so that only pixels are sent, whatever the file is."""
    image = thumbnail(path, size)
    buffer = io.BytesIO()
    kind = "PNG" if max(image.size) <= _LOSSLESS else "JPEG"
    image.save(buffer, kind, quality=85)  # which PNG ignores
    return buffer.getvalue(), f"image/{kind.lower()}"


_encode_cached = lru_cache(maxsize=_CACHED)(_encode)


def _describe(gallery: Gallery) -> About:
    draw = np.random.default_rng(0)
    sample = np.sort(draw.permutation(gallery.ids())[:_SAMPLED])
    paths = gallery.rows(sample, ["path"])["path"]
    classes = Counter(gallery.count_labels()).most_common()
    folders = [os.path.dirname(split_shard_path(path)[0]) for path in paths]
    return About(
        gallery,
        os.path.commonpath(folders) if folders else "",
        {to_json_value(name): count for name, count in classes},
        [int(one) for one in draw.permutation(sample)[:_SUGGESTED]],
    )


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
