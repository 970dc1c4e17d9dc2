"""Reproduce published tables: train every row and compare with the published metrics.

reproduce("mpa-table4", "~/cub", options=ReproduceOptions(seeds=(0, 1, 2)))

Names are imported on first use.
"""

# ruff: noqa: F403
from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.reproduce.comparison import *
    from proximetry.reproduce.runner import *
    from proximetry.reproduce.table import *

_EXPORTS = {
    "comparison": "compare",
    "runner": "Interrupted reproduce",
    "table": "ReproduceError ReproduceOptions RunsFailedError Table list_tables shipped_tables",
}

__all__ = [name for names in _EXPORTS.values() for name in names.split()]

__getattr__ = lazy_exports(__name__, {module: names.split() for module, names in _EXPORTS.items()})
