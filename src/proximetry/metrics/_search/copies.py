"""Rows of a matrix that occur more than once, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from proximetry._util.tensors import chunks

# Rows processed together, so temporaries stay small.
_ROWS = 1024


def find_copies(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that are equal to an earlier one, rising, and the first row equal to each.

    Rows are compared by a 64-bit hash, and those of equal hash entry by entry.
    """
    parts = [_hash(matrix[part]) for part in chunks(len(matrix), _ROWS)]
    runs = torch.unique(torch.cat(parts), return_inverse=True)[1]
    rows = torch.arange(len(matrix), device=matrix.device)
    first = torch.full_like(rows, len(matrix)).scatter_reduce(0, runs, rows, "amin")[runs]
    later = (first != rows).nonzero()[:, 0]
    first = first[later]
    equal = torch.ones_like(later, dtype=torch.bool)
    for part in chunks(len(later), _ROWS):
        equal[part] = (matrix[later[part]] == matrix[first[part]]).all(1)
    return later[equal], first[equal]


def _hash(rows: Tensor) -> Tensor:
    """Return a 64-bit integer for each row."""
    if rows.is_floating_point():
        rows = (rows + 0.0).view(torch.int32)  # adding 0 makes −0 equal to 0
    draw = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, rows.shape[1:], generator=draw, device="cpu")
    return (rows.long() * factors.to(rows.device)).sum(1)


def connected_components(count: int, one: Tensor, two: Tensor) -> Tensor:
    """Return the smallest node connected to each of ``count`` nodes by edges one[i] – two[i]."""
    components = torch.arange(count, device=one.device)
    while True:
        least = torch.minimum(components[one], components[two])
        joined = components.scatter_reduce(0, one, least, "amin")
        joined = joined.scatter_reduce(0, two, least, "amin")
        joined = joined[joined]
        if torch.equal(joined, components):
            return components
        components = joined
