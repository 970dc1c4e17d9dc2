"""Copies of images: exact ones, and resized, recompressed, mirrored or cropped ones.

Near neighbors whose cosine is that of altered copies are candidates. A candidate is a copy if the
pixels of one image, at low resolution, correlate with those of the other, mirrored or not, whole
or within a crop of 85 % of the sides or more. The thresholds are measured on altered copies of
photographs (docs/check.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray
from proximetry.data import ImageError, open_image
from proximetry.data.loader import parallel_map
from proximetry.health.embedded_images import EmbeddedImages
from proximetry.health.finding import Finding
from proximetry.metrics.label_model import LabelModel
from proximetry.search.duplicates import ROUNDING

MIN_COSINE = 0.75  # of candidates; half-size copies of photographs have about 0.8
MIN_COSINE_OF_VECTORS = 0.99  # of copies, if there are vectors only
MIN_CORRELATION = 0.85
MIN_SCORE = 0.87  # mean of correlation and cosine
_MIN_COARSE_CORRELATION = 0.75  # of whole images at _COARSE pixels; copies have 0.85 or more
_SIDE, _WINDOW, _COARSE = 40, 24, 5  # pixels of a whole image, and of what is compared
_CROPS = (40, 38, 36, 34)  # sides of crops
_STEP = 2  # between crops
_PAIRS = 256  # compared at a time
_HELD_OUT = ("test", "val")  # their images are kept, and copies in other splits dropped


class Copies(NamedTuple):
    """Pairs of copies.

    Attributes:
        pairs: the smaller number first, [m, 2].
        scores: the mean of cosine and correlation, or the cosine; 1 for exact copies.
    """

    pairs: IntArray
    scores: Any


def find_copies(images: EmbeddedImages) -> Copies:
    """Find pairs of copies among the nearest neighbors."""
    limit = MIN_COSINE if images.has_files else MIN_COSINE_OF_VECTORS
    first, column = np.nonzero(images.cosines >= limit)
    pairs = np.sort(np.stack([first, images.neighbors[first, column]], 1), 1)
    pairs, index = np.unique(pairs, axis=0, return_index=True)
    scores = images.cosines[first, column][index].astype(np.float64)
    exact = scores >= 1 - ROUNDING
    scores[exact] = 1.0
    if not images.has_files:
        return Copies(pairs, scores)
    others = np.flatnonzero(~exact)
    numbers, ends = np.unique(pairs[others], return_inverse=True)
    thumbnails = _thumbnails([images.catalog.file(number) for number in numbers.tolist()])
    left, right = torch.from_numpy(ends.reshape(-1, 2)).T
    coarse = [_windows(one, _SIDE, _COARSE)[:, 0] for one in (thumbnails, thumbnails.flip(3))]
    similar = [(coarse[0][left] * other[right]).sum(1) for other in coarse]
    likely = (torch.maximum(*similar) >= _MIN_COARSE_CORRELATION).nonzero()[:, 0]
    correlations = np.zeros(len(others))
    for part in chunks(len(likely), _PAIRS):
        rows = likely[part]
        values = correlation(thumbnails[left[rows]], thumbnails[right[rows]])
        correlations[rows.numpy()] = values.numpy()
    scores[others] = (scores[others] + correlations) / 2
    near = exact | (scores >= MIN_SCORE)
    near[others] &= correlations >= MIN_CORRELATION
    return Copies(pairs[near], scores[near])


def _thumbnails(files: Sequence[str]) -> Tensor:
    """Return images of equal size, [n, 3, side, side]; black if one is unreadable now."""
    arrays = [np.empty((0, _SIDE, _SIDE, 3), np.uint8), *parallel_map(_read_small, files)]
    return torch.from_numpy(np.concatenate(arrays)).permute(0, 3, 1, 2)


def _read_small(file: str) -> Any:
    """Return one image as [1, side, side, 3]."""
    try:
        image = open_image(file, size=_SIDE)
    except ImageError:
        return np.zeros((1, _SIDE, _SIDE, 3), np.uint8)
    return np.asarray(image.resize((_SIDE, _SIDE), reducing_gap=2.0))[None]


def correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return the largest correlation of two images, one of them whole, for each pair, [n]."""
    best = torch.full((len(left),), -1.0)
    for one, other in ((left, right), (right, left)):
        whole = torch.cat([_windows(other, _SIDE), _windows(other.flip(3), _SIDE)], 1)
        for side in _CROPS:
            best = torch.maximum(best, (_windows(one, side) @ whole.mT).amax((1, 2)))
    return best


