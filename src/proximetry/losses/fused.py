"""The fused engine: the result of the dense engine by Triton kernels, in chunks of classes.

For each chunk one kernel multiplies batch and proxies and computes the gradients of the cosines,
and two kernels multiply these by the proxies and the batch. Forward of a class-wise loss computes
value and gradients in one pass over the classes. A sample-wise loss needs its log-sum-exp first:
forward computes it, and backward the gradients. Beyond the proxies and their gradient the engine
needs `CHUNK_BYTES` and a few arrays of the size of the batch. It never waits for the GPU, and its
results are deterministic.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

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
#: Padded dimensions are a multiple of this.
_DIMS = 64
#: The largest number of proxies per class.
MAX_K = 128


class Tile(NamedTuple):
    """How a kernel computes a product: the size of its tiles, and how Triton compiles it."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


#: The tiles of `entries` (with one proxy per class, with several), `proxy_gradients` and
#: `embedding_gradients`, by number of parts. Measured on an H200.
TILES = {
    1: (Tile(128, 128, 64), Tile(128, 64, 64), Tile(128, 128, 64), Tile(128, 128, 64)),
    2: (Tile(128, 128, 64), Tile(128, 64, 64), Tile(128, 64, 32), Tile(128, 64, 32)),
    3: (Tile(128, 128, 32), Tile(128, 64, 32), Tile(128, 64, 32), Tile(128, 64, 32)),
}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fused(problem: Problem) -> Parts:
    """Solve the same problem as `dense`, on CUDA in float32."""
    inputs = [problem.x, problem.proxies, problem.scale]
    if problem.proxies.dtype != torch.float32:
        raise ValueError(f"the fused engine needs float32 proxies, got {problem.proxies.dtype}")
    if problem.proxies.shape[1] > MAX_K:
        k = problem.proxies.shape[1]
        raise ValueError(f"the fused engine needs at most {MAX_K} proxies per class, got {k}")
    if not torch.is_grad_enabled():  # `needs_input_grad` ignores no_grad: detach
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    function = _ByClass if problem.form.by == "class" else _BySample
    with torch.cuda.device_of(problem.x):  # type: ignore[no-untyped-call]
        return Parts(*function.apply(_Fused(problem), *inputs))  # type: ignore[no-untyped-call]


@cache
def launcher(kernel: Any, **options: Any) -> Callable[..., None]:
    """Return a function that launches a kernel with these options: `launch(grid, *arguments)`.

    The first launch compiles the kernel; the others reuse it, which takes a fraction of Triton's
    own look-up. The kernel depends on device, type and alignment of arrays, and width of integers.
    """
    constants = [options[name] for name in kernel.arg_names if name in options]
    compiled: dict[tuple[Any, ...], Any] = {}

    def launch(grid: tuple[int, ...], *arguments: Any) -> None:
        key = arguments[0].device.index, *(
            (value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor)
            else isinstance(value, int) and value >= 2**31
            for value in arguments
        )  # fmt: skip
        known = compiled.get(key)
        if known is None:  # always in Triton's interpreter
            compiled[key] = kernel[grid](*arguments, **options)
        else:
            known[(*grid, 1, 1)[:3]](*arguments, *constants)

    return launch


def power_of_2(n: int, low: int = 1, high: int = 2**30) -> int:
    """Return the next power of two, within bounds."""
    power: int = triton.next_power_of_2(n)
    return max(low, min(high, power))


