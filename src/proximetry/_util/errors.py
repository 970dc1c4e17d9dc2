"""The error of invalid input, and helpers for its messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """Invalid input from the user, raised before anything is written."""


def suggest(name: str, valid_names: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the nearest valid name, else a list if it is short."""
    names = list(valid_names)
    match = get_close_matches(name.lower(), names, 1)
    if match:
        return f", did you mean {match[0]!r}?"
    return f". Valid names: {', '.join(names)}." if len(names) <= 40 else "."
