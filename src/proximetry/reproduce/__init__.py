"""Published tables, run again: every row of one, beside what was published.

reproduce("mpa-table4", data="~/cub", seeds=(0, 1, 2))
"""

from proximetry.reproduce.run import reproduce
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
