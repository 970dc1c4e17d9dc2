"""Small things that several packages need; importing this file loads neither torch nor numpy."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import reprlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral
from pathlib import Path
from threading import Barrier, Lock, RLock
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from filelock import BaseFileLock
    from matplotlib.axes import Axes
    from torch import Tensor

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (done, total) now and then."""
Steps = Callable[[str, int, int], None]
"""Called with (what is being done, done, total) now and then."""


class UsageError(ValueError):
    """What was asked for does not exist or cannot be meant; nothing was done."""


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


def first_few(lines: Sequence[str], elsewhere: str, limit: int = 5) -> list[str]:
    """Return the first lines of a list for the screen, and say where all of them are."""
    if len(lines) <= limit:
        return [*lines]
    return [*lines[:limit], f"and {spaced(len(lines) - limit)} more; all are in {elsewhere}"]


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 12, 12, 12

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out what has more than 4300 digits.
        return super().repr_int(x, level) if x.bit_length() < 1000 else "a number without end"


def shown(value: object) -> str:
    """Write a value for a message, however large it is: what is too long is left out."""
    return shorten(_Short().repr(value), 240)


def shorten(text: str, width: int) -> str:
    """Leave out the middle of a text that is too long."""
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[: width - 1 - half]}…{text[len(text) - half :]}"


# Controls except tab and newline, marks of text direction, line and paragraph separators.
_UNPRINTABLE = [*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F]
_UNPRINTABLE += [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _UNPRINTABLE}


def printable(text: str) -> str:
    """Escape characters that control a terminal or reorder a line."""
    return text.translate(_ESCAPES)


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether a value is a whole number of any integer type, from `least` up; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


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


def readable_seconds(seconds: float) -> str:
    """Write a time for people: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def need(module: str, extra: str | None, purpose: str) -> Any:
    """Import an optional package, or say what to install: an extra of ours, or the package."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(purpose, module, extra) from error


def _missing(purpose: str, module: str, extra: str | None) -> ModuleNotFoundError:
    package = module.partition(".")[0]
    command = install_hint(extra) if extra else f"pip install {package}"
    return ModuleNotFoundError(f"{purpose} needs {package}: {command}", name=package)


def install_hint(extra: str) -> str:
    """Return how to install an extra, in words that hold with and without a package index."""
    return f"install the extra {extra!r}, in a clone with pip install '.[{extra}]'"


def cache_folder() -> Path:
    """Return $PROXIMETRY_CACHE, else proximetry below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PROXIMETRY_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "proximetry"


PART_SUFFIX = ".part"
"""The end of the name of a file that is still being written."""
_PART = re.compile(r"\.proximetry-[0-9a-f]{32}-(.+)\.part", re.DOTALL)


# Errors of writing to an open file, which name no file.
_DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EROFS, getattr(errno, "EDQUOT", None))


class WriteError(OSError):
    """A file that could not be written, and why."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Name the file in errors of writing to it, which a full disk raises without any name."""
    try:
        yield
    except OSError as error:
        named = error.filename
        if named is None and error.errno not in _DISK_ERRORS:
            raise  # of a network, for example
        if named is not None and named != str(file) and not written_for(Path(named)):
            raise  # it is about another file, which was read meanwhile
        raise WriteError(error.errno, error.strerror or str(error), str(file)) from error


