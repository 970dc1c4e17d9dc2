"""Sections of a comparison of runs: metrics, curves, queries, recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from proximetry._util.charts import in_percent, line_chart
from proximetry._util.errors import shown, spaced
from proximetry.metrics import Interval
from proximetry.metrics.intervals import INTERVALS
from proximetry.recipe.loading import flatten
from proximetry.reports.evaluation import RunEvaluation
from proximetry.reports.page import Section, bold, code, percent, render, table
from proximetry.reports.record import RunRecord
from proximetry.reports.sections import (
    SPLITS,
    format_interval,
    image,
    metric_names,
    neighbor_images,
    short,
)
from proximetry.training.reporting import metric_title

SHOWN_CHANGES = 8
_NEIGHBORS = 4

_range = Markup('<span class="range">{}</span>').format


def comparison_sections(
    names: Sequence[str], records: Sequence[RunRecord], found: Sequence[RunEvaluation | None]
) -> list[Section]:
    """Return the sections of a comparison."""
    sections = [
        _metrics(names, records, found),
        _curves(names, records),
        _queries(names, found),
        _recipes(names, records),
        _origins(names, records, found),
    ]
    return [section for section in sections if section is not None]


def _metrics(
    names: Sequence[str], records: Sequence[RunRecord], found: Sequence[RunEvaluation | None]
) -> Section:
    complete = [one for one in found if one is not None]
    tables, images, comparisons = [], [], 0
    if len(complete) < len(found):
        for split, words in SPLITS.items():
            scores = [record.selected.get(split, {}) for record in records]
            if any(scores):
                caption = f"Metrics of the selected epochs as each run reported them, {words}"
                tables.append(_plain_table(caption, names, scores, [{} for _ in scores]))
    elif all(complete[0].compares_like(one) for one in complete):
        paired, comparisons = _paired_table(names, complete)
        tables.append(paired)
    else:
        images = [
            f"{name}: {spaced(len(one.catalog))} images of "
            f"{spaced(len(one.catalog.class_names))} classes in {one.catalog.root}"
            for name, one in zip(names, complete, strict=True)
        ]
        caption = "Metrics of each run on its own images"
        scores = [one.scores for one in complete]
        tables.append(_plain_table(caption, names, scores, [one.intervals for one in complete]))
    content = render(
        "comparison_metrics.html",
        differing_images=images,
        tables=tables,
        comparisons=comparisons,
        intervals=INTERVALS,
        untested=len(complete) < len(found),
    )
    return Section("Metrics", content)


def _plain_table(
    caption: str,
    names: Sequence[str],
    scores: Sequence[Mapping[str, Any]],
    bounds: Sequence[Mapping[str, Interval]],
) -> Markup:
    rows = []
    for metric in metric_names(scores):
        cells = (_figure(metric, *both) for both in zip(scores, bounds, strict=True))
        rows.append([metric_title(metric), *cells])
    return table(f"{caption}, in percent", ["metric", *map(short, names)], rows)


def _figure(metric: str, scores: Mapping[str, Any], bounds: Mapping[str, Interval]) -> str:
    value = percent(scores.get(metric))
    return value + _range(format_interval(bounds[metric])) if metric in bounds else value


def _paired_table(names: Sequence[str], found: Sequence[RunEvaluation]) -> tuple[Markup, int]:
    """Return the table of metrics and differences, and the number of comparisons in it."""
    first, *others = found
    scores = first.evaluation.scores.keys()
    comparisons = sum(len(scores & one.evaluation.scores.keys()) for one in others)
    confidence = 1 - 0.05 / max(comparisons, 1)
    differences = [
        first.evaluation.compare(one.evaluation, confidence=confidence) for one in others
    ]
    head: list[object] = ["metric", short(names[0])]
    for name in names[1:]:
        head += [short(name), "difference"]
    rows = []
    for metric in metric_names([one.scores for one in found]):
        row: list[object] = [metric_title(metric), _figure(metric, first.scores, first.intervals)]
        for one, difference in zip(others, differences, strict=True):
            row.append(_figure(metric, one.scores, one.intervals))
            row.append(_verdict(difference[metric]) if metric in difference else "–")
        rows.append(row)
    counted = spaced(int(first.scores["queries"]))
    caption = f"Metrics in percent, {counted} queries, the same for all runs"
    return table(caption, head, rows), comparisons


def _verdict(one: Interval) -> Markup:
    kind, word = "", "no significant difference"
    if one.low > 0:
        kind = word = "better"
    elif one.high < 0:
        kind = word = "worse"
    bounds = _range(f"{_signed(one.low)} to {_signed(one.high)}")
    return Markup('<span class="{}">{} {}</span>{}').format(kind, _signed(one.mean), word, bounds)


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


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
    content = render(
        "curves.html", charts=[*filter(None, charts)], epochs="", several_losses=not one_loss
    )
    return Section("Curves", content)


def _queries(names: Sequence[str], found: Sequence[RunEvaluation | None]) -> Section | None:
    """Return queries whose nearest image is right in only one of two runs."""
    first, *others = found
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
        runs = ((names[0], first), (name, other))
        comparisons.append(
            {
                "name": name,
                "both": int((mine & theirs).sum()),
                "neither": int((scored & ~mine & ~theirs).sum()),
                "gained": len(gained),
                "lost": len(lost),
                "lists": [
                    (title, [_row(runs, query) for query in _widest(first, other, queries)])
                    for title, queries in (
                        (f"Right in {name} only", gained),
                        (f"Right in {names[0]} only", lost),
                    )
                ],
            }
        )
    if not comparisons:
        return None
    content = render("comparison_queries.html", first=names[0], comparisons=comparisons)
    return Section("Queries", content)


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


def _row(
    runs: Sequence[tuple[str, RunEvaluation]], query: int
) -> tuple[Markup, list[tuple[str, list[Markup]]]]:
    """Return the image of a query, and its neighbors in each run."""
    first = runs[0][1]
    row = int(first.queries[query])
    cell = image(first, row, "query", bold(short(first.catalog.labels[row])))
    return cell, [(short(name), neighbor_images(run, query, _NEIGHBORS)) for name, run in runs]


def _recipes(names: Sequence[str], records: Sequence[RunRecord]) -> Section:
    flat = [flatten(record.recipe.to_dict()) for record in records]
    rows = [
        [key, *(code(shown(values.get(key))) for values in flat)]
        for key in dict.fromkeys(key for values in flat for key in values)
        if any(values.get(key) != flat[0].get(key) for values in flat)
    ]
    content = Markup("<p>The recipes are the same.</p>")
    if rows:
        content = table("Keys in which the recipes differ", ["key", *map(short, names)], rows, "")
    return Section("Recipes", content)


def _origins(
    names: Sequence[str], records: Sequence[RunRecord], found: Sequence[RunEvaluation | None]
) -> Section:
    rows = []
    for name, record in zip(names, records, strict=True):
        results, e = record.results, record.environment
        packages = e.get("packages", {})
        seconds = f"{results['seconds']:.0f} s" if "seconds" in results else "–"
        version = packages.get("torch", "–") if isinstance(packages, dict) else "–"
        cells = [short(name), record.selected.get("epoch", "–"), results.get("epochs", "–")]
        cells += [results.get("protocol", "–"), record.recipe.training.seed, seconds]
        rows.append([*cells, e.get("device", "–"), version, e.get("started", "–")])
    head = ["run", "selected epoch", "epochs", "protocol", "seed", "training", "device", "torch"]
    notes = [
        f"{name}: {note}"
        for name, record, one in zip(names, records, found, strict=True)
        for note in [*record.results.get("notes", []), *([] if one is None else one.notes)]
    ]
    content = table("How each run was made", [*head, "started"], rows, "")
    items = Markup("").join(Markup("<li>{}</li>").format(note) for note in dict.fromkeys(notes))
    return Section("Origin", content + Markup("<ul>{}</ul>").format(items) if notes else content)
