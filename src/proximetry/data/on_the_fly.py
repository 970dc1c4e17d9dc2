"""Images decoded when they are asked for, some batches ahead, by processes of their own.

The bytes are those of the pixel cache: the same function decodes and scales the files. A batch lies
in one slot of a memory that is shared with the decoding processes, so its pixels are copied once,
by whoever decodes them; a slot is used again when its batch has been given back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from proximetry._util.machine import cores
from proximetry._util.tensors import chunks
from proximetry.data.cache import Pixels
from proximetry.data.catalog import Catalog
from proximetry.data.decoding import (
    Array,
    Decoded,
    DecodingPool,
    File,
    Placed,
    SharedMemory,
    decode,
)
from proximetry.data.images import ImageError, Interpolation, Size
from proximetry.data.shards import Member, shard_members, split_shard_path

Rows = npt.NDArray[np.int64]
Members = tuple[list[str], npt.NDArray[np.int64]]

_AT_ONCE = 8  # images to a message: enough that talking costs nothing
_AHEAD = 4  # messages for each process, so that none waits for the slowest of a batch
_SHAPE = 1.75  # longer over shorter side that there is room for; what is longer comes by a pipe


class DecodedBatch(Pixels):
    """The images of one batch, which are there until it is given back, or nobody has it any more.

    Attributes:
        give_back: let its memory be used again; once is enough.
    """

    def __init__(
        self, flat: torch.Tensor, index: npt.NDArray[np.int64], give_back: Callable[[], None]
    ) -> None:
        super().__init__(flat, index)
        self.give_back = weakref.finalize(self, give_back)


class OnTheFly:
    """Images of a catalogue as RGB bytes, all scaled alike, without a cache.

    Args:
        catalog: the images.
        size: pixels of the shorter side after scaling, or of height and width.
        interpolation: "bicubic" or "bilinear".
        largest: images in a batch at most.
        device: where the pixels will be sent to, for which memory is pinned.
        held: batches that are not given back at once.
        members: files that hold the images, and [file, offset, size] of each; else those of the
            shards that the catalogue names.
        sharing: processes on this machine that decode alike.
    """

    def __init__(
        self,
        catalog: Catalog,
        size: Size,
        interpolation: Interpolation,
        *,
        largest: int,
        device: torch.device | None = None,
        held: int = 1,
        members: Members | None = None,
        sharing: int = 1,
    ) -> None:
        self._catalog, self._largest, self._sharing = catalog, largest, sharing
        self._decode = partial(decode, size=size, interpolation=interpolation)
        self._members = _shard_places(catalog) if members is None else members
        pixels = size**2 * _SHAPE if isinstance(size, int) else size[0] * size[1]
        self._room = round(3 * pixels)  # bytes to an image
        self._pins, self._held = device is not None and device.type == "cuda", held
        self._started: _Slots | None = None

    def start(self) -> _Slots:
        """Start the processes, unless they are there; memory is pinned by the calling thread."""
        if self._started is None:
            size = self._room * self._largest
            pool = partial(DecodingPool, self._decode, len(self._catalog), sharing=self._sharing)
            self._started = _Slots(pool, self._largest, size, self._held)
            if self._pins:
                self._started.pin()
        return self._started

    def close(self) -> None:
        """End the processes; the next images start them again."""
        if self._started is not None:
            self._started.close()
            self._started = None

    def batches(self, wanted: Iterable[Rows]) -> Generator[DecodedBatch]:
        """Give the images of each list of rows, in order, while the next ones are decoded.

        Raises:
            ImageError: an image cannot be read.
        """
        slots, orders = self.start(), iter(wanted)
        waiting: deque[tuple[Rows, int, list[Future[list[Decoded]]]]] = deque()
        try:
            for rows in orders:
                slot = slots.take(waits=not waiting)
                while slot is None:
                    yield self._gather(slots, *waiting.popleft())
                    slot = slots.take(waits=not waiting)
                waiting.append((rows, slot, self._submit(slots, slot, rows)))
                if len(waiting) > slots.ahead:
                    yield self._gather(slots, *waiting.popleft())
            while waiting:
                yield self._gather(slots, *waiting.popleft())
        finally:
            for _, slot, futures in waiting:  # nobody wants them any more
                for future in futures:
                    future.cancel()
                wait(futures)
                slots.free.put(slot)

    def _submit(self, slots: _Slots, slot: int, rows: Rows) -> list[Future[list[Decoded]]]:
        size = self._room if slots.shared is not None else 0
        start = slot * slots.size
        return [
            slots.pool.submit(
                [self._file(row) for row in rows[part].tolist()],
                start + part.start * size,
                (part.stop - part.start) * size,
            )
            for part in chunks(len(rows), _AT_ONCE)
        ]

    def _file(self, row: int) -> File:
        if self._members is None:
            return self._catalog.file(row)
        number, offset, size = self._members[1][row].tolist()
        if size < 0:
            return self._catalog.file(row)
        return Member(self._members[0][number], offset, size)

    def _gather(
        self, slots: _Slots, rows: Rows, slot: int, futures: list[Future[list[Decoded]]]
    ) -> DecodedBatch:
        """Wait for the images of a batch and say where they lie."""
        images = [image for future in futures for image in future.result()]
        start = slot * slots.size
        flat = slots.flat[start : start + slots.size]
        more: list[Array] = []
        index, end = np.empty((len(images), 3), np.int64), len(flat)
        for number, (row, image) in enumerate(zip(rows.tolist(), images, strict=True)):
            if isinstance(image, ImageError):
                # The file itself gives the reason, or has come back since.
                image = self._decode(self._catalog.file(row))
            if isinstance(image, ImageError):
                slots.free.put(slot)
                raise image
            if isinstance(image, Placed):
                index[number] = image.offset - start, image.height, image.width
            else:
                more.append(image.reshape(-1))
                index[number] = end, *image.shape[:2]
                end += image.size
        if len(more) == len(images):  # nothing is shared
            index[:, 0] -= len(flat)
            flat = torch.from_numpy(np.concatenate(more))
        elif more:
            flat = torch.from_numpy(np.concatenate([flat.numpy(), *more]))
        else:
            flat = flat[: int((index[:, 0] + 3 * index[:, 1] * index[:, 2]).max(initial=0))]
        return DecodedBatch(flat, index, partial(slots.free.put, slot))


class _Slots:
    """Decoding processes and the memory they put batches into.

    Attributes:
        ahead: batches that are decoded while one is made use of.
        size: bytes of a slot.
        free: the slots that no batch lies in.
    """

    def __init__(
        self, pool: Callable[..., DecodingPool], largest: int, size: int, held: int
    ) -> None:
        self.size = size
        self.ahead = 1 + -(-_AHEAD * _AT_ONCE * cores() // largest)
        self.free: SimpleQueue[int] = SimpleQueue()
        count = self.ahead + 1 + held
        for slot in range(count):
            self.free.put(slot)
        self.shared = SharedMemory(count * size) if SharedMemory.is_possible() else None
        self.flat = torch.empty(0, dtype=torch.uint8)
        if self.shared is not None:
            self.flat = torch.from_numpy(self.shared.array)
        self.pool = pool(shared=self.shared)
        self._end = weakref.finalize(self, self.pool.close)

    def take(self, *, waits: bool) -> int | None:
        """Return a slot that is free, or None where there is none."""
        try:
            return self.free.get(block=waits)
        except Empty:
            return None

    def pin(self) -> None:
        """Let the GPU read the memory by itself; where it may not, pixels are copied once more."""
        if self.shared is None:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(self.flat.data_ptr(), self.flat.nbytes, 0)) == 0:
            self._end.detach()
            self._end = weakref.finalize(self, partial(_unpin, self.pool, self.flat))

    def close(self) -> None:
        """End the processes."""
        self._end()


def _unpin(pool: DecodingPool, flat: torch.Tensor) -> None:
    pool.close()
    torch.cuda.synchronize()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(flat.data_ptr())


def _shard_places(catalog: Catalog) -> Members | None:
    """Return the shards, and [shard, offset, size] of each image; None where there are none.

    So no process has to read the headers of a shard again, nor to remember its members. An image
    that is a file of its own has no size.
    """
    if not any(".tar::" in path for path in catalog.paths):
        return None
    shards: dict[str, int] = {}
    places = np.full((len(catalog), 3), -1, np.int64)
    last = ""
    members: Mapping[str, tuple[int, int]] = {}
    for row in range(len(catalog)):
        shard, member = split_shard_path(catalog.file(row))
        if not member:
            continue
        if shard != last:  # images of a shard stand together
            last = shard
            try:
                members = shard_members(shard)
            except (OSError, ValueError):
                members = {}  # whoever opens the image says why
        if member in members:
            places[row] = shards.setdefault(shard, len(shards)), *members[member]
    return list(shards), places