@contextmanager
def atomic_path(file: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give a temporary name beside the file to write to; at the end it replaces the file.

    All of it is on the disk before it gets its name, so a killed process or a power cut leaves
    either the old file or the new one, whole. Waiting for the disk takes milliseconds; a file that
    need not be ``durable`` may be lost or damaged by a power cut.
    """
    part = _part_of(file)
    try:
        with writing(file):
            yield part
            if durable:
                with part.open("rb+") as stream:
                    os.fsync(stream.fileno())
            os.replace(part, file)
        if durable:
            sync_folder(file.parent)
    finally:
        with suppress(OSError):  # it has its name by now, or could not even be made
            part.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, where the file system supports it.

    Some network file systems do not. The files are already in place, so that is no failure.
    """
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _part_of(file: Path) -> Path:
    # A name may have 255 bytes at most, which a long one with an addition would exceed.
    return file.with_name(f".proximetry-{uuid4().hex}-{file.name[-40:]}{PART_SUFFIX}")


def written_for(path: Path) -> str:
    """Return the name that a file of `atomic_path` was to get, "" for any other file.

    A killed process leaves such files behind. They are told from everything else with certainty.
    """
    found = _PART.fullmatch(path.name)
    return found[1] if found else ""


def atomic_write(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file so that at any moment either the old or the new one is there, whole."""
    with atomic_path(file, durable=durable) as part:
        part.write_bytes(content)


SEAL = f"sha256:{64 * '0'}"
"""What a file holds once, near its beginning, in the place of its own checksum."""
CHECKSUM = "checksum"
"""The key of that in JSON."""
_SEALED = re.compile(rb"sha256:[0-9a-f]{64}")


def sealed(content: bytes) -> bytes:
    """Put the checksum of everything in the place of the first `SEAL`."""
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(SEAL.encode(), f"sha256:{digest}".encode(), 1)


def is_sealed(content: bytes) -> bool:
    """Whether this is what `sealed` gave, to the last bit."""
    found = _SEALED.search(content)
    if found is None:
        return False
    digest = hashlib.sha256(content[: found.start()] + SEAL.encode())
    digest.update(memoryview(content)[found.end() :])
    return found[0] == f"sha256:{digest.hexdigest()}".encode()


def sealed_json(content: Mapping[str, Any], plain: Callable[[Any], Any] | None = None) -> bytes:
    """Return a JSON file with its checksum, for `read_json`; `plain` makes values plain."""
    whole = {CHECKSUM: SEAL, **content}  # first, since only the first one is filled in
    text = json.dumps(whole, indent=2, ensure_ascii=False, default=plain) + "\n"
    # Names that come from file names need not be text; JSON has escapes for them.
    return sealed(text.encode(errors="backslashreplace"))


def take_lock(file: Path, patience: float, report: Callable[[str], None]) -> BaseFileLock:
    """Take a lock that one process can have, waiting for another one for so many seconds.

    A process that is killed gives it back. Whoever still has it then is named by a TimeoutError.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"waiting up to {patience:g} s for {_owner(file)}, at work in {file.parent}")
            lock.acquire(timeout=patience)
        with suppress(OSError):  # Windows lets nobody write to it
            file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
    except Timeout:
        raise TimeoutError(_owner(file)) from None
    except NotImplementedError:
        pass  # on a file system without locks people have to take care themselves
    return lock


def _owner(lock: Path) -> str:
    """Say who has a lock, which is known where others can read it."""
    with suppress(OSError, ValueError):
        pid, host, *_ = lock.read_text(encoding="utf-8").split()
        return f"process {int(pid)} on {host}"
    return "another process"


def check_writable(file: Path) -> None:
    """Refuse a file that `atomic_path` could not write; leaves nothing behind."""
    part = _part_of(file)
    try:
        if file.is_dir():
            raise UsageError(f"{file} is a folder; name a file in it")
        if not file.parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")
        if file.exists() and not file.is_file():  # a device or a pipe, which a rename would replace
            raise UsageError(f"{file} is no file that can be replaced; name another one")
        part.touch()
        part.unlink()
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


def read_text(path: Path, limit: int) -> str:
    """Read a UTF-8 file of at most `limit` bytes; raises ValueError with its path."""
    try:
        if path.is_fifo():
            raise ValueError(f"a pipe instead of a file: {path}. Save its content to a file.")
        with path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"{path} is larger than {readable_size(limit)}, too large to be right")
        return content.decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason} at {error.start}") from error


def read_json(path: Path, limit: int) -> Any:
    """Read a JSON file of at most `limit` bytes; raises ValueError with its path.

    One with a checksum, as `sealed_json` gives it, must be what was written then.
    """
    text = read_text(path, limit)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {shorten(str(error), 200)}") from error
    if isinstance(content, dict) and CHECKSUM in content and not is_sealed(text.encode()):
        raise ValueError(f"{path} is damaged: it does not have the checksum it was saved with")
    return content


def parse_json(text: str) -> Any:
    """Return the plain values of a JSON text; each key may stand there once."""
    try:
        return json.loads(text, object_pairs_hook=_different_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} stands there twice")
        found[name] = value
    return found


_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Return how many cores this process may use; in a container that is not all there are."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # not in a container, or "max"
        return count


_CGROUP = Path("/sys/fs/cgroup")
# Files with the limit and the usage, and the entry of memory.stat for page cache that can be freed.
_CGROUP_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),  # v2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),  # v1
)


def available_memory() -> int:
    """Return the bytes of memory a program can use without swapping, within a container's limit."""
    available = _host_memory()
    for limit, usage, cache in _CGROUP_MEMORY:
        with suppress(OSError, ValueError):  # no container, or no limit: "max"
            most, used = (int((_CGROUP / name).read_text()) for name in (limit, usage))
            lines = (_CGROUP / limit).with_name("memory.stat").read_text().splitlines()
            freeable = int(dict(line.split() for line in lines).get(cache, 0))
            available = min(available, max(0, most - used + freeable))
    return available


def _host_memory() -> int:
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 1 << 33  # on Windows: as much as most have


