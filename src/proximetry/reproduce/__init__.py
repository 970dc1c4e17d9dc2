"""Published tables, run again: every row of one, beside what was published.

reproduce("mpa-table4", "~/cub", options=ReproduceOptions(seeds=(0, 1, 2)))
"""

from typing import TYPE_CHECKING

from proximetry._common import lazy_exports
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
__getattr__ = lazy_exports(
    __name__,
    {
        "runner": ("Interrupted", "reproduce"),
        "table": (
            *("Claim", "Figure", "Published", "ReproduceError", "Row", "Table"),
            *("list_tables", "shipped_tables"),
        ),
    },
)

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
