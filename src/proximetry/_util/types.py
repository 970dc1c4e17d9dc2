"""Types that several packages share; importing them loads neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

Similarity = Literal["cosine", "euclidean", "dot", "hamming"]
FloatSimilarity = Literal["cosine", "euclidean", "dot"]
EmbedderSimilarity = Literal["cosine", "euclidean"]

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]
else:  # for annotations only
    IntArray = FloatArray = Any