def chunks(total: int, size: int) -> Iterator[slice]:
    """Cut 0 … total into slices of `size`, the last one shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


_settings = Lock()
# By the thing that is set: how many threads hold it so, and its value before the first of them.
_held: dict[Any, tuple[int, Any]] = {}


@contextmanager
def held(
    things: Iterable[T], value: Any, get: Callable[[T], Any], put: Callable[[T, Any], None]
) -> Iterator[None]:
    """Give shared things a value for as long as any thread wants it.

    The last thread to leave puts back what the first one found, unless somebody else has set
    another value meanwhile. Several functions may hold a thing at once, at the same value.
    """
    taken: list[T] = []
    try:
        with _settings:
            for thing in things:
                holders, before = _held.get(thing) or (0, get(thing))
                _held[thing] = holders + 1, before
                taken.append(thing)
                put(thing, value)
        yield
    finally:
        with _settings:
            for thing in taken:
                holders, before = _held.pop(thing)
                if holders > 1:
                    _held[thing] = holders - 1, before
                elif get(thing) == value:
                    put(thing, before)


def torch_pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Start threads that each compute with so many threads of torch; others keep their number.

    A thread takes the number that any thread has set last when it first computes, and keeps it.
    """
    import torch

    def limit() -> None:
        torch.get_num_threads()  # which takes the number, else the first computation would
        torch.set_num_threads(threads)

    pool, started = ThreadPoolExecutor(workers, initializer=limit), Barrier(workers)
    with _settings, ThreadPoolExecutor(1) as new:
        torch.get_num_threads()
        last = new.submit(torch.get_num_threads).result()
        list(pool.map(lambda _: started.wait(), range(workers)))  # so that all of them start
        new.submit(torch.set_num_threads, last).result()
    return pool


_random = RLock()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Leave torch's generator of random numbers on the CPU as it was; one thread at a time."""
    import torch

    with _random, torch.random.fork_rng(devices=[]):
        yield


def resolve_device(name: str | None = None) -> torch.device:
    """Return the device of this name, by default CUDA where there is a GPU; refuse others."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name not in ("cpu", *gpus, *(["cuda"] if gpus else [])):
        there = f"cpu, cuda, {', '.join(gpus)}" if gpus else "cpu alone: torch sees no CUDA GPU"
        raise UsageError(f"there is no device {shown(name)}; there is {there}")
    return torch.device(name)


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
            if extra is None:
                raise
            # Also where a package below names an extra: ours installs that too, and the rest.
            raise _missing(f"{package}.{name}", error.name or "", extra) from error

    return find


_STYLE: Any = {
    "svg.hashsalt": "proximetry",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


def draw_figure(paint: Callable[[Axes], None], kind: str = "svg") -> bytes:
    """Return a picture as SVG or PNG, the same bytes from the same numbers."""
    matplotlib = need("matplotlib", "glyphs", "Drawing pictures")
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        canvas = Figure(figsize=(6.4, 4.0), layout="constrained")
        paint(canvas.add_subplot())
        buffer = io.BytesIO()
        unsaid = {"svg": ("Date", "Creator"), "png": ("Software",)}[kind]
        canvas.savefig(buffer, format=kind, dpi=150, metadata=dict.fromkeys(unsaid))
    return buffer.getvalue()


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


# Vectors shorter than this have no direction: they count as zero and receive no gradient.
_SHORTEST = 1e-12

# Squares of numbers from 2⁶⁴ on are infinite in float32, and those below 2⁻⁷⁵ vanish. So vectors
# with largest entries beyond these limits are multiplied by a power of two: no digit changes. What
# then still is too short counts as zero: its gradient would overflow.
_LONG, _IF_LONG = 2.0**50, 2.0**-80
_SHORT, _IF_SHORT = 2.0**-38, 2.0**70


def inverse_length(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """1 / ‖v‖ over the last dimension, 0 for zero vectors; and ‖v‖ itself.

    Where ‖v‖ overflows the inverse is NaN: 0 would pass the vector off as a zero vector.
    """
    import torch

    length = torch.linalg.vector_norm(vectors, dim=-1)
    measured = length > _SHORTEST
    safe = torch.where(measured, length, torch.ones_like(length))
    inverse = torch.where(measured, safe.reciprocal(), torch.zeros_like(length))
    return inverse.masked_fill(torch.isinf(length), torch.nan), length


def rescale(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors, of a length that can be measured, and their factors [...]."""
    import torch

    largest = torch.linalg.vector_norm(vectors.detach(), torch.inf, dim=-1)
    # Filled on the device: numbers that were copied there would fit into no CUDA graph.
    factor = torch.ones_like(largest).masked_fill(largest < _SHORT, _IF_SHORT)
    factor = factor.masked_fill(largest > _LONG, _IF_LONG)
    return vectors * factor.unsqueeze(-1), factor


def unit(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors scaled to length one, and their lengths ([..., D] and [...]).

    A zero vector stays zero and its gradient is zero: finite whatever the precision, where
    dividing by a small constant would send gradients of 1e6 and more into half-precision layers.
    """
    rescaled, factor = rescale(vectors)
    inverse, length = inverse_length(rescaled)
    return rescaled * inverse.unsqueeze(-1), length / factor


def binary_codes(vectors: Tensor) -> Tensor:
    """Return packed codes [N, ⌈D / 8⌉], uint8, of vectors [N, D]: one bit per dimension.

    A bit is 1 where the entry is positive, so 0 where it is zero. The first dimension is the
    highest bit of the first byte, as in `numpy.packbits`; bits that fill up the last byte are 0.
    """
    import torch
    from torch.nn import functional as F

    bits = F.pad((vectors > 0).to(torch.uint8), (0, -vectors.shape[1] % 8))
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=vectors.device)
    bits = bits.reshape(len(bits), bits.shape[1] // 8, 8) << places
    return bits.sum(2, dtype=torch.uint8)


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
