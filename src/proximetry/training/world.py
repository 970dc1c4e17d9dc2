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

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

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


def enter_world(device: str | None = None) -> World:
    """Join the processes that torchrun started, or stand alone."""
    alone = "RANK" not in os.environ or "WORLD_SIZE" not in os.environ
    place = _device(device, 0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
    if place.type == "cuda":
        torch.cuda.set_device(place)  # Triton launches on the current device
    if alone:
        return World(device=place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), place)


def leave_world(world: World) -> None:
    """Part from the other processes."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _device(name: str | None, local: int) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device here")
        return torch.device("cuda", local)
    return torch.device(name)


def gather(tensor: Tensor, world: World) -> Tensor:
    """Concatenate the tensors of all ranks in the order of the ranks; the gradient comes back.

    The number of rows may differ between ranks.
    """
    if world.size == 1:
        return tensor
    rows = torch.tensor([tensor.shape[0]], device=tensor.device)
    counts = [torch.zeros_like(rows) for _ in range(world.size)]
    dist.all_gather(counts, rows)
    sizes = [int(count) for count in counts]
    if not tensor.requires_grad:
        return _gather(tensor, sizes)
    gathered: Tensor = _Gather.apply(tensor, sizes, world)  # type: ignore[no-untyped-call]
    return gathered


def _gather(tensor: Tensor, sizes: list[int]) -> Tensor:
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], world: World) -> Tensor:
        ctx.start = sum(sizes[: world.rank])
        ctx.rows, ctx.world = tensor.shape[0], world.size
        return _gather(tensor, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Every rank holds the whole loss, so its own rows are all it needs; DDP will divide the
        # sum over the ranks by their number, which the factor cancels.
        return grad[ctx.start : ctx.start + ctx.rows] * ctx.world, None, None


def add_up(tensor: Tensor, world: World) -> Tensor:
    """Return the sum over all ranks, which takes the place of the tensor."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def of_first(tensor: Tensor, world: World) -> Tensor:
    """Return the tensor of the first rank, which takes the place of the others'."""
    if world.size > 1:
        dist.broadcast(tensor, 0)
    return tensor


def average_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Average gradients that DDP does not look after: those of the losses."""
    if world.size == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
