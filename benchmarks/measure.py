"""Measure time and peak memory: medians of alternating runs, additional allocations."""

import ctypes
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Run = Callable[[], object]


def alternate(runs: dict[str, Run], repeats: int, device: str = "cpu") -> dict[str, float]:
    """Return the median seconds of each run; runs alternate, so that drift affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            if turn > 0:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(run: Run, device: str = "cpu") -> int:
    """Return the peak of additional bytes that ``run`` allocates (on the CPU: Linux only)."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return freed pages, or reusing them would not count
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def versions() -> str:
    """Return versions and hardware in one line."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {gpu}"
    )


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; memory is measured on Linux only")
