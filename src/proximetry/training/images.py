"""Images to train on: batches of pixels, cut out of the pixel cache."""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._common import first_few, readable_size, some, spaced, torch_pool
from proximetry.data import Catalog, CenterCrop, ColorJitter, PixelCache, RandomResizedCrop
from proximetry.data.augment.colors import ColorChanges, recolor
from proximetry.data.augment.resample import Windows
from proximetry.data.pixel_cache import cache_home, estimate, known_contents
from proximetry.models import Preprocessing
from proximetry.training.data import Rows, TrainingData, divide, open_catalog
from proximetry.training.distributed import World
from proximetry.training.fingerprint import fingerprint
from proximetry.training.recipe import Recipe
from proximetry.training.reporting import Display
from proximetry.training.run_folder import RunError

T = TypeVar("T")


class _Order(NamedTuple):
    """A batch before it is made: which window of which rows, in which colors, and the labels."""

    rows: Rows
    windows: Windows
    colors: ColorChanges | None
    labels: Tensor


class ImageData(TrainingData):
    """The images of a run."""

    def __init__(
        self,
        recipe: Recipe,
        preprocessing: Preprocessing,
        world: World,
        display: Display,
        catalog: Catalog | None = None,
    ) -> None:
        d = recipe.data
        self.world, self._recipe, self._display = world, recipe, display
        self._filter = preprocessing.interpolation
        if catalog is None:
            catalog = open_catalog(recipe, partial(display.progress, "looking for the images"))
        told = catalog.remarks()
        for note in told:
            display.message(note)
        divide(catalog, recipe)  # which may refuse it, before hours of decoding
        cache = self._build(catalog, d.short_side or preprocessing.resize)
        left_out = [f"left out {path}: {why}" for path, why in cache.bad]
        super().__init__(recipe, cache.catalog, world, left_out)
        remarks = self.catalog.remarks()
        found = self.notes[len(remarks) + len(left_out) :]
        for note in [*remarks[len(told) :], *first_few(left_out, "results.json"), *found]:
            display.message(note)
        self.fingerprint = fingerprint(self.catalog, known_contents(catalog, d.cache_dir))
        self._cache = cache
        self._eval_rows, self._eval_cache = self._evaluation_cache(preprocessing.resize)
        crop = d.crop_size or preprocessing.crop
        self._augment: RandomResizedCrop | CenterCrop = CenterCrop(crop, d.flip)
        if d.random_crop:
            self._augment = RandomResizedCrop(
                crop, d.crop_scale, flip=d.flip, interpolation=preprocessing.interpolation
            )
        self._colors = ColorJitter(d.color_jitter, d.hue, d.grayscale)
        self._view = CenterCrop(preprocessing.crop)
        self._stream: torch.cuda.Stream | None = None

    def _build(self, catalog: Catalog, short_side: int) -> PixelCache:
        recipe, d = self._recipe, self._recipe.data
        what: Any = (catalog, short_side, d.cache_dir)

        def build() -> PixelCache:
            there, size = estimate(*what, interpolation=self._filter)
            count, started = spaced(len(catalog)), time.monotonic()
            if not there:
                check_space(recipe, size)
                self._display.message(
                    f"decoding {count} images into the cache ({readable_size(size)})…"
                )
            cache = PixelCache.build(
                *what,
                interpolation=self._filter,
                policy=d.bad_images,
                progress=partial(self._display.progress, "decoding"),
            )
            if not there:
                self._display.message(
                    f"decoded {count} images in {time.monotonic() - started:.0f} s"
                )
            return cache

        if self.world.size == 1:
            return build()
        self.world.first(lambda: len(build()))  # rank 0 decodes, the others then find it done
        cache = build()
        # What one of them cannot read just now would give it other rows, and other batches.
        bad: list[Any] = [None] * self.world.size
        dist.all_gather_object(bad, set(cache.bad))
        unlike = sorted(set.union(*bad) - set.intersection(*bad))
        if unlike:
            listed = some(f"{path}: {why}" for path, why in unlike)
            raise RunError(f"some processes can read images that others cannot: {listed}")
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of all pixels."""
        caches = {id(cache): cache for cache in (self._cache, self._eval_cache)}
        return sum(cache.flat.nbytes for cache in caches.values())

    def put(self, place: str) -> None:
        """Bring the pixels to the ``gpu``, to ``memory``, or leave them on ``disk``."""
        shared = self._eval_cache is self._cache
        self._cache = self._put(self._cache, place)
        self._eval_cache = self._cache if shared else self._put(self._eval_cache, place)

    def _put(self, cache: PixelCache, place: str) -> PixelCache:
        if place == "memory":
            return PixelCache(cache.catalog, cache.flat.clone(), cache.index, cache.bad)
        if place == "disk":
            return cache
        try:
            return cache.to(self.world.device)
        except ValueError as error:
            raise RunError(f"data.cache gpu: {error}") from error

    def _evaluation_cache(self, resize: int) -> tuple[Rows, PixelCache]:
        """Return the cache that evaluation crops, and the row in it of each row of the catalogue.

        Evaluation sees what the saved embedder will see of the image files: their short side
        scaled to `resize`, once. Where the training cache has another size, there is a second one.
        """
        wanted = second_cache(self._recipe, self.rows, len(self.catalog), resize)
        if len(wanted) == 0:
            return np.arange(len(self.catalog)), self._cache
        places = np.full(len(self.catalog), -1)
        places[wanted] = np.arange(len(wanted))
        return places, self._build(self.catalog.subset(wanted), resize)

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pixels and labels of this process's part of each batch, from batch ``start`` on.

        The next batch is made while the present one is trained on: in a thread or, of pixels on a
        GPU, there, beside the network. What a batch holds depends on the seed, the epoch and its
        number alone.
        """
        numbers = range(start, len(self.sampler))
        if self._cache.flat.device.type == "cpu":
            made = _in_a_thread(lambda number: self._make(self._order(epoch, number)), numbers)
            for pixels, labels in made:
                yield pixels.to(self.world.device), self._send(labels)
            return
        # The thread leaves the GPU alone: meanwhile the network may be recorded as a CUDA graph,
        # which no other thread may disturb, be it by asking for pinned memory.
        orders = _in_a_thread(lambda number: self._order(epoch, number), numbers)
        for take in _one_ahead(map(self._cut, orders)):
            yield take()

    def _cut(self, order: _Order) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin to cut a batch out of the pixels on the GPU, on a stream of its own.

        Returns what gives the batch: the stream that asks waits for it, the processor does not.
        What has been asked of the GPU so far comes first, so memory that has become free is not
        written to before its last reader is done. The coming step is not among it.
        """
        device = self._cache.flat.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            pixels, labels = self._make(order)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        sent = self._send(labels)

        def take() -> tuple[Tensor, Tensor]:
            torch.cuda.current_stream(device).wait_event(done)
            return pixels, sent

        return take

    def _make(self, order: _Order) -> tuple[Tensor, Tensor]:
        pixels = self._augment.apply(self._cache, order.rows, order.windows)
        if order.colors is not None:
            pixels = recolor(pixels, order.colors)
        return pixels, order.labels

    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Pixels of rows as evaluation sees them.

        On a GPU the last batch is filled up with its last image: a CUDA graph has one batch size.
        """
        missing = -len(rows) % batch_size
        if self.world.device.type == "cuda" and missing:
            rows = np.concatenate([rows, np.full(missing, rows[-1])])
        for start in range(0, len(rows), batch_size):
            places = self._eval_rows[rows[start : start + batch_size]]
            yield self._view(self._eval_cache, places).to(self.world.device)

    def _order(self, epoch: int, number: int) -> _Order:
        rows, labels, mine, total, generator = self._batch(epoch, number)
        chances = self._augment.chances(total, generator)[mine]
        colors = self._colors.draw(total, generator)[mine] if self._colors else None
        windows = self._augment.windows(self._cache, rows, chances)
        return _Order(rows, windows, colors, labels)


