"""``evaluate``: every metric from one pass; ``Evaluation``: the numbers behind the means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry.metrics.arrays import Embeddings, IntArray, Labels, full_precision, normalise
from proximetry.metrics.clustering import cluster
from proximetry.metrics.distributed import gather_arrays, gather_plan
from proximetry.metrics.neighbours import Block, Metric, Progress, Task
from proximetry.metrics.plan import Inputs, Plan, answer, build, check
from proximetry.metrics.retrieval import RetrievalResult
from proximetry.metrics.scores import Wanted, score_lists

FloatArray = npt.NDArray[np.float64]
# Rows scored together: a few running sums in float64 for each.
SCORED_ROWS = {"cpu": 2048, "cuda": 65536}
NEVER = torch.iinfo(torch.int64).max


class Interval(NamedTuple):
    """A mean and the bounds between which it stays when the queries are drawn again."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Every score of every query.

    Attributes:
        scores: by metric name, one number per query; NaN for queries without a positive.
        query_codes: the class number of each query.
        classes: the label of each class number.
        positives: how many items of its class each query could find.
        clustering: scores of the set as a whole, if clustering was asked for.
    """

    scores: dict[str, FloatArray]
    query_codes: IntArray
    classes: npt.NDArray[Any]
    positives: IntArray
    clustering: dict[str, float] = field(default_factory=dict)

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
        counts = {
            "queries": float(scored.sum()),
            "queries_without_positive": float((~scored).sum()),
        }
        return means | self.clustering | counts

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
        self, *, confidence: float = 0.95, samples: int = 1000, seed: int = 0
    ) -> dict[str, Interval]:
        """Percentile intervals of the means, over queries drawn with replacement.

        They tell how much a mean depends on which queries were asked, not how much another
        training run would differ.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
        if samples < 2:
            raise ValueError(f"samples must be at least 2, got {samples}")
        values = np.stack([values[self.scored] for values in self.scores.values()], axis=1)
        count = len(values)
        draw = np.random.default_rng(seed)
        means = np.empty((samples, values.shape[1]))
        for sample in range(samples):
            weights = np.bincount(draw.integers(0, count, count), minlength=count)
            means[sample] = weights @ values / count
        tail = (1 - confidence) / 2
        low, high = np.quantile(means, [tail, 1 - tail], axis=0)
        middle = values.mean(0)
        return {
            name: Interval(float(middle[i]), float(low[i]), float(high[i]))
            for i, name in enumerate(self.scores)
        }


