"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self


class Display(AbstractContextManager["Display"]):
    """Says nothing. The base of the displays below, and what the library uses by default."""

    def message(self, text: str) -> None:
        """Say one thing."""

    def start(self, epochs: int, steps: int) -> None:
        """Announce the size of the run."""

    def step(self, epoch: int, step: int, loss: float | None, images_per_second: float) -> None:
        """Report a step; the loss is None when it has not been read back from the device."""

    def epoch(self, line: dict[str, Any]) -> None:
        """Report an epoch, as written to metrics.jsonl."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the screen tidy."""


def describe_epoch(line: dict[str, Any]) -> str:
    """One readable line for an epoch."""
    speed = f"{line['images_per_second']:7.1f} img/s"
    text = f"epoch {line['epoch']:3d}  loss {line['loss']:8.4f}  {speed}"
    for name in ("held_out", "test"):
        if name in line:
            text += f"  {name.replace('_', '-')} R@1 {100 * line[name]['recall@1']:5.1f}"
    return text


class PlainDisplay(Display):
    """One line per epoch, for logs and pipes."""

    def message(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def epoch(self, line: dict[str, Any]) -> None:
        """Print a line per epoch."""
        print(describe_epoch(line), flush=True)


class RichDisplay(Display):
    """A live progress line: epoch, loss, images per second, R@1, time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            transient=True,
        )
        self._steps = 1
        self._recall = ""
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        self._task = self._progress.add_task("preparing", total=None, numbers="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """Print above the progress line."""
        self._progress.console.print(text, markup=False, highlight=False)

    def start(self, epochs: int, steps: int) -> None:
        """Set the length of the bar."""
        self._steps = steps
        self._progress.update(self._task, total=epochs * steps)

    def step(self, epoch: int, step: int, loss: float | None, images_per_second: float) -> None:
        """Move the bar, at most ten times a second."""
        now = time.monotonic()
        if now - self._drawn < 0.1:
            return
        self._drawn = now
        shown = "" if loss is None else f"loss {loss:.3f}  "
        self._progress.update(
            self._task,
            completed=epoch * self._steps + step,
            description=f"epoch {epoch + 1}",
            numbers=f"{shown}{images_per_second:.0f} img/s{self._recall}",
        )

    def epoch(self, line: dict[str, Any]) -> None:
        """Print a line per epoch above the bar."""
        for name in ("held_out", "test"):
            if name in line:
                self._recall = f"  R@1 {100 * line[name]['recall@1']:.1f}"
        self.message(describe_epoch(line))


def metrics_table(rows: dict[str, dict[str, float]], columns: Sequence[str] | None = None) -> str:
    """Metrics in percent, one line per row: the columns asked for, or all there are."""
    counts = ("queries", "queries_without_positive")
    first = next(iter(rows.values()))
    keys = columns or [key for key in first if key not in counts and "[" not in key]
    told = [line for name, values in rows.items() for line in _with_cuts(name, values)]
    width = max(len(name) for name, _ in told) + 2
    lines = [" " * width + "".join(f"{key:>12}" for key in keys)]
    for name, values in told:
        lines.append(f"{name:{width}}" + "".join(f"{100 * values[key]:12.1f}" for key in keys))
    left_out = first.get("queries_without_positive", 0)
    if left_out:
        lines.append(f"{left_out:.0f} queries have no other image of their class and do not count")
    return "\n".join(lines)


def _with_cuts(name: str, values: dict[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    """A row, and one for each beginning of the vectors that was judged too."""
    yield name, values
    for cut in dict.fromkeys(key.partition("[:")[2][:-1] for key in values if "[:" in key):
        end = f"[:{cut}]"
        of_cut = {k.removesuffix(end): v for k, v in values.items() if k.endswith(end)}
        yield f"  first {cut} numbers", of_cut


def make_display() -> Display:
    """The right display for where the output goes."""
    if sys.stdout.isatty():
        try:
            return RichDisplay()
        except ImportError:
            pass
    return PlainDisplay()
