"""Standard output and error that cannot stop a command."""

import errno
import io
import os
import sys
from typing import Any, TextIO

# The reader of a pipe has left, the stream was closed, the terminal is gone.
_NOBODY_THERE = (errno.EPIPE, errno.EBADF, errno.EIO)


class _Stream(io.RawIOBase):
    """Where output goes: what nobody reads any more is dropped, so that the work goes on."""

    def __init__(self, raw: Any, name: str) -> None:
        self._raw = raw
        self.name = name
        self._broken = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def isatty(self) -> bool:
        return bool(self._raw.isatty())

    def write(self, content: Any) -> int | None:
        if self._broken:
            return len(content)
        try:
            written: int | None = self._raw.write(content)
        except OSError as error:
            self._broken = True
            if error.errno in _NOBODY_THERE:
                return len(content)
            # A full disk: said once, and not again when Python ends.
            raise OSError(error.errno, error.strerror, self.name) from error
        return written


def open_streams() -> None:
    """Make standard output and error fit to be written to, whatever they are connected to.

    A stream that was closed is dropped, and so is what is written to a pipe whose reader has left.
    Characters that the encoding lacks are written as escapes.
    """
    for number in range(3):  # or the next file that is opened would get the number of a closed one
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _reopen(sys.stdout, 1, "standard output")
    sys.stderr = _reopen(sys.stderr, 2, "standard error")


def _reopen(stream: Any, number: int, name: str) -> TextIO:
    if stream is None:  # it was closed when Python began
        raw, buffered, settings = io.FileIO(number, "w", closefd=False), True, {}
    else:
        stream.flush()
        raw, buffered = getattr(stream.buffer, "raw", stream.buffer), not stream.write_through
        settings = {"line_buffering": stream.line_buffering, "write_through": not buffered}
    target: Any = _Stream(raw, name)
    encoding = getattr(stream, "encoding", "utf-8")
    if buffered:
        target = io.BufferedWriter(target)
    return io.TextIOWrapper(target, encoding, "backslashreplace", **settings)
