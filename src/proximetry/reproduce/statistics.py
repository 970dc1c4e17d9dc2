"""Means, deviations, and whether a claim holds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from proximetry.reproduce.records import Record
from proximetry.reproduce.table import Claim, Table

Verdict = Literal[
    "holds",
    "does not hold",
    "within the noise",
    "one seed, not tested",
    "no seed in common",
    "not run",
]

# Student's t, two-sided at 5 %, for 1, 2, 3 … degrees of freedom; the last serves for more.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Sample:
    """Percentages of the same thing over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return math.fsum(self.values) / len(self.values)

    @property
    def std(self) -> float | None:
        """Their sample standard deviation; None of a single value."""
        n = len(self.values)
        if n < 2:
            return None
        return math.sqrt(math.fsum((v - self.mean) ** 2 for v in self.values) / (n - 1))

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.std is None else f"{self.mean:.1f} ± {self.std:.1f}"


def sample(
    records: Iterable[Record], metric: str, epoch: int | None = None, dim: int | None = None
) -> Sample | None:
    """A metric over runs in percent, at an epoch or at the end; None if no run has it."""
    found = [record.metrics(epoch, dim) for record in records]
    values = tuple(100 * metrics[metric] for metrics in found if metric in metrics)
    return Sample(values) if values else None


def noise(a: Sample, b: Sample) -> float | None:
    """How far two means of as many seeds differ by chance in 19 of 20 cases (Welch's t).

    None where it cannot be told: of single values, and of values without any spread.
    """
    n = len(a.values)
    if a.std is None or b.std is None:
        return None
    if n != len(b.values):
        raise ValueError(f"samples of as many seeds are compared, got {n} and {len(b.values)}")
    spread = a.std**2 + b.std**2
    if spread == 0:
        return None
    share = a.std**2 / spread
    freedom = (n - 1) / (share**2 + (1 - share) ** 2)
    # A hair more, so that rounding does not turn 4 into 3.
    quantile = _T[min(max(1, math.floor(freedom + 1e-9)), len(_T)) - 1]
    return quantile * math.sqrt(spread / n)


@dataclass(frozen=True)
class Finding:
    """A claim beside what came out here, in points of percent.

    Attributes:
        published: the published difference, if both figures were published.
        difference: of our means over the seeds that both rows have.
        noise: what such a difference reaches by chance; None where that cannot be told.
        seeds: that both rows have.
    """

    claim: Claim
    published: float | None
    difference: float | None
    noise: float | None
    seeds: tuple[int, ...]
    verdict: Verdict

    @property
    def tested(self) -> bool:
        """Whether there are enough seeds for a test."""
        return len(self.seeds) > 1


def examine(claim: Claim, table: Table, runs: dict[str, Sequence[Record]]) -> Finding:
    """Compare a claim with the last epochs of the runs of both rows, over the seeds of both."""
    numbers = [table.row(name).published.get(claim.metric) for name in (claim.better, claim.worse)]
    published = None if None in numbers else (numbers[0] or 0.0) - (numbers[1] or 0.0)
    better, worse = (_by_seed(runs.get(n, ()), claim.metric) for n in (claim.better, claim.worse))
    seeds = tuple(sorted(better.keys() & worse.keys()))
    if not seeds:
        verdict: Verdict = "no seed in common" if better and worse else "not run"
        return Finding(claim, published, None, None, (), verdict)
    a, b = (Sample(tuple(values[seed] for seed in seeds)) for values in (better, worse))
    difference, limit = a.mean - b.mean, noise(a, b)
    verdict = "one seed, not tested" if len(seeds) == 1 else verdict_on(difference, limit)
    return Finding(claim, published, difference, limit, seeds, verdict)


def _by_seed(records: Iterable[Record], metric: str) -> dict[int, float]:
    found = ((record.seed, sample([record], metric)) for record in records)
    return {seed: values.mean for seed, values in found if values is not None}


def verdict_on(difference: float, limit: float | None) -> Verdict:
    """Nothing can be said within the noise, nor where the seeds do not vary at all."""
    if limit is None or abs(difference) <= limit:
        return "within the noise"
    return "holds" if difference > 0 else "does not hold"
