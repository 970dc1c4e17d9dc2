"""Inter-class separability of a classifier's weights (seed 003, RegularFace)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximetry.metrics.arrays import Embeddings, as_embeddings, full_precision, normalise

# Proxies per side of a tile.
_SIDE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Separability:
    """Sep_i of every class, on the device of the proxies, and the mean over classes.

    Lower is better: −1/(C − 1) is the least the mean can be, for C classes spread as a simplex.
    """

    per_class: Tensor
    mean: float


def separability(proxies: Embeddings) -> Separability:
    """Sep_i = max over j ≠ i of cos(W_i, W_j): how near the nearest other class is.

    ``proxies`` is [C, D], or [C, K, D] with K proxies per class; then the maximum runs over all
    pairs of proxies of two different classes. The cosine with a row of zeros counts as 0.
    """
    shape = tuple(getattr(proxies, "shape", ()))
    if len(shape) not in (2, 3):
        raise ValueError(
            "proxies must be an array [classes, dimensions] or [classes, proxies per class, "
            f"dimensions], got {f'shape {shape}' if shape else type(proxies).__name__}"
        )
    classes, per_class = shape[0], shape[1] if len(shape) == 3 else 1
    if classes < 2 or per_class < 1:
        raise ValueError(
            "separability compares classes: it needs at least two of them with at least one "
            f"proxy each, got shape {shape}"
        )
    name = "proxies" if per_class == 1 else f"proxies (row = class · {per_class} + proxy)"
    rows = as_embeddings(proxies.reshape(classes * per_class, shape[-1]), name)
    with full_precision(rows.device):
        nearest = _nearest(normalise(rows), classes, per_class)
    return Separability(nearest, float(nearest.mean(dtype=torch.float64)))


def _nearest(rows: Tensor, classes: int, per_class: int) -> Tensor:
    """Largest cosine of each class with another; a tile serves its rows and its columns."""
    nearest = rows.new_full((classes,), -torch.inf)
    step = max(1, _SIDE.get(rows.device.type, _SIDE["cpu"]) // per_class)
    spans = [slice(at, min(at + step, classes)) for at in range(0, classes, step)]
    for place, left in enumerate(spans):
        ours = rows[left.start * per_class : left.stop * per_class]
        for right in spans[place:]:
            theirs = rows[right.start * per_class : right.stop * per_class]
            cosines = ours @ theirs.T
            if per_class > 1:
                cosines = cosines.reshape(len(ours), -1, per_class).amax(2)
                cosines = cosines.reshape(-1, per_class, cosines.shape[1]).amax(1)
            if left == right:
                cosines.fill_diagonal_(-torch.inf)
            else:
                nearest[right] = torch.maximum(nearest[right], cosines.amax(0))
            nearest[left] = torch.maximum(nearest[left], cosines.amax(1))
    return nearest.clamp_(-1, 1)
