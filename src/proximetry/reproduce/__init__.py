"""Reproduce published tables: train every row and compare with the published figures.

reproduce("mpa-table4", "~/cub", options=ReproduceOptions(seeds=(0, 1, 2)))
"""

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports
from proximetry.reproduce.table import (
    ReproduceError,
    ReproduceOptions,
    RunsFailedError,
    Table,
    list_tables,
    shipped_tables,
)

if TYPE_CHECKING:
    from proximetry.reproduce.runner import Interrupted, reproduce

# Imported lazily: the runner needs torch.
__getattr__ = lazy_exports(__name__, {"runner": ("Interrupted", "reproduce")})

__all__ = [
    "Interrupted",
    "ReproduceError",
    "ReproduceOptions",
    "RunsFailedError",
    "Table",
    "list_tables",
    "reproduce",
    "shipped_tables",
]
