"""Rows of a matrix that occur more than once, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from proximetry._common import chunks

# Rows looked at together, so temporaries stay small.
_ROWS = 1024
# Columns that are enough to tell most rows apart.
_FEW = 4


def find_copies(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are equal to an earlier one, rising, and the first row equal to each.

    Rows are compared by a 64-bit hash; those that agree in it are compared entry by entry.
    """
    rows = torch.arange(len(matrix), device=matrix.device)
    for columns in (slice(_FEW), slice(None)):
        runs = torch.unique(_hashes(matrix[:, columns], rows), return_inverse=True)[1]
        first = torch.full_like(rows, len(matrix)).scatter_reduce(0, runs, rows, "amin")[runs]
        # Only rows whose hash occurs again can be copies.
        shared = torch.bincount(runs)[runs] > 1
        rows, first = rows[shared], first[shared]
    rows, first = rows[rows != first], first[rows != first]
    same = [(matrix[rows[part]] == matrix[first[part]]).all(1) for part in chunks(len(rows), _ROWS)]
    if not same:
        return rows, first
    equal = torch.cat(same)
    return rows[equal], first[equal]


def _hashes(matrix: Tensor, rows: Tensor) -> Tensor:
    """A 64-bit number for each of the rows, equal where their bits are."""
    hashes = torch.empty_like(rows)
    for part in chunks(len(rows), _ROWS):
        bits = matrix[rows[part]]
        if bits.is_floating_point():
            bits = (bits + 0.0).view(torch.int32)  # adding 0 makes −0 equal to 0
        draw = torch.Generator().manual_seed(0)
        ends = -(2**63), 2**63 - 1
        factors = torch.randint(*ends, bits.shape[1:], generator=draw, device="cpu")
        hashes[part] = (bits.long() * factors.to(bits.device)).sum(1)
    return hashes


def connected_components(count: int, one: Tensor, two: Tensor) -> Tensor:
    """Give each of ``count`` nodes the smallest node that the edges one[i] – two[i] lead to."""
    found = torch.arange(count, device=one.device)
    while True:
        least = torch.minimum(found[one], found[two])
        joined = found.scatter_reduce(0, one, least, "amin").scatter_reduce(0, two, least, "amin")
        joined = joined[joined]
        if torch.equal(joined, found):
            return found
        found = joined
