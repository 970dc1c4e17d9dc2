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
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from proximetry._util.errors import UsageError, readable_size, shorten, shown

if TYPE_CHECKING:
    from filelock import BaseFileLock


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
