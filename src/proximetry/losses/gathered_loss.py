"""One loss over the batches of all processes, for custom training loops."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from proximetry._util.formatting import format_value
from proximetry._util.tensors import common_random_numbers, gather_rows
from proximetry.losses.base import Weights, labels_tensor, weights_tensor
from proximetry.losses.sharded import ShardedProxies


class Gathered(nn.Module):
    """Apply any ``loss(embeddings, labels)`` to the batches of all processes as one.

    For a network in DistributedDataParallel (DDP). The gradients of the network and the loss equal
    those of one process with the whole batch; batches may differ in size. All processes of the
    ``group`` must call it, all with weights or all without. If the arguments of any process are
    invalid, all raise.

    Every process computes the loss of the whole batch. DDP averages the gradients of the network,
    so gradients of the embeddings are multiplied by the number of processes. Gradients of the
    loss's parameters are equal on all processes: do not sum them. The first process broadcasts the
    parameters and buffers of the loss before the first batch, and a seed for each batch: a loss
    that draws random numbers draws the same on all processes.

    Examples:
        >>> import torch
        >>> from proximetry.losses import ProxyAnchor, gathered
        >>> loss = gathered(ProxyAnchor(num_classes=10, dim=8))
        >>> loss(torch.randn(4, 8), torch.arange(4)).shape
        torch.Size([])
    """

    def __init__(self, loss: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module):
            raise ValueError(f"loss must be a module, got {format_value(loss)}")
        if any(isinstance(module, ShardedProxies) for module in loss.modules()):
            raise ValueError(
                "a loss with sharded proxies gathers batches itself. Call it directly."
            )
        self.loss, self.group = loss, group
        self._shared = False

    def forward(
        self, embeddings: Tensor, labels: Any, weights: Weights | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the loss of the whole batch; ``kwargs`` are passed to the loss."""
        batch = gather_batch(embeddings, labels, weights, self.group)
        if batch.weights is not None:
            kwargs["weights"] = batch.weights
        if batch.seed is not None:
            self._share_state()
        with common_random_numbers(batch.seed, embeddings.device):
            return self.loss(batch.embeddings, batch.labels, **kwargs)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _share_state(self) -> None:
        if not self._shared:
            for tensor in [*self.loss.parameters(), *self.loss.buffers()]:
                values = tensor.detach().contiguous()
                dist.broadcast(values, group=self.group, group_src=0)
                tensor.copy_(values)
            self._shared = True


gathered = Gathered
"""Alias of `Gathered`, named like a function."""


class GatheredBatch(NamedTuple):
    """The batches of all ranks as one, the number of samples of each rank, and a common seed."""

    embeddings: Tensor
    labels: Tensor
    weights: Tensor | None
    counts: list[int]
    seed: int | None


def gather_batch(
    embeddings: Tensor,
    labels: Any,
    weights: Weights | None,
    group: dist.ProcessGroup | None = None,
    host_group: dist.ProcessGroup | None = None,
) -> GatheredBatch:
    """Gather the batches of all ranks; if the arguments of any rank are invalid, raise on all.

    The embeddings are gathered with gradient. Batch sizes are exchanged over ``host_group``, which
    with gloo does not wait for the GPU.
    """
    invalid: ValueError | None = None
    checked: Tensor | None = None
    try:
        if not isinstance(embeddings, Tensor):
            raise ValueError(f"embeddings must be a tensor, got {type(embeddings).__name__}")
        labels = labels_tensor(embeddings, labels)
        if labels.shape[:1] != embeddings.shape[:1]:
            got = list(labels.shape)
            n = len(embeddings)
            raise ValueError(f"labels must have shape [{n}], one per embedding; got {got}")
        if not labels.is_floating_point():
            labels = labels.long()  # the same type on all ranks
        if weights is not None:
            checked = weights_tensor(embeddings, weights)
    except ValueError as error:
        invalid = error
    is_distributed = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size(group) if is_distributed else 1
    if ranks > 1:
        size = 0 if invalid else len(embeddings)
        needs_gradient = not invalid and embeddings.requires_grad
        passed_here = -1 if invalid else int(weights is not None)
        state = torch.tensor([[passed_here, size, needs_gradient, int(torch.randint(2**31, ()))]])
        states, _ = gather_rows(state, host_group or group, [1] * ranks)
        passed, counts, gradients, seeds = states.T.tolist()
        _raise_on_all_ranks(invalid, passed)
        if any(gradients) and not needs_gradient:  # backward is the same on all ranks
            embeddings = embeddings.detach().requires_grad_()
        embeddings = gather_with_gradient(embeddings, group, counts)
        labels, _ = gather_rows(labels, group, counts)
        if checked is not None:
            checked, _ = gather_rows(checked.double(), group, counts)
        return GatheredBatch(embeddings, labels, checked, counts, seeds[0])
    if invalid is not None:
        raise invalid
    return GatheredBatch(embeddings, labels, checked, [len(embeddings)], None)


def _raise_on_all_ranks(invalid: ValueError | None, passed: list[int]) -> None:
    """Raise if the arguments of any rank are invalid: the others would wait for it.

    ``passed`` is 1 for ranks with weights, 0 for those without, and -1 for invalid arguments.
    """
    if invalid is not None:
        raise invalid
    if -1 in passed:
        raise ValueError(f"invalid arguments of the loss on rank {passed.index(-1)}")
    if len(set(passed)) > 1:
        ranks = [rank for rank, weights in enumerate(passed) if weights]
        raise ValueError(f"weights on ranks {ranks} only. Pass weights on all ranks or none.")


def gather_with_gradient(
    rows: Tensor, group: dist.ProcessGroup | None = None, counts: list[int] | None = None
) -> Tensor:
    """Concatenate [n, …] tensors of all ranks like `gather_rows`, differentiably."""
    return _Gather.apply(rows, group, counts)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup | None, counts: list[int] | None
    ) -> Tensor:
        whole, counts = gather_rows(rows, group, counts)
        ctx.start = sum(counts[: dist.get_rank(group)])
        ctx.rows, ctx.ranks = rows.shape[0], len(counts)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Every rank computes the whole loss, so it needs the gradient of its rows only. DDP divides
        # by the number of ranks.
        return grad[ctx.start : ctx.start + ctx.rows] * ctx.ranks, None, None
