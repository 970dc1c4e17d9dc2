"""Charts as SVG whose colors are those of the page, light or dark; never told by color alone."""

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

Point = tuple[float, float]
Format = Callable[[float], str]

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 38
# Lines differ by dashes and by the shape of their points too.
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 4")
STYLES = len(_DASHES)


def el(tag: str, *children: str, **attributes: object) -> Markup:
    """Return an SVG element; None attributes are omitted, `_` in names is `-`."""
    settings = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), value)
        for name, value in attributes.items()
        if value is not None
    )
    return Markup("<{}{}>{}</{}>").format(tag, settings, Markup("").join(children), tag)


def plain(value: float) -> str:
    """A number for an axis: a few digits, none that say nothing."""
    return f"{value:.4g}"


def in_percent(value: float) -> str:
    """A fraction for an axis."""
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
    """Lines over epochs; ``marked`` is the selected epoch. Series without points are left out."""
    lines = {name: sorted(points) for name, points in series.items() if points}
    if not lines:
        return Markup()
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_axis = _ticks(min(xs), max(xs), 7, whole=True)
    y_axis = _ticks(min(0.0, *ys) if from_zero else min(ys), max(ys), 5)
    place = _Scale((min(xs), max(xs)), (y_axis[0], y_axis[-1]))
    drawn = [_frame(place, x_axis, y_axis, shown, x_label)]
    if marked is not None and not min(xs) <= marked <= max(xs):
        marked = None
    if marked is not None:
        x = place.x(marked)
        drawn.append(el("line", x1=_n(x), x2=_n(x), y1=_TOP, y2=_HEIGHT - _BOTTOM, class_="marked"))
    for number, (name, points) in enumerate(lines.items()):
        drawn.append(_line(place, points, number % STYLES, name, shown, x_label))
    legend = [
        el("li", _sample(number % STYLES), name, class_="legend-entry")
        for number, name in enumerate(lines)
    ]
    if marked is not None:
        sample = el("line", x1=11, x2=11, y1=0, y2=14, class_="marked")
        legend.append(
            el(
                "li",
                el("svg", sample, viewBox="0 0 22 14", class_="sample", aria_hidden="true"),
                "selected epoch",
                class_="legend-entry",
            )
        )
    return _figure(title, _describe(lines, shown, x_label), drawn, el("ul", *legend))


def bar_chart(
    title: str, bars: Mapping[str, float], *, x_label: str, y_label: str, shown: Format = plain
) -> Markup:
    """Bars, each with its number above it."""
    if not bars:
        return Markup()
    y_axis = _ticks(0.0, max([*bars.values(), 1e-9]), 4, whole=True)
    place = _Scale((0.0, float(len(bars))), (0.0, y_axis[-1]))
    drawn = [_frame(place, [], y_axis, plain, x_label)]
    # Of many names every other one, or fewer, has room.
    every = math.ceil(len(bars) * max(map(len, bars)) / 44)
    for number, (name, value) in enumerate(bars.items()):
        left, right = place.x(number + 0.12), place.x(number + 0.88)
        top, middle = place.y(value), (left + right) / 2
        height = _HEIGHT - _BOTTOM - top
        what = el("title", f"{name}: {shown(value)} {y_label}")
        drawn.append(
            el(
                "rect",
                what,
                x=_n(left),
                y=_n(top),
                width=_n(right - left),
                height=_n(height),
                class_="bar",
            )
        )
        if value and len(bars) <= 12:
            drawn.append(el("text", shown(value), x=_n(middle), y=_n(top - 4), class_="middle"))
        if number % every == 0:
            drawn.append(el("text", name, x=_n(middle), y=_HEIGHT - _BOTTOM + 15, class_="middle"))
    told = "; ".join(f"{name}: {shown(value)}" for name, value in bars.items())
    return _figure(title, f"{y_label} by {x_label}: {told}", drawn, Markup())


class _Scale:
    """From values to places."""

    def __init__(self, x: Point, y: Point) -> None:
        self._x, self._y = _wide(*x), _wide(*y)

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP - 8)


def _wide(low: float, high: float) -> Point:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round numbers that begin at or below the lowest value and end at or above the highest."""
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


def _frame(
    place: _Scale, xs: Sequence[float], ys: Sequence[float], shown: Format, x_label: str
) -> Markup:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for y in ys:
        at = _n(place.y(y))
        parts.append(el("line", x1=_LEFT, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(el("text", shown(y), x=_LEFT - 6, y=_n(place.y(y) + 4), class_="end"))
    for x in xs:
        at_x = place.x(x)
        if _LEFT - 1 <= at_x <= right + 1:
            parts.append(el("text", plain(x), x=_n(at_x), y=bottom + 15, class_="middle"))
    parts.append(el("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    middle = (_LEFT + right) / 2
    parts.append(el("text", x_label, x=_n(middle), y=_HEIGHT - 5, class_="middle label"))
    return el("g", *parts)


def _line(
    place: _Scale, points: Sequence[Point], style: int, name: str, shown: Format, x_label: str
) -> Markup:
    placed = [(place.x(x), place.y(y)) for x, y in points]
    path = " ".join(f"{_n(x)},{_n(y)}" for x, y in placed)
    parts = [el("polyline", points=path, stroke_dasharray=_DASHES[style] or None)]
    # Points of a long run would hide the line.
    if len(points) <= 60:
        for (x, y), at in zip(points, placed, strict=True):
            what = el("title", f"{name}, {x_label} {plain(x)}: {shown(y)}")
            parts.append(_marker(style, *at, what))
    return el("g", *parts, class_=f"line s{style + 1}")


def _marker(style: int, x: float, y: float, what: str = "") -> Markup:
    if style % 3 == 0:
        return el("circle", what, cx=_n(x), cy=_n(y), r="3.2")
    if style % 3 == 1:
        return el("rect", what, x=_n(x - 3), y=_n(y - 3), width=6, height=6)
    return el("path", what, d=f"M{_n(x)} {_n(y - 4)}l4 7h-8z")


def _sample(style: int) -> Markup:
    line = el("line", x1=0, x2=22, y1=7, y2=7, stroke_dasharray=_DASHES[style] or None)
    group = el("g", line, _marker(style, 11, 7), class_=f"line s{style + 1}")
    return el("svg", group, viewBox="0 0 22 14", class_="sample", aria_hidden="true")


def _describe(lines: Mapping[str, Sequence[Point]], shown: Format, x_label: str) -> str:
    told = [
        f"{name}: from {shown(points[0][1])} at {x_label} {plain(points[0][0])} "
        f"to {shown(points[-1][1])} at {x_label} {plain(points[-1][0])}"
        for name, points in lines.items()
    ]
    return "; ".join(told)


def _figure(title: str, about: str, drawn: Sequence[Markup], legend: Markup) -> Markup:
    picture = el(
        "svg",
        *drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{title}. {about}",
        class_="chart",
    )
    return el("figure", el("figcaption", title), picture, legend, class_="plot")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
