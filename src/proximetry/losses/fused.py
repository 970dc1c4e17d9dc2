"""The fused engine: the dense engine's result, computed by Triton kernels in chunks of classes.

For each chunk one kernel multiplies batch and proxies and computes the gradients of the cosines,
and two kernels multiply these by the proxies and the batch. Forward of a class-wise loss computes
value and gradients in one pass over the classes. A sample-wise loss needs its log-sum-exp first:
forward computes it, and backward the gradients. Beyond the proxies and their gradient the engine
needs `CHUNK_BYTES` and a few arrays of the size of the batch. It never waits for the GPU, and its
results are deterministic.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_tensor

from proximetry.losses import fused_kernels as kernels
from proximetry.losses.dense import distance_terms
from proximetry.losses.form import MAX_FUSED_K, Parts, Problem
from proximetry.losses.streamed import dense_gradients, streamed

#: Memory of a chunk: its normalized proxies, and the gradients of its cosines.
CHUNK_BYTES = 48 * 2**20
#: bf16 parts per float32 number, by precision or torch's matmul setting.
PARTS = {"bf16": 1, "tf32": 2, "float32": 3} | {"medium": 1, "high": 2, "highest": 3}
#: Below this |logit| the maximum is not subtracted: the parts of proxies times a derivative, about
#: e^−|logit|, must not underflow.
_SAFE_EXPONENT = 40.0
#: Padded dimensions are a multiple of this.
_DIMS = 64


class Tile(NamedTuple):
    """Tile sizes of a product, and compile options of its kernel."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3

    def fit(self, parts: int, shared_memory: int) -> "Tile":
        """Return the tile with as many stages as fit into the shared memory of the GPU."""
        stage = 2 * parts * (self.rows + self.columns) * self.depth  # bytes
        return self._replace(stages=max(1, min(self.stages, shared_memory // stage)))


class Tiles(NamedTuple):
    """The tiles of all products."""

    log_sums: Tile
    entries: Tile
    proxies: Tile
    embeddings: Tile


#: Tiles for one proxy per class, by number of parts. Measured on an H200.
TILES = {
    1: Tiles(
        Tile(128, 128, 32, 8, 4),
        Tile(64, 128, 64, 4),
        Tile(128, 128, 64),
        Tile(128, 128, 64, 8, 4),
    ),
    2: Tiles(Tile(128, 128, 32), Tile(128, 128, 32), Tile(128, 128, 32), Tile(128, 128, 32, 8, 4)),
    3: Tiles(Tile(128, 128, 32), Tile(64, 64, 32, 4), Tile(64, 64, 32, 4), Tile(128, 64, 32)),
}

#: Tile of `log_sums` for logits that need registers: adjusted, or by entry with several parts.
SMALL_SUMS = Tile(64, 64, 32, 4)


def grouped_tile(kp: int, parts: int) -> Tile:
    """Return the tile of `entries` and `log_sums` for several proxies per class.

    With 4 warps and 64 classes, up to four proxies per class, a thread has all proxies of a class.
    """
    return Tile(64 * min(kp, 4), 64 if kp == 2 else 32, 64 if parts == 1 else 32, 4)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fused(problem: Problem) -> Parts:
    """Solve the same problem as `dense`, on CUDA in float32."""
    inputs = [problem.x, problem.proxies, problem.scale, problem.offset]
    if problem.proxies.dtype != torch.float32:
        raise ValueError(f"the fused engine needs float32 proxies, got {problem.proxies.dtype}")
    if problem.proxies.shape[1] > MAX_FUSED_K:
        k = problem.proxies.shape[1]
        raise ValueError(
            f"the fused engine needs at most {MAX_FUSED_K} proxies per class, got {k}. "
            "Use engine='auto'."
        )
    if problem.form.adjust not in kernels.ADJUSTMENTS:
        raise ValueError(
            f"the fused engine cannot adjust negatives by {problem.form.adjust}. Use engine='auto'."
        )
    is_learned = any(is_tensor(value) and value.requires_grad for value in inputs[2:])
    if problem.form.by == "class" and is_learned:
        return streamed(problem)  # the kernels do not compute the gradient of these scales
    if not torch.is_grad_enabled():  # `needs_input_grad` ignores no_grad: detach
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    function = _ByClass if problem.form.by == "class" else _BySample
    with torch.cuda.device_of(problem.x):  # type: ignore[no-untyped-call]
        return Parts(*function.apply(_Fused(problem), *inputs))  # type: ignore[no-untyped-call]


@cache
def launcher(kernel: Any, **options: Any) -> Callable[..., None]:
    """Return a function that launches a kernel with these options: `launch(grid, *arguments)`.

    The first launch on a device compiles the kernel. Later launches reuse it, which is faster than
    Triton's own lookup: types of arguments must not change between launches, and arrays must start
    at a multiple of 16 bytes (see `aligned`).
    """
    options = {name: value for name, value in options.items() if name in _names(kernel)}
    constants = [options[name] for name in kernel.arg_names if name in options]
    compiled: dict[int | None, Any] = {}

    def launch(grid: tuple[int, ...], *arguments: Any) -> None:
        device = arguments[0].device.index
        known = compiled.get(device)
        if known is None:  # always in Triton's interpreter
            compiled[device] = kernel[grid](*arguments, **options)
        else:
            known[(*grid, 1, 1)[:3]](*arguments, *constants)

    return launch


@cache
def _names(kernel: Any) -> frozenset[str]:
    return frozenset((*kernel.arg_names, "num_warps", "num_stages"))


def is_aligned(value: Tensor) -> bool:
    """Return whether an array is contiguous and starts at a multiple of 16 bytes."""
    return value.is_contiguous() and value.data_ptr() % 16 == 0


def aligned(value: Tensor) -> Tensor:
    """Return a contiguous array that starts at a multiple of 16 bytes."""
    return value if is_aligned(value) else value.clone(memory_format=torch.contiguous_format)


def torch_precision() -> str:
    """Return torch's setting for float32 products on CUDA."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch.backends, which this function cannot read
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def power_of_2(n: int, low: int = 1, high: int = 2**30) -> int:
    """Return the next power of two, within bounds."""
    return max(low, min(high, 1 << (n - 1).bit_length()))


@cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the shared memory of a block in bytes."""
    if device.type != "cuda":  # Triton's interpreter
        return 4, 2**18
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return properties.multi_processor_count, shared


def divide_evenly(n: int, limit: int) -> int:
    """Return the part size when n items are divided evenly into parts of at most ``limit``."""
    return -(-n // -(-n // limit))


def largest_divisor(n: int, limit: int) -> int:
    """Return the largest power of two up to a limit that divides n."""
    return min(limit, n & -n)


class _Plan:
    """Tile sizes, chunk sizes and kernels for problems of one shape."""

    def __init__(
        self, batch: int, shape: tuple[int, int, int], parts: int, similarity: str,
        flags: tuple[bool, bool], limits: tuple[int, int], chunk_bytes: int,
    ) -> None:  # fmt: skip
        self.batch, self.parts = batch, parts
        self.processors, shared_memory = limits
        self.classes, self.k, self.dim = shape
        self.kp = power_of_2(self.k)
        tiles = TILES[parts]
        if self.kp > 1:
            tile = grouped_tile(self.kp, parts)
            tiles = tiles._replace(log_sums=tile, entries=tile)
        tiles = Tiles(*(tile.fit(parts, shared_memory) for tile in tiles))
        self.sum_tile, self.entry_tile = tiles.log_sums, tiles.entries
        # The blocks of the batch are those of the widest tile.
        widest = max(self.entry_tile.columns, self.sum_tile.columns, tiles.embeddings.rows)
        self.padded_batch = power_of_2(batch, 16, widest)
        self.padded_batch *= -(-batch // self.padded_batch)
        self.padded_dim = -(-self.dim // _DIMS) * _DIMS
        self.block = min(self.entry_tile.columns, self.padded_batch)
        self.blocks = self.padded_batch // self.block
        self.tile = self.entry_tile.rows // self.kp  # classes
        row_bytes = 2 * parts * (self.padded_batch + self.padded_dim)
        unit = max(self.tile, tiles.proxies.rows // self.kp)  # classes
        count = max(1, chunk_bytes // (row_bytes * self.k * unit))
        # A multiple of the number of multiprocessors keeps all of them busy to the end.
        wave = max(1, self.processors // self.blocks)
        count = count // wave * wave if count > wave else count
        needed = -(-self.classes // unit)
        self.capacity = unit * (count if needed > 4 * count else divide_evenly(needed, count))
        self.rows = self.capacity * self.k
        self.constants = {
            "K": self.k, "KP": self.kp, "DIM": self.dim, "PB": self.padded_batch,
            "PD": self.padded_dim, "PARTS": parts, "BLOCKS": self.blocks,
            "AGGREGATION": kernels.AGGREGATIONS[similarity],
            "SCALES": flags[0], "IGNORE": flags[1],
        }  # fmt: skip
        self._launchers: dict[Any, Callable[..., None]] = {}
        self._set_product_tiles(tiles.proxies, tiles.embeddings)

    def _set_product_tiles(self, proxies: Tile, embeddings: Tile) -> None:
        columns = largest_divisor(self.padded_dim, proxies.columns)
        self.proxy_rows, self.proxy_columns = proxies.rows, self.padded_dim // columns
        self.proxy_options = {
            "BM": proxies.rows, "BN": columns, "BK": min(proxies.depth, self.padded_batch),
            "num_warps": proxies.warps, "num_stages": proxies.stages,
        }  # fmt: skip
        rows = largest_divisor(self.padded_batch, embeddings.rows)
        columns = largest_divisor(self.padded_dim, embeddings.columns)
        self.embedding_tiles = (self.padded_batch // rows) * (self.padded_dim // columns)
        self.splits = min(
            -(-self.rows // embeddings.depth), max(1, self.processors // self.embedding_tiles)
        )
        self.embedding_options = {
            "BM": rows, "BN": columns, "BK": embeddings.depth,
            "num_warps": embeddings.warps, "num_stages": embeddings.stages,
        }  # fmt: skip

    def entry_options(self, tile: Tile) -> dict[str, int]:
        """Return the options of `entries` or `log_sums`."""
        return {
            "BR": tile.rows, "BB": min(tile.columns, self.padded_batch), "BD": tile.depth,
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip

    def row_blocks(self) -> dict[str, int]:
        """Return the number of classes and dimensions per read, at most 4 096 numbers."""
        width = power_of_2(self.padded_dim, 16, max(16, 4096 // self.kp))
        count = max(1, min(8, 4096 // (self.kp * width)))
        if self.k > 1:  # sums over the dimensions are faster within a warp
            return {"BC": 1, "BD": width, "num_warps": 1 if self.kp * width <= 2048 else 4}
        return {"BC": count, "BD": width}

    def launcher(self, kernel: Any, key: Any, **options: Any) -> Callable[..., None]:
        """Return the launcher of a kernel for this shape; ``key`` identifies the options."""
        launch = self._launchers.get((kernel, key))
        if launch is None:
            launch = launcher(kernel, **self.constants | options)
            self._launchers[kernel, key] = launch
        return launch


_plan = lru_cache(maxsize=256)(_Plan)


class _Fused:
    """A problem, its arrays, and the launches of the kernels."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.labels = problem, aligned(problem.labels)
        self.x, self.weight = aligned(problem.x.detach()), aligned(problem.proxies.detach())
        precision: str = problem.precision
        if precision == "auto":
            precision = torch_precision()
        self.scales = None
        if is_tensor(problem.scale):
            self.scales = aligned(problem.scale.detach().expand(len(self.x)))
        self.offsets = problem.log_weights  # numbers to add to the logits of each sample
        if is_tensor(problem.offset):
            extra = 0.0 if self.offsets is None else self.offsets
            self.offsets = (problem.offset.detach() + extra).expand(len(self.x))
        if self.offsets is not None:
            self.offsets = aligned(self.offsets)
        self.limits = self.value = None
        if problem.form.adjust is not None:
            limit, value = problem.limit, problem.value
            limit = self.x.new_zeros(1) if limit is None else limit.detach().flatten()
            self.limits = aligned(limit.expand(len(self.x)))
            self.value = aligned(value) if is_tensor(value) else self.x.new_full((), value)
        self.is_by_entry = problem.form.by == "entry"
        self.class_weights = None
        if self.is_by_entry and is_tensor(problem.class_weight):
            self.class_weights = aligned(problem.class_weight)
        flags = self.scales is not None, problem.ignore_above is not None
        self.plan = plan = _plan(
            len(self.x), tuple(self.weight.shape), PARTS[precision], problem.form.similarity, flags,
            _limits(self.x.device), CHUNK_BYTES,
        )  # fmt: skip
        scale = 0.0 if is_tensor(problem.scale) else float(problem.scale)
        ignore_above = 0.0 if problem.ignore_above is None else float(problem.ignore_above)
        offset = 0.0 if is_tensor(problem.offset) else float(problem.offset)
        self.numbers = scale, offset, ignore_above, float(problem.gamma)
        bound = torch.inf if flags[0] or is_tensor(problem.offset) else abs(offset) + abs(scale)
        self.needs_peaks = bound >= _SAFE_EXPONENT or problem.has_weights
        self.needs_peaks |= problem.form.adjust is not None
        self.x_parts = self.new(plan.parts, plan.padded_batch, plan.padded_dim, torch.bfloat16)
        self.w = self.new(plan.parts, plan.rows, plan.padded_dim, torch.bfloat16)
        self.inverses = self.new(plan.rows)
        self.needs_distance = problem.needs_distance and plan.k > 1
        self.distances = self.new(plan.classes) if self.needs_distance else None

    def new(self, *shape: Any) -> Tensor:
        """Return an uninitialized array; a type may follow the shape."""
        if isinstance(shape[-1], torch.dtype):
            return self.x.new_empty(shape[:-1], dtype=shape[-1])
        return self.x.new_empty(shape)

    def positives(self) -> Tensor:
        """Return each sample's similarity to its class; set `cosines`, `slopes` and `x_parts`."""
        plan = self.plan
        positive = self.new(plan.batch)
        self.cosines, self.slopes = self.new(plan.batch, plan.k), self.new(plan.batch, plan.k)
        width = power_of_2(plan.padded_dim, 16, max(64, 2048 // plan.kp))
        launch = plan.launcher(kernels.positives, None, BD=width)
        launch(
            (plan.padded_batch,), self.x, self.weight, self.labels, positive, self.cosines,
            self.slopes, self.x_parts, self.numbers[3], plan.batch, plan.classes,
        )  # fmt: skip
        return positive

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Normalize the proxies of each chunk; yield its first class and number of classes."""
        plan, size = self.plan, self.plan.row_blocks()
        launch = plan.launcher(
            kernels.prepare, self.needs_distance, DISTANCES=self.needs_distance, **size
        )
        for first in range(0, plan.classes, plan.capacity):
            count = min(plan.capacity, plan.classes - first)
            launch(
                (-(-count // size["BC"]),), self.weight, self.w, self.inverses, self.distances,
                first, count, plan.capacity,
            )  # fmt: skip
            yield first, count

    def distance(self) -> Tensor | None:
        """Return the intra-class distance (see `dense.intra_class_distance`)."""
        if not self.problem.needs_distance:
            return None
        if self.distances is None:
            return self.x.new_zeros(())
        return self.distances.sum() / distance_terms(self.weight)

    def log_sums(self) -> tuple[Tensor, Tensor | None]:
        """Return the log-sum-exp of each sample's negatives, and the sum of its similarities.

        By entry, the sum of their log(1 + exp logit) instead of the log-sum-exp.
        """
        plan, needs_total = self.plan, self.problem.needs_total
        tile = plan.sum_tile
        adjusts = self.value is not None
        if plan.kp == 1 and (adjusts or (self.is_by_entry and plan.parts > 1)):
            tile = SMALL_SUMS
        options = plan.entry_options(tile)
        blocks, classes = plan.padded_batch // options["BB"], tile.rows // plan.kp
        programs = min(-(-plan.capacity // classes), max(1, plan.processors // blocks))
        peaks, sums = (self.new(programs, plan.padded_batch) for _ in range(2))
        totals = self.new(programs, plan.padded_batch) if needs_total else None
        flags = self._sample_flags()
        key = needs_total, *flags.values()
        launch = plan.launcher(kernels.log_sums, key, TOTAL=needs_total, **flags, **options)
        for first, count in self.chunks():
            launch(
                (blocks, programs), self.x_parts, self.w, self.labels, self.offsets, self.scales,
                self.class_weights, self.limits, self.value, peaks, sums, totals, *self.numbers,
                first, count, plan.batch, plan.capacity,
            )  # fmt: skip
        lse = self.new(plan.batch)
        total = self.new(plan.batch) if needs_total else None
        key = needs_total, self.is_by_entry
        finish = plan.launcher(
            kernels.finish_log_sums, key, TOTAL=needs_total, BY_ENTRY=self.is_by_entry, BB=64
        )
        finish((-(-plan.batch // 64),), peaks, sums, totals, lse, total, plan.batch, programs)
        return lse, total

    def class_pass(
        self, weight: float | Tensor | None, gradients: "_Gradients | None" = None
    ) -> Tensor:
        """Return the terms of the classes [C], weighted if there is a weight; add the gradients."""
        plan = self.plan
        terms, sums = self.new(plan.classes), self.new(plan.blocks, plan.capacity)
        factors = None if gradients is None else self.new(plan.rows)
        weights = aligned(weight.expand(plan.classes)) if is_tensor(weight) else None
        number = 1.0 if weight is None or weights is not None else float(weight)
        find_peaks = self._entries(None, by_class=True, peaks=True)
        compute_entries = self._entries(gradients, by_class=True)
        width = power_of_2(plan.padded_dim, 64, 1024)
        rows = 4096 // width
        key = self.needs_peaks, weights is None, weight is None, gradients is None
        finish = plan.launcher(
            kernels.class_terms, key, SHIFTS=self.needs_peaks, WEIGHTS=weights is not None,
            TERMS=weight is None, GRADIENT=gradients is not None, BR=rows, BD=width,
        )  # fmt: skip
        for first, count in self.chunks():
            shifts = None
            if self.needs_peaks:
                find_peaks(first, count, sums)
                shifts = sums.amax(0).clamp_(min=0.0)
            compute_entries(first, count, sums, shifts)
            finish(
                (-(-count * plan.k // rows),), sums, shifts, weights, number, terms, factors,
                self.w, first, count, plan.capacity,
            )  # fmt: skip
            if gradients is not None:
                gradients.add_chunk(first, count, factors)
        return terms

    def sample_pass(
        self, gradients: "_Gradients", lse: Tensor, slopes: Tensor, total_slopes: Tensor | None
    ) -> list[Tensor | None]:
        """Add the gradients of x and proxies; return those of scales and offsets, if any."""
        plan, tiles = self.plan, self.plan.capacity // self.plan.tile
        slopes_of = [
            None if values is None else self.new(tiles, plan.padded_batch)
            for values in (self.scales, self.offsets)
        ]
        sums: list[Tensor | None] = [None, None]
        compute_entries = self._entries(gradients, total=total_slopes is not None)
        for first, count in self.chunks():
            compute_entries(first, count, None, None, lse, slopes, total_slopes, *slopes_of)
            for i, part in enumerate(slopes_of):
                if part is not None:
                    total = part[: -(-count // plan.tile), : plan.batch].sum(0)
                    before = sums[i]
                    sums[i] = total if before is None else before + total
            gradients.add_chunk(first, count)
        return sums

    def _sample_flags(self) -> dict[str, Any]:
        """Return flags of `kernels.log_sums` and `kernels.entries`."""
        return {
            "BY_ENTRY": self.is_by_entry,
            "WEIGHTS": self.class_weights is not None,
            "OFFSETS": self.offsets is not None,
            "ADJUST": kernels.ADJUSTMENTS[self.problem.form.adjust],
        }

    def _entries(
        self, gradients: "_Gradients | None", by_class: bool = False, peaks: bool = False,
        total: bool = False,
    ) -> Callable[..., None]:  # fmt: skip
        """Return a function that launches `kernels.entries` for a chunk."""
        plan, flags = self.plan, self._sample_flags()
        g, radial = (None, None) if gradients is None else (gradients.g, gradients.radial)
        shifts = by_class and self.needs_peaks and not peaks
        key = by_class, shifts, peaks, total, g is None, *flags.values()
        launch = plan.launcher(
            kernels.entries, key, BY_CLASS=by_class, SHIFTS=shifts, PEAKS=peaks, TOTAL=total,
            GRADIENT=g is not None, **flags, **plan.entry_options(plan.entry_tile),
        )  # fmt: skip

        def run(
            first: int, count: int, sums: Tensor | None, shifts: Tensor | None = None,
            lse: Tensor | None = None, slopes: Tensor | None = None,
            total_slopes: Tensor | None = None, scale_slopes: Tensor | None = None,
            offset_slopes: Tensor | None = None,
        ) -> None:  # fmt: skip
            launch(
                (plan.blocks, -(-count // plan.tile)), self.x_parts, self.w, self.labels,
                self.offsets, self.scales, self.class_weights, self.limits, self.value, shifts,
                lse, slopes, total_slopes, g, sums, radial, scale_slopes, offset_slopes,
                *self.numbers, first, count, plan.batch, plan.capacity,
            )  # fmt: skip

        return run


class _Gradients:
    """The gradients of embeddings and proxies, summed over the chunks.

    With `Problem.update` the array of the proxies has one chunk, which is complete when it is
    passed to the update.
    """

    def __init__(self, fused: _Fused, needs: Sequence[bool]) -> None:
        self.fused, self.plan = fused, fused.plan
        plan = fused.plan
        self.update = fused.problem.update if needs[1] else None
        self.g = fused.new(plan.parts, plan.rows, plan.padded_batch, torch.bfloat16)
        self.radial = fused.new(plan.blocks, plan.rows)
        classes = plan.classes if self.update is None else plan.capacity
        self.proxies = fused.new(classes, plan.k, plan.dim) if needs[1] else None
        shape = plan.splits, plan.padded_batch, plan.padded_dim
        self.partial = fused.new(*shape) if needs[0] else None
        self.factor: Tensor | None = None

    def set_other_terms(self, positive: Tensor, distance: Tensor | None) -> None:
        """Set the gradients of the positives and of the intra-class distance."""
        fused = self.fused
        self.grad_positive, self.grad_distance = aligned(positive), distance
        self.own = fused.weight, fused.labels  # the proxies of the samples
        if self.update is not None:  # before they change
            labels = fused.labels.clamp(0, self.plan.classes - 1)
            self.own = fused.weight[labels], torch.arange(self.plan.batch, device=labels.device)

    def add_chunk(self, first: int, count: int, factors: Tensor | None = None) -> None:
        """Add the gradients of a chunk, whose `g` and `radial` are complete."""
        fused, plan, rows = self.fused, self.plan, count * self.plan.k
        if self.partial is not None:
            launch = plan.launcher(kernels.embedding_gradients, None, **plan.embedding_options)
            launch(
                (plan.embedding_tiles, plan.splits), self.g, fused.w, self.partial, first, rows,
                plan.capacity, plan.splits,
            )  # fmt: skip
        if self.proxies is not None:
            has_factors = factors is not None
            launch = plan.launcher(
                kernels.proxy_gradients, has_factors, FACTORS=has_factors, **plan.proxy_options
            )
            start = first * plan.k if self.update is None else 0
            launch(
                (plan.proxy_columns, -(-rows // plan.proxy_rows)), self.g, fused.x_parts, fused.w,
                fused.inverses, factors, self.radial, self.proxies, rows, start, plan.capacity,
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
                launch((min(-(-n // 4096), 1056),), self.proxies, self.factor, n)
            self._add_other_terms(self.proxies, 0)
        return x, self.proxies

    def _complete_embeddings(self, partial: Tensor) -> Tensor:
        fused, plan, (weight, labels) = self.fused, self.plan, self.own
        x = torch.empty_like(fused.x)
        has_factor = self.factor is not None
        launch = plan.launcher(
            kernels.complete_embeddings, has_factor, FACTOR=has_factor, BD=power_of_2(plan.dim)
        )
        launch(
            (plan.batch,), partial, self.factor, weight, labels, fused.slopes, self.grad_positive,
            x, plan.batch, len(weight), plan.splits,
        )  # fmt: skip
        return x

    def _add_other_terms(self, proxies: Tensor, first: int) -> None:
        fused, plan = self.fused, self.plan
        width = power_of_2(plan.dim, 16, 256)
        launch = plan.launcher(
            kernels.add_positive_gradients, None, BB=power_of_2(plan.batch, 16, 1024), BD=width
        )
        launch(
            (plan.batch, -(-plan.dim // width)), fused.x, fused.weight, fused.labels,
            fused.cosines, fused.slopes, self.grad_positive, proxies, first, plan.batch,
            len(proxies),
        )  # fmt: skip
        if fused.needs_distance and self.grad_distance is not None:
            size = plan.row_blocks()
            launch = plan.launcher(kernels.add_pair_gradients, None, **size)
            launch(
                (-(-len(proxies) // size["BC"]),), fused.weight, proxies, self.grad_distance,
                1.0 / distance_terms(fused.weight), first, len(proxies),
            )  # fmt: skip


class _ByClass(torch.autograd.Function):
    """Negative term of a class-wise loss: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, fused: _Fused, *inputs: Any) -> Any:
        weight, ctx.gradients, needs = fused.problem.class_weight, None, ctx.needs_input_grad[1:]
        # Unweighted terms and updates need the gradients of backward.
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
        grad_positive, grad_value, _, grad_distance = grads
        assert grad_positive is not None
        assert grad_value is not None
        # The gradients of forward are used once; a second backward recomputes them.
        gradients, ctx.gradients = ctx.gradients, None
        with torch.cuda.device_of(fused.x):  # type: ignore[no-untyped-call]
            is_first = gradients is not None
            gradients = gradients or _Gradients(fused, ctx.needs_input_grad[1:])
            gradients.set_other_terms(grad_positive, grad_distance)
            if is_first:
                gradients.factor = grad_value
            else:
                weight = fused.problem.class_weight
                fused.class_pass(grad_value if weight is None else grad_value * weight, gradients)
            return None, *gradients.complete(), None, None


class _BySample(torch.autograd.Function):
    """By sample or entry: one pass over the classes for the value, one for the gradients."""

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
        totals = None if grad_total is None else aligned(grad_total)
        with torch.cuda.device_of(fused.x):  # type: ignore[no-untyped-call]
            gradients = _Gradients(fused, ctx.needs_input_grad[1:])
            gradients.set_other_terms(grad_positive, grad_distance)
            others = fused.sample_pass(gradients, lse, aligned(grad_lse), totals)
            needs = ctx.needs_input_grad[3:]
            others = [v if needed else None for v, needed in zip(others, needs, strict=True)]
            return None, *gradients.complete(), *others
