"""What `proximetry evaluate` computes and how it is shown."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from proximetry._util.errors import first_few
from proximetry.cli import search_methods
from proximetry.metrics import Evaluation, Verification, retrieve
from proximetry.metrics.intervals import INTERVALS
from proximetry.training.evaluator import means
from proximetry.training.reporting import metrics_table

# How many of the worst classes are shown.
WORST = 10


def describe(
    queries: Mapping[int | str, Evaluation],
    compared: Mapping[str, Any],
    *,
    per_class: bool,
    confusions: int,
) -> dict[str, Any]:
    """Return the metrics with confidence intervals and, if wanted, classes and confusions."""
    whole = next(iter(queries.values()))
    found: dict[str, Any] = {
        "metrics": means(queries),
        "intervals": {name: [one.low, one.high] for name, one in whole.bootstrap().items()},
        "interval_method": INTERVALS,
    }
    if whole.verification is not None:
        found["verification"] = _verification(whole.verification)
    if per_class:
        found["per_class"] = _classes(whole)
    if confusions:
        often = retrieve(**compared, k=1).confusions()[:confusions]
        found["confusions"] = [
            {"query": str(query), "nearest": str(other), "count": count}
            for query, other, count in often
        ]
    return found


def _verification(result: Verification) -> dict[str, Any]:
    return {
        "accuracy": result.accuracy,
        "standard_error": result.standard_error,
        # JSON has no infinity: such a threshold accepts all pairs or none.
        "threshold": result.threshold if isfinite(result.threshold) else None,
        "folds": len(result.fold_accuracies),
        "pairs": result.same_pairs + result.different_pairs,
        "auc": result.auc,
        "eer": result.eer,
    }


def _verification_line(values: Mapping[str, Any], similarity: str) -> str:
    line = (
        f"verification: {100 * values['accuracy']:.1f} ± {100 * values['standard_error']:.1f} % "
        f"of {values['pairs']} pairs (mean and standard error over {values['folds']} folds)"
    )
    threshold = values["threshold"]
    if threshold is None:
        return line
    if similarity == "euclidean":
        return f"{line}; same class at a distance up to {-threshold:.4g}"
    return f"{line}; same class from a {similarity} similarity of {threshold:.4g}"


def _classes(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A row of metrics for each class, the worst first."""
    table = {name: column.tolist() for name, column in evaluation.per_class().items()}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    by = "map@r" if "map@r" in table else next(iter(evaluation.scores))
    return sorted(rows, key=lambda row: float(row[by]))


def as_text(document: Mapping[str, Any], name: str) -> str:
    """Return the tables of an evaluation for people."""
    scores, split = document["metrics"], document["split"]
    what = "vectors" if document["dataset"] == "vectors" else "images"
    parts = [
        f"{document['images']} {what} of {document['classes']} classes, split {split}",
        metrics_table({f"{name} ({split})": scores}),
        _intervals(document["intervals"]),
    ]
    if "verification" in document:
        parts.append(_verification_line(document["verification"], document["similarity"]))
    if "rows" in document:
        parts += search_methods.as_text(document["rows"])
    if "per_class" in document:
        worst = document["per_class"][:WORST]
        rows = {f"{row['label']} ({row['queries']} queries)": row for row in worst}
        shown = list(_headline(scores))
        parts.append(f"The worst {len(rows)} classes:\n{metrics_table(rows, shown)}")
    if "confusions" in document:
        lines = [
            f"{one['count']:6}  {one['query']} → {one['nearest']}" for one in document["confusions"]
        ]
        head = "Queries by class → class of the nearest image, where it is another:"
        parts.append("\n".join([head, *(lines or ["  none"])]))
    parts += [f"note: {note}" for note in document["notes"]]
    left_out = [f"left out {reason}" for reason in document["left_out"]]
    if left_out:
        parts.append("\n".join(first_few(left_out, "the document of --out and --json")))
    if document["layout"]:
        parts.insert(1, document["layout"])
    return "\n\n".join(parts)


def _headline(names: Iterable[str]) -> dict[str, None]:
    """The first metric, and MAP@R."""
    every = list(names)
    return dict.fromkeys([every[0], *(name for name in every if name == "map@r")])


def _intervals(intervals: Mapping[str, Sequence[float]]) -> str:
    if not intervals:
        return "No confidence intervals: all queries are of one class."
    bounds = {name: intervals[name] for name in _headline(intervals)}
    shown = (f"{n} {100 * low:.1f}–{100 * high:.1f}" for n, (low, high) in bounds.items())
    return f"{INTERVALS}:\n  {', '.join(shown)}"
