"""One process or several: who we are, and embeddings gathered with their gradients.

Every rank computes the loss of the whole batch from the gathered embeddings, so value and
gradients do not depend on the number of ranks. The proxies are replicated; their gradients are
equal on every rank and are averaged all the same, so that rounding cannot drive copies apart.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from proximetry._common import gather_rows, resolve_device

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all of them; ``owns_group`` if `join_processes` made their group."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    owns_group: bool = False

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    def wait(self) -> None:
        """Let all processes catch up."""
        if self.size > 1:
            dist.barrier()

    def first(self, task: Callable[[], T]) -> T:
        """Let rank 0 do a task; every rank gets its result, or raises its error."""
        if self.size == 1:
            return task()
        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = task()
            except Exception as error:  # handed on to every rank below
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        result: T = box[0]
        return result


def join_processes(device: str | None = None) -> World:
    """Join the processes that torchrun started, or stand alone."""
    alone = "RANK" not in os.environ or "WORLD_SIZE" not in os.environ
    place = resolve_device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", 0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
    if alone:
        return World(device=place)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), place, ours)


def leave_processes(world: World) -> None:
    """Leave the process group, unless it is the caller's."""
    if world.owns_group:
        dist.destroy_process_group()


def gather(tensor: Tensor, world: World) -> Tensor:
    """Concatenate the tensors of all ranks in the order of ranks; the gradient comes back.

    The number of rows may differ between ranks.
    """
    if world.size == 1:
        return tensor
    gathered: Tensor = _Gather.apply(tensor, world)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        whole, counts = gather_rows(tensor)
        ctx.start = sum(counts[: world.rank])
        ctx.rows, ctx.world = tensor.shape[0], world.size
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Every rank holds the whole loss, so its own rows are all it needs; DDP will divide the
        # sum over the ranks by their number, which the factor cancels.
        return grad[ctx.start : ctx.start + ctx.rows] * ctx.world, None


def any_rank(flag: bool, world: World) -> bool:
    """Return whether the flag is set on any rank; all ranks get the same answer."""
    if world.size == 1:
        return flag
    found = torch.tensor(int(flag), device=world.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def average_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Average gradients that DDP does not look after: those of the losses."""
    for parameter in parameters:
        if world.size > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
