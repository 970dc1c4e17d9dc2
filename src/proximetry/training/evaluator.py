"""The evaluator of a run, and the evaluation of saved embedders and of vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first
from proximetry._util.types import Progress
from proximetry.data import Catalog, VectorCatalog
from proximetry.data.pixel_cache import describe_duplicates
from proximetry.kernels.cuda_graphs import GraphedInference
from proximetry.metrics import Evaluation, Metrics, evaluate
from proximetry.models import Embedder, evaluation_mode
from proximetry.models.constants import Similarity
from proximetry.models.embedder import explain_nonfinite, extract_features
from proximetry.models.encoding import OnError
from proximetry.models.lora import merge_lora, merged_copy
from proximetry.models.pca import (
    principal_axes,
    regularized_moments,
    second_moments,
    subtract_mean,
    with_pca,
)
from proximetry.recipe.schema import EvaluationConfig, Recipe
from proximetry.training.distributed import World, share_buffers
from proximetry.training.errors import RunError
from proximetry.training.evaluation_inputs import (
    check_comparison,
    drop_unused_roles,
    evaluation_arguments,
)
from proximetry.training.sources.training_data import Rows, TrainingData
from proximetry.training.updater import autocast

Scores = dict[str, Any]
"""Metrics by name. ``dims``: those of the first d dimensions, by d as text; ``codes``: those of
trained binary codes by Hamming distance; ``with_distractors``: for held-out classes, the metric
that selects the epoch, with training images as distractors."""
CODES = "codes"
QueryScores = dict[int | str, Evaluation]
"""Scores of every query: with all dimensions first, then with the first d by d, and `CODES`."""

MAX_DISTRACTORS = 10_000
"""Maximum number of training images in the gallery of the held-out classes."""


def score_queries(
    vectors: Tensor,
    catalog: Catalog,
    similarity: Similarity,
    metrics: Metrics,
    eval_dims: Sequence[int] = (),
    *,
    binary: bool = False,
    rows: Rows | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> QueryScores:
    """Score every query with all dimensions of the embeddings, the first d, and binary codes.

    Each process of a ``group`` passes its share of the catalog and the numbers of its ``rows``.
    """
    options: Any = {"metrics": metrics, "group": group, "progress": progress}
    scored: QueryScores = {
        dim: evaluate(
            **evaluation_arguments(vectors[:, :dim], catalog, similarity, rows), **options
        )
        for dim in (vectors.shape[1], *eval_dims)
    }
    if binary:
        options["metrics"] = metrics.per_query_only()
        arguments = evaluation_arguments(vectors, catalog, similarity, rows)
        scored[CODES] = evaluate(**arguments, binary=True, **options)
    return scored


def average_scores(query_scores: Mapping[int | str, Evaluation]) -> Scores:
    """Return the mean metrics of the queries that `score_queries` scored."""
    averages = {key: evaluation.mean() for key, evaluation in query_scores.items()}
    all_dims, *eval_dims = (key for key in averages if key != CODES)
    scores: Scores = dict(averages[all_dims])
    if eval_dims:
        scores["dims"] = {str(dim): averages[dim] for dim in eval_dims}
    if CODES in averages:
        scores[CODES] = averages[CODES]
    return scores


def selection_value(scores: Scores, metric: str) -> float:
    """Return the metric that selects the epoch, with training images as distractors if any."""
    return float(scores.get("with_distractors", scores)[metric])


def evaluate_embedder(
    embedder: Embedder,
    catalog: Catalog,
    *,
    metrics: Metrics | None = None,
    eval_dims: Sequence[int] = (),
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Evaluate an embedder on a catalog as its training run did.

    Args:
        embedder: with its similarity and preprocessing.
        catalog: the images; with queries and a gallery, or all against all.
        metrics: the metrics to compute.
        eval_dims: also evaluate the first d dimensions, for each d.
        batch_size: images per forward pass; None uses that of the training recipe, which gives
            bit-identical metrics.
        progress: called with (done, total) while images are embedded and neighbors searched.

    Examples:
        >>> catalog = VectorCatalog.from_arrays(np.eye(4), ["a", "a", "b", "b"])
        >>> embedder = Embedder.create("vectors", None, weights="none", input_dim=4)
        >>> evaluate_embedder(embedder, catalog, metrics=Metrics(recall_at=(2,)))["recall@2"]
        0.5
    """
    metrics = metrics or Metrics()
    check_comparison(catalog, metrics)
    vectors = encode_catalog(embedder, catalog, batch_size, progress)
    scored = score_queries(
        vectors,
        drop_unused_roles(catalog),
        embedder.architecture.similarity,
        metrics,
        eval_dims,
        binary=embedder.architecture.binary,
        progress=progress,
    )
    return average_scores(scored)


