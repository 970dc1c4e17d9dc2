"""Charts as SVG, for pages or as files; lines differ in color, dashes and markers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

Formatter = Callable[[float], str]

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, _WIDTH - 12, 10, _HEIGHT - 38
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 4")


def format_number(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:.4g}"


def format_percent(value: float) -> str:
    """Format a fraction for an axis."""
    return f"{100 * value:.4g} %"


def step_points(x: Sequence[float], rates: Sequence[float]) -> list[tuple[float, float]]:
    """Return points of a step curve in percent; the i-th rate extends from x[i] to x[i + 1]."""
    return [(x[i + k], 100 * rate) for i, rate in enumerate(rates) for k in (0, 1)]


def line_chart(
    title: str,
    series: Mapping[str, Sequence[tuple[float, ...]]],
    *,
    format_value: Formatter = format_number,
    x_label: str = "epoch",
    selected_epoch: float | None = None,
    from_zero: bool = False,
    log: bool = False,
    x_ticks: Iterable[float] = (),
    file: bool = False,
) -> Markup:
    """Draw lines, by default over epochs. Empty series are skipped.

    Args:
        series: points (x, y) or (x, y, half of an error bar) by name, sorted by x; a line has a
            gap where y is NaN.
        selected_epoch: the x of a vertical line.
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
    to_axis = math.log10 if log else float
    x = _scale(to_axis(low), to_axis(high), _LEFT, _RIGHT)
    y = _scale(y_axis[0], y_axis[-1], _BOTTOM, _TOP + 8)
    powers = [10.0**n for n in range(-12, 13)] if log else _ticks(low, high, 7, integers=True)
    description = "; ".join(
        f"{name}: from {format_value(points[0][1])} at {x_label} {format_number(points[0][0])} "
        f"to {format_value(points[-1][1])} at {x_label} {format_number(points[-1][0])}"
        for name, points in lines.items()
    )
    return _render(
        title=title,
        description=description,
        x_label=x_label,
        file=file,
        y_ticks=[(y(value), format_value(value)) for value in y_axis],
        x_ticks=[
            (x(to_axis(v)), format_number(v)) for v in (x_ticks or powers) if low <= v <= high
        ],
        selected=None
        if selected_epoch is None or not low <= selected_epoch <= high
        else x(selected_epoch),
        lines=[
            {
                "name": name,
                "style": number % len(_DASHES),
                "segments": _split_at_nan([(x(to_axis(a)), y(b)) for a, b, *_ in points]),
                "points": [
                    (x(to_axis(a)), y(b), f"{x_label} {format_number(a)}: {format_value(b)}")
                    for a, b, *_ in points
                    if not math.isnan(b)
                ],
                "errors": [(x(to_axis(a)), y(b - e), y(b + e)) for a, b, *es in points for e in es],
            }
            for number, (name, points) in enumerate(lines.items())
        ],
    )


def _split_at_nan(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Split points where y is NaN."""
    breaks = [-1, *(i for i, (_, y) in enumerate(points) if math.isnan(y)), len(points)]
    return [list(points[a + 1 : b]) for a, b in pairwise(breaks) if b - a > 1]


def bar_chart(title: str, bars: Mapping[str, float], *, x_label: str, y_label: str) -> Markup:
    """Draw bars with their numbers above them."""
    if not bars:
        return Markup()
    y_axis = _ticks(0.0, max([*bars.values(), 1e-9]), 4, integers=True)
    x, y = _scale(0, len(bars), _LEFT, _RIGHT), _scale(0, y_axis[-1], _BOTTOM, _TOP + 8)
    # Show every n-th label if they do not fit.
    label_step = math.ceil(len(bars) * max(map(len, bars)) / 44)
    values = "; ".join(f"{name}: {format_number(value)}" for name, value in bars.items())
    return _render(
        title=title,
        description=f"{y_label} by {x_label}: {values}",
        x_label=x_label,
        y_ticks=[(y(value), format_number(value)) for value in y_axis],
        bars=[
            {
                "title": f"{name}: {format_number(value)} {y_label}",
                "name": "" if number % label_step else name,
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
    empty = {"file": False, "x_ticks": [], "selected": None, "lines": [], "bars": []}
    return Markup(_template().render(**geometry, styles=_DASHES, **(empty | values)))


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function from values to coordinates."""
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, count: int, *, integers: bool = False) -> list[float]:
    """Return round numbers that cover the range."""
    if not high > low:
        high = low + (abs(low) * 0.1 or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    if integers:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
