"""Optional packages are imported where they are used; a missing one is named with its extra."""

from difflib import get_close_matches
from importlib import import_module
from typing import Any


def need(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, or say which extra of this package brings it and what it is for."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{purpose} needs {package}: pip install 'proximetry[{extra}]'", name=package
        ) from error


def closest(name: str, known: tuple[str, ...]) -> str:
    """Return ", did you mean 'x'?" for the nearest known name, else the known names."""
    match = get_close_matches(name, known, 1)
    return f", did you mean {match[0]!r}?" if match else f"; known are: {', '.join(known)}."


def some(items: list[str], limit: int = 5) -> str:
    """Join the first few items for a message and count the rest."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
