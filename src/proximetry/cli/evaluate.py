"""`proximetry evaluate`: retrieval metrics of an embedder or of vectors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first, truncate_lines
from proximetry.cli.inputs import load_embedder, open_images
from proximetry.cli.options import (
    AsJson,
    BadImages,
    BatchSize,
    Device,
    Document,
    Flag,
    LabelsFromName,
    Neighbors,
    TableColumns,
)
from proximetry.cli.output import check_out, format_bound, print_result, progress_bar, skip_hint
from proximetry.cli.train import key_options
from proximetry.metrics.scores import Metrics
from proximetry.models.constants import MAX_DIM, Similarity

if TYPE_CHECKING:
    from proximetry.metrics import Evaluation

MAX_CLASSES = 10  # that --per-class prints
MetricsOptions: Any = Annotated[key_options(Metrics), Parameter(name="*")]


def evaluate(
    embedder: Path,
    source: str | None = None,
    *,
    root: Path | None = None,
    similarity: Similarity | None = None,
    split: Literal["test", "train", "val", "all"] | None = None,
    options: MetricsOptions = {},  # noqa: B006
    eval_dims: Annotated[
        tuple[int, ...] | None, Parameter(validator=Number(gte=1, lte=MAX_DIM))
    ] = None,
    per_class: Flag = False,
    confusions: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    binary: Flag = False,
    expand: Neighbors = 0,
    rerank: Flag = False,
    batch_size: Annotated[
        BatchSize | None,
        Parameter(help="images per forward pass; default: as in the run."),
    ] = None,
    bad_images: BadImages = "error",
    columns: TableColumns = None,
    labels_from_name: LabelsFromName = None,
    device: Device = None,
    out: Document = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate an embedder (or precomputed vectors) on retrieval metrics.

    Metrics and --eval-dims default to those of the run that saved the embedder.

    Args:
        embedder: folder of a run or of a saved embedder, hub:owner/name, an ONNX file, or the name
            of a backbone with pretrained weights; or, without a source, a file of vectors with
            labels: .npz, .npy or .parquet, as `proximetry embed` writes.
        source: a folder of class folders, a CSV or Parquet table, a tar file, or a dataset that
            `proximetry datasets` lists; for an embedder of vectors, a file of vectors.
        root: path of the dataset's images.
        similarity: similarity of precomputed vectors; default: cosine.
        split: split to evaluate; default: test if it has images, else all.
        options: metrics; `proximetry metrics` lists the defaults.
        eval_dims: also evaluate the first d dimensions of the embedding, for each d.
        per_class: also list the classes with the lowest metrics; all classes with --json or --out.
        confusions: also list this many of the most confused pairs of classes.
        binary: also evaluate binary codes, with and without re-ranking by the vectors, and list
            bytes per image.
        expand: also evaluate query expansion with this many neighbors.
        rerank: also evaluate k-reciprocal re-ranking of the nearest images.
    """
    from proximetry.data import resolve_source

    data = str(embedder) if source is None else source
    check_out(out, [".json"], [data])
    if source is None:
        _check_vectors(embedder)
    name, path = resolve_source(data, root)

    import torch  # takes seconds, so paths are checked first

    from proximetry.cli.evaluate_search_methods import make_rows
    from proximetry.training import evaluation_inputs, evaluator

    model = None if source is None else load_embedder(embedder, device)
    if model is not None and similarity is not None:
        raise UsageError(
            f"--similarity applies to precomputed vectors only, got the embedder {embedder}. Omit "
            "--similarity."
        )
    saved = evaluator.saved_evaluation(model)
    metrics = replace(saved.metrics, **options)
    similarity = model.architecture.similarity if model is not None else similarity or "cosine"
    if expand and similarity != "cosine":
        raise UsageError(f"--expand requires cosine similarity, got {similarity}. Omit --expand.")
    skip, skipped = bad_images == "skip", list[str]()
    catalog: Any = open_images(name, path, columns, skip, labels_from_name)  # or of vectors
    catalog, split_name = evaluation_inputs.choose_split(catalog, split, data)
    dim = catalog.vectors.shape[1] if model is None else model.dim
    eval_dims = saved.eval_dims if eval_dims is None else eval_dims
    if eval_dims and max(eval_dims) >= dim:
        raise UsageError(
            f"--eval-dims must be less than the embedding's {dim} dimensions, got {max(eval_dims)}"
        )
    notes = evaluation_inputs.check_comparison(catalog, metrics)
    with progress_bar("evaluating") as report, skip_hint():
        if model is None:
            vectors = torch.from_numpy(catalog.vectors)
        elif skip:
            vectors, catalog, skipped = evaluator.encode_readable(
                model, catalog, batch_size, report
            )
            notes = evaluation_inputs.check_comparison(catalog, metrics)
        else:
            vectors = evaluator.encode_catalog(model, catalog, batch_size, report)
        if model is not None:
            notes += evaluator.leakage_warnings(model, catalog)
        codes = model is not None and model.architecture.binary
        role_catalog = evaluation_inputs.drop_unused_roles(catalog)
        evaluations = evaluator.score_queries(
            vectors, role_catalog, similarity, metrics, eval_dims, binary=codes, progress=report
        )
        arguments = evaluation_inputs.evaluation_arguments(vectors, role_catalog, similarity)
        rows = make_rows(
            next(iter(evaluations.values())),
            arguments,
            metrics,
            report,
            binary=binary,
            expand=expand,
            rerank=rerank,
        )
    document: dict[str, Any] = {
        "embedder": str(embedder) if source else None,
        "similarity": similarity,
        "dataset": name,
        "root": str(catalog.root),
        "split": split_name,
        "images": len(catalog),
        "classes": len(catalog.class_names),
        **describe(evaluations, arguments, per_class=per_class, confusions=confusions),
        **({"rows": rows} if rows else {}),
        **_describe_calibration(model, vectors, catalog.labels),
        "layout": catalog.layout,
        "notes": [*catalog.notes, *notes],
        "skipped": skipped,
    }
    print_result(as_json, document, as_text(document, Path(data).name or data), out)


