"""Atomic writes, checksums, locks and JSON files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value, readable_size, shorten

if TYPE_CHECKING:
    from filelock import BaseFileLock

PART_SUFFIX = ".part"
"""Suffix of files that are still being written."""
_PART_NAME = re.compile(r"\.proximetry-[0-9a-f]{32}-(.+)\.part", re.DOTALL)
# Errors of writing to an open file; they do not include its name.
_DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EROFS, getattr(errno, "EDQUOT", None))
CHECKSUM = "checksum"
"""Key of the checksum in JSON files."""
CHECKSUM_PLACEHOLDER = f"sha256:{64 * '0'}"
"""Placeholder of the checksum of a file within the file itself."""
_CHECKSUM_VALUE = re.compile(rb"sha256:[0-9a-f]{64}")
MAX_CACHE_BYTES, DISK_SHARE = 20_000_000_000, 1 / 5
"""Limits of all pixel caches together: size, and share of the disk space available to them."""


def size_and_mtime(path: Path) -> tuple[int, float]:
    """Return the bytes of a file or folder and its last modification, 0.0 if it is empty."""
    states = []
    for file in (path, *path.rglob("*")):
        with suppress(OSError):  # removed meanwhile
            if file.is_file():
                states.append(file.lstat())
    last_written = max((state.st_mtime for state in states), default=0.0)
    return sum(state.st_size for state in states), last_written


def cache_folder() -> Path:
    """Return $PROXIMETRY_CACHE, else proximetry below $XDG_CACHE_HOME or ~/.cache."""
    if os.environ.get("PROXIMETRY_CACHE"):
        return Path(os.environ["PROXIMETRY_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proximetry"


class WriteError(OSError):
    """A file cannot be written."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"


@contextmanager
def name_write_errors(file: Path) -> Iterator[None]:
    """Add the file name to write errors; disk-full errors do not include it."""
    try:
        yield
    except OSError as error:
        name = error.filename
        if name is None and error.errno not in _DISK_ERRORS:
            raise  # not a disk error
        if name is not None and name != str(file) and not final_name(Path(name)):
            raise  # another file failed to be read
        raise WriteError(error.errno, error.strerror or str(error), str(file)) from error


@contextmanager
def atomic_path(file: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside the file; on success it replaces the file.

    The content is flushed before the rename, so a killed process or a power failure leaves either
    the old file or the new one. Without ``durable`` a power failure may damage the file.
    """
    # File names are limited to 255 bytes.
    part = file.with_name(f".proximetry-{uuid4().hex}-{file.name[-40:]}{PART_SUFFIX}")
    try:
        with name_write_errors(file):
            yield part
            if durable:
                with part.open("rb+") as stream:
                    os.fsync(stream.fileno())
            os.replace(part, file)
        if durable:
            sync_folder(file.parent)
    finally:
        with suppress(OSError):  # renamed, or never created
            part.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk; some network file systems do not support it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def final_name(path: Path) -> str:
    """Return the final name of a temporary file of `atomic_path`, "" for any other file."""
    match = _PART_NAME.fullmatch(path.name)
    return match[1] if match else ""


def atomic_write(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file atomically; see `atomic_path`."""
    with atomic_path(file, durable=durable) as part:
        part.write_bytes(content)


def with_checksum(content: bytes) -> bytes:
    """Replace the first `CHECKSUM_PLACEHOLDER` with the checksum of the content."""
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(CHECKSUM_PLACEHOLDER.encode(), f"sha256:{digest}".encode(), 1)


def has_valid_checksum(content: bytes) -> bool:
    """Return whether the content is unchanged since `with_checksum`."""
    match = _CHECKSUM_VALUE.search(content)
    if match is None:
        return False
    digest = hashlib.sha256(content[: match.start()] + CHECKSUM_PLACEHOLDER.encode())
    digest.update(memoryview(content)[match.end() :])
    return match[0] == f"sha256:{digest.hexdigest()}".encode()


def json_with_checksum(
    content: Mapping[str, Any], convert: Callable[[Any], Any] | None = None
) -> bytes:
    """Return a JSON file with its checksum, for `read_json`; `convert` is for non-JSON values."""
    content = {CHECKSUM: CHECKSUM_PLACEHOLDER, **content}  # `with_checksum` replaces the first
    text = json.dumps(content, indent=2, ensure_ascii=False, default=convert) + "\n"
    # File names may not be UTF-8; JSON has escapes for them.
    return with_checksum(text.encode(errors="backslashreplace"))


def acquire_lock(file: Path, timeout: float, report: Callable[[str], None]) -> BaseFileLock:
    """Acquire an exclusive lock, waiting up to ``timeout`` seconds for another process.

    The system releases the locks of a killed process. A TimeoutError names the owner.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"waiting up to {timeout:g} s for {_owner(file)}, which uses {file.parent}")
            lock.acquire(timeout=timeout)
        with suppress(OSError):  # Windows forbids writing to a locked file
            file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
    except Timeout:
        raise TimeoutError(_owner(file)) from None
    except NotImplementedError:
        pass  # a file system without locks
    return lock


def _owner(lock: Path) -> str:
    with suppress(OSError, ValueError):
        pid, host, *_ = lock.read_text(encoding="utf-8").split()
        return f"process {int(pid)} on {host}"
    return "another process"


def check_writable(file: Path) -> None:
    """Raise unless `atomic_path` can write a file, without creating it."""
    try:
        if file.is_dir():
            raise UsageError(f"{file} is a folder. Pass the path of a file.")
        if not file.parent.is_dir():
            raise UsageError(f"{file}: there is no folder {file.parent}. Create it.")
        if file.exists() and not file.is_file():  # a device or a pipe, which a rename would replace
            raise UsageError(f"{file} is a device or a pipe. Pass the path of a file.")
        with TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


def read_text(path: Path, limit: int) -> str:
    """Read a UTF-8 file of at most `limit` bytes; raise ValueError with its path."""
    try:
        if path.is_fifo():
            raise ValueError(f"a pipe instead of a file: {path}. Save its content to a file.")
        with path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"{path} is too large: over {readable_size(limit)}")
        return content.decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error


def read_json(path: Path, limit: int) -> Any:
    """Read a JSON file of at most `limit` bytes and verify its checksum, if it has one."""
    text = read_text(path, limit)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {shorten(str(error), 200)}") from error
    if isinstance(content, dict) and CHECKSUM in content and not has_valid_checksum(text.encode()):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    return content


def check_format(path: Path, content: Any, name: str, version: int) -> dict[str, Any]:
    """Return the content of a JSON file; raise unless it has this format and version."""
    if not isinstance(content, dict) or content.get("format") != name:
        raise ValueError(f"{path} does not describe a {name}")
    if content.get("version") != version:
        raise ValueError(
            f"{path} has format version {format_value(content.get('version'))}, but Proximetry "
            f"{__version__} reads version {version}. Install the version that wrote it."
        )
    return content


def parse_json(text: str) -> Any:
    """Parse JSON; also raise a ValueError for deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
