"""A gallery as the page sees it: the newest version, without names of folders."""

import hashlib
import io
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from proximetry._util.errors import UsageError
from proximetry.data.images import thumbnail
from proximetry.data.shards import file_state, split_shard_path
from proximetry.search import Gallery
from proximetry.search.manifest import EMBEDDER, MANIFEST, read_manifest

log = logging.getLogger("proximetry.web")

SIZES = (16, 2048)
"""Minimum and maximum longer side of a thumbnail in pixels."""
# Seconds between two looks whether another process has changed the gallery.
_LOOK_EVERY = 1.0
# Images by whose paths the folder is found that all of them lie in.
_LOOKED_AT = 1000
_SUGGESTED = 12
# Thumbnails up to these sizes are cached, and lossless: JPEG blurs very small images.
_THUMBNAIL, _LOSSLESS = 320, 96
_KEPT = 2048


class Picture(NamedTuple):
    """An image as it is sent."""

    content: bytes
    media_type: str


class About(NamedTuple):
    """What is known of one version of a gallery.

    Attributes:
        gallery: the gallery, which may have a newer version by now.
        version: which one.
        home: the common folder of its images, which is never sent.
        classes: by name, how many images there are; most frequent first.
        suggested: ids to begin with.
    """

    gallery: Gallery
    version: str
    home: str
    classes: dict[str, int]
    suggested: list[int]


class View:
    """A gallery that follows what other processes do to it; for several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._state = file_state(path / MANIFEST) if (path / MANIFEST).is_file() else ()
        self._gallery = Gallery.open(path)
        self._build = _build(path)
        self._looked = time.monotonic()
        self._describing = Lock()
        self._about: About | None = None

    @property
    def opened(self) -> Gallery:
        """The gallery as last read, without access to the disk."""
        return self._gallery

    def current(self) -> Gallery:
        """Return the gallery at its newest version; another object if it was built anew.

        It may read files, so it is not for the event loop.
        """
        with self._lock:
            if time.monotonic() - self._looked >= _LOOK_EVERY:
                self._follow()
                self._looked = time.monotonic()
            return self._gallery

    def _follow(self) -> None:
        try:
            state = file_state(self.path / MANIFEST)
            if state == self._state:
                return
            build = _build(self.path)
            if build == self._build:
                self._gallery.refresh()
            else:
                self._gallery, self._build = Gallery.open(self.path), build
            self._state = state
        except (OSError, ValueError) as error:
            if self._state:  # logged once, until it can be read again
                log.warning("the gallery is served as it was, since it cannot be read: %s", error)
            self._state = ()

    def about(self) -> About:
        """Return what is known of the newest version; counted once per version."""
        with self._describing:
            gallery, found = self.current(), self._about
            if found is None or found.gallery is not gallery or found.version != gallery.version:
                self._about = found = _describe(gallery)
            return found

    def items(self, gallery: Gallery, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the metadata of images; raise UsageError for an unknown id."""
        return self.records(gallery, ids, gallery.rows(ids))

    def records(
        self, gallery: Gallery, ids: Sequence[int], columns: dict[str, list[Any]]
    ) -> list[dict[str, Any]]:
        """Return the metadata of images from their columns."""
        home = (self._about or self.about()).home
        others = [name for name in columns if name not in ("path", "label")]
        return [
            {
                "id": int(one),
                "label": plain(columns["label"][row]),
                "file": _below(home, columns["path"][row]),
                "image": f"items/{int(one)}/image",
                "details": {name: plain(columns[name][row]) for name in others},
            }
            for row, one in enumerate(ids)
        ]

    def picture(self, item: int, size: int, known: str | None) -> tuple[str, Picture | None]:
        """Return the ETag of an image and its thumbnail, None if the client knows the ETag.

        The ETag depends on the file, not on the id: every gallery has an image 0.

        Raises:
            UsageError: there is no such image.
            ImageError: its file is gone, or is no image any more.
        """
        (path,) = self.current().rows([item], ["path"])["path"]
        try:
            state = file_state(split_shard_path(path)[0])
        except OSError:
            state = ()
        mark = f'"{hashlib.sha256(repr((path, state, size)).encode()).hexdigest()[:32]}"'
        if not state:
            return mark, _picture(path, size)  # raises ImageError
        if mark == known:
            return mark, None
        return mark, (_picture(path, size) if size > _THUMBNAIL else _thumbnail(path, state, size))


def _build(path: Path) -> tuple[str, tuple[int, ...]]:
    """What changes when a gallery is built anew, and its ids begin again, but at no other time."""
    return read_manifest(path).embedder, file_state(path / EMBEDDER)


@lru_cache(maxsize=_KEPT)
def _thumbnail(path: str, state: tuple[int, ...], size: int) -> Picture:
    return _picture(path, size)


def _picture(path: str, size: int) -> Picture:
    """Decode and encode an image, so that only pixels are sent, whatever the file is."""
    image = thumbnail(path, size)
    buffer = io.BytesIO()
    if max(image.size) <= _LOSSLESS:
        image.save(buffer, "PNG")
        return Picture(buffer.getvalue(), "image/png")
    image.save(buffer, "JPEG", quality=85)
    return Picture(buffer.getvalue(), "image/jpeg")


def _describe(gallery: Gallery) -> About:
    version, ids = gallery.version, gallery.ids()
    draw = np.random.default_rng(0)
    some = np.sort(draw.permutation(ids)[:_LOOKED_AT])
    try:
        labels = Counter(gallery.rows(ids, ["label"])["label"])
        paths = gallery.rows(some, ["path"])["path"]
    except UsageError:  # some were removed a moment ago
        return _describe(gallery)
    labels.pop(None, None)
    folders = [os.path.dirname(split_shard_path(path)[0]) for path in paths]
    return About(
        gallery,
        version,
        os.path.commonpath(folders) if folders else "",
        {str(name): count for name, count in labels.most_common()},
        [int(one) for one in draw.permutation(some)[:_SUGGESTED]],
    )


def _below(home: str, path: str) -> str:
    """The path from the folder of all images; the name alone for one that lies elsewhere."""
    inside = path.removeprefix(os.path.join(home, ""))
    return inside if inside != path else os.path.basename(path)


def plain(value: Any) -> Any:
    """Convert a value to JSON; NaN and infinity become None."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
