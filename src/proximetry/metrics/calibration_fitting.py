"""`calibrate`: fit a `Calibration` to embeddings of classes that were not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.labels import Labels, as_labels
from proximetry._util.tensors import chunks
from proximetry._util.types import EmbedderSimilarity, FloatArray, IntArray
from proximetry.metrics._search.similarities import project
from proximetry.metrics._search.validation import (
    Embeddings,
    as_count,
    as_vectors,
    check_similarity,
    encode,
)
from proximetry.metrics.calibration import Calibration, OperatingPoint, sigmoid
from proximetry.metrics.verification import allowed_accepts

BoolArray = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float32]

MIN_CLASSES = 10
"""Classes with two images or more that a calibration needs."""
_MIN_ACCEPTS = 10  # a rate with fewer false accepts is not measurable
# All pairs of this many images are compared; more classes say more than more images of a class.
_MAX_IMAGES = 4000
_RESAMPLES = 200
_HALVES = 10
_GALLERIES = 5  # random choices of the images of a gallery
_BINS = 4096  # of similarities, for the curve
_KNOTS = 64  # of a beta curve
_ERROR_BINS = 15
_TAIL = 5  # resampled thresholds are among the scores accepted at 5 times the largest target


class Rate(NamedTuple):
    """The rates at a threshold: target and measured false accepts, and true accepts."""

    target: float
    threshold: float
    false_accepts: float
    true_accepts: float


@dataclass(frozen=True)
class CalibrationResult:
    """The result of `evaluate_calibration`.

    Attributes:
        pairs: rates of pairs, for each of `Calibration.pairs`.
        gallery: rates of queries, for each of `Calibration.gallery`.
        error: expected calibration error, with as many same as different pairs.
        reliability: mean probability, share of same pairs, and share of all pairs, for each of the
            intervals of `Calibration.probability` that has pairs.
    """

    pairs: tuple[Rate, ...]
    gallery: tuple[Rate, ...]
    error: float
    reliability: tuple[tuple[float, float, float], ...]


def calibrate(
    embeddings: Embeddings,
    labels: Labels,
    *,
    similarity: EmbedderSimilarity = "cosine",
    far: Sequence[float] = (1e-2, 1e-3, 1e-4),
    fpir: Sequence[float] = (1e-1, 1e-2),
    gallery_images: int = 5,
    seed: int = 0,
) -> Calibration:
    """Measure what similarities mean, on embeddings of classes that were not trained on.

    Args:
        embeddings: [images, dimensions].
        labels: one integer or string per image.
        similarity: "cosine" or "euclidean".
        far: target false accept rates of pairs of images of different classes.
        fpir: target false positive identification rates: the share of queries whose class is not
            in a gallery, but whose nearest image is accepted.
        gallery_images: images per class of the galleries; fewer if most classes have fewer.
        seed: of random halves, galleries and bootstrap samples.

    Raises:
        ValueError: if fewer than ten classes have two images, or if the similarities do not
            separate the classes.
    """
    for rate in (*far, *fpir):
        allowed_accepts(rate, 1)  # raises for invalid rates
    rng = np.random.default_rng(seed)
    pairs = _Pairs.measure(embeddings, labels, similarity, rng)
    halves = [pairs.split(rng) for _ in range(_HALVES)]
    curve, error, (similarities, log_odds) = _choose_curve(pairs, halves)
    classes = len(pairs.sizes)
    samples = [
        np.bincount(rng.integers(0, classes, classes), minlength=classes) for _ in range(_RESAMPLES)
    ]
    shots = _gallery_size(pairs.sizes, as_count(gallery_images, "gallery_images"))
    measure_gallery = partial(_Pairs.gallery_trials, shots=shots, rng=rng)
    points, unmeasurable = [], list[float]()
    for targets, measure in ((far, _Pairs.trials), (fpir, measure_gallery)):
        trials = measure(pairs)
        minimum = _MIN_ACCEPTS / len(trials.impostors)
        measurable = [rate for rate in targets if rate >= minimum]
        unmeasurable += [rate for rate in targets if rate < minimum]
        parts = [(measure(one), measure(two)) for one, two in halves]
        points.append(_operating_points(measurable, trials, parts, samples))
    return Calibration(
        similarity=similarity,
        pairs=points[0],
        gallery=points[1],
        unmeasurable=tuple(unmeasurable),
        classes=classes,
        images=len(pairs.codes),
        gallery_classes=int((pairs.sizes > shots).sum()),
        gallery_images=shots,
        curve=curve,
        calibration_error=error,
        similarities=tuple(similarities.tolist()),
        log_odds=tuple(log_odds.tolist()),
    )


def evaluate_calibration(
    calibration: Calibration, embeddings: Embeddings, labels: Labels, *, seed: int = 0
) -> CalibrationResult:
    """Measure the rates that the thresholds of a calibration achieve on other images.

    Galleries have as many images per class as those of the calibration, where classes are large
    enough; a gallery of more classes has more false accepts.
    """
    rng = np.random.default_rng(seed)
    pairs = _Pairs.measure(embeddings, labels, calibration.similarity, rng)
    trials = pairs.trials()
    shots = _gallery_size(pairs.sizes, calibration.gallery_images)
    rates = [
        tuple(
            Rate(
                point.target,
                point.threshold,
                measured.false_accepts(point.threshold),
                measured.true_accepts(point.threshold),
            )
            for point in points
        )
        for points, measured in (
            (calibration.pairs, trials),
            (calibration.gallery, pairs.gallery_trials(shots, rng)),
        )
    ]
    sums = _reliability(calibration.probability(trials.genuine), 1.0)
    sums += _reliability(calibration.probability(trials.impostors), 0.0)
    weight, predicted, same = sums[:, sums[0] > 0]
    return CalibrationResult(
        rates[0],
        rates[1],
        float(np.abs(predicted - same).sum()),
        tuple(
            zip(
                (predicted / weight).tolist(),
                (same / weight).tolist(),
                weight.tolist(),
                strict=True,
            )
        ),
    )


def _reliability(probabilities: FloatArray, is_same: float) -> FloatArray:
    """Return weight, predicted and actual share of "same" of one kind of pairs, by interval."""
    part = np.minimum(probabilities * _ERROR_BINS, _ERROR_BINS - 1).astype(np.int64)
    weight = np.bincount(part, minlength=_ERROR_BINS)
    predicted = np.bincount(part, probabilities, minlength=_ERROR_BINS)
    return np.stack([weight, predicted, weight * is_same]) / (2 * len(probabilities))


def _sample_rows(codes: IntArray, rng: np.random.Generator) -> IntArray:
    """Return the rows of up to 4 000 images, of as many classes of two images as possible."""
    if len(codes) <= _MAX_IMAGES:
        return np.arange(len(codes))
    sizes = np.bincount(codes)
    order = rng.permutation(len(sizes))
    classes = order[np.argsort(sizes[order] < 2, kind="stable")][: _MAX_IMAGES // 2]
    rows = rng.permutation(np.flatnonzero(np.isin(codes, classes)))
    by_class = rows[np.argsort(codes[rows], kind="stable")]
    number = _number_within_class(codes[by_class])
    return np.sort(by_class[np.argsort(number, kind="stable")][:_MAX_IMAGES])


def _number_within_class(sorted_codes: IntArray) -> IntArray:
    """Number the images of each class from 0."""
    return np.arange(len(sorted_codes)) - np.searchsorted(sorted_codes, sorted_codes)


def _compare(vectors: Tensor, similarity: EmbedderSimilarity) -> Scores:
    """Return the similarities of all pairs of rows, from float64."""
    vectors = vectors.double()
    left, right = project(vectors, vectors, similarity)
    result = np.empty((len(left), len(left)), np.float32)
    for rows in chunks(len(left), 512):
        product = left[rows] @ right.T
        if similarity == "euclidean":
            product = -product.neg_().clamp_min_(0).sqrt_()
        result[rows] = product.cpu().numpy()
    return result


@dataclass(frozen=True)
class _Trials:
    """Impostor and genuine scores, and the one or two classes of each impostor score.

    In a gallery, a genuine score is -inf if the nearest image is of another class.
    """

    impostors: Scores
    genuine: Scores
    classes_of: Callable[[IntArray], tuple[IntArray, ...]]
    total_weight: Callable[[IntArray], float]

    def thresholds(self, targets: Sequence[float]) -> FloatArray:
        """Return the lowest thresholds that accept at most these shares of the impostors."""
        allowed = [allowed_accepts(rate, len(self.impostors)) for rate in targets]
        highest = self._highest(max(allowed) + 1)[0]
        return _just_above(highest, np.array(allowed, np.int64))

    def resampled_thresholds(
        self, targets: Sequence[float], samples: Sequence[IntArray]
    ) -> list[FloatArray]:
        """Return the thresholds for classes weighted by the number of times they are drawn."""
        highest, order = self._highest(int(_TAIL * max(targets) * len(self.impostors)) + 1)
        classes = self.classes_of(order)
        results = []
        for weights in samples:
            accepted = np.cumsum(np.prod([weights[part] for part in classes], axis=0))
            limits = np.array(targets) * self.total_weight(weights)
            results.append(_just_above(highest, np.searchsorted(accepted, limits, side="right")))
        return results

    def _highest(self, count: int) -> tuple[Scores, IntArray]:
        """Return the highest impostor scores, in descending order, and their positions."""
        start = max(0, len(self.impostors) - count)
        positions = np.argpartition(self.impostors, start)[start:]
        positions = positions[np.argsort(-self.impostors[positions])]
        return self.impostors[positions], positions

    def false_accepts(self, threshold: float) -> float:
        """Return the share of impostors accepted."""
        return float(np.mean(self.impostors >= threshold))

    def true_accepts(self, threshold: float) -> float:
        """Return the share of genuine scores accepted."""
        return float(np.mean(self.genuine >= threshold))


def _just_above(scores: Scores, positions: IntArray) -> FloatArray:
    """Return thresholds that the scores at these positions just miss."""
    missed = scores[np.minimum(positions, len(scores) - 1)]
    return np.nextafter(missed, np.float32(np.inf)).astype(np.float64)


@dataclass(frozen=True)
class _Pairs:
    """The similarities of all images and their bins [images, images], and the classes.

    ``centers`` are the similarities of the bins; ``codes`` number the classes from 0.
    """

    similarities: Scores
    bins: npt.NDArray[np.uint16]
    centers: FloatArray
    codes: IntArray

    @property
    def sizes(self) -> IntArray:
        return np.bincount(self.codes)

    @classmethod
    def measure(
        cls,
        embeddings: Embeddings,
        labels: Labels,
        similarity: EmbedderSimilarity,
        rng: np.random.Generator,
    ) -> _Pairs:
        """Compare all images, or a sample of them."""
        check_similarity(similarity, EmbedderSimilarity)
        vectors = as_vectors(embeddings, similarity, "embeddings")
        (codes,), _ = encode(as_labels(labels, len(vectors), "labels"))
        paired = int((np.bincount(codes) > 1).sum())
        if paired < MIN_CLASSES:
            raise ValueError(
                f"calibration needs at least {MIN_CLASSES} classes with two images or more: "
                f"{paired}. Add images of classes that were not trained on."
            )
        rows = _sample_rows(codes, rng)
        similarities = _compare(vectors[torch.from_numpy(rows)], similarity)
        low, high = float(similarities.min()), float(similarities.max())
        if high - low < 1e-6:
            raise ValueError(f"all similarities are equal: {high:g}. Check the embedder.")
        edges = np.linspace(low, high, _BINS + 1)
        bins = np.clip((similarities - low) * (_BINS / (high - low)), 0, _BINS - 1)
        codes = np.unique(codes[rows], return_inverse=True)[1].astype(np.int64)
        return cls(similarities, bins.astype(np.uint16), (edges[1:] + edges[:-1]) / 2, codes)

    def split(self, rng: np.random.Generator) -> tuple[_Pairs, _Pairs]:
        """Return two random halves of the classes, each with half of those of two images."""
        order = rng.permutation(len(self.sizes))
        order = order[np.argsort(self.sizes[order] < 2, kind="stable")]
        is_first = np.zeros(len(order), np.bool_)
        is_first[order[::2]] = True
        return self._of_classes(is_first), self._of_classes(~is_first)

    def _of_classes(self, chosen: BoolArray) -> _Pairs:
        rows = np.flatnonzero(chosen[self.codes])
        codes = np.unique(self.codes[rows], return_inverse=True)[1]
        at = np.ix_(rows, rows)
        return _Pairs(self.similarities[at], self.bins[at], self.centers, codes)

    def _masks(self) -> tuple[BoolArray, BoolArray]:
        """Return which pairs are of one class and which are not, each pair once."""
        once = np.triu(np.ones(self.bins.shape, np.bool_), 1)
        same = self.codes[:, None] == self.codes
        return same & once, ~same & once

    def histograms(self) -> tuple[FloatArray, FloatArray]:
        """Return the shares of same and of different pairs by bin."""
        counts = [np.bincount(self.bins[mask], minlength=_BINS) for mask in self._masks()]
        return counts[0] / counts[0].sum(), counts[1] / counts[1].sum()

    def trials(self) -> _Trials:
        """Compare all pairs."""
        same, different = self._masks()
        sizes = self.sizes

        def classes_of(order: IntArray) -> tuple[IntArray, ...]:
            rows, columns = np.divmod(np.flatnonzero(different)[order], len(self.codes))
            return self.codes[rows], self.codes[columns]

        def total_weight(weights: IntArray) -> float:
            images = weights * sizes
            return float(images.sum() ** 2 - np.square(images).sum()) / 2

        scores = self.similarities
        return _Trials(scores[different], scores[same], classes_of, total_weight)

    def gallery_trials(self, shots: int, rng: np.random.Generator) -> _Trials:
        """Compare queries with galleries of random images, with and without their class."""
        enrolled = self.sizes > shots
        column = np.where(enrolled, np.cumsum(enrolled) - 1, -1)
        impostors, genuine, classes = list[Scores](), list[Scores](), list[IntArray]()
        for _ in range(_GALLERIES):
            order = rng.permutation(len(self.codes))
            order = order[np.argsort(self.codes[order], kind="stable")]
            sorted_codes = self.codes[order]
            in_gallery = enrolled[sorted_codes] & (_number_within_class(sorted_codes) < shots)
            gallery, queries = order[in_gallery], order[~in_gallery]
            nearest = self.similarities[np.ix_(queries, gallery)]
            nearest = nearest.reshape(len(queries), -1, shots).max(2)  # of each class
            has_mate = enrolled[self.codes[queries]]
            mated, own = np.flatnonzero(has_mate), column[self.codes[queries[has_mate]]]
            mates = nearest[mated, own]
            nearest[mated, own] = -np.inf
            others = nearest.max(1)
            impostors.append(others)
            genuine.append(np.where(mates > others[mated], mates, -np.inf))
            classes.append(self.codes[queries])
        labels = np.concatenate(classes)
        count = np.bincount(labels, minlength=len(enrolled))
        return _Trials(
            np.concatenate(impostors),
            np.concatenate(genuine),
            lambda order: (labels[order],),
            lambda weights: float(weights @ count),
        )


def _gallery_size(sizes: IntArray, limit: int) -> int:
    """Return the images per class of a gallery, so that half of the classes have more."""
    return max(1, min(limit, int(np.median(sizes[sizes > 1])) - 1))


def _operating_points(
    targets: Sequence[float],
    trials: _Trials,
    halves: Sequence[tuple[_Trials, _Trials]],
    samples: Sequence[IntArray],
) -> tuple[OperatingPoint, ...]:
    """Choose and test a threshold for every target."""
    if not targets:
        return ()
    low, high = np.quantile(trials.resampled_thresholds(targets, samples), (0.025, 0.975), axis=0)
    achieved = [
        [other.false_accepts(threshold) for threshold in half.thresholds(targets)]
        for one, two in halves
        for half, other in ((one, two), (two, one))
    ]
    thresholds = trials.thresholds(targets)
    columns = (
        thresholds,
        low,
        high,
        map(trials.true_accepts, thresholds),
        np.mean(achieved, axis=0),
    )
    return tuple(
        OperatingPoint(target, *map(float, values))
        for target, *values in zip(targets, *columns, strict=True)
    )


_Curve = tuple[FloatArray, FloatArray]
"""Similarities and log-likelihood ratios."""


def _choose_curve(
    pairs: _Pairs, halves: Sequence[tuple[_Pairs, _Pairs]]
) -> tuple[str, float, _Curve]:
    """Return the kind of curve that predicts other classes best, its error, and the curve."""
    histograms = [(one.histograms(), two.histograms()) for one, two in halves]
    kinds = {"isotonic": _isotonic, "beta": _beta}
    losses, errors = dict[str, float](), dict[str, float]()
    for kind, fit in kinds.items():
        results = [
            _score(fit(pairs.centers, *half), pairs.centers, *other)
            for one, two in histograms
            for half, other in ((one, two), (two, one))
        ]
        losses[kind], errors[kind] = np.mean(results, axis=0).tolist()
    best = min(losses, key=losses.__getitem__)
    if losses[best] > 0.999 * math.log(2):
        raise ValueError("the similarities do not separate the classes. Check embedder and labels.")
    return best, errors[best], kinds[best](pairs.centers, *pairs.histograms())


def _score(
    curve: _Curve, centers: FloatArray, same: FloatArray, different: FloatArray
) -> tuple[float, float]:
    """Return log loss and expected calibration error, with as many same as different pairs."""
    odds = np.interp(centers, *curve)
    log_loss = same @ np.logaddexp(0, -odds) + different @ np.logaddexp(0, odds)
    probability = sigmoid(odds)
    part = np.minimum(probability * _ERROR_BINS, _ERROR_BINS - 1).astype(int)
    excess = probability * (same + different) - same
    return float(log_loss) / 2, float(np.abs(np.bincount(part, excess)).sum()) / 2


def _isotonic(centers: FloatArray, same: FloatArray, different: FloatArray) -> _Curve:
    """Fit an increasing curve: pool neighboring bins until the odds of the blocks increase."""
    blocks: list[list[float]] = []  # same, different, similarity times weight
    for center, one, other in zip(centers, same, different, strict=True):
        if one + other == 0:
            continue
        blocks.append([one, other, (one + other) * center])
        while len(blocks) > 1 and blocks[-1][0] * blocks[-2][1] <= blocks[-2][0] * blocks[-1][1]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    one, other, weighted = np.array(blocks).T
    smallest = [part[part > 0].min() / 2 for part in (same, different)]  # half a pair
    odds = np.log(one + smallest[0]) - np.log(other + smallest[1])
    return weighted / (one + other), np.maximum.accumulate(odds)


def _beta(centers: FloatArray, same: FloatArray, different: FloatArray) -> _Curve:
    """Fit log odds a·log(u) - b·log(1 - u) + c with a, b >= 0 (Kull et al., 2017)."""
    filled = np.flatnonzero(same + different)
    low, high = centers[0], centers[-1]
    u = np.clip((centers - low) / (high - low), 1e-3, 1 - 1e-3)
    features = np.stack([np.log(u), -np.log1p(-u), np.ones_like(u)])
    weight, active = same + different, [0, 1, 2]
    while True:
        x, coefficients = features[active], np.zeros(len(active))
        for _ in range(30):  # Newton's method
            p = sigmoid(coefficients @ x)
            gradient = x @ (weight * p - same)
            hessian = (x * (weight * p * (1 - p))) @ x.T + 1e-9 * np.eye(len(active))
            coefficients -= np.linalg.solve(hessian, gradient)
        if len(active) == 1 or (coefficients[:-1] >= 0).all():
            break
        active.pop(int(np.argmin(coefficients[:-1])))
    knots = np.linspace(filled[0], filled[-1], _KNOTS).astype(int)
    return centers[knots], coefficients @ x[:, knots]
