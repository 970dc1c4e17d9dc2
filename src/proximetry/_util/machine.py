"""Cores, memory and devices of the machine; torch settings that threads share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier, Lock, RLock
from typing import TYPE_CHECKING, Any, TypeVar

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP = Path("/sys/fs/cgroup")
# Files with the limit and the usage, and the entry of memory.stat for page cache that can be freed.
_CGROUP_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),  # v2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),  # v1
)


def cores() -> int:
    """Return the number of cores this process may use, within a container's limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # not in a container, or "max"
        return count


def available_memory() -> int:
    """Return the bytes of memory a program can use without swapping, within a container's limit."""
    available = 1 << 33  # on Windows
    with suppress(OSError, ValueError, AttributeError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    for limit, usage, cache in _CGROUP_MEMORY:
        with suppress(OSError, ValueError):  # no container, or no limit: "max"
            allowed, used = (int((_CGROUP / name).read_text()) for name in (limit, usage))
            lines = (_CGROUP / limit).with_name("memory.stat").read_text().splitlines()
            freeable = int(dict(line.split() for line in lines).get(cache, 0))
            available = min(available, max(0, allowed - used + freeable))
    return available


_settings_lock = Lock()
# By object: the number of threads that override it, and its original value.
_overridden: dict[Any, tuple[int, Any]] = {}


@contextmanager
def override(
    targets: Iterable[T], value: Any, read: Callable[[T], Any], assign: Callable[[T, Any], None]
) -> Iterator[None]:
    """Set a value on shared objects; the last thread to leave restores the previous one.

    Several threads of a server may need evaluation mode or full precision at the same time.
    """
    all_targets = list(targets)
    with _settings_lock:
        for target in all_targets:
            users, before = _overridden.get(target) or (0, read(target))
            _overridden[target] = users + 1, before
            assign(target, value)
    try:
        yield
    finally:
        with _settings_lock:
            for target in all_targets:
                users, before = _overridden.pop(target)
                if users > 1:
                    _overridden[target] = users - 1, before
                elif read(target) == value:  # unless changed meanwhile
                    assign(target, before)


def torch_pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Start threads that each compute with `threads` threads of torch.

    A thread takes the latest thread count on first use: restore the previous count after all
    workers have started.
    """
    import torch

    def limit() -> None:
        torch.get_num_threads()  # takes the global count now, not in the first computation
        torch.set_num_threads(threads)
        started.wait()

    started = Barrier(workers + 1)
    with _settings_lock, ThreadPoolExecutor(1) as new_thread:
        torch.get_num_threads()
        previous = new_thread.submit(torch.get_num_threads).result()
        pool = ThreadPoolExecutor(workers, initializer=limit)
        for _ in range(workers):
            pool.submit(int)
        started.wait()
        new_thread.submit(torch.set_num_threads, previous).result()
    return pool


_rng_lock = RLock()


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore torch's CPU random state on exit; one thread at a time."""
    import torch

    with _rng_lock, torch.random.fork_rng(devices=[]):
        yield


def resolve_device(
    device: str | torch.device | None = None, *, float64: bool = False
) -> torch.device:
    """Return a device by name, by default the best one; raise if it is not available.

    The best one is CUDA, then the GPU of an Apple computer (MPS), then the CPU. With `float64`,
    which MPS lacks, it is CUDA or the CPU.
    """
    import torch

    if isinstance(device, torch.device):
        return device
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    names = ["cuda", *gpus] if torch.cuda.is_available() else []
    names += ["mps"] if torch.backends.mps.is_available() and not float64 else []
    names.append("cpu")
    if device is not None and device not in names:
        available = ", ".join(sorted(names))
        raise UsageError(f"there is no device {format_value(device)}. Available: {available}.")
    return torch.device(names[0] if device is None else device)


def by_device(device: torch.device, *, cpu: int, cuda: int) -> int:
    """Return the value for a type of device; all types but CUDA count as CPU."""
    return cuda if device.type == "cuda" else cpu
