"""The report of a run, or of several compared, as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from proximetry import __version__
from proximetry._util.errors import Steps, UsageError
from proximetry._util.files import atomic_write
from proximetry.reports.comparison import comparison_sections
from proximetry.reports.evaluation import RunEvaluation, evaluate_run
from proximetry.reports.page import Section, page
from proximetry.reports.proxies import find_proxies, find_use
from proximetry.reports.record import RunRecord
from proximetry.reports.sections import (
    classes_section,
    curves_section,
    headline,
    map_section,
    metrics_section,
    origin_section,
    proxies_section,
    queries_section,
)

_ABSENT = (ValueError, OSError, ModuleNotFoundError)
"""Raised if images, checkpoints or an extra are missing."""


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    source: str | None = None,
    root: Path | None = None,
    columns: Mapping[str, str] | None = None,
    steps: Steps = lambda what, done, total: None,
) -> list[str]:
    """Write the report of a run, or of several compared, all or nothing.

    Sections whose inputs are missing, such as moved images, are skipped and listed.

    Args:
        runs: folders of runs; the others are compared with the first.
        out: the HTML file.
        source: images to evaluate on, as `evaluate` takes them; default: those of each run.
        root: where the images of the dataset lie now.
        columns: what a table calls its columns, if `source` is one; default: as in each run.
        steps: called with (what, done, total) now and then.

    Returns:
        What is missing in it, and why.
    """
    if columns and source is None:
        raise UsageError("--columns is for a table; name that with --data")
    records = [RunRecord.read(path) for path in runs]
    folders = [record.folder.path.resolve() for record in records]
    if len(set(folders)) < len(folders):
        raise UsageError("a run is named twice; name different ones")
    found: list[RunEvaluation | None] = []
    for record in records:
        try:
            found.append(evaluate_run(record, source, root, steps, columns=columns))
        except _ABSENT as error:
            # Explicitly named images must be readable.
            if source is not None or root is not None:
                raise
            found.append(None)
            record.missing.append(_not_evaluated(error))
    if len(records) == 1:
        content = report_page(records[0], found[0])
    else:
        content = comparison_page(records, found)
    atomic_write(out, content)
    return [reason for record in records for reason in record.missing]


def _not_evaluated(error: Exception) -> str:
    why = _sentence(error)
    hint = "" if "--data" in why else ". If the images have moved, name where they are with --data"
    return (
        "Queries, classes, intervals and the map: the embedder cannot be evaluated, since "
        f"{why}{hint}"
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def report_page(record: RunRecord, run: RunEvaluation | None) -> bytes:
    """Return the report of one run; missing inputs are added to `record.missing`."""
    unreadable: list[str] = []
    notes = [] if run is None else run.notes
    sections = [metrics_section(record, run), curves_section(record)]
    if run is not None:
        sections += [queries_section(run, unreadable), classes_section(run, unreadable)]
        sections += _attempt(record, "Map", lambda: map_section(run))
    sections += _proxies(record, run)
    if unreadable:
        record.missing.append(f"Images: {len(unreadable)} cannot be read any more")
    sections.append(origin_section(record, notes))
    recipe = record.recipe
    return page(
        f"{record.name}: report",
        sections,
        heading=record.name,
        about=f"{recipe.loss.name} with {recipe.model.backbone}, "
        f"{recipe.model.pca_dim or recipe.model.dim} dimensions, on {recipe.data.dataset}. "
        f"Recipe {recipe.name}. {_written()}",
        missing=record.missing,
        notes=notes,
        cards=headline(record, run),
    )


def _written() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Written {now} by Proximetry {__version__}."


def _attempt(record: RunRecord, what: str, make: Callable[[], Section]) -> list[Section]:
    try:
        return [make()]
    except _ABSENT as error:
        record.missing.append(f"{what}: {_sentence(error)}")
        return []


def _proxies(record: RunRecord, run: RunEvaluation | None) -> list[Section]:
    """Return the section on proxies; their use needs the training images too."""
    found = use = None
    what = "Proxies"
    try:
        if not record.recipe.loss.name.startswith("pairs/"):
            found = find_proxies(record)
        if found is not None and found.per_class > 1:
            what = "Proxies that images choose"
            if run is None or run.train is None:
                raise ValueError("the training images are not there")
            use = find_use(found, run.embedder, run.train)
    except _ABSENT as error:
        record.missing.append(f"{what}: {_sentence(error)}")
    made = proxies_section(record, found, use)
    return [] if made is None else [made]


def comparison_page(records: Sequence[RunRecord], found: Sequence[RunEvaluation | None]) -> bytes:
    """Return the comparison of runs, each with the first."""
    names = _different_names(records)
    sections = comparison_sections(names, records, found)
    missing = [
        f"{name}. {reason}"
        for name, record in zip(names, records, strict=True)
        for reason in record.missing
    ]
    title = " and ".join(names) if len(names) == 2 else f"{names[0]} and {len(names) - 1} others"
    return page(
        f"{title}, compared",
        sections,
        heading=f"{title}, compared",
        about=f"{len(names)} runs, compared with {names[0]}. {_written()}",
        missing=missing,
    )


def _different_names(records: Sequence[RunRecord]) -> list[str]:
    """Return the names of folders, or their paths if names are equal."""
    names = [record.name for record in records]
    if len(set(names)) == len(names):
        return names
    return [str(record.path) for record in records]
