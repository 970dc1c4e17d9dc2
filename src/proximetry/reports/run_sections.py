"""Sections of the report of a run, from its record and the evaluation of its embedder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL.Image import Image

from proximetry._util.charts import bar_chart, format_number, format_percent, line_chart
from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, readable_seconds
from proximetry.data import ImageError, VectorCatalog
from proximetry.metrics import (
    Interval,
    distinct_proxies,
    evaluate_calibration,
    map_embeddings,
    separability,
)
from proximetry.metrics.intervals import INTERVALS
from proximetry.metrics.proxy_separability import SAME_DIRECTION
from proximetry.metrics.scores import COUNTS
from proximetry.reports.html_page import ReportSection, interval, percent, section, short
from proximetry.reports.run_evaluation import MAX_MAP_IMAGES, RunEvaluation
from proximetry.reports.run_proxies import ProxyUse, RunProxies
from proximetry.reports.run_record import RunRecord
from proximetry.reports.thumbnails import COLUMNS, load_thumbnail, sprite
from proximetry.training.evaluator import CODES
from proximetry.training.metrics_table import (
    WITH_DISTRACTORS,
    compared_epochs,
    describe_protocol,
    metric_title,
)

Table = tuple[str, list[str], list[list[Any]]]  # caption, head, rows

MAX_QUERIES = 8
MAX_CLASSES = 10
MAX_CONFUSIONS = 12
SPLITS = {"test": "test set", "held_out": "classes held out of training"}


def metric_names(scores: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the metrics in any of the scores."""
    values = {name: value for one in scores for name, value in one.items() if name not in COUNTS}
    return [name for name, value in values.items() if isinstance(value, (int, float))]


def headline(record: RunRecord, run: RunEvaluation | None) -> list[tuple[str, str, str]]:
    """Return the cards (name, value, note): the main metrics, the saved epoch and the duration."""
    split = next((s for s in SPLITS if s in record.selected), "")
    scores, intervals = record.selected.get(split, {}), {}
    if run is not None:
        scores, intervals, split = run.scores, run.intervals, run.split
    images, untrained = SPLITS.get(split, ""), {}
    if run is None or run.matches_run:
        untrained = record.results.get("untrained", {}).get(split, {})
    else:
        images = f"{short(run.catalog.root.resolve().name)}, split {split}"
    cards = []
    for name in record.metrics:
        if name in scores:
            value, notes = f"{percent(scores[name])} %", [images]
            if name in intervals:
                notes.insert(0, f"95 % interval {interval(intervals[name])}")
            if name in untrained:
                value = f"{percent(untrained[name])} → {value}"
                notes.insert(0, "untrained → trained")
            cards.append((metric_title(name), value, "; ".join(notes)))
    if record.results:
        epochs, seconds = record.results["epochs"], record.results["seconds"]
        title = "Last epoch" if record.selected_epoch is None else "Selected epoch"
        cards.append((title, str(record.selected["epoch"]), f"of {epochs} trained"))
        cards.append(("Training", readable_seconds(seconds), "without evaluation"))
    return cards


def metrics_section(record: RunRecord, run: RunEvaluation | None) -> ReportSection:
    """Return tables of all metrics, with intervals and the protocol."""
    protocol, compared = "", {}
    if record.results:
        protocol = describe_protocol(record.results, record.recipe.evaluation.select_by)
        compared = compared_epochs(record.results)
    tables = []
    for split, title in SPLITS.items():
        columns = {epoch: part[split] for epoch, part in compared.items() if split in part}
        if columns:
            same = run is not None and run.matches_run and run.split == split
            intervals = run.intervals if run and same else {}
            tables.append(_metrics_table(f"Metrics of the {title}", columns, intervals))
    if run is not None and not run.matches_run:
        split = SPLITS.get(run.split, f"split {run.split}")
        caption = f"Metrics on the images of this report: {split}"
        columns = {"embedder of the run": run.scores}
        tables.append(_metrics_table(caption, columns, run.intervals))
    for name, part in record.results.get("extension", {}).get("unseen", {}).items():
        columns = {time: part[time] for time in ("before", "after")}
        tables.append(_metrics_table(f"Extension: unseen images of {name} classes", columns, {}))
    return section(
        "Metrics",
        "metrics.html",
        protocol=f"{protocol[:1].upper()}{protocol[1:]}",
        tables=tables,
        intervals=INTERVALS if run and run.intervals else "",
        evaluated=run is not None,
    )


