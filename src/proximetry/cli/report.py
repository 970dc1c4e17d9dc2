"""`proximetry report`: report on one run, or compare several."""

from pathlib import Path

from proximetry._util.errors import UsageError
from proximetry.cli.options import TableColumns
from proximetry.cli.output import check_out, echo, progress_bar


def report(
    *runs: Path,
    out: Path | None = None,
    data: str | None = None,
    root: Path | None = None,
    columns: TableColumns = None,
) -> None:
    """Write the results of a run as one HTML file, or compare several runs.

    Sections whose inputs are missing, such as moved images, are skipped and listed.

    Args:
        runs: a run folder, or several to compare with the first.
        out: output file; default: report.html in the run folder, or comparison.html in the first
            of several.
        data: images to evaluate on if not the run's, or if these have moved: a folder of class
            folders, a CSV or Parquet table (by default with the run's columns), a tar file, or a
            dataset that `proximetry datasets` lists.
        root: folder of that dataset, or of the run's dataset if there is no --data.
    """
    if not runs:
        raise UsageError("RUNS is missing. Pass one run folder, or several to compare.")
    target = out or runs[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    if out is not None or runs[0].is_dir():
        check_out(target, [".html"])
    from proximetry.reports import write_report

    with progress_bar("evaluating") as progress:
        missing = write_report(
            runs, target, source=data, root=root, columns=columns, progress=progress
        )
    for reason in missing:
        echo(f"missing: {reason}")
    echo(f"report: {target}")
