"""Where files that can be made again are kept, and how they are written whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def cache_folder() -> Path:
    """Return $PROXIMETRY_CACHE, else proximetry below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PROXIMETRY_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "proximetry"


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Give a temporary name to write to; the file appears complete at the end, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{uuid4().hex}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
