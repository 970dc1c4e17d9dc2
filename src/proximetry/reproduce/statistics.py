"""Means and standard deviations over seeds, claims, and differences between rows."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev, variance
from typing import Any, Literal

from scipy.stats import t as student_t

from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.table import Claim

Verdict = Literal[
    "holds",
    "does not hold",
    "no significant difference",
    "one seed, not tested",
    "no seed in common",
    "not run",
]


@dataclass(frozen=True)
class Sample:
    """Values of a metric over seeds, in percent (angles in degrees)."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return fmean(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None for a single value."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def ci_half_width(self) -> float | None:
        """Half the 95 % confidence interval of the mean; None for a single value."""
        n = len(self.values)
        return None if self.std is None else _quantile(n - 1, 0.95) * self.std / math.sqrt(n)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.std is None else f"{self.mean:.1f} ± {self.std:.1f}"


def sample(
    records: Iterable[Record], metric: str, epoch: int | None = None, **selection: Any
) -> Sample | None:
    """Return a metric over runs, with the arguments of `Record.metrics`; None if no run has it."""
    scale = 1 if metric.endswith("_angle") else 100
    scores = [record.metrics(epoch, **selection) for record in records]
    values = tuple(scale * metrics[metric] for metrics in scores if metric in metrics)
    return Sample(values) if values else None


def _quantile(freedom: float, confidence: float) -> float:
    return float(student_t.ppf((1 + confidence) / 2, freedom))


def ci_half_width(a: Sample, b: Sample, confidence: float = 0.95) -> float | None:
    """Return half the confidence interval of the difference of two means (Welch's t-test).

    The samples have the same size. None for single values, and for values without any spread.
    """
    n = len(a.values)
    spread = variance(a.values) + variance(b.values) if n > 1 else 0.0
    if spread == 0:
        return None
    share = variance(a.values) / spread
    freedom = (n - 1) / (share**2 + (1 - share) ** 2)
    return _quantile(freedom, confidence) * math.sqrt(spread / n)


@dataclass(frozen=True)
class ClaimResult:
    """A published difference beside ours over the common seeds, in percentage points.

    ``ci_half_width`` is half the 95 % confidence interval of our difference.
    """

    verdict: Verdict
    published: float | None
    difference: float | None = None
    ci_half_width: float | None = None
    seeds: tuple[int, ...] = ()


def compare_claim(claim: Claim, results: Results) -> ClaimResult:
    """Compare a claim with the last epochs of the runs of both rows, over their common seeds."""
    names = (claim.better, claim.worse)
    high, low = (results.table.row(name).published.get(claim.metric) for name in names)
    published = None if high is None or low is None else high - low
    better, worse = (
        {r.seed: r for r in results.runs_of[name] if claim.metric in r.metrics()} for name in names
    )
    seeds = tuple(sorted(better.keys() & worse.keys()))
    a, b = (sample([runs[seed] for seed in seeds], claim.metric) for runs in (better, worse))
    if a is None or b is None:
        return ClaimResult("no seed in common" if better and worse else "not run", published)
    difference, limit = a.mean - b.mean, ci_half_width(a, b)
    verdict: Verdict = "holds" if difference > 0 else "does not hold"
    if len(seeds) == 1:
        verdict = "one seed, not tested"
    elif limit is None or abs(difference) <= limit:
        verdict = "no significant difference"
    return ClaimResult(verdict, published, difference, limit, seeds)


@dataclass(frozen=True)
class Difference:
    """The difference of two rows over their common seeds, in percentage points."""

    better: str
    worse: str
    mean: float
    ci_half_width: float | None
    seeds: int

    @property
    def is_significant(self) -> bool:
        """Whether the confidence interval excludes 0."""
        return self.ci_half_width is not None and self.mean > self.ci_half_width


def pairwise_differences(results: Results, metric: str) -> list[Difference]:
    """Compare all pairs of rows; all intervals together have a confidence of 95 % (Bonferroni)."""
    runs = {
        name: {r.seed: r for r in records if metric in r.metrics()}
        for name, records in results.runs_of.items()
    }
    pairs = [(a, b) for a, b in combinations(runs, 2) if runs[a].keys() & runs[b].keys()]
    differences = []
    for pair in pairs:
        seeds = sorted(runs[pair[0]].keys() & runs[pair[1]].keys())
        samples = {
            name: Sample(tuple(100 * runs[name][seed].metrics()[metric] for seed in seeds))
            for name in pair
        }
        (better, a), (worse, b) = sorted(samples.items(), key=lambda item: -item[1].mean)
        half_width = ci_half_width(a, b, 1 - 0.05 / len(pairs))
        differences.append(Difference(better, worse, a.mean - b.mean, half_width, len(seeds)))
    return sorted(differences, key=lambda one: -one.mean)
