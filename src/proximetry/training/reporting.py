"""Progress displays, TensorBoard, Weights & Biases, and tables of metrics."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, TextIO

from torch import Tensor

from proximetry._util.errors import printable, readable_seconds, shorten, spaced
from proximetry._util.files import read_json, writing
from proximetry.metrics.scores import CLUSTERING, COUNTS, ONE_SET
from proximetry.recipe.loading import flatten

if TYPE_CHECKING:
    from proximetry.training.loop import Run


class Trackers(AbstractContextManager[Any]):
    """TensorBoard if it is installed, Weights & Biases if the recipe sets it; on rank 0."""

    _board: Any = None
    _run: Any = None

    def on_start(self, run: "Run") -> None:
        """Open both; a resumed run replaces the epochs since its checkpoint."""
        if not run.world.leads:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(
                str(run.folder.path / "tensorboard"),
                purge_step=run.state.epoch + 1 if run.state.step else None,
            )
        except ImportError:
            pass  # metrics.jsonl has everything
        if run.recipe.training.wandb:
            import wandb

            # A resumed run keeps its id.
            self._run = wandb.init(
                project=run.recipe.training.wandb,
                config=run.recipe.to_dict(),
                dir=str(run.folder.path),
                id=read_json(run.folder.environment, 10**6).get("id"),
                resume="allow",
            )

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Log the metrics of an epoch."""
        values = {key.replace(".", "/"): value for key, value in flatten(line).items()}
        flat = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        if self._board is not None:
            with writing(run.folder.path / "tensorboard"):
                for name, value in flat.items():
                    self._board.add_scalar(name, value, line["epoch"])
                self._board.flush()
        if self._run is not None:
            self._run.log(flat, step=line["step"])

    on_untrained = on_epoch_end

    def __exit__(self, kind: object, *_: object) -> None:
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish(exit_code=0 if kind is None else 1)


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
            self.message(f"{what}: {spaced(done)} of {spaced(total)}, about {left} left")
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
            figures=f"{spaced(done)} of {spaced(total)}",
            refresh=done == total,
        )

    def on_start(self, run: "Run") -> None:
        """Set the length of the bar."""
        steps = run.recipe.training.epochs * len(run.data.sampler)
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
    """Return images per second, "" if there are none to the precision shown."""
    if images_per_second is None or images_per_second < 0.05:
        return ""
    return f"  {images_per_second:7.1f} img/s"


def _scores(scores: Mapping[str, Any]) -> str:
    """Return the smallest recall@k and MAP@R, or the first metric; and what selects the epoch."""
    recall = [key for key in scores if key.startswith("recall@")][:1]
    names = [*recall, *(key for key in scores if key == "map@r")] or [next(iter(scores))]
    short = {name: metric_title(name).replace("recall@", "R@") for name in names}
    texts = [f"{short[name]} {100 * scores[name]:5.1f}" for name in names]
    if "codes" in scores:
        texts.append(f"codes {_scores(scores['codes'])}")
    selecting = scores.get("with_distractors", {}).values()
    return "  ".join([*texts, *(f"with distractors {100 * value:5.1f}" for value in selecting)])


def metric_title(name: str) -> str:
    """Return the usual spelling of a metric."""
    return name.upper() if name.startswith("map@") else name


WITH_DISTRACTORS = "with training distractors"
"""Added to a metric of held-out images whose gallery has training images, too."""


def selection_title(split: str, metric: str) -> str:
    """Return the metric of a split that selects the epoch, in words."""
    distractors = split == "held_out" and metric not in ONE_SET
    return f"{split.replace('_', '-')} {metric_title(metric)}{f' {WITH_DISTRACTORS}' * distractors}"


def describe_protocol(results: Mapping[str, Any], select_by: str) -> str:
    """Return which epoch of a run was saved, and what selected it."""
    protocol, epoch = results["protocol"], results["selected"]["epoch"]
    if protocol == "last":
        return f"protocol last: epoch {epoch} is saved, the last one; nothing was selected"
    title = selection_title("test" if protocol == "paper" else "held_out", select_by)
    text = f"protocol {protocol}: epoch {epoch} is saved, selected by {title}"
    if protocol == "paper":
        return f"{text}, as in many papers, so test metrics are optimistically biased"
    text += ", not by the test set"
    if "first_stage" in results:
        text += " (first stage); the second stage trained on all classes for as many epochs"
    return text


def compared_epochs(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a run's tables compare: the untrained, the last and the selected embedder."""
    epochs = {"untrained": results["untrained"]} if "untrained" in results else {}
    last, selected = results["last"], results["selected"]
    if results["protocol"] == "last" or last["epoch"] != selected["epoch"]:
        epochs[f"last epoch ({last['epoch']})"] = last
    if results["protocol"] != "last":
        epochs[f"selected epoch ({selected['epoch']})"] = selected
    return epochs


def result_rows(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of a run's table: the compared embedders by split."""
    return {
        f"{title}, {split.replace('_', '-')}": part[split]
        for title, part in compared_epochs(results).items()
        for split in ("held_out", "test")
        if split in part
    }


# Maximum width of tables, and of the names of their rows.
WIDTH, NAME_WIDTH = 80, 40


def metrics_table(
    rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str] | None = None
) -> str:
    """Format metrics in percent, one line per row: the given columns, or all.

    Columns beyond a width of 80 follow in a block below, without rows that have none of them.
    """
    lines: list[tuple[str, Mapping[str, Any]]] = []
    for name, scores in rows.items():
        lines.append((name, scores))
        for dim, part in scores.get("dims", {}).items():
            lines.append((f"  first {dim} dimensions", part))
        if "codes" in scores:
            lines.append(("  binary codes, Hamming distance", scores["codes"]))
        if "with_distractors" in scores:
            lines.append((f"  {WITH_DISTRACTORS}", scores["with_distractors"]))
    values = {key: value for _, scores in lines for key, value in scores.items()}
    numbers = [key for key, value in values.items() if isinstance(value, (int, float))]
    keys = columns or [key for key in numbers if key not in COUNTS]
    names = [shorten(name, NAME_WIDTH) for name, _ in lines]
    width = max(map(len, names))
    blocks = []
    for block in _blocks(keys, WIDTH - width):
        text = [" " * width + "".join(f"{key:>{_cell(key)}}" for key in block)]
        for name, (_, scores) in zip(names, lines, strict=True):
            percent = {key: f"{100 * scores[key]:.1f}" for key in block if key in scores}
            cells = [f"{percent.get(key, '–'):>{_cell(key)}}" for key in block]
            if percent:
                text.append(f"{name:{width}}" + "".join(cells))
        blocks.append("\n".join(text))
    excluded = {scores.get("queries_without_positive", 0) for scores in rows.values()}
    if any(excluded):
        number = f"{'up to ' * (len(excluded) > 1)}{max(excluded):.0f}"
        blocks.append(f"{number} queries have no other image of their class and do not count")
    return "\n\n".join(blocks)


def _cell(key: str) -> int:
    return 2 + max(len(key), len("100.0"))


def _blocks(keys: Iterable[str], room: int) -> list[list[str]]:
    """Divide columns into blocks that fit; metrics of one kind stay together if they can."""
    blocks: list[list[str]] = [[]]
    kinds = dict.fromkeys(CLUSTERING, "clustering")
    for _, group in groupby(keys, lambda key: kinds.get(key, key.partition("@")[0])):
        family = list(group)
        for number, key in enumerate(family):
            needed = family if number == 0 else [key]
            if blocks[-1] and sum(map(_cell, blocks[-1] + needed)) > room:
                blocks.append([])
            blocks[-1].append(key)
    return blocks
