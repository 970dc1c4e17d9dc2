"""Queries of a search: images, a rectangle of one, ids or vectors; several as one query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from proximetry._util.errors import UsageError
from proximetry._util.types import IntArray, Progress, is_integer
from proximetry.data import open_image
from proximetry.metrics.reranking import RERANKED, expand_queries, k_reciprocal_distances
from proximetry.models.constants import Similarity
from proximetry.models.preprocessing import ImageSource
from proximetry.search.exact import FloatArray, Hits, merge_hits
from proximetry.search.new_images import Vectors, as_vectors
from proximetry.search.segment import prepare_vectors

if TYPE_CHECKING:
    from proximetry.search.gallery import AnySnapshot, Gallery

Queries: TypeAlias = "ImageSource | Sequence[ImageSource] | Vectors | int | Sequence[int]"
Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a rectangle, in pixels."""
Combine = Literal["mean", "max"]
Search: TypeAlias = Callable[[FloatArray, int], Hits]
"""Searches the allowed images: (vectors, k)."""

_MIN_ID = -(2**63)  # negative ids are unknown ones
_MAX_RERANK_K = 1000  # re-ranking compares twice this number of images


class EmbeddedQueries(NamedTuple):
    """Prepared vectors of queries, and what they come from.

    With `combine="max"`, all vectors are one query, so there is one image and one row of positions.
    """

    vectors: FloatArray
    images: Sequence[Any]  # of each query; None for a vector
    positions: IntArray  # of the images of the gallery that are the query, excluded from its result


def check_options(similarity: Similarity, k: Any, combine: Any, expand: Any, rerank: bool) -> None:
    """Raise UsageError for invalid options of a search."""
    if not is_integer(k):
        raise UsageError(f"k must be an integer of at least 1, got {k!r}")
    if not is_integer(expand, 0):
        raise UsageError(f"expand must be an integer of at least 0, got {expand!r}")
    if expand and similarity != "cosine":
        raise UsageError("expand requires a gallery with cosine similarity")
    if rerank and k > _MAX_RERANK_K:
        raise UsageError(f"rerank supports k up to {_MAX_RERANK_K}, got k = {k}")
    if combine not in (None, "mean", "max"):
        raise UsageError(f"combine must be mean or max, got {combine!r}")
    if combine == "max" and (expand or rerank):
        raise UsageError('combine="max" does not support expand and rerank. Use "mean".')


def embed_queries(
    gallery: Gallery,
    snapshot: AnySnapshot,
    queries: Any,
    positions: IntArray | None,
    box: Box | None,
    combine: Combine | None,
    batch_size: int,
    progress: Progress,
) -> EmbeddedQueries:
    """Return the vectors of queries; arguments are those of `Gallery.search`.

    Of queries that are ids, `positions` are the rows.
    """
    own = np.empty((0, 0), np.int64) if positions is None else positions[:, None]
    if positions is not None:
        images: Sequence[Any] = snapshot.take(positions, ["path"])["path"]
        vectors = snapshot.vectors(positions)
    elif "float" in str(getattr(queries, "dtype", "")) and queries.ndim in (1, 2):
        queries = queries[None] if queries.ndim == 1 else queries
        images = [None] * len(queries)
        vectors = as_vectors(queries, len(queries), gallery.dim)
    else:
        images = [queries] if gallery.embedder.is_single(queries) else list(queries)
        if box is not None:
            if len(images) != 1:
                raise UsageError(f"box needs one image, got {len(images)}")
            images = [crop(open_image(images[0]), box)]
        try:
            vectors = gallery.embedder.encode(
                images, batch_size, progress=lambda done: progress(done, len(images))
            ).numpy()
        except ValueError as error:
            cause = error.__cause__
            raise UsageError(str(cause if isinstance(cause, ValueError) else error)) from error
    if box is not None and (positions is not None or images[:1] == [None]):
        raise UsageError("box needs an image as the query, not an id or a vector")
    vectors = prepare_vectors(vectors, snapshot.manifest)
    if combine is not None and len(vectors):
        images, own = images[:1], own.reshape(1, -1)
    if combine == "mean" and len(vectors):
        vectors = prepare_vectors(vectors.mean(0, keepdims=True), snapshot.manifest)
    return EmbeddedQueries(vectors, images, own)


