"""Samplers: the images of each batch, as a function of the seed, the epoch and the batch's number.

Any batch can be computed at any time, so each process takes its slice of the same global batch, and
a run resumes where it stopped.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_SHUFFLE, _CLASSES, _IMAGES, _RUNS, _BUFFER = range(5)  # streams of random numbers of a seed
_MAX_CACHED_CLASSES = 1 << 16


class _BatchSampler(ABC):
    """Iterating gives the batches of `epoch`; for torch, DataLoader(…, batch_sampler=this)."""

    def __init__(self, batch_size: int, batches: int, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self._batches = batches

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._batches

    def __iter__(self) -> Iterator[Indices]:
        epoch = self.epoch
        return (self.batch(epoch, number) for number in range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over, as with torch's DistributedSampler."""
        self.epoch = epoch

    @abstractmethod
    def batch(self, epoch: int, number: int) -> Indices:
        """Return the images of one batch."""


class ShuffledSampler(_BatchSampler):
    """Every image once per epoch, in an order drawn from (seed, epoch).

    Args:
        n: number of images.
        batch_size: images per batch, over all processes.
        drop_last: drop the last incomplete batch.
        seed: seed of the order.

    Examples:
        >>> sampler = ShuffledSampler(10, batch_size=4)
        >>> [len(batch) for batch in sampler]
        [4, 4]
    """

    def __init__(self, n: int, batch_size: int, *, drop_last: bool = True, seed: int = 0) -> None:
        if n < 1 or batch_size < 1:
            raise ValueError(f"n and batch_size must be positive, got {n} and {batch_size}")
        if drop_last and n < batch_size:
            raise ValueError(
                f"{n} images do not fill one batch of {batch_size}. "
                "Use a smaller batch_size or drop_last=False."
            )
        super().__init__(batch_size, n // batch_size if drop_last else -(-n // batch_size), seed)
        self.n = n
        self._order: tuple[int, Indices] | None = None

    def batch(self, epoch: int, number: int) -> Indices:
        """Return the images of one batch."""
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self.seed, _SHUFFLE, epoch])
            self._order = (epoch, rng.permutation(self.n))
        start = number * self.batch_size
        return self._order[1][start : start + self.batch_size]


