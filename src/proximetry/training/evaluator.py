"""The one evaluator: of a run while it trains, of a saved embedder, of a published table's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from proximetry import metrics
from proximetry._util.errors import Progress, UsageError, some
from proximetry.data import Catalog, VectorCatalog
from proximetry.data.cache import describe_copies
from proximetry.kernels.cuda_graphs import GraphedInference
from proximetry.metrics import Evaluation, Metrics
from proximetry.models import Embedder, evaluating
from proximetry.models.embedder import extract_features, why_not_finite
from proximetry.models.encoding import OnError
from proximetry.models.lora import has_lora, merge_lora, plain_twin
from proximetry.models.names import Similarity
from proximetry.models.pca import centered, moments_of_few, principal_axes, second_moments, with_pca
from proximetry.recipe.schema import EvaluationConfig, Recipe
from proximetry.training.comparison import check_comparison, compared, with_needed_roles
from proximetry.training.distributed import World, any_rank, share_buffers
from proximetry.training.run_folder import RunError
from proximetry.training.sources.base import Rows, TrainingData
from proximetry.training.step import autocast

Scores = dict[str, Any]
"""Metrics by name; under ``dims`` those of the first d dimensions, by d as text; under ``codes``
those of trained binary codes, searched by Hamming distance; of held-out classes, under
``among_train``, the metric that selects the epoch, with training images in the gallery too."""
CODES = "codes"
Scored = dict[int | str, Evaluation]
"""Scores of every query: with all dimensions first, with the first d, by d, and of `CODES`."""

MOST_DISTRACTORS = 10_000
"""So many training images at most are put into the gallery of the held-out classes."""


def score_queries(
    vectors: Tensor,
    catalog: Catalog,
    similarity: Similarity,
    wanted: Metrics,
    eval_dims: Sequence[int] = (),
    *,
    binary: bool = False,
    rows: Rows | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Scored:
    """Score every query with all dimensions of the embeddings, with the first d, and by codes.

    Of several processes each gives its share of the catalogue, and the number of each ``rows``.
    """
    options: Any = {"metrics": wanted, "group": group, "progress": progress}
    found: Scored = {
        dim: metrics.evaluate(**compared(vectors[:, :dim], catalog, similarity, rows), **options)
        for dim in (vectors.shape[1], *eval_dims)
    }
    if binary:
        options["metrics"] = wanted.of_lists()
        arguments = compared(vectors, catalog, similarity, rows)
        found[CODES] = metrics.evaluate(**arguments, **options, binary=True)
    return found


def means(scored: Mapping[int | str, Evaluation]) -> Scores:
    """Return the metrics of what `score_queries` found."""
    found = {key: one.mean() for key, one in scored.items()}
    whole, *fewer = (key for key in found if key != CODES)
    scores: Scores = dict(found[whole])
    if fewer:
        scores["dims"] = {str(dim): found[dim] for dim in fewer}
    if CODES in found:
        scores[CODES] = found[CODES]
    return scores


def evaluate_embedder(
    embedder: Embedder,
    catalog: Catalog,
    *,
    wanted: Metrics | None = None,
    eval_dims: Sequence[int] = (),
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Evaluate an embedder on the images of a catalogue, as the run that trained it was.

    Args:
        embedder: with its similarity and preprocessing.
        catalog: the images; with queries and a gallery, or all against all.
        wanted: what to compute.
        eval_dims: also evaluate the first d dimensions, for each d.
        batch_size: images per forward pass; None takes that of the recipe the embedder was
            trained with, so that the figures are the same to the last digit.
        progress: called with (done, total) while images are embedded and neighbours searched.
    """
    metrics = wanted or Metrics()
    return means(score_embedder(embedder, catalog, metrics, eval_dims, batch_size, progress)[0])


