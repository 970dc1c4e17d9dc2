"""Read, draw and score verification pairs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.labels import Labels, as_array, as_labels
from proximetry._util.types import FloatSimilarity, IntArray
from proximetry.metrics._search.similarities import normalize, tiles
from proximetry.metrics._search.validation import (
    Embeddings,
    as_count,
    as_embeddings,
    as_vectors,
    check_similarity,
    encode,
)
from proximetry.metrics.verification import Verification, verify

# Values gathered or multiplied together.
_TILE = {"cpu": 2**21, "cuda": 2**26}


@dataclass(frozen=True)
class PairList:
    """A verification protocol: pairs of images, the fold of each pair, and the truth.

    ``images`` lists each image once as (name, number); ``pairs`` [M, 2] indexes it. Embed the
    images in this order and pass both to ``pair_similarities``. ``same`` and ``folds`` go to
    ``verify``; ``lines`` are the line numbers of the pairs in the file.
    """

    images: tuple[tuple[str, int], ...]
    pairs: IntArray
    same: npt.NDArray[np.bool_]
    folds: IntArray
    lines: IntArray

    @property
    def files(self) -> list[str]:
        """The images under LFW's naming: ``Name/Name_0001.jpg``."""
        return [f"{name}/{name}_{number:04d}.jpg" for name, number in self.images]


def read_pairs(path: str | os.PathLike[str]) -> PairList:
    """Read LFW's ``pairs.txt``.

    The first line has the number of folds, 1 by default, and of pairs of either kind per fold:
    ``10  300``. Each fold lists its same-person pairs, ``name i j``, then its different-person
    pairs, ``name1 i name2 j``.
    """
    text = Path(path).read_text(encoding="utf-8-sig")
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; expected LFW's pairs format")
    header = lines[0][1].split()
    if len(header) not in (1, 2) or not all(n.isdecimal() and int(n) > 0 for n in header):
        raise ValueError(
            f"{path}, line 1: expected the number of folds and of pairs per fold, such as "
            f"'10  300', got {lines[0][1]!r}"
        )
    folds, each = int(header[0]) if len(header) == 2 else 1, int(header[-1])
    if len(lines) - 1 != 2 * folds * each:
        raise ValueError(
            f"{path}: expected {folds} × 2 × {each} = {2 * folds * each} pairs by the first line, "
            f"got {len(lines) - 1}"
        )
    numbers: dict[tuple[str, int], int] = {}
    pairs = []
    for at, (number, line) in enumerate(lines[1:]):
        images = _parse_pair(f"{path}, line {number}", line, same=at % (2 * each) < each)
        pairs.append([numbers.setdefault(image, len(numbers)) for image in images])
    index = np.arange(len(pairs))
    return PairList(
        tuple(numbers),
        np.array(pairs, np.int64),
        index % (2 * each) < each,
        index // (2 * each),
        np.array([number for number, _ in lines[1:]], np.int64),
    )


def _parse_pair(where: str, line: str, *, same: bool) -> tuple[tuple[str, int], tuple[str, int]]:
    fields = [f.strip() for f in line.split("\t")] if "\t" in line else line.split()
    shape = "'name i j' (same person)" if same else "'name1 i name2 j' (different people)"
    if len(fields) != (3 if same else 4):
        raise ValueError(f"{where}: expected {shape} here, got {line!r}")
    first, i, second, j = (fields[0], fields[1], fields[0], fields[2]) if same else fields
    for value in (i, j):
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(
                f"{where}: invalid image number {value!r} in {line!r}; expected {shape}"
            )
    if (first == second) != same or (same and int(i) == int(j)):
        what = "an image with itself" if same else "a person with themselves as different people"
        raise ValueError(f"{where}: {line!r} compares {what}")
    return (first, int(i)), (second, int(j))


class DrawnPairs(NamedTuple):
    """Pairs of rows [M, 2], whether the rows of each are of one class, and the fold of each."""

    pairs: IntArray
    same: npt.NDArray[np.bool_]
    folds: IntArray


