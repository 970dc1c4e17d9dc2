"""``evaluate``: every metric from one pass; ``Evaluation``: the numbers behind the means."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._common import Progress, binary_codes, by_device, chunks, gather_rows, shown
from proximetry.metrics.clustering import cluster
from proximetry.metrics.distributed import gather_arrays, gather_task
from proximetry.metrics.inputs import (
    Embeddings,
    FloatArray,
    IntArray,
    Labels,
    Similarity,
    as_count,
    as_vectors,
    full_precision,
    normalize,
)
from proximetry.metrics.intervals import (
    Bounds,
    Interval,
    difference_bounds,
    mean_bounds,
    resample,
)
from proximetry.metrics.neighbors import search
from proximetry.metrics.pair_lists import verify_classes
from proximetry.metrics.reranking import RERANKED, Reorder, by_k_reciprocity, by_vectors, expanded
from proximetry.metrics.retrieval import RetrievalResult
from proximetry.metrics.scores import COUNTS, DEFAULT, Metrics, score_lists
from proximetry.metrics.task import Items, Task, build, check
from proximetry.metrics.verification import Verification

# Rows scored together: a few running sums in float64 for each.
SCORED_ROWS = {"cpu": 2048, "cuda": 65536}
NEVER = torch.iinfo(torch.int64).max

ResampleBy = Literal["class", "query"]


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Every score of every query.

    Attributes:
        scores: by metric name, one number per query; NaN for queries without a positive.
        query_codes: the class number of each query.
        classes: the label of each class number.
        positives: how many items of its class each query could find.
        whole: scores of the set as a whole: clustering and verification, if asked for.
        verification: the result behind the score, with its standard error and threshold.
    """

    scores: dict[str, FloatArray]
    query_codes: IntArray
    classes: npt.NDArray[Any]
    positives: IntArray
    whole: dict[str, float] = field(default_factory=dict)
    verification: Verification | None = None

    def __post_init__(self) -> None:
        if not (self.positives > 0).any():
            raise ValueError(
                f"none of the {len(self.positives)} queries has a positive: every label occurs "
                "once, or the queries share no label with the gallery (or all positives are "
                "ignored); there is nothing to measure"
            )

    def __len__(self) -> int:
        return len(self.query_codes)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.4g}" for name, value in self.mean().items())
        return f"Evaluation({shown})"

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """Which queries have a positive and so take part in the means."""
        return self.positives > 0

    def mean(self) -> dict[str, float]:
        """Means over the queries that have a positive, and how many have and have not."""
        scored = self.scored
        means = {name: float(values[scored].mean()) for name, values in self.scores.items()}
        counts = dict(zip(COUNTS, (float(scored.sum()), float((~scored).sum())), strict=True))
        return means | self.whole | counts

    def per_class(self) -> dict[str, npt.NDArray[Any]]:
        """A table by columns: ``label``, ``queries`` (those scored) and the mean of each score.

        Classes none of whose queries has a positive are left out.
        """
        codes = self.query_codes[self.scored]
        counts = np.bincount(codes, minlength=len(self.classes))
        present = counts > 0
        table: dict[str, npt.NDArray[Any]] = {
            "label": self.classes[present],
            "queries": counts[present],
        }
        for name, values in self.scores.items():
            sums = np.bincount(codes, weights=values[self.scored], minlength=len(counts))
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

        Queries of a class succeed and fail together, so classes are resampled: the interval is
        for new classes of the same kind. It does not cover the variation between training runs.

        Args:
            by: what to resample: "class", or "query" for new queries of the same classes.
            confidence: the probability that an interval covers the true mean.
            samples: the number of bootstrap samples.
            seed: seed of the random draws.

        Returns:
            An interval for each score; none if there is only one class (or query) to resample.
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

        Both evaluations are of the same queries. The differences are paired: each sample holds the
        same classes (or queries) of both. If an interval excludes 0, the difference is significant
        at that confidence; for m differences a Bonferroni correction takes
        ``confidence=1 - 0.05 / m``.

        Args:
            other: the evaluation to compare with.
            by: see `bootstrap`, as for ``confidence``, ``samples`` and ``seed``.

        Raises:
            ValueError: if the queries differ.
        """
        one, two = (each.classes[each.query_codes] for each in (self, other))
        if not (np.array_equal(one, two) and np.array_equal(self.positives, other.positives)):
            raise ValueError("the evaluations are of different queries. Evaluate the same ones.")
        shared = {
            name: other.scores[name] - values
            for name, values in self.scores.items()
            if name in other.scores
        }
        return self._intervals(shared, difference_bounds, by, confidence, samples, seed)

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
            raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
        if samples < 2:
            raise ValueError(f"samples must be at least 2, got {samples}")
        codes = self.query_codes[self.scored]
        _, groups = np.unique(
            codes if by == "class" else np.arange(len(codes)), return_inverse=True
        )
        counts = np.bincount(groups)
        if len(counts) < 2 or not scores:
            return {}
        sums = [np.bincount(groups, weights=values[self.scored]) for values in scores.values()]
        means, errors = resample(np.stack(sums, axis=1), counts, samples, seed)
        low, high = bounds(means, errors, len(counts), confidence)
        rows = np.stack([means, low, high], axis=1).tolist()
        return {name: Interval(*row) for name, row in zip(scores, rows, strict=True)}


def evaluate_queries(
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
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Like `evaluate`, keeping the score of every query."""
    _check_metrics(metrics)
    if metrics.one_set() and queries is not None:
        raise ValueError(f"{metrics.one_set()} takes one set, not queries and a gallery")
    if metrics.one_set() and similarity == "hamming":
        raise ValueError(
            f'{metrics.one_set()} takes embeddings, not the packed codes of similarity="hamming"'
        )
    _check_second_stage(expand, rerank, metrics, similarity)

    checked = partial(
        check,
        similarity,
        (embeddings, labels, ignore_groups),
        (queries, query_labels, query_ignore_groups),
        allow_empty=group is not None,
    )
    if group is None:
        task = build(*checked(), similarity)
    else:
        task = gather_task(checked, similarity, group)
    with full_precision(task.gallery.device):
        if expand:
            task = expanded(task, int(expand), progress)
        reorder = by_k_reciprocity(task, progress) if rerank else None
        arrays = _score_task(task, metrics, progress, reorder, RERANKED)
        if group is not None:
            arrays = gather_arrays(arrays, group)
        codes, positives = arrays.pop("query_codes"), arrays.pop("positives")
        whole, verification = {}, None
        if metrics.clustering:
            vectors = normalize(task.gallery) if similarity == "cosine" else task.gallery
            whole = cluster(vectors, task.gallery_codes)
        if metrics.verification and similarity != "hamming":
            # Not of the task, whose vectors are in other units.
            vectors = as_vectors(embeddings, similarity, "embeddings", allow_empty=True)
            if group is not None:
                vectors = gather_rows(vectors, group)[0]
            verification = verify_classes(vectors, task.gallery_codes, similarity=similarity)
            whole["verification"] = verification.accuracy
    return Evaluation(arrays, codes, task.classes, positives, whole, verification)


