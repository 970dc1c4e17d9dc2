"""What a run tells: progress for people, TensorBoard, Weights & Biases."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from proximetry._common import need
from proximetry.metrics.scores import COUNTS
from proximetry.training.callbacks import Callback
from proximetry.training.recipe import Recipe, flatten

if TYPE_CHECKING:
    from proximetry.training.loop import Run


class Trackers(Callback):
    """TensorBoard where it is installed, Weights & Biases where the recipe asks for it."""

    _board: Any = None
    _run: Any = None

    @staticmethod
    def check(recipe: Recipe) -> None:
        """Refuse a tracker that is not installed."""
        if recipe.training.wandb:
            need("wandb", None, "training.wandb")

    def on_start(self, run: "Run") -> None:
        """Open them."""
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run.folder.path / "tensorboard"))
        except ImportError:
            pass  # metrics.jsonl has everything
        if run.recipe.training.wandb:
            import wandb

            self._run = wandb.init(
                project=run.recipe.training.wandb,
                config=run.recipe.to_dict(),
                dir=str(run.folder.path),
            )

    def on_untrained(self, run: "Run", line: dict[str, Any]) -> None:
        """Report where the curves begin."""
        self.on_epoch_end(run, line)

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Report the numbers of an epoch."""
        flat = {
            key.replace(".", "/"): value
            for key, value in flatten(line).items()
            if isinstance(value, (int, float))
        }
        if self._board is not None:
            for name, value in flat.items():
                self._board.add_scalar(name, value, line["epoch"])
            self._board.flush()
        if self._run is not None:
            self._run.log(flat, step=line["step"])

    def on_end(self, run: "Run", results: dict[str, Any]) -> None:
        """Close them."""
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()


class Display(Callback):
    """Shows nothing; what the others have in common."""

    def message(self, text: str) -> None:
        """Show a line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the screen tidy."""


class PlainDisplay(Display):
    """One line per epoch, for logs and pipes."""

    def message(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def on_untrained(self, run: "Run", line: dict[str, Any]) -> None:
        """Print the baseline."""
        self.on_epoch_end(run, line)

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Print a line per epoch."""
        self.message(describe_epoch(line))


class RichDisplay(PlainDisplay):
    """A live progress bar: epoch, loss, images per second, metrics, time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            transient=True,
        )
        self._scores = ""
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        self._task = self._progress.add_task("preparing", total=None, figures="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """Print above the progress bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def on_start(self, run: "Run") -> None:
        """Set the length of the bar."""
        steps = run.recipe.training.epochs * len(run.data.sampler)
        self._progress.update(self._task, total=steps, completed=run.state.step)
        self._first = run.state.step
        self._began: float | None = None

    def on_step_end(self, run: "Run", loss: Tensor) -> None:
        """Move the bar, at most ten times a second."""
        now, step = time.monotonic(), run.state.step
        if self._began is None:  # the first step is slow
            self._first, self._began = step, now
        if now - self._drawn < 0.1:
            return
        self._drawn = now
        # Reading the loss from a GPU waits for it, so not at every step.
        shown = f"loss {loss.item():.3f}  " if loss.device.type == "cpu" or step % 20 == 0 else ""
        images = (step - self._first) * run.recipe.data.batch_size
        rate = _rate(images / (now - self._began) if images else None)
        self._progress.update(
            self._task,
            completed=step,
            description=f"epoch {run.state.epoch + 1}",
            figures=f"{shown}{rate}{self._scores}",
        )

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Print a line per epoch above the bar."""
        for name in ("held_out", "test"):
            if name in line:
                self._scores = f"  {_scores(line[name])}"
        super().on_epoch_end(run, line)


def make_display() -> Display:
    """The right display for where the output goes."""
    return RichDisplay() if sys.stdout.isatty() else PlainDisplay()


def describe_epoch(line: Mapping[str, Any]) -> str:
    """One readable line for an epoch."""
    text = "untrained"
    if line["epoch"] > 0:
        text = f"epoch {line['epoch']:3d}  loss {line['loss']:8.4f}"
        text += _rate(line["images_per_second"])
    for name in ("held_out", "test"):
        if name in line:
            text += f"  {name.replace('_', '-')} {_scores(line[name])}"
    return text


def _rate(images_per_second: float | None) -> str:
    """Images per second, if any were timed and they do not round to nothing."""
    if images_per_second is None or images_per_second < 0.05:
        return ""
    return f"  {images_per_second:7.1f} img/s"


def _scores(scores: Mapping[str, Any]) -> str:
    """The smallest recall@k there is and MAP@R, or the first metric."""
    recall = [key for key in scores if key.startswith("recall@")][:1]
    names = [*recall, *(key for key in scores if key == "map@r")] or [next(iter(scores))]
    short = {name: metric_title(name).replace("recall@", "R@") for name in names}
    return "  ".join(f"{short[name]} {100 * scores[name]:5.1f}" for name in names)


def metric_title(name: str) -> str:
    """The name of a metric as people write it."""
    return name.upper() if name.startswith("map@") else name


def result_rows(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a run's table: the untrained, the last and the selected embedder, by split."""
    found = {}
    for which in ("untrained", "last", "selected"):
        part = results.get(which, {})
        title = which if which == "untrained" else f"{which} epoch ({part['epoch']})"
        for split in ("held_out", "test"):
            if split in part:
                found[f"{title}, {split.replace('_', '-')}"] = part[split]
    return found


def metrics_table(
    rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str] | None = None
) -> str:
    """Metrics in percent, one line per row: the columns asked for, or all there are."""
    first = next(iter(rows.values()))
    keys = columns or [key for key in first if key not in (*COUNTS, "dims")]
    shown = []
    for name, scores in rows.items():
        fewer = scores.get("dims", {}).items()
        shown += [(name, scores), *((f"  first {dim} dimensions", part) for dim, part in fewer)]
    width = max(len(name) for name, _ in shown) + 2
    lines = [" " * width + "".join(f"{key:>12}" for key in keys)]
    for name, scores in shown:
        lines.append(f"{name:{width}}" + "".join(f"{100 * scores[key]:12.1f}" for key in keys))
    left_out = first.get("queries_without_positive", 0)
    if left_out:
        lines.append(f"{left_out:.0f} queries have no other image of their class and do not count")
    return "\n".join(lines)
