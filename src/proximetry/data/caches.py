"""The folder of all caches of this user: list and remove them."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from proximetry._util.files import PART_SUFFIX, acquire_lock, cache_folder, size_and_mtime

_ABOUT = {
    "glyphs": "the built-in dataset of characters",
    "maps": "the map of a gallery",
    "milvus": "embeddings waiting for upload to Milvus",
}


@dataclass(frozen=True)
class CacheEntry:
    """One cache, of any kind, in the cache folder."""

    name: str  # kind and name, as a path below the cache folder
    path: Path
    size: int  # bytes
    used: float  # time of last use, in seconds since 1970
    root: str  # folder of the source images, "" if unknown
    images: int | None
    about: str


def list_caches() -> list[CacheEntry]:
    """Return the caches of this user, the most recently used first."""
    entries = [
        _entry(path)
        for path in cache_folder().glob("*/*")
        if not path.name.startswith(".") and path.suffix != ".lock" and not path.parent.is_symlink()
    ]
    return sorted(entries, key=lambda entry: (-entry.used, entry.name))


def list_leftovers() -> list[CacheEntry]:
    """Return incomplete caches of killed processes: an hour without a write."""
    return [
        entry
        for path in cache_folder().glob(f"*/.*{PART_SUFFIX}")
        if not path.parent.is_symlink() and time.time() - (entry := _entry(path)).used > 3600
    ]


def _entry(path: Path) -> CacheEntry:
    header: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        header = json.loads((path / "header.json").read_text(encoding="utf-8"))
    return CacheEntry(
        f"{path.parent.name}/{path.name}",
        path,
        *size_and_mtime(path),
        header.get("root", ""),
        header.get("images"),
        header.get("about", _ABOUT.get(path.parent.name, "")),
    )


def remove_cache(path: Path, *, dry_run: bool = False) -> bool:
    """Remove a cache or a leftover; return False if a process is writing it.

    Processes that have opened a pixel cache keep their memory map.
    """
    name = path.name.split(".")[1] if path.name.startswith(".") else path.name
    locks = [path.with_name(f"{name}.lock")] if path.is_dir() else []
    locks += [path / "gallery.lock"] if (path / "gallery.lock").exists() else []
    try:
        with ExitStack() as stack:
            for lock in locks:
                stack.callback(acquire_lock(lock, 0, lambda _: None).release)
            if not dry_run and path.is_dir():
                # A folder with the name of a cache is always complete.
                shutil.rmtree(path.rename(path.with_name(f".{name}.{uuid4().hex}{PART_SUFFIX}")))
            elif not dry_run:
                path.unlink(missing_ok=True)
    except TimeoutError:
        return False
    return True
