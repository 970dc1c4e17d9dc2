"""Runs side by side: figures, curves, recipes, and the queries that one finds and another not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proximetry._common import shown, spaced
from proximetry.metrics import Interval
from proximetry.metrics.intervals import INTERVALS
from proximetry.metrics.scores import COUNTS
from proximetry.reports.charts import in_percent, line_chart
from proximetry.reports.findings import Findings
from proximetry.reports.markup import Markup, Section, el, join, percent, table
from proximetry.reports.pictures import Pictures
from proximetry.reports.record import RunRecord
from proximetry.reports.sections import SPLITS, interval, neighbors_of, picture, short
from proximetry.training.recipe import flatten
from proximetry.training.reporting import metric_title

SHOWN_CHANGES = 8
_NEIGHBORS = 4


def comparison_sections(
    names: Sequence[str], records: Sequence[RunRecord], found: Sequence[Findings | None]
) -> list[Section]:
    """The parts of a comparison."""
    sections = [_metrics(names, records, found), _curves(names, records)]
    queries = _queries(names, found)
    if queries is not None:
        sections.append(queries)
    return [*sections, _recipes(names, records), _origins(names, records, found)]


def _metrics(
    names: Sequence[str], records: Sequence[RunRecord], found: Sequence[Findings | None]
) -> Section:
    parts: list[object] = []
    first = found[0]
    if first is not None and all(one is not None for one in found):
        # The same images for all, or figures of different things.
        if all(one is not None and first.compares_like(one) for one in found):
            parts.append(_paired_table(names, [one for one in found if one is not None]))
        else:
            images = [
                f"{name}: {spaced(len(one.catalog))} images of "
                f"{spaced(len(one.catalog.class_names))} classes in {one.catalog.root}"
                for name, one in zip(names, found, strict=True)
                if one is not None
            ]
            parts.append(
                el(
                    "div",
                    el("h2", "These runs were not evaluated on the same images"),
                    el(
                        "p",
                        "So their figures stand side by side, but their differences mean nothing, "
                        "and queries cannot be compared. To compare them, name one set of images "
                        "with --data.",
                    ),
                    el("ul", *(el("li", one) for one in images)),
                    class_="box",
                    role="note",
                )
            )
            scores = [one.scores for one in found if one is not None]
            bounds = [one.intervals for one in found if one is not None]
            parts.append(
                _plain_table("Metrics of each run on its own images", names, scores, bounds)
            )
    else:
        for split, words in SPLITS.items():
            scores = [record.selected.get(split, {}) for record in records]
            if any(scores):
                caption = f"Metrics of the selected epochs as each run reported them, {words}"
                parts.append(_plain_table(caption, names, scores, [{} for _ in scores]))
        parts.append(el("p", "Without the images of all runs, differences cannot be tested."))
    return Section("Metrics", join(parts))


def _metric_names(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(
        dict.fromkeys(
            name
            for one in scores
            for name, value in one.items()
            if isinstance(value, (int, float)) and name not in COUNTS
        )
    )


def _plain_table(
    caption: str,
    names: Sequence[str],
    scores: Sequence[Mapping[str, Any]],
    bounds: Sequence[Mapping[str, Interval]],
) -> Markup:
    rows = []
    for metric in _metric_names(scores):
        cells = (_figure(metric, *both) for both in zip(scores, bounds, strict=True))
        rows.append([metric_title(metric), *cells])
    return table(f"{caption}, in percent", ["metric", *map(short, names)], rows)


def _figure(metric: str, scores: Mapping[str, Any], bounds: Mapping[str, Interval]) -> Markup:
    below: object = ""
    if metric in bounds:
        below = el("span", interval(bounds[metric]), class_="range")
    return join([percent(scores.get(metric)), below])


def _paired_table(names: Sequence[str], found: Sequence[Findings]) -> Markup:
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
    for metric in _metric_names([one.scores for one in found]):
        row: list[object] = [
            metric_title(metric),
            _figure(metric, first.scores, first.intervals),
        ]
        for one, difference in zip(others, differences, strict=True):
            row.append(_figure(metric, one.scores, one.intervals))
            row.append(_verdict(difference[metric]) if metric in difference else "–")
        rows.append(row)
    counted = spaced(int(first.scores["queries"]))
    told = table(f"Metrics in percent, {counted} queries, the same for all runs", head, rows)
    return join(
        [
            told,
            el(
                "p",
                f"Small figures below a metric: {INTERVALS}. Below a difference: interval of the "
                "differences paired by class, with a Bonferroni correction for the "
                f"{comparisons} comparisons of this table, so that all of them hold together at "
                "95 %. A difference is better or worse if its interval excludes 0. This compares "
                "embedders, not recipes: another seed trains another embedder.",
                class_="small",
            ),
        ]
    )


def _verdict(one: Interval) -> Markup:
    kind, word = None, "no significant difference"
    if one.low > 0:
        kind, word = "better", "better"
    elif one.high < 0:
        kind, word = "worse", "worse"
    bounds = f"{_signed(one.low)} to {_signed(one.high)}"
    return join(
        [
            el("span", f"{_signed(one.mean)} {word}", class_=kind),
            el("span", bounds, class_="range"),
        ]
    )


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _curves(names: Sequence[str], records: Sequence[RunRecord]) -> Section:
    def over_each_other(*keys: str) -> dict[str, list[tuple[float, float]]]:
        return {
            short(name): record.curve(*keys) for name, record in zip(names, records, strict=True)
        }

    # Other losses, and the same with other settings, are not of one scale.
    one_loss = len({shown(record.recipe.loss) for record in records}) == 1
    charts = [line_chart("Loss", over_each_other("loss"))] if one_loss else []
    charts.append(line_chart("Learning rate", over_each_other("lr"), from_zero=True))
    for split, words in SPLITS.items():
        for metric in dict.fromkeys(name for record in records for name in record.metrics):
            title = f"{metric_title(metric)}, {words}"
            series = over_each_other(split, metric)
            charts.append(line_chart(title, series, shown=in_percent, from_zero=True))
    drawn = [chart for chart in charts if chart]
    parts: list[object] = [el("div", *drawn, class_="plots")]
    if not drawn:
        parts = [el("p", "No epoch is logged yet.")]
    elif not one_loss:
        told = "The losses are different functions: their values are not comparable, nor drawn."
        parts.append(el("p", told, class_="small"))
    return Section("Curves", join(parts))


def _queries(names: Sequence[str], found: Sequence[Findings | None]) -> Section | None:
    """Queries whose nearest image is right in one run and wrong in the other, by run."""
    first, *others = found
    if first is None:
        return None
    pictures, parts = Pictures(), []
    for name, other in zip(names[1:], others, strict=True):
        if other is None or not first.compares_like(other):
            continue
        mine, theirs = first.neighbors.hits[:, 0], other.neighbors.hits[:, 0]
        scored = first.evaluation.scored
        gained = np.flatnonzero(theirs & ~mine & scored)
        lost = np.flatnonzero(mine & ~theirs & scored)
        parts.append(
            el(
                "p",
                f"The nearest image is right in both runs for {spaced(int((mine & theirs).sum()))} "
                f"queries, in {names[0]} alone for {spaced(len(lost))}, in {name} alone for "
                f"{spaced(len(gained))}, in neither for "
                f"{spaced(int((scored & ~mine & ~theirs).sum()))}.",
            )
        )
        for title, chosen in (
            (f"{name} finds, {names[0]} does not", gained),
            (f"{names[0]} finds, {name} does not", lost),
        ):
            parts.append(el("h3", title))
            rows = [
                _both(pictures, (names[0], first), (name, other), int(query))
                for query in _widest(first, other, chosen)
            ]
            parts.append(join(rows) if rows else el("p", "None."))
    return Section("Queries", join(parts)) if parts else None


def _widest(first: Findings, other: Findings, queries: Any) -> list[int]:
    """Of these queries those whose scores differ most, at most one of a class."""
    mine, theirs = first.evaluation.scores, other.evaluation.scores
    ranking = next((name for name in (first.ranking, *mine) if name in theirs), None)
    # Runs may have no score in common; then queries come in the order of the catalogue.
    apart = np.zeros(len(first.queries)) if ranking is None else theirs[ranking] - mine[ranking]
    chosen: dict[int, int] = {}
    for query in queries[np.argsort(-np.abs(apart[queries]), kind="stable")]:
        chosen.setdefault(int(first.evaluation.query_codes[query]), int(query))
    return list(chosen.values())[:SHOWN_CHANGES]


def _both(
    pictures: Pictures, one: tuple[str, Findings], other: tuple[str, Findings], query: int
) -> Markup:
    findings = one[1]
    row = int(findings.queries[query])
    label = el("b", short(findings.catalog.labels[row]))
    lists = [
        el(
            "div",
            el("div", short(name), class_="small"),
            el("div", *neighbors_of(pictures, found, query, _NEIGHBORS), class_="found"),
        )
        for name, found in (one, other)
    ]
    asked = picture(pictures, findings, row, "asked", label)
    return el("div", asked, el("div", *lists, class_="sides"), class_="query-row")


def _recipes(names: Sequence[str], records: Sequence[RunRecord]) -> Section:
    flat = [flatten(record.recipe.to_dict()) for record in records]
    rows = [
        [key, *(el("code", shown(values.get(key))) for values in flat)]
        for key in dict.fromkeys(key for values in flat for key in values)
        if any(values.get(key) != flat[0].get(key) for values in flat)
    ]
    told: object = el("p", "The recipes are the same.")
    if rows:
        told = table(
            "Keys in which the recipes differ", ["key", *map(short, names)], rows, numbers=False
        )
    return Section("Recipes", join([told]))


def _origins(
    names: Sequence[str], records: Sequence[RunRecord], found: Sequence[Findings | None]
) -> Section:
    rows = []
    for name, record in zip(names, records, strict=True):
        results, packages = record.results, record.environment.get("packages", {})
        rows.append(
            [
                short(name),
                record.selected.get("epoch", "–"),
                results.get("epochs", "–"),
                results.get("protocol", "–"),
                record.recipe.training.seed,
                f"{results['seconds']:.0f} s" if "seconds" in results else "–",
                record.environment.get("device", "–"),
                packages.get("torch", "–") if isinstance(packages, dict) else "–",
                record.environment.get("started", "–"),
            ]
        )
    head = ["run", "selected epoch", "epochs", "protocol", "seed", "training", "device", "torch"]
    notes = [
        f"{name}: {note}"
        for name, record, one in zip(names, records, found, strict=True)
        for note in [*record.results.get("notes", []), *([] if one is None else one.notes)]
    ]
    parts: list[object] = [table("How each run was made", [*head, "started"], rows, numbers=False)]
    if notes:
        parts.append(el("ul", *(el("li", note) for note in dict.fromkeys(notes))))
    return Section("Origin", join(parts))
