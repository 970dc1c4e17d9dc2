"""One process or several: who we are, and embeddings gathered with their gradients.

Every rank computes the loss of the whole batch from the gathered embeddings, so value and
gradients do not depend on the number of ranks. The proxies are replicated; their gradients are
equal on every rank and are averaged all the same, so that rounding cannot drive copies apart.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from proximetry._common import resolve_device
from proximetry.losses.gathering import gather_with_gradient
from proximetry.training.heartbeat import Heartbeat, RankError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all of them; ``owns_group`` if `join_processes` made their group.

    The ``heart`` of a group of ours tells when a process is lost.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    owns_group: bool = False
    heart: Heartbeat = field(default_factory=Heartbeat, compare=False)

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
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), place)
    heart = Heartbeat(int(os.environ["RANK"]))
    heart.start()
    try:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    except RuntimeError as error:
        heart.close()
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankError(f"the ranks cannot meet at {address}: {error}") from error
    except BaseException:
        heart.close()
        raise
    return World(dist.get_rank(), dist.get_world_size(), place, owns_group=True, heart=heart)


@contextmanager
def watching(world: World, timeout: float) -> Iterator[None]:
    """Give up ranks that are gone, or that are silent for ``timeout`` seconds; leave at the end."""
    error: BaseException | None = None
    try:
        with world.heart.rescuing(str):
            if world.heart.connect(timeout):
                # Who is alive is waited for: rank 0 may decode images for hours.
                _set_pg_timeout(timedelta(days=1))
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        leave_processes(world, error)
        del error


def leave_processes(world: World, error: BaseException | None = None) -> None:
    """Leave the process group, unless it is the caller's, on account of an error or at the end."""
    if not world.owns_group:
        return
    world.heart.leave(error)
    # A thread of gloo may still need the interpreter to free the tensors of a collective, and a
    # group waits for its threads: it must not be freed while the interpreter is held. Python's own
    # reference to it sees to that, unless DistributedDataParallel, be it in the frames of an
    # exception, has the last one.
    group = dist.group.WORLD
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    dist.destroy_process_group()
    del group
    world.heart.close()


def gather(tensor: Tensor, world: World) -> Tensor:
    """Concatenate the tensors of all ranks in the order of ranks; the gradient comes back.

    The number of rows may differ between ranks.
    """
    if world.size == 1:
        return tensor
    return gather_with_gradient(tensor)


def any_rank(flag: bool, world: World) -> bool:
    """Return whether the flag is set on any rank; all ranks get the same answer."""
    if world.size == 1:
        return flag
    found = torch.tensor(int(flag), device=world.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def share_buffers(module: nn.Module, world: World) -> None:
    """Give every rank the buffers of rank 0, which are those that are saved.

    Batch norm has seen another part of each batch on every rank.
    """
    if world.size > 1:
        for buffer in module.buffers():
            shared = buffer.contiguous()
            dist.broadcast(shared, src=0)
            buffer.copy_(shared)


def average_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Average gradients that DDP does not look after: those of the losses."""
    for parameter in parameters:
        if world.size > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
