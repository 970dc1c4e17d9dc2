"""Which images a run was begun with, and what has become of them since."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from proximetry._util.errors import some, spaced
from proximetry.data import Catalog
from proximetry.training.run_folder import RunError


def fingerprint(catalog: Catalog, contents: str | None, sizes: str | None = None) -> dict[str, Any]:
    """Describe the images of a catalogue in plain values, to be compared with `what_changed`.

    Args:
        catalog: the images.
        contents: the digest of what the image files contain, where it is known.
        sizes: the digest of the bytes they take.
    """
    roles = (catalog.labels, catalog.splits, catalog.queries, catalog.galleries)
    return {
        "classes": dict(sorted(Counter(catalog.labels).items())),
        "splits": dict(sorted(Counter(catalog.splits).items())),
        "rows": _digest(repr(row) for row in zip(*filter(None, roles), strict=True)),
        "paths": _digest(map(repr, catalog.paths)),
        "contents": contents,
        "sizes": sizes,
    }


def _digest(lines: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for line in lines:
        whole.update(line.encode("utf-8", "surrogateescape") + b"\0")
    return whole.hexdigest()


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in which way images are not those of before, "" where they are the same ones.

    Files that lie elsewhere now, or are called otherwise, are the same if they contain the same.
    """
    known = _comparable(before["contents"], now["contents"])
    same_files = "contents" if known else "paths"
    if all(before[part] == now[part] for part in ("rows", same_files)):
        return ""
    old, new = before["classes"], now["classes"]
    gone, added = ([name for name in a if name not in b] for a, b in ((old, new), (new, old)))
    sizes = [
        f"{name} has {new[name]} images instead of {old[name]}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    splits = [
        f"split {name} has {now['splits'].get(name, 0)} images instead of {count}"
        for name, count in before["splits"].items()
        if now["splits"].get(name, 0) != count
    ]
    told = [
        f"{_classes(gone)} gone ({some(gone)})" if gone else "",
        f"{_classes(added)} new ({some(added)})" if added else "",
        some(sizes, 3),
        "" if gone or added or sizes else some(splits, 3),
    ]
    if not any(told):
        rows = before["rows"] != now["rows"]
        told = ["images are in other classes or splits" if rows else "image files are other ones"]
    total, was = (spaced(sum(classes.values())) for classes in (new, old))
    if total != was:
        told.append(f"{total} images in all instead of {was}")
    return ", ".join(filter(None, told))


def _comparable(before: str | None, now: str | None) -> bool:
    """Whether both digests are known and of the same kind."""
    return before is not None and now is not None and len(before) == len(now)


def refuse_others(place: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse images that are not those the run in a folder was begun with."""
    changes = what_changed(before, now)
    if changes:
        raise RunError(
            f"the run in {place} was begun with other images: {changes}; put them back as they "
            "were, choose another folder, or start over with --fresh"
        )


def may_have_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say that files may be other ones under the same names, where their contents are not known.

    That is no reason to stop: a run that met a broken image goes on when it has been mended.
    """
    old, new = before.get("sizes"), now.get("sizes")
    known = _comparable(before["contents"], now["contents"])
    if known or None in (old, new) or old == new:
        return ""
    return "some image files have another size than when the run was begun"


def _classes(names: list[str]) -> str:
    return "1 class is" if len(names) == 1 else f"{spaced(len(names))} classes are"
