"""The fused engine: the result of the dense engine by Triton kernels, in chunks of classes.

For each chunk one kernel multiplies batch and proxies and computes the gradients of the cosines,
and two kernels multiply these by the proxies and the batch. Forward of a class-wise loss computes
value and gradients in one pass over the classes. A sample-wise loss needs its log-sum-exp first:
forward computes it, and backward the gradients. Beyond the proxies and their gradient the engine
needs `CHUNK_BYTES` and a few arrays of the size of the batch. It never waits for the GPU, and its
results are deterministic.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from proximetry.losses import fused_kernels as kernels
from proximetry.losses.form import Parts, Problem
from proximetry.losses.streamed import SAFE_EXPONENT, dense_gradients

#: Memory of a chunk: its normalized proxies, and the gradients of its cosines.
CHUNK_BYTES = 40 * 2**20
#: bf16 numbers for each float32 number, by precision or torch's setting for products.
PARTS = {"bf16": 1, "tf32": 2, "float32": 3} | {"medium": 1, "high": 2, "highest": 3}
#: Dimensions per step of a product.
_DIMS = 64
#: Rows of a tile, and the largest number of proxies per class.
_ROWS = 128


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fused(problem: Problem) -> Parts:
    """Solve the same problem as `dense`, on CUDA in float32."""
    inputs = [problem.x, problem.proxies, problem.scale]
    if problem.proxies.dtype != torch.float32:
        raise ValueError(f"the fused engine needs float32 proxies, got {problem.proxies.dtype}")
    if problem.proxies.shape[1] > _ROWS:
        k = problem.proxies.shape[1]
        raise ValueError(f"the fused engine needs at most {_ROWS} proxies per class, got {k}")
    if not torch.is_grad_enabled():  # `needs_input_grad` ignores no_grad: detach
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    function = _ByClass if problem.form.by == "class" else _BySample
    with torch.cuda.device_of(problem.x):  # type: ignore[no-untyped-call]
        return Parts(*function.apply(_Fused(problem), *inputs))  # type: ignore[no-untyped-call]


def repeated(kernel: Any, **options: Any) -> Callable[..., None]:
    """Return a function that launches a kernel with equal options and types of arguments.

    The first launch compiles or looks up the kernel; the others, of other chunks, reuse it, which
    takes a fraction of the time.
    """
    constants = [options[name] for name in kernel.arg_names if name in options]
    compiled = None

    def launch(grid: tuple[int, ...], *arguments: Any) -> None:
        nonlocal compiled
        if compiled is None:  # always in Triton's interpreter
            compiled = kernel[grid](*arguments, **options)
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants)

    return launch


class _Fused:
    """A problem, the sizes of its tiles and chunks, and the launches of the kernels."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.labels = problem, problem.labels
        self.x, self.weight = problem.x.contiguous(), problem.proxies.contiguous()
        self.batch, self.dim = self.x.shape
        self.classes, self.k, _ = self.weight.shape
        precision = problem.precision
        self.parts = PARTS[
            torch.get_float32_matmul_precision() if precision == "auto" else precision
        ]
        self.kp = triton.next_power_of_2(self.k)
        # Larger tiles do not fit into the registers.
        self.block = min(triton.next_power_of_2(max(self.batch, 16)), 128 if self.k == 1 else 64)
        self.blocks = triton.cdiv(self.batch, self.block)
        self.padded_batch = self.blocks * self.block
        self.padded_dim = triton.cdiv(self.dim, _DIMS) * _DIMS
        self.tile = _ROWS // self.kp  # classes
        row_bytes = 2 * self.parts * (self.padded_batch + self.padded_dim)
        tiles = max(1, CHUNK_BYTES // (row_bytes * self.k * self.tile))
        self.capacity = self.tile * min(tiles, triton.cdiv(self.classes, self.tile))
        has_scales = isinstance(problem.scale, Tensor)
        self.scale = 0.0 if isinstance(problem.scale, Tensor) else problem.scale
        self.scales = problem.scale.detach() if isinstance(problem.scale, Tensor) else self.x
        self.form = {
            "K": self.k,
            "KP": self.kp,
            "AGGREGATION": kernels.AGGREGATIONS[problem.form.similarity],
            "PARTS": self.parts,
        }
        self.tiles = self.form | {
            "SCALES": has_scales,
            "LIMIT": problem.ignore_above is not None,
            "BR": _ROWS,
            "BB": self.block,
            "BD": _DIMS // 2 if self.parts == 3 else _DIMS,
            "num_warps": 8,
            "num_stages": 3,
        }
        limit = 0.0 if problem.ignore_above is None else problem.ignore_above
        self.numbers = self.scale, problem.offset, limit, problem.gamma
        bound = abs(problem.offset) + (torch.inf if has_scales else abs(self.scale))
        self.needs_peaks = bound >= SAFE_EXPONENT or problem.has_weights
        self._compute_positives()
        rows = self.capacity * self.k
        self.w = self.new(self.parts, rows, self.padded_dim, dtype=torch.bfloat16)
        self.strides = self.x_parts.stride(0), self.w.stride(0)
        self.inverses = self.new(rows)
        self.needs_distance = problem.needs_distance and self.k > 1
        self.distances = self.x.new_zeros(self.classes if self.needs_distance else 1)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized array."""
        return self.x.new_empty(shape, dtype=dtype)

    def processors(self) -> int:
        """Return the number of multiprocessors."""
        if not self.x.is_cuda:  # Triton's interpreter
            return 4
        return torch.cuda.get_device_properties(self.x.device).multi_processor_count

    def _compute_positives(self) -> None:
        self.positive = self.new(self.batch)
        self.cosines, self.slopes = self.new(2, self.batch, self.k)
        shape = self.parts, self.padded_batch, self.padded_dim
        self.x_parts = self.new(*shape, dtype=torch.bfloat16)
        kernels.positives[self.padded_batch,](
            self.x, self.weight, self.labels, self.positive, self.cosines, self.slopes,
            self.x_parts, self.problem.gamma, self.batch, self.classes, self.dim, self.padded_dim,
            self.x_parts.stride(0), **self.form, BD=_DIMS,
        )  # fmt: skip

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Normalize the proxies of each chunk; yield its first class and number of classes."""
        size = {"BC": 8, "BD": 128} if self.k == 1 else {"BC": 1, "BD": max(16, 1024 // self.kp)}
        prepare = repeated(
            kernels.prepare, K=self.k, KP=self.kp, PARTS=self.parts,
            DISTANCES=self.needs_distance, **size,
        )  # fmt: skip
        for first in range(0, self.classes, self.capacity):
            count = min(self.capacity, self.classes - first)
            prepare(
                (triton.cdiv(count, size["BC"]),), self.weight, self.w, self.inverses,
                self.distances, first, count, self.dim, self.padded_dim, self.w.stride(0),
            )  # fmt: skip
            yield first, count

    @property
    def distance_pairs(self) -> int:
        """The number of ordered pairs of proxies of a class, over all classes."""
        return self.classes * max(1, self.k * (self.k - 1))

    def distance(self) -> Tensor | None:
        """Return the intra-class distance (see `dense.intra_class_distance`)."""
        if not self.problem.needs_distance:
            return None
        return self.distances.sum() / self.distance_pairs

    def log_sums(self) -> tuple[Tensor, Tensor | None]:
        """Return the log-sum-exp of each sample's negatives, and the sum of its similarities."""
        needs_total = self.problem.needs_total
        programs = min(self.capacity // self.tile, max(1, self.processors() // self.blocks))
        peaks = self.x.new_full((programs, self.padded_batch), torch.finfo(torch.float32).min)
        sums, totals = self.x.new_zeros(2, programs, self.padded_batch)
        add = repeated(kernels.log_sums, **self.tiles, TOTAL=needs_total)
        for first, count in self.chunks():
            add(
                (self.blocks, programs), self.x_parts, self.w, self.labels, self.scales, peaks,
                sums, totals, *self.numbers, first, count, self.batch, self.padded_batch,
                self.padded_dim, *self.strides,
            )  # fmt: skip
        lse = torch.logsumexp(sums.log().add_(peaks), 0)[: self.batch]
        return lse, totals.sum(0)[: self.batch] if needs_total else None

    def class_pass(
        self, weight: float | Tensor | None, gradients: "_Gradients | None" = None
    ) -> Tensor:
        """Return the terms of the classes [C], weighted if there is a weight; add the gradients."""
        needs_gradient = gradients is not None
        terms = self.new(self.classes)
        sums, shifts = self.new(self.blocks, self.capacity), self.x
        factors = self.new(self.capacity * self.k)
        weights = weight if isinstance(weight, Tensor) else self.x
        number = weight if isinstance(weight, float) else 1.0
        find_peaks = self._entries(None, BY_CLASS=True, PEAKS=True)
        compute_entries = self._entries(gradients, BY_CLASS=True, SHIFTS=self.needs_peaks)
        finish = repeated(
            kernels.class_terms, K=self.k, PARTS=self.parts, SHIFTS=self.needs_peaks,
            WEIGHTS=isinstance(weight, Tensor), TERMS=weight is None, GRADIENT=needs_gradient,
            BR=16, BD=_DIMS,
        )  # fmt: skip
        for first, count in self.chunks():
            if self.needs_peaks:
                find_peaks(first, count, sums)
                shifts = sums.amax(0).clamp_(min=0.0)
            compute_entries(first, count, sums, shifts)
            finish(
                (triton.cdiv(count * self.k, 16),), sums, shifts, weights, number, terms, factors,
                self.w, first, count, self.blocks, self.padded_dim, self.w.stride(0),
                self.capacity,
            )  # fmt: skip
            if gradients is not None:
                gradients.add_chunk(first, count, factors)
        return terms

    def sample_pass(
        self, gradients: "_Gradients", lse: Tensor, slopes: Tensor, total_slopes: Tensor | None
    ) -> Tensor | None:
        """Add the gradients of x and proxies; return that of the scale, if there are scales."""
        tiles = self.capacity // self.tile
        scale_slopes, scale = self.new(tiles, self.padded_batch), None
        compute_entries = self._entries(gradients, TOTAL=total_slopes is not None)
        totals = self.x if total_slopes is None else total_slopes
        for first, count in self.chunks():
            compute_entries(first, count, self.x, self.x, lse, slopes, totals, scale_slopes)
            if self.tiles["SCALES"]:
                part = scale_slopes[: triton.cdiv(count, self.tile), : self.batch].sum(0)
                scale = part if scale is None else scale + part
            gradients.add_chunk(first, count)
        return scale

    def _entries(self, gradients: "_Gradients | None", **flags: bool) -> Callable[..., None]:
        """Return a function that launches `kernels.entries` for a chunk."""
        x, log_weights = self.x, self.problem.log_weights
        g, radial = (x, x) if gradients is None else (gradients.g, gradients.radial)
        options = dict.fromkeys(("BY_CLASS", "SHIFTS", "PEAKS", "TOTAL"), False) | flags
        launch = repeated(
            kernels.entries, **self.tiles, **options, LOG_WEIGHTS=log_weights is not None,
            GRADIENT=gradients is not None,
        )  # fmt: skip

        def run(
            first: int, count: int, sums: Tensor, shifts: Tensor = x, lse: Tensor = x,
            slopes: Tensor = x, total_slopes: Tensor = x, scale_slopes: Tensor = x,
        ) -> None:  # fmt: skip
            launch(
                (triton.cdiv(count, self.tile), self.blocks), self.x_parts, self.w, self.labels,
                x if log_weights is None else log_weights, self.scales, shifts, lse, slopes,
                total_slopes, g, sums, radial, scale_slopes, *self.numbers, first, count,
                self.batch, self.padded_batch, self.padded_dim, *self.strides, g.stride(0),
                self.capacity,
            )  # fmt: skip

        return run

    def add_positive_gradients(
        self, grad: Tensor, x: Tensor | None, proxies: Tensor | None, first: int = 0
    ) -> None:
        """Add the gradients of the similarities to each sample's class, for classes from first."""
        size = max(16, min(256, triton.next_power_of_2(self.dim)))
        weight = self.weight[first:]
        kernels.add_positive_gradients[self.batch, triton.cdiv(self.dim, size)](
            self.x, weight, self.labels - first, self.cosines, self.slopes, grad,
            self.x if x is None else x, weight if proxies is None else proxies,
            self.batch, len(weight if proxies is None else proxies), self.dim, K=self.k,
            KP=max(16, self.kp), X=x is not None, W=proxies is not None, BB=16, BD=size,
        )  # fmt: skip

    def add_distance_gradients(self, slope: Tensor, proxies: Tensor, first: int = 0) -> None:
        """Add the gradient of the intra-class distance to that of the proxies from first on."""
        kernels.add_pair_gradients[len(proxies),](
            self.weight[first:], proxies, slope, 1.0 / self.distance_pairs, len(proxies),
            self.dim, K=self.k, KP=self.kp, BC=1, BD=max(16, 1024 // self.kp),
        )  # fmt: skip


class _Gradients:
    """The gradients of embeddings and proxies, summed over the chunks.

    With `Problem.update` the array of the proxies has one chunk, which is complete when it is
    passed to the update.
    """

    def __init__(self, fused: _Fused, needs: Sequence[bool]) -> None:
        self.fused, self.rows = fused, fused.capacity * fused.k
        self.update = fused.problem.update if needs[1] else None
        self.g = fused.new(fused.parts, self.rows, fused.padded_batch, dtype=torch.bfloat16)
        self.radial = fused.new(fused.blocks, self.rows)
        classes = fused.classes if self.update is None else fused.capacity
        self.proxies = fused.new(classes, fused.k, fused.dim) if needs[1] else None
        columns = 128 if fused.parts == 1 and fused.padded_dim % 128 == 0 else 64
        self.grid = fused.padded_batch // fused.block, fused.padded_dim // columns
        self.splits = min(
            triton.cdiv(self.rows, 64), max(1, fused.processors() // (self.grid[0] * self.grid[1]))
        )
        shape = self.splits, fused.padded_batch, fused.padded_dim
        self.partial = fused.x.new_zeros(shape) if needs[0] else None
        self.pull = torch.zeros_like(fused.x) if needs[0] else None
        step = 64 if fused.parts == 1 else 32
        options = {"PARTS": fused.parts, "BN": columns, "num_warps": 8, "num_stages": 3}
        self.add_x = repeated(kernels.embedding_gradients, BM=fused.block, BK=step, **options)
        self.write_proxies = repeated(
            kernels.proxy_gradients, BM=_ROWS, BK=min(step, fused.block), **options,
            FACTORS=fused.problem.form.by == "class",
        )  # fmt: skip

    def set_other_terms(self, grad_positive: Tensor, grad_distance: Tensor | None) -> None:
        """Set the gradients of the positives and of the intra-class distance."""
        self.grad_positive, self.grad_distance = grad_positive.contiguous(), grad_distance
        if self.pull is not None:  # before the proxies change
            self.fused.add_positive_gradients(self.grad_positive, self.pull, None)

    def add_chunk(self, first: int, count: int, factors: Tensor | None = None) -> None:
        """Add the gradients of a chunk, whose `g` and `radial` are complete."""
        fused, rows = self.fused, count * self.fused.k
        if self.partial is not None:
            self.add_x(
                (*self.grid, self.splits), self.g, fused.w, self.partial, rows,
                fused.padded_batch, fused.padded_dim, self.g.stride(0), fused.w.stride(0),
            )  # fmt: skip
        if self.proxies is not None:
            start = first * fused.k if self.update is None else 0
            self.write_proxies(
                (triton.cdiv(rows, _ROWS), self.grid[1]), self.g, fused.x_parts, fused.w,
                fused.inverses, fused.inverses if factors is None else factors, self.radial,
                self.proxies, rows, start, fused.padded_batch, fused.dim, fused.padded_dim,
                self.g.stride(0), *fused.strides, self.rows, fused.blocks,
            )  # fmt: skip
        if self.update is not None and self.proxies is not None:
            self._add_other_terms(self.proxies[:count], first)
            self.update(slice(first, first + count), self.proxies[:count])

    def complete(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the complete gradients of embeddings and proxies."""
        x = None
        if self.partial is not None and self.pull is not None:
            total = self.partial.sum(0)[: self.fused.batch, : self.fused.dim]
            x = total + self.pull
        if self.update is not None:
            return x, None
        if self.proxies is not None:
            self._add_other_terms(self.proxies, 0)
        return x, self.proxies

    def multiply(self, factor: Tensor) -> None:
        """Multiply the gradients by a number on the device."""
        if self.partial is not None:
            self.partial.mul_(factor)
        if self.proxies is not None:
            n = self.proxies.numel()
            grid = (min(triton.cdiv(n, 4096), 1056),)
            kernels.multiply_unless_one[grid](self.proxies, factor, n, BLOCK=4096)

    def _add_other_terms(self, proxies: Tensor, first: int) -> None:
        self.fused.add_positive_gradients(self.grad_positive, None, proxies, first)
        if self.fused.needs_distance and self.grad_distance is not None:
            self.fused.add_distance_gradients(self.grad_distance, proxies, first)


class _ByClass(torch.autograd.Function):
    """Negative term of a class-wise loss, whose value and gradients need one pass."""

    @staticmethod
    def forward(ctx: Any, fused: _Fused, *inputs: Any) -> Any:
        weight, ctx.gradients, needs = fused.problem.class_weight, None, ctx.needs_input_grad[1:]
        # Terms without a weight, and updates, need the gradients of backward.
        if weight is not None and fused.problem.update is None and any(needs):
            ctx.gradients = _Gradients(fused, needs)
        terms = fused.class_pass(weight, ctx.gradients)
        ctx.fused = fused
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        return fused.positive, terms if weight is None else terms.sum(), None, fused.distance()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        fused: _Fused = ctx.fused
        if torch.is_grad_enabled():  # create_graph=True
            return dense_gradients(ctx, fused.problem, *grads)
        _ = ctx.saved_tensors  # raises if an input has changed
        grad_positive, grad_value, _none, grad_distance = grads
        assert grad_positive is not None
        assert grad_value is not None
        # The gradients of forward are used once; a second backward recomputes them.
        gradients, ctx.gradients = ctx.gradients, None
        with torch.cuda.device_of(fused.x):  # type: ignore[no-untyped-call]
            if gradients is not None:
                gradients.multiply(grad_value)
                gradients.set_other_terms(grad_positive, grad_distance)
            else:
                gradients = _Gradients(fused, ctx.needs_input_grad[1:])
                gradients.set_other_terms(grad_positive, grad_distance)
                factor, weight = grad_value, fused.problem.class_weight
                if weight is not None:
                    factor = (grad_value * weight).expand(fused.classes)
                fused.class_pass(factor.contiguous(), gradients)
            return None, *gradients.complete(), None


class _BySample(torch.autograd.Function):
    """Log-sum-exp over the other classes of a sample: one pass for it, one for the gradients."""

    @staticmethod
    def forward(ctx: Any, fused: _Fused, *inputs: Any) -> Any:
        lse, total = fused.log_sums()
        ctx.fused = fused
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), lse)
        return fused.positive, lse, total, fused.distance()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        fused: _Fused = ctx.fused
        if torch.is_grad_enabled():  # create_graph=True
            return dense_gradients(ctx, fused.problem, *grads)
        *_, lse = ctx.saved_tensors
        grad_positive, grad_lse, grad_total, grad_distance = grads
        assert grad_positive is not None
        assert grad_lse is not None
        totals = None if grad_total is None else grad_total.contiguous()
        with torch.cuda.device_of(fused.x):  # type: ignore[no-untyped-call]
            gradients = _Gradients(fused, ctx.needs_input_grad[1:])
            gradients.set_other_terms(grad_positive, grad_distance)
            scale = fused.sample_pass(gradients, lse, grad_lse.contiguous(), totals)
            x, proxies = gradients.complete()
            return None, x, proxies, scale if ctx.needs_input_grad[3] else None
