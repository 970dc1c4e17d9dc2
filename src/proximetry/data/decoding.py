"""Many image files decoded by all cores.

Some of Pillow's decoders (WebP's) keep all other threads of a process waiting. So each thread has
a process of its own to decode for it: a fresh Python that imports this file, not the user's script
and not torch, and that ends with its standard input, that is with whoever started it. It answers
with pixels, or puts them into memory that it shares with whoever asked.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import Progress
from proximetry._util.machine import cores
from proximetry.data.images import (
    ImageError,
    Interpolation,
    Size,
    check_header,
    open_image,
    resize_image,
)
from proximetry.data.shards import Member, read_member

Array: TypeAlias = npt.NDArray[np.uint8]
File: TypeAlias = "str | Member"


class Placed(NamedTuple):
    """Where in the shared memory an image was put."""

    offset: int
    height: int
    width: int


Decoded: TypeAlias = "Array | ImageError | Placed"
Here: TypeAlias = "partial[Array | ImageError]"

IMAGES_PER_PROCESS = 100  # fewer are decoded before another process has started
# With the same sys.path it finds the same proximetry and the same Pillow.
_SERVE = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from proximetry.data.decoding import serve
serve()"""


ENCODED = "JPEG 95"
"""How images are compressed again: WebP takes half the bytes, but four times as long to decode."""


def decode(
    file: File, size: Size, interpolation: Interpolation, encoded: bool = False
) -> Array | ImageError:
    """Return the scaled image [height, width, 3], or why there is none.

    An ``encoded`` one is [1, bytes] of a compressed file.
    """
    try:
        source = file if isinstance(file, str) else read_member(file)
        image = open_image(source, size=size)
        image = resize_image(image, size, interpolation)
    except ImageError as error:
        return error
    if not encoded:
        return np.asarray(image)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95, subsampling="4:4:4")
    return np.frombuffer(stream.getbuffer(), np.uint8)[None]


def check(file: str, size: Size, interpolation: Interpolation, whole: bool) -> ImageError | None:
    """Return why an image cannot be decoded, going by its header or by the whole file."""
    if whole:
        image = decode(file, size, interpolation)
        return image if isinstance(image, ImageError) else None
    try:
        check_header(file, size)
    except ImageError as error:
        return error
    return None


def decode_all(
    files: Sequence[str],
    size: Size,
    interpolation: Interpolation,
    progress: Progress | None = None,
    *,
    encoded: bool = False,
) -> Generator[Array | ImageError]:
    """Decode in order, with only a few images in memory at once; close it to end the processes."""
    here = partial(decode, size=size, interpolation=interpolation, encoded=encoded)
    with ExitStack() as stack:
        pool = DecodingPool(here, len(files))
        stack.callback(pool.close)
        waiting: deque[Future[list[Decoded]]] = deque()
        total, ahead = len(files), 4 * pool.workers
        for row in range(total + ahead):
            if row < total:
                waiting.append(pool.submit([files[row]]))
            if row >= ahead:
                (image,) = waiting.popleft().result()
                assert not isinstance(image, Placed)  # which nothing was shared for
                yield image
                if progress is not None:
                    progress(row - ahead + 1, total)


def check_all(
    files: Sequence[str],
    size: Size,
    interpolation: Interpolation,
    whole: bool,
    progress: Progress | None = None,
) -> Generator[tuple[int, ImageError]]:
    """Give number and reason of the files that cannot be decoded, by header or as a whole."""
    here = partial(decode, size=size, interpolation=interpolation)
    with ExitStack() as stack:
        pool = DecodingPool(here, len(files))
        stack.callback(pool.close)
        waiting: deque[tuple[int, Future[list[ImageError | None]]]] = deque()
        total, several = len(files), 64
        for start in range(0, total + 4 * pool.workers * several, several):
            if start < total:
                waiting.append((start, pool.check(files[start : start + several], whole)))
            if start >= 4 * pool.workers * several and waiting:
                first, future = waiting.popleft()
                for number, error in enumerate(future.result(), first):
                    if error is not None:
                        yield number, error
                if progress is not None:
                    progress(min(first + several, total), total)


