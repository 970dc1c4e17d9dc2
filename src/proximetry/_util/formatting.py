"""Format numbers, values and lists for messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence


def join_first(items: Iterable[str], limit: int = 5) -> str:
    """Join the first few items for a message and count the rest."""
    names = list(items)
    first = ", ".join(names[:limit])
    return first if len(names) <= limit else f"{first} and {len(names) - limit} more"


def truncate_lines(lines: Sequence[str], location: str, limit: int = 5) -> list[str]:
    """Return the first lines for the terminal, and where the full list is."""
    more = f"and {format_int(len(lines) - limit)} more; all are in {location}"
    return [*lines[:limit], more] if len(lines) > limit else [*lines]


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict = 3, 12, 12, 12


def format_value(value: object) -> str:
    """Return the repr of a value for a message, shortened."""
    try:
        return shorten(_REPR.repr(value), 240)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a very large integer"


def shorten(text: str, width: int) -> str:
    """Replace the middle of a long text by an ellipsis."""
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[: width - 1 - half]}…{text[len(text) - half :]}"


# Control characters except tab and newline, direction marks, line and paragraph separators.
_UNPRINTABLE = [*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F]
_UNPRINTABLE += [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _UNPRINTABLE}


def printable(text: str) -> str:
    """Escape characters that control a terminal or reorder a line."""
    return text.translate(_ESCAPES)


def format_int(number: int) -> str:
    """Format an integer with a space between thousands."""
    return f"{number:,}".replace(",", " ")


def pluralize(number: int, noun: str) -> str:
    """Return a number and its noun: 1 image, 12 000 images, 3 classes."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{format_int(number)} {noun}{plural}"


def readable_size(count: float) -> str:
    """Format a number of bytes: 4.1 GB, 154 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration: 90s, 10m, 1.5h, 2d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise ValueError(f"must be a duration such as 90s, 10m or 2h, got {format_value(text)}")
    return float(match[1]) * _SECONDS[match[2]]


def readable_seconds(seconds: float) -> str:
    """Format a duration: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
