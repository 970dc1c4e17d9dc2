"""Versions of a gallery: list, restore and remove those that changes replaced."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first
from proximetry.search.manifest import (
    Manifest,
    read_manifest,
    read_versions,
    remove_stale_files,
    write_manifest,
)
from proximetry.search.snapshot import Snapshot


class Version(NamedTuple):
    """A version of a gallery: its number, when it was written, and its number of images."""

    number: int
    created: datetime
    images: int


def list_versions(folder: Path) -> list[Version]:
    """Return the kept versions, the current one last."""
    return [
        Version(one.number, datetime.fromtimestamp(one.created, UTC), one.images)
        for one in read_versions(folder)
    ]


def find_version(folder: Path, number: int | None) -> Manifest:
    """Return a replaced version to commit again, by default the last; requires the lock."""
    *kept, current = read_versions(folder)
    targets = [one for one in kept if number in (None, one.number)]
    if not targets:
        names = join_first([str(one.number) for one in kept]) or "none"
        name = "earlier version" if number is None else f"version {number}"
        raise UsageError(f"no {name} of {folder}. Replaced versions: {names}.")
    target = replace(targets[-1], next_id=current.next_id)  # ids are never reused
    Snapshot(folder, target)  # its files exist
    return target


def prune_versions(folder: Path, keep: float) -> None:
    """Remove versions that were replaced at least `keep` seconds ago; requires the lock."""
    manifest, now = read_manifest(folder), time.time()
    retired = {name: since for name, since in manifest.retired.items() if now - since < keep}
    manifest = replace(manifest, retired=retired)
    write_manifest(folder, manifest)
    remove_stale_files(folder, manifest, keep)