class DecodingPool:
    """Threads that decode, each with a process of its own where there is enough to do.

    Of several processes that do alike, ``sharing`` the cores, each has its part of them.

    Attributes:
        workers: their number.
    """

    def __init__(
        self, here: Here, images: int, shared: SharedMemory | None = None, sharing: int = 1
    ) -> None:
        count = min(max(1, cores() // sharing), images // IMAGES_PER_PROCESS)
        # Inside another program (embedded, frozen) there may be no Python to start.
        possible = bool(sys.executable) and not hasattr(sys, "frozen")
        starts = possible and count >= (2 if sharing == 1 else 1)
        self.workers = count if starts else min(8, cores())
        self._decoders = [DecodingProcess(here, shared, starts=starts) for _ in range(self.workers)]
        self._idle: SimpleQueue[DecodingProcess] = SimpleQueue()
        for decoder in self._decoders:
            self._idle.put(decoder)
        self._threads = ThreadPoolExecutor(self.workers)

    def submit(self, files: Sequence[File], at: int = 0, room: int = 0) -> Future[list[Decoded]]:
        """Decode files in order, into ``room`` bytes of the shared memory as far as they fit."""
        return self._threads.submit(self._job, files, at, room)

    def check(self, files: Sequence[str], whole: bool) -> Future[list[ImageError | None]]:
        """Find out which files cannot be decoded."""
        return self._threads.submit(self._check, files, whole)

    def _job(self, files: Sequence[File], at: int, room: int) -> list[Decoded]:
        decoder = self._idle.get()
        try:
            return decoder.decode(files, at, room)
        finally:
            self._idle.put(decoder)

    def _check(self, files: Sequence[str], whole: bool) -> list[ImageError | None]:
        decoder = self._idle.get()
        try:
            return decoder.check(files, whole)
        finally:
            self._idle.put(decoder)

    def close(self) -> None:
        """End what is being decoded, and the processes."""
        self._threads.shutdown(cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()


class DecodingProcess:
    """A process that decodes for one thread; what it cannot do the thread does itself.

    The second try gives an image that cannot be read its reason, and knows formats that only
    this process has plugins for.
    """

    def __init__(
        self, here: Here, shared: SharedMemory | None = None, *, starts: bool = True
    ) -> None:
        self._here = here
        files = [] if shared is None else [shared.file]
        self._process: subprocess.Popen[bytes] | None = None
        if not starts:
            return
        settings = [json.dumps(value) for value in ([*map(str, sys.path)], here.keywords)]
        try:
            self._process = subprocess.Popen(
                # -P: files in the current directory must not stand in for modules.
                [sys.executable, "-P", "-c", _SERVE, *settings, *map(str, files)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what goes wrong there is tried again here
                process_group=0,  # Ctrl-C is for the process that started it
                pass_fds=files,
            )
        except OSError as error:
            _warn(f"could not be started ({error})")

    def decode(self, files: Sequence[File], at: int = 0, room: int = 0) -> list[Decoded]:
        """Decode in the process; where it fails or has ended, in this thread."""
        images = self._ask(files, [files, at, room])
        return [
            self._here(file) if image is None else image
            for file, image in zip(files, images, strict=True)
        ]

    def check(self, files: Sequence[str], whole: bool) -> list[ImageError | None]:
        """Find out, in the same way, why files cannot be decoded."""
        images = self._ask(files, [files, whole])
        return [
            check(file, **self._here.keywords, whole=whole) if image is None else None
            for file, image in zip(files, images, strict=True)
        ]

    def _ask(self, files: Sequence[File], request: list[Any]) -> Sequence[Decoded | None]:
        if self._process is not None:
            try:
                return _ask(self._process, request)
            except (OSError, ValueError):  # it has ended, perhaps in the middle of an answer
                _warn(f"ended with status {self.close()}")
        return [None] * len(files)

    def close(self) -> int | None:
        """End the process, which has nothing to lose; return its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with suppress(OSError), process:  # closes the pipes and waits
            pass
        return process.returncode


def _ask(process: subprocess.Popen[bytes], request: list[Any]) -> list[Decoded | None]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    images: list[Decoded | None] = []
    for place in json.loads(process.stdout.readline()):
        if place is None or place[0] is not None:
            images.append(place and Placed(*place))
        else:
            pixels = process.stdout.read(math.prod(place[1:]))
            images.append(np.frombuffer(pixels, np.uint8).reshape(place[1:]))
    return images


def _warn(what: str) -> None:
    warnings.warn(
        f"a process that decodes images {what}; its images are decoded without it, which is slower",
        stacklevel=2,
    )


def serve() -> None:
    """Answer each line of standard input: names of files, and where to put their pixels.

    The answer is a line with the places in the shared memory, null for an image that cannot be
    read; then the pixels of those that did not fit, whose place has no offset. Without a place to
    put them, the files are checked alone, as a whole or by their headers.
    """
    settings = json.loads(sys.argv[2])
    shared = np.empty(0, np.uint8)
    if sys.argv[3:]:
        shared = np.frombuffer(mmap.mmap(int(sys.argv[3]), 0), np.uint8)
    answers = sys.stdout.buffer
    for line in sys.stdin.buffer:
        files, *how = json.loads(line)
        rest: list[Array] = []
        if len(how) == 1:
            errors = (check(file, **settings, whole=how[0]) for file in files)
            places = [(0, 0, 0) if error is None else None for error in errors]
        else:
            at, room = how
            places = _place(files, at, room, settings, shared, rest)
        answers.write(json.dumps(places).encode() + b"\n")
        for image in rest:
            answers.write(image.data)
        answers.flush()


def _place(
    files: list[Any],
    at: int,
    room: int,
    settings: dict[str, Any],
    shared: Array,
    rest: list[Array],
) -> list[Any]:
    """Decode files into the shared memory, and those that do not fit into the ``rest``."""
    places: list[Any] = []
    end = at + room
    for file in files:
        image = decode(file if isinstance(file, str) else Member(*file), **settings)
        if isinstance(image, ImageError):
            places.append(None)
        elif at + image.size > end:
            places.append((None, *image.shape))
            rest.append(image)
        else:
            shared[at : at + image.size] = image.ravel()
            places.append((at, *image.shape[:2]))
            at += image.size
    return places


class SharedMemory:
    """Bytes that processes started from here see too.

    Attributes:
        file: the number of the open file that stands for them.
        array: the bytes.
    """

    def __init__(self, size: int) -> None:
        # Not under /dev/shm, which containers keep small.
        self.file = os.memfd_create("proximetry pixels")
        os.truncate(self.file, size)
        self.array: Array = np.frombuffer(mmap.mmap(self.file, size), np.uint8)

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has it."""
        return hasattr(os, "memfd_create")

    def __del__(self) -> None:
        # The memory itself is freed with the last array that shows it.
        os.close(self.file)
