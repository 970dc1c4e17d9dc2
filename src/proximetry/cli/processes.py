"""The processes that torchrun starts, for the commands that share work among them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proximetry.training.distributed import World


@contextmanager
def processes(device: str | None) -> "Iterator[World]":
    """Join the processes that torchrun started, for as long as it takes, or stand alone."""
    import torch

    from proximetry.training.distributed import join_processes, process_group

    world = join_processes(device)
    current = world.device if world.device.type == "cuda" else -1  # where NCCL works; -1: no change
    with torch.cuda.device(current), process_group(world):
        yield world
