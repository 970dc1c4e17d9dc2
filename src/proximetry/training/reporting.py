"""Progress of a run on the terminal."""

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, TextIO

from torch import Tensor

from proximetry._util.formatting import format_int, printable, readable_seconds
from proximetry.training.metrics_table import metric_title

if TYPE_CHECKING:
    from proximetry.training.run import Run


class Display(AbstractContextManager[Any]):
    """The base class of displays; shows nothing."""

    def message(self, text: str) -> None:
        """Show a line."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a part of the preparation."""

    def __exit__(self, *_: object) -> None:
        """Clean up the screen."""


class PlainDisplay(Display):
    """One line per epoch, for logs and pipes."""

    _what, _done = "", 0  # the last progress
    _since = _printed = 0.0

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file  # None for the current standard output

    def message(self, text: str) -> None:
        """Print a line."""
        print(printable(text), file=self._file, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Print a line per minute."""
        now = time.monotonic()
        if what != self._what or done < self._done:
            self._what, self._since, self._printed = what, now, now
        elif now - self._printed >= 60 and 0 < done < total:
            left = readable_seconds((now - self._since) / done * (total - done))
            self.message(f"{what}: {format_int(done)} of {format_int(total)}, about {left} left")
            self._printed = now
        self._done = done

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Print a line per epoch."""
        self.message(describe_epoch(line))

    on_untrained = on_epoch_end


class RichDisplay(PlainDisplay):
    """A live progress bar: epoch, loss, images per second, metrics, time left."""

    def __init__(self, file: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(file=file),
            transient=True,
        )
        self._scores = self._loss = ""
        self._next_loss = 0

    def __enter__(self) -> Self:
        self._progress.start()
        self._task = self._progress.add_task("preparing", total=None, figures="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """Print above the progress bar."""
        self._progress.console.print(printable(text), markup=False, highlight=False)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a part of the preparation in the bar."""
        self._progress.update(
            self._task,
            description=what,
            completed=done,
            total=total,
            figures=f"{format_int(done)} of {format_int(total)}",
            refresh=done == total,
        )

    def on_start(self, run: "Run") -> None:
        """Set the length of the bar."""
        steps = run.recipe.training.total_steps(len(run.data.sampler))
        self._progress.reset(
            self._task, description="training", total=steps, completed=run.state.step, figures=""
        )

    def on_step_end(self, run: "Run", loss: Tensor) -> None:
        """Update the bar."""
        step = run.state.step
        # Reading the loss from a GPU waits for it, so not at every step.
        if loss.device.type == "cpu" or step >= self._next_loss:
            self._loss, self._next_loss = f"loss {loss.item():.3f}  ", step + 20
        batch = min(run.recipe.data.batch_size, len(run.data.rows["train"]))
        rate = _rate(batch * (self._progress.tasks[0].speed or 0.0))
        self._progress.update(
            self._task,
            completed=step,
            description=f"epoch {run.state.epoch + 1}",
            figures=f"{self._loss}{rate}{self._scores}",
        )

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Print a line per epoch above the bar."""
        for name in ("held_out", "test"):
            if name in line:
                self._scores = f"  {_scores(line[name])}"
        super().on_epoch_end(run, line)


def make_display(file: TextIO | None = None) -> Display:
    """Return the display for a terminal or a plain file; standard output by default."""
    return RichDisplay(file) if (file or sys.stdout).isatty() else PlainDisplay(file)


def describe_epoch(line: Mapping[str, Any]) -> str:
    """Return one readable line for an epoch."""
    text = "untrained"
    if line["epoch"] > 0:
        text = f"epoch {line['epoch']:3d}  loss {line['loss']:8.4f}"
        text += _rate(line["images_per_second"])
    for name in ("held_out", "test"):
        if name in line:
            text += f"  {name.replace('_', '-')} {_scores(line[name])}"
    return text


def _rate(images_per_second: float | None) -> str:
    """Return images per second, "" if they round to 0.0."""
    if images_per_second is None or images_per_second < 0.05:
        return ""
    return f"  {images_per_second:7.1f} img/s"


def _scores(scores: Mapping[str, Any]) -> str:
    """Return the smallest recall@k and MAP@R, or the first metric; and the selection metric."""
    recall = [key for key in scores if key.startswith("recall@")][:1]
    names = [*recall, *(key for key in scores if key == "map@r")] or [next(iter(scores))]
    short = {name: metric_title(name).replace("recall@", "R@") for name in names}
    texts = [f"{short[name]} {100 * scores[name]:5.1f}" for name in names]
    if "codes" in scores:
        texts.append(f"codes {_scores(scores['codes'])}")
    selecting = scores.get("with_distractors", {}).values()
    return "  ".join([*texts, *(f"with distractors {100 * value:5.1f}" for value in selecting)])
