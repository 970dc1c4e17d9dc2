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
_PART = re.compile(r"\.proximetry-[0-9a-f]{32}-(.+)\.part", re.DOTALL)
# Errors of writing to an open file, which name no file.
_DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EROFS, getattr(errno, "EDQUOT", None))
CHECKSUM = "checksum"
"""Key of the checksum in JSON files."""
CHECKSUM_PLACEHOLDER = f"sha256:{64 * '0'}"
"""Placeholder of the checksum of a file within the file itself."""
_SEALED = re.compile(rb"sha256:[0-9a-f]{64}")
MAX_CACHE_BYTES, DISK_SHARE = 20_000_000_000, 1 / 5
"""Limits of all pixel caches together: bytes, and their share of the disk space they could use."""


def cache_folder() -> Path:
    """Return $PROXIMETRY_CACHE, else proximetry below $XDG_CACHE_HOME or ~/.cache."""
    if os.environ.get("PROXIMETRY_CACHE"):
        return Path(os.environ["PROXIMETRY_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proximetry"


class WriteError(OSError):
    """A file that could not be written, and why."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"


@contextmanager
def name_write_errors(file: Path) -> Iterator[None]:
    """Name the file in errors of writing to it: those of a full disk name none."""
    try:
        yield
    except OSError as error:
        named = error.filename
        if named is None and error.errno not in _DISK_ERRORS:
            raise  # of a network, for example
        if named is not None and named != str(file) and not final_name(Path(named)):
            raise  # it is about another file, which was read meanwhile
        raise WriteError(error.errno, error.strerror or str(error), str(file)) from error


@contextmanager
def atomic_path(file: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside the file; on success it replaces the file.

    The content is flushed before the rename, so a killed process or a power failure leaves either
    the old file or the new one. Without ``durable`` a power failure may damage the file.
    """
    # A name may have 255 bytes at most.
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
    match = _PART.fullmatch(path.name)
    return match[1] if match else ""


def atomic_write(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file atomically; see `atomic_path`."""
    with atomic_path(file, durable=durable) as part:
        part.write_bytes(content)


def with_checksum(content: bytes) -> bytes:
    """Replace the first `CHECKSUM_PLACEHOLDER` by the checksum of the content."""
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(CHECKSUM_PLACEHOLDER.encode(), f"sha256:{digest}".encode(), 1)


def has_valid_checksum(content: bytes) -> bool:
    """Return whether the content is unchanged since `with_checksum`."""
    seal = _SEALED.search(content)
    if seal is None:
        return False
    digest = hashlib.sha256(content[: seal.start()] + CHECKSUM_PLACEHOLDER.encode())
    digest.update(memoryview(content)[seal.end() :])
    return seal[0] == f"sha256:{digest.hexdigest()}".encode()


def json_with_checksum(
    content: Mapping[str, Any], plain: Callable[[Any], Any] | None = None
) -> bytes:
    """Return a JSON file with its checksum, for `read_json`; `plain` converts other values."""
    whole = {
        CHECKSUM: CHECKSUM_PLACEHOLDER,
        **content,
    }  # first, since only the first one is filled in
    text = json.dumps(whole, indent=2, ensure_ascii=False, default=plain) + "\n"
    # Names that come from file names need not be text; JSON has escapes for them.
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
            report(f"waiting up to {timeout:g} s for {_owner(file)}, at work in {file.parent}")
            lock.acquire(timeout=timeout)
        with suppress(OSError):  # Windows lets nobody write to it
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
    """Raise for a file that `atomic_path` could not write; leaves nothing behind."""
    try:
        if file.is_dir():
            raise UsageError(f"{file} is a folder; name a file in it")
        if not file.parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")
        if file.exists() and not file.is_file():  # a device or a pipe, which a rename would replace
            raise UsageError(f"{file} is no file that can be replaced; name another one")
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
            raise ValueError(f"{path} is larger than {readable_size(limit)}, too large to be right")
        return content.decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason} at {error.start}") from error


def read_json(path: Path, limit: int) -> Any:
    """Read a JSON file of at most `limit` bytes and verify its checksum, if it has one."""
    text = read_text(path, limit)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {shorten(str(error), 200)}") from error
    if isinstance(content, dict) and CHECKSUM in content and not has_valid_checksum(text.encode()):
        raise ValueError(f"{path} is damaged: it does not have the checksum it was saved with")
    return content


def check_format(path: Path, content: Any, name: str, version: int) -> dict[str, Any]:
    """Return the content of a JSON file; raise unless it has this format and version."""
    if not isinstance(content, dict) or content.get("format") != name:
        raise ValueError(f"{path} does not describe a {name}")
    if content.get("version") != version:
        raise ValueError(
            f"{path} has format version {format_value(content.get('version'))}, and Proximetry "
            f"{__version__} reads version {version}. Install the version that wrote it."
        )
    return content


def parse_json(text: str) -> Any:
    """Parse JSON; raise ValueError also for deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
