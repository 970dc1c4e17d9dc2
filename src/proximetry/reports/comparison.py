"""Sections of a comparison of runs: metrics, curves, queries, recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from proximetry._util.charts import format_percent, line_chart
from proximetry._util.formatting import format_int, format_value
from proximetry.metrics.intervals import INTERVALS
from proximetry.recipe.loading import flatten
from proximetry.reports.html_page import ReportSection, section, short
from proximetry.reports.run_evaluation import RunEvaluation
from proximetry.reports.run_record import RunRecord
from proximetry.reports.run_sections import SPLITS, image, metric_names, neighbor_images
from proximetry.training.metrics_table import metric_title

MAX_CHANGES = 8
_NEIGHBORS = 4


class ComparedRun(NamedTuple):
    """A run of a comparison; its evaluation is None if images are missing."""

    name: str
    record: RunRecord
    evaluation: RunEvaluation | None


def comparison_sections(runs: Sequence[ComparedRun]) -> list[ReportSection]:
    """Return the sections of a comparison with the first run."""
    sections = [_metrics(runs), _curves(runs), _queries(runs), _recipes(runs), _origins(runs)]
    return [section for section in sections if section is not None]


def _metrics(runs: Sequence[ComparedRun]) -> ReportSection:
    tables, images, comparisons = [], list[str](), 0
    columns: list[Any]
    head = ["metric", *(short(run.name) for run in runs)]
    complete = [run.evaluation for run in runs if run.evaluation is not None]
    if len(complete) < len(runs):
        for split, split_title in SPLITS.items():
            scores = [run.record.selected.get(split, {}) for run in runs]
            if any(scores):
                caption = f"Metrics that each run reported, {split_title}, in percent"
                columns = [(one, {}, None) for one in scores]
                tables.append((caption, head, metric_names(scores), columns))
    else:
        differences: list[Any] = [None] * len(complete)
        scores = [one.scores for one in complete]
        caption = "Metrics of each run on its own images, in percent"
        if all(complete[0].is_comparable_to(one) for one in complete):
            number = format_int(int(scores[0]["queries"]))
            caption = f"Metrics of all runs on the same {number} queries, in percent"
            first, *others = (one.evaluation for one in complete)
            comparisons = sum(len(first.scores.keys() & other.scores.keys()) for other in others)
            confidence = 1 - 0.05 / max(comparisons, 1)
            differences[1:] = [first.compare(other, confidence=confidence) for other in others]
            head[2:] = [cell for name in head[2:] for cell in (name, "difference")]
        else:
            images = [
                f"{run.name}: {format_int(len(one.catalog))} images of "
                f"{format_int(len(one.catalog.class_names))} classes in {one.catalog.root}"
                for run, one in zip(runs, complete, strict=True)
            ]
        intervals = [one.intervals for one in complete]
        columns = list(zip(scores, intervals, differences, strict=True))
        tables.append((caption, head, metric_names(scores), columns))
    return section(
        "Metrics",
        "comparison_metrics.html",
        differing_images=images,
        tables=tables,
        comparisons=comparisons,
        intervals=INTERVALS,
        untested=len(complete) < len(runs),
    )


def _curves(runs: Sequence[ComparedRun]) -> ReportSection:
    def series(*keys: str) -> dict[str, list[tuple[float, float]]]:
        return {short(run.name): run.record.curve(*keys) for run in runs}

    # Losses with different names or settings have different scales.
    one_loss = len({format_value(run.record.recipe.loss) for run in runs}) == 1
    charts = [line_chart("Loss", series("loss"))] if one_loss else []
    charts.append(line_chart("Learning rate", series("lr"), from_zero=True))
    for split, split_title in SPLITS.items():
        for metric in dict.fromkeys(name for run in runs for name in run.record.metrics):
            title = f"{metric_title(metric)}, {split_title}"
            points = series(split, metric)
            charts.append(line_chart(title, points, format_value=format_percent, from_zero=True))
    charts = [*filter(None, charts)]
    return section("Curves", "curves.html", charts=charts, epochs="", several_losses=not one_loss)


def _queries(runs: Sequence[ComparedRun]) -> ReportSection | None:
    """Return the queries whose nearest image is correct in only one of two runs."""
    (name, _, first), *others = runs
    comparisons = []
    for other_name, _, other in others:
        if first is None or other is None or not first.is_comparable_to(other):
            continue
        hits, other_hits = first.neighbors.hits[:, 0], other.neighbors.hits[:, 0]
        scored = first.evaluation.is_scored
        gained = np.flatnonzero(other_hits & ~hits & scored)
        lost = np.flatnonzero(hits & ~other_hits & scored)
        pair = (short(name), first), (short(other_name), other)
        comparisons.append(
            {
                "name": other_name,
                "both": int((hits & other_hits).sum()),
                "neither": int((scored & ~hits & ~other_hits).sum()),
                "gained": len(gained),
                "lost": len(lost),
                "lists": [
                    (f"Correct in {other_name} only", _rows(pair, _top_gaps(first, other, gained))),
                    (f"Correct in {name} only", _rows(pair, _top_gaps(first, other, lost))),
                ],
            }
        )
    if not comparisons:
        return None
    return section("Queries", "comparison_queries.html", first=name, comparisons=comparisons)


def _top_gaps(first: RunEvaluation, other: RunEvaluation, queries: Any) -> list[int]:
    """Return the queries whose scores differ the most, at most one per class."""
    scores, other_scores = first.evaluation.scores, other.evaluation.scores
    common = next((name for name in (first.ranking_metric, *scores) if name in other_scores), None)
    # Without a common score, queries stay in the order of the catalog.
    gap = other_scores[common] - scores[common] if common else np.zeros(len(first.queries))
    order = queries[np.argsort(-np.abs(gap[queries]), kind="stable")]
    return first.one_per_class(order, MAX_CHANGES)


def _rows(pair: Sequence[tuple[str, RunEvaluation]], queries: Sequence[int]) -> list[Any]:
    """Return the image of each query, and its neighbors in each run."""
    first = pair[0][1]
    return [
        (
            image(first, int(first.queries[query])),
            [(name, neighbor_images(run, query, _NEIGHBORS)) for name, run in pair],
        )
        for query in queries
    ]


def _recipes(runs: Sequence[ComparedRun]) -> ReportSection:
    flat = [flatten(run.record.recipe.to_dict()) for run in runs]
    rows = [
        (key, [format_value(values.get(key)) for values in flat])
        for key in dict.fromkeys(key for values in flat for key in values)
        if any(values.get(key) != flat[0].get(key) for values in flat)
    ]
    names = [run.name for run in runs]
    return section("Recipes", "comparison_recipes.html", names=names, rows=rows)


def _origins(runs: Sequence[ComparedRun]) -> ReportSection:
    notes = [
        f"{name}: {note}"
        for name, record, run in runs
        for note in [*record.results.get("notes", []), *([] if run is None else run.notes)]
    ]
    return section("Origin", "comparison_origin.html", runs=runs, notes=[*dict.fromkeys(notes)])
