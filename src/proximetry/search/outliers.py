"""Images that are far from all others, and labels that disagree with those of the neighbors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.metrics.label_model import MIN_CLASS_SIZE, fit_labels
from proximetry.search.exact import Hits, as_similarities
from proximetry.search.queries import EmbeddedQueries, find_nearest

if TYPE_CHECKING:
    from proximetry.search.gallery import AnySnapshot

NEIGHBORS = 10  # of an image, to compare labels
OUTLIER_NEIGHBORS = 5  # to measure the distance of an image from the others
MAX_DEVIATIONS = 5.0  # robust standard deviations of a log distance above the median
_BLOCK = 4096  # images searched at a time
_MIN_PROBABILITY = 0.5  # that a label is wrong


class Outlier(NamedTuple):
    """An image that is far from its nearest neighbors, and its mean similarity to these."""

    id: int
    path: str
    label: str | None
    similarity: float


class LabelError(NamedTuple):
    """An image whose label is probably wrong, with the class of its neighbors."""

    id: int
    path: str
    label: str
    suggestion: str
    probability: float


def log_spread(distances: npt.NDArray[np.floating[Any]]) -> tuple[float, float]:
    """Return the median of log distances, and their robust standard deviation.

    Both change little while fewer than half of the images are outliers or have copies.
    """
    logs = np.log(np.maximum(distances, 1e-7))
    median = np.median(logs)
    return float(median), float(1.4826 * np.median(np.abs(logs - median)))


def outlier_deviations(distances: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Return how many standard deviations log distances are above the median.

    Images above MAX_DEVIATIONS are outliers.

    Args:
        distances: mean distance of each image to its OUTLIER_NEIGHBORS nearest ones.
    """
    median, deviation = log_spread(distances)
    return np.asarray((np.log(np.maximum(distances, 1e-7)) - median) / max(deviation, 1e-3))


def find_outliers(snapshot: AnySnapshot, progress: Progress) -> list[Outlier]:
    """Find outliers; see `Gallery.outliers`."""
    allowed = snapshot.select({})
    positions = snapshot.allowed_positions(allowed)
    hits = _neighbors(snapshot, positions, allowed, OUTLIER_NEIGHBORS, progress)
    if hits.positions.shape[1] == 0:
        return []
    similarities = as_similarities(hits.scores, snapshot.manifest.similarity).astype(np.float64)
    found = hits.positions >= 0  # an approximate index may find fewer
    means = np.where(found, similarities, 0).sum(1) / np.maximum(found.sum(1), 1)
    best = 1.0 if snapshot.manifest.similarity == "cosine" else 0.0
    rows = np.flatnonzero(outlier_deviations(best - means) > MAX_DEVIATIONS)
    rows = rows[np.argsort(means[rows], kind="stable")]
    columns = snapshot.take(positions[rows], ["path", "label"])
    ids = snapshot.ids(positions[rows]).tolist()
    return [*map(Outlier, ids, columns["path"], columns["label"], means[rows].tolist())]


def find_label_errors(snapshot: AnySnapshot, progress: Progress) -> list[LabelError]:
    """Find probable label errors; see `Gallery.label_errors`."""
    everything = snapshot.allowed_positions(snapshot.select({}))
    labels: npt.NDArray[Any] = np.array(snapshot.take(everything, ["label"])["label"], np.object_)
    if len({*labels.tolist()} - {None}) < 2:
        raise UsageError("the gallery has fewer than two classes. Pass labels to build.")
    known = labels != np.array(None)
    positions, names = everything[known], labels[known]
    classes, codes = np.unique(names.astype(np.str_), return_inverse=True)
    if np.bincount(codes).max() < MIN_CLASS_SIZE:
        return []
    allowed = snapshot.select({"label": {"!=": None}})
    hits = _neighbors(snapshot, positions, allowed, NEIGHBORS, progress)
    neighbors = np.searchsorted(positions, hits.positions).clip(max=len(positions) - 1)
    neighbors[positions[neighbors] != hits.positions] = -1  # none, or added meanwhile
    model = fit_labels(snapshot.vectors(positions), codes.astype(np.int64), neighbors)
    rows = np.flatnonzero(model.wrong > _MIN_PROBABILITY)
    rows = rows[np.argsort(-model.wrong[rows], kind="stable")]
    paths = snapshot.take(positions[rows], ["path"])["path"]
    suggestions = classes[model.best[rows]].tolist()
    ids, wrong = snapshot.ids(positions[rows]).tolist(), model.wrong[rows].tolist()
    return [*map(LabelError, ids, paths, names[rows].tolist(), suggestions, wrong)]


def _neighbors(
    snapshot: AnySnapshot, positions: IntArray, allowed: Any, k: int, progress: Progress
) -> Hits:
    """Return the k nearest other images of the images at positions, among the allowed ones."""
    k, hits = min(k, len(positions) - 1), list[Hits]()
    for part in chunks(len(positions), _BLOCK):
        own = positions[part]
        queries = EmbeddedQueries(snapshot.vectors(own), [], own[:, None])
        hits.append(find_nearest(lambda v, n: snapshot.search(v, n, allowed), queries, max(k, 1)))
        progress(part.stop, len(positions))
    if k < 1:
        return Hits(np.empty((len(positions), 0), np.int64), np.empty((len(positions), 0)))
    return Hits(*(np.concatenate(arrays) for arrays in zip(*hits, strict=True)))
