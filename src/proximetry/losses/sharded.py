"""Proxies split by class over the ranks of a process group.

Every rank gathers the whole batch and solves the engine's `Problem` for its own classes. One or two
all-reduces combine the parts of all ranks. The remaining computation has the size of the batch and
is repeated on every rank. Backward sums the gradient of the embeddings over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from proximetry._util.tensors import common_random_numbers, gather_rows
from proximetry.losses.dense import own_similarity, pull_by_class
from proximetry.losses.form import Parts, Problem
from proximetry.losses.proxies import Init, Proxies, draw

if TYPE_CHECKING:
    from proximetry.losses.base import Labels, ProxyLoss, Weights
    from proximetry.losses.batch import Batch, Engine

    Loss = TypeVar("Loss", bound=ProxyLoss)

#: Number of classes drawn from one generator.
BLOCK = 4096


def shard(loss: Loss, group: dist.ProcessGroup | None = None) -> Loss:
    """Split the proxies of a loss by class over the ranks of a group; return the loss.

    Call it on all ranks with the same loss. Then each rank calls the loss with its own batch, which
    may have any size or be empty; all ranks with weights or all without. Value and gradients equal
    those of the unsharded loss for the batches of all ranks together:

    - Every rank gets the same value. ``reduction="none"`` returns the terms of the rank's samples
      or classes; the gradients are those of the sum over the ranks.
    - Gradients of the embeddings are multiplied by the number of ranks, because
      DistributedDataParallel averages the gradients of the network.
    - Gradients of the proxies and of other parameters are complete: do not sum them over the ranks.
    - `ProxyLoss.similarities` returns the similarities to the rank's classes.

    Build a loss of very many classes on the meta device, and move it to its device afterwards: each
    rank draws only its own proxies, which do not depend on the number of ranks.

    Examples:
        >>> import torch
        >>> from proximetry.losses import ArcFace, shard
        >>> with torch.device("meta"):
        ...     loss = ArcFace(num_classes=1000, dim=16)
        >>> loss = shard(loss).to("cpu")
        >>> loss(torch.randn(4, 16), [0, 1, 2, 999]).shape
        torch.Size([])
    """
    proxies, ranks = loss.proxies, _ranks(group)
    if isinstance(proxies, ShardedProxies):
        raise ValueError("the proxies are already sharded. Call shard() once.")
    if proxies.num_classes < ranks:
        raise ValueError(
            f"num_classes must be at least the number of ranks, {ranks}; got "
            f"{proxies.num_classes}. Use fewer ranks."
        )
    seed = int(torch.randint(2**62, ()))
    if proxies.weight.is_meta:  # the other tensors do not depend on the dimension
        loss.load_state_dict(_other_state(loss.rebuild(dim=1)), strict=False, assign=True)
    shared: list[Any] = [_other_state(loss), seed]
    if ranks > 1:
        dist.broadcast_object_list(shared, group=group, group_src=0)
        loss.load_state_dict(shared[0], strict=False)
    loss.proxies = ShardedProxies(proxies, group, seed=shared[1])
    return loss


def _other_state(loss: nn.Module) -> dict[str, Tensor]:
    """Return the state of a loss without its proxies."""
    return {k: v.cpu() for k, v in loss.state_dict().items() if not k.startswith("proxies.")}


class ShardedProxies(Proxies):
    """The proxies of classes ``start`` … ``stop`` − 1, on one rank of a group; made by `shard`.

    The classes are split evenly; the first ranks have the remainder. ``weight`` has the proxies of
    this rank, ``num_classes`` and ``names`` cover all classes.
    """

    def __init__(self, proxies: Proxies, group: dist.ProcessGroup | None, seed: int) -> None:
        nn.Module.__init__(self)
        self.group, self._num_classes = group, proxies.num_classes
        self.start, self.stop = class_range(self._num_classes, _rank(group), _ranks(group))
        self.host_group = group
        if _ranks(group) > 1 and dist.get_backend(group) == "nccl":
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            self.host_group = dist.new_group(
                members, backend="gloo", use_local_synchronization=True
            )
        self.init: Init = proxies.init
        weight = proxies.weight.detach()
        own = self._draw(weight.shape, seed) if weight.is_meta else weight[self.start : self.stop]
        own = own.to(weight.dtype, copy=True)
        self.weight = nn.Parameter(own, proxies.weight.requires_grad)
        names = torch.empty(0, dtype=torch.uint8) if weight.is_meta else proxies.names_utf8
        self.register_buffer("names_utf8", names)

    def _draw(self, shape: torch.Size, seed: int) -> Tensor:
        """Draw the proxies of this rank, in blocks with their own generators."""
        classes, k, dim = shape
        weight = torch.empty(self.stop - self.start, k, dim)
        for first in range(self.start // BLOCK * BLOCK, self.stop, BLOCK):
            last = min(first + BLOCK, classes)
            generator = torch.Generator().manual_seed((seed + first) % 2**63)
            block = draw((last - first, k, dim), self.init, generator, classes)
            low, high = max(first, self.start), min(last, self.stop)
            weight[low - self.start : high - self.start] = block[low - first : high - first]
        return weight

    @property
    def num_classes(self) -> int:
        """The number of classes on all ranks, C."""
        return self._num_classes

    def grow(self, *args: Any, **kwargs: Any) -> range:
        """Raise: the number of classes is fixed."""
        raise NotImplementedError(
            "grow is not supported for sharded proxies. Create a larger loss."
        )

    def extra_repr(self) -> str:
        """Return the classes, for ``print(loss)``."""
        return f"{super().extra_repr()}, start={self.start}, stop={self.stop}"

    def gather(
        self, embeddings: Tensor, labels: Labels, weights: Weights | None
    ) -> tuple[ShardedBatch, Tensor, Tensor, Tensor | None]:
        """Gather the batches of all ranks; return an object that computes a loss, and the batch."""
        from proximetry.losses.gathered_loss import gather_batch  # imports this module

        batch = gather_batch(embeddings, labels, weights, self.group, self.host_group)
        shard = ShardedBatch(self, batch.counts, batch.seed)
        return shard, batch.embeddings, batch.labels, batch.weights

    def sum(self, *values: Tensor | None) -> list[Any]:
        """Sum tensors over the ranks in one collective; None stays None.

        All ranks must use the sums in the same way: the gradient of a term is that of the sum.
        """
        tensors = [value for value in values if value is not None]
        flat: Tensor = _Sum.apply(torch.cat([t.reshape(-1) for t in tensors]), self.group)  # type: ignore[no-untyped-call]
        sums = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
        return [None if value is None else next(sums).view_as(value) for value in values]

    def mean_over_classes(self, mean: Tensor) -> Tensor:
        """Convert the mean over this rank's classes to its share of the mean over all classes."""
        return mean * (len(self.weight) / self.num_classes)


