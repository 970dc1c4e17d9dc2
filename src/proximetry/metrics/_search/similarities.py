"""Similarities as matrix products in full precision, and their total order.

Similarities are always "larger is nearer". Euclidean and Hamming distances become dot products of
slightly longer vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from proximetry._util.machine import by_device, override
from proximetry._util.tensors import chunks
from proximetry._util.types import Similarity

ROWS = 4096  # processed together, so temporaries stay small
_SAMPLE = 1024  # rows used to estimate the median


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


def project(queries: Tensor, gallery: Tensor, similarity: Similarity) -> tuple[Tensor, Tensor]:
    """Return queries and gallery items whose dot products are the similarities."""
    if similarity == "dot":
        return queries, gallery
    if similarity == "cosine":
        items = normalize(gallery)
        return items if queries is gallery else normalize(queries), items
    if similarity == "euclidean":
        # −|q − g|² = 2 q·g − |q|² − |g|²
        q2, g2 = (rows.square().sum(1, keepdim=True) for rows in (queries, gallery))
        return (
            torch.cat([2 * queries, q2, torch.ones_like(q2)], dim=1),
            torch.cat([gallery, -torch.ones_like(g2), -g2], dim=1),
        )
    # Signs s of b bits: −(number of different bits) = (s·s′ − b) / 2, exact in float32.
    bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=gallery.device)
    left, right = (
        (codes[:, :, None] >> bits & 1).flatten(1).to(torch.float32).mul_(2).sub_(1)
        for codes in (queries, gallery)
    )
    ones, half = torch.ones_like(left[:, :1]), torch.full_like(right[:, :1], right.shape[1] / 2)
    return torch.cat([left, ones], dim=1), torch.cat([right.mul_(0.5), -half], dim=1)


def fix_ties(
    values: Tensor, similarity: Similarity, duplicates: Mapping[int, tuple[Tensor, Tensor]]
) -> None:
    """Undo rounding: clamp cosines to ±1 and give duplicates the same similarity.

    ``duplicates`` has the ``SearchProblem.duplicates`` of each dimension.
    """
    if similarity == "cosine":
        values.clamp_(-1, 1)
    for dim, (later, first) in duplicates.items():
        if len(later):
            values.index_copy_(dim, later, values.index_select(dim, first))


def to_keys(similarities: Tensor, ids: Tensor) -> Tensor:
    """Return integers ordered by float32 similarity, ties by smaller index first."""
    bits = (similarities + 0.0).view(torch.int32)  # adding 0 makes −0 equal to 0
    # The bits of a negative float count backwards.
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(torch.int64) << 32) + (0x7FFFFFFF - ids)


def from_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the similarities and indices of `to_keys`."""
    bits = (keys >> 32).to(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0x7FFFFFFF - (keys & 0xFFFFFFFF)


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
        products.fp32_precision = "none"  # inherit torch.backends.fp32_precision
    if products.fp32_precision != precision:
        products.fp32_precision = precision