def _windows(images: Tensor, side: int, size: int = _WINDOW) -> Tensor:
    """Return the standardized pixels of all crops of a side, resized, [n, crops, pixels]."""
    resize = partial(F.interpolate, size=(size, _SIDE), mode="bilinear", antialias=True)
    eye, starts = torch.eye(_SIDE)[None, None], range(0, _SIDE - side + 1, _STEP)
    resampling = torch.cat([resize(eye[:, :, start : start + side])[0] for start in starts])
    rows = torch.einsum("tih,nchw->ntciw", resampling, images.float())
    crops = torch.einsum("ntciw,ljw->ntlcij", rows, resampling)
    # The mean of each channel is subtracted: images do not match by the color of the sky.
    centered = (crops - crops.mean((4, 5), keepdim=True)).flatten(3).flatten(1, 2)
    length = centered.norm(dim=2, keepdim=True)
    return torch.where(length > size, centered / length, 0.0)  # a deviation of a gray level


def copy_findings(
    images: EmbeddedImages, copies: Copies, labels: LabelModel | None
) -> Iterator[Finding]:
    """Yield a finding for each image that is a copy of one to keep.

    Images of held-out splits are kept first, then those whose label is more probable. But a single
    held-out image of a series of images moves to the split of the others.
    """
    names, splits = [*images.catalog.labels], [*images.catalog.splits]
    wrong = np.zeros(len(splits)) if labels is None else labels.wrong
    partners: dict[int, dict[int, float]] = {}
    for (a, b), score in zip(copies.pairs.tolist(), copies.scores.tolist(), strict=True):
        partners.setdefault(a, {})[b] = score
        partners.setdefault(b, {})[a] = score
    for number, near in sorted(partners.items()):
        split = {splits[other] for other in near}
        same = all(names[other] == names[number] and near[other] < 1 for other in near)
        if len(near) > 1 and same and len(split) == 1 and splits[number] in _HELD_OUT:
            (target,) = split
            if target != splits[number]:
                reason = f"near-copy of {len(near)} images of the split {target}"
                rows = (number, *list(near)[:3])
                yield Finding("leakage", rows, reason, max(near.values()), "move", target)
                splits[number] = target
    kept = set[int]()
    for number in sorted(partners, key=lambda i: (splits[i] not in _HELD_OUT, wrong[i], i)):
        all_near = partners[number]
        near = {other: score for other, score in all_near.items() if other in kept}
        if not near:
            kept.add(number)
            continue
        # The copy that matters most: in another split, then of another class.
        twin = max(
            near,
            key=lambda i: (splits[i] != splits[number], names[i] != names[number], near[i]),
        )
        # Shown is the most similar one like it, even if that is dropped itself.
        alike = [i for i in all_near if (splits[i], names[i]) == (splits[twin], names[twin])]
        twin = max(alike, key=all_near.__getitem__)
        exact = all_near[twin] == 1
        reason = f"{'copy' if exact else 'near-copy'} of an image"
        kind = "exact duplicate" if exact else "near-duplicate"
        if names[twin] != names[number]:
            kind, reason = "label conflict", f"{reason} of the class {names[twin]}"
        if splits[twin] != splits[number]:
            kind, reason = "leakage", f"{reason} of the split {splits[twin]}"
        yield Finding(kind, (number, twin), reason, all_near[twin], "drop")
