"""Functions on tensors shared by several packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from proximetry._util.machine import by_device

# Shorter vectors have no direction: they count as zero and receive no gradient.
_MIN_LENGTH = 1e-12
# In float32, numbers of at least 2⁶⁴ have infinite squares, and numbers below 2⁻⁷⁵ have square 0.
# Vectors whose largest entry is outside these limits are multiplied by a power of two (exact).
_LARGE, _LARGE_FACTOR = 2.0**50, 2.0**-80
_SMALL, _SMALL_FACTOR = 2.0**-38, 2.0**70


def chunks(total: int, size: int) -> Iterator[slice]:
    """Yield slices of 0 … total of length `size`, the last one shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


# torch.compile calls this oneDNN function, too.
_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return left · rightᵀ; on a CPU with oneDNN if no gradient is recorded.

    `@` calls MKL, which uses half of the vector width of processors that are not from Intel.
    """
    is_float = left.device.type == "cpu" and left.dtype == torch.float32
    if _ONEDNN_LINEAR is None or not is_float or torch.is_grad_enabled():
        return left @ right.T
    product: Tensor = _ONEDNN_LINEAR(left, right, None, "none", [], "")
    return product


def contiguous_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU: safetensors rejects shared memory and channels-last."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@contextmanager
def common_random_numbers(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers within the context, for the same on all ranks; None does not."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def gather_rows(
    rows: Tensor, group: dist.ProcessGroup | None = None, counts: list[int] | None = None
) -> tuple[Tensor, list[int]]:
    """Concatenate [n, …] tensors of all ranks, in the order of ranks; n may differ.

    Return the result, on the device of `rows`, and the number of rows of each rank. No gradient.
    Passing these numbers as ``counts`` avoids waiting for the GPU.
    """
    device = rows.device
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    if counts is None:
        row_count = torch.tensor([rows.shape[0]], device=device)
        sizes = [torch.zeros_like(row_count) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, row_count, group=group)
        counts = [int(size) for size in sizes]
    # Collectives need equal shapes.
    padded = torch.zeros((max(counts), *rows.shape[1:]), dtype=rows.dtype, device=device)
    padded[: rows.shape[0]] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    gathered = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return gathered.to(rows.device), counts


def inverse_length(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / ‖v‖ over the last dimension, 0 for zero vectors; and ‖v‖ itself.

    Where ‖v‖ overflows, the inverse is NaN; 0 would mean a zero vector.
    """
    length = torch.linalg.vector_norm(vectors, dim=-1)
    nonzero = length > _MIN_LENGTH
    safe = torch.where(nonzero, length, torch.ones_like(length))
    inverse = torch.where(nonzero, safe.reciprocal(), torch.zeros_like(length))
    return inverse.masked_fill(torch.isinf(length), torch.nan), length


def rescale(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors scaled so that their squares are representable, and the factors [...]."""
    largest = torch.linalg.vector_norm(vectors.detach(), torch.inf, dim=-1)
    # Filled on the device: a copy from the CPU cannot be part of a CUDA graph.
    factor = torch.ones_like(largest).masked_fill(largest < _SMALL, _SMALL_FACTOR)
    factor = factor.masked_fill(largest > _LARGE, _LARGE_FACTOR)
    return vectors * factor.unsqueeze(-1), factor


def l2_normalize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors scaled to length one, and their lengths ([..., D] and [...]).

    A zero vector stays zero and its gradient is zero. Dividing by a small constant instead would
    send gradients of 1e6 and more into half-precision layers.
    """
    rescaled, factor = rescale(vectors)
    inverse, length = inverse_length(rescaled)
    return rescaled * inverse.unsqueeze(-1), length / factor


def binary_codes(vectors: Tensor) -> Tensor:
    """Return packed codes [N, ⌈D / 8⌉], uint8, of vectors [N, D]: one bit per dimension.

    A bit is 1 where the entry is positive. The layout is that of `numpy.packbits`.
    """
    bits = F.pad((vectors > 0).to(torch.uint8), (0, -vectors.shape[1] % 8))
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=vectors.device)
    bits = bits.reshape(len(bits), bits.shape[1] // 8, 8) << shifts
    return bits.sum(2, dtype=torch.uint8)


@torch.no_grad()
def nearest_other_class(
    directions: Tensor, per_class: int, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return for each row the cosine with the nearest row of another class, and its index.

    Rows have unit length and are ordered by class, `per_class` of each. Ties go to the smallest
    index. Works in tiles of `block` rows; off-diagonal tiles serve rows and columns.
    """
    total, device = len(directions), directions.device
    size = block or by_device(device, cpu=1024, cuda=8192)
    tiles = list(chunks(total, max(1, size // per_class) * per_class))  # whole classes
    best = directions.new_full((total,), -torch.inf)
    nearest = torch.zeros(total, dtype=torch.long, device=device)

    def improve(part: slice, others: slice, cosines: Tensor) -> None:
        value, index = cosines.max(1)
        better = value > best[part]
        best[part] = torch.where(better, value, best[part])
        nearest[part] = torch.where(better, index + others.start, nearest[part])

    for number, rows in enumerate(tiles):
        for columns in tiles[number:]:
            cosines = directions[rows] @ directions[columns].T
            if columns == rows:
                owner = torch.arange(len(cosines), device=device) // per_class
                cosines.masked_fill_(owner[:, None] == owner, -torch.inf)
            else:
                improve(columns, rows, cosines.T)
            improve(rows, columns, cosines)
    return best, nearest
