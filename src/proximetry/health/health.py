"""`Health`: the problems of a dataset; `check` finds them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write
from proximetry._util.types import Progress
from proximetry.data import Catalog, VectorCatalog, open_dataset, resolve_source
from proximetry.data.suggestions import Suggestion, write_suggestions
from proximetry.health.class_findings import class_sizes, outliers, similar_classes
from proximetry.health.copies import copy_findings, find_copies
from proximetry.health.embedded_images import EmbeddedImages
from proximetry.health.file_findings import tiny_images, unreadable_images
from proximetry.health.finding import KINDS, Finding, suggest_once
from proximetry.health.label_errors import label_findings
from proximetry.metrics.label_model import MIN_CLASS_SIZE, fit_labels
from proximetry.models import Embedder
from proximetry.models.weights import packaged_backbone
from proximetry.search.indexing import load_model
from proximetry.search.manifest import Report, ignore

Images: TypeAlias = Catalog | str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Health:
    """The problems of a dataset.

    Attributes:
        catalog: all images.
        findings: those with the largest expected gain first.
        label_noise: the estimated share of wrong labels; None if labels were not checked.
        wrong_labels: the probability that the label of each image is wrong; 0 if not checked.
        notes: what was not checked, and remarks on the data.
    """

    catalog: Catalog
    findings: tuple[Finding, ...]
    label_noise: float | None
    wrong_labels: npt.NDArray[np.float64]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {KINDS[kind].title}" for kind, count in self.counts.items())
        return f"Health({len(self.catalog)} images: {counts or 'no findings'})"

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings of each kind that occurs, in the order of `KINDS`."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    @property
    def errors(self) -> int:
        """The number of findings that make results wrong for certain."""
        return sum(KINDS[finding.kind].strict for finding in self.findings)

    def paths(self, finding: Finding) -> list[str]:
        """Return the paths of the images of a finding, as in the catalog."""
        return [self.catalog.paths[row] for row in finding.rows]

    def suggested(self) -> list[Suggestion]:
        """Return one suggestion for each image with one, in the order of the findings."""
        return suggest_once(self.findings, [*self.catalog.paths])

    def suggestions(self, file: str | os.PathLike[str]) -> Path:
        """Write a CSV file for `Catalog.apply_suggestions` and the recipe key `data.suggestions`.

        Columns: path, kind, action (drop, relabel, move), label, split, reason.
        """
        write_suggestions(Path(file), self.suggested())
        return Path(file)

    def page(self, file: str | os.PathLike[str]) -> Path:
        """Write a self-contained HTML page with at most 200 findings."""
        from proximetry.health.page import health_page

        atomic_write(Path(file), health_page(self))
        return Path(file)


def check(
    images: Images,
    model: Embedder | str | os.PathLike[str] | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    labels_from_name: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Health:
    """Find problems of a dataset before training; no file changes.

    Finds unreadable and tiny images, exact copies and near-copies (across splits, across classes
    and within a class), probable label errors, classes that look like one, very small and very
    large classes, and outliers.

    Args:
        images: a catalog, a folder of class folders, a table, a tar file, a dataset, or a file of
            vectors, which are compared as they are.
        model: an embedder, or any source of `Embedder.load`, such as a run; by default a
            pretrained network from an installed package.
        columns: names of a table's columns, if they are not path, label and so on.
        labels_from_name: as in `Catalog.from_folder`.
        batch_size: images per forward pass.
        device: such as "cpu" or "cuda:1"; None chooses the best one.
        progress: called with (done, total) while images are embedded and compared.
        report: called with messages, such as the network.
    """
    catalog = _open(images, columns, labels_from_name)
    report, progress = report or ignore, progress or ignore
    vectors, errors = _embed(catalog, model, batch_size, device, progress, report)
    findings = [*unreadable_images(errors)]
    rows = np.array([row for row in range(len(catalog)) if row not in errors], np.int64)
    notes, labels, wrong_labels = [*catalog.remarks()], None, np.zeros(len(catalog))
    if len(rows) < 2:
        notes.append(f"{len(rows)} readable images: nothing to compare")
        return Health(catalog, _order(findings), None, wrong_labels, tuple(notes))
    has_files = not isinstance(catalog, VectorCatalog) or (
        catalog.has_paths and os.path.exists(catalog.file(0))
    )
    part = EmbeddedImages.search(catalog, rows, vectors, has_files, progress)
    if len(part.class_sizes) > 1 and part.class_sizes.max() >= MIN_CLASS_SIZE:
        labels = fit_labels(part.vectors, part.codes, part.neighbors)
        wrong_labels[rows] = labels.wrong
    else:
        notes.append(
            f"labels are not checked: there is only one class, or none has {MIN_CLASS_SIZE} images"
        )
    copies = [*copy_findings(part, find_copies(part), labels)]
    handled = {finding.rows[0] for finding in copies}
    label_errors = label_findings(part, labels) if labels else ()
    found = chain(
        copies,
        (one for one in label_errors if one.rows[0] not in handled),
        similar_classes(part),
        class_sizes(part),
        outliers(part),
        tiny_images(part.catalog) if has_files else (),
    )
    findings += [one._replace(rows=tuple(rows[[*one.rows]].tolist())) for one in found]
    noise = None if labels is None else labels.noise
    return Health(catalog, _order(findings), noise, wrong_labels, tuple(notes))


def _order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda one: (-one.gain, one.rows)))


def _open(
    images: Images, columns: Mapping[str, str] | None, labels_from_name: str | None
) -> Catalog:
    if isinstance(images, Catalog):
        return images
    name, root = resolve_source(images)
    options: dict[str, Any] = {"columns": columns, "labels_from_name": labels_from_name}
    return open_dataset(name, root, allow_missing=True, **options)


def _embed(
    catalog: Catalog,
    model: Embedder | str | os.PathLike[str] | None,
    batch_size: int,
    device: str | None,
    progress: Progress,
    report: Report,
) -> tuple[Any, dict[int, Exception]]:
    """Return the vectors of the readable images, and by row why the others cannot be read."""
    errors: dict[int, Exception] = {}
    if isinstance(catalog, VectorCatalog):
        if model is not None:
            raise UsageError(f"{catalog.root} holds vectors, which need no model. Remove it.")
        return catalog.vectors, errors
    embedder = load_model(packaged_backbone() if model is None else model, "", device, report)
    files = [catalog.file(row) for row in range(len(catalog))]
    vectors = embedder.encode(
        files,
        batch_size,
        progress=lambda done: progress(done, len(files)),
        on_error=errors.__setitem__,
    )
    return vectors.numpy(), errors