def _metrics_table(
    caption: str, columns: Mapping[str, Mapping[str, Any]], intervals: Mapping[str, Interval]
) -> Table:
    """Return a table with a row per metric; intervals are those of the last column."""
    all_scores = list(columns.values())
    names = metric_names(all_scores)
    parts = [("", names, all_scores)]
    main = [name for name in names if name in ("recall@1", "map@r")]
    for dim in dict.fromkeys(d for scores in all_scores for d in scores.get("dims", {})):
        dim_scores = [scores.get("dims", {}).get(dim, {}) for scores in all_scores]
        parts.append((f", first {dim} dimensions", main, dim_scores))
    for key, note in ((CODES, ", codes (Hamming)"), ("with_distractors", f" {WITH_DISTRACTORS}")):
        inner = [scores.get(key, {}) for scores in all_scores]
        parts.append((note, metric_names(inner), inner))
    rows = []
    for note, listed, scores in parts:
        for name in listed:
            cells = [percent(one.get(name)) for one in scores]
            bounds = [interval(None if note else intervals.get(name))] * bool(intervals)
            rows.append([f"{metric_title(name)}{note}", *cells, *bounds])
    queries = f"{format_int(int(all_scores[-1]['queries']))} queries"
    if all_scores[-1].get("queries_without_positive"):
        without = format_int(int(all_scores[-1]["queries_without_positive"]))
        queries += f"; {without} queries without another image of their class are excluded"
    head = ["metric", *columns, *["95 % interval"] * bool(intervals)]
    return f"{caption}: {queries}", head, rows


def curves_section(record: RunRecord) -> ReportSection:
    """Return loss, learning rate and metrics by epoch."""
    selected = record.selected_epoch
    charts = [
        line_chart("Loss", {"mean of the epoch": record.curve("loss")}, selected_epoch=selected),
        line_chart("Learning rate", {"backbone": record.curve("lr")}, from_zero=True),
    ]
    for split, title in SPLITS.items():
        series = {metric_title(name): record.curve(split, name) for name in record.metrics}
        for name in record.metrics:
            points = record.curve(split, "with_distractors", name)
            series[f"{metric_title(name)} {WITH_DISTRACTORS}"] = points
        title = f"Metrics, {title}"
        charts.append(
            line_chart(
                title,
                series,
                format_value=format_percent,
                selected_epoch=selected,
                from_zero=True,
            )
        )
    charts = [*filter(None, charts)]
    epochs = _epochs_table(record)
    return section("Curves", "curves.html", charts=charts, epochs=epochs, several_losses=False)


def _epochs_table(record: RunRecord) -> Table:
    titles = {"loss": "loss", "lr": "learning rate", "images_per_second": "images/s"}
    columns = {
        title: {epoch: format_number(value) for epoch, value in record.curve(key)}
        for key, title in titles.items()
    }
    for split in SPLITS:
        for name in record.metrics:
            title = f"{split.replace('_', '-')} {metric_title(name)}"
            columns[title] = {epoch: percent(v) for epoch, v in record.curve(split, name)}
    columns = {title: values for title, values in columns.items() if values}
    rows = [
        [line["epoch"], *(values.get(float(line["epoch"]), "–") for values in columns.values())]
        for line in record.history
    ]
    caption = "Every epoch; metrics in percent, epoch 0 is the untrained embedder"
    return caption, ["epoch", *columns], rows


def image(run: RunEvaluation, row: int) -> dict[str, Any]:
    """Return an image of the catalog for a template."""
    catalog = run.catalog
    file, path, placeholder = catalog.file(row), short(catalog.paths[row]), "not readable"
    thumbnail = load_thumbnail(file)
    if isinstance(catalog, VectorCatalog):
        placeholder = path
    elif thumbnail is None:
        run.unreadable.add(file)
    label = short(catalog.labels[row])
    values = {"file": file, "path": path, "label": label, "thumbnail": thumbnail}
    return {**values, "placeholder": placeholder}


def neighbor_images(
    run: RunEvaluation, query: int, count: int | None = None
) -> list[dict[str, Any]]:
    """Return the nearest images of a query, with their similarity and whether they are correct."""
    lists = run.neighbors[query]
    columns = zip(lists.ids[0], lists.hits[0], lists.similarities[0], strict=True)
    return [
        image(run, int(run.gallery[row])) | {"hit": bool(hit), "similarity": float(similarity)}
        for row, hit, similarity in list(columns)[:count]
        if row >= 0
    ]


