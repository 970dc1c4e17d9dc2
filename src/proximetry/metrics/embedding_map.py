"""Projection of embeddings to a plane by t-SNE."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.imports import import_optional
from proximetry._util.machine import cores
from proximetry.metrics._search.similarities import normalize
from proximetry.metrics._search.validation import Embeddings, as_embeddings, check_similarity

_MapSimilarity = Literal["cosine", "euclidean"]

_DIM = 50  # principal components that t-SNE starts from (van der Maaten and Hinton 2008)
_PERPLEXITY = 30.0
_MIN_VECTORS = 10


def map_embeddings(
    embeddings: Embeddings, *, similarity: _MapSimilarity = "cosine", seed: int = 0
) -> npt.NDArray[np.float32]:
    """Place embeddings on a plane so that neighbors stay neighbors, by t-SNE.

    Fewer than ten embeddings are placed by their two principal components.

    Args:
        embeddings: [N, D].
        similarity: "cosine" or "euclidean".
        seed: random seed of t-SNE.

    Returns:
        [N, 2], within the unit square, with the same scale on both axes.
    """
    check_similarity(similarity, _MapSimilarity)
    vectors = as_embeddings(embeddings).cpu()
    if similarity == "cosine":
        vectors = normalize(vectors)
    components = _principal_components(vectors.double(), _DIM)
    if len(vectors) < _MIN_VECTORS or not bool(components.any()):
        return _fit_square(components[:, :2].numpy())
    tsne = import_optional("openTSNE", "map", "A map of embeddings").TSNE(
        perplexity=min(_PERPLEXITY, (len(vectors) - 1) / 3),
        initialization="pca",
        random_state=seed,
        # Threads synchronize thousands of times, which dominates for few points.
        n_jobs=max(1, min(cores(), len(vectors) // 4000)),
    )
    return _fit_square(np.asarray(tsne.fit(components.numpy())))


def _principal_components(vectors: Tensor, count: int) -> Tensor:
    """Return coordinates [N, count] along the directions of largest variance, padded with 0."""
    centered = vectors - vectors.mean(0)
    _, directions = torch.linalg.eigh(centered.T @ centered)
    directions = directions.flip(1)[:, :count]
    # The sign of a direction is arbitrary: fix it.
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    coordinates = centered @ (directions * largest.sign())
    return torch.nn.functional.pad(coordinates, (0, max(0, count - coordinates.shape[1])))


def _fit_square(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    low, high = points.min(0), points.max(0)
    size = float((high - low).max())
    if not size > 0:
        return np.full(points.shape, 0.5, np.float32)
    return np.asarray(0.5 + (points - (low + high) / 2) / size, np.float32)
