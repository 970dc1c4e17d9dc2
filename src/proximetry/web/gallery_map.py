"""`GalleryMap`: images as points, computed in a child process with low priority, and cached."""

import logging
import math
import multiprocessing
import os
import signal
import time
import zipfile
import zlib
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proximetry._util.files import atomic_path, cache_folder, name_write_errors

if TYPE_CHECKING:  # the child process imports only what t-SNE needs
    from proximetry.search import Gallery

log = logging.getLogger("proximetry.web")

MAX_POINTS = 20_000  # images on a map; a larger gallery is sampled
_MAX_CACHED = 50  # maps
_RETRY_SECONDS = 60.0  # until a failed map is computed again


class GalleryMap(NamedTuple):
    """A map: ids of images, and their points in the unit square."""

    version: str
    ids: npt.NDArray[np.int64]
    points: npt.NDArray[np.float32]


class MapError(RuntimeError):
    """There is no map, and none is being computed."""


class MapMaker:
    """Computes the map of a gallery's current version; thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: BaseProcess | None = None
        self._failed: dict[str, float] = {}
        self._embedder: Any = None
        self._map: GalleryMap | None = None
        self._version = ""
        self.started = 0.0

    def get(self, gallery: "Gallery") -> GalleryMap | None:
        """Return the map of a gallery; until it is ready, the map of an earlier version or None.

        Raises:
            MapError: if computing it failed less than a minute ago.
        """
        version = gallery.version
        with self._lock:
            if self._process is not None and not self._process.is_alive():
                if self._process.exitcode:  # the process has printed a traceback
                    log.warning("computing the map failed, exit code %s", self._process.exitcode)
                    self._failed[self._version] = time.monotonic()
                self._process = None
            if gallery.embedder is not self._embedder:  # rebuilt: ids belong to other images
                self._embedder, self._map = gallery.embedder, None
            if self._map is None or self._map.version != version:
                self._map = read_map(version) or self._map
            ready = self._map is not None and self._map.version == version
            if not ready and self._process is None:
                if time.monotonic() - self._failed.get(version, -math.inf) < _RETRY_SECONDS:
                    raise MapError("computing the map failed; see the server's log")
                self._start(gallery)
            return self._map

    def close(self) -> None:
        """Stop the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.join()
                self._process = None

    def _start(self, gallery: "Gallery") -> None:
        self._version, self.started = gallery.version, time.monotonic()
        job = (gallery.version, *sample(gallery), gallery.similarity)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=_run, args=job, daemon=True)
        self._process.start()


def sample(gallery: "Gallery") -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return ids and vectors of the images on a map."""
    ids = gallery.sample_ids(MAX_POINTS)
    return ids, gallery.vectors(ids)


def _run(*job: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    with suppress(OSError, AttributeError):
        os.nice(10)
    compute(*job)


def compute(version: str, ids: Any, vectors: Any, similarity: Any) -> None:
    """Compute a map and cache it."""
    file = _file(version)
    with name_write_errors(file):  # before the work
        file.parent.mkdir(parents=True, exist_ok=True)
    points = np.empty((0, 2), np.float32)
    if len(ids):
        from proximetry.metrics import map_embeddings

        points = map_embeddings(vectors, similarity=similarity)
    with atomic_path(file, durable=False) as part, part.open("wb") as stream:
        np.savez(stream, ids=ids, points=points)
    with suppress(OSError):  # another process may remove maps as well
        by_age = sorted(file.parent.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-_MAX_CACHED]:
            old.unlink()


def _file(version: str) -> Path:
    return cache_folder() / "maps" / f"{version[:32]}.npz"


def read_map(version: str) -> GalleryMap | None:
    """Return the cached map of a version; None if it is missing or damaged."""
    try:
        with np.load(_file(version), allow_pickle=False) as cached:
            ids, points = cached["ids"], cached["points"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    valid = ids.dtype == np.int64 and points.dtype == np.float32 and points.shape == (len(ids), 2)
    return GalleryMap(version, ids, points) if valid and np.isfinite(points).all() else None