def _check_vectors(file: Path) -> None:
    """Raise UsageError unless this is a file of vectors."""
    from proximetry.data.vectors import COLUMN, SUFFIXES, holds_vectors, parquet_columns

    if file.is_file() and holds_vectors(file):
        return
    columns = parquet_columns(file) if file.suffix.lower() == ".parquet" else ()
    if columns:
        raise UsageError(
            f"{file} has no column {COLUMN!r} of lists of numbers; it has {join_first(columns)}"
        )
    raise UsageError(
        f"not a file of vectors ({', '.join(SUFFIXES)}): {file}. To evaluate an embedder, also "
        "pass images: proximetry evaluate EMBEDDER IMAGES."
    )


def describe(
    queries: "Mapping[int | str, Evaluation]",
    arguments: Mapping[str, Any],
    *,
    per_class: bool,
    confusions: int,
) -> dict[str, Any]:
    """Return the metrics with confidence intervals, and optionally classes and confusions."""
    from proximetry.metrics import retrieve
    from proximetry.metrics.intervals import INTERVALS
    from proximetry.training.evaluator import average_scores

    evaluation = next(iter(queries.values()))
    document: dict[str, Any] = {
        "metrics": average_scores(queries),
        "intervals": {name: [one.low, one.high] for name, one in evaluation.bootstrap().items()},
        "interval_method": INTERVALS,
    }
    if (pairs := evaluation.verification) is not None:
        document["verification"] = {
            "accuracy": pairs.accuracy,
            "standard_error": pairs.standard_error,
            # JSON has no infinity: such a threshold accepts all pairs or none.
            "threshold": pairs.threshold if isfinite(pairs.threshold) else None,
            "folds": len(pairs.fold_accuracies),
            "pairs": pairs.same_pairs + pairs.different_pairs,
            "auc": pairs.auc,
            "eer": pairs.eer,
        }
    if per_class:  # a row of metrics for each class, worst first
        table = {name: column.tolist() for name, column in evaluation.per_class().items()}
        rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        by = "map@r" if "map@r" in table else next(iter(evaluation.scores))
        document["per_class"] = sorted(rows, key=lambda row: float(row[by]))
    if confusions:
        document["confusions"] = [
            {"query": str(query), "nearest": str(other), "count": count}
            for query, other, count in retrieve(**arguments, k=1).confusions()[:confusions]
        ]
    return document


