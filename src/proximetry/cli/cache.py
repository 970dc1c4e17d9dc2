"""The commands of `proximetry cache`."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import UsageError
from proximetry._util.files import cache_folder
from proximetry._util.formatting import pluralize, readable_size
from proximetry.cli.options import AsJson, Flag
from proximetry.cli.output import print_result

if TYPE_CHECKING:
    from proximetry.data.caches import CacheEntry

ABOUT = "List, verify and remove cached images."

_SECONDS = {"h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def list_(*, as_json: AsJson = False) -> None:
    """List the caches with their images, sizes and times of last use.

    The folder is $PROXIMETRY_CACHE, or else proximetry/ in $XDG_CACHE_HOME or ~/.cache.
    """
    from proximetry.data.caches import list_caches, list_leftovers

    caches, leftovers = list_caches(), list_leftovers()
    total = _size([*caches, *leftovers])
    lines = [f"{cache_folder()}: {pluralize(len(caches), 'cache')}, {readable_size(total)}"]
    if caches:
        lines += [f"{'name':30}{'size':>10}  {'last used':16}  images", *map(_describe, caches)]
    if leftovers:
        size = readable_size(_size(leftovers))
        lines.append(
            f"{size} of interrupted caches; `proximetry cache clean --unused-for 1d` removes them"
        )
    document = {
        "folder": str(cache_folder()),
        "bytes": total,
        "caches": _to_json(caches),
        "leftovers": _to_json(leftovers),
    }
    print_result(as_json, document, "\n".join(lines))


def clean(
    *names: str,
    unused_for: str | None = None,
    dry_run: Flag = False,
    keep: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Remove selected caches and all interrupted ones; they are rebuilt when needed.

    Args:
        names: names that `proximetry cache list` prints, or unique prefixes of them.
        unused_for: remove caches unused for at least this long: 12h, 30d, 8w.
        keep: remove the least recently used until the total is at most this size: 500MB, 20GB.
        dry_run: only print what would be removed.
    """
    from proximetry.data.caches import list_caches, list_leftovers, remove_cache

    if not names and unused_for is None and keep is None:
        raise UsageError(
            "no caches selected. Pass names that `proximetry cache list` prints, --unused-for 30d "
            "or --keep 20GB."
        )
    caches = list_caches()
    selected = [*list_leftovers(), *_find_caches(caches, names)]
    if unused_for is not None:
        oldest = time.time() - _parse(unused_for, _SECONDS, "--unused-for", "30d")
        selected += [entry for entry in caches if entry.used < oldest and entry not in selected]
    if keep is not None:
        limit = _parse(keep, _BYTES, "--keep", "20GB")
        remaining = [entry for entry in caches if entry not in selected]
        while _size(remaining) > limit:
            selected.append(remaining.pop())  # the least recently used
    removed = [entry for entry in selected if remove_cache(entry.path, dry_run=dry_run)]
    busy = [entry for entry in selected if entry not in removed]
    document = {
        "folder": str(cache_folder()),
        "dry_run": dry_run,
        "removed": _to_json(removed),
        "in_use": _to_json(busy),
        "bytes": _size(removed),
    }
    verb, would = ("would remove", "would free") if dry_run else ("removed", "freed")
    lines = [f"{verb} {_describe(entry)}" for entry in removed]
    lines += [f"{_short_name(entry)} is in use and was not removed" for entry in busy]
    lines.append(f"{would} {readable_size(_size(removed))}" if removed else "nothing to remove")
    print_result(as_json, document, "\n".join(lines))


def verify(*names: str, as_json: AsJson = False) -> None:
    """Verify the checksums of pixel caches and remove damaged ones.

    Args:
        names: names that `proximetry cache list` prints, or unique prefixes; default: all.
    """
    from proximetry.data.caches import list_caches, remove_cache
    from proximetry.data.pixel_cache import is_intact

    caches = list_caches()
    entries = [entry for entry in _find_caches(caches, names) or caches if entry.images is not None]
    damaged = [entry for entry in entries if not is_intact(entry.path)]
    for entry in damaged:
        remove_cache(entry.path)
    lines = [f"removed damaged {_describe(entry)}" for entry in damaged]
    lines.append(f"{pluralize(len(entries), 'cache')}, {len(damaged)} damaged")
    document = {"verified": _to_json(entries), "damaged": _to_json(damaged)}
    print_result(as_json, document, "\n".join(lines))


def _parse(text: str, units: dict[str, int], option: str, example: str) -> float:
    factors = {unit.lower(): factor for unit, factor in units.items()}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in factors:
        raise UsageError(
            f"{option} must be a number with a unit ({', '.join(units)}), got {text!r}. Write "
            f"{option} {example}."
        )
    return float(match[1]) * factors[match[2]]


def _find_caches(caches: Sequence["CacheEntry"], names: Sequence[str]) -> list["CacheEntry"]:
    """Return the caches with these name prefixes, with or without the kind."""
    selected = []
    for name in names:
        prefix = name.rstrip("/…")
        matches = [
            entry
            for entry in caches
            if entry.name.startswith(prefix) or entry.path.name.startswith(prefix)
        ]
        if len(matches) != 1:
            raise UsageError(
                f"{name} matches {len(matches)} caches. Pass a name that `proximetry cache list` "
                "prints."
            )
        selected += matches
    return list(dict.fromkeys(selected))


def _size(entries: Iterable["CacheEntry"]) -> int:
    return sum(entry.size for entry in entries)


def _to_json(entries: Iterable["CacheEntry"]) -> list[dict[str, Any]]:
    return [
        {
            "name": entry.name,
            "path": str(entry.path),
            "bytes": entry.size,
            "last_used": datetime.fromtimestamp(entry.used).astimezone().isoformat("T", "seconds"),
            "data": [entry.root] if entry.root else [],
            "images": entry.images,
            "about": entry.about,
        }
        for entry in entries
    ]


def _short_name(entry: "CacheEntry") -> str:
    kind, _, name = entry.name.rpartition("/")
    return f"{kind}/{name[:12]}"


def _describe(entry: "CacheEntry") -> str:
    used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
    images = "" if entry.images is None else pluralize(entry.images, "image")
    root = re.sub(rf"^{re.escape(str(Path.home()))}/", "~/", entry.root)
    about = "; ".join(filter(None, [root, images, entry.about]))
    return f"{_short_name(entry):30}{readable_size(entry.size):>10}  {used}  {about}".rstrip()


COMMANDS: dict[str, Callable[..., None]] = {"list": list_, "clean": clean, "verify": verify}
