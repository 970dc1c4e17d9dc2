"""`SearchResult`: the result of a search in a gallery."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from proximetry._util.types import FloatArray, IntArray
from proximetry.metrics.calibration import Calibration
from proximetry.models.constants import Similarity
from proximetry.models.preprocessing import ImageSource
from proximetry.search.prediction import Prediction, vote

REMOVED = "(removed)"  # instead of the path of an image on Milvus


@dataclass(frozen=True, eq=False, repr=False)
class SearchResult:
    """The k nearest images of every query, nearest first.

    Attributes:
        ids: ids of the images, [queries, k]; −1 if there are fewer than k.
        similarities: cosine or negative Euclidean distance to the query, computed from the stored
            vectors whatever the index; −inf for an id of −1.
        similarity: "cosine" or "euclidean".
        columns: the names of the metadata columns; see `column`.
        scores: with query expansion or re-ranking, the values that order the images: similarities
            to the expanded query, or negative k-reciprocal distances. Otherwise None.
        queries: the images of the queries; None for those that are vectors.
        calibration: what the similarities mean, if the embedder is calibrated.
        prior: the share of the gallery that is of the query's class, on average.

    Examples:
        >>> import numpy as np
        >>> from proximetry import Embedder, Gallery
        >>> embedder = Embedder.create("vectors", None, weights="none", input_dim=2)
        >>> gallery = Gallery.build(
        ...     embedder, ["a.jpg", "b.jpg"], "gallery", labels=["jay", "crow"], vectors=np.eye(2)
        ... )
        >>> result = gallery.search(np.array([0.6, 0.8]), k=2)
        >>> result.ids[0], result.similarities[0]
        (array([1, 0]), array([0.8, 0.6], dtype=float32))
        >>> result.labels[0].tolist()
        ['crow', 'jay']
    """

    ids: IntArray
    similarities: npt.NDArray[np.float32]
    similarity: Similarity
    columns: tuple[str, ...]
    scores: npt.NDArray[np.float32] | None
    queries: Sequence[ImageSource | None]
    calibration: Calibration | None
    prior: float
    _positions: IntArray
    _take: Callable[[IntArray, Iterable[str]], dict[str, list[Any]]]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def k(self) -> int:
        """The number of results per query."""
        return int(self.ids.shape[1])

    def column(self, name: str) -> npt.NDArray[np.object_]:
        """Return a metadata column of the images, [queries, k]; None for an id of −1."""
        if name not in self.columns:
            raise ValueError(f"no column {name!r}. Columns: {', '.join(self.columns)}.")
        values = self._take(self._positions.ravel(), [name])[name]
        return np.fromiter(values, np.object_, len(values)).reshape(self.ids.shape)

    @cached_property
    def paths(self) -> npt.NDArray[np.object_]:
        """The file of each image, ready for `open_image`."""
        return self.column("path")

    @cached_property
    def labels(self) -> npt.NDArray[np.object_]:
        """The class of each image, or None."""
        return self.column("label")

    @cached_property
    def probabilities(self) -> FloatArray | None:
        """The probability that each image is of the class of its query, [queries, k].

        None without a calibration; 0 for an id of −1.
        """
        if self.calibration is None:
            return None
        probabilities = self.calibration.probability(self.similarities, self.prior)
        return np.where(self.ids < 0, 0.0, probabilities)

    @property
    def threshold(self) -> float | None:
        """The similarity below which an image is no match, if the embedder is calibrated."""
        return None if self.calibration is None else self.calibration.match_threshold

    @cached_property
    def is_match(self) -> npt.NDArray[np.bool_]:
        """Whether each image reaches the threshold, [queries, k]; all do without a calibration."""
        minimum = -np.inf if self.threshold is None else self.threshold
        return (self.ids >= 0) & (self.similarities >= minimum)

    @property
    def predictions(self) -> list[Prediction]:
        """The class of every query by a majority vote of its results."""
        return [vote(labels) for labels in self.labels]

    def show(self) -> Image.Image:
        """Return a contact sheet of queries and results, which notebooks display."""
        from proximetry.search.image_sheets import draw_sheet

        return draw_sheet(self)

    def __repr__(self) -> str:
        return f"SearchResult(queries={len(self)}, k={self.k}, similarity={self.similarity!r})"
