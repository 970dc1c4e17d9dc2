"""Many image files decoded in order by all cores.

Some of Pillow's decoders (WebP's) keep all other threads of a process waiting. So each thread has
a process of its own to decode for it: a fresh Python that imports this file, not the user's script
and not torch, and that ends with its standard input, that is with whoever started it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from proximetry._common import Progress, cores
from proximetry.data.images import ImageError, Interpolation, open_image, resize_short_side

Array: TypeAlias = npt.NDArray[np.uint8]
Decoder: TypeAlias = "Callable[[str], Array | ImageError]"

IMAGES_PER_PROCESS = 100  # fewer are decoded before another process has started
# With the same sys.path it finds the same proximetry and the same Pillow.
_SERVE = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from proximetry.data.decoding import serve
serve()"""


def decode(file: str, short_side: int, interpolation: Interpolation) -> Array | ImageError:
    """Return the scaled image, or why there is none."""
    try:
        return np.asarray(resize_short_side(open_image(file), short_side, interpolation))
    except ImageError as error:
        return error


def decode_all(
    files: Sequence[str],
    short_side: int,
    interpolation: Interpolation,
    progress: Progress | None = None,
) -> Generator[Array | ImageError]:
    """Decode in order, with only a few images in memory at once; close it to end the processes."""
    here = partial(decode, short_side=short_side, interpolation=interpolation)
    with ExitStack() as stack:
        decoders = _decoders(here, len(files), stack)
        idle: SimpleQueue[Decoder] = SimpleQueue()
        for decoder in decoders:
            idle.put(decoder)

        def job(file: str) -> Array | ImageError:
            decoder = idle.get()
            try:
                return decoder(file)
            finally:
                idle.put(decoder)

        pool = ThreadPoolExecutor(len(decoders))
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[Future[Array | ImageError]] = deque()
        total, ahead = len(files), 4 * len(decoders)
        for row in range(total + ahead):
            if row < total:
                waiting.append(pool.submit(job, files[row]))
            if row >= ahead:
                yield waiting.popleft().result()
                if progress is not None:
                    progress(row - ahead + 1, total)


def _decoders(here: partial[Array | ImageError], total: int, stack: ExitStack) -> list[Decoder]:
    """Return what each thread decodes with; the stack ends the processes."""
    count = min(cores(), total // IMAGES_PER_PROCESS)
    # Inside another program (embedded, frozen) there may be no Python to start.
    if count < 2 or not sys.executable or hasattr(sys, "frozen"):
        return [here] * min(8, cores())
    processes = [DecodingProcess(here) for _ in range(count)]
    for process in processes:
        stack.callback(process.close)
    return [process.decode for process in processes]


class DecodingProcess:
    """A process that decodes for one thread; what it cannot do the thread does itself.

    The second try gives an image that cannot be read its reason, and knows formats that only
    this process has plugins for.
    """

    def __init__(self, here: partial[Array | ImageError]) -> None:
        self._here = here
        self._process: subprocess.Popen[bytes] | None = None
        settings = [json.dumps(value) for value in ([*map(str, sys.path)], here.keywords)]
        try:
            self._process = subprocess.Popen(
                # -P: files in the current directory must not stand in for modules.
                [sys.executable, "-P", "-c", _SERVE, *settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what goes wrong there is tried again here
                process_group=0,  # Ctrl-C is for the process that started it
            )
        except OSError as error:
            _warn(f"could not be started ({error})")

    def decode(self, file: str) -> Array | ImageError:
        """Decode in the process; where it fails or has ended, in this thread."""
        image = None
        if self._process is not None:
            try:
                image = _ask(self._process, file)
            except (OSError, ValueError):  # it has ended, perhaps in the middle of an answer
                _warn(f"ended with status {self.close()}")
        return self._here(file) if image is None else image

    def close(self) -> int | None:
        """End the process, which has nothing to lose; return its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with suppress(OSError), process:  # closes the pipes and waits
            pass
        return process.returncode


def _ask(process: subprocess.Popen[bytes], file: str) -> Array | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(file).encode() + b"\n")
    process.stdin.flush()
    shape = json.loads(process.stdout.readline())
    if shape is None:
        return None
    pixels = process.stdout.read(math.prod(shape))
    return np.frombuffer(pixels, np.uint8).reshape(shape)


def _warn(what: str) -> None:
    warnings.warn(
        f"a process that decodes images {what}; its images are decoded without it, which is slower",
        stacklevel=2,
    )


def serve() -> None:
    """Answer each line of standard input, a file name, with the shape of the image and its pixels.

    The shape is null where there is none.
    """
    settings = json.loads(sys.argv[2])
    answers = sys.stdout.buffer
    for line in sys.stdin.buffer:
        image = decode(json.loads(line), **settings)
        if isinstance(image, ImageError):
            answers.write(b"null\n")
        else:
            answers.write(json.dumps(image.shape).encode() + b"\n")
            answers.write(image.data)
        answers.flush()