def evaluate_queries(
    embeddings: Embeddings,
    labels: Labels,
    *,
    queries: Embeddings | None = None,
    query_labels: Labels | None = None,
    recall_at: int | Sequence[int] = (1, 2, 4, 8),
    precision_at: int | Sequence[int] = (),
    ndcg_at: int | Sequence[int] = (2, 4, 8),
    map_at: int | Sequence[int] = (),
    at_r: bool = True,
    mrr: bool = True,
    clustering: bool = False,
    seed: int = 0,
    metric: Metric = "cosine",
    ignore_groups: Labels | None = None,
    query_ignore_groups: Labels | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Like :func:`evaluate`, keeping the score of every query."""
    wanted = Wanted(recall_at, precision_at, ndcg_at, map_at, at_r, mrr)  # type: ignore[arg-type]
    if clustering and queries is not None:
        raise ValueError("clustering needs one set; call cluster() on the set you mean")
    if clustering and metric == "hamming":
        raise ValueError('clustering needs embeddings, not the packed codes of metric="hamming"')

    def inputs() -> Inputs:
        return check(
            embeddings,
            labels,
            queries,
            query_labels,
            metric,
            ignore_groups,
            query_ignore_groups,
            allow_empty=group is not None,
        )

    plan = build(inputs(), metric) if group is None else gather_plan(inputs, metric, group)
    with full_precision(plan.task.gallery.device):
        arrays = _score_task(plan.task, wanted, progress)
        if group is not None:
            arrays = gather_arrays(arrays, group)
        codes, positives = arrays.pop("query_codes"), arrays.pop("positives")
        whole = _cluster(plan, metric, seed) if clustering else {}
    return Evaluation(arrays, codes, plan.classes, positives, whole)


def evaluate(
    embeddings: Embeddings,
    labels: Labels,
    *,
    queries: Embeddings | None = None,
    query_labels: Labels | None = None,
    recall_at: int | Sequence[int] = (1, 2, 4, 8),
    precision_at: int | Sequence[int] = (),
    ndcg_at: int | Sequence[int] = (2, 4, 8),
    map_at: int | Sequence[int] = (),
    at_r: bool = True,
    mrr: bool = True,
    clustering: bool = False,
    seed: int = 0,
    metric: Metric = "cosine",
    ignore_groups: Labels | None = None,
    query_ignore_groups: Labels | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Measure how well near means alike. All values are fractions between 0 and 1.

    Args:
        embeddings: see :func:`retrieve`, as for ``labels``, ``queries``, ``query_labels``,
            ``metric``, ``ignore_groups`` and ``query_ignore_groups``.
        recall_at: ``recall@k``: is there at least one positive among the first k?
        precision_at: ``precision@k``: positives among the first k, divided by k.
        ndcg_at: ``ndcg@k``: discounted gain, divided by that of the best list of k.
        map_at: ``map@k``: precision at each hit among the first k, summed, divided by k.
        at_r: ``r_precision`` and ``map@r``, which look as far as the query has positives.
        mrr: ``mrr``: one over the place of the first positive.
        clustering: ``nmi``, ``nmi_geometric``, ``ami`` and ``f1`` of k-means with as many
            clusters as classes, started from ``seed``.
        group: the process group over which embeddings (and queries) are spread, such as
            ``torch.distributed.group.WORLD``; every process gets the numbers of the whole.
        progress: called with (done, total) now and then.

    Returns:
        The means over all queries with a positive, with ``queries`` and
        ``queries_without_positive``, the numbers of those counted and left out.

    Raises:
        ValueError: if the input does not fit, or no query has a positive.
    """
    return evaluate_queries(
        embeddings,
        labels,
        queries=queries,
        query_labels=query_labels,
        recall_at=recall_at,
        precision_at=precision_at,
        ndcg_at=ndcg_at,
        map_at=map_at,
        at_r=at_r,
        mrr=mrr,
        clustering=clustering,
        seed=seed,
        metric=metric,
        ignore_groups=ignore_groups,
        query_ignore_groups=query_ignore_groups,
        group=group,
        progress=progress,
    ).mean()


def score_result(
    result: RetrievalResult,
    *,
    recall_at: int | Sequence[int] = (1,),
    precision_at: int | Sequence[int] = (),
    ndcg_at: int | Sequence[int] = (),
    map_at: int | Sequence[int] = (),
    at_r: bool = False,
    mrr: bool = False,
) -> Evaluation:
    """Score lists that are already there; a score that needs longer lists is refused."""
    wanted = Wanted(recall_at, precision_at, ndcg_at, map_at, at_r, mrr)  # type: ignore[arg-type]
    hits = torch.from_numpy(result.hits)
    positives = torch.from_numpy(result.positives)
    _check_depth(result, wanted)
    values = score_lists(hits, positives, _ranks_in_lists(hits), wanted)
    return Evaluation(
        {name: value.numpy() for name, value in values.items()},
        result.query_codes,
        result.classes,
        result.positives,
    )


def _check_depth(result: RetrievalResult, wanted: Wanted) -> None:
    # A list that ends in an empty place holds all there is.
    open_ended = (result.ids[:, -1] >= 0) & (result.positives > 0) & (not result.complete)
    if not open_ended.any():
        return
    needs = {
        f"{name}@{k}": k
        for name, cutoffs in (
            ("recall", wanted.recall_at),
            ("precision", wanted.precision_at),
            ("ndcg", wanted.ndcg_at),
            ("map", wanted.map_at),
        )
        for k in cutoffs
    }
    if wanted.at_r:
        needs["map@r and r_precision"] = int(result.positives[open_ended].max())
    if wanted.mrr and not result.hits[open_ended].any(1).all():
        raise ValueError(
            f"mrr needs lists that reach the first positive, but some of these lists of "
            f"{result.k} hold none; retrieve with a larger k, or call evaluate()"
        )
    for name, k in needs.items():
        if k > result.k:
            raise ValueError(
                f"{name} needs lists of {k}, but these hold {result.k}; retrieve with k={k}"
            )


def _score_task(task: Task, wanted: Wanted, progress: Progress | None) -> dict[str, Any]:
    """Per-query scores of a task, as arrays by name, with the queries' codes and positives."""
    count = len(task.queries)
    device = task.gallery.device
    positives = task.positives() if count else torch.zeros(0, dtype=torch.int64, device=device)
    values = {
        name: torch.empty(count, dtype=torch.float64, device=device) for name in wanted.names()
    }
    if count:
        with_ranks = wanted.needs_ranks()
        for block in answer(
            task, wanted.depths(positives), with_ranks=with_ranks, progress=progress
        ):
            for part in _parts(block, SCORED_ROWS.get(device.type, SCORED_ROWS["cpu"])):
                codes = task.query_codes[part.rows, None]
                hits = (task.gallery_codes[part.ids.clamp_min(0)] == codes) & (part.ids >= 0)
                ranks = _ranks_in_lists(hits) if part.ranks is None else part.ranks
                for name, value in score_lists(hits, positives[part.rows], ranks, wanted).items():
                    values[name][part.rows] = value
    arrays: dict[str, Any] = {name: value.cpu().numpy() for name, value in values.items()}
    arrays["query_codes"] = task.query_codes.cpu().numpy()
    arrays["positives"] = positives.cpu().numpy()
    return arrays


def _parts(block: Block, size: int) -> Iterator[Block]:
    for start in range(0, len(block.rows), size):
        part = slice(start, start + size)
        ranks = None if block.ranks is None else block.ranks[part]
        yield Block(block.rows[part], block.ids[part], block.similarities[part], ranks)


def _ranks_in_lists(hits: Tensor) -> Tensor:
    """The place of the first hit; never, if there is none in the list."""
    return torch.where(hits.any(1), hits.to(torch.int8).argmax(1) + 1, NEVER)


def _cluster(plan: Plan, metric: Metric, seed: int) -> dict[str, float]:
    vectors = normalise(plan.task.gallery) if metric == "cosine" else plan.task.gallery
    return cluster(vectors, plan.task.gallery_codes, seed=seed)
