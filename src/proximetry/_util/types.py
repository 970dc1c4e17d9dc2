"""Types shared by several packages, and a type check; imports neither torch nor NumPy."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
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


def is_integer(value: Any, minimum: int = 1) -> bool:
    """Return whether a value is an integer of any type but bool, at least `minimum`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum
