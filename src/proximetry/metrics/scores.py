"""Scores of ranked lists, one number per query.

Every score is a function of three things: ``hits`` (which of the first places hold a positive),
``positives`` (R, how many a query could find) and ``ranks`` (the place of the best positive).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wanted:
    """Which scores to compute, checked on construction.

    ``at_r`` asks for R-precision and MAP@R, ``mrr`` for the mean reciprocal rank.
    """

    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    precision_at: tuple[int, ...] = ()
    ndcg_at: tuple[int, ...] = (2, 4, 8)
    map_at: tuple[int, ...] = ()
    at_r: bool = True
    mrr: bool = True

    def __post_init__(self) -> None:
        for name in ("recall_at", "precision_at", "ndcg_at", "map_at"):
            object.__setattr__(self, name, _cutoffs(getattr(self, name), name))
        if not self.names():
            raise ValueError("no score is asked for; name at least one, such as recall_at=(1,)")

    def names(self) -> list[str]:
        """The keys of the scores, in the order in which they are reported."""
        return [
            *(f"recall@{k}" for k in self.recall_at),
            *(f"precision@{k}" for k in self.precision_at),
            *(("r_precision", "map@r") if self.at_r else ()),
            *(f"map@{k}" for k in self.map_at),
            *(("mrr",) if self.mrr else ()),
            *(f"ndcg@{k}" for k in self.ndcg_at),
        ]

    def fixed_depth(self) -> int:
        """How long every list must be, R apart; recall and MRR need no list but a rank."""
        return max((1, *self.precision_at, *self.ndcg_at, *self.map_at))

    def needs_ranks(self) -> bool:
        """Whether ranks are needed beyond the end of the lists."""
        return self.mrr or max((0, *self.recall_at)) > self.fixed_depth()

    def depths(self, positives: Tensor) -> Tensor:
        """How long each query's list must be."""
        least = torch.full_like(positives, self.fixed_depth())
        return torch.maximum(least, positives) if self.at_r else least


def _cutoffs(values: int | Sequence[int], name: str) -> tuple[int, ...]:
    numbers = (values,) if isinstance(values, int) else tuple(values)
    for number in numbers:
        if isinstance(number, bool) or int(number) != number or number < 1:
            raise ValueError(f"{name} must hold whole numbers from 1 up, got {number!r}")
    return tuple(sorted({int(number) for number in numbers}))


def score_lists(
    hits: Tensor, positives: Tensor, ranks: Tensor, wanted: Wanted
) -> dict[str, Tensor]:
    """The wanted scores in float64. Lists may end early: what is missing is no hit.

    Queries without a positive get NaN everywhere.
    """
    scores: dict[str, Tensor] = {}
    found = positives > 0
    for k in wanted.recall_at:
        scores[f"recall@{k}"] = (found & (ranks <= k)).to(torch.float64)
    if wanted.precision_at or wanted.map_at or wanted.at_r or wanted.ndcg_at:
        scores |= _score_places(hits, positives, wanted)
    if wanted.mrr:
        scores["mrr"] = 1.0 / ranks.to(torch.float64)
    return {name: scores[name].masked_fill(~found, torch.nan) for name in wanted.names()}


def _score_places(hits: Tensor, positives: Tensor, wanted: Wanted) -> dict[str, Tensor]:
    """Scores that look at each place of a list, from three running sums."""
    places = torch.arange(1, hits.shape[1] + 1, dtype=torch.float64, device=hits.device)
    exact = hits.to(torch.float64)
    counts = exact.cumsum(1)
    scores: dict[str, Tensor] = {}
    for k in wanted.precision_at:
        scores[f"precision@{k}"] = _upto(counts, k) / k
    if wanted.at_r or wanted.map_at:
        # Σ over hits of the precision at the hit
        precisions = (counts / places * exact).cumsum(1)
        if wanted.at_r:
            last = (positives.clamp(1, hits.shape[1]) - 1)[:, None]
            scores["r_precision"] = counts.gather(1, last)[:, 0] / positives
            scores["map@r"] = precisions.gather(1, last)[:, 0] / positives
        for k in wanted.map_at:
            scores[f"map@{k}"] = _upto(precisions, k) / k
    if wanted.ndcg_at:
        # DCG(k) = Σ (2^r − 1) / log2(i + 1), with r either 0 or 1
        gains = (exact / torch.log2(places + 1)).cumsum(1)
        for k in wanted.ndcg_at:
            ideal = 1.0 / torch.log2(
                torch.arange(2, k + 2, dtype=torch.float64, device=hits.device)
            )
            best = ideal.cumsum(0)[positives.clamp(1, k) - 1]
            scores[f"ndcg@{k}"] = _upto(gains, k) / best
    return scores


def _upto(running: Tensor, k: int) -> Tensor:
    return running[:, min(k, running.shape[1]) - 1]
