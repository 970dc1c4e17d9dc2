"""The curves of verification and identification, as SVG."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from proximetry._util.charts import line_chart
from proximetry._util.files import atomic_write
from proximetry.metrics import Identification, Verification


def draw_roc(result: Verification, label: str, out: Path) -> None:
    """Draw TAR against FAR, from one in the number of different pairs on."""
    least = 1 / result.different_pairs
    # A step extends to the next point; FAR 0 has no place on a logarithmic axis.
    far, first = np.maximum(result.roc.far, least), int(np.sum(result.roc.far <= least)) - 1
    points = _steps([*far[first:].tolist(), 1.0], [*result.roc.tar[first:].tolist()])
    _draw("true accept rate (%)", {label: points}, "false accept rate", out)


def draw_cmc(result: Identification, label: str, depth: int, out: Path) -> None:
    """Draw the cumulative match curve."""
    points = _steps([*range(1, depth + 1), depth], result.cmc(depth).cpu().tolist())
    x_label = f"rank among {result.distractors} distractors"
    _draw("trials with this rank or a better one (%)", {label: points}, x_label, out)


def _steps(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """Return points in percent; the i-th value extends from x[i] to x[i + 1]."""
    return [(x[i + k], 100 * value) for i, value in enumerate(y) for k in (0, 1)]


def _draw(
    title: str, series: dict[str, list[tuple[float, float]]], x_label: str, out: Path
) -> None:
    chart = line_chart(title, series, x_label=x_label, log=True, file=True)
    atomic_write(out, chart.encode())
