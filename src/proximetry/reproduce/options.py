"""The options of a reproduction, declared once for Python and the command line."""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, about: str) -> Any:
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of `proximetry reproduce`."""

    seeds: tuple[int, ...] = _option((0,), "one run per row and seed")
    rows: tuple[str, ...] = _option((), "only these rows of the table; default: all")
    parallel: int = _option(1, "number of concurrent runs; seconds are then not compared")
    backbone: str | None = _option(
        None, "another network than the table's, such as bn_inception or resnet50.tv_in1k"
    )
    weights: str | None = _option(None, "its weights: auto, package, hub, none, or a file")
    epochs: int | None = _option(
        None,
        "another number of epochs; frozen epochs, learning-rate drops and evaluation interval "
        "scale too",
    )
    selection: bool | None = _option(
        None, "also select the epoch on held-out classes; default: set by the table"
    )
    device: str | None = _option(None, "cpu, cuda or cuda:1; default: cuda where there is one")
    render: bool = _option(False, "only write README.md and the figures again from existing runs")
    keep_runs: bool = _option(False, "keep checkpoints, embedders and logs of the runs")


DEFAULTS = ReproduceOptions()
