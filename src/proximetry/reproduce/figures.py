"""Pictures of a table as SVG, the same bytes from the same numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from proximetry._util.figures import draw_figure
from proximetry._util.files import atomic_write
from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.statistics import sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that people with colour-blindness can tell apart (Okabe and Ito), and marks besides.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")


def picture_names(results: Results) -> dict[str, str]:
    """File names of a table's pictures, each with what it shows."""
    figure = results.table.figure
    if figure is None or not results.runs:
        return {}
    if figure.kind == "sweep":
        return {"sweep.svg": f"recall@1 against {figure.label}"}
    names = {"epochs.svg": "recall@1 against epochs"}
    if not why_no_seconds(results):
        names["seconds.svg"] = "recall@1 against seconds of training"
    return names


def why_no_seconds(results: Results) -> str:
    """Why seconds of the runs cannot be compared; empty if they can."""
    most = max((record.parallel or 1 for record in results.runs), default=1)
    if most > 1:
        return f"up to {most} runs shared the device"
    devices = sorted({record.device for record in results.runs})
    return f"the runs were made on several devices ({', '.join(devices)})" if devices[1:] else ""


def draw(results: Results, folder: Path) -> None:
    """Draw what the runs so far allow, and remove what they do not."""
    seconds = f"seconds of training ({_shared(record.device for record in results.runs)})"
    paint: dict[str, Callable[[Axes], None]] = {
        "sweep.svg": lambda axes: _sweep(axes, results),
        "epochs.svg": lambda axes: _curves(axes, results, "epoch", "epochs"),
        "seconds.svg": lambda axes: _curves(axes, results, "seconds", seconds),
    }
    names = picture_names(results)
    for name, how in paint.items():
        if name in names:
            atomic_write(folder / name, draw_figure(how))
        else:  # drawn from other runs, it would be believed
            (folder / name).unlink(missing_ok=True)


def _sweep(axes: "Axes", results: Results) -> None:
    table, figure = results.table, results.table.figure
    assert figure is not None
    ticks = [row.x for row in table.rows if row.x is not None]
    ours = [sample(results.runs_of[row.name], "recall@1") for row in table.rows]
    theirs = [row.published.get("recall@1", math.nan) for row in table.rows]
    spread = [0.0 if s is None else s.std or 0.0 for s in ours]
    backbones = _shared(record.recipe["model"]["backbone"] for record in results.runs)
    handles: list[Any] = [
        axes.errorbar(
            ticks,
            [math.nan if s is None else s.mean for s in ours],  # the line breaks at a NaN
            spread if any(spread) else None,
            marker="o",
            color=_COLORS[0],
            capsize=3,
            label=f"ours ({backbones})",
        )
    ]
    if not all(map(math.isnan, theirs)):
        label = f"published ({table.published.backbone})"
        handles += axes.plot(
            ticks, theirs, marker="s", linestyle="--", color=_COLORS[1], label=label
        )
    if figure.log:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(figure.label)
    axes.set_ylabel("recall@1 (%)")
    axes.margins(y=0.15)
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _curves(axes: "Axes", results: Results, key: str, label: str) -> None:
    for number, (name, runs) in enumerate(results.runs_of.items()):
        points = curve(runs, key)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=_COLORS[number % len(_COLORS)],
                marker=_MARKS[number % len(_MARKS)],
                markevery=max(1, len(points) // 10),
                markersize=5,
                label=name,
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
    return [(fmean(x for x, _ in points), fmean(y for _, y in points)) for points in whole]


def _shared(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))
