"""Charts as SVG in the colors of the page; lines also differ by dashes and markers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from proximetry.reports.page import render

Point = tuple[float, float]
Format = Callable[[float], str]

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, _WIDTH - 12, 10, _HEIGHT - 38
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 4")


def plain(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:.4g}"


def in_percent(value: float) -> str:
    """Format a fraction for an axis."""
    return f"{100 * value:.4g} %"


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    shown: Format = plain,
    x_label: str = "epoch",
    marked: float | None = None,
    from_zero: bool = False,
) -> Markup:
    """Draw lines over epochs; ``marked`` is the selected epoch. Empty series are skipped."""
    lines = {name: sorted(points) for name, points in series.items() if points}
    if not lines:
        return Markup()
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    y_axis = _ticks(min(0.0, *ys) if from_zero else min(ys), max(ys), 5)
    scale = _Scale((min(xs), max(xs)), (y_axis[0], y_axis[-1]))
    x_axis = [x for x in _ticks(min(xs), max(xs), 7, whole=True) if min(xs) <= x <= max(xs)]
    if marked is not None and not min(xs) <= marked <= max(xs):
        marked = None
    about = "; ".join(
        f"{name}: from {shown(points[0][1])} at {x_label} {plain(points[0][0])} "
        f"to {shown(points[-1][1])} at {x_label} {plain(points[-1][0])}"
        for name, points in lines.items()
    )
    return _render(
        title,
        about,
        x_label,
        [(scale.y(y), shown(y)) for y in y_axis],
        x_ticks=[(scale.x(x), plain(x)) for x in x_axis],
        marked=None if marked is None else scale.x(marked),
        lines=[
            {
                "name": name,
                "style": number % len(_DASHES),
                "points": [
                    (scale.x(x), scale.y(y), f"{x_label} {plain(x)}: {shown(y)}") for x, y in points
                ],
            }
            for number, (name, points) in enumerate(lines.items())
        ],
    )


def bar_chart(title: str, bars: Mapping[str, float], *, x_label: str, y_label: str) -> Markup:
    """Draw bars, each with its number above it."""
    if not bars:
        return Markup()
    y_axis = _ticks(0.0, max([*bars.values(), 1e-9]), 4, whole=True)
    scale = _Scale((0.0, float(len(bars))), (0.0, y_axis[-1]))
    # Of many names every other one, or fewer, has room.
    every = math.ceil(len(bars) * max(map(len, bars)) / 44)
    values = "; ".join(f"{name}: {plain(value)}" for name, value in bars.items())
    return _render(
        title,
        f"{y_label} by {x_label}: {values}",
        x_label,
        [(scale.y(y), plain(y)) for y in y_axis],
        bars=[
            {
                "title": f"{name}: {plain(value)} {y_label}",
                "name": "" if number % every else name,
                "value": plain(value) if value and len(bars) <= 12 else "",
                "x": scale.x(number + 0.12),
                "y": scale.y(value),
                "middle": scale.x(number + 0.5),
                "width": scale.x(number + 0.88) - scale.x(number + 0.12),
            }
            for number, (name, value) in enumerate(bars.items())
        ],
    )


def _render(
    title: str, about: str, x_label: str, y_ticks: list[tuple[float, str]], **values: Any
) -> Markup:
    return render(
        "chart.html",
        title=title,
        about=about,
        x_label=x_label,
        y_ticks=y_ticks,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        styles=_DASHES,
        **{"x_ticks": [], "marked": None, "lines": [], "bars": [], **values},
    )


class _Scale:
    """From values to coordinates."""

    def __init__(self, x: Point, y: Point) -> None:
        self._x, self._y = _wide(*x), _wide(*y)

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        low, high = self._y
        return _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP - 8)


def _wide(low: float, high: float) -> Point:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Return round numbers that cover the range."""
    if not high > low:
        high = low + (abs(low) * 0.1 or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
