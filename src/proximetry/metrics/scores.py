"""The metrics of ranked lists: a table of formulas, and `Metrics` to choose among them.

Importing this module loads neither torch nor numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from proximetry._util.errors import UsageError
from proximetry._util.types import is_integer

if TYPE_CHECKING:
    from torch import Tensor

CLUSTERING = ("nmi", "nmi_geometric", "ami", "f1")  # of `proximetry.metrics.cluster`
ONE_SET = (*CLUSTERING, "verification")  # of a set, not of single queries
SEPARABILITY = ("separability", "mean_angle", "smallest_angle")  # of proxies
COUNTS = ("queries", "queries_without_positive")  # numbers of queries used and skipped
_MAX_CUTOFF = 1_000_000  # the ideal list is in memory


@dataclass(frozen=True)
class RankedLists:
    """Ranked lists of some queries, and the running sums that formulas share.

    Lists may end early: missing items are not hits.
    """

    hits: Tensor  # 1 for positives, 0 for negatives; float64, [queries, ranks]
    positives: Tensor  # R, the number of positives of a query
    ranks: Tensor  # rank of the first positive, from 1

    @cached_property
    def counts(self) -> Tensor:
        """Hits up to each rank."""
        return self.hits.cumsum(1)

    @cached_property
    def precisions(self) -> Tensor:
        """The precision at each hit, summed up to each rank."""
        return (self.counts / self.rank_numbers(self.hits.shape[1]) * self.hits).cumsum(1)

    @cached_property
    def gains(self) -> Tensor:
        """DCG: (2^r − 1) / log2(i + 1), with r either 0 or 1, summed up to each rank i."""
        return (self.hits / (self.rank_numbers(self.hits.shape[1]) + 1).log2()).cumsum(1)

    def ideal_gain(self, k: int) -> Tensor:
        """Return the DCG of the ideal list of k, which starts with min(k, R) hits."""
        ideal = (1.0 / (self.rank_numbers(k) + 1).log2()).cumsum(0)
        return ideal[self.positives.clamp(1, k) - 1]

    def rank_numbers(self, count: int) -> Tensor:
        """Return 1, 2, … count."""
        return self.hits.new_ones(count).cumsum(0)

    def at(self, sums: Tensor, k: int) -> Tensor:
        """Return running sums at rank k."""
        return sums[:, min(k, sums.shape[1]) - 1]

    def at_r(self, sums: Tensor) -> Tensor:
        """Return running sums at rank R of each query."""
        last = self.positives.clamp(1, sums.shape[1]) - 1
        return sums.gather(1, last[:, None])[:, 0]


class Score(NamedTuple):
    """A metric with one value per query.

    ``field`` of `Metrics` selects it. ``input`` is the input of the formula: the rank of the first
    positive ("first"), the first k items ("k"), or the first R, the number of positives ("R").
    """

    name: str
    field: str
    input: Literal["first", "k", "R"]
    formula: Callable[[RankedLists, int], Tensor]
    k: int = 0


_SCORES = (
    Score("recall", "recall_at", "first", lambda lists, k: (lists.ranks <= k).double()),
    Score("precision", "precision_at", "k", lambda lists, k: lists.at(lists.counts, k) / k),
    Score("r_precision", "at_r", "R", lambda lists, _: lists.at_r(lists.counts) / lists.positives),
    Score("map@r", "at_r", "R", lambda lists, _: lists.at_r(lists.precisions) / lists.positives),
    Score("map", "map_at", "k", lambda lists, k: lists.at(lists.precisions, k) / k),
    Score("mrr", "mrr", "first", lambda lists, _: 1.0 / lists.ranks.double()),
    Score("ndcg", "ndcg_at", "k", lambda lists, k: lists.at(lists.gains, k) / lists.ideal_gain(k)),
)


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _cutoffs(values: Any, name: str) -> tuple[int, ...]:
    several = isinstance(values, Iterable) and not isinstance(values, str)
    numbers = tuple(values) if several else (values,)
    for number in numbers:
        if not is_integer(number) or number > _MAX_CUTOFF:
            raise UsageError(f"{name} must be integers from 1 to {_MAX_CUTOFF}, got {number!r}")
    return tuple(sorted({int(number) for number in numbers}))


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Which metrics to compute, in the order of reporting.

    A field ending in ``_at`` holds the cut-offs k of its metric.
    """

    recall_at: tuple[int, ...] = _setting(
        (1, 2, 4, 8), "k of recall@k: whether at least one of the first k is a positive"
    )
    precision_at: tuple[int, ...] = _setting(
        (), "k of precision@k: positives among the first k, divided by k"
    )
    at_r: bool = _setting(True, "R-precision and MAP@R (R = number of relevant items)")
    map_at: tuple[int, ...] = _setting(
        (), "k of map@k: the precision at each positive among the first k, summed, divided by k"
    )
    mrr: bool = _setting(True, "mrr: reciprocal rank of the first positive")
    ndcg_at: tuple[int, ...] = _setting(
        (2, 4, 8), "k of ndcg@k: discounted gain of the first k, divided by that of the ideal list"
    )
    clustering: bool = _setting(
        False, f"{', '.join(CLUSTERING)} of k-means with as many clusters as classes"
    )
    verification: bool = _setting(
        False,
        "verification: accuracy of LFW's protocol on 6000 random pairs, half of one class, in ten "
        "folds",
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            if isinstance(entry.default, tuple):
                cutoffs = _cutoffs(getattr(self, entry.name), entry.name)
                object.__setattr__(self, entry.name, cutoffs)
        if not self.scores():
            raise UsageError("no metric is selected. Select at least one, such as recall_at=(1,).")

    def scores(self) -> list[Score]:
        """Return the selected per-query scores."""
        selection: list[Score] = []
        for score in _SCORES:
            value = getattr(self, score.field)
            if isinstance(value, tuple):
                selection += [score._replace(name=f"{score.name}@{k}", k=k) for k in value]
            elif value:
                selection.append(score)
        return selection

    def names(self) -> list[str]:
        """Return every key of the result in reporting order."""
        set_names = [*CLUSTERING * self.clustering, *("verification",) * self.verification]
        return [*(score.name for score in self.scores()), *set_names, *COUNTS]

    def set_metric_names(self) -> str:
        """Return the names of selected metrics that take one set instead of queries and gallery."""
        names = ("clustering", "verification")
        return " and ".join(name for name in names if getattr(self, name))

    def per_query_only(self) -> Metrics:
        """Return the per-query metrics only."""
        return replace(self, clustering=False, verification=False)

    def fixed_depth(self) -> int:
        """Return the list length that all queries need, apart from R."""
        return max([1, *(score.k for score in self.scores() if score.input == "k")])

    def needs_ranks(self) -> bool:
        """Return whether the rank of the first positive is needed beyond the lists."""
        firsts = [score.k for score in self.scores() if score.input == "first"]
        return any(k == 0 or k > self.fixed_depth() for k in firsts)

    def depths(self, positives: Tensor) -> Tensor:
        """Return the list length of each query."""
        if any(score.input == "R" for score in self.scores()):
            return positives.clamp(min=self.fixed_depth())
        return positives.new_full(positives.shape, self.fixed_depth())


DEFAULT = Metrics()


def score_lists(
    hits: Tensor, positives: Tensor, ranks: Tensor, metrics: Metrics
) -> dict[str, Tensor]:
    """Compute the scores in float64; queries without a positive get NaN everywhere."""
    lists = RankedLists(hits.double(), positives, ranks)
    has_no_positive = positives <= 0
    return {
        score.name: score.formula(lists, score.k).masked_fill(has_no_positive, math.nan)
        for score in metrics.scores()
    }