def score_embedder(
    embedder: Embedder,
    catalog: Catalog,
    wanted: Metrics,
    eval_dims: Sequence[int],
    batch_size: int | None,
    progress: Progress | None,
    *,
    vectors: Tensor | None = None,
) -> tuple[Scored, dict[str, Any]]:
    """Score every query as `evaluate_embedder` does; also return what was compared.

    With ``vectors``, those of the images, nothing is embedded.
    """
    check_comparison(catalog, wanted)
    if vectors is None:
        vectors = encode_catalog(embedder, catalog, batch_size, progress)
    catalog, similarity = with_needed_roles(catalog), embedder.architecture.similarity
    binary = embedder.architecture.binary
    scored = score_queries(
        vectors, catalog, similarity, wanted, eval_dims, binary=binary, progress=progress
    )
    return scored, compared(vectors, catalog, similarity)


def score_vectors(
    catalog: VectorCatalog,
    similarity: Similarity,
    wanted: Metrics,
    eval_dims: Sequence[int] = (),
    progress: Progress | None = None,
) -> tuple[Scored, dict[str, Any]]:
    """Score every query of vectors as they are; also return what was compared."""
    check_comparison(catalog, wanted)
    rows, vectors = with_needed_roles(catalog), torch.from_numpy(catalog.vectors)
    scored = score_queries(vectors, rows, similarity, wanted, eval_dims, progress=progress)
    return scored, compared(vectors, rows, similarity)


def doubts(embedder: Embedder, catalog: Catalog) -> list[str]:
    """Say why figures may be better than those of unseen images: known classes, and copies."""
    known = sorted({*(embedder.class_names or ())} & {*catalog.class_names})
    count = f"{len(known)} of {len(catalog.class_names)} classes"
    seen = (
        f"the embedder was trained on {count}, going by their names, so this does not measure "
        f"unseen classes only: {some(known)}"
    )
    copies = [] if isinstance(catalog, VectorCatalog) else describe_copies(catalog)
    return [*([seen] if known else []), *copies]


