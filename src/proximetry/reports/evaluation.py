"""Evaluate the embedder of a run again, query by query."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from proximetry._util.errors import Steps, UsageError, some, spaced
from proximetry._util.machine import resolve_device
from proximetry.data import Catalog, open_dataset, resolve_source
from proximetry.data.datasets import TABLES
from proximetry.metrics import Evaluation, Interval, RetrievalResult, map_embeddings, retrieve
from proximetry.metrics.scores import COUNTS
from proximetry.models import Embedder
from proximetry.reports.record import RunRecord
from proximetry.training.evaluator import encode_readable, leakage_warnings, means, score_queries
from proximetry.training.query_gallery import (
    check_comparison,
    choose_split,
    compared,
    with_needed_roles,
)
from proximetry.training.sources.base import divide, open_catalog

Rows = npt.NDArray[np.int64]

NEIGHBORS = 8
"""Number of images beside a query."""
MAPPED = 1500
"""Maximum number of images on a map."""
_OF_A_CLASS = 20
# Figures of another device differ in the last digits; those of other images differ by more.
_ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class RunEvaluation:
    """The evaluation of the embedder of a run.

    Attributes:
        embedder: the one that was evaluated.
        catalog: the images, with the roles they need.
        split: which images of the data they are: test, held_out or all.
        vectors: their embeddings, row by row.
        evaluation: every score of every query.
        scores: the means of those.
        neighbors: the nearest images of each query.
        train: the images that the run was trained on, if they are among the same data.
        queries: the rows of the catalog that are queries.
        gallery: the rows that are searched.
        agrees: whether the figures are those of the selected epoch in the run's results.
        notes: warnings about the images and the figures.
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
    agrees: bool
    notes: list[str]

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % bootstrap confidence intervals of the means, resampled by class."""
        return self.evaluation.bootstrap()

    @property
    def ranking(self) -> str:
        """The score that queries and classes are ordered by."""
        names = list(self.evaluation.scores)
        return "map@r" if "map@r" in names else names[0]

    def best(self, count: int) -> list[int]:
        """Queries with the highest scores, at most one per class.

        Of equal scores, the hardest: those least similar to their nearest image.
        """
        return self._first_of_classes(-self.evaluation.scores[self.ranking], self._nearness, count)

    def worst(self, count: int) -> list[int]:
        """Queries with the lowest scores, at most one per class.

        Of equal scores, the most confident errors: those most similar to their nearest image.
        """
        return self._first_of_classes(self.evaluation.scores[self.ranking], -self._nearness, count)

    @property
    def _nearness(self) -> npt.NDArray[Any]:
        return self.neighbors.similarities[:, 0]

    def _first_of_classes(
        self, first: npt.NDArray[Any], then: npt.NDArray[Any], count: int
    ) -> list[int]:
        chosen: dict[int, int] = {}
        scored = self.evaluation.scored
        for query in np.lexsort((then, first)):
            if len(chosen) == count:
                break
            if scored[query]:
                chosen.setdefault(int(self.evaluation.query_codes[query]), int(query))
        return list(chosen.values())

    def first_positive(self, query: int) -> int | None:
        """The place of the nearest image of the query's class, from 1, if it is known."""
        hits = np.flatnonzero(self.neighbors.hits[query])
        if len(hits):
            return int(hits[0]) + 1
        ranks = self.evaluation.scores.get("mrr")
        return None if ranks is None else round(1 / float(ranks[query]))

    def sample(self) -> Rows:
        """Return the rows of the catalog for a map: all, or a sample drawn with seed 0.

        Of many classes some, with enough images each to see whether they lie together.
        """
        codes, classes = self.catalog.codes, len(self.catalog.class_names)
        if len(codes) <= MAPPED:
            return np.arange(len(codes))
        draw = np.random.default_rng(0)
        rows, places = draw.permutation(len(codes)), draw.permutation(classes)
        rows = rows[np.argsort(places[codes[rows]], kind="stable")]  # class by class
        ordered = places[codes[rows]]
        within = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
        chosen = rows[within < max(_OF_A_CLASS, MAPPED // classes)]
        return np.sort(chosen[:MAPPED])

    def map(self) -> tuple[Rows, npt.NDArray[np.float32]]:
        """Return rows of the catalog and their points in the unit square."""
        rows = self.sample()
        similarity = self.embedder.architecture.similarity
        return rows, map_embeddings(self.vectors[rows], similarity=similarity)

    def compares_like(self, other: RunEvaluation) -> bool:
        """Return whether both have the same queries and the same gallery."""
        mine, theirs = self.catalog, other.catalog
        return (mine.labels, mine.queries, mine.galleries, self._files) == (
            theirs.labels,
            theirs.queries,
            theirs.galleries,
            other._files,
        )

    @cached_property
    def _files(self) -> list[str]:
        """Resolved paths: two folders may contain different images with the same names."""
        return [os.path.realpath(self.catalog.file(row)) for row in range(len(self.catalog))]


def evaluate_run(
    record: RunRecord,
    source: str | None = None,
    root: Path | None = None,
    steps: Steps = lambda what, done, total: None,
    *,
    columns: Mapping[str, str] | None = None,
    vectors: Tensor | None = None,
) -> RunEvaluation:
    """Evaluate the embedder of a run on the images the run was evaluated on.

    Args:
        record: the run.
        source: other images, as `evaluate` takes them; default: those of the recipe.
        root: where the images of the dataset lie now.
        steps: called with (what, done, total) now and then.
        columns: what a table calls its columns, if `source` is one; default: as in the recipe.
        vectors: the embeddings of the images, if they are known.

    Raises:
        ValueError: if there is nothing to evaluate, or the images cannot be read.
    """
    embedder = Embedder.load(record.folder.embedder, device=resolve_device())
    wanted = record.recipe.evaluation
    whole = _open(record, source, root, columns)
    catalog, split, train, notes = _evaluated_images(record, embedder, whole, source)
    notes += check_comparison(catalog, wanted.metrics)
    if vectors is None:
        vectors, catalog, bad = encode_readable(
            embedder, catalog, progress=lambda done, total: steps("embedding", done, total)
        )
        if bad:
            notes.append(f"{len(bad)} images cannot be read and are skipped: {some(bad, 3)}")
            check_comparison(catalog, wanted.metrics)
    catalog = with_needed_roles(catalog)
    similarity = embedder.architecture.similarity
    dims = [dim for dim in wanted.eval_dims if dim < embedder.dim]
    scored = score_queries(
        vectors,
        catalog,
        similarity,
        wanted.metrics,
        dims,
        binary=embedder.architecture.binary,
        progress=lambda done, total: steps("searching", done, total),
    )
    scores = means(scored)
    changed = _changed(record, split, scores)
    if changed:
        notes.append(
            "these images, or the embedder, are not those of the evaluation at the end of the run, "
            f"so the figures differ: {some(changed, 4)}"
        )
    if not record.results:
        epoch = (embedder.metrics or {}).get("epoch")
        notes.append(f"the embedder is the one that was saved last, of epoch {epoch}")
    every = np.arange(len(catalog))
    queries, gallery = (
        every if role is None else np.flatnonzero(role)
        for role in (catalog.queries, catalog.galleries)
    )
    return RunEvaluation(
        embedder,
        catalog,
        split,
        train,
        vectors,
        next(iter(scored.values())),
        scores,
        retrieve(**compared(vectors, catalog, similarity), k=NEIGHBORS),
        queries,
        gallery,
        split in record.selected and not changed,
        notes,
    )


def _open(
    record: RunRecord, source: str | None, root: Path | None, columns: Mapping[str, str] | None
) -> Catalog:
    if source is not None:
        name, place = resolve_source(source, root)
        d = record.recipe.data
        if columns is None and name in TABLES:
            columns = d.columns
        return open_dataset(name, place, columns=columns, allow_missing=d.bad_images == "skip")
    if root is not None:
        moved = record.recipe.override({"data.root": str(root)})
        return open_catalog(moved)
    return open_catalog(record.recipe)


def _evaluated_images(
    record: RunRecord, embedder: Embedder, catalog: Catalog, source: str | None
) -> tuple[Catalog, str, Catalog | None, list[str]]:
    """The images that the run was evaluated on; of other data, those that `evaluate` takes."""
    train: Catalog | None
    try:
        rows = divide(catalog, record.recipe).rows
        train = catalog.subset(rows["train"])
    except ValueError:  # they could not be trained on
        train = None
    if train is not None and list(train.class_names) == embedder.class_names:
        usable = [name for name in ("test", "held_out") if len(rows[name])]
        if not usable:
            raise UsageError(
                "no image was held out of training and there is no test set, so there is nothing "
                "to evaluate; name other images with --data"
            )
        split = next((name for name in usable if name in record.selected), usable[0])
        return catalog.subset(rows[split]), split, train, []
    chosen, split = choose_split(catalog, None, source or str(catalog.root))
    note = (
        f"these are not the images that the run was trained and evaluated on, but "
        f"{spaced(len(chosen))} others in {catalog.root} (split {split})"
    )
    return chosen, split, None, [note, *leakage_warnings(embedder, chosen)]


def _changed(record: RunRecord, split: str, scores: dict[str, Any]) -> list[str]:
    """The figures that are not those of the selected epoch in the run's results."""
    before = record.selected.get(split, {})
    return [
        f"{name} {100 * before[name]:.2f} → {100 * scores[name]:.2f}"
        for name in scores
        if isinstance(before.get(name), float)
        and name not in COUNTS
        and not math.isclose(before[name], scores[name], abs_tol=_ROUNDING)
    ]
