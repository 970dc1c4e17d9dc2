"""Charts as SVG, in the colors of a page or as files; lines also differ by dashes and markers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

Format = Callable[[float], str]

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, _WIDTH - 12, 10, _HEIGHT - 38
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 4")


def format_number(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:.4g}"


def in_percent(value: float) -> str:
    """Format a fraction for an axis."""
    return f"{100 * value:.4g} %"


def step_points(x: Sequence[float], rates: Sequence[float]) -> list[tuple[float, float]]:
    """Return points of a step curve in percent; the i-th rate extends from x[i] to x[i + 1]."""
    return [(x[i + k], 100 * rate) for i, rate in enumerate(rates) for k in (0, 1)]


def line_chart(
    title: str,
    series: Mapping[str, Sequence[tuple[float, ...]]],
    *,
    format_value: Format = format_number,
    x_label: str = "epoch",
    marked: float | None = None,
    from_zero: bool = False,
    log: bool = False,
    x_ticks: Iterable[float] = (),
    file: bool = False,
) -> Markup:
    """Draw lines, by default over epochs. Empty series are skipped.

    Args:
        series: points (x, y) or (x, y, half of an error bar) by name, sorted by x; a line has a
            gap where y is NaN.
        marked: the selected epoch.
        log: whether the horizontal axis is logarithmic.
        x_ticks: default: round numbers.
        file: return an SVG document instead of a figure for a page.
    """
    lines = {name: points for name, points in series.items() if points}
    if not lines:
        return Markup()
    xs = [x for points in lines.values() for x, *_ in points]
    ends = [y + sign * sum(e) for ps in lines.values() for _, y, *e in ps for sign in (-1, 1)]
    ys = [y for y in ends if not math.isnan(y)]
    low, high = min(xs), max(xs)
    y_axis = _ticks(min(0.0, *ys) if from_zero else min(ys), max(ys), 5)
    across = math.log10 if log else float
    x = _scale(across(low), across(high), _LEFT, _RIGHT)
    y = _scale(y_axis[0], y_axis[-1], _BOTTOM, _TOP + 8)
    powers = [10.0**n for n in range(-12, 13)] if log else _ticks(low, high, 7, whole=True)
    about = "; ".join(
        f"{name}: from {format_value(points[0][1])} at {x_label} {format_number(points[0][0])} "
        f"to {format_value(points[-1][1])} at {x_label} {format_number(points[-1][0])}"
        for name, points in lines.items()
    )
    return _render(
        title=title,
        about=about,
        x_label=x_label,
        file=file,
        y_ticks=[(y(value), format_value(value)) for value in y_axis],
        x_ticks=[(x(across(v)), format_number(v)) for v in (x_ticks or powers) if low <= v <= high],
        marked=None if marked is None or not low <= marked <= high else x(marked),
        lines=[
            {
                "name": name,
                "style": number % len(_DASHES),
                "runs": _runs([(x(across(p[0])), y(p[1])) for p in points]),
                "points": [
                    (
                        x(across(p[0])),
                        y(p[1]),
                        f"{x_label} {format_number(p[0])}: {format_value(p[1])}",
                    )
                    for p in points
                    if not math.isnan(p[1])
                ],
                "errors": [
                    (x(across(p[0])), y(p[1] - p[2]), y(p[1] + p[2])) for p in points if p[2:]
                ],
            }
            for number, (name, points) in enumerate(lines.items())
        ],
    )


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Divide points where y is NaN."""
    breaks = [-1, *(i for i, (_, y) in enumerate(points) if math.isnan(y)), len(points)]
    return [list(points[a + 1 : b]) for a, b in pairwise(breaks) if b - a > 1]


def bar_chart(title: str, bars: Mapping[str, float], *, x_label: str, y_label: str) -> Markup:
    """Draw bars, each with its number above it."""
    if not bars:
        return Markup()
    y_axis = _ticks(0.0, max([*bars.values(), 1e-9]), 4, whole=True)
    x, y = _scale(0, len(bars), _LEFT, _RIGHT), _scale(0, y_axis[-1], _BOTTOM, _TOP + 8)
    # Of many names every other one, or fewer, has room.
    every = math.ceil(len(bars) * max(map(len, bars)) / 44)
    values = "; ".join(f"{name}: {format_number(value)}" for name, value in bars.items())
    return _render(
        title=title,
        about=f"{y_label} by {x_label}: {values}",
        x_label=x_label,
        y_ticks=[(y(value), format_number(value)) for value in y_axis],
        bars=[
            {
                "title": f"{name}: {format_number(value)} {y_label}",
                "name": "" if number % every else name,
                "value": format_number(value) if value and len(bars) <= 12 else "",
                "x": x(number + 0.12),
                "y": y(value),
                "middle": x(number + 0.5),
                "width": x(number + 0.88) - x(number + 0.12),
            }
            for number, (name, value) in enumerate(bars.items())
        ],
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["short"] = lambda value: f"{value:.1f}".removesuffix(".0")  # coordinates
    source = files("proximetry._util").joinpath("chart.html").read_text(encoding="utf-8")
    return environment.from_string(source)


def _render(**values: Any) -> Markup:
    geometry = {"left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM}
    geometry |= {"width": _WIDTH, "height": _HEIGHT}
    empty = {"file": False, "x_ticks": [], "marked": None, "lines": [], "bars": []}
    return Markup(_template().render(**geometry, styles=_DASHES, **(empty | values)))


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function from values to coordinates."""
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Return round numbers that cover the range."""
    if not high > low:
        high = low + (abs(low) * 0.1 or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
