"""The image loader of training, evaluation, embedding and indexing.

Forked worker processes decode and resize image files ahead of their use. Forking next to CUDA and
threads is safe, because workers run Pillow only. Threads decode small sets of images, and all
images on systems other than Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from proximetry._util.machine import cores
from proximetry.data.catalog import Catalog
from proximetry.data.images import ImageError, Interpolation, Size, open_image, resize_image

Array: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.int64]
Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_IMAGES = 64  # fewer are decoded by threads, which start sooner than processes
_CHUNK = 8  # images per message to a worker
_POLL_SECONDS = 0.5
_forking = threading.Lock()


def decode(file: str, size: Size, interpolation: Interpolation) -> Array | ImageError:
    """Return the resized image [height, width, 3], or the error if it cannot be read."""
    try:
        return np.asarray(resize_image(open_image(file, size=size), size, interpolation))
    except ImageError as error:
        return error


class Pixels:
    """RGB bytes of images of any size.

    Attributes:
        flat: the pixels of all images, uint8.
        index: offset in `flat`, height and width of each image, the columns of which are
            `offsets`, `heights` and `widths`.
    """

    def __init__(self, flat: torch.Tensor, index: npt.NDArray[np.int64]) -> None:
        self.flat, self.index = flat, index
        self.offsets, self.heights, self.widths = index.T

    @staticmethod
    def concatenate(images: Sequence[Array]) -> Pixels:
        """Copy H×W×3 uint8 arrays."""
        sizes = np.array([image.shape[:2] for image in images], dtype=np.int64).reshape(-1, 2)
        lengths = 3 * sizes.prod(1)
        flat = np.concatenate([np.empty(0, np.uint8), *(image.ravel() for image in images)])
        index = np.column_stack([np.cumsum(lengths) - lengths, sizes])
        return Pixels(torch.from_numpy(flat), index)

    def __len__(self) -> int:
        return len(self.index)

    def tensor(self, i: int) -> torch.Tensor:
        """Return one image as an H×W×3 view on the device of the pixels; do not write to it."""
        offset, height, width = self.index[i].tolist()
        return self.flat[offset : offset + height * width * 3].view(height, width, 3)

    def gather(self, rows: Rows) -> Pixels:
        """Return a copy of some images."""
        return Pixels.concatenate([self.tensor(row).numpy() for row in rows.tolist()])

    def send(self, device: torch.device) -> Pixels:
        """Return the same images with the pixels on a GPU, without waiting for the copy."""
        flat = self.flat if self.flat.is_pinned() else self.flat.pin_memory()
        return Pixels(flat.to(device, non_blocking=True), self.index)


class ImageLoader:
    """Images of a catalog as RGB bytes, decoded and resized on the fly.

    Args:
        catalog: the images.
        size: short side after resizing, or height and width.
        interpolation: "bicubic" or "bilinear".
        batch_size: largest batch; two of them are prefetched.
        processes: processes on this machine that share its cores.
    """

    def __init__(
        self,
        catalog: Catalog,
        size: Size,
        interpolation: Interpolation,
        *,
        batch_size: int,
        processes: int = 1,
    ) -> None:
        self._catalog, self._options = catalog, {"prefetch": 2 * batch_size, "processes": processes}
        self._decode = partial(decode, size=size, interpolation=interpolation)

    def batches(self, rows: Iterable[Rows]) -> Generator[Pixels]:
        """Yield the images of each list of rows, in order.

        Raises:
            ImageError: an image cannot be read.
        """
        sizes: deque[int] = deque()

        def files() -> Iterator[str]:
            for batch in rows:
                sizes.append(len(batch))
                yield from map(self._catalog.file, batch.tolist())

        loaded = parallel_map(self._decode, files(), **self._options)
        with closing(loaded):
            images: list[Array] = []
            for image in loaded:
                if isinstance(image, ImageError):
                    raise image
                images.append(image)
                if len(images) == sizes[0]:
                    yield Pixels.concatenate(images)
                    sizes.popleft()
                    images = []


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    prefetch: int = MIN_IMAGES,
    processes: int = 1,
) -> Generator[Result]:
    """Yield ``function(item)`` for each item, in order, computed ahead by worker processes.

    Args:
        function: returns arrays or errors, no tensors.
        items: file names; other items are processed by threads.
        prefetch: number of items to compute ahead.
        processes: processes on this machine that share its cores.
    """
    items = iter(items)
    head = list(islice(items, MIN_IMAGES))
    count = max(1, cores() // processes)
    files = all(isinstance(item, str | os.PathLike) for item in head)
    if len(head) < MIN_IMAGES or not files or sys.platform != "linux":
        yield from _map_in_threads(function, chain(head, items), min(8, count), prefetch)
        return
    with closing(_Workers(function, count)) as workers:
        ahead = max(2 * count, -(-prefetch // _CHUNK))
        parts = _chunked(chain(head, items))
        with closing(_map_in_threads(workers.apply, parts, count, ahead)) as results:
            for result in results:
                yield from result


def _chunked(items: Iterator[Item]) -> Iterator[list[Item]]:
    while chunk := list(islice(items, _CHUNK)):
        yield chunk


def _map_in_threads(
    function: Callable[[Item], Result], items: Iterator[Item], threads: int, prefetch: int
) -> Generator[Result]:
    pool = ThreadPoolExecutor(threads)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > prefetch:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Workers(Generic[Item, Result]):
    """Forked processes that apply a function to lists of items, each for one thread at a time.

    The main process keeps no copy of a worker's end of its connection, so that reading from a
    worker that was killed ends, even in the middle of a message.
    """

    def __init__(self, function: Callable[[Item], Result], count: int) -> None:
        self._function = function
        self._idle: SimpleQueue[Connection | None] = SimpleQueue()  # None: was killed
        fork, self._processes = multiprocessing.get_context("fork"), []
        try:
            with _forking, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of threads
                for _ in range(count):
                    ours, theirs = multiprocessing.Pipe()
                    arguments = function, theirs, os.getpid()
                    process = fork.Process(target=_work, args=arguments, daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._idle.put(ours)
        except BaseException:
            self.close()
            raise

    def apply(self, items: list[Item]) -> list[Result]:
        """Return ``function(item)`` for each item, from an idle worker if it is alive."""
        connection, answer = self._idle.get(), None
        try:
            if connection is not None:
                connection.send(items)
                answer = connection.recv()
        except (EOFError, OSError):
            connection = None
            message = "a worker process was killed; image decoding continues in threads"
            warnings.warn(f"{message}, which is slower", stacklevel=1)
        finally:
            self._idle.put(connection)
        if answer is None:
            return [self._function(item) for item in items]
        if isinstance(answer, Exception):
            raise answer
        return cast(list[Result], answer)

    def close(self) -> None:
        """End the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _work(function: Callable[[Any], Any], connection: Connection, parent: int) -> None:
    """Apply a function to the lists of items that arrive, while the parent process lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        items = connection.recv()
        try:
            connection.send([function(item) for item in items])
        except Exception as error:
            error.add_note(traceback.format_exc())
            connection.send(error)
