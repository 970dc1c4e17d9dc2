"""Small things that several packages need; importing this file loads neither torch nor numpy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

Progress = Callable[[int, int], None]
"""Called with (done, total) now and then."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the nearest known name, else the known ones if few."""
    names = list(known)
    match = get_close_matches(name.lower(), names, 1)
    if match:
        return f", did you mean {match[0]!r}?"
    return f"; known are: {', '.join(names)}." if len(names) <= 24 else "."


def some(items: Iterable[str], limit: int = 5) -> str:
    """Join the first few items for a message and count the rest."""
    names = list(items)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def spaced(number: int) -> str:
    """Write a whole number with a space between thousands."""
    return f"{number:,}".replace(",", " ")


def readable_size(count: float) -> str:
    """Write a number of bytes for people: 4.1 GB, 154 MB."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def need(module: str, extra: str | None, purpose: str) -> Any:
    """Import an optional package, or say what to install: an extra of ours, or the package."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(purpose, module, extra) from error


def _missing(purpose: str, module: str, extra: str | None) -> ModuleNotFoundError:
    package = module.partition(".")[0]
    source = f"'proximetry[{extra}]'" if extra else package
    return ModuleNotFoundError(f"{purpose} needs {package}: pip install {source}", name=package)


def cache_folder() -> Path:
    """Return $PROXIMETRY_CACHE, else proximetry below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PROXIMETRY_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "proximetry"


PART_SUFFIX = ".part"
"""The end of the name of a file that is still being written."""


_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@contextmanager
def atomic_path(file: Path) -> Iterator[Path]:
    """Give a temporary name beside the file to write to; at the end it replaces the file.

    All of it is on the disk before it gets its name, so a killed process or a power cut leaves
    either the old file or the new one, whole.
    """
    part = file.with_name(f".{file.name}.{uuid4().hex}{PART_SUFFIX}")
    try:
        yield part
        with part.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(part, file)
        if os.name == "posix":  # the new name has to reach the disk too
            handle = os.open(file.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    finally:
        part.unlink(missing_ok=True)


def atomic_write(file: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the new one is there, whole."""
    with atomic_path(file) as part:
        part.write_bytes(content)


def cores() -> int:
    """Return how many cores this process may use; in a container that is not all there are."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # not in a container, or "max"
        return count


def chunks(total: int, size: int) -> Iterator[slice]:
    """Cut 0 … total into slices of `size`, the last one shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def resolve_device(name: str | None = None) -> torch.device:
    """Return the device of this name, by default CUDA where there is a GPU; refuse others."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        near = ", did you mean 'cuda'?" if name.lower() == "gpu" else closest(name, ("cpu", "cuda"))
        raise ValueError(f"unknown device {name!r}{near} Known are cpu, cuda, cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() or "no"
        raise ValueError(
            f"device {name!r} was asked for, but torch sees {found} CUDA devices here, "
            "counted from 0"
        )
    return device


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]], extra: str | None = None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports names from its modules when first asked for.

    What is then missing comes with `extra`, says the error.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{places[name]}"), name)
        except ModuleNotFoundError as error:
            if extra is None or "pip install" in str(error):
                raise
            raise _missing(f"{package}.{name}", error.name or "", extra) from error

    return find


def by_device(device: torch.device, *, cpu: int, cuda: int) -> int:
    """Return the setting for a kind of device; anything but CUDA counts as a CPU."""
    return cuda if device.type == "cuda" else cpu


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, list[int]]:
    """Concatenate [n, …] tensors of all ranks, in the order of ranks; n may differ.

    Returns the whole, on the device of `rows`, and how many rows each rank had. No gradient.
    """
    import torch
    import torch.distributed as dist

    device = rows.device
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    own = torch.tensor([rows.shape[0]], device=device)
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    counts = [int(count) for count in found]
    # Collectives want equal shapes: pad to the largest share.
    padded = torch.zeros((max(counts), *rows.shape[1:]), dtype=rows.dtype, device=device)
    padded[: rows.shape[0]] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return whole.to(rows.device), counts


def nearest_rivals(
    directions: Tensor, per_class: int, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """For each row the cosine with the nearest row of another class, and its index.

    Rows have unit length and stand class by class, `per_class` of each. Among equally near rows
    the smallest index is taken. Works in tiles of `block` rows, each serving rows and columns.
    """
    import torch

    total, device = len(directions), directions.device
    size = block or by_device(device, cpu=1024, cuda=8192)
    tiles = list(chunks(total, max(1, size // per_class) * per_class))  # whole classes
    best = directions.new_full((total,), -torch.inf)
    rival = torch.zeros(total, dtype=torch.long, device=device)

    def improve(part: slice, others: slice, cosines: Tensor) -> None:
        value, index = cosines.max(1)
        better = value > best[part]
        best[part] = torch.where(better, value, best[part])
        rival[part] = torch.where(better, index + others.start, rival[part])

    with torch.no_grad():
        for place, rows in enumerate(tiles):
            for columns in tiles[place:]:
                cosines = directions[rows] @ directions[columns].T
                if columns == rows:
                    owner = torch.arange(len(cosines), device=device) // per_class
                    cosines.masked_fill_(owner[:, None] == owner, -torch.inf)
                else:
                    improve(columns, rows, cosines.T)
                improve(rows, columns, cosines)
    return best, rival
