"""Sections of the report of a run, from its record and the evaluation of its embedder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from proximetry._util.charts import bar_chart, in_percent, line_chart, plain
from proximetry._util.errors import shorten, spaced
from proximetry.data import VectorCatalog
from proximetry.metrics.intervals import INTERVALS
from proximetry.metrics.proxy_separability import SAME_DIRECTION
from proximetry.metrics.scores import COUNTS
from proximetry.reports.evaluation import MAPPED, RunEvaluation
from proximetry.reports.page import Section, bold, code, percent, render, soft, table
from proximetry.reports.proxies import ProxyFindings, ProxyUse
from proximetry.reports.record import RunRecord
from proximetry.reports.thumbnails import COLUMNS, data_uri, load_thumbnail, sprite
from proximetry.training.evaluator import CODES
from proximetry.training.reporting import (
    AMONG_TRAIN,
    compared_epochs,
    describe_protocol,
    metric_title,
)

SHOWN_QUERIES = 8
SHOWN_CLASSES = 10
SHOWN_CONFUSIONS = 12
_LONGEST_NAME = 60
SPLITS = {"test": "test set", "held_out": "classes held out of training"}


def short(name: object) -> str:
    """A name of a class or a file that does not fill the page."""
    return shorten(str(name), _LONGEST_NAME)


def headline(record: RunRecord, run: RunEvaluation | None) -> list[tuple[str, str, str]]:
    """Return the main figures as (name, value, note), with those before training if known."""
    split = next((s for s in SPLITS if s in record.selected), "")
    scores, intervals = record.selected.get(split, {}), {}
    if run is not None:
        scores, intervals, split = run.scores, run.intervals, run.split
    place, untrained = SPLITS.get(split, ""), {}
    if run is None or run.agrees:
        untrained = record.results.get("untrained", {}).get(split, {})
    else:
        place = f"{short(run.catalog.root.resolve().name)}, split {split}"
    shown = []
    for name in record.metrics:
        if name in scores:
            value, below = f"{percent(scores[name])} %", [place]
            if name in intervals:
                below.insert(0, f"95 % interval {interval(intervals[name])}")
            if name in untrained:
                value = f"{percent(untrained[name])} → {value}"
                below.insert(0, "untrained → trained")
            shown.append((metric_title(name), value, "; ".join(below)))
    if record.results:
        epochs = record.results["epochs"]
        shown.append(("Selected epoch", str(record.selected["epoch"]), f"of {epochs} trained"))
        shown.append(("Training", _duration(record.results["seconds"]), "evaluations not counted"))
    return shown


def interval(one: Any) -> str:
    """The bounds of an interval, in percent."""
    return f"{100 * one.low:.1f} to {100 * one.high:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def metrics_section(record: RunRecord, run: RunEvaluation | None) -> Section:
    """Return tables of all metrics, with intervals and the protocol."""
    protocol, compared = "", {}
    if record.results:
        protocol = describe_protocol(record.results, record.recipe.evaluation.select_by)
        protocol = f"{protocol[0].upper()}{protocol[1:]}"
        compared = compared_epochs(record.results)
    tables = []
    for split, words in SPLITS.items():
        columns = {title: part[split] for title, part in compared.items() if split in part}
        if columns:
            same = run if run and run.agrees and run.split == split else None
            tables.append(_metrics_table(f"Metrics of the {words}", columns, same))
    if run is not None and not run.agrees:
        split = SPLITS.get(run.split, f"split {run.split}")
        columns = {"embedder of the run": run.scores}
        caption = f"Metrics of the images of this report: {split}"
        tables.append(_metrics_table(caption, columns, run))
    content = render(
        "metrics.html",
        protocol=protocol,
        tables=tables,
        intervals=INTERVALS if run and run.intervals else "",
        evaluated=run is not None,
    )
    return Section("Metrics", content)


def _metrics_table(
    caption: str, columns: Mapping[str, Mapping[str, Any]], run: RunEvaluation | None
) -> Markup:
    """One row per metric; with run the intervals of the last column beside it."""
    names = dict.fromkeys(
        name
        for scores in columns.values()
        for name, value in scores.items()
        if isinstance(value, (int, float)) and name not in COUNTS
    )
    intervals = {} if run is None else run.intervals
    rows = []
    for name in names:
        cells: list[object] = [percent(scores.get(name)) for scores in columns.values()]
        if intervals:
            cells.append(interval(intervals[name]) if name in intervals else "–")
        rows.append([metric_title(name), *cells])
    for dim in dict.fromkeys(d for scores in columns.values() for d in scores.get("dims", {})):
        for name in [n for n in names if n in ("recall@1", "map@r")]:
            fewer = (scores.get("dims", {}).get(dim, {}).get(name) for scores in columns.values())
            row = [f"{metric_title(name)}, first {dim} dimensions", *map(percent, fewer)]
            rows.append([*row, *["–"] * bool(intervals)])
    for key, words in ((CODES, ", codes (Hamming)"), ("among_train", f" {AMONG_TRAIN}")):
        found = [scores.get(key, {}) for scores in columns.values()]
        for name in dict.fromkeys(n for one in found for n in one if n not in COUNTS):
            row = [f"{metric_title(name)}{words}", *(percent(one.get(name)) for one in found)]
            rows.append([*row, *["–"] * bool(intervals)])
    last = list(columns.values())[-1]
    counted = f"{spaced(int(last['queries']))} queries"
    if last.get("queries_without_positive"):
        without = spaced(int(last["queries_without_positive"]))
        counted += f"; {without} more have no other image of their class and do not count"
    head = ["metric", *columns, *["95 % interval"] * bool(intervals)]
    return table(f"{caption}: {counted}", head, rows)


def curves_section(record: RunRecord) -> Section:
    """Loss, learning rate and metrics by epoch."""
    selected = record.selected.get("epoch")
    charts = [
        line_chart("Loss", {"mean of the epoch": record.curve("loss")}, marked=selected),
        line_chart("Learning rate", {"backbone": record.curve("lr")}, from_zero=True),
    ]
    for split, words in SPLITS.items():
        series = {metric_title(name): record.curve(split, name) for name in record.metrics}
        for name in record.metrics:
            among = record.curve(split, "among_train", name)
            series[f"{metric_title(name)} {AMONG_TRAIN}"] = among
        title = f"Metrics, {words}"
        charts.append(line_chart(title, series, shown=in_percent, marked=selected, from_zero=True))
    content = render(
        "curves.html",
        charts=[*filter(None, charts)],
        epochs=_epochs_table(record),
        several_losses=0,
    )
    return Section("Curves", content)


def _epochs_table(record: RunRecord) -> Markup:
    keys: list[tuple[str, ...]] = [("loss",), ("lr",), ("images_per_second",)]
    keys += [(split, name) for split in SPLITS for name in record.metrics]
    values = {key: dict(record.curve(*key)) for key in keys}
    keys = [key for key in keys if values[key]]
    head = ["epoch", *(" ".join((*map(_title, key),)) for key in keys)]
    rows = []
    for line in record.history:
        cells = []
        for key in keys:
            value = values[key].get(float(line["epoch"]))
            cells.append("–" if value is None else percent(value) if len(key) > 1 else plain(value))
        rows.append([line["epoch"], *cells])
    return table("Every epoch; metrics in percent, epoch 0 is the untrained embedder", head, rows)


def _title(key: str) -> str:
    words = {"lr": "learning rate", "images_per_second": "images/s", "held_out": "held-out"}
    return words.get(key, metric_title(key))


def image(run: RunEvaluation, row: int, kind: str, unreadable: list[str], *lines: object) -> Markup:
    """Return an image with lines and its path below it; kind is asked, right or wrong."""
    catalog = run.catalog
    file, path = catalog.file(row), short(catalog.paths[row])
    role = {"asked": "query", "right": "right neighbor", "wrong": "wrong neighbor"}[kind]
    small, instead = load_thumbnail(file), "not readable"
    if isinstance(catalog, VectorCatalog):
        instead = path
    elif small is None:
        unreadable.append(file)
    return render(
        "image.html",
        kind=kind,
        file=file,
        path=path,
        alt=f"{role}, class {short(catalog.labels[row])}",
        instead=instead,
        lines=lines,
        src=small and data_uri(small),
        width=small and small.width,
        height=small and small.height,
    )


def neighbor_images(
    run: RunEvaluation, query: int, unreadable: list[str], count: int | None = None
) -> list[Markup]:
    """Return the nearest images of a query, each marked right or wrong."""
    lists, cells = run.neighbors, []
    for rank in range(count or lists.k)[: lists.k]:
        if lists.ids[query, rank] < 0:
            break
        row = int(run.gallery[lists.ids[query, rank]])
        kind, mark = ("right", "✓ right") if lists.hits[query, rank] else ("wrong", "✗ wrong")
        near = soft(f"{lists.similarities[query, rank]:.3f}")
        label = short(run.catalog.labels[row])
        cells.append(image(run, row, kind, unreadable, bold(mark), label, near))
    return cells


def queries_section(run: RunEvaluation, unreadable: list[str]) -> Section:
    """Return the worst and the best queries with their neighbors."""
    title = metric_title(run.ranking)
    scores = run.evaluation.scores[run.ranking]

    def rows(queries: Sequence[int]) -> list[tuple[Markup, list[Markup]]]:
        shown = []
        for query in queries:
            about, rank = f"{title} {percent(float(scores[query]))}", run.first_positive(query)
            if rank is not None and rank > 1:
                about += f"; first right image at rank {spaced(rank)}"
            row = int(run.queries[query])
            label = bold(short(run.catalog.labels[row]))
            cell = image(run, row, "asked", unreadable, label, soft(about))
            shown.append((cell, neighbor_images(run, query, unreadable)))
        return shown

    similarity = run.neighbors.similarity
    content = render(
        "queries.html",
        measure="cosine" if similarity == "cosine" else f"negative {similarity} distance",
        metric=title,
        worst=rows(run.worst(SHOWN_QUERIES)),
        best=rows(run.best(SHOWN_QUERIES // 2)),
    )
    return Section("Queries", content)


def confused_pairs(run: RunEvaluation) -> list[tuple[str, str, int, int]]:
    """Two classes, and how often the nearest image of the one is of the other, each way.

    Most frequent first, both ways together; the way that is more frequent comes first.
    """
    counts = {(str(a), str(b)): n for a, b, n in run.neighbors.confusions()}
    pairs = []
    for (one, other), there in counts.items():
        back = counts.get((other, one), 0)
        if (there, other) > (back, one):
            pairs.append((one, other, there, back))
    return sorted(pairs, key=lambda pair: (-pair[2] - pair[3], -pair[2], pair[:2]))


def classes_section(run: RunEvaluation, unreadable: list[str]) -> Section:
    """Return which classes are confused, and the metrics of each class."""
    scored = run.evaluation.per_class()
    names = [str(label) for label in scored["label"]]
    queries = dict(zip(names, scored["queries"].tolist(), strict=True))
    pairs = confused_pairs(run)

    def often(count: int, name: str) -> str:
        return f"{spaced(count)} of {spaced(queries.get(name, 0))}"

    confused = pairs and table(
        f"Queries whose nearest image is of the other class: {min(len(pairs), SHOWN_CONFUSIONS)} "
        f"of {spaced(len(pairs))} pairs of classes",
        ["one class", "other class", "one → other", "other → one"],
        [
            [short(one), short(other), often(there, one), often(back, other)]
            for one, other, there, back in pairs[:SHOWN_CONFUSIONS]
        ],
        "numbers pairs",
    )
    first, by = next(iter(run.evaluation.scores)), run.ranking
    order = np.lexsort((scored[by], scored[first]))
    shown = list(dict.fromkeys([first, by]))
    head = ["class", "queries", *map(metric_title, shown)]

    def rows(chosen: Iterable[int]) -> list[list[object]]:
        return [
            [names[i], spaced(queries[names[i]]), *(percent(float(scored[m][i])) for m in shown)]
            for i in chosen
        ]

    bins = np.minimum((scored[first] * 10).astype(int), 10)
    bars = {f"{10 * n}–{10 * n + 10}" if n < 10 else "100": 0.0 for n in range(11)}
    for name, count in zip(bars, np.bincount(bins, minlength=11), strict=True):
        bars[name] = float(count)
    chart = bar_chart(
        f"Classes by {metric_title(first)}",
        bars,
        x_label=f"{metric_title(first)}, percent",
        y_label="classes",
    )
    lowest = table(
        f"The {min(SHOWN_CLASSES, len(names))} classes with the lowest {metric_title(first)}, "
        "in percent",
        head,
        [[short(row[0]), *row[1:]] for row in rows(order[:SHOWN_CLASSES])],
    )
    content = render(
        "classes.html",
        confused=confused,
        examples=_confused_examples(run, unreadable, pairs[:6]),
        metric=metric_title(first),
        chart=chart,
        lowest=lowest,
        count=spaced(len(names)),
        every=table("Every class, in percent", head, rows(order)),
    )
    return Section("Classes", content)


def _confused_examples(
    run: RunEvaluation, unreadable: list[str], pairs: Sequence[tuple[str, str, int, int]]
) -> list[list[Markup]]:
    """Return the most confident error of each pair: a query and its nearest image."""
    lists = run.neighbors
    labels, nearest = lists.query_labels, lists.labels[:, 0]
    shown = []
    for one, other, _, _ in pairs:
        there = np.flatnonzero((labels == one) & (nearest == other))
        query = int(there[np.argmax(lists.similarities[there, 0])])
        cell = image(run, int(run.queries[query]), "asked", unreadable, short(one))
        shown.append([cell, *neighbor_images(run, query, unreadable, 1)])
    return shown


def map_section(run: RunEvaluation) -> Section:
    """Return the embeddings as points on a plane."""
    rows, places = run.map()
    catalog, codes = run.catalog, run.catalog.codes[rows]
    side, margin = 640, 14
    placed = margin + places * (side - 2 * margin)
    groups = []
    for number in np.unique(codes):
        points = [
            (i, *(f"{value:.0f}" for value in placed[i])) for i in np.flatnonzero(codes == number)
        ]
        # The golden angle gives neighbors in the order of names different colors.
        color = f"hsl({int(number) * 137.508 % 360:.0f} 60% {(48, 60, 40)[int(number) % 3]}%)"
        groups.append((short(catalog.class_names[number]), color, points))
    content = render(
        "map.html",
        count=f"{spaced(len(rows))} images of {spaced(len(groups))} classes",
        total=spaced(len(catalog)) if len(rows) < len(catalog) else "",
        limit=spaced(MAPPED),
        columns=COLUMNS,
        side=side,
        groups=groups,
        radius=5 if len(rows) <= 500 else 4,
        sprite=sprite([catalog.file(int(row)) for row in rows]),
    )
    return Section("Map", content)


def proxies_section(
    record: RunRecord, found: ProxyFindings | None, use: ProxyUse | None
) -> Section | None:
    """Return how far apart classes are by their proxies, and how many proxies are of use."""
    last = record.results.get("last", {})
    if found is None and "proxies" not in last:
        return None
    angles, epoch = last.get("proxies", {}), last.get("epoch")
    closest, charts = None, []
    if found is not None:
        angles, epoch = found.rivals, found.epoch
        closest = _closest_classes(found)
        charts.append(_count_chart("Distinct proxies", found.distinct, found.per_class))
    if found is not None and use is not None:
        title = "Proxies that are nearest to a training image"
        charts.append(_count_chart(title, use.chosen, found.per_class))
    content = render(
        "proxies.html",
        epoch=epoch,
        angles=angles,
        found=found,
        use=use,
        same_direction=SAME_DIRECTION,
        charts=charts,
        closest=closest,
    )
    return Section("Proxies", content)


def _closest_classes(found: ProxyFindings) -> Markup:
    degrees = np.degrees(np.arccos(np.clip(found.nearest, -1, 1)))
    return table(
        "Training classes that are nearest to another",
        ["class", "separability", "angle"],
        [
            [short(found.names[i]), f"{found.nearest[i]:.3f}", f"{degrees[i]:.1f}°"]
            for i in np.argsort(-found.nearest, kind="stable")[:SHOWN_CLASSES]
        ],
    )


def _count_chart(title: str, counts: npt.NDArray[Any], per_class: int) -> Markup:
    classes = np.bincount(counts, minlength=per_class + 1)[1:]
    bars = {str(number): float(count) for number, count in enumerate(classes, 1)}
    return bar_chart(title, bars, x_label="proxies per class", y_label="classes")


def origin_section(record: RunRecord, notes: Sequence[str]) -> Section:
    """Recipe, versions, environment, command, seeds, notes."""
    e, results = record.environment, record.results
    facts: dict[str, object] = {"Folder": record.folder.path}
    if "command" in e:
        facts["Command"] = code(e["command"])
    if "started" in e:
        facts["Started"] = e["started"]
    facts["Seed"] = record.recipe.training.seed
    if isinstance(e.get("packages"), dict):
        packages = [f"{name} {version}" for name, version in e["packages"].items()]
        facts["Versions"] = ", ".join([f"Python {e.get('python', '?')}", *packages])
    for key, name in (("platform", "Platform"), ("device", "Device"), ("cuda", "CUDA")):
        if e.get(key):
            facts[name] = e[key]
    if isinstance(e.get("git"), dict):
        changed = " with changes that are not committed" if e["git"].get("changed") else ""
        facts["Commit"] = f"{e['git'].get('commit')}{changed}"
    if isinstance(results.get("weights"), dict):
        weights = results["weights"]
        facts["Weights at the start"] = f"{weights.get('source')}: {weights.get('origin')}"
    if results.get("stopped_early"):
        facts["Ended"] = results["stopped_early"]
    if results.get("drops"):
        facts["Learning rate dropped after"] = ", ".join(map(str, results["drops"]))
    content = render(
        "origin.html",
        facts=facts,
        notes=list(dict.fromkeys([*results.get("notes", []), *notes])),
        recipe=record.recipe.to_yaml(),
    )
    return Section("Origin", content)
