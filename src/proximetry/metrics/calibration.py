"""`Calibration`: thresholds and probabilities of similarities; calibration_fitting.py fits it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from proximetry._util.types import EmbedderSimilarity, FloatArray


def sigmoid(log_odds: FloatArray) -> FloatArray:
    """Return the probabilities of log odds, without overflow."""
    return np.exp(-np.logaddexp(0, -log_odds))


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold for a target rate of false accepts.

    Attributes:
        target: of different pairs, or of queries whose class is not in the gallery.
        threshold: similarities of at least this are accepted.
        low: lower bound of the threshold's 95 % confidence interval, resampled by class.
        high: upper bound.
        true_accepts: the share of same pairs that are accepted; in a gallery, of queries whose
            nearest image is of their class and accepted (1 - FNIR).
        achieved: the mean rate on one half of the classes at the threshold of the other half.
    """

    target: float
    threshold: float
    low: float
    high: float
    true_accepts: float
    achieved: float


@dataclass(frozen=True)
class Calibration:
    """What the similarities of an embedder mean, measured on classes it was not trained on.

    Attributes:
        similarity: "cosine", or "euclidean" (the negative distance).
        pairs: a threshold for each measurable false accept rate of pairs.
        gallery: a threshold for each measurable rate of queries without a mate that the nearest
            image of a gallery matches (FPIR).
        unmeasurable: targets with too few pairs or queries.
        classes: number of classes measured.
        images: number of images measured.
        gallery_classes: number of classes in the galleries.
        gallery_images: images of each class in the galleries.
        curve: "isotonic" or "beta", whichever predicts other classes better.
        calibration_error: the expected calibration error of `probability` on other classes, with
            as many same as different pairs.
        similarities: the points between which `log_odds` are interpolated.
        log_odds: log-likelihood ratio of "same" at each of ``similarities``.
    """

    similarity: EmbedderSimilarity
    pairs: tuple[OperatingPoint, ...]
    gallery: tuple[OperatingPoint, ...]
    unmeasurable: tuple[float, ...]
    classes: int
    images: int
    gallery_classes: int
    gallery_images: int
    curve: str
    calibration_error: float
    similarities: tuple[float, ...]
    log_odds: tuple[float, ...]

    def probability(self, similarities: npt.ArrayLike, prior: float = 0.5) -> FloatArray:
        """Return the probability that two images are of the same class.

        Args:
            similarities: of any shape.
            prior: the probability before the images are compared: 0.5 if as many pairs are
                expected to be the same as different; in a gallery, the share of the images that
                are of the query's class.
        """
        if not 0 < prior < 1:
            raise ValueError(f"prior must be between 0 and 1: {prior}")
        log_odds = np.interp(np.asarray(similarities, np.float64), self.similarities, self.log_odds)
        return sigmoid(log_odds + math.log(prior / (1 - prior)))

    @property
    def match_threshold(self) -> float | None:
        """The threshold of a gallery for its highest target rate; None if none is measurable."""
        points = sorted(self.gallery, key=lambda point: -point.target)
        return points[0].threshold if points else None

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Calibration:
        """Read a document of `to_json`; raise ValueError if it is damaged."""
        try:
            points = {
                name: tuple(OperatingPoint(**point) for point in document[name])
                for name in ("pairs", "gallery")
            }
            lists = {
                name: tuple(map(float, document[name]))
                for name in ("unmeasurable", "similarities", "log_odds")
            }
            result = cls(**{**document, **points, **lists})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the calibration is damaged: {error}") from error
        increasing = np.diff(result.similarities) > 0
        if len(result.similarities) != len(result.log_odds) or not increasing.all():
            raise ValueError("the calibration is damaged: similarities must increase")
        return result
