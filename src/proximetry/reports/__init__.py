"""HTML reports on a run, or comparing several. Names are imported on first use."""

# ruff: noqa: F403

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.reports.report import *
    from proximetry.reports.run_evaluation import *
    from proximetry.reports.run_record import *

_EXPORTS = {
    "run_evaluation": "RunEvaluation evaluate_run",
    "run_record": "RunRecord",
    "report": "comparison_page report_page write_report",
}

__all__ = [name for names in _EXPORTS.values() for name in names.split()]

__getattr__ = lazy_exports(
    __name__, {module: names.split() for module, names in _EXPORTS.items()}, extra="report"
)
