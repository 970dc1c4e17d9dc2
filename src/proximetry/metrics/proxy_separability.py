"""Separability of classes by their proxies or classifier weights (Zhao et al. 2019)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from proximetry._util.tensors import nearest_other_class
from proximetry._util.types import IntArray
from proximetry.metrics._search.similarities import full_precision, normalize
from proximetry.metrics._search.validation import Embeddings, as_embeddings
from proximetry.metrics.scores import SEPARABILITY


@dataclass(frozen=True)
class Separability:
    """The separability Sep_i of every class, and its mean over classes.

    Lower is better; the minimum of the mean is −1/(C − 1), for C classes on a simplex.
    """

    per_class: npt.NDArray[np.floating[Any]]
    mean: float

    def scores(self) -> dict[str, float]:
        """Return the mean, and the mean and smallest angle to the nearest other class."""
        angles = torch.from_numpy(self.per_class).double().acos()
        values = self.mean, math.degrees(angles.mean()), math.degrees(angles.min())
        return dict(zip(SEPARABILITY, values, strict=True))


SAME_DIRECTION = 0.95
"""Proxies of a class with at least this cosine (within 18°) count as one."""


def distinct_proxies(proxies: Embeddings, cosine: float = SAME_DIRECTION) -> IntArray:
    """Return the number of distinct proxies of each class [C], of ``proxies`` [C, K, D].

    These are the connected components of the graph of pairs with a cosine of at least ``cosine``:
    1 if all proxies have collapsed, K if none have. A zero proxy is connected to no other.
    """
    shape = tuple(getattr(proxies, "shape", ()))
    if len(shape) != 3 or 0 in shape:
        raise ValueError(
            f"proxies must be an array [classes, proxies per class, dimensions], got shape {shape}"
        )
    rows = as_embeddings(proxies.reshape(-1, shape[-1]), "proxies")
    with full_precision(rows.device):
        units = normalize(rows).reshape(shape)
        joined = units @ units.mT >= cosine
    joined = joined | torch.eye(shape[1], dtype=torch.bool, device=joined.device)
    for _ in range(shape[1].bit_length()):  # each squaring doubles the path length
        joined = joined.float() @ joined.float() > 0
    return (~joined.tril(-1).any(2)).sum(1).cpu().numpy()  # count the first proxy of each component


def separability(proxies: Embeddings) -> Separability:
    """Compute Sep_i = max over j ≠ i of cos(W_i, W_j), the cosine with the nearest other class.

    ``proxies`` is [C, D], or [C, K, D] with K proxies per class; then the maximum is over all pairs
    of proxies of two different classes. The cosine with a zero proxy is 0.

    Examples:
        >>> import torch
        >>> from proximetry.metrics import separability
        >>> result = separability(torch.eye(3))
        >>> result.mean, result.scores()["smallest_angle"]
        (0.0, 90.0)
    """
    shape = tuple(getattr(proxies, "shape", ()))
    if len(shape) not in (2, 3) or shape[0] < 2 or 0 in shape:
        raise ValueError(
            "proxies must be an array [classes, dimensions] or [classes, proxies per class, "
            "dimensions] with at least two classes and at least one proxy of each, got "
            f"{f'shape {shape}' if shape else type(proxies).__name__}"
        )
    classes, per_class = shape[0], shape[1] if len(shape) == 3 else 1
    name = "proxies" if per_class == 1 else f"proxies (row = class · {per_class} + proxy)"
    rows = as_embeddings(proxies.reshape(classes * per_class, shape[-1]), name)
    with full_precision(rows.device):
        cosines, _ = nearest_other_class(normalize(rows), per_class)
    nearest = cosines.reshape(classes, per_class).amax(1).clamp_(-1, 1)
    return Separability(nearest.cpu().numpy(), float(nearest.mean(dtype=torch.float64)))