def _describe_calibration(model: Any, vectors: Any, labels: Sequence[str]) -> dict[str, Any]:
    """Return the rates at the thresholds of a calibrated embedder; empty with too few classes."""
    from proximetry.metrics import evaluate_calibration

    calibration = None if model is None else model.calibration
    if calibration is None:
        return {}
    try:
        result = evaluate_calibration(calibration, vectors, labels)
    except ValueError:
        return {}
    return {
        "calibration": {
            "error": result.error,
            "pairs": [rate._asdict() for rate in result.pairs],
            "gallery": [rate._asdict() for rate in result.gallery],
        }
    }


def _calibration_lines(values: Mapping[str, Any]) -> str:
    names = {"pairs": "false accepts of pairs", "gallery": "unknown queries accepted"}
    lines = [f"calibration: expected error {values['error']:.3f}"]
    for key, name in names.items():
        rates = (
            f"{100 * one['false_accepts']:.3g} % (target {100 * one['target']:g} %)"
            for one in values[key]
        )
        lines.append(f"  {name}: {', '.join(rates) or 'not measurable'}")
    return "\n".join(lines)


def as_text(document: Mapping[str, Any], name: str) -> str:
    """Return the tables of an evaluation."""
    from proximetry.cli import evaluate_search_methods
    from proximetry.training.metrics_table import metrics_table

    scores, split = document["metrics"], document["split"]
    kind = "vectors" if document["dataset"] == "vectors" else "images"
    parts = [
        f"{document['images']} {kind} of {document['classes']} classes, split {split}",
        *([document["layout"]] if document["layout"] else []),
        metrics_table({f"{name} ({split})": scores}),
    ]
    if intervals := document["intervals"]:
        bounds = {name: intervals[name] for name in _headline(intervals)}
        bounds_text = (f"{n} {100 * low:.1f}–{100 * high:.1f}" for n, (low, high) in bounds.items())
        parts.append(f"{document['interval_method']}:\n  {', '.join(bounds_text)}")
    else:
        parts.append("No confidence intervals: all queries have the same class.")
    if "verification" in document:
        parts.append(_verification_line(document["verification"], document["similarity"]))
    if "calibration" in document:
        parts.append(_calibration_lines(document["calibration"]))
    if "rows" in document:
        parts += evaluate_search_methods.as_text(document["rows"])
    if "per_class" in document:
        worst = document["per_class"][:MAX_CLASSES]
        rows = {f"{row['label']} ({row['queries']} queries)": row for row in worst}
        table = metrics_table(rows, _headline(scores))
        parts.append(f"The worst {len(rows)} classes:\n{table}")
    if "confusions" in document:
        pairs = document["confusions"]
        lines = [f"{one['count']:6}  {one['query']} → {one['nearest']}" for one in pairs]
        head = "Confusions: class of the query → class of the nearest image"
        parts.append("\n".join([head, *(lines or ["  none"])]))
    parts += [f"note: {note}" for note in document["notes"]]
    skipped = [f"skipped {reason}" for reason in document["skipped"]]
    if skipped:
        parts.append("\n".join(truncate_lines(skipped, "the JSON document (--json or --out)")))
    return "\n\n".join(parts)


def _verification_line(values: Mapping[str, Any], similarity: str) -> str:
    line = (
        f"verification: {100 * values['accuracy']:.1f} ± {100 * values['standard_error']:.1f} % "
        f"of {values['pairs']} pairs (mean and standard error over {values['folds']} folds)"
    )
    threshold = values["threshold"]
    if threshold is None:
        return line
    return f"{line}; same class if {format_bound(threshold, similarity)}"


def _headline(names: Iterable[str]) -> list[str]:
    """Return the first metric, and MAP@R."""
    first, *others = names
    return [first, *(name for name in others if name == "map@r")]