def class_range(num_classes: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first class of a rank, and the one after its last."""
    size, remainder = divmod(num_classes, ranks)
    start = rank * size + min(rank, remainder)
    return start, start + size + (rank < remainder)


@dataclass(frozen=True)
class ShardedBatch:
    """The computation of a loss: its proxies, the number of samples of each rank, and a seed."""

    proxies: ShardedProxies
    counts: list[int]
    seed: int | None

    def compute(
        self, loss: ProxyLoss, engine: Engine, problem: Problem, batch: Batch, reduction: Any
    ) -> Tensor:
        """Return the loss; the arguments are those of `ProxyLoss._reduce_by_sample`."""
        by_sample = loss.form.by != "class"
        engine = engine._replace(solve=partial(self._solve, engine.solve))
        reduce = loss._reduce_by_sample if by_sample else partial(self._reduce_by_class, loss)
        with common_random_numbers(self.seed, problem.x.device):
            value, factor, distance = reduce(engine, problem, batch, reduction)
        if distance is not None:
            value = value + loss.tau * distance * factor
        return self._own_rows(value) if by_sample and reduction == "none" else value

    def _solve(self, solve: Callable[[Problem], Parts], problem: Problem) -> Parts:
        """Solve a problem for the classes of this rank, and combine the parts of all ranks.

        Per-class terms cover the classes of this rank.
        """
        shards, x = self.proxies, self._enter(problem.x, self.counts)
        scale, offset = (
            self._enter(value) if isinstance(value, Tensor) else value
            for value in (problem.scale, problem.offset)
        )
        labels, outside = self._own_labels(problem.labels)
        parts = solve(
            replace(problem, x=x, scale=scale, offset=offset, labels=labels, is_shard=True)
        )
        positive = parts.positive.masked_fill(outside, 0.0)
        distance = parts.distance
        if distance is not None:
            distance = shards.mean_over_classes(distance)
        if problem.form.by != "sample":
            is_sum = problem.class_weight is not None or problem.form.by == "entry"
            summed = parts.negatives if is_sum else None
            positive, negatives, distance = shards.sum(positive, summed, distance)
            return Parts(positive, negatives if is_sum else parts.negatives, None, distance)
        peak = self._max(parts.negatives.detach())
        shares = torch.exp(parts.negatives - peak)
        positive, share, total, distance = shards.sum(positive, shares, parts.total, distance)
        # Without negatives the logarithm is -inf, and its gradient 0.
        nothing = share == 0
        lse = (peak + share.masked_fill(nothing, 1.0).log()).masked_fill(nothing, -torch.inf)
        return Parts(positive, lse, total, distance)

    @torch.no_grad()
    def own_similarity(self, x: Tensor, proxies: Tensor, labels: Tensor, *form: Any) -> Tensor:
        """Do the same as `dense.own_similarity`, with the proxies of all ranks."""
        labels, outside = self._own_labels(labels)
        own = own_similarity(x, proxies, labels.masked_fill(outside, 0), *form)
        total: Tensor = self.proxies.sum(own.masked_fill(outside, 0.0))[0]
        return total

    def _reduce_by_class(
        self, loss: ProxyLoss, engine: Engine, problem: Problem, batch: Batch, reduction: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Do the same as `ProxyLoss._reduce_by_class`, without an array of all classes."""
        x, classes, own_classes = problem.x, self.proxies.num_classes, len(problem.proxies)
        counts = (batch.weights > 0).to(x.dtype)
        # Number the classes of the batch.
        groups, size = torch.searchsorted(problem.labels.sort().values, problem.labels), len(x)
        present_count = x.new_zeros(size).scatter_reduce(0, groups, counts, "amax").sum()
        labels, outside = self._own_labels(problem.labels)
        labels, own_counts = labels.masked_fill(outside, 0), counts.masked_fill(outside, 0.0)
        own_present = x.new_zeros(own_classes).scatter_reduce(0, labels, own_counts, "amax")
        class_weight = loss.negative_weight(classes, lambda: (own_present, present_count))
        per_class = reduction == "none"
        weight = None if per_class else class_weight
        parts = engine.solve(replace(problem, class_weight=weight, log_weights=batch.log_weights))
        logit = loss.positive_logit(parts.positive, batch)
        distance = parts.distance
        if per_class:
            logit = self._enter(logit + batch.log_weights)
            logit = logit.masked_fill(outside, torch.finfo(x.dtype).min / 4)
            pull = pull_by_class(logit, labels, own_classes)
            pull = pull / present_count.clamp(min=1.0)
            terms = classes * (pull + class_weight * parts.negatives)
            factor = present_count.clamp(max=1.0)
            return terms, factor, None if distance is None else self._enter(distance)
        mean, factor = engine.pull(logit, batch._replace(labels=groups), size)
        mean = mean + parts.negatives
        if reduction == "sum":
            mean, factor = mean * classes, factor * classes
        return mean, factor, distance

    def _own_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels relative to this rank's first class, and a mask of those of other ranks."""
        own = labels - self.proxies.start
        return own, (own < 0) | (own >= len(self.proxies.weight))

    def _enter(self, value: Tensor, counts: list[int] | None = None) -> Tensor:
        entered: Tensor = _Enter.apply(value, self.proxies.group, counts)  # type: ignore[no-untyped-call]
        return entered

    def _own_rows(self, terms: Tensor) -> Tensor:
        rows: Tensor = _OwnRows.apply(terms, self.proxies.group, self.counts)  # type: ignore[no-untyped-call]
        return rows

    def _max(self, value: Tensor) -> Tensor:
        """Return the finite maximum over the ranks."""
        value = value.clamp(min=torch.finfo(value.dtype).min)
        if _ranks(self.proxies.group) > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX, self.proxies.group)
        return value


