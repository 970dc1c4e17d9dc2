"""Which images make up which batch: a function of the seed, the epoch and the batch's number.

Samplers keep no state of their own, so any batch can be had at any time: processes take their
slices of the same global batch, and a run continues where it stopped.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

# Separate streams of random numbers from one seed.
_SHUFFLE, _CLASSES, _IMAGES = 0, 1, 2


class _BatchSampler(ABC):
    """Iterating gives the batches of `epoch`, as torch's DataLoader wants of a batch_sampler."""

    def __init__(self, batch_size: int, batches: int, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self._batches = batches

    def __len__(self) -> int:
        """Batches in an epoch."""
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


class Shuffled(_BatchSampler):
    """Every image once per epoch, in an order drawn from (seed, epoch).

    Args:
        n: number of images.
        batch_size: images per batch, of all processes together.
        drop_last: leave out the images that do not fill a last batch.
        seed: decides the order.
    """

    def __init__(self, n: int, batch_size: int, *, drop_last: bool = True, seed: int = 0) -> None:
        if n < 1 or batch_size < 1:
            raise ValueError(f"n and batch_size must be positive, got {n} and {batch_size}")
        if drop_last and n < batch_size:
            raise ValueError(
                f"{n} images do not fill one batch of {batch_size}; "
                "use a smaller batch or drop_last=False"
            )
        full, rest = divmod(n, batch_size)
        batches = full + (rest > 0 and not drop_last)
        super().__init__(batch_size, batches, seed)
        self.n = n
        self._order: tuple[int, Indices] | None = None

    def batch(self, epoch: int, number: int) -> Indices:
        """Return the images of one batch."""
        if self._order is None or self._order[0] != epoch:
            draw = np.random.default_rng([self.seed, _SHUFFLE, epoch])
            self._order = (epoch, draw.permutation(self.n))
        start = number * self.batch_size
        return self._order[1][start : start + self.batch_size]


class ClassBalanced(_BatchSampler):
    """Batches of `classes_per_batch` different classes with `images_per_class` images each.

    Classes come from a shuffled round: each class once before any comes again. Images come from
    a shuffled deck per class: each image of the class once before any comes again. Rounds and
    decks run on through the epochs, so over a run every image gets its turn. A batch holds an
    image twice only if its class has fewer than `images_per_class` images.

    Args:
        codes: the class of every image; any whole numbers.
        classes_per_batch: different classes in a batch, of all processes together.
        images_per_class: images of each (m).
        seed: decides rounds and decks.
        batches_per_epoch: as many as n images fill (at least one) unless given.
    """

    def __init__(
        self,
        codes: npt.ArrayLike,
        classes_per_batch: int,
        images_per_class: int,
        *,
        seed: int = 0,
        batches_per_epoch: int | None = None,
    ) -> None:
        labels = np.asarray(codes)
        if labels.ndim != 1 or labels.size == 0 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"codes must be a list of whole numbers, got {labels.dtype} of {labels.shape}"
            )
        if classes_per_batch < 1 or images_per_class < 1:
            raise ValueError(
                "classes_per_batch and images_per_class must be positive, "
                f"got {classes_per_batch} and {images_per_class}"
            )
        _, places, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        if classes_per_batch > len(sizes):
            raise ValueError(
                f"a batch of {classes_per_batch} classes needs as many, there are {len(sizes)}; "
                f"use at most {len(sizes)} classes per batch"
            )
        size = classes_per_batch * images_per_class
        batches = max(1, labels.size // size) if batches_per_epoch is None else batches_per_epoch
        if batches < 1:
            raise ValueError(f"batches_per_epoch must be positive, got {batches}")
        super().__init__(size, batches, seed)
        self.classes_per_batch, self.images_per_class = classes_per_batch, images_per_class
        self._members = np.split(np.argsort(places, kind="stable"), np.cumsum(sizes)[:-1])
        everything = np.arange(len(sizes))
        self._round = _Deck(everything, classes_per_batch, (seed, _CLASSES))
        self._decks: dict[int, _Deck] = {}

    def batch(self, epoch: int, number: int) -> Indices:
        """Return the images of one batch, class by class."""
        turn = epoch * len(self) + number
        chosen = self._round.turn(turn)
        # Every class comes once per round, so its own turn is the number of the round.
        slots = turn * self.classes_per_batch + np.arange(self.classes_per_batch)
        rounds = slots // len(self._members)
        pairs = zip(chosen.tolist(), rounds.tolist(), strict=True)
        return np.concatenate([self._deck(code).turn(n) for code, n in pairs])

    def _deck(self, code: int) -> "_Deck":
        if code not in self._decks:
            seed = (self.seed, _IMAGES, code)
            self._decks[code] = _Deck(self._members[code], self.images_per_class, seed)
        return self._decks[code]


class _Deck:
    """Items in an order that is shuffled anew each time it has been gone through.

    Turn after turn `count` items are taken. Where a turn runs over the end of one shuffle, the
    next shuffle is arranged so that the turn has no item twice; so a shuffle depends on the one
    before, but no further back than the last turn that ended exactly with a shuffle. From there
    any turn is reached by dealing at most len(items) turns.
    """

    __slots__ = ("_count", "_items", "_next", "_order", "_period", "_seed", "_shuffles", "_turn")

    def __init__(self, items: Indices, count: int, seed: tuple[int, ...]) -> None:
        self._items, self._count, self._seed = items, count, seed
        self._period = len(items) // math.gcd(len(items), count)
        self._restart(0)

    def turn(self, number: int) -> Indices:
        """Return the items of one turn; the next one in line costs O(1) per item."""
        if number != self._turn and not self._turn <= number < self._turn + self._period:
            self._restart(number - number % self._period)
        while self._turn < number:
            self._take()
        return self._take()

    def _restart(self, turn: int) -> None:
        self._turn = turn
        self._shuffles = turn * self._count // len(self._items)
        self._order, self._next = self._items[:0], 0

    def _take(self) -> Indices:
        self._turn += 1
        taken = self._order[self._next : self._next + self._count]
        self._next += len(taken)
        while len(taken) < self._count:
            missing = self._count - len(taken)
            fresh = self._shuffle()
            if len(taken) and self._count <= len(fresh):
                fresh = _avoid_first(fresh, taken, missing)
            taken = np.concatenate([taken, fresh[:missing]])
            self._order, self._next = fresh, min(missing, len(fresh))
        return taken

    def _shuffle(self) -> Indices:
        draw = np.random.default_rng([*self._seed, self._shuffles])
        self._shuffles += 1
        return draw.permutation(self._items)


def _avoid_first(order: Indices, taken: Indices, head: int) -> Indices:
    """Move what has just been taken behind the first `head` items, keeping the order else."""
    # Only as many as the head needs are moved forward; the rest stays as it was shuffled.
    first = np.flatnonzero(~np.isin(order, taken))[:head]
    rest = np.delete(np.arange(len(order)), first)
    arranged: Indices = order[np.concatenate([first, rest])]
    return arranged
