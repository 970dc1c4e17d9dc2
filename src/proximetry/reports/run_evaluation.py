"""Re-evaluate the embedder of a run, query by query."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, join_first
from proximetry._util.machine import resolve_device
from proximetry._util.types import Progress
from proximetry.data import Catalog, open_dataset, resolve_source
from proximetry.data.datasets import TABLES
from proximetry.metrics import Evaluation, Interval, RetrievalResult, retrieve
from proximetry.metrics.scores import COUNTS
from proximetry.models import Embedder
from proximetry.reports.run_record import RunRecord
from proximetry.training import evaluator
from proximetry.training.evaluation_inputs import (
    check_comparison,
    choose_split,
    drop_unused_roles,
    evaluation_arguments,
)
from proximetry.training.sources.training_data import open_catalog, split_rows

Rows = npt.NDArray[np.int64]

NEIGHBORS = 8  # images shown beside a query
MAX_MAP_IMAGES = 1500
_IMAGES_PER_CLASS = 20
# Metrics on another device differ in the last digits; metrics of other images differ by more.
_ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class RunEvaluation:
    """The evaluation of the embedder of a run.

    Attributes:
        catalog: the evaluated images.
        split: evaluated split of the data: test, held_out or all.
        train: the training images of the run, if they are in the same data.
        vectors: the embeddings of the catalog.
        evaluation: all scores of every query.
        scores: their means.
        neighbors: the nearest images of each query.
        queries: rows of the catalog that are queries.
        gallery: rows of the catalog that are searched.
        matches_run: whether the metrics equal those of the saved epoch in the run's results.
        notes: warnings about the images and the metrics.
        unreadable: image files without a thumbnail on the page.
    """

    embedder: Embedder
    catalog: Catalog
    split: str
    train: Catalog | None
    vectors: Tensor
    evaluation: Evaluation
    scores: dict[str, Any]
    neighbors: RetrievalResult
    queries: Rows
    gallery: Rows
    matches_run: bool
    notes: list[str]
    unreadable: set[str] = field(default_factory=set)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % bootstrap confidence intervals of the means, resampled by class."""
        return self.evaluation.bootstrap()

    @property
    def ranking_metric(self) -> str:
        """The score that orders queries and classes."""
        names = list(self.evaluation.scores)
        return "map@r" if "map@r" in names else names[0]

    def extremes(self, count: int, *, best: bool) -> list[int]:
        """Return the queries with the highest or the lowest scores, at most one per class.

        Ties: the best are ordered by lowest similarity to the nearest image, the worst by highest
        (most confident errors).
        """
        sign = 1 if best else -1
        scores, similarities = (
            self.evaluation.scores[self.ranking_metric],
            self.neighbors.similarities,
        )
        order = np.lexsort((sign * similarities[:, 0], -sign * scores))
        return self.one_per_class(order[self.evaluation.is_scored[order]], count)

    def one_per_class(self, queries: Rows, count: int) -> list[int]:
        """Return the first query of each class."""
        first: dict[int, int] = {}
        for query in queries:
            first.setdefault(int(self.evaluation.query_codes[query]), int(query))
        return list(first.values())[:count]

    def first_positive(self, query: int) -> int | None:
        """Return the rank of the nearest image of the query's class, from 1, if known."""
        hits = np.flatnonzero(self.neighbors.hits[query])
        if len(hits):
            return int(hits[0]) + 1
        ranks = self.evaluation.scores.get("mrr")
        return None if ranks is None else round(1 / float(ranks[query]))

    def sample(self) -> Rows:
        """Return the rows of the catalog for a map: all, or a sample with seed 0.

        The sample has enough images of each of its classes to show whether they are close.
        """
        codes, classes = self.catalog.codes, len(self.catalog.class_names)
        if len(codes) <= MAX_MAP_IMAGES:
            return np.arange(len(codes))
        draw = np.random.default_rng(0)
        rows, class_order = draw.permutation(len(codes)), draw.permutation(classes)
        rows = rows[np.argsort(class_order[codes[rows]], kind="stable")]  # class by class
        ordered = class_order[codes[rows]]
        within = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
        subset = rows[within < max(_IMAGES_PER_CLASS, MAX_MAP_IMAGES // classes)]
        return np.sort(subset[:MAX_MAP_IMAGES])

    def is_comparable_to(self, other: RunEvaluation) -> bool:
        """Return whether both have the same queries and the same gallery."""
        return self._compared == other._compared

    @cached_property
    def _compared(self) -> tuple[Any, ...]:
        catalog = self.catalog
        # Resolved: two folders may contain different images with the same names.
        files = [os.path.realpath(catalog.file(row)) for row in range(len(catalog))]
        return catalog.labels, catalog.queries, catalog.galleries, files


def evaluate_run(
    record: RunRecord,
    source: str | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    vectors: Tensor | None = None,
) -> RunEvaluation:
    """Evaluate the embedder of a run on the images that the run was evaluated on.

    Args:
        record: the run.
        source: other images, as for `evaluate`; default: those of the recipe.
        root: the current folder of the dataset.
        progress: called with (done, total) while images are embedded and neighbors searched.
        columns: a table's column names by field; default: as in the recipe.
        vectors: the embeddings of the images, if already computed.

    Raises:
        ValueError: if there is nothing to evaluate, or the images cannot be read.
    """
    embedder = Embedder.load(record.folder.embedder, device=resolve_device())
    settings = record.recipe.evaluation
    catalog = _open(record, source, root, columns)
    catalog, split, train, notes = _evaluated_images(record, embedder, catalog, source)
    notes += check_comparison(catalog, settings.metrics)
    if vectors is None:
        vectors, catalog, bad = evaluator.encode_readable(embedder, catalog, progress=progress)
        if bad:
            notes.append(f"{len(bad)} images cannot be read and are skipped: {join_first(bad, 3)}")
            check_comparison(catalog, settings.metrics)
    catalog = drop_unused_roles(catalog)
    similarity = embedder.architecture.similarity
    dims = [dim for dim in settings.eval_dims if dim < embedder.dim]
    evaluations = evaluator.score_queries(
        vectors,
        catalog,
        similarity,
        settings.metrics,
        dims,
        binary=embedder.architecture.binary,
        progress=progress,
    )
    scores = evaluator.average_scores(evaluations)
    recorded_scores = record.selected.get(split, {})
    changes = [
        f"{name} {100 * recorded_scores[name]:.2f} → {100 * scores[name]:.2f}"
        for name in scores
        if isinstance(recorded_scores.get(name), float)
        and name not in COUNTS
        and not math.isclose(recorded_scores[name], scores[name], abs_tol=_ROUNDING)
    ]
    if changes:
        notes.append(
            "the images or the embedder have changed since the run was evaluated: "
            f"{join_first(changes, 4)}"
        )
    if not record.results:
        epoch = (embedder.metrics or {}).get("epoch")
        notes.append(f"the run is unfinished; its last saved embedder is of epoch {epoch}")
    queries, gallery = (
        np.arange(len(catalog)) if role is None else np.flatnonzero(role)
        for role in (catalog.queries, catalog.galleries)
    )
    return RunEvaluation(
        embedder,
        catalog,
        split,
        train,
        vectors,
        next(iter(evaluations.values())),
        scores,
        retrieve(**evaluation_arguments(vectors, catalog, similarity), k=NEIGHBORS),
        queries,
        gallery,
        split in record.selected and not changes,
        notes,
    )


def _open(
    record: RunRecord, source: str | None, root: Path | None, columns: Mapping[str, str] | None
) -> Catalog:
    recipe, data = record.recipe, record.recipe.data
    if source is None:
        return open_catalog(recipe if root is None else recipe.override({"data.root": str(root)}))
    name, path = resolve_source(source, root)
    if columns is None and name in TABLES:
        columns = data.columns
    return open_dataset(
        name,
        path,
        columns=columns,
        labels_from_name=data.labels_from_name if name == "folder" else None,
        allow_missing=data.bad_images == "skip",
    )


def _evaluated_images(
    record: RunRecord, embedder: Embedder, catalog: Catalog, source: str | None
) -> tuple[Catalog, str, Catalog | None, list[str]]:
    """Return the images that the run was evaluated on, or the split of other data to evaluate."""
    train: Catalog | None = None
    with suppress(ValueError):  # other images may be unsuitable for training
        rows = split_rows(catalog, record.recipe).rows
        train = catalog.subset(rows["train"])
    if train is not None and list(train.class_names) == embedder.class_names:
        usable = [name for name in ("test", "held_out") if len(rows[name])]
        if not usable:
            raise UsageError(
                "nothing to evaluate: there are no held-out classes and no test set. Pass other "
                "images as --data."
            )
        split = next((name for name in usable if name in record.selected), usable[0])
        return catalog.subset(rows[split]), split, train, []
    images_of_split, split = choose_split(catalog, None, source or str(catalog.root))
    images = f"{format_int(len(images_of_split))} images in {catalog.root} (split {split})"
    note = f"evaluated on {images}, not on the run's images"
    notes = [note, *evaluator.leakage_warnings(embedder, images_of_split)]
    return images_of_split, split, None, notes
