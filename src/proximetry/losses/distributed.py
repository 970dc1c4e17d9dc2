"""One loss over the batches of all processes, for custom training loops."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from proximetry._util.formatting import format_value
from proximetry._util.tensors import gather_rows
from proximetry.losses.base import Weights, labels_like, sample_weights


class Gathered(nn.Module):
    """Apply any ``loss(embeddings, labels)`` to the batches of all processes as one.

    For a network in DistributedDataParallel (DDP): its gradients, and those of the parameters of
    the loss, become those of one process with the whole batch; batches may differ in size. All
    processes of the ``group`` must call it, and all with weights or none. If one of them has
    invalid arguments, all raise.

    Every process computes the loss of the whole batch. DDP averages the gradients of the network,
    so those of the embeddings are multiplied by the number of processes; gradients of the loss's
    parameters are complete and equal on all processes: average them or leave them, do not sum
    them. The first process broadcasts the parameters and buffers of the loss before the first
    batch.
    """

    def __init__(self, loss: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module):
            raise ValueError(f"gathered takes a loss module, got {format_value(loss)}")
        self.loss, self.group = loss, group
        self._shared = False

    def forward(
        self, embeddings: Tensor, labels: Any, weights: Weights | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the loss of the whole batch; ``kwargs`` are passed to the loss."""
        problem: ValueError | None = None
        try:
            if not isinstance(embeddings, Tensor):
                raise ValueError(f"embeddings must be a tensor, got {type(embeddings).__name__}")
            labels = labels_like(embeddings, labels)
            if labels.shape[:1] != embeddings.shape[:1]:
                got = list(labels.shape)
                raise ValueError(f"{len(embeddings)} embeddings need as many labels, got {got}")
            if not labels.is_floating_point():
                labels = labels.long()  # of one type on all ranks
            if weights is not None:
                weights = sample_weights(embeddings, weights)
        except ValueError as error:
            problem = error
        several = dist.is_available() and dist.is_initialized()
        several = several and dist.get_world_size(self.group) > 1
        if several:
            self._agree(problem, weights is not None)
            self._share_state()
            embeddings = gather_with_gradient(embeddings, self.group)
            labels, _ = gather_rows(labels, self.group)
            if isinstance(weights, Tensor):
                weights, _ = gather_rows(weights.double(), self.group)
        elif problem is not None:
            raise problem
        if weights is not None:
            kwargs["weights"] = weights
        return self.loss(embeddings, labels, **kwargs)  # type: ignore[no-any-return]

    def _agree(self, problem: ValueError | None, weighted: bool) -> None:
        """Raise on every process if the arguments of any are invalid, else all would wait."""
        state = torch.tensor([-1 if problem else int(weighted)])
        states = gather_rows(state, self.group)[0].tolist()
        if problem is not None:
            raise problem
        if -1 in states:
            raise ValueError(f"invalid arguments of the loss on rank {states.index(-1)}")
        if len(set(states)) > 1:
            raise ValueError(f"weights on ranks {[r for r, s in enumerate(states) if s]} only")

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
    """Concatenate [n, …] tensors of all ranks as `gather_rows` does; differentiable."""
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
        # Every rank holds the whole loss, so its own rows are all it needs; DDP will divide the
        # sum over the ranks by their number, which the factor cancels.
        return grad[ctx.start : ctx.start + ctx.rows] * ctx.ranks, None
