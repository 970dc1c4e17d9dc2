"""``evaluate``: all metrics in one pass; ``Evaluation``: their means and the scores per query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from proximetry._util.formatting import format_value
from proximetry._util.labels import Labels
from proximetry._util.machine import by_device
from proximetry._util.tensors import binary_codes, chunks
from proximetry._util.types import FloatArray, IntArray, Progress, Similarity
from proximetry.metrics._search.neighbors import search
from proximetry.metrics._search.problem import NEVER, SearchProblem, build_problem, first_hits
from proximetry.metrics._search.similarities import full_precision, normalize
from proximetry.metrics._search.validation import Embeddings, as_count, check_inputs
from proximetry.metrics.clustering import cluster
from proximetry.metrics.distributed import gather_objects, gather_sets
from proximetry.metrics.intervals import (
    Bounds,
    Interval,
    bootstrap_means,
    difference_bounds,
    mean_bounds,
)
from proximetry.metrics.reranking import (
    RERANKED,
    Reorder,
    expand_problem,
    k_reciprocal_reorder,
    vector_reorder,
)
from proximetry.metrics.retrieval_result import RetrievalResult
from proximetry.metrics.scores import COUNTS, DEFAULT, Metrics, score_lists
from proximetry.metrics.verification import Verification
from proximetry.metrics.verification_pairs import verify_classes

# Rows scored together: a few running sums in float64 for each.
SCORED_ROWS = {"cpu": 2048, "cuda": 65536}

ResampleBy = Literal["class", "query"]


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Mapping[str, float]):
    """Metrics by name, and the scores of every query.

    As a mapping it holds the means over the queries with a positive, in the order of
    ``Metrics.names()``, with ``queries`` and ``queries_without_positive``, the numbers of queries
    used and skipped.

    Attributes:
        scores: by metric name, one number per query; NaN for queries without a positive.
        query_codes: the class index of each query.
        classes: the label of each class index.
        positives: the number of relevant items of each query.
        set_scores: clustering and verification scores of the whole set, if requested.
        verification: the complete verification result, with standard error and threshold.
    """

    scores: dict[str, FloatArray]
    query_codes: IntArray
    classes: npt.NDArray[Any]
    positives: IntArray
    set_scores: dict[str, float] = field(default_factory=dict)
    verification: Verification | None = None

    def __post_init__(self) -> None:
        if not (self.positives > 0).any():
            raise ValueError(
                f"none of the {len(self.positives)} queries has a positive: every label occurs "
                "once, the queries share no label with the gallery, or all positives are ignored. "
                "Check the labels and groups."
            )

    def __getitem__(self, name: str) -> float:
        return self._means[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._means)

    def __len__(self) -> int:
        return len(self._means)

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(f'{name}={value:.4g}' for name, value in self.items())})"

    @property
    def is_scored(self) -> npt.NDArray[np.bool_]:
        """Mask of the queries with a positive, over which the means are taken."""
        return self.positives > 0

    def mean(self) -> dict[str, float]:
        """Return the mapping as a dict."""
        return dict(self)

    @cached_property
    def _means(self) -> dict[str, float]:
        is_scored = self.is_scored
        means = {name: float(values[is_scored].mean()) for name, values in self.scores.items()}
        counts = dict(zip(COUNTS, (float(is_scored.sum()), float((~is_scored).sum())), strict=True))
        return means | self.set_scores | counts

    def per_class(self) -> dict[str, npt.NDArray[Any]]:
        """Return the mean of each score by class, as the columns of a table.

        The other columns are ``label`` and ``queries``, the number of scored queries. Classes
        without a scored query are skipped.
        """
        codes = self.query_codes[self.is_scored]
        counts = np.bincount(codes, minlength=len(self.classes))
        present = counts > 0
        table = {"label": self.classes[present], "queries": counts[present]}
        for name, values in self.scores.items():
            sums = np.bincount(codes, weights=values[self.is_scored], minlength=len(counts))
            table[name] = sums[present] / counts[present]
        return table

    def bootstrap(
        self,
        *,
        by: ResampleBy = "class",
        confidence: float = 0.95,
        samples: int = 1000,
        seed: int = 0,
    ) -> dict[str, Interval]:
        """Compute bootstrap confidence intervals of the means.

        Scores are correlated within a class, so classes are resampled: the interval is for new
        classes of the same kind. It does not cover the variation between training runs.

        Args:
            by: what to resample: "class", or "query" for new queries of the same classes.
            confidence: the probability that an interval covers the true mean.
            samples: the number of bootstrap samples.
            seed: random seed.

        Returns:
            An interval for each score; none if there is only one class (or query) to resample.

        Examples:
            >>> import numpy as np
            >>> from proximetry.metrics import evaluate
            >>> vectors = np.random.default_rng(0).normal(size=(100, 8))
            >>> result = evaluate(vectors, np.arange(100) // 10)
            >>> interval = result.bootstrap()["recall@1"]
            >>> interval.low < interval.mean < interval.high
            True
        """
        return self._intervals(self.scores, mean_bounds, by, confidence, samples, seed)

    def compare(
        self,
        other: Evaluation,
        *,
        by: ResampleBy = "class",
        confidence: float = 0.95,
        samples: int = 1000,
        seed: int = 0,
    ) -> dict[str, Interval]:
        """Compute bootstrap confidence intervals of the differences ``other`` minus this one.

        Both evaluations must be of the same queries. The differences are paired: each bootstrap
        sample has the same classes (or queries) of both. If an interval excludes 0, the difference
        is significant at that confidence; for m differences, apply a Bonferroni correction with
        ``confidence=1 - 0.05 / m``.

        Args:
            other: the evaluation to compare with.
            by: see `bootstrap`. The same applies to ``confidence``, ``samples`` and ``seed``.

        Raises:
            ValueError: if the queries differ.

        Examples:
            >>> import numpy as np
            >>> from proximetry.metrics import evaluate
            >>> labels, noise = np.arange(200) // 10, np.random.default_rng(0).normal(size=(200, 8))
            >>> before, after = evaluate(noise, labels), evaluate(noise + labels[:, None], labels)
            >>> before.compare(after)["map@r"].low > 0
            True
        """
        left, right = (each.classes[each.query_codes] for each in (self, other))
        if not (np.array_equal(left, right) and np.array_equal(self.positives, other.positives)):
            raise ValueError("the evaluations are of different queries. Evaluate the same ones.")
        differences = {
            name: other.scores[name] - values
            for name, values in self.scores.items()
            if name in other.scores
        }
        return self._intervals(differences, difference_bounds, by, confidence, samples, seed)

    def _intervals(
        self,
        scores: dict[str, FloatArray],
        bounds: Bounds,
        by: ResampleBy,
        confidence: float,
        samples: int,
        seed: int,
    ) -> dict[str, Interval]:
        if by not in get_args(ResampleBy):
            raise ValueError(f'by must be "class" or "query", got {by!r}')
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
        if samples < 2:
            raise ValueError(f"samples must be at least 2, got {samples}")
        codes = self.query_codes if by == "class" else np.arange(len(self.positives))
        groups = np.unique(codes[self.is_scored], return_inverse=True)[1]
        counts = np.bincount(groups)
        if len(counts) < 2 or not scores:
            return {}
        sums = [np.bincount(groups, weights=values[self.is_scored]) for values in scores.values()]
        means, errors = bootstrap_means(np.stack(sums, axis=1), counts, samples, seed)
        low, high = bounds(means, errors, len(counts), confidence)
        rows = np.stack([means, low, high], axis=1).tolist()
        return {name: Interval(*row) for name, row in zip(scores, rows, strict=True)}


def evaluate(
    embeddings: Embeddings,
    labels: Labels,
    *,
    queries: Embeddings | None = None,
    query_labels: Labels | None = None,
    metrics: Metrics = DEFAULT,
    similarity: Similarity = "cosine",
    ignore_groups: Labels | None = None,
    query_ignore_groups: Labels | None = None,
    expand: int = 0,
    rerank: bool = False,
    binary: bool = False,
    candidates: int = 0,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Compute retrieval metrics of embeddings, as fractions between 0 and 1.

    Args:
        embeddings: see `retrieve`. The same applies to ``labels``, ``queries``,
            ``query_labels``, ``similarity``, ``ignore_groups`` and ``query_ignore_groups``.
        metrics: the metrics to compute; see `Metrics`.
        expand: number of neighbors for query expansion (`expand_queries`); 0 disables it.
        rerank: re-rank the 100 nearest items of each query by `k_reciprocal_distances` among
            these and the query; the order of the other items does not change.
        binary: search by the Hamming distance of `binary_codes` of the embeddings.
        candidates: with ``binary``, the number of items nearest by code to re-rank by the
            ``similarity`` of their vectors; the order of the other items does not change.
        group: the process group over which embeddings (and queries) are distributed, such as
            ``torch.distributed.group.WORLD``; every process gets the metrics of all.
        progress: called with (done, total).

    Raises:
        ValueError: if the inputs do not match, or no query has a positive.

    Examples:
        >>> import numpy as np
        >>> import proximetry as px
        >>> embeddings = np.array([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.9, 1.0]])
        >>> result = px.evaluate(embeddings, ["crow", "crow", "jay", "jay"])
        >>> result["recall@1"], result.per_class()["label"].tolist()
        (1.0, ['crow', 'jay'])
    """
    _check_metrics(metrics)
    _check_options(metrics.set_metric_names(), similarity, queries is None, expand, rerank, binary)
    if as_count(candidates, "candidates", 0) and not binary:
        raise ValueError(f"candidates without binary=True: {candidates}. Pass both or neither.")
    raw = (embeddings, labels, ignore_groups), (queries, query_labels, query_ignore_groups)
    is_shared = group is not None
    sets, share = gather_sets(lambda: check_inputs(similarity, *raw, allow_empty=is_shared), group)
    vectors = [items.vectors for items in sets]
    if binary:
        sets = [replace(items, vectors=binary_codes(items.vectors)) for items in sets]
    problem = build_problem(sets, "hamming" if binary else similarity, share)
    with full_precision(problem.gallery.device):
        if expand:
            problem = expand_problem(problem, int(expand), progress)
        reorder, count = None, candidates
        if rerank:
            reorder, count = k_reciprocal_reorder(problem, progress), RERANKED
        elif candidates:
            query_vectors = vectors[1] if len(sets) == 2 else vectors[0][share]
            reorder = vector_reorder(query_vectors, vectors[0], similarity)
        evaluation = _score_problem(problem, metrics, group, progress, reorder, count)
        set_scores, verification = {}, None
        if metrics.clustering:
            rows = normalize(problem.gallery) if similarity == "cosine" else problem.gallery
            set_scores = cluster(rows, problem.gallery_codes)
        if metrics.verification and similarity != "hamming":
            verification = verify_classes(vectors[0], problem.gallery_codes, similarity=similarity)
            set_scores["verification"] = verification.accuracy
    return replace(evaluation, set_scores=set_scores, verification=verification)


def _check_options(
    names: str, similarity: Similarity, has_one_set: bool, expand: int, rerank: bool, binary: bool
) -> None:
    """Raise for invalid combinations; ``names`` are the selected metrics that take one set."""
    second_stage = as_count(expand, "expand", 0) or rerank
    if names and not has_one_set:
        raise ValueError(f"no {names} of queries and a gallery. Evaluate one set.")
    if names and (binary or similarity == "hamming"):
        raise ValueError(f"no {names} of binary codes. Evaluate the embeddings.")
    if second_stage and (names or binary):
        raise ValueError(f"no expand or rerank with {names or 'binary codes'}. Pass one of them.")
    if expand and similarity != "cosine":
        raise ValueError(f"expand needs the similarity cosine, got {similarity}")
    if (rerank or binary) and similarity not in ("cosine", "euclidean"):
        name = "rerank" if rerank else "binary"
        raise ValueError(f"{name} needs the similarity cosine or euclidean, got {similarity}")


def _check_metrics(metrics: Metrics) -> None:
    if not isinstance(metrics, Metrics):
        raise ValueError(
            f"metrics must be a Metrics object, got {format_value(metrics)}. "
            "Pass for example metrics=Metrics(recall_at=(1, 10))."
        )


def score_result(result: RetrievalResult, metrics: Metrics) -> Evaluation:
    """Score the lists of a `RetrievalResult`; raise if a metric needs longer lists."""
    _check_metrics(metrics)
    if names := metrics.set_metric_names():
        raise ValueError(f"no {names} of ranked lists. Call evaluate() on the embeddings.")
    if result.query_codes is None or result.classes is None or result.positives is None:
        raise ValueError("the retrieval result has no labels. Pass labels to retrieve().")
    # A list that ends with an empty entry is complete.
    is_truncated = (result.ids[:, -1] >= 0) & (result.positives > 0) & (not result.complete)
    for score in metrics.scores() if is_truncated.any() else ():
        if score.input == "first" and not score.k and not result.hits[is_truncated].any(1).all():
            raise ValueError(
                f"{score.name} needs the first positive of every query, but some lists of length "
                f"{result.k} contain none. Retrieve with a larger k, or call evaluate()."
            )
        needed = int(result.positives[is_truncated].max()) if score.input == "R" else score.k
        if needed > result.k:
            raise ValueError(
                f"{score.name} needs lists of {needed}, got {result.k}. Retrieve with k={needed}."
            )
    hits = torch.from_numpy(result.hits)
    values = score_lists(hits, torch.from_numpy(result.positives), first_hits(hits), metrics)
    scores = {name: value.numpy() for name, value in values.items()}
    return Evaluation(scores, result.query_codes, result.classes, result.positives)


def _score_problem(
    problem: SearchProblem,
    metrics: Metrics,
    group: dist.ProcessGroup | None,
    progress: Progress | None,
    reorder: Reorder | None,
    candidates: int,
) -> Evaluation:
    """Score every query of a problem; with a group, the queries of all processes.

    ``reorder`` changes the order of the first ``candidates`` items of each list.
    """
    count, device = len(problem.queries), problem.gallery.device
    positives = problem.positives()
    values = {
        score.name: torch.empty(count, dtype=torch.float64, device=device)
        for score in metrics.scores()
    }
    if count:
        depths, with_ranks = metrics.depths(positives), metrics.needs_ranks()
        if reorder is not None:
            depths, progress = depths.clamp_min(candidates), None  # reordering takes longer
        for block in search(problem, depths, with_ranks=with_ranks, progress=progress):
            for part in chunks(len(block.rows), by_device(device, **SCORED_ROWS)):
                rows, ids = block.rows[part], block.ids[part]
                if reorder is not None:
                    first = reorder(rows, ids[:, :candidates])
                    ids = torch.cat([first, ids[:, candidates:]], dim=1)
                hits = problem.hits(rows, ids)
                ranks = first_hits(hits)
                if block.ranks is not None:
                    ranks = torch.where(ranks < NEVER, ranks, block.ranks[part])
                for name, value in score_lists(hits, positives[rows], ranks, metrics).items():
                    values[name][rows] = value
    tensors = problem.query_codes, positives, *values.values()
    columns = [tensor.cpu().numpy() for tensor in tensors]
    if group is not None:
        shares = zip(*gather_objects(columns, group), strict=True)
        columns = [np.concatenate(share) for share in shares]
    scores = dict(zip(values, columns[2:], strict=True))
    return Evaluation(scores, columns[0], problem.classes, columns[1])
