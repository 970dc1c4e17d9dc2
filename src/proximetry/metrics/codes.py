"""Binary codes: one bit per dimension, compared by the number of bits that differ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from proximetry._util import tensors
from proximetry.metrics._search.inputs import Embeddings, as_embeddings

OVERSAMPLING = 20
"""Candidates by code per requested neighbor, re-scored with full vectors."""
FEWEST = 10
"""Smallest k used for the number of candidates."""


def binary_codes(embeddings: Embeddings) -> npt.NDArray[np.uint8]:
    """Return the packed binary codes of embeddings: the signs of their dimensions.

    A bit is 1 where the entry is positive and 0 where it is negative or zero. There is no other
    threshold and nothing is fitted: the code of a vector depends on that vector alone.

    Args:
        embeddings: [items, dimensions].

    Returns:
        uint8 [items, ⌈dimensions / 8⌉] as `numpy.packbits` packs them, for `similarity="hamming"`.
    """
    return tensors.binary_codes(as_embeddings(embeddings)).cpu().numpy()


def candidates(k: int) -> int:
    """Return the number of candidates by code for k neighbors."""
    return max(k, FEWEST) * OVERSAMPLING
