"""One loss over the batches of all processes, for custom training loops."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from proximetry._util.formatting import format_value
from proximetry._util.tensors import gather_rows
from proximetry.losses.base import Weights, labels_tensor, weights_tensor


class Gathered(nn.Module):
    """Apply any ``loss(embeddings, labels)`` to the batches of all processes as one.

    For a network in DistributedDataParallel (DDP). The gradients of the network and the loss equal
    those of one process with the whole batch; batches may differ in size. All processes of the
    ``group`` must call it, all with weights or all without. If the arguments of one are invalid,
    all raise.

    Every process computes the loss of the whole batch. DDP averages the gradients of the network,
    so gradients of the embeddings are multiplied by the number of processes. Gradients of the
    loss's parameters are equal on all processes: do not sum them. The first process broadcasts the
    parameters and buffers of the loss before the first batch, and a seed for each batch: a loss
    that draws random numbers draws the same on all processes.
    """

    def __init__(self, loss: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module):
            raise ValueError(f"loss must be a module, got {format_value(loss)}")
        self.loss, self.group = loss, group
        self._shared = False

    def forward(
        self, embeddings: Tensor, labels: Any, weights: Weights | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the loss of the whole batch; ``kwargs`` are passed to the loss."""
        invalid: ValueError | None = None
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
                weights = weights_tensor(embeddings, weights)
        except ValueError as error:
            invalid = error
        seed = None
        is_distributed = dist.is_available() and dist.is_initialized()
        if is_distributed and dist.get_world_size(self.group) > 1:
            seed = self._raise_on_all_ranks(invalid, weights is not None)
            self._share_state()
            embeddings = gather_with_gradient(embeddings, self.group)
            labels, _ = gather_rows(labels, self.group)
            if isinstance(weights, Tensor):
                weights, _ = gather_rows(weights.double(), self.group)
        elif invalid is not None:
            raise invalid
        if weights is not None:
            kwargs["weights"] = weights
        if seed is None:
            return self.loss(embeddings, labels, **kwargs)  # type: ignore[no-any-return]
        with torch.random.fork_rng([embeddings.device] if embeddings.is_cuda else []):
            torch.manual_seed(seed)
            return self.loss(embeddings, labels, **kwargs)  # type: ignore[no-any-return]

    def _raise_on_all_ranks(self, invalid: ValueError | None, weighted: bool) -> int:
        """Return a seed for all processes.

        Raise if the arguments of any process are invalid: the others would wait for it.
        """
        state = [-1 if invalid else int(weighted), int(torch.randint(2**31, ()))]
        gathered_states = gather_rows(torch.tensor([state]), self.group)[0]
        states, seed = gathered_states[:, 0].tolist(), int(gathered_states[0, 1])
        if invalid is not None:
            raise invalid
        if -1 in states:
            raise ValueError(f"invalid arguments of the loss on rank {states.index(-1)}")
        if len(set(states)) > 1:
            ranks = [rank for rank, weights in enumerate(states) if weights]
            raise ValueError(f"weights on ranks {ranks} only. Pass weights on all ranks or none.")
        return seed

    @torch.no_grad()
    def _share_state(self) -> None:
        if not self._shared:
            for tensor in [*self.loss.parameters(), *self.loss.buffers()]:
                values = tensor.detach().contiguous()
                dist.broadcast(values, group=self.group, group_src=0)
                tensor.copy_(values)
            self._shared = True


gathered = Gathered
"""Alias of `Gathered`, as a function over losses."""


def gather_with_gradient(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate [n, …] tensors of all ranks like `gather_rows`, differentiably."""
    return _Gather.apply(rows, group)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        whole, counts = gather_rows(rows, group)
        ctx.start = sum(counts[: dist.get_rank(group)])
        ctx.rows, ctx.ranks = rows.shape[0], len(counts)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Every rank computes the whole loss, so it needs the gradient of its rows only. DDP divides
        # by the number of ranks.
        return grad[ctx.start : ctx.start + ctx.rows] * ctx.ranks, None
