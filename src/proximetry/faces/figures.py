"""The curves of verification and identification, as SVG or PNG."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proximetry._util.figures import draw_figure
from proximetry._util.files import atomic_write
from proximetry.metrics import Identification, Verification

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_roc(result: Verification, label: str, out: Path) -> None:
    """Draw TAR against FAR, from one in the number of different pairs on."""
    least = 1 / result.different_pairs
    # A step holds until the next point; FAR 0 has no place on a logarithmic axis.
    far, tar = np.maximum(result.roc.far, least / 2), result.roc.tar
    # Good models differ near the top: the axis begins where the curve does.
    missed = 100 * max(1 - float(tar[far <= least].max()), 0.01)

    def paint(axes: "Axes") -> None:
        axes.step(far, 100 * tar, where="post", color="#0072B2", label=label)
        axes.set_xscale("log")
        axes.set_xlim(least, 1)
        axes.set_ylim(max(0, 100 - 1.2 * missed), 100 + 0.05 * missed)
        axes.set_xlabel("false accept rate")
        axes.set_ylabel("true accept rate (%)")
        axes.legend(loc="lower right")

    _write(paint, out)


def draw_cmc(result: Identification, label: str, depth: int, out: Path) -> None:
    """Draw the cumulative match curve."""

    def paint(axes: "Axes") -> None:
        rates = 100 * result.cmc(depth).cpu().numpy()
        axes.step(np.arange(1, depth + 1), rates, where="post", color="#0072B2", label=label)
        axes.set_xscale("log")
        axes.set_xlim(1, depth)
        axes.set_xlabel(f"rank among {result.distractors} distractors")
        axes.set_ylabel("trials with this rank or a better one (%)")
        axes.legend(loc="lower right")

    _write(paint, out)


def _write(paint: "Callable[[Axes], None]", out: Path) -> None:
    atomic_write(out, draw_figure(paint, out.suffix.lower().removeprefix(".")))
