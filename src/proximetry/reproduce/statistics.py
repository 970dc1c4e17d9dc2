"""Means, deviations, and whether a claim holds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from proximetry.reproduce.records import Record
from proximetry.reproduce.tables import Claim, Table

Verdict = Literal["holds", "does not hold", "within the noise", "not run"]

# With a single run per row nothing tells the noise. Seeds scatter by about half a point of
# recall@1, so two single runs differ by up to 1.4 (two standard errors) without a reason.
ONE_SEED_NOISE = 1.4


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


def sample(records: Iterable[Record], metric: str, epoch: int | None = None) -> Sample | None:
    """A metric over runs in percent, at an epoch or at the end; None if no run has it."""
    tests = [record.test(epoch) for record in records]
    values = tuple(100 * test[metric] for test in tests if test is not None and metric in test)
    return Sample(values) if values else None


def standard_error(a: Sample, b: Sample) -> float | None:
    """Of the difference of two means, from the spread of both; None if either has none."""
    if a.std is None or b.std is None:
        return None
    return math.sqrt(a.std**2 / len(a.values) + b.std**2 / len(b.values))


@dataclass(frozen=True)
class Finding:
    """A claim beside what came out here, in points of percent."""

    claim: Claim
    published: float | None
    difference: float | None
    error: float | None
    verdict: Verdict


def examine(claim: Claim, table: Table, runs: dict[str, Sequence[Record]]) -> Finding:
    """Compare a claim with the last epochs of the runs of both rows."""
    numbers = [table.row(name).published.get(claim.metric) for name in (claim.better, claim.worse)]
    published = None if None in numbers else (numbers[0] or 0.0) - (numbers[1] or 0.0)
    a, b = (sample(runs.get(name, ()), claim.metric) for name in (claim.better, claim.worse))
    if a is None or b is None:
        return Finding(claim, published, None, None, "not run")
    difference, error = a.mean - b.mean, standard_error(a, b)
    return Finding(claim, published, difference, error, judge(difference, error))


def judge(difference: float, error: float | None) -> Verdict:
    """Within two standard errors (with one seed: 1.4 points) nothing can be said."""
    noise = ONE_SEED_NOISE if error is None else 2 * error
    if difference == 0 or abs(difference) < noise:
        return "within the noise"
    return "holds" if difference > 0 else "does not hold"