def explain_nearest(run: RunEvaluation, query: int) -> Image | None:
    """Return a picture of why the nearest image is near; None if it cannot be explained."""
    nearest = int(run.neighbors[query].ids[0, 0])
    if nearest < 0:
        return None
    try:
        a, b = (run.catalog.file(int(row)) for row in (run.queries[query], run.gallery[nearest]))
        return run.embedder.explain(a, b).image(side=224)
    except (ImageError, UsageError):
        return None


def queries_section(run: RunEvaluation) -> ReportSection:
    """Return the worst and the best queries with their neighbors."""
    scores = run.evaluation.scores[run.ranking_metric]

    def rows(queries: Sequence[int], *, explained: bool = False) -> list[dict[str, Any]]:
        return [
            {
                **image(run, int(run.queries[query])),
                "why": explain_nearest(run, query) if explained else None,
                "score": float(scores[query]),
                "rank": run.first_positive(query),
                "neighbors": neighbor_images(run, query),
            }
            for query in queries
        ]

    similarity = run.neighbors.similarity
    return section(
        "Queries",
        "queries.html",
        measure="cosine" if similarity == "cosine" else f"negative {similarity} distance",
        metric=metric_title(run.ranking_metric),
        worst=rows(run.extremes(MAX_QUERIES, best=False), explained=True),
        best=rows(run.extremes(MAX_QUERIES // 2, best=True)),
    )


def confused_pairs(run: RunEvaluation) -> list[tuple[str, str, int, int]]:
    """Return (class a, class b, errors a → b, errors b → a) of confused classes.

    An error a → b is a query of class a whose nearest image is of class b. Pairs are in descending
    order of both counts together, and a → b is the larger count.
    """
    counts = {(str(a), str(b)): n for a, b, n in run.neighbors.confusions()}
    pairs = []
    for (a, b), forward in counts.items():
        backward = counts.get((b, a), 0)
        if (forward, b) > (backward, a):
            pairs.append((a, b, forward, backward))
    return sorted(pairs, key=lambda pair: (-pair[2] - pair[3], -pair[2], pair[:2]))


def classes_section(run: RunEvaluation) -> ReportSection:
    """Return the most confused classes and the metrics of each class."""
    class_scores = run.evaluation.per_class()
    names = [str(label) for label in class_scores["label"]]
    queries = dict(zip(names, class_scores["queries"].tolist(), strict=True))
    pairs = confused_pairs(run)
    first, ranking = next(iter(run.evaluation.scores)), run.ranking_metric
    metrics, title = list(dict.fromkeys([first, ranking])), metric_title(first)
    rows = [
        (names[i], queries[names[i]], [class_scores[name][i] for name in metrics])
        for i in np.lexsort((class_scores[ranking], class_scores[first]))
    ]
    bins = np.bincount(np.minimum((class_scores[first] * 10).astype(int), 10), minlength=11)
    labels = [*(f"{10 * n}–{10 * n + 10}" for n in range(10)), "100"]
    bars = dict(zip(labels, map(float, bins), strict=True))
    x_label = f"{title}, percent"
    return section(
        "Classes",
        "classes.html",
        pairs=pairs,
        max_pairs=MAX_CONFUSIONS,
        queries=queries,
        examples=[_confused_example(run, a, b) for a, b, *_ in pairs[:6]],
        metric=title,
        chart=bar_chart(f"Classes by {title}", bars, x_label=x_label, y_label="classes"),
        head=["class", "queries", *map(metric_title, metrics)],
        rows=rows,
        max_rows=MAX_CLASSES,
    )


def _confused_example(run: RunEvaluation, a: str, b: str) -> dict[str, Any]:
    """Return the most confident error a → b: a query and its nearest image."""
    lists = run.neighbors
    errors = np.flatnonzero((lists.query_labels == a) & (lists.labels[:, 0] == b))
    query = int(errors[np.argmax(lists.similarities[errors, 0])])
    return {**image(run, int(run.queries[query])), "neighbors": neighbor_images(run, query, 1)}


def map_section(run: RunEvaluation) -> ReportSection:
    """Return the embeddings as points in the plane."""
    rows = run.sample()
    coordinates = map_embeddings(run.vectors[rows], similarity=run.embedder.architecture.similarity)
    catalog, codes = run.catalog, run.catalog.codes[rows]
    side, margin = 640, 14
    pixels = margin + coordinates * (side - 2 * margin)
    groups = []
    for number in np.unique(codes):
        points = [
            (i, *(f"{value:.0f}" for value in pixels[i])) for i in np.flatnonzero(codes == number)
        ]
        # The golden angle gives classes with adjacent names different colors.
        color = f"hsl({int(number) * 137.508 % 360:.0f} 60% {(48, 60, 40)[int(number) % 3]}%)"
        groups.append((short(catalog.class_names[number]), color, points))
    return section(
        "Map",
        "map.html",
        count=f"{format_int(len(rows))} images of {format_int(len(groups))} classes",
        total=format_int(len(catalog)) if len(rows) < len(catalog) else "",
        limit=format_int(MAX_MAP_IMAGES),
        columns=COLUMNS,
        side=side,
        groups=groups,
        radius=5 if len(rows) <= 500 else 4,
        sprite=sprite([catalog.file(int(row)) for row in rows]),
    )


def calibration_section(run: RunEvaluation) -> ReportSection | None:
    """Return the thresholds of a calibrated embedder, and the rates on the evaluated images."""
    calibration = run.embedder.calibration
    if calibration is None:
        return None
    result = None
    with suppress(ValueError):  # too few classes
        result = evaluate_calibration(calibration, run.vectors, run.catalog.labels)
    titles = {
        "Two images, by false accept rate": (calibration.pairs, result and result.pairs),
        f"Nearest image in a gallery, {calibration.gallery_images} images per class, by false "
        "positive identification rate": (calibration.gallery, result and result.gallery),
    }
    tables, chart = [], Markup()
    for title, (points, rates) in titles.items():
        head = ["target", "threshold", "95 % interval", "accepted, %"]
        rows = [
            [
                f"{100 * point.target:g} %",
                f"{point.threshold:.3f}",
                f"{point.low:.3f} – {point.high:.3f}",
                percent(point.true_accepts),
            ]
            for point in points
        ]
        if rates:
            head.append("target measured, %")
            for row, rate in zip(rows, rates, strict=True):
                row.append(f"{100 * rate.false_accepts:.3g}")
        if rows:
            tables.append((title, head, rows))
    if result is not None:
        chart = line_chart(
            "Reliability: share of same pairs by predicted probability",
            {
                "measured": [(100 * p, share) for p, share, _ in result.reliability],
                "ideal": [(0.0, 0.0), (100.0, 1.0)],
            },
            format_value=format_percent,
            x_label="predicted probability, %",
            from_zero=True,
        )
    return section(
        "Calibration",
        "calibration.html",
        calibration=calibration,
        result=result,
        tables=tables,
        chart=chart,
    )


def proxies_section(
    record: RunRecord, proxies: RunProxies | None, use: ProxyUse | None
) -> ReportSection | None:
    """Return the separability of the proxies and the number of proxies in use per class."""
    last = record.results.get("last", {})
    if proxies is None and "proxies" not in last:
        return None
    rows, charts, distinct = [], [], 0.0
    angles, epoch = last.get("proxies", {}), last.get("epoch")
    if proxies is not None:
        separation, distinct_counts = separability(proxies.weight), distinct_proxies(proxies.weight)
        nearest, angles, epoch = separation.per_class, separation.scores(), proxies.epoch
        distinct = distinct_counts.mean()
        degrees = np.degrees(np.arccos(np.clip(nearest, -1, 1)))
        rows = [
            [short(proxies.names[i]), f"{nearest[i]:.3f}", f"{degrees[i]:.1f}°"]
            for i in np.argsort(-nearest, kind="stable")[:MAX_CLASSES]
        ]
        titles = {"Distinct proxies": distinct_counts}
        if use is not None:
            titles["Proxies that are nearest to a training image"] = use.nearest_proxies
        for title, counts in titles.items():
            classes = np.bincount(counts, minlength=proxies.per_class + 1)[1:]
            bars = {str(number): float(count) for number, count in enumerate(classes, 1)}
            charts.append(bar_chart(title, bars, x_label="proxies per class", y_label="classes"))
    return section(
        "Proxies",
        "proxies.html",
        epoch=epoch,
        angles=angles,
        per_class=0 if proxies is None else proxies.per_class,
        distinct=distinct,
        use=use,
        charts=charts,
        same_direction=SAME_DIRECTION,
        rows=rows,
    )


def origin_section(record: RunRecord, notes: Sequence[str]) -> ReportSection:
    """Return recipe, versions, environment, command, seed and warnings."""
    warnings = list(dict.fromkeys([*record.results.get("notes", []), *notes]))
    return section("Origin", "origin.html", record=record, notes=warnings)