class StreamedSampler(ShuffledSampler):
    """Every image once per epoch, with few files open at a time.

    Runs of consecutive images come in an order drawn from (seed, epoch); their images are shuffled
    within one buffer after another. Disks read such runs faster than single images.

    Args:
        n: number of images, in the order of their files.
        batch_size: images per batch, over all processes.
        buffer: size of the shuffle buffer in images; a larger one mixes better.
        run: consecutive images that are read together.
        drop_last: drop the last incomplete batch.
        seed: seed of the order.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        buffer: int = 16384,
        run: int = 64,
        drop_last: bool = True,
        seed: int = 0,
    ) -> None:
        if buffer < 1 or run < 1:
            raise ValueError(f"buffer and run must be positive, got {buffer} and {run}")
        super().__init__(n, batch_size, drop_last=drop_last, seed=seed)
        self.buffer, self.run = buffer, run
        self._shuffled: tuple[int, int, Indices] | None = None

    def batch(self, epoch: int, number: int) -> Indices:
        """Return the images of one batch, which may span several buffers."""
        start = number * self.batch_size
        stop = min(start + self.batch_size, self.n)
        parts = []
        while start < stop:
            buffer, first = divmod(start, self.buffer)
            parts.append(self._buffer(epoch, buffer)[first : first + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def _buffer(self, epoch: int, number: int) -> Indices:
        """Return the images of one buffer of an epoch, shuffled."""
        if self._shuffled is None or self._shuffled[:2] != (epoch, number):
            rng = np.random.default_rng([self.seed, _RUNS, epoch])
            order = rng.permutation(-(-self.n // self.run))
            # All runs have the same length except the one with the last images.
            sizes = np.minimum(self.n - order * self.run, self.run)
            begins = np.concatenate([[0], np.cumsum(sizes)])
            start = number * self.buffer
            positions = np.arange(start, min(start + self.buffer, self.n))
            runs = np.searchsorted(begins, positions, side="right") - 1
            images = order[runs] * self.run + positions - begins[runs]
            rng = np.random.default_rng([self.seed, _BUFFER, epoch, number])
            self._shuffled = epoch, number, rng.permutation(images)
        return self._shuffled[2]


class ClassBalancedSampler(_BatchSampler):
    """Batches of `classes_per_batch` different classes with `images_per_class` images each.

    Rounds of classes, and of the images of a class, are shuffled and continue through the epochs.
    A batch contains duplicates only if a class has fewer than `images_per_class` images.

    Args:
        codes: the class of every image, as an integer.
        classes_per_batch: different classes per batch, over all processes.
        images_per_class: images of each class (m).
        seed: seed of the shuffles.

    Examples:
        >>> codes = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
        >>> sampler = ClassBalancedSampler(codes, classes_per_batch=2, images_per_class=2)
        >>> np.unique(codes[sampler.batch(epoch=0, number=0)], return_counts=True)[1].tolist()
        [2, 2]
    """

    def __init__(
        self, codes: npt.ArrayLike, classes_per_batch: int, images_per_class: int, *, seed: int = 0
    ) -> None:
        labels = np.asarray(codes)
        if labels.ndim != 1 or labels.size == 0 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"codes must be a list of integers, got {labels.dtype} of {labels.shape}"
            )
        if classes_per_batch < 1 or images_per_class < 1:
            raise ValueError(
                "classes_per_batch and images_per_class must be positive, "
                f"got {classes_per_batch} and {images_per_class}"
            )
        self._images = np.argsort(labels, kind="stable")
        in_order = labels[self._images]
        begins = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
        self._starts = np.concatenate([[0], begins, [labels.size]])
        self._classes = len(self._starts) - 1
        if classes_per_batch > self._classes:
            raise ValueError(
                f"classes_per_batch is {classes_per_batch}, but there are {self._classes} classes. "
                f"Use at most {self._classes}."
            )
        size = classes_per_batch * images_per_class
        super().__init__(size, max(1, labels.size // size), seed)
        self.classes_per_batch, self.images_per_class = classes_per_batch, images_per_class
        self._round = _CyclicShuffle(np.arange(self._classes), classes_per_batch, (seed, _CLASSES))
        self._class_shuffles: dict[int, _CyclicShuffle] = {}

    def batch(self, epoch: int, number: int) -> Indices:
        """Return the images of one batch, class by class."""
        turn = epoch * len(self) + number
        slots = turn * self.classes_per_batch + np.arange(self.classes_per_batch)
        # Every class occurs once per round, so its turn number is the round number.
        rounds = slots // self._classes
        pairs = zip(self._round.turn(turn).tolist(), rounds.tolist(), strict=True)
        return np.concatenate([self._class_shuffle(code).turn(n) for code, n in pairs])

    def _class_shuffle(self, code: int) -> "_CyclicShuffle":
        """Return the shuffled images of a class; if evicted, reshuffle them with the same seed."""
        if code not in self._class_shuffles:
            if len(self._class_shuffles) >= _MAX_CACHED_CLASSES:
                self._class_shuffles.clear()
            images = self._images[self._starts[code] : self._starts[code + 1]]
            self._class_shuffles[code] = _CyclicShuffle(
                images, self.images_per_class, (self.seed, _IMAGES, code)
            )
        return self._class_shuffles[code]


class _CyclicShuffle:
    """Items in endless shuffles, `count` of them per turn.

    If a turn spans two shuffles, the second is reordered to avoid duplicates within the turn. It
    then depends on the first shuffle.
    """

    __slots__ = ("_count", "_items", "_orders", "_seed")

    def __init__(self, items: Indices, count: int, seed: tuple[int, ...]) -> None:
        self._items, self._count, self._seed = items, count, seed
        self._orders: dict[int, Indices] = {}

    def turn(self, number: int) -> Indices:
        """Return the items of one turn."""
        shuffle, begin = divmod(number * self._count, len(self._items))
        items = self._order(shuffle)[begin : begin + self._count]
        while len(items) < self._count:
            shuffle += 1
            items = np.concatenate([items, self._order(shuffle)[: self._count - len(items)]])
        return items

    def _order(self, shuffle: int) -> Indices:
        """Return the items in the order of one shuffle."""
        first = shuffle
        while first not in self._orders and self._num_carried_over(first):
            first -= 1
        for number in range(first, shuffle + 1):
            if number not in self._orders:
                last = {n: order for n, order in self._orders.items() if n == number - 1}
                self._orders = {**last, number: self._shuffled(number)}
        return self._orders[shuffle]

    def _num_carried_over(self, shuffle: int) -> int:
        """Return the number of items of the turn that come from the previous shuffle."""
        size = len(self._items)
        return shuffle * size % self._count if self._count <= size else 0

    def _shuffled(self, shuffle: int) -> Indices:
        order = np.random.default_rng([*self._seed, shuffle]).permutation(self._items)
        if carried_over := self._num_carried_over(shuffle):
            # Items that are new to the turn come first; the others keep their shuffled order.
            seen = np.isin(order, self._orders[shuffle - 1][-carried_over:])
            others = np.flatnonzero(~seen)[: self._count - carried_over]
            order = np.concatenate([order[others], np.delete(order, others)])
        return order