def _check_metrics(metrics: Metrics) -> None:
    if not isinstance(metrics, Metrics):
        raise ValueError(
            f"metrics must be a Metrics object, got {shown(metrics)}. "
            "Pass for example metrics=Metrics(recall_at=(1, 10))."
        )


def _check_second_stage(
    expand: int, rerank: bool, metrics: Metrics, similarity: Similarity
) -> None:
    as_count(expand, "expand", 0)
    if expand and similarity != "cosine":
        raise ValueError(f"expand is for vectors that are compared by the cosine, not {similarity}")
    if rerank and similarity not in ("cosine", "euclidean"):
        raise ValueError(
            f"rerank is for vectors that are compared by cosine or euclidean, not {similarity}"
        )
    if (expand or rerank) and metrics.one_set():
        raise ValueError(f"expand and rerank change lists, of which {metrics.one_set()} has none")


def evaluate_codes(
    embeddings: Embeddings,
    labels: Labels,
    *,
    queries: Embeddings | None = None,
    query_labels: Labels | None = None,
    candidates: int = 0,
    metrics: Metrics = DEFAULT,
    similarity: Similarity = "cosine",
    ignore_groups: Labels | None = None,
    query_ignore_groups: Labels | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Like `evaluate_queries`, searching by the Hamming distance of `binary_codes`.

    Args:
        embeddings: the vectors, as for ``labels``, ``queries`` and what is not named here.
        candidates: so many of the nearest by their codes are then ordered by ``similarity``, of
            the vectors; the rest follows as the codes have it. 0 leaves the order to the codes.
        similarity: of the vectors, "cosine" or "euclidean".
    """
    candidates = as_count(candidates, "candidates", 0)
    if similarity not in ("cosine", "euclidean"):
        raise ValueError(
            f'similarity must be "cosine" or "euclidean", that of the vectors, got {similarity!r}; '
            'packed codes go to evaluate(…, similarity="hamming")'
        )
    _check_metrics(metrics)
    if metrics.one_set():
        raise ValueError(f"{metrics.one_set()} takes embeddings, not codes")
    given = (embeddings, labels, ignore_groups)
    asked = (queries, query_labels, query_ignore_groups)
    vectors: list[Tensor] = []  # of the gallery, and of queries apart

    def coded() -> tuple[Items, Items | None]:
        gallery, found = check(similarity, given, asked, allow_empty=group is not None)
        vectors[:] = [items.vectors for items in (gallery, found) if items is not None]
        codes = replace(gallery, vectors=binary_codes(gallery.vectors))
        if found is None:
            return codes, None
        return codes, replace(found, vectors=binary_codes(found.vectors))

    task = build(*coded(), "hamming") if group is None else gather_task(coded, "hamming", group)
    reorder = None
    with full_precision(task.gallery.device):
        if candidates:
            held = vectors[0] if group is None else gather_rows(vectors[0], group)[0]
            reorder = by_vectors(vectors[-1], held, similarity)
        arrays = _score_task(task, metrics, progress, reorder, candidates)
    if group is not None:
        arrays = gather_arrays(arrays, group)
    codes, positives = arrays.pop("query_codes"), arrays.pop("positives")
    return Evaluation(arrays, codes, task.classes, positives)


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
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Measure retrieval. All values are fractions between 0 and 1.

    Args:
        embeddings: see `retrieve`, as for ``labels``, ``queries``, ``query_labels``,
            ``similarity``, ``ignore_groups`` and ``query_ignore_groups``.
        metrics: what to compute; see `Metrics`.
        expand: search for each query moved towards so many of its nearest items
            (`expand_queries`).
        rerank: order the 100 nearest items of each query by `k_reciprocal_distances` among
            these and the query; the rest follows as it was.
        group: the process group over which embeddings (and queries) are spread, such as
            ``torch.distributed.group.WORLD``; every process gets the metrics of the whole.
        progress: called with (done, total) now and then.

    Returns:
        The means over all queries with a positive, under the names of ``metrics.names()``, with
        ``queries`` and ``queries_without_positive``, how many were counted and left out.

    Raises:
        ValueError: if the input does not fit, or no query has a positive.
    """
    return evaluate_queries(
        embeddings,
        labels,
        queries=queries,
        query_labels=query_labels,
        metrics=metrics,
        similarity=similarity,
        ignore_groups=ignore_groups,
        query_ignore_groups=query_ignore_groups,
        expand=expand,
        rerank=rerank,
        group=group,
        progress=progress,
    ).mean()


def score_result(result: RetrievalResult, metrics: Metrics) -> Evaluation:
    """Score lists that are already there; a score that needs longer lists is refused."""
    _check_metrics(metrics)
    if metrics.one_set():
        raise ValueError(f"{metrics.one_set()} takes embeddings, not lists")
    if result.query_codes is None or result.classes is None or result.positives is None:
        raise ValueError("this search was made without labels, which scores need")
    hits = torch.from_numpy(result.hits)
    _check_depth(result, result.positives, metrics)
    values = score_lists(hits, torch.from_numpy(result.positives), _ranks_in_lists(hits), metrics)
    return Evaluation(
        {name: value.numpy() for name, value in values.items()},
        result.query_codes,
        result.classes,
        result.positives,
    )


def _check_depth(result: RetrievalResult, positives: IntArray, metrics: Metrics) -> None:
    # A list that ends in an empty place holds all there is.
    open_ended = (result.ids[:, -1] >= 0) & (positives > 0) & (not result.complete)
    if not open_ended.any():
        return
    for score in metrics.scores():
        if score.reads == "first" and not score.k and not result.hits[open_ended].any(1).all():
            raise ValueError(
                f"{score.name} needs lists that reach the first positive, but some of these lists "
                f"of {result.k} hold none; retrieve with a larger k, or call evaluate()"
            )
        needed = int(positives[open_ended].max()) if score.reads == "R" else score.k
        if needed > result.k:
            raise ValueError(
                f"{score.name} needs lists of {needed}, but these hold {result.k}; "
                f"retrieve with k={needed}"
            )


def _score_task(
    task: Task,
    metrics: Metrics,
    progress: Progress | None,
    reorder: Reorder | None = None,
    candidates: int = 0,
) -> dict[str, Any]:
    """Per-query scores of a task, as arrays by name, with the queries' codes and positives.

    The first ``candidates`` of each list may be reordered; what is behind them stays there.
    """
    count = len(task.queries)
    device = task.gallery.device
    positives = task.positives()
    values = {
        score.name: torch.empty(count, dtype=torch.float64, device=device)
        for score in metrics.scores()
    }
    if count:
        depths, with_ranks = metrics.depths(positives), metrics.needs_ranks()
        if reorder is not None:
            depths, progress = depths.clamp_min(candidates), None  # reordering takes longer
        for block in search(task, depths, with_ranks=with_ranks, progress=progress):
            for part in chunks(len(block.rows), by_device(device, **SCORED_ROWS)):
                rows, ids = block.rows[part], block.ids[part]
                if reorder is not None:
                    first = reorder(rows, ids[:, :candidates])
                    ids = torch.cat([first, ids[:, candidates:]], dim=1)
                codes = task.query_codes[rows, None]
                hits = (task.gallery_codes[ids.clamp_min(0)] == codes) & (ids >= 0)
                ranks = _ranks_in_lists(hits)
                if block.ranks is not None:
                    ranks = torch.where(ranks < NEVER, ranks, block.ranks[part])
                for name, value in score_lists(hits, positives[rows], ranks, metrics).items():
                    values[name][rows] = value
    arrays: dict[str, Any] = {name: value.cpu().numpy() for name, value in values.items()}
    arrays["query_codes"] = task.query_codes.cpu().numpy()
    arrays["positives"] = positives.cpu().numpy()
    return arrays


def _ranks_in_lists(hits: Tensor) -> Tensor:
    """The place of the first hit; never, if there is none in the list."""
    return torch.where(hits.any(1), hits.to(torch.int8).argmax(1) + 1, NEVER)
