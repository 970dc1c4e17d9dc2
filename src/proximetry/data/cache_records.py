"""What the cache folder holds, for which data, and when it was last used.

Below the cache folder there is a folder for each kind of cache, and in it a file or folder for each
cache. Beside stores of images stands who uses them, since a store itself follows from its images:

    <key>.used      where the images lie, how many there are, what was made of them, and when
    <key>.reading   locked by every process that reads the store, for as long as it does
    <key>.lock      locked by the process that writes it
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from proximetry._util.files import (
    PART_SUFFIX,
    atomic_write,
    cache_folder,
    read_json,
    written_for,
)

_USED, _READING, _WRITING = ".used", ".reading", ".lock"
_LARGEST_RECORD = 1 << 20
_MOST_ROOTS = 10
# Digests of image files, and which of them cannot be read; each a cache of its own.
_KEPT_APART = ("contents", "checked")
# What the caches of a folder are, where nobody writes down what each is made of.
_ABOUT = {
    "contents": "checksums of image files",
    "checked": "which images cannot be read",
    "glyphs": "the built-in dataset of characters",
    "maps": "the map of a gallery",
    "milvus": "embedded images on their way to Milvus",
}
_STALE = 3600.0  # seconds after which nobody writes to a file any more
_PART = re.compile(rf"\.(.+)\.[0-9a-f]{{32}}{re.escape(PART_SUFFIX)}")


@dataclass(frozen=True)
class CacheEntry:
    """One cache.

    Attributes:
        name: its kind and its own name, as a path below the cache folder.
        path: where it lies.
        size: bytes.
        used: when it was last used, in seconds since 1970.
        roots: where the images lie that it was made of, the last ones first, if known.
        images: how many they are, if known.
        about: what was made of them, or what it is.
    """

    name: str
    path: Path
    size: int
    used: float
    roots: tuple[str, ...] = ()
    images: int | None = None
    about: str = ""


class InUse:
    """Keeps `remove` away from a store for as long as it exists, or the process."""

    def __init__(self, store: Path) -> None:
        self._store = store
        with suppress(OSError, ImportError):  # no locks: what is mapped stays readable on Linux
            import fcntl

            handle = os.open(_beside(store, _READING), os.O_RDWR | os.O_CREAT, 0o666)
            weakref.finalize(self, os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __reduce__(self) -> tuple[Any, ...]:
        return InUse, (self._store,)  # another process holds it too


def note_use(store: Path, root: Path, images: int, about: str) -> InUse:
    """Write down that a store is used for these images; holds it until what is returned is gone."""
    here = os.path.abspath(root)
    roots = [here, *(one for one in _record(store).get("roots", []) if one != here)]
    record = {"roots": roots[:_MOST_ROOTS], "images": images, "about": about, "used": time.time()}
    with suppress(OSError):  # a cache that can only be read is of use too
        atomic_write(_beside(store, _USED), json.dumps(record).encode(), durable=False)
    return InUse(store)


def _beside(store: Path, suffix: str) -> Path:
    return store.with_name(f"{store.name}{suffix}")


def _record(store: Path) -> dict[str, Any]:
    """What was written down, as far as it is what `note_use` writes."""
    try:
        found = read_json(_beside(store, _USED), _LARGEST_RECORD)
    except ValueError:
        return {}
    kinds = {"roots": list, "images": int, "about": str, "used": float}
    fits = isinstance(found, dict) and all(isinstance(found.get(k), t) for k, t in kinds.items())
    return found if fits and all(isinstance(one, str) for one in found["roots"]) else {}


def list_caches() -> list[CacheEntry]:
    """Return the caches of this user, those that were used last first."""
    found = [_entry(path) for path in _caches()]
    return sorted(found, key=lambda entry: (-entry.used, entry.name))


def _caches() -> Iterator[Path]:
    for kind in _folders(cache_folder()):
        for path in _visible(kind):
            if path.name in _KEPT_APART and path.is_dir():
                yield from _visible(path)
            elif path.suffix not in (_USED, _READING, _WRITING):
                yield path


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir() and not path.is_symlink()]


def _visible(folder: Path) -> list[Path]:
    return [path for path in _inside(folder) if not path.name.startswith(".")]


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # nothing yet, or removed meanwhile
        return []


def _entry(path: Path) -> CacheEntry:
    record, states = _record(path) if path.is_dir() else {}, [*_states(path)]
    size = sum(state.st_size for state in states)
    # Who reads a file does not always leave its time there: file systems save that.
    touched = max((max(state.st_mtime, state.st_atime) for state in states), default=0.0)
    if path.is_dir():
        touched = max((state.st_mtime for state in states), default=0.0)
    return CacheEntry(
        path.relative_to(cache_folder()).as_posix(),
        path,
        size,
        record.get("used", touched),
        tuple(record.get("roots", ())),
        record.get("images"),
        record.get("about", _ABOUT.get(path.parent.name, "")),
    )


def _states(path: Path) -> Iterator[os.stat_result]:
    files = (Path(home) / name for home, _, names in os.walk(path) for name in names)
    for file in files if path.is_dir() else [path]:
        with suppress(OSError):  # removed meanwhile
            yield file.lstat()


def list_leftovers() -> list[CacheEntry]:
    """Return what killed processes have left half-written, and nobody is at work on."""
    found = []
    for kind in _folders(cache_folder()):
        apart = [path for name in _KEPT_APART for path in _inside(kind / name)]
        for path in [*_inside(kind), *apart]:
            part = _PART.fullmatch(path.name)
            if part and not written_for(path) and path.is_dir():
                with ExitStack() as held:
                    if _take(kind / f"{part[1]}{_WRITING}", held):
                        found.append(_entry(path))
            elif written_for(path):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _STALE:
                        found.append(_entry(path))
    return found


def _take(file: Path, held: ExitStack) -> bool:
    """Take the lock of who writes a cache; False while another process has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError):
        return False
    held.callback(lock.release)
    return True


def remove(entry: CacheEntry, *, dry_run: bool = False) -> bool:
    """Remove a cache or a leftover; False if it is in use or being written.

    With ``dry_run`` nothing is removed, and only the answer is given.
    """
    path, part = entry.path, _PART.fullmatch(entry.path.name)
    with ExitStack() as held:
        if not path.is_dir():
            if not dry_run:
                path.unlink(missing_ok=True)
            return True
        store = path.with_name(part[1]) if part else path
        if not _take(_beside(store, _WRITING), held):
            return False
        if not part and not _nobody_reads(store, held):
            return False
        if dry_run:
            return True
        if not part:
            # What bears the name is either a whole cache or not there.
            renamed = path.with_name(f".{path.name}.{uuid4().hex}{PART_SUFFIX}")
            path.rename(renamed)
            path = renamed
            for suffix in (_USED, _READING):
                _beside(store, suffix).unlink(missing_ok=True)
        shutil.rmtree(path)
        return True


def _nobody_reads(store: Path, held: ExitStack) -> bool:
    """Whether no process holds the store, and none will until this one is done."""
    # The latter is of images on their way to Milvus.
    for file in (_beside(store, _READING), store / "gallery.lock"):
        try:
            import fcntl

            handle = os.open(file, os.O_RDWR)
            held.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except BlockingIOError:
            return False
        except (OSError, ImportError):  # a file system, or a system, without such locks
            continue
    return True
