"""Where files that can be made again are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $PROXIMETRY_CACHE, else proximetry below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PROXIMETRY_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "proximetry"