def as_ids(queries: Any) -> list[int] | None:
    """Return queries that are ids of the gallery, else None."""
    if is_integer(queries, _MIN_ID):
        return [int(queries)]
    if getattr(queries, "ndim", 0) == 1 and "int" in str(queries.dtype):
        return [*map(int, queries)]
    if (
        isinstance(queries, list | tuple)
        and queries
        and all(is_integer(q, _MIN_ID) for q in queries)
    ):
        return [*map(int, queries)]
    return None


def crop(image: Image.Image, box: Box) -> Image.Image:
    """Return a rectangle of an image."""
    if len(box) != 4 or not all(is_integer(edge, 0) for edge in box):
        raise UsageError(
            f"box must be four integers of at least 0: left, top, right, bottom; got {box}"
        )
    left, top, right, bottom = box
    if not (left < right <= image.width and top < bottom <= image.height):
        raise UsageError(
            f"box {left},{top},{right},{bottom} is empty or exceeds the image of {image.width} × "
            f"{image.height} pixels. Pass left, top, right, bottom."
        )
    return image.crop((left, top, right, bottom))


def run_queries(
    snapshot: AnySnapshot,
    search: Search,
    queries: EmbeddedQueries,
    k: int,
    combine: Combine | None,
    expand: int,
    rerank: bool,
) -> tuple[Hits, npt.NDArray[np.float32] | None]:
    """Return the hits of every query and, with `expand` or `rerank`, the scores that order them."""
    vectors, expanded = queries.vectors, queries
    if expand:
        positions = find_nearest(search, queries, expand).positions
        neighbors = snapshot.vectors(positions.ravel()).reshape(*positions.shape, vectors.shape[1])
        expanded = queries._replace(vectors=expand_queries(vectors, neighbors).astype(np.float32))
    hits = find_nearest(search, expanded, max(RERANKED, 2 * k) if rerank else k)
    if rerank:
        hits = _rerank(snapshot, expanded.vectors, hits, k)
    if combine == "max" and len(vectors):
        hits = _merge(snapshot, vectors, hits)
    if not (expand or rerank):
        return hits, None
    scores = hits.scores.astype(np.float32)
    return Hits(hits.positions, snapshot.scores(vectors, hits.positions)), scores


def find_nearest(search: Search, queries: EmbeddedQueries, k: int) -> Hits:
    """Return the k nearest images of every query, without the query itself."""
    positions = queries.positions
    hits = search(queries.vectors, k + positions.shape[1])
    if not positions.size:
        return hits
    positions = np.broadcast_to(positions, (len(hits.positions), positions.shape[1]))
    own = (hits.positions[:, :, None] == positions[:, None]).any(2)
    others = Hits(np.where(own, -1, hits.positions), np.where(own, -np.inf, hits.scores))
    return merge_hits([others], min(k, own.shape[1]))


def _merge(snapshot: AnySnapshot, vectors: FloatArray, hits: Hits) -> Hits:
    """Return the nearest images of all queries as one query; an image has its highest score."""
    width = hits.positions.shape[1]
    positions = np.unique(hits.positions[hits.positions >= 0])
    scores = snapshot.scores(vectors, np.tile(positions, (len(vectors), 1))).max(0)
    return merge_hits([Hits(positions[None], scores[None])], width)


def _rerank(snapshot: AnySnapshot, queries: FloatArray, hits: Hits, k: int) -> Hits:
    """Return the k nearest hits by k-reciprocal distances."""
    scores = np.full(hits.positions.shape, -np.inf)
    for query, positions, row in zip(queries, hits.positions, scores, strict=True):
        valid = positions >= 0
        if valid.any():
            vectors = snapshot.vectors(positions[valid])
            row[valid] = -k_reciprocal_distances(query[None], vectors)[0]
    return merge_hits([Hits(hits.positions, scores)], min(k, hits.positions.shape[1]))