class _Sum(torch.autograd.Function):
    """Sum over the ranks. The gradient passes unchanged: all ranks use the sum in the same way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return _all_reduce(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Enter(torch.autograd.Function):
    """Identity on a value that is equal on all ranks; sums the gradients over the ranks.

    With ``counts`` of rows, each rank needs the gradient of its own rows only.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: dist.ProcessGroup | None, counts: list[int] | None
    ) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, counts = ctx.group, ctx.counts
        is_even = counts is not None and min(counts) == max(counts) > 0
        if is_even and _ranks(group) > 1 and dist.get_backend(group) == "nccl":
            whole, rows = torch.zeros_like(grad), _own_slice(counts, group)
            dist.reduce_scatter(
                whole[rows], list(torch.split(grad.contiguous(), counts)), group=group
            )
            return whole, None, None
        return _all_reduce(grad, group), None, None


class _OwnRows(torch.autograd.Function):
    """The rows of this rank; gathers the gradients of all rows."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: dist.ProcessGroup | None, counts: list[int]
    ) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return value[_own_slice(counts, group)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if _ranks(ctx.group) > 1:
            grad, _ = gather_rows(grad, ctx.group, ctx.counts)
        return grad, None, None


def _ranks(group: dist.ProcessGroup | None) -> int:
    is_distributed = dist.is_available() and dist.is_initialized()
    return dist.get_world_size(group) if is_distributed else 1


def _rank(group: dist.ProcessGroup | None) -> int:
    is_distributed = dist.is_available() and dist.is_initialized()
    return dist.get_rank(group) if is_distributed else 0


def _own_slice(counts: list[int], group: dist.ProcessGroup | None) -> slice:
    rank = _rank(group)
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def _all_reduce(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of a tensor over the ranks."""
    total = value.clone(memory_format=torch.contiguous_format)
    if _ranks(group) > 1:
        dist.all_reduce(total, group=group)
    return total
