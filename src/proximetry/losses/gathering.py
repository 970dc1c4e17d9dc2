"""One loss over the batches of all processes, for a training loop of one's own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from proximetry._common import gather_rows
from proximetry.losses import checks


def gathered(loss: nn.Module, group: dist.ProcessGroup | None = None) -> "Gathered":
    """Make any ``loss(embeddings, labels)`` see the batches of all processes as one.

    For a network in DistributedDataParallel. Its gradients, and those of the loss's own parameters,
    become what one process with the whole batch would have; batches may differ in size. All
    processes of the group must call it, and all with weights or none.
    """
    return Gathered(loss, group)


class Gathered(nn.Module):
    """A ``loss`` of the embeddings of all processes of a ``group``; see `gathered`.

    Every process computes the loss of the whole batch. DistributedDataParallel averages the
    gradients of the network over the processes, so those of the embeddings are multiplied by the
    number of processes; gradients of the loss's parameters are whole and equal on all of them:
    average them, or leave them, but do not add them up. The parameters and buffers of the first
    process are handed to the others before the first batch.
    """

    def __init__(self, loss: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module):
            raise ValueError(f"gathered takes a loss that is a module, got {_kind(loss)}")
        self.loss, self.group = loss, group
        self._shared = False

    def forward(
        self,
        embeddings: Tensor,
        labels: Any,
        weights: checks.Weights | None = None,
        **further: Any,
    ) -> Tensor:
        """Return the loss of the whole batch; what is ``further`` reaches the loss as it is."""
        labels = _rows(embeddings, labels)
        weights = checks.sample_weights(embeddings, weights)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            self._share_state()
            embeddings = gather_with_gradient(embeddings, self.group)
            labels, _ = gather_rows(labels, self.group)
            if weights is not None:
                weights, _ = gather_rows(weights.double(), self.group)
        if weights is not None:
            further["weights"] = weights
        return self.loss(embeddings, labels, **further)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _share_state(self) -> None:
        if not self._shared:
            for tensor in [*self.loss.parameters(), *self.loss.buffers()]:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, group=self.group, group_src=0)
                tensor.copy_(whole)
            self._shared = True


def gather_with_gradient(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate [n, …] tensors of all ranks as `gather_rows` does; the gradient comes back."""
    whole: Tensor = _Gather.apply(rows, group)  # type: ignore[no-untyped-call]
    return whole


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


def _rows(embeddings: Tensor, labels: Any) -> Tensor:
    """Return the labels as a tensor beside the embeddings; one rank may have none."""
    if not isinstance(embeddings, Tensor):
        raise ValueError(f"embeddings must be a tensor, got {_kind(embeddings)}")
    rows = checks.as_labels(embeddings, labels)
    if rows.ndim == 0 or len(rows) != len(embeddings):
        raise ValueError(
            f"{len(embeddings)} embeddings need as many labels, got shape {list(rows.shape)}"
        )
    return rows if rows.is_floating_point() else rows.long()  # of one type on all ranks


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
