"""Means, deviations, and whether a claim holds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any, Literal

from scipy.stats import t as student_t

from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.table import Claim

Verdict = Literal[
    "holds",
    "does not hold",
    "within the noise",
    "one seed, not tested",
    "no seed in common",
    "not run",
]


@dataclass(frozen=True)
class Sample:
    """Figures of the same thing over seeds, as they are shown: see `in_units`."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return fmean(self.values)

    @property
    def std(self) -> float | None:
        """Their sample standard deviation; None of a single value."""
        return stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.std is None else f"{self.mean:.1f} ± {self.std:.1f}"


def in_units(metric: str, value: float) -> float:
    """A figure as it is shown: angles in degrees, as they are; everything else in percent."""
    return value if metric.endswith("_angle") else 100 * value


def sample(
    records: Iterable[Record], metric: str, epoch: int | None = None, **of: Any
) -> Sample | None:
    """A metric over runs as it is shown, of `Record.metrics`; None if no run has it."""
    found = [record.metrics(epoch, **of) for record in records]
    values = tuple(in_units(metric, metrics[metric]) for metrics in found if metric in metrics)
    return Sample(values) if values else None


def noise(a: Sample, b: Sample) -> float | None:
    """Half the 95 % confidence interval of the difference of two means (Welch's t-test).

    The samples have the same size. None for single values, and for values without any spread.
    """
    n = len(a.values)
    spread = variance(a.values) + variance(b.values) if n > 1 else 0.0
    if spread == 0:
        return None
    share = variance(a.values) / spread
    freedom = (n - 1) / (share**2 + (1 - share) ** 2)
    return float(student_t.ppf(0.975, freedom) * math.sqrt(spread / n))


@dataclass(frozen=True)
class Finding:
    """A claim beside what came out here, in points of percent.

    Attributes:
        published: the published difference, if both figures were published.
        difference: of our means over the seeds that both rows have.
        noise: half the 95 % confidence interval of the difference; None if unknown.
        seeds: that both rows have.
    """

    verdict: Verdict
    published: float | None
    difference: float | None = None
    noise: float | None = None
    seeds: tuple[int, ...] = ()


def examine(claim: Claim, results: Results) -> Finding:
    """Compare a claim with the last epochs of the runs of both rows, over the seeds of both."""
    names = (claim.better, claim.worse)
    high, low = (results.table.row(name).published.get(claim.metric) for name in names)
    published = None if high is None or low is None else high - low
    better, worse = (_by_seed(results.runs_of[name], claim.metric) for name in names)
    seeds = tuple(sorted(better.keys() & worse.keys()))
    if not seeds:
        return Finding("no seed in common" if better and worse else "not run", published)
    a, b = (Sample(tuple(values[seed] for seed in seeds)) for values in (better, worse))
    difference, limit = a.mean - b.mean, noise(a, b)
    verdict = verdict_on(difference, limit) if len(seeds) > 1 else "one seed, not tested"
    return Finding(verdict, published, difference, limit, seeds)


def _by_seed(records: Iterable[Record], metric: str) -> dict[int, float]:
    found = ((record.seed, record.metrics().get(metric)) for record in records)
    return {seed: in_units(metric, value) for seed, value in found if value is not None}


def verdict_on(difference: float, limit: float | None) -> Verdict:
    """Nothing can be said within the noise, nor where the seeds do not vary at all."""
    if limit is None or abs(difference) <= limit:
        return "within the noise"
    return "holds" if difference > 0 else "does not hold"