class _Fused:
    """A problem, the sizes of its tiles and chunks, and the launches of the kernels."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.labels = problem, problem.labels
        self.x, self.weight = problem.x.detach().contiguous(), problem.proxies.detach().contiguous()
        self.batch, self.dim = self.x.shape
        self.classes, self.k, _ = self.weight.shape
        precision = problem.precision
        self.parts = PARTS[
            torch.get_float32_matmul_precision() if precision == "auto" else precision
        ]
        self.kp = power_of_2(self.k)
        one, several, self.proxy_tile, self.embedding_tile = TILES[self.parts]
        entry_tile = one if self.k == 1 else several
        self.block = power_of_2(self.batch, 16, entry_tile.columns)
        self.blocks = triton.cdiv(self.batch, self.block)
        self.padded_batch = self.blocks * self.block
        self.padded_dim = triton.cdiv(self.dim, _DIMS) * _DIMS
        self.tile = entry_tile.rows // self.kp  # classes
        row_bytes = 2 * self.parts * (self.padded_batch + self.padded_dim)
        tiles = max(1, CHUNK_BYTES // (row_bytes * self.k * self.tile))
        # As many tiles as multiprocessors, or a multiple, occupy all of them to the end.
        wave = max(1, self.processors() // self.blocks)
        tiles = tiles // wave * wave if tiles > wave else tiles
        self.capacity = self.tile * min(tiles, triton.cdiv(self.classes, self.tile))
        has_scales = isinstance(problem.scale, Tensor)
        self.scale = 0.0 if isinstance(problem.scale, Tensor) else float(problem.scale)
        self.scales = problem.scale.detach() if isinstance(problem.scale, Tensor) else self.x
        self.sizes = {"K": self.k, "PB": self.padded_batch, "PD": self.padded_dim}
        self.form = {
            "K": self.k,
            "KP": self.kp,
            "AGGREGATION": kernels.AGGREGATIONS[problem.form.similarity],
            "PARTS": self.parts,
        }
        self.tiles = (
            self.form
            | self.sizes
            | {
                "SCALES": has_scales,
                "LIMIT": problem.ignore_above is not None,
                "BR": entry_tile.rows,
                "BB": self.block,
                "BD": entry_tile.depth,
                "num_warps": entry_tile.warps,
                "num_stages": entry_tile.stages,
            }
        )
        limit = 0.0 if problem.ignore_above is None else problem.ignore_above
        self.numbers = self.scale, float(problem.offset), float(limit), float(problem.gamma)
        bound = abs(problem.offset) + (torch.inf if has_scales else abs(self.scale))
        self.needs_peaks = bound >= SAFE_EXPONENT or problem.has_weights
        rows = self.capacity * self.k
        self.x_parts = self.new(
            self.parts, self.padded_batch, self.padded_dim, dtype=torch.bfloat16
        )
        self.w = self.new(self.parts, rows, self.padded_dim, dtype=torch.bfloat16)
        self.inverses = self.new(rows)
        self.needs_distance = problem.needs_distance and self.k > 1
        self.distances = self.new(self.classes) if self.needs_distance else self.x

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized array."""
        return self.x.new_empty(shape, dtype=dtype)

    def processors(self) -> int:
        """Return the number of multiprocessors."""
        if not self.x.is_cuda:  # Triton's interpreter
            return 4
        return torch.cuda.get_device_properties(self.x.device).multi_processor_count

    def positives(self) -> Tensor:
        """Return each sample's similarity to its class; set its cosines and derivatives, and x."""
        positive = self.new(self.batch)
        self.cosines, self.slopes = self.new(2, self.batch, self.k)
        launch = launcher(
            kernels.positives, **self.form, DIM=self.dim, PB=self.padded_batch, PD=self.padded_dim,
            BD=power_of_2(self.padded_dim, 16, max(64, 2048 // self.kp)),
        )  # fmt: skip
        launch(
            (self.padded_batch,), self.x, self.weight, self.labels, positive, self.cosines,
            self.slopes, self.x_parts, self.numbers[3], self.batch, self.classes,
        )  # fmt: skip
        return positive

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Normalize the proxies of each chunk; yield its first class and number of classes."""
        size = self.row_blocks()
        launch = launcher(
            kernels.prepare, K=self.k, KP=self.kp, DIM=self.dim, PD=self.padded_dim,
            PARTS=self.parts, DISTANCES=self.needs_distance, **size,
        )  # fmt: skip
        for first in range(0, self.classes, self.capacity):
            count = min(self.capacity, self.classes - first)
            launch(
                (triton.cdiv(count, size["BC"]),), self.weight, self.w, self.inverses,
                self.distances, first, count, self.capacity,
            )  # fmt: skip
            yield first, count

    def row_blocks(self) -> dict[str, int]:
        """Return how many classes and dimensions a program reads at once, about 4 096 numbers."""
        width = power_of_2(self.padded_dim, 16, max(16, 4096 // self.kp))
        return {"BC": max(1, min(8, 4096 // (self.kp * width))), "BD": width}

    @property
    def distance_pairs(self) -> int:
        """The number of ordered pairs of proxies of a class, over all classes."""
        return self.classes * max(1, self.k * (self.k - 1))

    def distance(self) -> Tensor | None:
        """Return the intra-class distance (see `dense.intra_class_distance`)."""
        if not self.problem.needs_distance:
            return None
        if not self.needs_distance:
            return self.x.new_zeros(())
        return self.distances.sum() / self.distance_pairs

    def log_sums(self) -> tuple[Tensor, Tensor | None]:
        """Return the log-sum-exp of each sample's negatives, and the sum of its similarities."""
        needs_total = self.problem.needs_total
        programs = min(self.capacity // self.tile, max(1, self.processors() // self.blocks))
        peaks = self.x.new_full((programs, self.padded_batch), torch.finfo(torch.float32).min)
        sums, totals = self.x.new_zeros(2, programs, self.padded_batch)
        depth = self.tiles["BD"] if self.parts == 1 else 32  # more would spill registers
        launch = launcher(kernels.log_sums, **self.tiles | {"BD": depth}, TOTAL=needs_total)
        for first, count in self.chunks():
            launch(
                (self.blocks, programs), self.x_parts, self.w, self.labels, self.scales, peaks,
                sums, totals, *self.numbers, first, count, self.batch, self.capacity,
            )  # fmt: skip
        lse = torch.logsumexp(sums.log().add_(peaks), 0)[: self.batch]
        return lse, totals.sum(0)[: self.batch] if needs_total else None

    def class_pass(
        self, weight: float | Tensor | None, gradients: "_Gradients | None" = None
    ) -> Tensor:
        """Return the terms of the classes [C], weighted if there is a weight; add the gradients."""
        terms = self.new(self.classes)
        sums, shifts = self.new(self.blocks, self.capacity), self.x
        factors = self.new(self.capacity * self.k)
        weights = weight if isinstance(weight, Tensor) else self.x
        number = weight if isinstance(weight, float) else 1.0
        find_peaks = self._entries(None, BY_CLASS=True, PEAKS=True)
        compute_entries = self._entries(gradients, BY_CLASS=True, SHIFTS=self.needs_peaks)
        width = power_of_2(self.padded_dim, 64, 1024)
        rows = 4096 // width
        finish = launcher(
            kernels.class_terms, K=self.k, PD=self.padded_dim, BLOCKS=self.blocks,
            PARTS=self.parts, SHIFTS=self.needs_peaks, WEIGHTS=isinstance(weight, Tensor),
            TERMS=weight is None, GRADIENT=gradients is not None, BR=rows, BD=width,
        )  # fmt: skip
        for first, count in self.chunks():
            if self.needs_peaks:
                find_peaks(first, count, sums)
                shifts = sums.amax(0).clamp_(min=0.0)
            compute_entries(first, count, sums, shifts)
            finish(
                (triton.cdiv(count * self.k, rows),), sums, shifts, weights, number, terms,
                factors, self.w, first, count, self.capacity,
            )  # fmt: skip
            if gradients is not None:
                gradients.add_chunk(first, count, factors)
        return terms

    def sample_pass(
        self, gradients: "_Gradients", lse: Tensor, slopes: Tensor, total_slopes: Tensor | None
    ) -> Tensor | None:
        """Add the gradients of x and proxies; return that of the scale, if there are scales."""
        has_scales, scale = self.tiles["SCALES"], None
        tiles = self.capacity // self.tile if has_scales else 0
        scale_slopes = self.new(tiles, self.padded_batch)
        compute_entries = self._entries(gradients, TOTAL=total_slopes is not None)
        totals = self.x if total_slopes is None else total_slopes
        for first, count in self.chunks():
            compute_entries(first, count, self.x, self.x, lse, slopes, totals, scale_slopes)
            if has_scales:
                part = scale_slopes[: triton.cdiv(count, self.tile), : self.batch].sum(0)
                scale = part if scale is None else scale + part
            gradients.add_chunk(first, count)
        return scale

    def _entries(self, gradients: "_Gradients | None", **flags: bool) -> Callable[..., None]:
        """Return a function that launches `kernels.entries` for a chunk."""
        x, log_weights = self.x, self.problem.log_weights
        g, radial = (x, x) if gradients is None else (gradients.g, gradients.radial)
        options = dict.fromkeys(("BY_CLASS", "SHIFTS", "PEAKS", "TOTAL"), False) | flags
        launch = launcher(
            kernels.entries, **self.tiles, **options, LOG_WEIGHTS=log_weights is not None,
            GRADIENT=gradients is not None,
        )  # fmt: skip

        def run(
            first: int, count: int, sums: Tensor, shifts: Tensor = x, lse: Tensor = x,
            slopes: Tensor = x, total_slopes: Tensor = x, scale_slopes: Tensor = x,
        ) -> None:  # fmt: skip
            launch(
                (self.blocks, triton.cdiv(count, self.tile)), self.x_parts, self.w, self.labels,
                x if log_weights is None else log_weights, self.scales, shifts, lse, slopes,
                total_slopes, g, sums, radial, scale_slopes, *self.numbers, first, count,
                self.batch, self.capacity,
            )  # fmt: skip

        return run


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
        self.factor: Tensor | None = None
        self._prepare_embeddings(fused.embedding_tile, needs[0])
        tile = fused.proxy_tile
        columns = largest_divisor(fused.padded_dim, tile.columns)
        self.proxy_rows, self.proxy_columns = tile.rows, fused.padded_dim // columns
        self.write_proxies = launcher(
            kernels.proxy_gradients, **fused.sizes, DIM=fused.dim, BLOCKS=fused.blocks,
            PARTS=fused.parts, FACTORS=fused.problem.form.by == "class", BM=tile.rows, BN=columns,
            BK=min(tile.depth, fused.block), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _prepare_embeddings(self, tile: Tile, needed: bool) -> None:
        fused = self.fused
        rows = largest_divisor(fused.padded_batch, tile.rows)
        columns = largest_divisor(fused.padded_dim, tile.columns)
        self.tiles = (fused.padded_batch // rows) * (fused.padded_dim // columns)
        self.splits = min(
            triton.cdiv(self.rows, tile.depth), max(1, fused.processors() // self.tiles)
        )
        shape = self.splits, fused.padded_batch, fused.padded_dim
        self.partial = fused.new(*shape) if needed else None
        self.add_x = launcher(
            kernels.embedding_gradients, **fused.sizes, PARTS=fused.parts, BM=rows, BN=columns,
            BK=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def set_other_terms(self, positive: Tensor, distance: Tensor | None) -> None:
        """Set the gradients of the positives and of the intra-class distance."""
        fused = self.fused
        self.grad_positive, self.grad_distance = positive.contiguous(), distance
        self.own = fused.weight, fused.labels  # the proxies of the samples
        if self.update is not None:  # before they change
            labels = fused.labels.clamp(0, fused.classes - 1)
            self.own = fused.weight[labels], torch.arange(fused.batch, device=labels.device)

    def add_chunk(self, first: int, count: int, factors: Tensor | None = None) -> None:
        """Add the gradients of a chunk, whose `g` and `radial` are complete."""
        fused, rows = self.fused, count * self.fused.k
        if self.partial is not None:
            self.add_x(
                (self.tiles, self.splits), self.g, fused.w, self.partial, first, rows,
                fused.capacity, self.splits,
            )  # fmt: skip
        if self.proxies is not None:
            start = first * fused.k if self.update is None else 0
            self.write_proxies(
                (self.proxy_columns, triton.cdiv(rows, self.proxy_rows)), self.g, fused.x_parts,
                fused.w, fused.inverses, fused.inverses if factors is None else factors,
                self.radial, self.proxies, rows, start, fused.capacity,
            )  # fmt: skip
        if self.update is not None and self.proxies is not None:
            self._add_other_terms(self.proxies[:count], first)
            self.update(slice(first, first + count), self.proxies[:count])

    def complete(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the complete gradients of embeddings and proxies."""
        x = None
        if self.partial is not None:
            x = self._complete_embeddings(self.partial)
        if self.update is not None:
            return x, None
        if self.proxies is not None:
            if self.factor is not None:
                n = self.proxies.numel()
                launch = launcher(kernels.multiply_unless_one, BLOCK=4096)
                launch((min(triton.cdiv(n, 4096), 1056),), self.proxies, self.factor, n)
            self._add_other_terms(self.proxies, 0)
        return x, self.proxies

    def _complete_embeddings(self, partial: Tensor) -> Tensor:
        fused, (weight, labels) = self.fused, self.own
        x = torch.empty_like(fused.x)
        launch = launcher(
            kernels.complete_embeddings, **fused.sizes, DIM=fused.dim,
            FACTOR=self.factor is not None, BD=power_of_2(fused.dim),
        )  # fmt: skip
        launch(
            (fused.batch,), partial, partial if self.factor is None else self.factor, weight,
            labels, fused.slopes, self.grad_positive, x, fused.batch, len(weight), self.splits,
        )  # fmt: skip
        return x

    def _add_other_terms(self, proxies: Tensor, first: int) -> None:
        fused = self.fused
        width = power_of_2(fused.dim, 16, 256)
        launch = launcher(
            kernels.add_positive_gradients, K=fused.k, KP=max(16, fused.kp), DIM=fused.dim, BB=16,
            BD=width,
        )  # fmt: skip
        launch(
            (fused.batch, triton.cdiv(fused.dim, width)), fused.x, fused.weight, fused.labels,
            fused.cosines, fused.slopes, self.grad_positive, proxies, first, fused.batch,
            len(proxies),
        )  # fmt: skip
        if fused.needs_distance and self.grad_distance is not None:
            size = fused.row_blocks()
            launch = launcher(
                kernels.add_pair_gradients, K=fused.k, KP=fused.kp, DIM=fused.dim, **size
            )
            launch(
                (triton.cdiv(len(proxies), size["BC"]),), fused.weight[first:], proxies,
                self.grad_distance, 1.0 / fused.distance_pairs, len(proxies),
            )  # fmt: skip


def largest_divisor(n: int, limit: int) -> int:
    """Return the largest power of two up to a limit that divides n."""
    return min(limit, n & -n)


class _ByClass(torch.autograd.Function):
    """Negative term of a class-wise loss, whose value and gradients need one pass."""

    @staticmethod
    def forward(ctx: Any, fused: _Fused, *inputs: Any) -> Any:
        weight, ctx.gradients, needs = fused.problem.class_weight, None, ctx.needs_input_grad[1:]
        # Terms without a weight, and updates, need the gradients of backward.
        if weight is not None and fused.problem.update is None and any(needs):
            ctx.gradients = _Gradients(fused, needs)
        positive = fused.positives()
        terms = fused.class_pass(weight, ctx.gradients)
        ctx.fused = fused
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        return positive, terms if weight is None else terms.sum(), None, fused.distance()

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
                gradients.factor = grad_value
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
        positive = fused.positives()
        lse, total = fused.log_sums()
        ctx.fused = fused
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), lse)
        return positive, lse, total, fused.distance()

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
