"""Pictures of a table as SVG, the same bytes from the same numbers."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._common import atomic_write, need
from proximetry.reproduce.records import Record
from proximetry.reproduce.statistics import Sample, sample
from proximetry.reproduce.table import Figure, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that people with colour-blindness can tell apart (Okabe and Ito), and marks besides.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: Any = {
    "svg.hashsalt": "proximetry",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


def need_matplotlib() -> None:
    """Say early, not after hours of training, that pictures cannot be drawn."""
    need("matplotlib", "train", "drawing the pictures of this table")


def picture_names(figure: Figure | None, runs: dict[str, Sequence[Record]]) -> dict[str, str]:
    """File names of a table's pictures, each with what it shows."""
    if figure is None or not any(runs.values()):
        return {}
    if figure.kind == "sweep":
        return {"sweep.svg": f"recall@1 against {figure.label}"}
    names = {"epochs.svg": "recall@1 against epochs"}
    if not why_no_seconds(runs):
        names["seconds.svg"] = "recall@1 against seconds of training"
    return names


def why_no_seconds(runs: dict[str, Sequence[Record]]) -> str:
    """Why seconds of the runs cannot be compared; empty if they can."""
    records = [record for row in runs.values() for record in row]
    at_once = {record.parallel for record in records}
    if None in at_once:
        return "how many runs shared the device was not recorded"
    if at_once - {1}:
        return f"up to {max(n for n in at_once if n is not None)} runs shared the device"
    devices = sorted({record.device for record in records})
    return f"the runs were made on several devices ({', '.join(devices)})" if devices[1:] else ""


def draw(table: Table, runs: dict[str, Sequence[Record]], folder: Path) -> list[str]:
    """Draw what the runs so far allow, and return the names of the files."""
    seconds = f"seconds of training ({_shared(runs, lambda record: record.device)})"
    paint: dict[str, Callable[[Axes], None]] = {
        "sweep.svg": lambda axes: _sweep(axes, table, runs),
        "epochs.svg": lambda axes: _curves(axes, table, runs, "epoch", "epochs"),
        "seconds.svg": lambda axes: _curves(axes, table, runs, "seconds", seconds),
    }
    names = list(picture_names(table.figure, runs))
    for name in names:
        atomic_write(folder / name, _drawn(paint[name]))
    for name in paint.keys() - set(names):  # drawn from other runs, it would be believed
        (folder / name).unlink(missing_ok=True)
    return names


def _drawn(paint: "Callable[[Axes], None]") -> bytes:
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(6.4, 4.0), layout="constrained")
        paint(canvas.add_subplot())
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _sweep(axes: "Axes", table: Table, runs: dict[str, Sequence[Record]]) -> None:
    figure = table.figure
    assert figure is not None
    ticks = [row.x for row in table.rows if row.x is not None]
    ours = [sample(runs.get(row.name, ()), "recall@1") for row in table.rows]
    theirs = [row.published.get("recall@1", math.nan) for row in table.rows]
    axes.errorbar(  # what is missing is not a number, and the line breaks there
        ticks,
        [math.nan if s is None else s.mean for s in ours],
        [0.0 if s is None else s.std or 0.0 for s in ours]
        if any(s and s.std for s in ours)
        else None,
        marker="o",
        color=_COLOURS[0],
        capsize=3,
        label=f"ours ({_shared(runs, lambda record: record.recipe['model']['backbone'])})",
    )
    if not all(map(math.isnan, theirs)):
        axes.plot(
            ticks,
            theirs,
            marker="s",
            linestyle="--",
            color=_COLOURS[1],
            label=f"published ({table.published.backbone})",
        )
    if figure.log:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(figure.label)
    axes.set_ylabel("recall@1 (%)")
    axes.margins(y=0.15)
    handles, labels = axes.get_legend_handles_labels()
    pairs = sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0])  # ours first
    axes.legend(
        [handle for _, handle in pairs],
        [name for name, _ in pairs],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
    )


def _curves(
    axes: "Axes", table: Table, runs: dict[str, Sequence[Record]], key: str, label: str
) -> None:
    for number, row in enumerate(table.rows):
        points = curve(runs.get(row.name, ()), key)
        if points:
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKS[number % len(_MARKS)],
                markevery=max(1, len(points) // 10),
                markersize=5,
                label=row.name,
            )
    axes.set_xlim(left=0)
    if key == "epoch":
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)
    axes.set_ylabel("recall@1 on the test set (%)")
    if axes.lines:
        axes.legend(loc="lower right")


def curve(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """Mean over the runs of where (epoch or seconds) and of recall@1 there, per evaluation."""
    at: dict[int, list[tuple[float, float]]] = {}
    for record in records:
        for line in record.curve:
            if "test" in line and line.get(key) is not None:
                point = (float(line[key]), 100 * float(line["test"]["recall@1"]))
                at.setdefault(line["epoch"], []).append(point)
    whole = [points for _, points in sorted(at.items()) if len(points) == len(records)]
    return [(_mean([x for x, _ in p]), _mean([y for _, y in p])) for p in whole]


def time_to(runs: Sequence[Record], target: float, key: str) -> float | None:
    """Where (epoch or seconds) the mean curve first reaches a recall@1; None if it never does."""
    return next((x for x, recall in curve(runs, key) if recall >= target), None)


def _mean(values: Sequence[float]) -> float:
    return Sample(tuple(values)).mean


def _shared(runs: dict[str, Sequence[Record]], what: Callable[[Record], str]) -> str:
    return ", ".join(sorted({what(record) for records in runs.values() for record in records}))
