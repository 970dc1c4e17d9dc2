"""A mistyped name gets the nearest known one suggested."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the nearest known name, else a full stop."""
    match = get_close_matches(name.lower(), list(known), 1)
    return f", did you mean {match[0]!r}?" if match else "."
