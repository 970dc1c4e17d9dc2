"""Validation, normalization and scaling of embeddings; codes of labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.errors import is_integer
from proximetry._util.formatting import join_first
from proximetry._util.machine import by_device, override
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Similarity

Embeddings = Tensor | npt.NDArray[Any]

# Names of other tools.
_ELSEWHERE = {"l2": "euclidean", "ip": "dot", "inner_product": "dot", "angular": "cosine"}

# Rows validated or normalized together, so temporaries stay small.
ROWS = 4096
# Rows used to estimate the median.
_SAMPLE = 1024


def as_count(value: Any, name: str, least: int = 1) -> int:
    """Return an integer of any type as an int; raise for others and those below ``least``."""
    if not is_integer(value, least):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def check_similarity(similarity: str, known: Any = Similarity) -> None:
    """Raise for an unknown similarity."""
    if similarity not in get_args(known):
        ours = _ELSEWHERE.get(str(similarity).lower())
        hint = f", called {ours!r} here" if ours else ""
        raise ValueError(
            f"unknown similarity {similarity!r}{hint}; choose one of {', '.join(get_args(known))}"
        )


def as_vectors(
    values: Embeddings | None, similarity: Similarity, name: str, *, allow_empty: bool = False
) -> Tensor:
    """Return validated embeddings, or packed codes for the Hamming distance."""
    check_similarity(similarity)
    if similarity == "hamming":
        codes = _as_matrix(values, name, allow_empty)
        if codes.dtype != torch.uint8:
            raise ValueError(
                f"{name} must be packed uint8 codes for the Hamming distance, got {codes.dtype}; "
                "pack bits with numpy.packbits(bits, axis=1)"
            )
        return codes
    vectors = as_embeddings(values, name, allow_empty=allow_empty)
    if similarity != "cosine" and len(vectors):
        limits = torch.finfo(vectors.dtype)
        longest = float(torch.stack(vectors.aminmax()).abs().max()) * math.sqrt(vectors.shape[1])
        if longest > math.sqrt(limits.max) / 2 or 0 < longest < math.sqrt(limits.tiny / limits.eps):
            raise ValueError(
                f"the vectors of {name} have lengths up to {longest:.3g}, whose squares overflow "
                f"or underflow {vectors.dtype}; rescale them"
            )
    return vectors


def as_embeddings(
    values: Embeddings | None, name: str = "embeddings", *, allow_empty: bool = False
) -> Tensor:
    """Return a finite matrix on its device: float64 stays, every other float becomes float32."""
    matrix = _as_matrix(values, name, allow_empty)
    if not matrix.is_floating_point():
        raise ValueError(
            f"{name} must be floating point, got {matrix.dtype}; convert it first, or use "
            'similarity="hamming" for packed uint8 codes'
        )
    if matrix.dtype != torch.float64:
        matrix = matrix.to(torch.float32)
    # A sum is finite only if every term is, and needs no temporary.
    if not bool(torch.isfinite(matrix.sum(dtype=torch.float64))):
        parts = [~torch.isfinite(matrix[rows]).all(1) for rows in chunks(len(matrix), ROWS)]
        bad = torch.cat(parts).nonzero()[:, 0].tolist()
        if bad:
            raise ValueError(
                f"{name} has NaN or infinite values in {len(bad)} of {len(matrix)} rows: "
                f"{join_first(map(str, bad))}; drop or recompute these rows"
            )
    return matrix


def _as_matrix(values: Embeddings | None, name: str, allow_empty: bool) -> Tensor:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
            raise ValueError(f"{name} must be float32 or float64, got {values.dtype}")
        # torch takes no negative strides, no foreign byte order, and warns at read-only arrays.
        native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
        matrix = torch.from_numpy(native if native.flags.writeable else native.copy())
    elif isinstance(values, Tensor):
        matrix = values.detach()
    else:
        raise ValueError(
            f"{name} must be a torch tensor or a NumPy array, got {type(values).__name__}"
        )
    if matrix.ndim != 2:
        raise ValueError(
            f"{name} must be a matrix (items × dimensions), got shape {tuple(matrix.shape)}"
        )
    if matrix.shape[1] == 0 or (matrix.shape[0] == 0 and not allow_empty):
        raise ValueError(f"{name} is empty: shape {tuple(matrix.shape)}")
    return matrix


def normalize(matrix: Tensor) -> Tensor:
    """Return rows of unit length, computed in float64; zero rows stay zero."""
    result = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    for rows in chunks(len(matrix), ROWS):
        wide = matrix[rows].to(torch.float64)
        # Scaling by the largest entry first keeps even float64 squares from vanishing.
        wide = wide / wide.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        result[rows] = wide / length.masked_fill(length == 0, 1.0)
    return result


def sampled_median(matrix: Tensor) -> Tensor:
    """Return the median of each column, over a sample of the rows.

    Unlike a mean it is robust, and integers stay exact when it is subtracted.
    """
    return matrix[:: max(1, len(matrix) // _SAMPLE)].median(0).values


def join_labels(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate labels, which are all integers or all strings."""
    filled = [array for array in arrays if len(array)] or arrays[:1]
    if len({array.dtype.kind for array in filled}) > 1:
        raise ValueError("some labels are integers and others are strings; use one kind for all")
    return np.concatenate(filled)


def encode(*arrays: npt.NDArray[Any]) -> tuple[list[IntArray], npt.NDArray[Any]]:
    """Return integer codes of each array and the distinct labels of all arrays by code."""
    classes, codes = np.unique(join_labels(arrays), return_inverse=True)
    ends = np.cumsum([len(array) for array in arrays])[:-1]
    return [part.astype(np.int64) for part in np.split(codes.reshape(-1), ends)], classes


def tiles(total: int, width: int, device: torch.device, entries: dict[str, int]) -> Iterator[slice]:
    """Yield slices of 0 … total such that a tile of this width has at most ``entries``."""
    return chunks(total, max(1, by_device(device, **entries) // max(1, width)))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products in full precision, regardless of autocast and TF32 settings."""
    # Tensors made in inference mode could not be written to by other threads.
    with (
        override(_PRODUCTS, _PLAIN, _get_precision, _set_precision),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


# From torch 2.9 on each backend has its own setting, and once one has been set, the global setting
# cannot be read.
_BACKENDS: Any = torch.backends
_BY_BACKEND = hasattr(_BACKENDS, "fp32_precision")
_PRODUCTS = (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul) if _BY_BACKEND else ("all",)
_PLAIN = "ieee" if _BY_BACKEND else "highest"


def _get_precision(products: Any) -> str:
    return str(products.fp32_precision if _BY_BACKEND else torch.get_float32_matmul_precision())


def _set_precision(products: Any, precision: str) -> None:
    if not _BY_BACKEND:
        torch.set_float32_matmul_precision(precision)
        return
    if precision != _PLAIN:
        products.fp32_precision = "none"  # as `torch.backends.fp32_precision` is
    if products.fp32_precision != precision:
        products.fp32_precision = precision
