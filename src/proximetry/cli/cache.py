"""The commands of `proximetry cache`: plain functions, as in commands.py."""

import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from proximetry._util.errors import UsageError, readable_size, some, spaced
from proximetry._util.files import cache_folder
from proximetry.cli.output import AsJson, tell

if TYPE_CHECKING:
    from proximetry.data.cache_records import CacheEntry

ABOUT = "See what the cache folder holds, and remove what is no longer needed."

_SECONDS = {"h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SHORT = 12  # characters of a name that are enough to know it by


def list_(*, as_json: AsJson = False) -> None:
    """List what is in the cache folder, for which images, how large, and when last used.

    The folder is $PROXIMETRY_CACHE, else proximetry below $XDG_CACHE_HOME or ~/.cache.
    """
    from proximetry.data.cache_records import list_caches, list_leftovers

    found, left = list_caches(), list_leftovers()
    document = {
        "folder": str(cache_folder()),
        "bytes": sum(entry.size for entry in [*found, *left]),
        "caches": [_plain(entry) for entry in found],
        "leftovers": [_plain(entry) for entry in left],
    }
    tell(as_json, document, _text(found, left))


def clean(
    *names: str,
    unused_for: str | None = None,
    keep: str | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> None:
    """Remove caches, and say what is removed and how much that frees.

    Those that a process uses or writes stay. What killed processes left half-written goes in any
    case. What is removed is made again when it is needed.

    Args:
        names: caches as `proximetry cache list` calls them, or the beginnings of their names.
        unused_for: those that were not used for so long: 12h, 30d, 8w.
        keep: those that were not used for the longest time, until the others take no more than
            this: 500MB, 20GB.
        dry_run: only show what would be removed.
    """
    from proximetry.data.cache_records import list_caches, list_leftovers, remove

    if not names and unused_for is None and keep is None:
        raise UsageError(
            "which caches? Name some of `proximetry cache list`, or give --unused-for 30d or "
            "--keep 20GB"
        )
    since = None if unused_for is None else _read(unused_for, _SECONDS, "--unused-for", "30d")
    limit = None if keep is None else _read(keep, _BYTES, "--keep", "20GB")
    found = list_caches()
    chosen = _named(found, names)
    if since is not None:
        chosen += [entry for entry in found if time.time() - entry.used > since]
    left = list_leftovers()
    removed: list[CacheEntry] = []
    busy: list[CacheEntry] = []
    for entry in dict.fromkeys([*left, *chosen]):
        (removed if remove(entry, dry_run=dry_run) else busy).append(entry)
    if limit is not None:
        rest = [entry for entry in found if entry not in removed]
        size = sum(entry.size for entry in rest)
        for entry in reversed(rest):  # those used last come first
            if size <= limit:
                break
            if entry in busy:
                continue
            if remove(entry, dry_run=dry_run):
                removed.append(entry)
                size -= entry.size
            else:
                busy.append(entry)
    freed = sum(entry.size for entry in removed)
    document = {
        "folder": str(cache_folder()),
        "dry_run": dry_run,
        "removed": [_plain(entry) for entry in removed],
        "in_use": [_plain(entry) for entry in busy],
        "bytes": freed,
    }
    verb, would = ("would remove", "would free") if dry_run else ("removed", "freed")
    lines = [f"{verb} {_line(entry)}" for entry in removed]
    lines += [f"{_short(entry)} is in use and stays" for entry in busy]
    lines.append(f"{would} {readable_size(freed)}" if removed else "nothing to remove")
    tell(as_json, document, "\n".join(lines))


def _read(text: str, units: dict[str, int], option: str, example: str) -> float:
    known = {unit.lower(): factor for unit, factor in units.items()}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if found is None or found[2] not in known:
        raise UsageError(
            f"{option} takes a number and one of {', '.join(units)}, as {example}; got {text!r}"
        )
    return float(found[1]) * known[found[2]]


def _named(found: Sequence["CacheEntry"], names: Sequence[str]) -> list["CacheEntry"]:
    """The caches that are meant, each by the beginning of its name, with or without its kind."""
    chosen = []
    for name in names:
        word = name.rstrip("/…")
        meant = [
            entry
            for entry in found
            if word and (entry.name.startswith(word) or entry.path.name.startswith(word))
        ]
        same = [entry for entry in meant if word in (entry.name, entry.path.name)]
        if len(same or meant) != 1:
            which = f"several: {some(map(_short, meant))}" if meant else "none"
            raise UsageError(f"{name} is meant to be one cache, but {which} begins so")
        chosen += same or meant
    return chosen


def _plain(entry: "CacheEntry") -> dict[str, Any]:
    used = datetime.fromtimestamp(entry.used).astimezone()
    return {
        "name": entry.name,
        "path": str(entry.path),
        "bytes": entry.size,
        "last_used": used.isoformat(timespec="seconds"),
        "data": list(entry.roots),
        "images": entry.images,
        "about": entry.about,
    }


def _short(entry: "CacheEntry") -> str:
    kind, _, own = entry.name.rpartition("/")
    return f"{kind}/{own[:_SHORT]}" if own == entry.path.name else entry.name


def _line(entry: "CacheEntry") -> str:
    used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
    images = "" if entry.images is None else f"{spaced(entry.images)} images"
    roots = [_place(root) for root in entry.roots]
    data = ", ".join(filter(None, [*roots[:1], f"and {len(roots) - 1} more" * (len(roots) > 1)]))
    about = "; ".join(filter(None, [data, images, entry.about]))
    return f"{_short(entry):30}{readable_size(entry.size):>10}  {used}  {about}".rstrip()


def _place(root: str) -> str:
    home = f"{Path.home()}/"
    return f"~/{root.removeprefix(home)}" if root.startswith(home) else root


def _text(found: Sequence["CacheEntry"], left: Sequence["CacheEntry"]) -> str:
    size = readable_size(sum(entry.size for entry in [*found, *left]))
    if not found and not left:
        return f"{cache_folder()} holds nothing"
    lines = [f"{cache_folder()}: {len(found)} caches, {size} in all"]
    lines.append(f"{'name':30}{'size':>10}  {'last used':16}  made of")
    lines += map(_line, found)
    if left:
        lines.append(
            f"{readable_size(sum(entry.size for entry in left))} were left by processes that were "
            "killed; `proximetry cache clean` removes them with whatever else it is told to"
        )
    return "\n".join(lines)


COMMANDS: dict[str, Callable[..., None]] = {"list": list_, "clean": clean}
