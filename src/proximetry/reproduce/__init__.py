"""Published tables, run again: every row of one, beside what was published.

reproduce("mpa-table4", "~/cub", options=ReproduceOptions(seeds=(0, 1, 2)))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from proximetry.reproduce.options import ReproduceOptions

if TYPE_CHECKING:
    from proximetry.reproduce.runner import Interrupted, reproduce
    from proximetry.reproduce.table import (
        Claim,
        Figure,
        Published,
        ReproduceError,
        Row,
        Table,
        list_tables,
        shipped_tables,
    )

# Imported when they are asked for: the runner needs torch, options do not.
_LAZY = {
    "Claim": "table",
    "Figure": "table",
    "Interrupted": "runner",
    "Published": "table",
    "ReproduceError": "table",
    "Row": "table",
    "Table": "table",
    "list_tables": "table",
    "reproduce": "runner",
    "shipped_tables": "table",
}

__all__ = [
    "Claim",
    "Figure",
    "Interrupted",
    "Published",
    "ReproduceError",
    "ReproduceOptions",
    "Row",
    "Table",
    "list_tables",
    "reproduce",
    "shipped_tables",
]


def __getattr__(name: str) -> Any:
    """Import a name of `_LAZY`."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
