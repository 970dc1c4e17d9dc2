"""`Duplicates` of a gallery: pairs above a threshold, their groups, the default threshold."""

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
from proximetry.metrics._search.problem import connected_components
from proximetry.metrics._search.similarities import full_precision
from proximetry.models import Embedder
from proximetry.search.exact import FloatArray, Part, Scores, Store, as_similarities, take
from proximetry.search.new_images import stamp_of
from proximetry.search.outliers import log_spread
from proximetry.search.segment import prepare_vectors
from proximetry.search.snapshot import Snapshot

if TYPE_CHECKING:
    from proximetry.search.gallery import AnySnapshot

MAX_COMPARED_ROWS = 250_000  # their pairs take 10 minutes at 512 dimensions on one core
ROUNDING = 2.0**-22  # bounds 1 − the cosine of a float32 unit vector with its copy
_TILE = 4096
_MAX_PAIRS = 10_000_000
_NEIGHBORS = 32  # first k for each image of a large gallery
_SAMPLE_SIZE = 50  # images that the default threshold is measured with
_MISSED_COPIES = 0.1  # share of altered copies that may be less similar than the threshold
_BLOCK = 1024  # images searched at a time
_DEVIATIONS = 2.0  # threshold: this many robust standard deviations below the median log distance
_DECODED_SIDE = 512  # images are decoded at up to twice this size, which is enough for networks
_DEFAULT_THRESHOLD = 0.99


@dataclass(frozen=True)
class Duplicates:
    """Near-duplicate images.

    Attributes:
        pairs: ids of both images, smaller id first; most similar pairs first, [n, 2].
        similarities: cosine, or negative Euclidean distance, of each pair.
        groups: ids of images connected by pairs, largest group first.
        paths: file of each image in a group, by id.
        threshold: minimum cosine, or maximum Euclidean distance, of a pair.
        threshold_source: how the threshold was chosen; "" if it was passed.
    """

    pairs: IntArray
    similarities: FloatArray
    groups: list[IntArray]
    paths: dict[int, str]
    threshold: float
    threshold_source: str = ""

    def to_remove(self) -> list[str]:
        """Return the files of all images but one per group: the largest file, else the first id."""
        removed: list[str] = []
        for group in self.groups:
            named = (self.paths[number] for number in sorted(group.tolist()))
            paths = [path for path in named if path]  # None: removed since
            kept = max(paths, key=_file_size, default=None)  # the first of equal ones
            removed += [path for path in paths if path != kept]
        return removed


def _file_size(path: str) -> int:
    stamp = stamp_of(path)
    return -1 if stamp is None else stamp.size


def find_duplicates(
    snapshot: AnySnapshot,
    load_embedder: Callable[[], Embedder] | None,
    threshold: float | None,
    progress: Progress,
) -> Duplicates:
    """Find near-duplicates; see `Gallery.duplicates`."""
    manifest, threshold_source = snapshot.manifest, ""
    if threshold is None:
        threshold, threshold_source = _measure_threshold(snapshot, load_embedder, progress)
    cosine = manifest.similarity == "cosine"
    if not (-1 <= threshold <= 1 if cosine else threshold >= 0):
        limits = "from −1 to 1" if cosine else "at least 0"
        raise UsageError(f"threshold must be {limits}, got {threshold:g}")
    min_score = float(threshold) - ROUNDING if cosine else -(float(threshold) ** 2)
    indexed = any(info.index for info in manifest.segments)
    if isinstance(snapshot, Snapshot) and (len(snapshot) <= MAX_COMPARED_ROWS or not indexed):
        alive = snapshot.allowed_positions(snapshot.alive)
        positions, scores = compare_all(snapshot.store, alive, min_score, progress)
    else:
        positions, scores = _compare_neighbors(snapshot, min_score, progress)
    similarities = as_similarities(scores, manifest.similarity)
    order = np.lexsort((*positions.T[::-1], -similarities))
    members = np.unique(positions)
    paths = snapshot.take(members, ["path"])["path"]
    pairs = snapshot.ids(positions[order])
    return Duplicates(
        pairs,
        similarities[order],
        group_pairs(pairs),
        dict(zip(snapshot.ids(members).tolist(), paths, strict=True)),
        float(threshold),
        threshold_source,
    )


def compare_all(
    store: Store, positions: IntArray, min_score: float, progress: Progress
) -> tuple[IntArray, Scores]:
    """Return every pair of positions with at least this score, the smaller position first."""
    tiles = [positions[part] for part in chunks(len(positions), _TILE)]
    pairs: list[IntArray] = [np.empty((0, 2), np.int64)]
    scores: list[Scores] = [np.empty(0)]
    count, done, total = 0, 0, len(tiles) * (len(tiles) + 1) // 2
    with full_precision(torch.device("cpu")):
        for number, tile in enumerate(tiles):
            queries = take(store.vectors, store.starts, tile)
            limits = min_score + store.shifts(queries) - store.bounds(queries).max(initial=0)
            limits = torch.from_numpy(limits.astype(np.float32))[:, None]
            for other in tiles[number:]:
                vectors = take(store.vectors, store.starts, other)
                squares = store.shifts(vectors).astype(np.float32)
                part = Part(vectors, squares if store.similarity == "euclidean" else None, 0)
                products = torch.cat([products for _, products in part.products(queries)], 1)
                near = products >= limits
                near = near.triu(1) if other is tile else near
                first, second = (indices.numpy() for indices in near.nonzero(as_tuple=True))
                _check_count(count + len(first))
                candidates = np.stack([tile[first], other[second]], 1)
                exact = store.scores(queries[first], candidates[:, 1:])[:, 0]
                pairs.append(candidates[exact >= min_score])
                scores.append(exact[exact >= min_score])
                count += len(pairs[-1])
                done += 1
                progress(done, total)
    return np.concatenate(pairs), np.concatenate(scores)


