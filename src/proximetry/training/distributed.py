"""Training on one or several processes.

Every rank computes the loss of the whole batch from the gathered embeddings, so value and gradients
do not depend on the number of ranks. Proxies are replicated; their gradients are equal on all ranks
but averaged anyway, so that rounding errors cannot accumulate. Sharded proxies (``loss.sharded``)
and their optimizer state differ by rank.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value
from proximetry._util.machine import resolve_device
from proximetry.kernels.cuda_graphs import ignore_stream_mismatch
from proximetry.recipe.auto import DeviceInfo
from proximetry.training.errors import RankError, RunError

T = TypeVar("T")

RANK_TIMEOUT = "PROXIMETRY_RANK_TIMEOUT"
"""Environment variable: timeout in seconds for waiting for another rank."""
DEFAULT_TIMEOUT = 1800


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of processes, and its device.

    ``owns_group`` is set if `join_processes` made the process group.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    owns_group: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def local_slice(self, total: int) -> slice:
        """Return the part of ``total`` rows that belongs to this process, in the order of ranks."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def on_main(self, task: Callable[[], T]) -> T:
        """Run a task on rank 0; every rank returns its result, or raises its error."""
        if self.size == 1:
            return task()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = task()
            except Exception as error:  # raised on every rank below
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def any(self, flag: bool) -> bool:
        """Return on every rank whether the flag is set on any of them."""
        if self.size == 1:
            return flag
        combined = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(combined, dist.ReduceOp.MAX)
        return bool(combined)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


def join_processes(device: str | None = None, *, float64: bool = True) -> World:
    """Join the process group of torchrun, if it started us; arguments as in `resolve_device`."""
    single = "RANK" not in os.environ or "WORLD_SIZE" not in os.environ
    local_device = resolve_device(device, float64=float64 or not single)
    if local_device.type == "cuda" and local_device.index is None:
        local_device = torch.device("cuda", 0 if single else int(os.environ.get("LOCAL_RANK", "0")))
    if single:
        return World(device=local_device)
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), local_device)
    text = os.environ.get(RANK_TIMEOUT, "")
    try:
        timeout = timedelta(seconds=float(text or DEFAULT_TIMEOUT))
    except (ValueError, OverflowError):
        raise UsageError(f"{RANK_TIMEOUT} must be seconds, got {format_value(text)}") from None
    try:
        dist.init_process_group("nccl" if local_device.type == "cuda" else "gloo", timeout=timeout)
    except RuntimeError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankError(
            f"the ranks cannot connect at {address}: {_reason(error)}. Start all "
            f"{os.environ['WORLD_SIZE']} ranks, for example with torchrun."
        ) from error
    return World(dist.get_rank(), dist.get_world_size(), local_device, owns_group=True)


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Raise a `RankError` when another rank is lost; leave the process group at the end."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        of_gloo = isinstance(raised, RuntimeError) and "gloo" in str(raised)
        if world.size == 1 or not (of_gloo or isinstance(raised, dist.DistError)):
            raise
        reason = _reason(raised)
        longer = f", with a larger {RANK_TIMEOUT} if it was busy" * ("imed out" in reason)
        error = RankError(
            f"lost another rank: {reason}. Check its output and run the same command again to "
            f"resume{longer}."
        )
        raise error from raised
    finally:
        if world.owns_group:
            _leave_group(error)
        del error


@contextmanager
def preserve_torch_state(world: World, out: str | Path) -> Iterator[None]:
    """Restore torch's global state and leave the process group at the end.

    Raises a `RunError` with remedies if memory is exhausted.
    """
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    flags = cudnn.deterministic, cudnn.benchmark
    every_gpu = range(torch.cuda.device_count())  # a seed is set on all of them
    current = world.device if world.device.type == "cuda" else -1  # Triton launches on it
    try:
        with (
            torch.random.fork_rng(every_gpu),
            torch.cuda.device(current),
            ignore_stream_mismatch() if world.device.type == "cuda" else nullcontext(),
            process_group(world),
        ):
            yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"not enough memory on {world.device} for the run in {out}: "
            f"{str(error).split('. ')[0]}. Use a smaller data.batch_size, training.accumulate 2 "
            "or more, training.precision bfloat16 or data.cache pixels."
        ) from error
    finally:
        cudnn.deterministic, cudnn.benchmark = flags
        torch.set_num_threads(threads)


def _reason(error: BaseException) -> str:
    """Return the message of a torch error without its source line and advice."""
    return str(error).split("] ", 1)[-1].split("\n")[0].split(". ")[0].rstrip(".")


def _leave_group(error: BaseException | None) -> None:
    """Destroy the process group.

    A thread of gloo may need the interpreter to free the tensors of a collective, and the group
    waits for its threads, so it must not be freed while the interpreter is locked. The reference
    here prevents that, unless DistributedDataParallel has the last one, perhaps in the frames of an
    exception, which are cleared.
    """
    group = dist.group.WORLD
    cleared: list[BaseException] = []
    while error is not None and error not in cleared:  # chained exceptions may form a cycle
        traceback.clear_frames(error.__traceback__)
        cleared.append(error)
        error = error.__cause__ or error.__context__
    gc.collect()
    dist.destroy_process_group()
    del group


def share_buffers(module: nn.Module, world: World) -> None:
    """Broadcast the buffers of rank 0, which are saved; batch-norm statistics differ by rank."""
    if world.size > 1:
        for buffer in module.buffers():
            shared = buffer.contiguous()
            dist.broadcast(shared, src=0)
            buffer.copy_(shared)


def average_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Average the gradients of the losses, which DDP does not."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size


def device_facts(world: World) -> DeviceInfo:
    """Describe the device of a run; with several processes, the weakest one."""
    if world.device.type == "cuda":
        facts = DeviceInfo(
            torch.cuda.get_device_name(world.device),
            cuda=True,
            capability=torch.cuda.get_device_capability(world.device),
            free=torch.cuda.mem_get_info(world.device)[0],
            triton=find_spec("triton") is not None,
            processes=world.size,
        )
    else:
        threads = torch.get_num_threads()
        name = f"the CPU ({threads} thread{'s' * (threads > 1)})"
        facts = DeviceInfo(name, processes=world.size)
    ranks = world.gather(facts)
    return replace(
        facts,
        capability=min(rank.capability for rank in ranks),
        free=min(rank.free for rank in ranks),
        triton=all(rank.triton for rank in ranks),
    )
