"""Verification: decide whether two images are of the same class.

Larger similarities are nearer; a pair is accepted if its similarity is at least the threshold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from proximetry._util.formatting import join_first
from proximetry._util.labels import Labels, as_array, as_labels
from proximetry._util.types import FloatArray, IntArray
from proximetry.metrics._search.validation import encode

Values = Tensor | npt.NDArray[Any] | Sequence[float]
Truth = Tensor | npt.NDArray[Any] | Sequence[bool]


@dataclass(frozen=True)
class Roc:
    """The ROC curve: one point per distinct similarity, from strict to lax.

    ``far`` is the fraction of different pairs accepted at each of ``thresholds``, ``tar`` that
    of same pairs. The first point, at an infinite threshold, accepts nothing.
    """

    far: FloatArray
    tar: FloatArray
    thresholds: FloatArray


@dataclass(frozen=True)
class VerificationRates:
    """The result of ``verification_rates``: figures that need no folds.

    ``tar_at_far`` has the measurable rates, ``unmeasurable_far`` those below one in the number of
    different pairs.
    """

    auc: float
    eer: float
    tar_at_far: dict[float, float]
    unmeasurable_far: tuple[float, ...]
    roc: Roc
    same_pairs: int
    different_pairs: int

    def __str__(self) -> str:
        rates = "".join(f", TAR@FAR={far:g} {tar:.4f}" for far, tar in self.tar_at_far.items())
        missing = "".join(
            f", TAR@FAR={far:g} not measurable with {self.different_pairs} different pairs"
            for far in self.unmeasurable_far
        )
        return f"AUC {self.auc:.4f}, EER {self.eer:.4f}{rates}{missing}"


@dataclass(frozen=True)
class Verification(VerificationRates):
    """The result of ``verify``.

    ``accuracy`` is the mean over folds and ``standard_error`` σ/√folds with σ the sample standard
    deviation over folds (LFW's μ̂ ± S_E). ``thresholds`` has the threshold of each fold;
    ``threshold``, chosen in the same way on all pairs, is for use on new pairs.
    """

    accuracy: float
    standard_error: float
    fold_accuracies: FloatArray
    thresholds: FloatArray
    threshold: float

    def __str__(self) -> str:
        return (
            f"accuracy {self.accuracy:.4f} ± {self.standard_error:.4f} "
            f"({len(self.fold_accuracies)} folds), {super().__str__()}"
        )


class _Tally:
    """The number of same and different pairs accepted at each threshold; the last accepts all."""

    def __init__(self, values: FloatArray, truth: npt.NDArray[np.bool_]) -> None:
        order = np.argsort(-values, kind="stable")
        values, truth = values[order], truth[order]
        # Pairs with equal similarity are accepted together: a point only where the value changes.
        last = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)
        same = np.cumsum(truth)[last]
        self.different, self.same = np.append(0, last + 1 - same), np.append(0, same)
        self.thresholds = np.append(np.inf, values[last])
        self.totals = int(self.different[-1]), int(self.same[-1])

    def roc(self) -> Roc:
        return Roc(self.different / self.totals[0], self.same / self.totals[1], self.thresholds)

    def auc(self) -> float:
        # Twice the area in whole pairs: exact for up to two billion pairs of each kind.
        heights = self.same[1:] + self.same[:-1]
        return int((np.diff(self.different) * heights).sum()) / (2 * math.prod(self.totals))

    def eer(self) -> float:
        different, same = self.totals
        # False rejects minus false accepts, in units of 1/(different · same): exact integers.
        excess = (same - self.same) * different - self.different * same
        at = int(np.argmax(excess <= 0))
        share = excess[at - 1] / (excess[at - 1] - excess[at])
        before, after = self.different[at - 1], self.different[at]
        return float((before + share * (after - before)) / different)

    def point_at_far(self, far: float) -> int | None:
        """Return the index of the laxest threshold; None if the rate is too low to be measured."""
        allowed = allowed_accepts(far, self.totals[0])
        if allowed < 1:
            return None
        return int(np.searchsorted(self.different, allowed, side="right")) - 1

    def tar_at_far(self, far: float) -> float | None:
        """Return the rate; None if it is too low to be measured."""
        at = self.point_at_far(far)
        return None if at is None else float(self.same[at] / self.totals[1])

    def rates(self, far: Sequence[float]) -> dict[str, Any]:
        """Return the fields of `VerificationRates`."""
        rates = {rate: self.tar_at_far(rate) for rate in far}
        return {
            "auc": self.auc(),
            "eer": self.eer(),
            "tar_at_far": {rate: tar for rate, tar in rates.items() if tar is not None},
            "unmeasurable_far": tuple(rate for rate, tar in rates.items() if tar is None),
            "roc": self.roc(),
            "same_pairs": self.totals[1],
            "different_pairs": self.totals[0],
        }

    def best_threshold(self) -> float:
        correct = self.same + (self.totals[0] - self.different)
        best = int(np.argmax(correct))  # thresholds are descending, so the first is the highest
        if best in (0, len(correct) - 1):
            return math.inf if best == 0 else -math.inf
        above, below = self.thresholds[best], self.thresholds[best + 1]
        middle = float(above / 2 + below / 2)
        # Between neighboring floats there is no middle; the upper one separates them.
        return middle if below < middle <= above else float(above)


def allowed_accepts(far: float, different: int) -> int:
    """Return the number of false accepts at a rate: 0.29 of 100 is 29, although 0.29 · 100 < 29."""
    if not 0 < far <= 1:
        raise ValueError(f"far must be above 0 and at most 1, got {far!r}")
    exact = far * different
    nearest = round(exact)
    return nearest if math.isclose(exact, nearest, rel_tol=1e-12) else math.floor(exact)


def _validate(similarities: Values, same: Truth) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    values, truth = as_array(similarities, "similarities"), as_array(same, "same")
    if values.dtype.kind not in "biuf" or values.ndim != 1 or not len(values):
        got = f"{values.dtype} of shape {values.shape}"
        raise ValueError(f"similarities must be a list of numbers, got {got}")
    values = values.astype(np.float64)
    if truth.shape != values.shape:
        raise ValueError(f"same has shape {truth.shape} for {len(values)} similarities")
    if truth.dtype.kind not in "biu" or not np.isin(truth, (0, 1)).all():
        raise ValueError("same must be True or False (1 or 0) for every pair")
    if not np.isfinite(values).all():
        rows = join_first(map(str, np.flatnonzero(~np.isfinite(values))))
        raise ValueError(f"similarities has NaN or infinite values in rows {rows}")
    truth = truth.astype(np.bool_)
    if truth.all() or not truth.any():
        raise ValueError(
            f"all pairs are {'the same' if truth[0] else 'different'}. Pass pairs of both kinds."
        )
    return values, truth


def roc(similarities: Values, same: Truth) -> Roc:
    """Compute the ROC curve, with one point per distinct similarity."""
    return _Tally(*_validate(similarities, same)).roc()


def auc(similarities: Values, same: Truth) -> float:
    """Compute the area under the ROC curve (AUC).

    It is the probability that a same pair has a larger similarity than a different pair; ties count
    as one half.

    Examples:
        >>> from proximetry.metrics import auc
        >>> auc([0.9, 0.7, 0.8, 0.2], [True, True, False, False])
        0.75
    """
    return _Tally(*_validate(similarities, same)).auc()


def eer(similarities: Values, same: Truth) -> float:
    """Compute the equal error rate (EER), at which false accept and false reject rate are equal.

    The ROC curve is interpolated linearly.
    """
    return _Tally(*_validate(similarities, same)).eer()


def tar_at_far(similarities: Values, same: Truth, far: float) -> float:
    """Return the largest fraction of same pairs accepted at a false accept rate of at most ``far``.

    There is no interpolation between thresholds.

    Raises:
        ValueError: if ``far`` is below one in the number of different pairs.
    """
    tally = _Tally(*_validate(similarities, same))
    rate = tally.tar_at_far(far)
    if rate is None:
        raise _unmeasurable(far, tally)
    return rate


def _unmeasurable(far: float, tally: _Tally) -> ValueError:
    different = tally.totals[0]
    return ValueError(
        f"FAR not measurable with {different} different pairs: {far:g}. Use at least "
        f"1/{different} = {1 / different:.3g}."
    )


@dataclass(frozen=True)
class ErrorVersusReject:
    """The result of ``error_versus_reject``: errors of the pairs of better quality.

    ``fnmr`` (false non-match rate) is the fraction of same pairs below ``threshold``, the one of
    ``far`` on all pairs; ``fmr`` (false match rate) that of different pairs above it; NaN without
    such pairs. ``rejected`` is the fraction of pairs that were rejected.
    """

    far: float
    threshold: float
    rejected: FloatArray
    fnmr: FloatArray
    fmr: FloatArray


def error_versus_reject(
    similarities: Values,
    same: Truth,
    quality: Values,
    *,
    far: float = 1e-3,
    reject: Sequence[float] = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
) -> ErrorVersusReject:
    """Compute the error of verification when the pairs of lowest quality are rejected.

    A useful quality lowers the false non-match rate as more pairs are rejected. The threshold does
    not change.

    Args:
        similarities: one per pair; larger is nearer.
        same: whether the images of each pair are of the same class.
        quality: one per pair, or one per image, [pairs, 2], of which the lower one counts.
        far: the false accept rate that determines the threshold.
        reject: the largest fractions of pairs to reject; pairs of equal quality are rejected
            together.

    Examples:
        >>> from proximetry.metrics import error_versus_reject
        >>> quality = [9, 8, 1, 9, 7, 9]
        >>> similarities = [0.9, 0.8, 0.2, 0.4, 0.1, 0.3]
        >>> error_versus_reject(
        ...     similarities, [1, 1, 1, 0, 0, 0], quality, far=1 / 3, reject=(0, 0.2)
        ... ).fnmr.round(2)
        array([0.33, 0.  ])
    """
    values, truth = _validate(similarities, same)
    scores = as_array(quality, "quality").astype(np.float64)
    if scores.shape == (len(values), 2):
        scores = scores.min(1)
    if scores.shape != values.shape or not np.isfinite(scores).all():
        raise ValueError(f"quality must be a finite number per pair or image, got {scores.shape}")
    limits = np.asarray(reject, np.float64)
    if limits.ndim != 1 or not ((limits >= 0) & (limits < 1)).all():
        raise ValueError(f"reject must be fractions from 0 to below 1, got {reject!r}")
    tally = _Tally(values, truth)
    at = tally.point_at_far(far)
    if at is None:
        raise _unmeasurable(far, tally)
    threshold = float(tally.thresholds[at])
    accepted = values >= threshold
    lowest = np.sort(scores)[np.floor(limits * len(scores) + 1e-9).astype(np.int64)]
    kept = [scores >= limit for limit in lowest]
    return ErrorVersusReject(
        far,
        threshold,
        rejected=np.array([1 - rows.mean() for rows in kept]),
        fnmr=np.array([_mean(~accepted[rows & truth]) for rows in kept]),
        fmr=np.array([_mean(accepted[rows & ~truth]) for rows in kept]),
    )


def _mean(flags: npt.NDArray[np.bool_]) -> float:
    return float(flags.mean()) if len(flags) else math.nan


def verification_rates(
    similarities: Values, same: Truth, far: Sequence[float] = (1e-1, 1e-2, 1e-3)
) -> VerificationRates:
    """Compute the ROC curve, AUC, EER and TAR at each FAR of all pairs, in one pass.

    Examples:
        >>> from proximetry.metrics import verification_rates
        >>> verification_rates([0.9, 0.1, 0.8, 0.3], [1, 0, 1, 0], far=[0.5]).tar_at_far
        {0.5: 1.0}
    """
    return VerificationRates(**_Tally(*_validate(similarities, same)).rates(far))


def verify(
    similarities: Values,
    same: Truth,
    *,
    folds: int | Labels = 10,
    far: Sequence[float] = (1e-1, 1e-2, 1e-3),
) -> Verification:
    """Evaluate verification of pairs by the protocol of LFW and YTF.

    For each fold, the threshold with the highest accuracy on the other folds is evaluated on the
    fold. Candidates are the midpoints between neighboring similarities, and ±∞; of equally good
    ones, the highest. The ROC curve, AUC, EER and TAR at each FAR use all pairs.

    Args:
        similarities: one per pair; larger is nearer.
        same: whether the images of each pair are of the same class.
        folds: the number of blocks of consecutive pairs, as in LFW's list, or one fold id per pair.
        far: the false accept rates.

    Raises:
        ValueError: if a fold lacks same or different pairs.

    Examples:
        >>> from proximetry.metrics import verify
        >>> result = verify([0.9, 0.1, 0.8, 0.3], [1, 0, 1, 0], folds=2, far=[0.5])
        >>> result.accuracy, result.tar_at_far
        (1.0, {0.5: 1.0})
    """
    values, truth = _validate(similarities, same)
    parts, names = _folds(folds, truth)
    thresholds, accuracies = np.empty(len(names)), np.empty(len(names))
    for fold in range(len(names)):
        inside = parts == fold
        thresholds[fold] = _Tally(values[~inside], truth[~inside]).best_threshold()
        accuracies[fold] = np.mean((values[inside] >= thresholds[fold]) == truth[inside])
    tally = _Tally(values, truth)
    return Verification(
        accuracy=float(accuracies.mean()),
        standard_error=float(accuracies.std(ddof=1) / math.sqrt(len(names))),
        fold_accuracies=accuracies,
        thresholds=thresholds,
        threshold=tally.best_threshold(),
        **tally.rates(far),
    )


def _folds(folds: int | Labels, truth: npt.NDArray[np.bool_]) -> tuple[IntArray, npt.NDArray[Any]]:
    """Return the fold index of every pair, and the name of every fold."""
    if isinstance(folds, (int, np.integer)):
        if not 2 <= folds <= len(truth):
            raise ValueError(f"folds must be from 2 to the number of pairs, got {folds}")
        parts, names = np.arange(len(truth)) * folds // len(truth), np.arange(folds)
    else:
        (parts,), names = encode(as_labels(folds, len(truth), "folds"))
        if len(names) < 2:
            raise ValueError(f"at least two folds are needed, got only {names[0].item()!r}")
    same = np.bincount(parts, truth, len(names))
    incomplete = np.flatnonzero((same == 0) | (same == np.bincount(parts)))
    if len(incomplete):
        raise ValueError(
            f"fold {names[incomplete[0]].item()!r} lacks same or different pairs. Pass fold ids "
            "that mix them (folds=…), or order the pairs by fold."
        )
    return parts, names