def leakage_warnings(embedder: Embedder, catalog: Catalog) -> list[str]:
    """Return warnings about classes that the embedder was trained on, and duplicate images."""
    warnings = [] if isinstance(catalog, VectorCatalog) else describe_duplicates(catalog)
    if trained := sorted({*(embedder.class_names or ())} & {*catalog.class_names}):
        warnings.insert(
            0,
            f"the embedder was trained on {len(trained)} of {len(catalog.class_names)} classes, by "
            f"their names, so not all classes are unseen: {join_first(trained)}",
        )
    return warnings


def saved_evaluation(embedder: Embedder | None) -> EvaluationConfig:
    """Return the evaluation keys of a saved embedder's recipe; else the defaults."""
    saved = {} if embedder is None else (embedder.recipe or {}).get("evaluation", {})
    try:
        return EvaluationConfig.model_validate(saved)
    except ValidationError:
        return EvaluationConfig()


def encode_catalog(
    embedder: Embedder,
    catalog: Catalog,
    batch_size: int | None = None,
    progress: Progress | None = None,
    on_error: OnError | None = None,
) -> Tensor:
    """Embed the images of a catalog as the evaluations of the training run do.

    With ``on_error``, called with row and error, unreadable images are skipped.
    """
    if batch_size is None:
        batch_size = saved_evaluation(embedder).batch_size
    check_input(embedder, catalog)
    files: Any = [catalog.file(row) for row in range(len(catalog))]
    if isinstance(catalog, VectorCatalog) and not embedder.takes_images:
        files = catalog.vectors
    return embedder.encode(
        files,
        batch_size,
        progress=None if progress is None else lambda done: progress(done, len(files)),
        on_error=on_error,
    )


def encode_readable(
    embedder: Embedder,
    catalog: Catalog,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, Catalog, list[str]]:
    """Embed the readable images; also return their catalog, and the errors of the others."""
    bad: dict[int, Exception] = {}
    vectors = encode_catalog(embedder, catalog, batch_size, progress, bad.__setitem__)
    if len(bad) == len(catalog):
        raise ValueError(f"none of the {len(bad)} images can be read: {bad[0]}")
    if not bad:
        return vectors, catalog, []
    readable = np.ones(len(catalog), bool)
    readable[[*bad]] = False
    return vectors, catalog.subset(readable), [str(bad[row]) for row in sorted(bad)]


def check_input(embedder: Embedder, catalog: Catalog) -> None:
    """Reject vectors without images for an embedder of images, and images for one of vectors."""
    expected = embedder.preprocessing
    if embedder.takes_images:
        if isinstance(catalog, VectorCatalog) and not catalog.has_paths:
            raise UsageError(
                f"{catalog.root} contains vectors, but this embedder takes images. To evaluate the "
                "vectors, use `proximetry evaluate` without an embedder."
            )
    elif not isinstance(catalog, VectorCatalog):
        raise UsageError(f"this embedder takes {expected}, but {catalog.root} contains images")
    elif tuple(catalog.vectors.shape[1:]) != getattr(expected, "shape", ()):
        width = catalog.vectors.shape[1]
        raise UsageError(f"this embedder takes {expected}, but {catalog.root} has {width}")


class SplitScores(NamedTuple):
    """Scores by split, and their embedder, with PCA folded into the head.

    ``vectors`` are the embeddings of this process's share of each split.
    """

    scores: dict[str, Scores]
    embedder: Embedder
    vectors: dict[str, Tensor]


