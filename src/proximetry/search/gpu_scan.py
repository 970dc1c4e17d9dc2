"""`GpuScan`: exact search in a copy of the vectors on a GPU.

The copy is in bfloat16, which halves the time to read it. A bound on its error shows which rows can
belong to a result: these are scored in float64 from the original vectors, so that results equal
those of `exact.Store`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.formatting import readable_size
from proximetry._util.tensors import chunks
from proximetry.metrics._search.similarities import full_precision
from proximetry.search.exact import FloatArray, Hits, Mask, Scores, Store

_SPARE = 64  # candidates beyond 2k, so that a second pass is rarely needed
_MAX_PRODUCTS = 1 << 28  # in memory at a time: 1 GB of float32
_QUERY_BATCH = 256
_UPLOAD_ROWS = 1 << 18
_GROUP = 128  # adjacent rows whose maximum is computed before the largest are selected
# `torch.mm(…, out_dtype=…)`
_HAS_WIDE_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


@dataclass(frozen=True)
class _Copy:
    """The vectors of a segment on the GPU."""

    vectors: Tensor  # bfloat16
    squares: Tensor | None  # the squared length of each, for Euclidean distances
    error: float  # the length of the largest rounding error of a vector

    @classmethod
    def upload(cls, vectors: FloatArray, similarity: str, device: torch.device) -> _Copy:
        copy = torch.empty(vectors.shape, dtype=torch.bfloat16, device=device)
        squares = torch.empty(len(vectors), device=device) if similarity == "euclidean" else None
        error = 0.0
        for rows in chunks(len(vectors), _UPLOAD_ROWS):
            block = torch.from_numpy(vectors[rows]).to(device)
            copy[rows] = block
            error = max(error, float((block - copy[rows]).norm(dim=1).max()))
            if squares is not None:
                squares[rows] = block.double().square().sum(1).float()
        return cls(copy, squares, error)

    def products(self, queries: Tensor, rows: slice) -> Tensor:
        """Return the products with bfloat16 queries, [queries, rows], in float32."""
        vectors = self.vectors[rows]
        if not vectors.is_cuda:
            products = queries.float() @ vectors.float().T
        elif not _HAS_WIDE_PRODUCTS:
            raise UsageError(f"search on a GPU needs torch 2.8 or newer, got {torch.__version__}")
        else:
            products = torch.mm(queries, vectors.T, out_dtype=torch.float32)
        return products if self.squares is None else products.mul_(2).sub_(self.squares[rows])


class GpuScan:
    """The vectors of a store on a GPU; ``names`` identify its segments."""

    def __init__(
        self,
        store: Store,
        names: list[str],
        device: torch.device | str,
        previous: GpuScan | None = None,
    ) -> None:
        self.store, self.device = store, torch.device(device)
        known = dict[str, _Copy]()
        if previous is not None and previous.device == self.device:
            known = previous._copies
        missing = sum(v.size for n, v in zip(names, store.vectors, strict=True) if n not in known)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            needed = 2 * missing + 8 * _MAX_PRODUCTS
            if needed > free:
                raise UsageError(
                    f"the gallery needs {readable_size(needed)} of GPU memory, and "
                    f"{readable_size(free)} are free. Search without a GPU."
                )
        self._copies: dict[str, _Copy] = {
            name: known.get(name) or _Copy.upload(vectors, store.similarity, self.device)
            for name, vectors in zip(names, store.vectors, strict=True)
        }

    def search(self, queries: FloatArray, k: int, allowed: Mask | None = None) -> Hits:
        """Return the k nearest of the allowed rows, exactly; None allows all."""
        if not len(queries) or not self._copies:
            return Hits(np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf))
        mask = None if allowed is None else torch.from_numpy(allowed).to(self.device)
        count = 2 * k + _SPARE
        with full_precision(self.device):
            blocks = chunks(len(queries), _QUERY_BATCH)
            hits = [self._search(queries[block], k, mask, count) for block in blocks]
        return Hits(*map(np.concatenate, zip(*hits, strict=True)))

    def _search(self, queries: FloatArray, k: int, mask: Tensor | None, count: int) -> Hits:
        exact = torch.from_numpy(queries).to(self.device)
        rounded = exact.bfloat16()
        values = torch.empty(len(queries), 0, device=self.device)
        positions = torch.empty(len(queries), 0, dtype=torch.int64, device=self.device)
        for copy, start in zip(self._copies.values(), self.store.starts.tolist(), strict=False):
            for rows in chunks(len(copy.vectors), max(1, _MAX_PRODUCTS // len(queries))):
                products = copy.products(rounded, rows)
                if mask is not None:
                    first, last = start + rows.start, start + rows.stop
                    products.masked_fill_(~mask[first:last], -torch.inf)
                new_values, columns = _largest(products, count)
                values, order = torch.cat([values, new_values], 1).topk(
                    min(count, values.shape[1] + new_values.shape[1])
                )
                new_positions = columns + (start + rows.start)
                positions = torch.cat([positions, new_positions], 1).gather(1, order)
        error = (exact - rounded.float()).norm(dim=1).double().cpu().numpy()
        products_64 = values.double().cpu().numpy()
        # A row of the result has at least this product; no other row exceeds the last candidate.
        limits = products_64[:, min(k, products_64.shape[1]) - 1] - 2 * self._bounds(queries, error)
        near = (products_64 >= limits[:, None]) & (products_64 > -np.inf)
        candidates = np.where(near, positions.cpu().numpy(), -1)
        hits = self.store.rescore(queries, candidates[:, : near.sum(1).max()], k)
        for query in np.flatnonzero(near[:, -1]) if count < self.store.starts[-1] else ():
            row = slice(query, query + 1)
            hits.positions[row], hits.scores[row] = self._search(queries[row], k, mask, 4 * count)
        return hits

    def _bounds(self, queries: FloatArray, error: Scores) -> Scores:
        """Return the largest error of a product of each query, which was rounded by ``error``."""
        rounding = max((copy.error for copy in self._copies.values()), default=0.0) * (1 + 1e-6)
        lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
        products = error * (1 + 1e-6) * (self.store.longest + rounding) + lengths * rounding
        factor = 1 if self.store.similarity == "cosine" else 2
        # Matrix units truncate their sums.
        return np.asarray(factor * products + 4 * self.store.bounds(queries))


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest entries of each row and their columns.

    Each is in one of the groups of adjacent columns with the largest maxima.
    """
    rows, width = values.shape
    groups = width // _GROUP
    if groups < 4 * count:
        top = values.topk(min(count, width), dim=1)
        return top.values, top.indices
    maxima = values[:, : groups * _GROUP].reshape(rows, groups, _GROUP).amax(2)
    best = maxima.topk(count, 1, sorted=False).indices
    inside = best[:, :, None] * _GROUP + torch.arange(_GROUP, device=values.device)
    rest = torch.arange(groups * _GROUP, width, device=values.device).expand(rows, -1)
    columns = torch.cat([inside.flatten(1), rest], 1)
    top = values.gather(1, columns).topk(count, dim=1)
    return top.values, columns.gather(1, top.indices)
