"""Near-duplicates of a gallery: pairs above a threshold, their groups, the default threshold."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageEnhance, ImageOps

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.data import ImageError, open_image
from proximetry.metrics._search.embeddings import full_precision
from proximetry.metrics._search.task import connected_components
from proximetry.models import Embedder
from proximetry.search.exact import FloatArray, Part, Scores, Store, take
from proximetry.search.segment import prepare_vectors

if TYPE_CHECKING:
    from proximetry.search.gallery import Version

MAX_COMPARED_ROWS = 250_000  # rows; all pairs of them take 10 minutes at 512 dimensions on one core
_TILE = 4096
_MAX_PAIRS = 10_000_000
_NEIGHBORS = 32  # that are searched first for each image of a large gallery
_SAMPLE = 50  # images that the default threshold is measured with
_MISSED = 0.1  # share of altered copies that may be less similar than the threshold
_DEVIATIONS = 2.0  # robust standard deviations from which on a neighbor is unusually near
_SIDE = 512  # images are decoded at up to twice this size, which is enough for networks
_DEFAULT_THRESHOLD = 0.99


@dataclass(frozen=True)
class Duplicates:
    """Near-duplicate images.

    Attributes:
        pairs: ids of two images each, the smaller one first, most similar first, [n, 2].
        similarities: of each pair: the cosine, or the negative Euclidean distance.
        groups: ids of images connected by pairs, the largest group first.
        paths: the file of each image in a group, by its id.
        threshold: the smallest cosine, or the largest Euclidean distance.
        threshold_source: how the threshold was chosen, "" if it was passed.
    """

    pairs: IntArray
    similarities: FloatArray
    groups: list[IntArray]
    paths: dict[int, str]
    threshold: float
    threshold_source: str = ""


def compare_all(
    store: Store, positions: IntArray, least: float, progress: Progress
) -> tuple[IntArray, Scores]:
    """Return every pair of positions, smaller one first, with at least this score, exactly."""
    tiles = [positions[part] for part in chunks(len(positions), _TILE)]
    pairs: list[IntArray] = [np.empty((0, 2), np.int64)]
    scores: list[Scores] = [np.empty(0)]
    count, done, total = 0, 0, len(tiles) * (len(tiles) + 1) // 2
    with full_precision(torch.device("cpu")):
        for number, tile in enumerate(tiles):
            queries = take(store.vectors, store.starts, tile)
            limits = least + store.shifts(queries) - store.bounds(queries).max(initial=0)
            limits = torch.from_numpy(limits.astype(np.float32))[:, None]
            for other in tiles[number:]:
                vectors = take(store.vectors, store.starts, other)
                squares = store.shifts(vectors).astype(np.float32)
                part = Part(vectors, squares if store.similarity == "euclidean" else None, 0)
                near = torch.cat([products for _, products in part.products(queries)], 1) >= limits
                near = near.triu(1) if other is tile else near
                first, second = (each.numpy() for each in near.nonzero(as_tuple=True))
                _check_count(count + len(first))
                candidates = np.stack([tile[first], other[second]], 1)
                exact = store.scores(queries[first], candidates[:, 1:])[:, 0]
                pairs.append(candidates[exact >= least])
                scores.append(exact[exact >= least])
                count += len(pairs[-1])
                done += 1
                progress(done, total)
    return np.concatenate(pairs), np.concatenate(scores)


def compare_neighbors(
    version: Version, least: float, progress: Progress
) -> tuple[IntArray, Scores]:
    """Return pairs with at least this score among the nearest neighbors of each image.

    Lists that end above the threshold are searched again with a larger k.
    """
    pairs: list[IntArray] = [np.empty((0, 2), np.int64)]
    scores: list[Scores] = [np.empty(0)]
    done, total, allowed = 0, len(version), version.select({})
    most = min(total, version.max_k)
    for positions, vectors in version.blocks():
        waiting, k = np.arange(len(positions)), _NEIGHBORS
        while len(waiting):
            k = min(k, most)
            hits = version.search(vectors[waiting], k, allowed)
            full = (hits.scores[:, -1] >= least) & (k < most)
            queries = np.broadcast_to(positions[waiting, None], hits.positions.shape)
            near = (hits.scores >= least) & (hits.positions >= 0) & (hits.positions != queries)
            near[full] = False
            pairs.append(np.sort(np.stack([queries[near], hits.positions[near]], 1), 1))
            scores.append(hits.scores[near])
            _check_count(sum(map(len, scores)) // 2)
            waiting, k = waiting[full], 4 * k
        done += len(positions)
        progress(done, total)
    unique, first = np.unique(np.concatenate(pairs), axis=0, return_index=True)
    return unique, np.concatenate(scores)[first]


def _check_count(count: int) -> None:
    if count > _MAX_PAIRS:
        raise UsageError(f"more than {format_int(_MAX_PAIRS)} pairs. Pass a stricter threshold.")


def group_pairs(pairs: IntArray) -> list[IntArray]:
    """Return the connected components of pairs, the largest first."""
    members, ends = np.unique(pairs, return_inverse=True)
    one, two = torch.from_numpy(ends.reshape(-1, 2).astype(np.int64)).T
    roots: Any = connected_components(len(members), one, two).numpy()
    order = np.argsort(roots, kind="stable")
    edges = np.flatnonzero(np.diff(roots[order])) + 1
    groups = [group for group in np.split(members[order], edges) if len(group)]
    return sorted(groups, key=lambda group: (-len(group), int(group[0])))


def altered_copies(image: Image.Image) -> list[Image.Image]:
    """Return an image at half size, recompressed, mirrored, brightened and cropped."""
    width, height = image.size
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=40)
    return [
        image.resize((max(1, width // 2), max(1, height // 2))),
        open_image(stream.getvalue()),
        ImageOps.mirror(image),
        ImageEnhance.Brightness(image).enhance(1.2),
        image.crop((width // 20, height // 20, width - width // 20, height - height // 20)),
    ]


def measure_threshold(
    version: Version, embedder: Callable[[], Embedder] | None, progress: Progress
) -> tuple[float, str]:
    """Return the default threshold and how it was chosen.

    A sample of the images is compared with altered copies and with its nearest neighbors.
    """
    cosine, allowed = version.manifest.similarity == "cosine", version.select({})
    positions, draw = version.allowed_positions(allowed), np.random.default_rng(0)
    positions = np.sort(draw.choice(positions, min(_SAMPLE, len(positions)), replace=False))
    originals: list[int] = []
    copies: list[Image.Image] = []
    paths = version.take(positions, ["path"])["path"] if embedder else []
    for position, path in zip(positions.tolist(), paths, strict=False):
        with suppress(ImageError):
            more = altered_copies(open_image(path, size=_SIDE))
            copies += more
            originals += [position] * len(more)
    if embedder is None or not copies:
        reason = "no image can be read" if embedder else "the gallery has no embedder"
        if not cosine:
            raise UsageError(f"the threshold cannot be measured: {reason}. Pass a threshold.")
        return _DEFAULT_THRESHOLD, f"cosine {_DEFAULT_THRESHOLD}, not measured: {reason}"
    vectors = embedder().encode(copies, progress=lambda done: progress(done, len(copies)))
    queries = prepare_vectors(vectors.numpy(), version.manifest)
    scores = version.scores(queries, np.array(originals)[:, None])
    reached, others = float(np.quantile(scores, _MISSED)), -np.inf
    best = 1.0 if cosine else 0.0
    if len(positions) > 1:
        near = version.search(version.vectors(positions), 2, allowed).scores
        others = best - _unusually_near(best - near[:, -1])
    values = np.array([max(reached, others), reached, others])
    threshold, reached, others = (np.minimum(values, 1.0) if cosine else np.sqrt(-values)).tolist()
    return threshold, (
        f"{'cosine' if cosine else 'distance'} {threshold:.4f}, measured on "
        f"{len({*originals})} images: 90 % of altered copies reach {reached:.4f}, few different "
        f"images reach {others:.4f}"
    )


def _unusually_near(distances: npt.NDArray[np.floating[Any]]) -> float:
    """Return the distance that few nearest neighbors fall below, whether or not some are copies.

    Distances are compared by their logarithms. Median and median absolute deviation change
    little while fewer than half of the images have copies.
    """
    logs = np.log(np.maximum(distances, 1e-7))
    middle = np.median(logs)
    return float(np.exp(middle - _DEVIATIONS * 1.4826 * np.median(np.abs(logs - middle))))