def saved_evaluation(embedder: Embedder | None) -> EvaluationConfig:
    """Return how the run that saved an embedder evaluated it; the defaults if that is not known."""
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
    """Embed the images of a catalogue as in the evaluations of the run that trained it.

    With ``on_error``, which is told of them, images that cannot be read are left out.
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
    """Embed the images that can be read; return these too, and why the others cannot."""
    bad: dict[int, Exception] = {}
    vectors = encode_catalog(embedder, catalog, batch_size, progress, bad.__setitem__)
    if len(bad) == len(catalog):
        raise ValueError(f"none of the {len(bad)} images can be read: {bad[0]}")
    if not bad:
        return vectors, catalog, []
    kept = np.ones(len(catalog), bool)
    kept[[*bad]] = False
    return vectors, catalog.subset(kept), [str(bad[row]) for row in sorted(bad)]


def check_input(embedder: Embedder, catalog: Catalog) -> None:
    """Refuse vectors where the embedder takes images that are not there, and the reverse."""
    if embedder.takes_images:
        if isinstance(catalog, VectorCatalog) and not catalog.has_paths:
            raise UsageError(
                f"{catalog.root} holds vectors, and this embedder takes images; without the "
                "embedder, `proximetry evaluate` judges the vectors themselves"
            )
        return
    wanted = embedder.preprocessing
    if not isinstance(catalog, VectorCatalog):
        raise UsageError(f"this embedder takes {wanted}, and {catalog.root} holds images")
    if tuple(catalog.vectors.shape[1:]) != getattr(wanted, "shape", ()):
        raise UsageError(
            f"this embedder takes {wanted}, and those of {catalog.root} have "
            f"{catalog.vectors.shape[1]}"
        )


class Evaluated(NamedTuple):
    """Scores by split, and the embedder that has them, with its PCA folded into the head."""

    scores: dict[str, Scores]
    embedder: Embedder


class Evaluator:
    """Evaluates a run's embedder on its held-out classes and its test set.

    Embeddings are those that the saved embedder gives for the image files.
    """

    def __init__(
        self,
        recipe: Recipe,
        embedder: Embedder,
        data: TrainingData,
        world: World,
        graph: bool,
        on_graph_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.recipe, self.data, self.world = recipe, data, world
        self._trained = embedder
        self.embedder = embedder = plain_twin(embedder) if has_lora(embedder) else embedder
        self._group = dist.group.WORLD if world.size > 1 else None
        features = self._plain_features = partial(extract_features, embedder, stage=data.stage)
        self._features = GraphedInference(features, on_graph_failure) if graph else features

    def evaluate(self, splits: Sequence[str], *, full_precision: bool = False) -> Evaluated:
        """Evaluate the weights as they are now.

        With ``full_precision`` in float32, as a saved embedder is used; else as it is trained.
        """
        self._merge()
        share_buffers(self.embedder, self.world)
        with torch.no_grad(), evaluating(self.embedder):
            embedder, distractors = self._look_at_train("held_out" in splits, full_precision)
            scores = {}
            for split in splits:
                vectors = torch.cat([*self._embed(embedder, self._own(split), full_precision)])
                scores[split] = self._score(vectors, split)
                if split == "held_out":
                    with self._autocast(full_precision):
                        others = embedder.project(distractors)
                    scores[split] |= self._search_among_train(vectors, others)
        return Evaluated(scores, embedder)

    def embed(self, rows: Rows) -> Tensor:
        """Return the embeddings of rows of the catalogue, before any PCA; on every process."""
        self._merge()
        with torch.no_grad(), evaluating(self.embedder):
            return torch.cat([*self._embed(self.embedder, rows, full_precision=False)])

    def _merge(self) -> None:
        """Bring what is evaluated and saved up to date, where another network is trained."""
        if self._trained is not self.embedder:
            merge_lora(self._trained, self.embedder)

    def _score(self, vectors: Tensor, split: str) -> Scores:
        e, rows = self.recipe.evaluation, self.data.rows[split]
        # The roles of the whole split: those of a share would differ between processes.
        catalog, own = with_needed_roles(self.data.catalog.subset(rows)), self._share(rows)
        dims = [dim for dim in e.eval_dims if dim < vectors.shape[1]]
        scored = score_queries(
            vectors,
            catalog.subset(range(len(rows))[own]),
            e.similarity,
            e.metrics,
            dims,
            binary=self.recipe.model.bits is not None,
            rows=rows[own],
            group=self._group,
        )
        return means(scored)

    def _share(self, rows: Rows) -> slice:
        """What this process embeds: in the order of ranks, the shares are in that of the rows."""
        rank, size = self.world.rank, self.world.size
        return slice(len(rows) * rank // size, len(rows) * (rank + 1) // size)

    def _own(self, split: str) -> Rows:
        rows = self.data.rows[split]
        return rows[self._share(rows)]

    def _search_among_train(self, vectors: Tensor, distractors: Tensor) -> Scores:
        """Return the metric that selects the epoch for held-out images and distractors.

        A few held-out classes are easily told from each other, and still are when training has
        begun to draw unseen images to the classes it knows. Among those it shows.
        """
        e, labels = self.recipe.evaluation, self._labels
        held = self._own("held_out")
        gallery = np.concatenate([held, self._own("train")[self._distractors]])
        found = metrics.evaluate(
            torch.cat([vectors, distractors]),
            labels[gallery],
            queries=vectors,
            query_labels=labels[held],
            ignore_groups=gallery,  # no image is to find itself
            query_ignore_groups=held,
            metrics=e.metrics.of_lists(),
            similarity=e.similarity,
            group=self._group,
        )
        # Clusterings and pairs are of the held-out images alone.
        chosen = {e.select_by: found[e.select_by]} if e.select_by in found else {}
        return {"among_train": chosen} if chosen else {}

    @cached_property
    def _labels(self) -> npt.NDArray[Any]:
        return np.asarray(self.data.catalog.labels)

    @cached_property
    def _distractors(self) -> npt.NDArray[np.bool_]:
        """Which of this process's training images are in the gallery of the held-out classes."""
        train, held = self.data.rows["train"], self.data.rows["held_out"]
        # A split "val" may have classes that are trained on.
        others = np.flatnonzero(~np.isin(self._labels[train], self._labels[held]))
        chosen = np.zeros(len(train), bool)
        chosen[others[:: max(1, -(-len(others) // MOST_DISTRACTORS))]] = True
        return chosen[self._share(train)]

    def _look_at_train(self, among: bool, full_precision: bool) -> tuple[Embedder, Tensor]:
        """Return the embedder with what the recipe fits on the training images, and distractors.

        That is PCA, or the mean of embeddings whose signs are codes; of distractors, the features.
        """
        rows, model = self._own("train"), self.recipe.model
        dim, binary = model.pca_dim, model.bits is not None
        wanted = self._distractors if among else np.zeros(len(rows), bool)
        if dim is None and not binary:
            rows, wanted = rows[wanted], wanted[wanted]
        moments, kept, finite, start = None, [], [], 0
        total = torch.zeros(self.embedder.dim, dtype=torch.float64, device=self.world.device)
        for features in self._features_of(rows, full_precision):
            kept.append(features[wanted[start : start + len(features)]])
            start += len(features)
            with self._autocast(full_precision):
                vectors = self.embedder.project(features)
                if binary:
                    total += self.embedder.project(features, normalize=False).sum(
                        0, dtype=torch.float64
                    )
            finite.append(vectors.isfinite().all(1))
            if dim is not None:
                added = second_moments(vectors)
                moments = added if moments is None else moments + added
        self._refuse_not_finite(self.embedder, rows, torch.cat(finite))
        distractors = torch.cat(kept)
        if binary:
            if self.world.size > 1:
                dist.all_reduce(total)
            mean = self.world.first(lambda: (total / len(self.data.rows["train"])).float().cpu())
            return centered(self.embedder, mean.to(self.world.device)), distractors
        if dim is None or moments is None:
            return self.embedder, distractors
        # About the mean only for plain distances: those between unit vectors are angles too.
        about_mean = self.recipe.evaluation.similarity == "euclidean" and not model.normalize
        if self.world.size > 1:
            dist.all_reduce(moments)
        if len(self.data.rows["train"]) < dim:
            moments = moments_of_few(moments, self.embedder, about_mean)
        fit = partial(principal_axes, moments, dim, about_mean, model.whitening)
        axes = self.world.first(lambda: fit().cpu())
        return with_pca(self.embedder, axes.to(self.world.device)), distractors

    def _embed(self, embedder: Embedder, rows: Rows, full_precision: bool) -> Iterator[Tensor]:
        """Embed rows with the features of the run's embedder and the head of the one given."""
        finite = []  # looked at when all is done: a GPU is waited for once
        for features in self._features_of(rows, full_precision):
            with self._autocast(full_precision):
                vectors = embedder.project(features)
            finite.append(vectors.isfinite().all(1))
            yield vectors
        self._refuse_not_finite(embedder, rows, torch.cat(finite))

    def _autocast(self, full_precision: bool) -> AbstractContextManager[Any]:
        precision = "float32" if full_precision else self.recipe.training.precision
        return autocast(precision, self.world.device)

    def _features_of(self, rows: Rows, full_precision: bool) -> Iterator[Tensor]:
        """Give the pooled features of rows, batch by batch."""
        # There may be no rows.
        yield torch.empty(0, self.embedder.width, device=self.world.device)
        left = len(rows)
        # A graph is recorded in the usual precision, at its first call.
        usual = not full_precision or self.recipe.training.precision == "float32"
        features = self._features if usual else self._plain_features
        for pixels in self.data.views(rows, self.recipe.evaluation.batch_size):
            with self._autocast(full_precision):
                found = features(pixels)[:left]  # a batch may be filled up
            left -= len(found)
            yield found

    def _refuse_not_finite(self, embedder: Embedder, rows: Rows, finite: Tensor) -> None:
        """Stop on every process if an embedding of any is not finite."""
        bad = [self.data.catalog.file(row) for row in rows[~finite.cpu().numpy()]]
        if not any_rank(bool(bad), self.world):
            return
        if self.world.size > 1:
            everyone: list[Any] = [None] * self.world.size
            dist.all_gather_object(everyone, bad)
            bad = [*chain.from_iterable(everyone)]
        raise RunError(
            f"the embeddings of {len(bad)} images have NaN or infinite values, among them "
            f"{some(bad, 2)}: {why_not_finite(embedder)}"
        )