# Folds share no class if there are this many classes per fold; with fewer, they would compare too
# few pairs of classes.
_CLASSES_PER_FOLD = 10


def draw_pairs(labels: Labels, pairs: int = 6000, folds: int = 10, seed: int = 0) -> DrawnPairs:
    """Draw random pairs of rows in the layout of LFW: half of one class, in folds.

    For a same pair, a class is drawn and then two of its rows; for a different pair, two classes
    and a row of each. A pair may be drawn twice. All folds have the same number of pairs. They
    share no class if there are at least ten per fold; else each pair of classes is in one fold.
    """
    pairs, folds = as_count(pairs, "pairs"), as_count(folds, "folds", 2)
    (codes,), _ = encode(as_labels(labels, len(labels), "labels"))
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    pairable = sum(len(rows) > 1 for rows in members)
    if len(members) < 4 or pairable < 2:
        raise ValueError(
            "drawing pairs needs at least four classes, two of them with at least two images; "
            f"got {len(members)} classes, {pairable} with at least two images"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(members))
    # Classes of several rows first, so that every fold gets one.
    order = order[np.argsort([len(members[c]) < 2 for c in order], kind="stable")]
    folds_share_classes = len(members) < _CLASSES_PER_FOLD * folds
    folds = min(folds, pairable)
    each = max(1, pairs // (2 * folds))
    cross_class_pairs = rng.permutation(list(combinations(order, 2)) if folds_share_classes else [])
    drawn_pairs: list[IntArray] = []
    for fold in range(folds):
        fold_classes = order[fold::folds]
        paired_classes = [c for c in fold_classes if len(members[c]) > 1]
        if folds_share_classes:
            drawn_pairs += _rows_of_classes(rng, members, [(c, c) for c in paired_classes], each)
            drawn_pairs += _rows_of_classes(rng, members, cross_class_pairs[fold::folds], each)
            continue
        for _ in range(each):
            rows = members[paired_classes[rng.integers(len(paired_classes))]]
            drawn_pairs.append(rng.choice(rows, 2, replace=False))
        for _ in range(each):
            first, second = fold_classes[rng.choice(len(fold_classes), 2, replace=False)]
            drawn_pairs.append(np.array([rng.choice(members[first]), rng.choice(members[second])]))
    number = np.arange(len(drawn_pairs))
    return DrawnPairs(np.stack(drawn_pairs), number % (2 * each) < each, number // (2 * each))


def _rows_of_classes(
    rng: np.random.Generator, members: Sequence[IntArray], classes: Any, count: int
) -> list[IntArray]:
    """Draw pairs of rows evenly from pairs of classes; without replacement if there are enough."""
    drawn_pairs: list[IntArray] = []
    for number, (a, b) in enumerate(classes):
        share = len(range(number, count, len(classes)))
        width = len(members[b]) - (a == b)
        total = len(members[a]) * width
        sample = np.resize(rng.choice(total, min(share, total), replace=False), share)
        first, second = np.divmod(sample, width)
        second += (a == b) & (second >= first)  # no row with itself
        drawn_pairs += [*np.stack([members[a][first], members[b][second]], axis=1)]
    return drawn_pairs


def verify_classes(
    embeddings: Embeddings,
    labels: Labels,
    *,
    similarity: FloatSimilarity = "cosine",
    pairs: int = 6000,
    folds: int = 10,
    seed: int = 0,
) -> Verification:
    """Evaluate verification on random pairs of labeled embeddings.

    See `draw_pairs` for ``pairs``, ``folds`` and ``seed``, and `verify` for the result.

    Examples:
        >>> import numpy as np
        >>> from proximetry.metrics import verify_classes
        >>> labels = np.arange(200) // 10
        >>> verify_classes(np.eye(20)[labels], labels).accuracy
        1.0
    """
    sample = draw_pairs(labels, pairs, folds, seed)
    values = pair_similarities(embeddings, sample.pairs, similarity=similarity)
    return verify(values, sample.same, folds=sample.folds)


def pair_similarities(
    embeddings: Embeddings, pairs: Tensor | npt.ArrayLike, *, similarity: FloatSimilarity = "cosine"
) -> Tensor:
    """Return the similarity of each pair of rows, on the device of the embeddings.

    Larger is nearer; "euclidean" returns the negative distance. The cosine with a zero vector is 0.
    ``pairs`` is [M, 2].
    """
    check_similarity(similarity, FloatSimilarity)
    vectors = as_vectors(embeddings, similarity, "embeddings")
    index = _as_pairs(pairs, len(vectors)).to(vectors.device)
    result = torch.empty(len(index), dtype=vectors.dtype, device=vectors.device)
    for tile in tiles(len(index), vectors.shape[1], vectors.device, _TILE):
        # Summed in float64, so that the result does not depend on the tile size.
        left, right = (vectors[side].double() for side in index[tile].unbind(1))
        if similarity == "cosine":
            result[tile] = (normalize(left) * normalize(right)).sum(1).clamp(-1, 1)
        elif similarity == "dot":
            result[tile] = (left * right).sum(1)
        else:
            result[tile] = -(left - right).square().sum(1).sqrt()
    return result


def _as_pairs(pairs: Tensor | npt.ArrayLike, count: int) -> Tensor:
    array = as_array(pairs, "pairs")
    if array.ndim != 2 or array.shape[1] != 2 or not len(array):
        raise ValueError(f"pairs must be [M, 2] with at least one pair, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"pairs must be integers (row numbers), got {array.dtype}")
    outside = ((array < 0) | (array >= count)).any(1)
    if outside.any():
        pair = f"pair {outside.argmax()} is {tuple(array[outside][0].tolist())}"
        raise ValueError(f"{pair}, outside the rows 0 to {count - 1}")
    return torch.from_numpy(array.astype(np.int64))


@dataclass(frozen=True)
class Templates:
    """One vector per template, in the order of ``ids``; ``counts`` is the number of frames."""

    vectors: Tensor
    ids: npt.NDArray[Any]
    counts: IntArray

    def rows(self, ids: npt.ArrayLike) -> IntArray:
        """Return the row of each template id, for ``pair_similarities``; any shape."""
        array = np.asarray(ids)
        rows = np.minimum(np.searchsorted(self.ids, array), len(self.ids) - 1)
        unknown = self.ids[rows] != array
        if np.any(unknown):
            raise ValueError(f"unknown template {array[unknown][0].item()!r}")
        return rows.astype(np.int64)


def templates(
    embeddings: Embeddings, template_ids: Labels, weights: Tensor | npt.ArrayLike | None = None
) -> Templates:
    """Pool the frames of each video (or the photos of each person) into one unit vector.

    This is the (weighted) mean of the rows with the same template id, scaled to length 1. Rows are
    not normalized first. ``weights`` are numbers ≥ 0, such as the quality of each frame.
    """
    vectors = as_embeddings(embeddings)
    (codes,), ids = encode(as_labels(template_ids, len(vectors), "template_ids"))
    values = np.ones(len(codes)) if weights is None else as_array(weights, "weights").astype(float)
    if values.shape != codes.shape:
        raise ValueError(f"weights has shape {values.shape}, expected one per row {codes.shape}")
    valid = np.isfinite(values) & (values >= 0)
    if not valid.all():
        raise ValueError(f"weights must be finite and not negative; row {valid.argmin()} is not")
    totals = np.bincount(codes, values)
    if (totals == 0).any():
        raise ValueError(f"all weights of template {ids[totals == 0][0].item()!r} are 0")
    index, share = (
        torch.from_numpy(values).to(vectors.device) for values in (codes, values / totals[codes])
    )
    sums = torch.zeros(len(ids), vectors.shape[1], dtype=torch.float64, device=vectors.device)
    for tile in tiles(len(vectors), vectors.shape[1], vectors.device, _TILE):
        sums.index_add_(0, index[tile], vectors[tile].double() * share[tile, None])
    return Templates(normalize(sums.to(vectors.dtype)), ids, np.bincount(codes))
