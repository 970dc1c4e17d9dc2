"""`proximetry check`: the health of a dataset before training."""

import sys
from pathlib import Path
from typing import Any

from proximetry._util.formatting import pluralize
from proximetry.cli.options import AsJson, BatchSize, Device, Flag, LabelsFromName, TableColumns
from proximetry.cli.output import check_out, echo, print_result, progress_bar


def check(
    images: str,
    *,
    model: str | None = None,
    out: Path | None = None,
    suggestions: Path | None = None,
    strict: Flag = False,
    batch_size: BatchSize = 64,
    columns: TableColumns = None,
    labels_from_name: LabelsFromName = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Find duplicates, leakage, wrong labels and unreadable images of a dataset.

    No image changes: `proximetry train IMAGES --data.suggestions suggestions.csv` applies what you
    keep of the suggestions.

    Args:
        images: a folder of class folders, a CSV or Parquet table, a tar file, a dataset that
            `proximetry datasets` lists, or a file of vectors with labels.
        model: folder of a run or of a saved embedder, hub:owner/name, an ONNX file, or the name of
            a backbone; default: a pretrained backbone from an installed package.
        out: also write the findings with thumbnails as a self-contained .html page.
        suggestions: also write what to do with each image as a .csv table.
        strict: exit with code 1 if there are unreadable images, copies across splits or copies in
            several classes, for continuous integration.
    """
    check_out(out, [".html"], [images])
    check_out(suggestions, [".csv"], [images], option="--suggestions")
    from proximetry.data import resolve_source

    resolve_source(images)  # reports a wrong path before torch is imported
    from proximetry.health.finding import KINDS
    from proximetry.health.health import check as find_problems

    notes = list[str]()
    with progress_bar("checking") as progress:
        health = find_problems(
            images,
            model,
            columns=columns,
            labels_from_name=labels_from_name,
            batch_size=batch_size,
            device=device,
            progress=progress,
            report=notes.append,
        )
    notes += health.notes
    document: dict[str, Any] = {
        "images": len(health.catalog),
        "classes": len(health.catalog.class_names),
        "counts": health.counts,
        "errors": health.errors,
        "label_noise": None if health.label_noise is None else round(health.label_noise, 4),
        "findings": [
            {
                "kind": finding.kind,
                "paths": health.paths(finding),
                "reason": finding.reason,
                "action": finding.action,
                "target": finding.target,
                "score": round(finding.score, 4),
            }
            for finding in health.findings
        ],
        "notes": notes,
    }
    lines = [f"{count:>6}  {KINDS[kind].title}" for kind, count in health.counts.items()]
    if health.label_noise is not None:
        lines.append(f"estimated share of wrong labels: {100 * health.label_noise:.1f} %")
    if out is not None:
        lines.append(f"page: {health.page(out)}")
    if suggestions is not None:
        count = pluralize(len(health.suggested()), "suggestion")
        lines.append(f"{count}: {health.suggestions(suggestions)}")
    summary = f"{pluralize(len(health.findings), 'finding')}"
    about = f"{pluralize(len(health.catalog), 'image')}, {summary}"
    print_result(as_json, document, "\n".join([*notes, about, *lines]))
    if strict and health.errors:
        echo(f"proximetry: {pluralize(health.errors, 'error')} in {images}", to_stderr=True)
        sys.exit(1)
