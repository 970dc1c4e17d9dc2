"""`LabelModel`: the probability that the label of each image is wrong.

A label is that of a classifier or, with a probability ε, drawn at random:
p(label | x) = (1 − ε) softmax(a s(x) + b v(x)) + ε / classes. Here s are the leave-one-out scores
of a ridge regression on the vectors and v the votes of the nearest neighbors; ε, a and b maximize
the posterior of the labels. a and b are small if classes are hard to distinguish, so that natural
confusions are not reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray

MIN_CLASS_SIZE = 3  # with fewer images, the others say too little about a label
_RIDGE = 5.0  # times the mean eigenvalue of the covariance
_SAMPLE = 1 << 23  # scores that ε, a and b are fitted to
_BLOCK = 1 << 24  # scores in memory at a time
_STEPS = 50  # of L-BFGS
_PRIOR = (3.0, 97.0)  # wrong and right labels, added to those observed


@dataclass(frozen=True)
class LabelModel:
    """What the other images say about the label of each image.

    Attributes:
        wrong: the probability that the label is wrong.
        best: the most probable class other than the label.
        confidence: the probability of `best` if the label is wrong.
        noise: the estimated share of wrong labels.
    """

    wrong: npt.NDArray[np.float64]
    best: IntArray
    confidence: npt.NDArray[np.float64]
    noise: float


def fit_labels(
    vectors: npt.NDArray[np.float32], codes: IntArray, neighbors: IntArray
) -> LabelModel:
    """Fit the model.

    Args:
        vectors: of unit length, [n, dim].
        codes: the class of each image, 0 … classes − 1, [n].
        neighbors: rows of the nearest other images, [n, k]; −1 for none.
    """
    scores = _Scores(*map(torch.tensor, (vectors, codes, neighbors)))
    usable = np.flatnonzero(np.bincount(codes)[codes] >= MIN_CLASS_SIZE)
    size = max(1, _SAMPLE // scores.classes)
    sample = np.random.default_rng(0).permutation(usable)[:size]
    a, b, noise = _maximize_posterior(*scores.of(sample), scores.labels[sample])
    wrong, confidence = np.zeros((2, len(codes)))
    best = np.zeros(len(codes), np.int64)
    random = noise / scores.classes
    for part in chunks(len(usable), max(1, _BLOCK // scores.classes)):
        rows = usable[part]
        regression, votes = scores.of(rows)
        labels = scores.labels[rows, None]
        logits = (a * regression + b * votes).log_softmax(1)
        given = logits.gather(1, labels)[:, 0].double().exp()
        wrong[rows] = random / ((1 - noise) * given + random)
        values, classes = logits.scatter(1, labels, -torch.inf).softmax(1).max(1)
        confidence[rows], best[rows] = values.numpy(), classes.numpy()
    return LabelModel(wrong, best, confidence, noise)


class _Scores:
    """Leave-one-out scores of a ridge regression, and votes of the neighbors."""

    def __init__(self, vectors: Tensor, labels: Tensor, neighbors: Tensor) -> None:
        self.labels, self.neighbors = labels, neighbors
        counts = torch.bincount(labels)
        self.classes = len(counts)
        weights = 1 / counts[labels].float()  # all classes count alike
        self.features = vectors - weights @ vectors / self.classes
        weighted = weights[:, None] * self.features
        covariance = (weighted.T @ self.features).double()
        ridge = _RIDGE * covariance.diagonal().mean() + 1e-9
        inverse = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance))).float()
        sums = torch.zeros(self.classes, vectors.shape[1]).index_add_(0, labels, weighted)
        self.solution = inverse @ sums.T
        # The diagonal of the hat matrix.
        self.leverage = weights * ((self.features @ inverse) * self.features).sum(1)

    def of(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Return scores and votes of rows, [n, classes] each, without the row's own label."""
        leverage = self.leverage[rows, None].clamp(max=0.99)
        scores = self.features[rows] @ self.solution
        scores = scores.scatter_add_(1, self.labels[rows, None], -leverage) / (1 - leverage)
        votes = torch.zeros_like(scores)
        neighbors = self.neighbors[rows]
        weights = (neighbors >= 0) / neighbors.shape[1]
        votes.scatter_add_(1, self.labels[neighbors], weights)
        return scores, votes


def _maximize_posterior(
    scores: Tensor, votes: Tensor, labels: Tensor
) -> tuple[float, float, float]:
    """Return a, b and ε."""
    values = torch.tensor([2.0, 1.0, -3.0], requires_grad=True)  # log a, log b, logit ε
    optimizer = torch.optim.LBFGS([values], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        a, b = values[:2].exp()
        given = (a * scores + b * votes).log_softmax(1).gather(1, labels[:, None])[:, 0]
        log_noise, log_clean = F.logsigmoid(values[2]), F.logsigmoid(-values[2])
        likelihood = torch.logaddexp(log_clean + given, log_noise - log(scores.shape[1]))
        prior = _PRIOR[0] * log_noise + _PRIOR[1] * log_clean
        loss = -(likelihood.sum() + prior) / len(labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    a, b = values.detach()[:2].exp().tolist()
    return a, b, float(values.detach()[2].sigmoid())
