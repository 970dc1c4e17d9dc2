"""Figures as SVG or PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def draw_figure(paint: Callable[[Axes], None], kind: str = "svg") -> bytes:
    """Return a figure as SVG or PNG; the same data give the same bytes."""
    matplotlib = need("matplotlib", "glyphs", "Drawing figures")
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        canvas = Figure(figsize=(6.4, 4.0), layout="constrained")
        paint(canvas.add_subplot())
        buffer = io.BytesIO()
        omitted = {"svg": ("Date", "Creator"), "png": ("Software",)}[kind]
        canvas.savefig(buffer, format=kind, dpi=150, metadata=dict.fromkeys(omitted))
    return buffer.getvalue()
