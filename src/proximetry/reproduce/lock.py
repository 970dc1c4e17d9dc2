"""One command at a time in a folder of results, also when an earlier one was killed.

The folder itself is locked: the command asks for it alone, then shares it with its workers. As
long as any of them lives, another command waits a little and then says so.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proximetry.reproduce.trouble import ReproduceError


@contextmanager
def alone(
    folder: Path, patience: float = 20.0, report: Callable[[str], None] = lambda line: None
) -> Iterator[None]:
    """Be the only command at work in a folder, after waiting for ``patience`` seconds at most."""
    with _opened(folder) as handle:
        begun = time.monotonic()
        told = False
        # Another command may slip in between the two: sharing it is not one step from having it.
        while not (try_lock(handle, shared=False) and try_lock(handle, shared=True)):
            if not told:
                report(f"waiting up to {patience:g} s for another command at work in {folder}")
                told = True
            if time.monotonic() > begun + patience:
                raise ReproduceError(
                    f"another command is at work in {folder}; wait for it, or use another --out"
                )
            time.sleep(0.1)
        yield


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Share the folder with the command that one works for."""
    with _opened(folder) as handle:
        try_lock(handle, shared=True)
        yield


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def try_lock(handle: int, shared: bool) -> bool:
    """Take the lock if it is free; file systems without locks count as free."""
    try:
        import fcntl
    except ModuleNotFoundError:  # not a POSIX system
        return True
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