@dataclass
class Evaluator:
    """Evaluates a run's embedder on its held-out classes and its test set.

    The embeddings equal those of the saved embedder for the image files.

    Attributes:
        recipe: the recipe of the run.
        trained_embedder: the embedder that is trained, or its moving average.
        data: the run's data.
        graph: whether the network runs as a CUDA graph.
        on_graph_failure: called with the reason if the graph cannot be recorded; None raises.
    """

    recipe: Recipe
    trained_embedder: Embedder
    data: TrainingData
    graph: bool
    on_graph_failure: Callable[[str], None] | None = None

    @cached_property
    def embedder(self) -> Embedder:
        """The embedder that is evaluated and saved: the trained one, with LoRA a merged copy."""
        trained, with_lora = self.trained_embedder, self.recipe.model.lora_rank is not None
        return merged_copy(trained) if with_lora else trained

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.data.world

    @cached_property
    def _labels(self) -> npt.NDArray[np.str_]:
        return np.asarray(self.data.catalog.labels)

    @cached_property
    def _graphed(self) -> GraphedInference:
        features = partial(extract_features, self.embedder, stage=self.data.stage)
        return GraphedInference(features, self.on_graph_failure)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.world.size > 1 else None

    def evaluate(self, splits: Sequence[str], *, full_precision: bool = False) -> SplitScores:
        """Evaluate the current weights, in the precision of training or in float32."""
        self._merge()
        share_buffers(self.embedder, self.world)
        with torch.no_grad(), evaluation_mode(self.embedder):
            embedder, distractors = self._fit_on_train("held_out" in splits, full_precision)
            scores, vectors = dict[str, Scores](), dict[str, Tensor]()
            for split in splits:
                rows = self._share(self.data.rows[split])
                vectors[split] = torch.cat([*self._embed(embedder, rows, full_precision)])
                scores[split] = self._score(vectors[split], split)
                if split == "held_out":
                    with self._autocast(full_precision):
                        distractors = embedder.project(distractors)
                    scores[split] |= self._search_with_distractors(vectors[split], distractors)
        return SplitScores(scores, embedder, vectors)

    def embed(self, rows: Rows) -> Tensor:
        """Return the embeddings of rows of the catalog, before any PCA, on every process."""
        self._merge()
        with torch.no_grad(), evaluation_mode(self.embedder):
            return torch.cat([*self._embed(self.embedder, rows, full_precision=False)])

    def _merge(self) -> None:
        """Merge the trained LoRA weights into the network that is evaluated and saved."""
        if self.trained_embedder is not self.embedder:
            merge_lora(self.trained_embedder, self.embedder)

    def _score(self, vectors: Tensor, split: str) -> Scores:
        e, rows = self.recipe.evaluation, self.data.rows[split]
        # The roles of the whole split: those of a share would differ between processes.
        catalog = drop_unused_roles(self.data.catalog.subset(rows))
        part = catalog.subset(self._share(np.arange(len(rows))))
        dims = [dim for dim in e.eval_dims if dim < vectors.shape[1]]
        scored = score_queries(
            vectors,
            part,
            e.similarity,
            e.metrics,
            dims,
            binary=self.recipe.model.bits is not None,
            rows=self._share(rows),
            group=self._group,
        )
        return average_scores(scored)

    def _share(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the part that this process embeds, in the order of ranks."""
        return rows[self.world.local_slice(len(rows))]

    def _search_with_distractors(self, vectors: Tensor, distractors: Tensor) -> Scores:
        """Return the metric that selects the epoch, with training images as distractors.

        A few held-out classes are easy to separate even when overfitting moves unseen images toward
        the training classes; distractors reveal this.
        """
        e, labels = self.recipe.evaluation, self._labels
        held_out = self._share(self.data.rows["held_out"])
        train = self._share(self.data.rows["train"])
        gallery = np.concatenate([held_out, train[self._distractors]])
        scores = evaluate(
            torch.cat([vectors, distractors]),
            labels[gallery],
            queries=vectors,
            query_labels=labels[held_out],
            ignore_groups=gallery,  # excludes self-matches
            query_ignore_groups=held_out,
            metrics=e.metrics.per_query_only(),
            similarity=e.similarity,
            group=self._group,
        )
        # Clusterings and pairs are of the held-out images only.
        name = e.select_by
        return {"with_distractors": {name: scores[name]}} if name in scores else {}

    @cached_property
    def _distractors(self) -> npt.NDArray[np.bool_]:
        """Which of this process's training images are in the gallery of the held-out classes."""
        train, held_out = self.data.rows["train"], self.data.rows["held_out"]
        # A split "val" may have classes that are trained on.
        candidates = np.flatnonzero(~np.isin(self._labels[train], self._labels[held_out]))
        mask = np.zeros(len(train), bool)
        mask[candidates[:: max(1, -(-len(candidates) // MAX_DISTRACTORS))]] = True
        return self._share(mask)

    def _fit_on_train(
        self, with_distractors: bool, full_precision: bool
    ) -> tuple[Embedder, Tensor]:
        """Fit PCA or the mean of codes on the training images, if the recipe has them.

        Returns the embedder with these, and the features of the distractors.
        """
        rows, model = self._share(self.data.rows["train"]), self.recipe.model
        dim, binary = model.pca_dim, model.bits is not None
        mask = self._distractors if with_distractors else np.zeros(len(rows), bool)
        if dim is None and not binary:
            rows, mask = rows[mask], mask[mask]
        moments, distractor_features, finite, start = None, [], [], 0
        total = torch.zeros(self.embedder.dim, dtype=torch.float64, device=self.world.device)
        for features in self._features_of(rows, full_precision):
            distractor_features.append(features[mask[start : start + len(features)]])
            start += len(features)
            with self._autocast(full_precision):
                vectors = self.embedder.project(features)
                if binary:
                    raw = self.embedder.project(features, normalize=False)
                    total += raw.sum(0, dtype=torch.float64)
            finite.append(vectors.isfinite().all(1))
            if dim is not None:
                added = second_moments(vectors)
                moments = added if moments is None else moments + added
        self._check_finite(self.embedder, rows, torch.cat(finite))
        selected = torch.cat(distractor_features)
        if binary:
            if self.world.size > 1:
                dist.all_reduce(total)
            mean = self.world.on_main(lambda: (total / len(self.data.rows["train"])).float().cpu())
            return subtract_mean(self.embedder, mean.to(self.world.device)), selected
        if dim is None or moments is None:
            return self.embedder, selected
        # PCA is centered only for Euclidean distances of unnormalized vectors.
        centered = self.recipe.evaluation.similarity == "euclidean" and not model.normalize
        if self.world.size > 1:
            dist.all_reduce(moments)
        if len(self.data.rows["train"]) < dim:
            moments = regularized_moments(moments, self.embedder, centered)
        fit = partial(principal_axes, moments, dim, centered, model.whitening)
        axes = self.world.on_main(lambda: fit().cpu())
        return with_pca(self.embedder, axes.to(self.world.device)), selected

    def _embed(self, embedder: Embedder, rows: Rows, full_precision: bool) -> Iterator[Tensor]:
        """Yield embeddings: features of the run's embedder, the head of ``embedder``."""
        finite = []  # checked at the end, to wait for a GPU once
        for features in self._features_of(rows, full_precision):
            with self._autocast(full_precision):
                vectors = embedder.project(features)
            finite.append(vectors.isfinite().all(1))
            yield vectors
        self._check_finite(embedder, rows, torch.cat(finite))

    def _autocast(self, full_precision: bool) -> AbstractContextManager[Any]:
        precision = "float32" if full_precision else self.recipe.training.precision
        return autocast(precision, self.world.device)

    def _features_of(self, rows: Rows, full_precision: bool) -> Iterator[Tensor]:
        """Yield the pooled features of rows, batch by batch."""
        # There may be no rows.
        yield torch.empty(0, self.embedder.width, device=self.world.device)
        remaining = len(rows)
        features: Any = partial(extract_features, self.embedder, stage=self.data.stage)
        # A graph is recorded in the precision of training, at its first call.
        if self.graph and (not full_precision or self.recipe.training.precision == "float32"):
            features = self._graphed
        for pixels in self.data.views(rows, self.recipe.evaluation.batch_size):
            with self._autocast(full_precision):
                batch = features(pixels)[:remaining]  # the last batch may be padded
            remaining -= len(batch)
            yield batch

    def _check_finite(self, embedder: Embedder, rows: Rows, finite: Tensor) -> None:
        """Raise on every process if an embedding of any is not finite."""
        bad = [self.data.catalog.file(row) for row in rows[~finite.cpu().numpy()]]
        if not self.world.any(bool(bad)):
            return
        bad = [*chain.from_iterable(self.world.gather(bad))]
        raise RunError(
            f"the embeddings of {len(bad)} images are not finite ({join_first(bad, 2)}): "
            f"{explain_nonfinite(embedder)}"
        )
