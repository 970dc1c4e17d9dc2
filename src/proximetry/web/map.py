"""The map of a gallery: computed in a child process with low priority, and cached.

The process ends with the server, even if the server is killed.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proximetry._util.files import atomic_path, cache_folder, writing
from proximetry.metrics import map_embeddings
from proximetry.metrics._search.inputs import IntArray
from proximetry.search.snapshot import Snapshot

log = logging.getLogger("proximetry.web")

MOST = 20_000
"""Images on a map; of more a sample is drawn."""
_KEPT = 50  # maps in the cache
_RETRY = 60.0  # seconds after which a map that could not be made is tried again
# With the same sys.path it finds the same packages.
_MAKE = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from proximetry.web.map import make
make(*sys.argv[2:])"""


class GalleryMap(NamedTuple):
    """A map: ids of images, and their points within the unit square."""

    version: str
    ids: IntArray
    points: npt.NDArray[np.float32]


class MapError(RuntimeError):
    """There is no map, and none is being made."""


class MapMaker:
    """Makes the map of a gallery's newest version; for several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._failed: dict[str, float] = {}
        self._gallery: object = None
        self._map: GalleryMap | None = None
        self._version = ""
        self.begun = 0.0

    def want(self, gallery: object, version: str) -> GalleryMap | None:
        """Return the map of a version; until there is one that of an earlier version, or None.

        Args:
            gallery: what `View` has opened, another object if it was built anew.
            version: its newest one.

        Raises:
            MapError: it could not be made a moment ago.
        """
        with self._lock:
            self._look()
            if gallery is not self._gallery:  # the same ids may be other images now
                self._gallery, self._map = gallery, None
            if self._map is None or self._map.version != version:
                self._map = _read(version) or self._map
            made = self._map is not None and self._map.version == version
            if not made and self._process is None:
                failed = self._failed.get(version)
                if failed is not None and time.monotonic() - failed < _RETRY:
                    raise MapError("the map could not be made; the server's log says why")
                self._start(version)
            return self._map

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._discard()

    def _start(self, version: str) -> None:
        settings = [json.dumps([*map(str, sys.path)]), str(self._path.absolute())]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._version, self.begun = version, time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAKE, *settings],
            stdin=subprocess.PIPE,  # whose end it notices
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            process_group=0,  # Ctrl-C is for the server
        )

    def _look(self) -> None:
        """See whether the process has ended, and how."""
        if self._process is None or self._errors is None or self._process.poll() is None:
            return
        if self._process.returncode:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            messages = [line for line in lines if line.strip()]
            # Not for clients: it may name files of this machine.
            why = messages[-1] if messages else "its process was killed"
            log.warning("the map could not be made: %s", why)
            self._failed[self._version] = time.monotonic()
        self._discard()

    def _discard(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._errors is not None
        self._errors.close()
        self._process.stdin.close()
        self._process = self._errors = None


def make(path: str) -> None:
    """Compute the map of a gallery and keep it; what the process runs.

    It opens what it needs of the gallery and no more: the network would take seconds to import.
    """
    with suppress(OSError, AttributeError):
        os.nice(10)
    Thread(target=_end_with_the_server, daemon=True).start()
    snapshot = Snapshot.open(Path(path))
    file = _file(snapshot.manifest.version)
    with writing(file):  # before the work
        file.parent.mkdir(parents=True, exist_ok=True)
    parts = zip(snapshot.segments, snapshot.alive, strict=True)
    ids = np.concatenate(
        [np.empty(0, np.int64), *(s.ids if mask is None else s.ids[mask] for s, mask in parts)]
    )
    if len(ids) > MOST:
        ids = np.sort(np.random.default_rng(0).choice(ids, MOST, replace=False))
    points = np.empty((0, 2), np.float32)
    if len(ids):
        vectors = snapshot.store.take(snapshot.places(ids))
        points = map_embeddings(vectors, similarity=snapshot.manifest.similarity)
    with atomic_path(file, durable=False) as part, part.open("wb") as stream:
        np.savez(stream, ids=ids, points=points)
    _tidy(file.parent)


def _end_with_the_server() -> None:
    os.read(0, 1)  # not by sys.stdin, whose lock would abort Python as it ends
    os._exit(1)


def _file(version: str) -> Path:
    return cache_folder() / "maps" / f"{version[:32]}.npz"


def _read(version: str) -> GalleryMap | None:
    """Return the map that is kept for a version; None if there is none, or it is damaged."""
    try:
        with np.load(_file(version), allow_pickle=False) as kept:
            ids, points = kept["ids"], kept["points"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    fits = ids.dtype == np.int64 and points.dtype == np.float32 and points.shape == (len(ids), 2)
    return GalleryMap(version, ids, points) if fits and np.isfinite(points).all() else None


def _tidy(folder: Path) -> None:
    """Remove the oldest maps."""

    def age(file: Path) -> float:
        with suppress(OSError):
            return file.stat().st_mtime
        return 0.0

    files: list[Any] = sorted(folder.glob("*.npz"), key=age)
    for file in files[:-_KEPT]:
        with suppress(OSError):
            file.unlink()
