"""`LabelModel`: the probability that the label of each image is wrong.

A label is either that of a classifier or, with a probability ε, drawn at random:
p(label | x) = (1 − ε) softmax(a s(x) + b v(x)) + ε / classes. Here s are the leave-one-out scores
of a ridge regression on the vectors and v the votes of the nearest neighbors; ε, a and b maximize
the likelihood of the labels. a and b are small if classes are hard to distinguish, so that natural
confusions are not reported. Fitted again with every image weighted by its probability of being
right, neither regression nor votes follow the wrong labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray

_RIDGE = 1.0  # times the mean eigenvalue of the covariance
_ROUNDS = 3
_SAMPLE = 1 << 23  # scores that ε, a and b are fitted to
_BLOCK = 1 << 24  # scores in memory at a time
_STEPS = 50  # of L-BFGS


@dataclass(frozen=True)
class LabelModel:
    """What the other images say about the label of each image.

    Attributes:
        wrong: the probability that the label is wrong.
        best: the most probable class, another one than the label.
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
        vectors: of each image, [n, dim].
        codes: the class of each image, 0 … classes − 1, [n].
        neighbors: rows of the nearest other images, [n, k]; −1 for none.
    """
    features, labels = torch.from_numpy(vectors), torch.from_numpy(codes)
    weights = torch.ones(len(labels))
    for _ in range(_ROUNDS):
        scorer = _Scorer(features, labels, weights, torch.from_numpy(neighbors))
        model = scorer.fit()
        weights = 1 - torch.from_numpy(model.wrong).float()
    return model


class _Scorer:
    """Leave-one-out scores of classes, by a weighted ridge regression and by votes."""

    def __init__(
        self, features: Tensor, labels: Tensor, weights: Tensor, neighbors: Tensor
    ) -> None:
        self.labels, self.weights, self.neighbors = labels, weights, neighbors
        self.classes = int(labels.max()) + 1
        # Each class counts alike.
        size = torch.zeros(self.classes).index_add_(0, labels, weights)
        balanced = weights / size.clamp(min=1.0)[labels]
        self.mean = (balanced[:, None] * features).sum(0) / balanced.sum()
        self.features = features - self.mean
        weighted = balanced[:, None] * self.features
        gram = (weighted.T @ self.features).double()
        ridge = _RIDGE * gram.diagonal().mean().clamp(min=1e-12)
        inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=torch.float64)).float()
        sums = torch.zeros(self.classes, features.shape[1]).index_add_(0, labels, weighted)
        self.solution = inverse @ sums.T
        self.leverage = balanced * ((self.features @ inverse) * self.features).sum(1)

    def scores(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Return scores and votes of rows, [n, classes]."""
        labels, leverage = self.labels[rows, None], self.leverage[rows, None].clamp(max=0.99)
        scores = self.features[rows] @ self.solution
        scores.scatter_add_(1, labels, -leverage)
        scores /= 1 - leverage
        neighbors = self.neighbors[rows]
        votes = torch.zeros_like(scores)
        weights = self.weights[neighbors] * (neighbors >= 0)
        votes.scatter_add_(1, self.labels[neighbors], weights)
        return scores, votes / weights.sum(1, keepdim=True).clamp(min=1.0)

    def fit(self) -> LabelModel:
        """Maximize the likelihood of the labels, then return their probabilities."""
        total = len(self.labels)
        size = min(total, max(1, _SAMPLE // self.classes))
        sample = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:size]
        scores, votes = self.scores(sample)
        labels = self.labels[sample]
        values = torch.tensor([2.0, 1.0, -3.0], requires_grad=True)  # log a, log b, logit ε
        optimizer = torch.optim.LBFGS([values], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            a, b = values[:2].exp()
            log_given = F.log_softmax(a * scores + b * votes, 1).gather(1, labels[:, None])[:, 0]
            random = F.logsigmoid(values[2]) - np.log(self.classes)
            loss = -torch.logaddexp(F.logsigmoid(-values[2]) + log_given, random).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        a, b = values[:2].detach().exp()
        noise = float(values[2].detach().sigmoid())
        self.parameters = (float(a), float(b), noise)
        parts = []
        for rows in chunks(total, max(1, _BLOCK // self.classes)):
            scores, votes = self.scores(rows)
            labels = self.labels[rows, None]
            log_probability = F.log_softmax(a * scores + b * votes, 1)
            given = log_probability.gather(1, labels)[:, 0].double().exp()
            random = noise / self.classes
            others = log_probability.scatter(1, labels, -torch.inf)
            confidence, best = F.softmax(others, 1).max(1)
            parts.append((random / ((1 - noise) * given + random), best, confidence.double()))
        wrong, best, confidence = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        return LabelModel(wrong, best, confidence, noise)
