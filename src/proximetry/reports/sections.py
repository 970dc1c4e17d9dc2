"""The parts of a report, each made of a run's record and what its embedder finds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from proximetry._common import shorten, spaced
from proximetry.data import VectorCatalog
from proximetry.metrics.intervals import INTERVALS
from proximetry.metrics.scores import COUNTS
from proximetry.metrics.separation import SAME_DIRECTION
from proximetry.reports.charts import bar_chart, in_percent, line_chart, plain
from proximetry.reports.findings import MAPPED, Findings
from proximetry.reports.markup import (
    Markup,
    Section,
    definitions,
    el,
    join,
    percent,
    table,
)
from proximetry.reports.pictures import COLUMNS, Pictures, sprite
from proximetry.reports.proxies import ProxyFindings, ProxyUse
from proximetry.reports.record import RunRecord
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


def missing_box(reasons: Sequence[str]) -> Markup:
    """What is not in this report, and why."""
    if not reasons:
        return Markup()
    return el(
        "div",
        el("h2", "What is missing here"),
        el("ul", *(el("li", reason) for reason in reasons)),
        class_="box",
        role="note",
    )


def cards(figures: Iterable[tuple[str, str, str]]) -> Markup:
    """Figures in large print: name, value, a line below."""
    return el(
        "div",
        *(
            el(
                "div",
                el("div", name, class_="name"),
                el("div", value, class_="figure"),
                el("div", below, class_="small"),
                class_="card",
            )
            for name, value, below in figures
        ),
        class_="cards",
    )


def headline(record: RunRecord, findings: Findings | None) -> Markup:
    """The main figures of the evaluated images, with those before training if known."""
    split = next((s for s in SPLITS if s in record.selected), "")
    scores, intervals = record.selected.get(split, {}), {}
    if findings is not None:
        scores, intervals, split = findings.scores, findings.intervals, findings.split
    place, untrained = SPLITS.get(split, ""), {}
    if findings is None or findings.agrees:
        untrained = record.results.get("untrained", {}).get(split, {})
    else:
        place = f"{short(findings.catalog.root.resolve().name)}, split {split}"
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
    return cards(shown)


def interval(one: Any) -> str:
    """The bounds of an interval, in percent."""
    return f"{100 * one.low:.1f} to {100 * one.high:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def metrics_section(record: RunRecord, findings: Findings | None) -> Section:
    """Tables of every metric, with intervals and the protocol."""
    parts: list[object] = []
    results = record.results
    if results:
        words = describe_protocol(results, record.recipe.evaluation.select_by)
        parts.append(el("p", f"{words[0].upper()}{words[1:]}. All values are in percent."))
    tables = []
    compared = compared_epochs(results) if results else {}
    for split, words in SPLITS.items():
        columns = {title: part[split] for title, part in compared.items() if split in part}
        if columns:
            same = findings if findings and findings.agrees and findings.split == split else None
            tables.append(_metrics_table(f"Metrics of the {words}", columns, same))
    if findings is not None and not findings.agrees:
        told = SPLITS.get(findings.split, f"split {findings.split}")
        named = {"embedder of the run": findings.scores}
        caption = f"Metrics of the images of this report: {told}"
        tables.append(_metrics_table(caption, named, findings))
    parts.append(el("div", *tables, class_="plots") if tables else el("p", "There are no figures."))
    if findings is not None:
        parts.append(
            el(
                "p",
                f"Interval: {INTERVALS} (1000 samples). It does not cover the variation between "
                "training runs."
                if findings.intervals
                else "No confidence intervals: all queries are of one class.",
                class_="small",
            )
        )
    return Section("Metrics", join(parts))


def _metrics_table(
    caption: str, columns: Mapping[str, Mapping[str, Any]], findings: Findings | None
) -> Markup:
    """One row per metric; with findings the intervals of the last column beside it."""
    names = dict.fromkeys(
        name
        for scores in columns.values()
        for name, value in scores.items()
        if isinstance(value, (int, float)) and name not in COUNTS
    )
    intervals = {} if findings is None else findings.intervals
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
    drawn = [chart for chart in charts if chart]
    if not drawn:
        return Section("Curves", el("p", "No epoch is logged yet."))
    return Section("Curves", join([el("div", *drawn, class_="plots"), _epochs_table(record)]))


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
    whole = table("Every epoch; metrics in percent, epoch 0 is the untrained embedder", head, rows)
    return el("details", el("summary", "The numbers of every epoch"), whole)


def _title(key: str) -> str:
    words = {"lr": "learning rate", "images_per_second": "images/s", "held_out": "held-out"}
    return words.get(key, metric_title(key))


def picture(pictures: Pictures, findings: Findings, row: int, kind: str, *lines: object) -> Markup:
    """An image with lines and its path below it; kind is asked, right or wrong."""
    catalog = findings.catalog
    label, path = catalog.labels[row], catalog.paths[row]
    about = {"asked": "query", "right": "right neighbor", "wrong": "wrong neighbor"}[kind]
    about = f"{about}, class {short(label)}"
    instead = short(path) if isinstance(catalog, VectorCatalog) else None
    name = el("span", short(path), class_="path")
    return el(
        "div",
        el("div", pictures.show(catalog.file(row), about, instead), class_="frame"),
        el("div", *(el("div", line) for line in (*lines, name)), class_="lines"),
        class_=f"picture {kind}",
        title=catalog.file(row),
    )


def query_row(pictures: Pictures, findings: Findings, query: int, told: str) -> Markup:
    """A query and its nearest images, each marked right or wrong."""
    row = int(findings.queries[query])
    asked = picture(
        pictures,
        findings,
        row,
        "asked",
        el("b", short(findings.catalog.labels[row])),
        el("span", told, class_="about"),
    )
    found = neighbors_of(pictures, findings, query)
    return el("div", asked, el("div", *found, class_="found"), class_="query-row")


def neighbors_of(
    pictures: Pictures, findings: Findings, query: int, count: int | None = None
) -> list[Markup]:
    """The nearest images of a query."""
    lists, cells = findings.neighbors, []
    for rank in range(count or lists.k)[: lists.k]:
        if lists.ids[query, rank] < 0:
            break
        row = int(findings.gallery[lists.ids[query, rank]])
        right = bool(lists.hits[query, rank])
        near = f"{lists.similarities[query, rank]:.3f}"
        mark = el("b", "✓ right" if right else "✗ wrong")
        lines = (mark, short(findings.catalog.labels[row]), el("span", near, class_="about"))
        cells.append(picture(pictures, findings, row, "right" if right else "wrong", *lines))
    return cells


def queries_section(findings: Findings, pictures: Pictures) -> Section:
    """The worst and the best queries with their neighbors."""
    title = metric_title(findings.ranking)
    scores = findings.evaluation.scores[findings.ranking]

    def rows(chosen: Sequence[int]) -> Markup:
        shown = []
        for query in chosen:
            told = f"{title} {percent(float(scores[query]))}"
            place = findings.first_positive(query)
            if place is not None and place > 1:
                told += f"; first right image at place {spaced(place)}"
            shown.append(query_row(pictures, findings, query, told))
        return join(shown)

    compared = findings.neighbors.similarity
    near = "cosine" if compared == "cosine" else f"negative {compared} distance"
    return Section(
        "Queries",
        join(
            [
                el(
                    "p",
                    f"Each query beside its nearest images, nearest first, with the {near}. A "
                    "solid frame and ✓ mark images of the query's class, a dashed frame and ✗ "
                    "others.",
                ),
                el("h3", "Worst queries"),
                el(
                    "p",
                    f"The lowest {title}, at most one query per class; of equal ones the most "
                    "confident errors.",
                    class_="small",
                ),
                rows(findings.worst(SHOWN_QUERIES)),
                el("h3", "Best queries"),
                el(
                    "p",
                    f"The highest {title}, at most one query per class; of equal ones those least "
                    "similar to their neighbors.",
                    class_="small",
                ),
                rows(findings.best(SHOWN_QUERIES // 2)),
            ]
        ),
    )


def confused_pairs(findings: Findings) -> list[tuple[str, str, int, int]]:
    """Two classes, and how often the nearest image of the one is of the other, each way.

    Most frequent first, both ways together; the way that is more frequent comes first.
    """
    counts = {(str(a), str(b)): n for a, b, n in findings.neighbors.confusions()}
    pairs = []
    for (one, other), there in counts.items():
        back = counts.get((other, one), 0)
        if (there, other) > (back, one):
            pairs.append((one, other, there, back))
    return sorted(pairs, key=lambda pair: (-pair[2] - pair[3], -pair[2], pair[:2]))


def classes_section(findings: Findings, pictures: Pictures) -> Section:
    """Which classes are taken for each other, and how well each is found."""
    scored = findings.evaluation.per_class()
    names = [str(label) for label in scored["label"]]
    queries = dict(zip(names, scored["queries"].tolist(), strict=True))
    pairs = confused_pairs(findings)

    def often(count: int, name: str) -> str:
        return f"{spaced(count)} of {spaced(queries.get(name, 0))}"

    confused = table(
        f"Queries whose nearest image is of the other class: {min(len(pairs), SHOWN_CONFUSIONS)} "
        f"of {spaced(len(pairs))} pairs of classes",
        ["one class", "other class", "one → other", "other → one"],
        [
            [short(one), el("span", short(other)), often(there, one), often(back, other)]
            for one, other, there, back in pairs[:SHOWN_CONFUSIONS]
        ],
        class_="pairs",
    )
    first, by = next(iter(findings.evaluation.scores)), findings.ranking
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
    parts: list[object] = [
        el("h3", "Most confused classes"),
        el("div", confused, _confused_examples(findings, pictures, pairs[:6]), class_="plots")
        if pairs
        else el("p", "No query has a nearest image of another class."),
        el("h3", f"{metric_title(first)} of each class"),
        el(
            "div",
            bar_chart(
                f"Classes by {metric_title(first)}",
                bars,
                x_label=f"{metric_title(first)}, percent",
                y_label="classes",
            ),
            table(
                f"The {min(SHOWN_CLASSES, len(names))} classes with the lowest "
                f"{metric_title(first)}, in percent",
                head,
                [[short(row[0]), *row[1:]] for row in rows(order[:SHOWN_CLASSES])],
            ),
            class_="plots",
        ),
        el(
            "details",
            el("summary", f"All {spaced(len(names))} classes, the worst first"),
            el(
                "div",
                el("label", "Find a class", for_="find-row"),
                el("input", type="search", id="find-row", data_rows="every-class"),
                class_="choose",
                hidden=True,
            ),
            el("div", table("Every class, in percent", head, rows(order)), id="every-class"),
        ),
    ]
    return Section("Classes", join(parts))


def _confused_examples(
    findings: Findings, pictures: Pictures, pairs: Sequence[tuple[str, str, int, int]]
) -> Markup:
    """For each pair the most confident error: a query and its nearest image."""
    lists = findings.neighbors
    labels, nearest = lists.query_labels, lists.labels[:, 0]
    shown = []
    for one, other, _, _ in pairs:
        there = np.flatnonzero((labels == one) & (nearest == other))
        query = int(there[np.argmax(lists.similarities[there, 0])])
        asked = picture(pictures, findings, int(findings.queries[query]), "asked", short(one))
        shown.append(el("div", asked, *neighbors_of(pictures, findings, query, 1), class_="pair"))
    return el("div", *shown, class_="examples")


def map_section(findings: Findings) -> Section:
    """The embeddings as points on a plane."""
    rows, places = findings.map()
    catalog, codes = findings.catalog, findings.catalog.codes[rows]
    side, margin = 640, 14
    groups = []
    for code in np.unique(codes):
        points = [
            el(
                "circle",
                cx=f"{margin + x * (side - 2 * margin):.0f}",
                cy=f"{margin + y * (side - 2 * margin):.0f}",
                r=5 if len(rows) <= 500 else 4,
                data_i=i,
            )
            for i in np.flatnonzero(codes == code)
            for x, y in [places[i]]
        ]
        name = short(catalog.class_names[code])
        # The golden angle keeps neighbours in the order of names apart.
        color = f"hsl({int(code) * 137.508 % 360:.0f} 60% {(48, 60, 40)[int(code) % 3]}%)"
        groups.append(el("g", el("title", name), *points, fill=color, data_class=name))
    count = f"{spaced(len(rows))} images of {spaced(len(groups))} classes"
    told = f"{count}, placed by t-SNE so that neighbours stay neighbours."
    if len(rows) < len(catalog):
        told = (
            f"{count}: of the {spaced(len(catalog))} that were evaluated a random sample (seed 0), "
            f"{spaced(MAPPED)} images at most, with enough of each class to see whether they lie "
            "together. Placed by t-SNE so that neighbours stay neighbours."
        )
    picture = el(
        "svg",
        *groups,
        viewBox=f"0 0 {side} {side}",
        role="img",
        aria_label=f"Map of {count}; each point is an image, its color the class",
    )
    sheet = el(
        "img",
        src=sprite([catalog.file(int(row)) for row in rows]),
        alt="",
        class_="sprite",
        hidden=True,
    )
    return Section(
        "Map",
        join(
            [
                el(
                    "p",
                    f"{told} What lies beside what means something; distances between groups, and "
                    "how large they are, mean little. The color is the class, and colors repeat: "
                    "point at a dot to see its class and image, click it or type a name to see its "
                    "class alone.",
                ),
                el(
                    "div",
                    el("label", "Show classes named", for_="map-class"),
                    el("input", type="search", id="map-class"),
                    el("span", id="map-told", class_="small", role="status"),
                    class_="choose",
                    hidden=True,
                ),
                el(
                    "div",
                    picture,
                    sheet,
                    class_="map",
                    data_columns=COLUMNS,
                    data_field="map-class",
                    data_told="map-told",
                ),
            ]
        ),
    )


def proxies_section(
    record: RunRecord, found: ProxyFindings | None, use: ProxyUse | None
) -> Section | None:
    """How far apart classes are by their proxies, and how many of K are different and of use."""
    last = record.results.get("last", {})
    if found is None and "proxies" not in last:
        return None
    rivals, epoch = last.get("proxies", {}), last.get("epoch")
    if found is not None:
        rivals, epoch = found.rivals, found.epoch
    parts: list[object] = [
        el(
            "p",
            f"Proxies of epoch {epoch}. The separability of a class is the cosine of its proxy "
            "that is nearest to a proxy of another class, with that one: the lower, the further "
            "apart.",
        ),
        definitions(
            {
                "Separability, mean": f"{rivals['separability']:.3f}",
                "Angle to the nearest class": f"{rivals['mean_angle']:.1f}° on average, "
                f"{rivals['smallest_angle']:.1f}° at least",
            }
        ),
    ]
    if found is not None:
        parts += _proxies_of_classes(found, use)
    return Section("Proxies", join(parts))


def _proxies_of_classes(found: ProxyFindings, use: ProxyUse | None) -> list[object]:
    per_class, order = found.per_class, np.argsort(-found.nearest, kind="stable")[:SHOWN_CLASSES]
    angles = np.degrees(np.arccos(np.clip(found.nearest, -1, 1)))
    closest = table(
        "Training classes that are nearest to another",
        ["class", "separability", "angle"],
        [[short(found.names[i]), f"{found.nearest[i]:.3f}", f"{angles[i]:.1f}°"] for i in order],
    )
    if per_class == 1:
        return [closest]
    counts = np.bincount(found.distinct, minlength=per_class + 1)[1:]
    parts: list[object] = [el("h3", f"How many of the {per_class} proxies of a class are of use")]
    words = (
        f"Distinct are proxies whose directions differ: two of a class with a cosine of "
        f"{SAME_DIRECTION} or more, that is within 18°, count as one, and so do those that are "
        f"joined through others. On average {found.distinct.mean():.2f} of {per_class} are "
        "distinct."
    )
    charts = [_count_chart("Distinct proxies", counts)]
    if use is not None:
        words += (
            f" A distinct proxy need not be of use: of {spaced(use.images)} training images of "
            f"{spaced(len(use.chosen))} of {spaced(use.classes)} classes, those of a class are "
            f"nearest to {use.chosen.mean():.2f} of its proxies on average. Counted by how evenly "
            "they divide themselves among them, the effective number is "
            f"{use.effective.mean():.2f} (the exponential of the entropy: 1 if all are nearest to "
            f"one proxy, {per_class} if they divide themselves evenly)."
        )
        used = np.bincount(use.chosen, minlength=per_class + 1)[1:]
        charts.append(_count_chart("Proxies that are nearest to a training image", used))
    return [*parts, el("p", words), el("div", *charts, class_="plots"), closest]


def _count_chart(title: str, counts: npt.NDArray[Any]) -> Markup:
    bars = {str(number): float(count) for number, count in enumerate(counts, 1)}
    return bar_chart(title, bars, x_label="proxies per class", y_label="classes")


def origin_section(record: RunRecord, notes: Sequence[str]) -> Section:
    """Recipe, versions, environment, command, seeds, notes."""
    e, results = record.environment, record.results
    facts: dict[str, object] = {"Folder": record.folder.path}
    if "command" in e:
        facts["Command"] = el("code", e["command"])
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
    told = list(dict.fromkeys([*results.get("notes", []), *notes]))
    parts = [
        definitions(facts),
        el("h3", "Warnings"),
        el("ul", *(el("li", note) for note in told)) if told else el("p", "None."),
        el("details", el("summary", "Recipe, as resolved"), el("pre", record.recipe.to_yaml())),
    ]
    return Section("Origin", join(parts))
