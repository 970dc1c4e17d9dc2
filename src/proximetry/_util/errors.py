"""Errors of invalid input, and what their messages suggest."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any


class UsageError(ValueError):
    """Invalid input from the user, found before anything was written."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the nearest known name, else a short list of them."""
    names = list(known)
    match = get_close_matches(name.lower(), names, 1)
    if match:
        return f", did you mean {match[0]!r}?"
    return f"; known are: {', '.join(names)}." if len(names) <= 24 else "."


def is_integer(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer of any type, at least `least`, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
