"""Published tables, run again: every row of one, beside what was published.

reproduce("mpa-table4", data="~/cub", seeds=(0, 1, 2))
"""

from typing import TYPE_CHECKING, Any

from proximetry.reproduce.tables import (
    Claim,
    Figure,
    Published,
    Row,
    Table,
    list_tables,
    shipped_tables,
)
from proximetry.reproduce.trouble import Interrupted, ReproduceError

if TYPE_CHECKING:
    from proximetry.reproduce.run import reproduce

__all__ = [
    "Claim",
    "Figure",
    "Interrupted",
    "Published",
    "ReproduceError",
    "Row",
    "Table",
    "list_tables",
    "reproduce",
    "shipped_tables",
]


def __getattr__(name: str) -> Any:
    """Import what trains when it is asked for: with the networks it takes seconds."""
    if name == "reproduce":
        from proximetry.reproduce.run import reproduce

        return reproduce
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