def _in_a_thread(make: Callable[[int], T], numbers: range) -> Iterator[T]:
    """Give what is made of each number, the next one being made in a thread meanwhile."""
    # One thread is enough for crops; more would take turns with those of the network.
    with torch_pool(1, 1) as pool:
        for future in _one_ahead(pool.submit(make, number) for number in numbers):
            yield future.result()


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Give each item when the next one has been begun."""
    begun: deque[T] = deque()
    for item in items:
        begun.append(item)
        if len(begun) == 2:
            yield begun.popleft()
    yield from begun


def check_space(recipe: Recipe, size: int) -> int:
    """Return the free bytes of the disk of the pixel cache; refuse a cache that is larger."""
    home = cache_home(recipe.data.cache_dir).absolute()
    free = shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free
    if size > free:
        raise RunError(
            f"the pixel cache needs {readable_size(size)} in {home}, where {readable_size(free)} "
            "are free; name another folder as data.cache_dir, or take a smaller data.short_side"
        )
    return free


def second_cache(recipe: Recipe, rows: dict[str, Rows], images: int, resize: int) -> Rows:
    """The rows whose pixels evaluation needs at another size than training, if it is another."""
    if (recipe.data.short_side or resize) == resize:
        return np.arange(0)
    if recipe.model.pca_dim or recipe.model.bits or len(rows["held_out"]):
        return np.arange(images)  # so that runs with other held-out classes share their cache
    return rows["test"]
