"""Reports of one run or of several compared, as one HTML file. Names are imported at first use."""

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.reports.report import comparison_page, report_page, write_report
    from proximetry.reports.run_evaluation import RunEvaluation, evaluate_run
    from proximetry.reports.run_record import RunRecord

__all__ = [
    "RunEvaluation",
    "RunRecord",
    "comparison_page",
    "evaluate_run",
    "report_page",
    "write_report",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "run_evaluation": ("RunEvaluation", "evaluate_run"),
        "run_record": ("RunRecord",),
        "report": ("comparison_page", "report_page", "write_report"),
    },
    extra="report",
)
