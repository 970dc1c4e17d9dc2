"""Sections of a comparison of runs: metrics, curves, queries, recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proximetry._util.charts import in_percent, line_chart
from proximetry._util.errors import shown, spaced
from proximetry.metrics import Interval
from proximetry.metrics.intervals import INTERVALS
from proximetry.recipe.loading import flatten
from proximetry.reports.evaluation import RunEvaluation
from proximetry.reports.page import Section, section, short
from proximetry.reports.record import RunRecord
from proximetry.reports.sections import (
    SPLITS,
    image,
    metric_names,
    neighbor_images,
)
from proximetry.training.reporting import metric_title

SHOWN_CHANGES = 8
_NEIGHBORS = 4


def comparison_sections(
    names: Sequence[str], records: Sequence[RunRecord], runs: Sequence[RunEvaluation | None]
) -> list[Section]:
    """Return the sections of a comparison."""
    sections = [
        _metrics(names, records, runs),
        _curves(names, records),
        _queries(names, runs),
        _recipes(names, records),
        _origins(names, records, runs),
    ]
    return [section for section in sections if section is not None]


def _metrics(
    names: Sequence[str], records: Sequence[RunRecord], runs: Sequence[RunEvaluation | None]
) -> Section:
    complete = [run for run in runs if run is not None]
    tables, images, comparisons = [], [], 0
    if len(complete) < len(runs):
        for split, words in SPLITS.items():
            scores = [record.selected.get(split, {}) for record in records]
            if any(scores):
                caption = f"Metrics of the selected epochs as each run reported them, {words}"
                columns = _columns(names, scores, [{} for _ in scores])
                tables.append((f"{caption}, in percent", metric_names(scores), columns))
    else:
        scores = [run.scores for run in complete]
        columns = _columns(names, scores, [run.intervals for run in complete])
        caption = "Metrics of each run on its own images, in percent"
        if all(complete[0].compares_like(run) for run in complete):
            counted = spaced(int(scores[0]["queries"]))
            caption = f"Metrics in percent, {counted} queries, the same for all runs"
            first, *others = (run.evaluation for run in complete)
            comparisons = sum(len(first.scores.keys() & other.scores.keys()) for other in others)
            confidence = 1 - 0.05 / max(comparisons, 1)
            for place, other in enumerate(others):
                difference = first.compare(other, confidence=confidence)
                columns.insert(2 * place + 2, {"title": "difference", "difference": difference})
        else:
            images = [
                f"{name}: {spaced(len(run.catalog))} images of "
                f"{spaced(len(run.catalog.class_names))} classes in {run.catalog.root}"
                for name, run in zip(names, complete, strict=True)
            ]
        tables.append((caption, metric_names(scores), columns))
    return section(
        "Metrics",
        "comparison_metrics.html",
        differing_images=images,
        tables=tables,
        comparisons=comparisons,
        intervals=INTERVALS,
        untested=len(complete) < len(runs),
    )


def _columns(
    names: Sequence[str],
    scores: Sequence[Mapping[str, Any]],
    intervals: Sequence[Mapping[str, Interval]],
) -> list[dict[str, Any]]:
    return [
        {"title": short(name), "scores": one, "intervals": bounds}
        for name, one, bounds in zip(names, scores, intervals, strict=True)
    ]


def _curves(names: Sequence[str], records: Sequence[RunRecord]) -> Section:
    def series(*keys: str) -> dict[str, list[tuple[float, float]]]:
        pairs = zip(names, records, strict=True)
        return {short(name): record.curve(*keys) for name, record in pairs}

    # Losses with other names or settings have other scales.
    one_loss = len({shown(record.recipe.loss) for record in records}) == 1
    charts = [line_chart("Loss", series("loss"))] if one_loss else []
    charts.append(line_chart("Learning rate", series("lr"), from_zero=True))
    for split, words in SPLITS.items():
        for metric in dict.fromkeys(name for record in records for name in record.metrics):
            title = f"{metric_title(metric)}, {words}"
            points = series(split, metric)
            charts.append(line_chart(title, points, shown=in_percent, from_zero=True))
    charts = [*filter(None, charts)]
    return section("Curves", "curves.html", charts=charts, epochs="", several_losses=not one_loss)


def _queries(names: Sequence[str], runs: Sequence[RunEvaluation | None]) -> Section | None:
    """Return queries whose nearest image is right in only one of two runs."""
    first, *others = runs
    if first is None:
        return None
    comparisons = []
    for name, other in zip(names[1:], others, strict=True):
        if other is None or not first.compares_like(other):
            continue
        mine, theirs = first.neighbors.hits[:, 0], other.neighbors.hits[:, 0]
        scored = first.evaluation.scored
        gained = np.flatnonzero(theirs & ~mine & scored)
        lost = np.flatnonzero(mine & ~theirs & scored)
        both = ((names[0], first), (name, other))
        comparisons.append(
            {
                "name": name,
                "both": int((mine & theirs).sum()),
                "neither": int((scored & ~mine & ~theirs).sum()),
                "gained": len(gained),
                "lost": len(lost),
                "lists": [
                    (title, [_row(both, query) for query in _widest(first, other, queries)])
                    for title, queries in (
                        (f"Right in {name} only", gained),
                        (f"Right in {names[0]} only", lost),
                    )
                ],
            }
        )
    if not comparisons:
        return None
    return section("Queries", "comparison_queries.html", first=names[0], comparisons=comparisons)


def _widest(first: RunEvaluation, other: RunEvaluation, queries: Any) -> list[int]:
    """Return the queries whose scores differ most, at most one per class."""
    mine, theirs = first.evaluation.scores, other.evaluation.scores
    ranking = next((name for name in (first.ranking, *mine) if name in theirs), None)
    # Without a common score, queries come in the order of the catalog.
    gap = np.zeros(len(first.queries)) if ranking is None else theirs[ranking] - mine[ranking]
    chosen: dict[int, int] = {}
    for query in queries[np.argsort(-np.abs(gap[queries]), kind="stable")]:
        chosen.setdefault(int(first.evaluation.query_codes[query]), int(query))
    return list(chosen.values())[:SHOWN_CHANGES]


def _row(runs: Sequence[tuple[str, RunEvaluation]], query: int) -> tuple[dict[str, Any], list[Any]]:
    """Return the image of a query, and its neighbors in each run."""
    first = runs[0][1]
    sides = [(short(name), neighbor_images(run, query, _NEIGHBORS)) for name, run in runs]
    return image(first, int(first.queries[query])), sides


def _recipes(names: Sequence[str], records: Sequence[RunRecord]) -> Section:
    flat = [flatten(record.recipe.to_dict()) for record in records]
    rows = [
        (key, [shown(values.get(key)) for values in flat])
        for key in dict.fromkeys(key for values in flat for key in values)
        if any(values.get(key) != flat[0].get(key) for values in flat)
    ]
    return section(
        "Recipes", "comparison_recipes.html", names=[short(name) for name in names], rows=rows
    )


def _origins(
    names: Sequence[str], records: Sequence[RunRecord], runs: Sequence[RunEvaluation | None]
) -> Section:
    notes = [
        f"{name}: {note}"
        for name, record, run in zip(names, records, runs, strict=True)
        for note in [*record.results.get("notes", []), *([] if run is None else run.notes)]
    ]
    return section(
        "Origin",
        "comparison_origin.html",
        runs=[(short(name), record) for name, record in zip(names, records, strict=True)],
        notes=list(dict.fromkeys(notes)),
    )
