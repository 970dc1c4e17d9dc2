"""Figures of a table as deterministic SVG."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from proximetry._util.charts import line_chart
from proximetry._util.files import atomic_write
from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.statistics import sample

_NAMES = ("sweep.svg", "epochs.svg", "seconds.svg")


def figure_names(results: Results) -> dict[str, str]:
    """Return the file names of a table's figures, each with its alternative text."""
    figure = results.table.figure
    if figure is None or not results.runs:
        return {}
    if figure.kind == "sweep":
        return {"sweep.svg": f"recall@1 against {figure.label}"}
    names = {"epochs.svg": "recall@1 against epochs"}
    if not explain_missing_seconds(results):
        names["seconds.svg"] = "recall@1 against seconds of training"
    return names


def explain_missing_seconds(results: Results) -> str:
    """Return why the seconds of the runs are not comparable, or an empty text."""
    parallel = max((record.parallel or 1 for record in results.runs), default=1)
    if parallel > 1:
        return f"up to {parallel} runs shared the device"
    devices = sorted({record.device for record in results.runs})
    return f"the runs used several devices ({', '.join(devices)})" if devices[1:] else ""


def draw(results: Results, folder: Path) -> None:
    """Draw the figures of the runs so far, and remove outdated ones."""
    names = figure_names(results)
    for name in _NAMES:
        if name in names:
            chart = _sweep(results) if name == "sweep.svg" else _curves(results, name)
            atomic_write(folder / name, chart.encode())
        else:
            (folder / name).unlink(missing_ok=True)


def _sweep(results: Results) -> str:
    table, figure, series = results.table, results.table.figure, {}
    assert figure is not None
    backbones = ", ".join(sorted({r.recipe["model"]["backbone"] for r in results.runs}))
    samples = [(row.x or 0.0, sample(results.runs_of[row.name], "recall@1")) for row in table.rows]
    series[f"ours ({backbones})"] = [
        (x, math.nan) if s is None else (x, s.mean, s.std) if s.std else (x, s.mean)
        for x, s in samples
    ]
    published = [(row.x or 0.0, row.published.get("recall@1", math.nan)) for row in table.rows]
    if not all(math.isnan(y) for _, y in published):
        series[f"published ({table.published.backbone})"] = [*published]
    ticks = [x for x, _ in samples]
    return line_chart(
        "recall@1 (%)", series, x_label=figure.label, log=figure.log, x_ticks=ticks, file=True
    )


def _curves(results: Results, name: str) -> str:
    key, label = "epoch", "epochs"
    if name == "seconds.svg":
        key, label = "seconds", f"seconds of training ({results.runs[0].device})"
    series = {row: curve(runs, key) for row, runs in results.runs_of.items()}
    return line_chart("recall@1 on the test set (%)", series, x_label=label, file=True)


def curve(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """Return (epoch or seconds, recall@1) of each evaluation, means over the runs."""
    at: dict[int, list[tuple[float, float]]] = {}
    for record in records:
        for line in record.curve:
            if "test" in line and line.get(key) is not None:
                point = (float(line[key]), 100 * float(line["test"]["recall@1"]))
                at.setdefault(line["epoch"], []).append(point)
    complete = [points for _, points in sorted(at.items()) if len(points) == len(records)]
    return [(fmean(x for x, _ in points), fmean(y for _, y in points)) for points in complete]
