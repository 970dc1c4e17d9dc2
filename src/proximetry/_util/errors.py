"""Errors, their messages, and optional imports."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral
from typing import Any


class UsageError(ValueError):
    """Invalid input from the user, found before anything was written."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the nearest known name, else a short list of them."""
    names = list(known)
    match = get_close_matches(name.lower(), names, 1)
    if match:
        return f", did you mean {match[0]!r}?"
    return f"; known are: {', '.join(names)}." if len(names) <= 24 else "."


def some(items: Iterable[str], limit: int = 5) -> str:
    """Join the first few items for a message and count the rest."""
    names = list(items)
    first = ", ".join(names[:limit])
    return first if len(names) <= limit else f"{first} and {len(names) - limit} more"


def first_few(lines: Sequence[str], elsewhere: str, limit: int = 5) -> list[str]:
    """Return the first lines for the terminal, and where the full list is."""
    if len(lines) <= limit:
        return [*lines]
    return [*lines[:limit], f"and {spaced(len(lines) - limit)} more; all are in {elsewhere}"]


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 12, 12, 12


def format_value(value: object) -> str:
    """Return the repr of a value for a message, shortened."""
    try:
        return shorten(_SHORT.repr(value), 240)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a very large integer"


def shorten(text: str, width: int) -> str:
    """Replace the middle of a long text by an ellipsis."""
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[: width - 1 - half]}…{text[len(text) - half :]}"


# Controls except tab and newline, marks of text direction, line and paragraph separators.
_UNPRINTABLE = [*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F]
_UNPRINTABLE += [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _UNPRINTABLE}


def printable(text: str) -> str:
    """Escape characters that control a terminal or reorder a line."""
    return text.translate(_ESCAPES)


def is_whole(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer of any type, at least `least`, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def spaced(number: int) -> str:
    """Format an integer with a space between thousands."""
    return f"{number:,}".replace(",", " ")


def pluralize(number: int, noun: str) -> str:
    """Return a number and its noun: 1 image, 12 000 images, 3 classes."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{spaced(number)} {noun}{plural}"


def readable_size(count: float) -> str:
    """Format a number of bytes: 4.1 GB, 154 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def readable_seconds(seconds: float) -> str:
    """Format a duration: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def need(module: str, extra: str | None, purpose: str) -> Any:
    """Import an optional package; if it is missing, raise with the extra or package to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(purpose, module, extra) from error


def _missing(purpose: str, module: str, extra: str | None) -> ModuleNotFoundError:
    package = module.partition(".")[0]
    command = install_hint(extra) if extra else f"pip install {package}"
    return ModuleNotFoundError(f"{purpose} needs {package}: {command}", name=package)


def install_hint(extra: str) -> str:
    """Return how to install an extra, with and without a package index."""
    return f"install the extra {extra!r}, in a clone with pip install '.[{extra}]'"


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]], extra: str | None = None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports its names on first use.

    If an import fails, the error names `extra` as what to install.
    """
    origins = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{origins[name]}"), name)
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            # Also where a package below names an extra: ours installs that too, and the rest.
            raise _missing(f"{package}.{name}", error.name or "", extra) from error

    return load
