"""Metrics of a run as tables and text."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from proximetry._util.formatting import shorten
from proximetry.metrics.scores import CLUSTERING, COUNTS, ONE_SET


def metric_title(name: str) -> str:
    """Return the usual spelling of a metric."""
    return name.upper() if name.startswith("map@") else name


WITH_DISTRACTORS = "with training distractors"
"""Suffix of a metric of held-out images whose gallery includes training images."""


def selection_title(split: str, metric: str) -> str:
    """Return the title of the metric that selects the epoch on a split."""
    distractors = split == "held_out" and metric not in ONE_SET
    return f"{split.replace('_', '-')} {metric_title(metric)}{f' {WITH_DISTRACTORS}' * distractors}"


def describe_protocol(results: Mapping[str, Any], select_by: str) -> str:
    """Return which epoch of a run was saved, and what selected it."""
    protocol, epoch = results["protocol"], results["selected"]["epoch"]
    if protocol == "last":
        return f"protocol last: the last epoch ({epoch}) is saved; no epoch was selected"
    title = selection_title("test" if protocol == "paper" else "held_out", select_by)
    text = f"protocol {protocol}: epoch {epoch} is saved, selected by {title}"
    if protocol == "paper":
        return f"{text}, as in many papers, so test metrics are optimistically biased"
    text += ", not by the test set"
    if "first_stage" in results:
        text += " (first stage); the second stage used all classes for the same number of epochs"
    return text


def compared_epochs(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the embedders that a run's tables compare: untrained, last epoch, selected epoch."""
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

    Columns beyond a width of 80 continue in a block below, without rows that have none of them.
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
        blocks.append(f"{number} queries without another image of their class are excluded")
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
