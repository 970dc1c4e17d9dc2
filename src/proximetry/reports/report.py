"""The report on a run, or a comparison of several, as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write
from proximetry._util.types import Progress
from proximetry.reports.comparison import ComparedRun, comparison_sections
from proximetry.reports.html_page import ReportSection, page
from proximetry.reports.run_evaluation import RunEvaluation, evaluate_run
from proximetry.reports.run_proxies import measure_use, read_proxies
from proximetry.reports.run_record import RunRecord
from proximetry.reports.run_sections import (
    calibration_section,
    classes_section,
    curves_section,
    headline,
    map_section,
    metrics_section,
    origin_section,
    proxies_section,
    queries_section,
)

_MISSING_INPUT_ERRORS = (ValueError, OSError, ModuleNotFoundError)
"""Errors of missing images, checkpoints or extras."""


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    source: str | None = None,
    root: Path | None = None,
    columns: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the report on a run, or a comparison of several, atomically.

    Sections whose inputs are missing, such as moved images, are skipped and listed.

    Args:
        runs: one run folder, or several to compare with the first.
        out: the HTML file.
        source: images to evaluate on, as for `evaluate`; default: each run's images.
        root: the current folder of the dataset.
        columns: a table's column names by field; default: as in each run.
        progress: called with (done, total) while images are embedded and neighbors searched.

    Returns:
        The missing sections, each with the reason.

    Examples:
        >>> import numpy as np
        >>> from proximetry.training import Recipe, train
        >>> vectors = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
        >>> np.savez("vectors.npz", vectors=vectors, labels=np.repeat(list("abcdefghij"), 4))
        >>> settings = {"data.root": "vectors.npz", "training.epochs": 1}
        >>> results = train(Recipe.load("vectors", settings), "run")
        >>> write_report([Path("run")], Path("report.html"))
        []
    """
    if columns and source is None:
        raise UsageError("--columns without --data. Pass the table as --data.")
    records = [RunRecord.read(path) for path in runs]
    evaluations: list[RunEvaluation | None] = []
    for record in records:
        try:
            evaluations.append(evaluate_run(record, source, root, progress, columns=columns))
        except _MISSING_INPUT_ERRORS as error:
            # Explicitly named images must be readable.
            if source is not None or root is not None:
                raise
            evaluations.append(None)
            hint = "" if "--data" in str(error) else ". If the images have moved, pass --data"
            record.missing.append(f"Queries, classes, intervals and the map: {error}{hint}")
    if len(records) == 1:
        content = report_page(records[0], evaluations[0])
    else:
        content = comparison_page(records, evaluations)
    atomic_write(out, content)
    return [reason for record in records for reason in record.missing]


def report_page(record: RunRecord, run: RunEvaluation | None) -> bytes:
    """Return the report on one run; missing inputs are added to `record.missing`."""
    notes = [] if run is None else run.notes
    sections = [metrics_section(record, run), curves_section(record)]
    if run is not None:
        sections += [queries_section(run), classes_section(run)]
        if (calibration := calibration_section(run)) is not None:
            sections.append(calibration)
        try:
            sections.append(map_section(run))
        except _MISSING_INPUT_ERRORS as error:
            record.missing.append(f"Map: {error}")
        if run.unreadable:
            record.missing.append(f"Images: {len(run.unreadable)} cannot be read")
    sections += [*_proxies(record, run), origin_section(record, notes)]
    recipe = record.recipe
    return page(
        f"{record.name}: report",
        sections,
        heading=record.name,
        about=f"{recipe.loss.name} with {recipe.model.backbone}, "
        f"{recipe.model.pca_dim or recipe.model.dim} dimensions, on {recipe.data.dataset}. "
        f"Recipe {recipe.name}. {_creation_note()}",
        missing=record.missing,
        notes=notes,
        cards=headline(record, run),
    )


def _creation_note() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Created {now} by Proximetry {__version__}."


def _proxies(record: RunRecord, run: RunEvaluation | None) -> list[ReportSection]:
    """Return the section on proxies; the proxies in use also require the training images."""
    proxies = use = None
    title = "Proxies"
    try:
        if not record.recipe.loss.name.startswith("pairs/"):
            proxies = read_proxies(record)
        if proxies is not None and proxies.per_class > 1:
            title = "Proxies in use"
            if run is None or run.train is None:
                raise ValueError("no training images")
            use = measure_use(proxies, run.embedder, run.train)
    except _MISSING_INPUT_ERRORS as error:
        record.missing.append(f"{title}: {error}")
    section = proxies_section(record, proxies, use)
    return [] if section is None else [section]


def comparison_page(
    records: Sequence[RunRecord], evaluations: Sequence[RunEvaluation | None]
) -> bytes:
    """Return the comparison of the first run with each of the others."""
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        names = [str(record.path) for record in records]
    runs = list(map(ComparedRun, names, records, evaluations))
    others = names[1] if len(names) == 2 else f"{len(names) - 1} others"
    title = f"Comparison of {names[0]} and {others}"
    return page(
        title,
        comparison_sections(runs),
        heading=title,
        about=f"{len(names)} runs, compared with {names[0]}. {_creation_note()}",
        missing=[f"{run.name}. {reason}" for run in runs for reason in run.record.missing],
    )
