"""Confidence intervals of the means of scores that are correlated within a class."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from proximetry._util.types import FloatArray, IntArray

# Smaller standard errors are rounding errors: all groups have the same mean.
_NO_SPREAD = 1e-12
_STEPS = 100_000

INTERVALS = "95 % bootstrap confidence interval, resampled by class"  # by default

Bounds = Callable[[FloatArray, FloatArray, int, float], tuple[FloatArray, FloatArray]]


class Interval(NamedTuple):
    """A mean and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap_means(
    sums: FloatArray, counts: IntArray, samples: int, seed: int
) -> tuple[FloatArray, FloatArray]:
    """Return the means of scores and their standard errors, by bootstrap over groups.

    Args:
        sums: the sum of each score within each group, ``[groups, scores]``.
        counts: the number of scores in each group.
        samples: number of bootstrap samples.
        seed: random seed.
    """
    groups = len(counts)
    rng = np.random.default_rng(seed)
    means = np.empty((samples, sums.shape[1]))
    for sample in range(samples):
        weights = np.bincount(rng.integers(0, groups, groups), minlength=groups)
        means[sample] = weights @ sums / (weights @ counts)
    # The variance among draws from n groups is (n - 1) / n of the variance of the mean.
    return sums.sum(0) / counts.sum(), means.std(0) * math.sqrt(groups / (groups - 1))


def mean_bounds(
    means: FloatArray, errors: FloatArray, groups: int, confidence: float
) -> tuple[FloatArray, FloatArray]:
    """Return Wilson's bounds of means between 0 and 1, for the effective number of scores.

    That is the number of independent 0/1 scores with the same standard error.
    """
    is_constant = errors < _NO_SPREAD
    z = student_t((1 + confidence) / 2, groups - 1)
    effective_count = means * (1 - means) / np.where(is_constant, 1, errors) ** 2
    shrink = z**2 / np.where(is_constant, groups, effective_count)
    center = (means + shrink / 2) / (1 + shrink)
    half_width = np.sqrt(means * (1 - means) * shrink + shrink**2 / 4) / (1 + shrink)
    margin = _zero_variance_margin(groups, confidence)
    low = np.where(is_constant, means - margin, center - half_width)
    high = np.where(is_constant, means + margin, center + half_width)
    return np.clip(low, 0, 1), np.clip(high, 0, 1)


def difference_bounds(
    means: FloatArray, errors: FloatArray, groups: int, confidence: float
) -> tuple[FloatArray, FloatArray]:
    """Return Student's bounds of means of differences between -1 and 1."""
    half_width = student_t((1 + confidence) / 2, groups - 1) * errors
    margin = _zero_variance_margin(groups, confidence)
    half_width = np.where(errors < _NO_SPREAD, margin, half_width)
    return np.clip(means - half_width, -1, 1), np.clip(means + half_width, -1, 1)


def _zero_variance_margin(groups: int, confidence: float) -> float:
    """Return how far the mean may be off if all groups are the same.

    By Clopper-Pearson: 12 correct classes of 12 give 73.5 to 100 %.
    """
    return float(1 - ((1 - confidence) / 2) ** (1 / groups))


def student_t(probability: float, degrees_of_freedom: float) -> float:
    """Return the quantile of Student's t distribution, to four digits.

    With t = sqrt(ν) tan(angle) and ν degrees of freedom, the density is cos(angle) ** (ν - 1).
    """
    angle = ((np.arange(_STEPS) + 0.5) / _STEPS - 0.5) * math.pi
    density = np.cos(angle) ** (degrees_of_freedom - 1)
    below = np.cumsum(density) - density / 2
    quantile = np.interp(probability, below / density.sum(), angle)
    return math.sqrt(degrees_of_freedom) * math.tan(quantile)
