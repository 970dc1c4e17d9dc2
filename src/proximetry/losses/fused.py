"""The fused engine: the result of the dense engine by Triton kernels, in chunks of classes.

For each chunk one kernel multiplies batch and proxies and computes the gradients of the cosines, and
two kernels multiply these by the proxies and the batch. Forward of a class-wise loss computes value
and gradients in one pass over the classes. A sample-wise loss needs its log-sum-exp first: forward
computes it, and backward the gradients. Beyond the proxies and their gradient the engine needs
`CHUNK_BYTES` and a few arrays of the size of the batch. It never waits for the GPU, and its results
are deterministic.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from proximetry.losses import fused_kernels as kernels
from proximetry.losses.form import Parts, Problem
from proximetry.losses.streamed import SAFE_EXPONENT, dense_gradients

#: Memory of a chunk: its normalized proxies, and the gradients of its cosines.
CHUNK_BYTES = 40 * 2**20
#: bf16 numbers for each float32 number.
PARTS = {"bf16": 1, "tf32": 2, "float32": 3}
#: Dimensions per step of a product.
_DIMS = 64


def fused(problem: Problem) -> Parts:
    """Solve the same problem as `dense`, on CUDA in float32."""
    inputs = [problem.x, problem.proxies, problem.scale]
    if not torch.is_grad_enabled():  # `needs_input_grad` ignores no_grad: detach
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    function = _ByClass if problem.form.by == "class" else _BySample
    with torch.cuda.device_of(problem.x):
        return Parts(*function.apply(_Fused(problem), *inputs))  # type: ignore[no-untyped-call]


class _Fused:
    """A problem, the sizes of its tiles and chunks, and the launches of the kernels."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.labels = problem, problem.labels
        self.x, self.weight = problem.x.contiguous(), problem.proxies.contiguous()
        self.batch, self.dim = self.x.shape
        self.classes, self.k, _ = self.weight.shape
        parts = PARTS[problem.precision]
        kp = triton.next_power_of_2(self.k)
        self.block = min(triton.next_power_of_2(max(self.batch, 16)), 256 if kp == parts == 1 else 128)
        self.blocks = triton.cdiv(self.batch, self.block)
        self.padded_batch = self.blocks * self.block
        self.padded_dim = triton.cdiv(self.dim, _DIMS) * _DIMS
        self.tile_rows = max(128, kp)
        self.tile = self.tile_rows // kp  # classes
        row_bytes = 2 * parts * (self.padded_batch + self.padded_dim)
        tiles = max(1, CHUNK_BYTES // (row_bytes * self.k * self.tile))
        self.capacity = self.tile * min(tiles, triton.cdiv(self.classes, self.tile))
        self.scale = 0.0 if isinstance(problem.scale, Tensor) else problem.scale
        self.scales = problem.scale.detach() if isinstance(problem.scale, Tensor) else self.x
        self.form = {
            "K": self.k,
            "KP": kp,
            "AGGREGATION": kernels.AGGREGATIONS[problem.form.similarity],
            "PARTS": parts,
        }
        self.tiles = self.form | {
            "SCALES": isinstance(problem.scale, Tensor),
            "LIMIT": problem.ignore_above is not None,
            "BR": self.tile_rows,
            "BB": self.block,
            "BD": _DIMS // 2 if parts == 3 else _DIMS,
            "num_warps": 8 if self.block >= 128 else 4,
        }
        limit = 0.0 if problem.ignore_above is None else problem.ignore_above
        self.numbers = self.scale, problem.offset, limit, problem.gamma
        self._compute_positives(parts)
        rows = self.capacity * self.k
        self.w = self.new(parts, rows, self.padded_dim, dtype=torch.bfloat16)
        self.strides = self.x_parts.stride(0), self.w.stride(0)
        self.inverses = self.new(rows)
        self.distances = self.new(self.classes if problem.needs_distance else 0)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.x.new_empty(shape, dtype=dtype)

    def _compute_positives(self, parts: int) -> None:
        self.positive = self.new(self.batch)
        self.cosines, self.slopes = self.new(2, self.batch, self.k)
        shape = parts, self.padded_batch, self.padded_dim
        self.x_parts = self.new(*shape, dtype=torch.bfloat16)
        kernels.positives[self.padded_batch,](
            self.x, self.weight, self.labels, self.positive, self.cosines, self.slopes,
            self.x_parts, self.problem.gamma, self.batch, self.classes, self.dim, self.padded_dim,
            self.x_parts.stride(0), **self.form, BD=_DIMS,
        )  # fmt: skip

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Normalize the proxies of each chunk; yield its first class and number of classes."""
        kp, needs_distance = self.form["KP"], self.problem.needs_distance
        size = {"BC": 8, "BD": 128} if self.k == 1 else {"BC": 1, "BD": max(16, 1024 // kp)}
        for first in range(0, self.classes, self.capacity):
            count = min(self.capacity, self.classes - first)
            kernels.prepare[triton.cdiv(count, size["BC"]),](
                self.weight, self.w, self.inverses, self.distances, first, count, self.dim,
                self.padded_dim, self.w.stride(0), K=self.k, KP=kp, PARTS=self.form["PARTS"],
                DISTANCES=needs_distance, **size,
            )  # fmt: skip
            yield first, count

    def distance(self) -> Tensor | None:
        """Return the intra-class distance (see `dense.intra_class_distance`)."""
        if not self.problem.needs_distance:
            return None
        return self.distances.sum() / self.distance_pairs

    @property
    def distance_pairs(self) -> int:
        return self.classes * max(1, self.k * (self.k - 1))

    def log_sums(self) -> tuple[Tensor, Tensor | None]:
        """Return the log-sum-exp of each sample's negatives, and the sum of its similarities."""
        tiles = self.capacity // self.tile
        programs = min(tiles, max(1, self._processors() // self.blocks))
        peaks = self.x.new_full((programs, self.padded_batch), torch.finfo(torch.float32).min)
        sums, totals = self.x.new_zeros(2, programs, self.padded_batch)
        for first, count in self.chunks():
            kernels.log_sums[self.blocks, programs](
                self.x_parts, self.w, self.labels, self.scales, peaks, sums, totals, *self.numbers,
                first, count, self.batch, self.padded_batch, self.padded_dim, *self.strides,
                **self.tiles, TOTAL=self.problem.needs_total, num_stages=3,
            )  # fmt: skip
        lse = torch.logsumexp(sums.log().add_(peaks), 0)[: self.batch]
        return lse, totals.sum(0)[: self.batch] if self.problem.needs_total else None

    def class_pass(
        self, needs: Sequence[bool], weight: float | Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the terms of the classes [C] and the gradients of x and proxies.

        With a weight the terms are weighted, without they have no gradients.
        """
        is_weighted, needs_gradient = weight is not None, any(needs[:2])
        terms = self.new(self.classes)
        gradients = _Gradients(self, needs) if needs_gradient else None
        problem = self.problem
        bound = abs(problem.offset) + (torch.inf if self.tiles["SCALES"] else abs(self.scale))
        needs_peaks = bound >= SAFE_EXPONENT or problem.has_weights
        sums, shifts = self.new(self.blocks, self.capacity), self.x
        factors = self.new(self.capacity * self.k)
        weights = weight if isinstance(weight, Tensor) else self.x
        number = weight if isinstance(weight, float) else 1.0
        for first, count in self.chunks():
            if needs_peaks:
                self._entries(first, count, sums, None, BY_CLASS=True, PEAKS=True)
                shifts = sums.amax(0).clamp_(min=0.0)
            self._entries(first, count, sums, gradients, shifts, BY_CLASS=True, SHIFTS=needs_peaks)
            kernels.class_terms[triton.cdiv(count * self.k, 16),](
                sums, shifts, weights, number, terms, factors, self.w, first, count, self.blocks,
                self.padded_dim, self.w.stride(0), self.capacity, K=self.k,
                PARTS=self.form["PARTS"], SHIFTS=needs_peaks, WEIGHTS=isinstance(weight, Tensor),
                TERMS=not is_weighted, GRADIENT=needs_gradient, BR=16, BD=_DIMS,
            )  # fmt: skip
            if gradients is not None:
                gradients.add_chunk(first, count, factors)
        if gradients is None:
            return terms, None, None
        return terms, gradients.x(), gradients.proxies

    def sample_pass(
        self, needs: Sequence[bool], lse: Tensor, slopes: Tensor, total_slopes: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, proxies and scale."""
        gradients = _Gradients(self, needs)
        tiles = self.capacity // self.tile
        scale_slopes, scale = self.new(tiles, self.padded_batch), None
        for first, count in self.chunks():
            self._entries(
                first, count, self.x, gradients, self.x, lse, slopes, total_slopes, scale_slopes
            )
            if needs[2]:
                part = scale_slopes[: triton.cdiv(count, self.tile), : self.batch].sum(0)
                scale = part if scale is None else scale + part
            gradients.add_chunk(first, count, None)
        return gradients.x(), gradients.proxies, scale

    def _entries(
        self,
        first: int,
        count: int,
        sums: Tensor,
        gradients: "_Gradients | None",
        shifts: Tensor | None = None,
        lse: Tensor | None = None,
        slopes: Tensor | None = None,
        total_slopes: Tensor | None = None,
        scale_slopes: Tensor | None = None,
        **flags: bool,
    ) -> None:
        x, log_weights = self.x, self.problem.log_weights
        arrays = [x if array is None else array for array in (shifts, lse, slopes, total_slopes)]
        g, radial = (x, x) if gradients is None else (gradients.g, gradients.radial)
        options = {"BY_CLASS": False, "SHIFTS": False, "PEAKS": False} | flags
        kernels.entries[triton.cdiv(count, self.tile), self.blocks](
            self.x_parts, self.w, self.labels, x if log_weights is None else log_weights,
            self.scales, *arrays, g, sums, radial, x if scale_slopes is None else scale_slopes,
            *self.numbers, first, count, self.batch, self.padded_batch, self.padded_dim,
            *self.strides, 0 if gradients is None else g.stride(0), self.capacity, **self.tiles,
            **options, LOG_WEIGHTS=log_weights is not None, TOTAL=total_slopes is not None,
            GRADIENT=gradients is not None, num_stages=3,
        )  # fmt: skip

    def _processors(self) -> int:
        if not self.x.is_cuda:  # Triton's interpreter
            return 4
        return torch.cuda.get_device_properties(self.x.device).multi_processor_count

    def add_positive_gradients(
        self, grad: Tensor, x: Tensor | None, proxies: Tensor | None
    ) -> None:
        """Add the gradients of the similarities to each sample's class."""
        size = min(256, triton.next_power_of_2(self.dim))
        kernels.add_positive_gradients[self.batch, triton.cdiv(self.dim, size)](
            self.x, self.weight, self.labels, self.cosines, self.slopes, grad.contiguous(),
            self.x if x is None else x, self.weight if proxies is None else proxies,
            self.batch, self.classes, self.dim, K=self.k, KP=max(16, self.form["KP"]),
            X=x is not None, W=proxies is not None, BB=16, BD=max(16, size),
        )  # fmt: skip

    def add_distance_gradients(self, slope: Tensor, proxies: Tensor) -> None:
        """Add the gradient of the intra-class distance."""
        kp = self.form["KP"]
        kernels.add_pair_gradients[self.classes,](
            self.weight, proxies, slope, 1.0 / self.distance_pairs, self.classes, self.dim,
            K=self.k, KP=kp, BC=1, BD=max(16, 1024 // kp),
        )  # fmt: skip


class _Gradients:
    """The gradients of embeddings and proxies, summed over the chunks."""

    def __init__(self, fused: _Fused, needs: Sequence[bool]) -> None:
        self.fused = fused
        parts, rows = fused.form["PARTS"], fused.capacity * fused.k
        self.g = fused.new(parts, rows, fused.padded_batch, dtype=torch.bfloat16)
        self.radial = fused.new(fused.blocks, rows)
        self.proxies = torch.empty_like(fused.weight) if needs[1] else None
        self.batch_rows = min(128, fused.block)
        self.columns = max(n for n in (64, 128, 256 if parts == 1 else 64) if fused.padded_dim % n == 0)
        grid = fused.padded_batch // self.batch_rows, fused.padded_dim // self.columns
        splits = min(triton.cdiv(rows, 64), max(1, fused._processors() // (grid[0] * grid[1])))
        self.grid = *grid, splits
        shape = splits, fused.padded_batch, fused.padded_dim
        self.partial = fused.new(*shape) if needs[0] else None

    def add_chunk(self, first: int, count: int, factors: Tensor | None) -> None:
        """Add the gradients of a chunk, whose `g` and `radial` are complete."""
        fused, parts, rows = self.fused, self.fused.form["PARTS"], count * self.fused.k
        sizes = {"num_warps": 8, "num_stages": 3, "PARTS": parts, "BN": self.columns}
        step = 64 if parts == 1 else 32
        if self.partial is not None:
            kernels.embedding_gradients[self.grid](
                self.g, fused.w, self.partial, rows, fused.padded_batch, fused.padded_dim,
                self.g.stride(0), fused.w.stride(0), FIRST=first == 0, BM=self.batch_rows,
                BK=step, **sizes,
            )  # fmt: skip
        if self.proxies is not None:
            kernels.proxy_gradients[triton.cdiv(rows, 128), self.grid[1]](
                self.g, fused.x_parts, fused.w, fused.inverses,
                fused.inverses if factors is None else factors, self.radial, self.proxies, rows,
                first * fused.k, fused.padded_batch, fused.dim, fused.padded_dim, self.g.stride(0),
                *fused.strides, fused.capacity * fused.k, fused.blocks,
                FACTORS=factors is not None, BM=128, BK=min(step, fused.block), **sizes,
            )  # fmt: skip

    def x(self) -> Tensor | None:
        """Return the gradient of the embeddings [B, D]."""
        if self.partial is None:
            return None
        return self.partial.sum(0)[: self.fused.batch, : self.fused.dim].contiguous()


class _ByClass(torch.autograd.Function):
    """Negative term of a class-wise loss, whose value and gradients need one pass."""

    @staticmethod
    def forward(ctx: Any, fused: _Fused, *inputs: Any) -> Parts:
        weight = fused.problem.class_weight
        needs = [False] * 3 if weight is None else ctx.needs_input_grad[1:]
        terms, *ctx.gradients = fused.class_pass(needs, weight)
        ctx.fused, ctx.is_first = fused, True
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        value = terms if weight is None else terms.sum()
        return Parts(fused.positive, value, None, fused.distance())

    @staticmethod
    def backward(ctx: Any, grad_positive: Tensor, grad_value: Tensor, _none: None, grad_distance: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return dense_gradients(ctx, ctx.fused.problem, grad_positive, grad_value, None, grad_distance)
        _ = ctx.saved_tensors  # raises if an input has changed
        fused, needs = ctx.fused, ctx.needs_input_grad[1:]
        weight = fused.problem.class_weight
        # The gradients of forward are used once; a second backward recomputes them.
        (x, proxies), ctx.gradients = ctx.gradients, (None, None)
        if weight is None or not ctx.is_first:
            _, x, proxies = fused.class_pass(needs, grad_value if weight is None else weight)
        ctx.is_first = False
        if weight is not None:
            x = x if x is None else x.mul_(grad_value)
            if proxies is not None:
                n = proxies.numel()
                grid = (min(triton.cdiv(n, 4096), 1056),)
                kernels.multiply_unless_one[grid](proxies, grad_value, n, BLOCK=4096)
        return _finish(fused, x, proxies, None, grad_positive, grad_distance)


class _BySample(torch.autograd.Function):
    """Log-sum-exp over the other classes of a sample: one pass for it, one for the gradients."""

    @staticmethod
    def forward(ctx: Any, fused: _Fused, *inputs: Any) -> Parts:
        lse, total = fused.log_sums()
        ctx.fused = fused
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), lse)
        return Parts(fused.positive, lse, total, fused.distance())

    @staticmethod
    def backward(ctx: Any, grad_positive: Tensor, grad_lse: Tensor, grad_total: Tensor | None, grad_distance: Tensor | None) -> Any:
        fused = ctx.fused
        if torch.is_grad_enabled():  # create_graph=True
            return dense_gradients(ctx, fused.problem, grad_positive, grad_lse, grad_total, grad_distance)
        *_, lse = ctx.saved_tensors
        needs, slopes = ctx.needs_input_grad[1:], grad_lse.contiguous()
        total_slopes = None if grad_total is None else grad_total.contiguous()
        gradients = fused.sample_pass(needs, lse, slopes, total_slopes)
        return _finish(fused, *gradients, grad_positive, grad_distance)


def _finish(
    fused: _Fused,
    x: Tensor | None,
    proxies: Tensor | None,
    scale: Tensor | None,
    grad_positive: Tensor,
    grad_distance: Tensor | None,
) -> Any:
    """Add the gradients of the positives and the intra-class distance; return all gradients."""
    with torch.cuda.device_of(fused.x):
        fused.add_positive_gradients(grad_positive, x, proxies)
        if grad_distance is not None and proxies is not None:
            fused.add_distance_gradients(grad_distance, proxies)
    return None, x, proxies, scale