def _compare_neighbors(
    snapshot: AnySnapshot, min_score: float, progress: Progress
) -> tuple[IntArray, Scores]:
    """Return pairs with at least this score among the nearest neighbors of each image.

    Lists that end above the threshold are searched again with a larger k.
    """
    pairs: list[IntArray] = [np.empty((0, 2), np.int64)]
    scores: list[Scores] = [np.empty(0)]
    allowed = snapshot.select({})
    everything = snapshot.allowed_positions(allowed)
    max_k = min(len(everything), snapshot.max_k)
    for part in chunks(len(everything), _BLOCK):
        positions, vectors = everything[part], snapshot.vectors(everything[part])
        pending, k = np.arange(len(positions)), _NEIGHBORS
        while len(pending):
            k = min(k, max_k)
            hits = snapshot.search(vectors[pending], k, allowed)
            full = (hits.scores[:, -1] >= min_score) & (k < max_k)
            queries = np.broadcast_to(positions[pending, None], hits.positions.shape)
            near = (hits.scores >= min_score) & (hits.positions >= 0) & (hits.positions != queries)
            near[full] = False
            pairs.append(np.sort(np.stack([queries[near], hits.positions[near]], 1), 1))
            scores.append(hits.scores[near])
            _check_count(sum(map(len, scores)) // 2)
            pending, k = pending[full], 4 * k
        progress(part.stop, len(everything))
    unique, first = np.unique(np.concatenate(pairs), axis=0, return_index=True)
    return unique, np.concatenate(scores)[first]


def _check_count(count: int) -> None:
    if count > _MAX_PAIRS:
        raise UsageError(f"more than {format_int(_MAX_PAIRS)} pairs. Pass a stricter threshold.")


def group_pairs(pairs: IntArray) -> list[IntArray]:
    """Return the connected components of pairs, the largest first."""
    members, ends = np.unique(pairs, return_inverse=True)
    first, second = torch.from_numpy(ends.reshape(-1, 2).astype(np.int64)).T
    roots: Any = connected_components(len(members), first, second).numpy()
    order = np.argsort(roots, kind="stable")
    edges = np.flatnonzero(np.diff(roots[order])) + 1
    groups = [group for group in np.split(members[order], edges) if len(group)]
    return sorted(groups, key=lambda group: (-len(group), int(group[0])))


def _altered_copies(image: Image.Image) -> list[Image.Image]:
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


def _measure_threshold(
    snapshot: AnySnapshot, load_embedder: Callable[[], Embedder] | None, progress: Progress
) -> tuple[float, str]:
    """Return the default threshold and how it was chosen.

    A sample of the images is compared with altered copies and with its nearest neighbors.
    """
    cosine, allowed = snapshot.manifest.similarity == "cosine", snapshot.select({})
    positions, generator = snapshot.allowed_positions(allowed), np.random.default_rng(0)
    size = min(_SAMPLE_SIZE, len(positions))
    positions = np.sort(generator.choice(positions, size, replace=False))
    originals: list[int] = []
    copies: list[Image.Image] = []
    paths = snapshot.take(positions, ["path"])["path"] if load_embedder else []
    for position, path in zip(positions.tolist(), paths, strict=False):
        with suppress(ImageError):
            altered = _altered_copies(open_image(path, size=_DECODED_SIDE))
            copies += altered
            originals += [position] * len(altered)
    if load_embedder is None or not copies:
        reason = "no image can be read" if load_embedder else "the gallery has no embedder"
        if not cosine:
            raise UsageError(f"the threshold cannot be measured: {reason}. Pass a threshold.")
        return _DEFAULT_THRESHOLD, f"cosine {_DEFAULT_THRESHOLD}, not measured: {reason}"
    vectors = load_embedder().encode(copies, progress=lambda done: progress(done, len(copies)))
    queries = prepare_vectors(vectors.numpy(), snapshot.manifest)
    scores = snapshot.scores(queries, np.array(originals)[:, None])
    copy_score, neighbor_score = float(np.quantile(scores, _MISSED_COPIES)), -np.inf
    best = 1.0 if cosine else 0.0
    if len(positions) > 1:
        nearest = snapshot.search(snapshot.vectors(positions), 2, allowed).scores[:, -1]
        neighbor_score = best - _unusual_distance(best - nearest)
    values = np.array([max(copy_score, neighbor_score), copy_score, neighbor_score])
    values = np.minimum(values, 1.0) if cosine else np.sqrt(-values)
    threshold, copy_score, neighbor_score = values.tolist()
    return threshold, (
        f"{'cosine' if cosine else 'distance'} {threshold:.4f}, measured on "
        f"{len({*originals})} images: 90 % of altered copies reach {copy_score:.4f}, few different "
        f"images reach {neighbor_score:.4f}"
    )


def _unusual_distance(distances: npt.NDArray[np.floating[Any]]) -> float:
    """Return a distance that few nearest neighbors fall below, even if some are copies."""
    median, deviation = log_spread(distances)
    return float(np.exp(median - _DEVIATIONS * deviation))
