"""Errors, messages and lazy imports."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral
from typing import Any

Progress = Callable[[int, int], None]


"""Called with (done, total) now and then."""


Steps = Callable[[str, int, int], None]


"""Called with (what is being done, done, total) now and then."""


class UsageError(ValueError):
    """What was asked for does not exist or cannot be meant; nothing was done."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the nearest known name, else the known ones if few."""
    names = list(known)
    match = get_close_matches(name.lower(), names, 1)
    if match:
        return f", did you mean {match[0]!r}?"
    return f"; known are: {', '.join(names)}." if len(names) <= 24 else "."


def some(items: Iterable[str], limit: int = 5) -> str:
    """Join the first few items for a message and count the rest."""
    names = list(items)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def first_few(lines: Sequence[str], elsewhere: str, limit: int = 5) -> list[str]:
    """Return the first lines of a list for the screen, and say where all of them are."""
    if len(lines) <= limit:
        return [*lines]
    return [*lines[:limit], f"and {spaced(len(lines) - limit)} more; all are in {elsewhere}"]


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 12, 12, 12

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out what has more than 4300 digits.
        return super().repr_int(x, level) if x.bit_length() < 1000 else "a number without end"


def shown(value: object) -> str:
    """Write a value for a message, however large it is: what is too long is left out."""
    return shorten(_Short().repr(value), 240)


def shorten(text: str, width: int) -> str:
    """Leave out the middle of a text that is too long."""
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
    """Whether a value is a whole number of any integer type, from `least` up; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def spaced(number: int) -> str:
    """Write a whole number with a space between thousands."""
    return f"{number:,}".replace(",", " ")


def readable_size(count: float) -> str:
    """Write a number of bytes for people: 4.1 GB, 154 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def readable_seconds(seconds: float) -> str:
    """Write a time for people: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def need(module: str, extra: str | None, purpose: str) -> Any:
    """Import an optional package, or say what to install: an extra of ours, or the package."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(purpose, module, extra) from error


def _missing(purpose: str, module: str, extra: str | None) -> ModuleNotFoundError:
    package = module.partition(".")[0]
    command = install_hint(extra) if extra else f"pip install {package}"
    return ModuleNotFoundError(f"{purpose} needs {package}: {command}", name=package)


def install_hint(extra: str) -> str:
    """Return how to install an extra, in words that hold with and without a package index."""
    return f"install the extra {extra!r}, in a clone with pip install '.[{extra}]'"


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]], extra: str | None = None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports names from its modules when first asked for.

    What is then missing comes with `extra`, says the error.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{places[name]}"), name)
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            # Also where a package below names an extra: ours installs that too, and the rest.
            raise _missing(f"{package}.{name}", error.name or "", extra) from error

    return find
