"""Images to train on: batches of pixels, from the pixel cache or decoded on the fly."""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.errors import first_few, readable_size, some, spaced
from proximetry._util.machine import available_memory, torch_pool
from proximetry._util.tensors import chunks
from proximetry.data import Catalog, CenterCrop, PixelCache
from proximetry.data.augment.colors import ColorChanges, recolor
from proximetry.data.augment.resample import Windows
from proximetry.data.cache import (
    EncodedCache,
    Pixels,
    cache_home,
    check_files,
    estimate,
    file_sizes,
    known_contents,
)
from proximetry.data.decoding import ENCODED
from proximetry.data.images import Interpolation, Size
from proximetry.data.on_the_fly import DecodedBatch, Members, OnTheFly
from proximetry.models import Preprocessing
from proximetry.recipe.auto import StorageFacts
from proximetry.recipe.schema import Recipe
from proximetry.training.checkpoint import fingerprint
from proximetry.training.distributed import World
from proximetry.training.reporting import Display
from proximetry.training.run_folder import RunError
from proximetry.training.sources.base import (
    Rows,
    TrainingData,
    cache_sizes,
    make_augmentation,
    open_catalog,
)

T = TypeVar("T")

_UPLOADS = 2  # batches on their way to the GPU
_ENCODED = (
    f"trained on images that were compressed again ({ENCODED}, data.cache encoded), which changes "
    "figures slightly; evaluated on the image files themselves"
)


class _Order(NamedTuple):
    """A batch before it is made: which window of which images, in which colors, and the labels."""

    pixels: Pixels
    rows: Rows
    windows: Windows
    colors: ColorChanges | None
    labels: Tensor


class _Plan(NamedTuple):
    """A batch before its images are there."""

    rows: Rows
    chances: Tensor
    colors: ColorChanges | None
    labels: Tensor


class ImageData(TrainingData):
    """The images of a run; batches can be had when they have been `put` somewhere."""

    def __init__(
        self,
        recipe: Recipe,
        preprocessing: Preprocessing,
        world: World,
        display: Display,
        catalog: Catalog | None = None,
    ) -> None:
        d = recipe.data
        self._display = display
        self._filter = preprocessing.interpolation
        self._sizes = cache_sizes(recipe, preprocessing)
        if catalog is None:
            catalog = open_catalog(recipe, partial(display.progress, "looking for the images"))
        super().__init__(recipe, catalog, world)  # which may refuse it, before hours of decoding
        for note in self.notes:
            display.message(note)
        self._augment, self._colors = make_augmentation(d, preprocessing)
        self._view = CenterCrop(preprocessing.crop)
        self._stream: torch.cuda.Stream | None = None
        self._sent: deque[tuple[torch.cuda.Event, DecodedBatch]] = deque()
        self._source: PixelCache | OnTheFly
        self._eval_source: PixelCache | OnTheFly
        self._eval_rows: Rows

    def _build(
        self, catalog: Catalog, scaled: Size, kind: type[PixelCache] = PixelCache
    ) -> PixelCache:
        recipe, d = self._recipe, self._recipe.data
        what: Any = (catalog, scaled, d.cache_dir)

        def build() -> PixelCache:
            count, started = spaced(len(catalog)), 0.0

            def starting() -> None:
                nonlocal started
                started = time.monotonic()
                there, size = estimate(*what, interpolation=self._filter, encoded=kind.encoded)
                if not there:  # what is damaged gives its space back
                    check_space(recipe, size)
                self._display.message(
                    f"decoding {count} images into the cache ({readable_size(size)})…"
                )

            def waiting() -> None:
                nonlocal started
                started = 0.0
                self._display.message("waiting for another process that decodes the images…")

            cache = kind.build(
                *what,
                interpolation=self._filter,
                policy=d.bad_images,
                progress=partial(self._display.progress, "decoding"),
                starting=starting,
                waiting=waiting,
            )
            if started:
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

    @cached_property
    def storage(self) -> StorageFacts:
        """What the choice of a cache depends on."""
        return self.world.first(
            lambda: storage_facts(self._recipe, self.catalog, self.rows, self._sizes, self._filter)
        )

    def open_cache(self, place: str) -> None:
        """Read the images on the fly, or decode them into a cache, on disk or on the GPU."""
        train_size, eval_size = self._sizes
        if place == "none":
            bad = self.world.first(self._check_files)
            self._take(without(self.catalog, bad) if bad else self.catalog, bad)
            self._source = self._eval_source = self._on_the_fly(train_size)
            self._eval_rows = np.arange(len(self.catalog))
            if eval_size != train_size:
                self._eval_source = self._on_the_fly(eval_size)
            return
        kind = EncodedCache if place == "encoded" else PixelCache
        cache = self._build(self.catalog, train_size, kind)
        self._take(cache.catalog, cache.bad)
        if isinstance(cache, EncodedCache):
            self._encoded = cache  # which is in use as long as somebody holds it
            self.notes.append(_ENCODED)
            self._display.message(_ENCODED)
            self._source = self._on_the_fly(train_size, cache.members())
            # What is saved will see files: so does evaluation, and its figures are the same.
            self._eval_source = self._on_the_fly(eval_size)
            self._eval_rows = np.arange(len(self.catalog))
            return
        self._eval_rows, eval_cache = self._evaluation_cache(cache)
        self._source = self._move(cache, place)
        self._eval_source = self._source
        if eval_cache is not cache:
            self._eval_source = self._move(eval_cache, place)

    def close(self) -> None:
        """End the processes that decode."""
        for name in ("_source", "_eval_source"):
            source = getattr(self, name, None)  # nowhere, if they have not been put yet
            if isinstance(source, OnTheFly):
                source.close()

    def _check_files(self) -> tuple[tuple[str, str], ...]:
        """Find the images that cannot be read, as far as ``data.bad_images`` asks for it."""
        d = self._recipe.data
        if d.bad_images == "skip":
            count = spaced(len(self.catalog))
            self._display.message(f"checking {count} images, once, for which ones to leave out…")
        return check_files(
            self.catalog,
            self._sizes[0],
            d.cache_dir,
            interpolation=self._filter,
            policy=d.bad_images,
            progress=partial(self._display.progress, "checking"),
        )

    def _take(self, catalog: Catalog, bad: Iterable[tuple[str, str]]) -> None:
        """Go on with the images that can be read."""
        known = known_contents(self.catalog, self._recipe.data.cache_dir)
        left_out = [f"left out {path}: {why}" for path, why in bad]
        if catalog is not self.catalog:
            told = self.notes
            super().__init__(self._recipe, catalog, self.world, left_out)
            more = [note for note in self.notes if note not in {*told, *left_out}]
            for note in [*first_few(left_out, "results.json"), *more]:
                self._display.message(note)
        self.fingerprint = fingerprint(self.catalog, known, file_sizes(self.catalog))

    def _on_the_fly(self, scaled: Size, members: Members | None = None) -> OnTheFly:
        d, e, world = self._recipe.data, self._recipe.evaluation, self.world
        return OnTheFly(
            self.catalog,
            scaled,
            self._filter,
            largest=max(-(-d.batch_size // world.size), e.batch_size),
            device=world.device,
            held=_UPLOADS + 1 if world.device.type == "cuda" else 1,
            members=members,
            sharing=min(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))),
        )

    def _move(self, cache: PixelCache, place: str) -> PixelCache:
        if place == "pixels":
            return cache
        try:
            return cache.to(self.world.device)
        except ValueError as error:
            raise RunError(f"data.cache gpu: {error}") from error

    def _evaluation_cache(self, cache: PixelCache) -> tuple[Rows, PixelCache]:
        """Return the cache that evaluation crops, and the row in it of each row of the catalogue.

        Evaluation sees what the saved embedder will see of the image files, scaled once. Where the
        training cache has another size, there is a second one.
        """
        wanted = second_cache(self._recipe, self.rows, len(self.catalog), self._sizes)
        if len(wanted) == 0:
            return np.arange(len(self.catalog)), cache
        places = np.full(len(self.catalog), -1)
        places[wanted] = np.arange(len(wanted))
        return places, self._build(self.catalog.subset(wanted), self._sizes[1])

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pixels and labels of this process's part of each batch, from batch ``start`` on.

        The next batch is made while the present one is trained on: in a thread or, for a GPU,
        there, beside the network. What a batch holds depends on the seed, the epoch and its
        number alone.
        """
        numbers = range(start, len(self.sampler))
        if isinstance(self._source, OnTheFly):
            self._source.start()
        on_cpu = self.world.device.type == "cpu"
        # The thread leaves the GPU alone: meanwhile the network may be recorded as a CUDA graph,
        # which no other thread may disturb, be it by asking for pinned memory.
        make: Any = self._make if on_cpu else lambda order: order
        with (
            closing(self._orders(epoch, numbers)) as orders,
            closing(_in_a_thread(lambda number: make(next(orders)), numbers)) as made,
        ):
            if on_cpu:
                yield from made
            else:
                for take in _one_ahead(map(self._cut, made)):
                    yield take()

    def _cut(self, order: _Order) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin to cut a batch out of its pixels on the GPU, on a stream of its own.

        Returns what gives the batch: the stream that asks waits for it, the processor does not.
        What has been asked of the GPU so far comes first, so memory that has become free is not
        written to before its last reader is done. The coming step is not among it.
        """
        device = self.world.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            pixels, labels = self._make(order._replace(pixels=self._upload(order.pixels)))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        sent = self._send(labels)

        def take() -> tuple[Tensor, Tensor]:
            torch.cuda.current_stream(device).wait_event(done)
            return pixels, sent

        return take

    def _upload(self, pixels: Pixels) -> Pixels:
        """Send pixels to the GPU, if they are not there; give back batches that have arrived."""
        if pixels.flat.is_cuda:
            return pixels
        there = pixels.send(self.world.device)
        if isinstance(pixels, DecodedBatch):
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            self._sent.append((arrived, pixels))
            while len(self._sent) > _UPLOADS:
                earlier, batch = self._sent.popleft()
                earlier.synchronize()
                batch.give_back()
        return there

    def _make(self, order: _Order) -> tuple[Tensor, Tensor]:
        pixels = self._augment.apply(order.pixels, order.rows, order.windows)
        if isinstance(order.pixels, DecodedBatch):
            order.pixels.give_back()
        if order.colors is not None:
            pixels = recolor(pixels, order.colors)
        return pixels, order.labels

    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Pixels of rows as evaluation sees them; on a GPU the last batch is filled up."""
        on_cuda = self.world.device.type == "cuda"
        wanted = [self._eval_rows[rows[part]] for part in chunks(len(rows), batch_size)]
        with closing(self._read(self._eval_source, wanted)) as batches:
            for pixels, places in batches:
                chosen = self._filled(places, batch_size)
                if isinstance(pixels, DecodedBatch) and on_cuda:
                    yield self._view(self._upload(pixels), chosen)
                    continue
                view = self._view(pixels, chosen).to(self.world.device)
                if isinstance(pixels, DecodedBatch):
                    pixels.give_back()
                yield view

    def _read(
        self, source: PixelCache | OnTheFly, wanted: Iterable[Rows]
    ) -> Generator[tuple[Pixels, Rows]]:
        """Give the images of each list of rows, and which of them are meant."""
        if isinstance(source, PixelCache):
            for rows in wanted:
                source.check_size()
                yield source, rows
        else:
            with closing(source.batches(wanted)) as batches:
                for batch in batches:
                    yield batch, np.arange(len(batch))

    def _orders(self, epoch: int, numbers: range) -> Generator[_Order]:
        """Give what is to be made of the images of each batch."""
        plans: deque[_Plan] = deque()

        def wanted() -> Iterator[Rows]:
            for number in numbers:
                rows, labels, mine, total, generator = self._batch(epoch, number)
                chances = self._augment.chances(total, generator)[mine]
                colors = self._colors.draw(total, generator)[mine] if self._colors else None
                plans.append(_Plan(rows, chances, colors, labels))
                yield rows

        on_cuda = self.world.device.type == "cuda"
        for pixels, rows in self._read(self._source, wanted()):
            plan = plans.popleft()
            if on_cuda and isinstance(pixels, PixelCache) and not pixels.flat.is_cuda:
                # Crops are made on the GPU whichever cache there is: their bytes are the same.
                pixels, rows = pixels.gather(rows), np.arange(len(rows))
            windows = self._augment.windows(pixels, rows, plan.chances)
            yield _Order(pixels, rows, windows, plan.colors, plan.labels)


def _in_a_thread(make: Callable[[int], T], numbers: range) -> Generator[T]:
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


def storage_facts(
    recipe: Recipe,
    catalog: Catalog,
    rows: dict[str, Rows],
    sizes: tuple[Size, Size],
    interpolation: Interpolation,
) -> StorageFacts:
    """Find out what the choice of a cache depends on; of each image file at most the header."""
    encoded = False
    second = second_cache(recipe, rows, len(catalog), sizes)
    parts = [(catalog, sizes[0]), (catalog.subset(second), sizes[1])]
    caches = [
        estimate(part, size, recipe.data.cache_dir, interpolation=interpolation, encoded=encoded)
        for part, size in (parts[:1] if encoded else parts)
        if len(part)
    ]
    return StorageFacts(
        pixels=sum(size for _, size in caches),
        missing=sum(size for there, size in caches if not there),
        disk=free_space(recipe),
        memory=available_memory(),
    )


def without(catalog: Catalog, bad: Iterable[tuple[str, str]]) -> Catalog:
    """Return the images that can be read, given path and reason of those that cannot."""
    left_out = {path for path, _ in bad}
    return catalog.subset([row for row, path in enumerate(catalog.paths) if path not in left_out])


def free_space(recipe: Recipe) -> int:
    """Return the free bytes of the disk of the pixel cache."""
    home = cache_home(recipe.data.cache_dir).absolute()
    return shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free


def check_space(recipe: Recipe, size: int) -> None:
    """Refuse a pixel cache that is larger than what its disk has free."""
    home, free = cache_home(recipe.data.cache_dir).absolute(), free_space(recipe)
    if size > free:
        raise RunError(
            f"the pixel cache needs {readable_size(size)} in {home}, where {readable_size(free)} "
            "are free; use data.cache none, name another folder as data.cache_dir, or take a "
            "smaller data.short_side"
        )


def second_cache(
    recipe: Recipe, rows: dict[str, Rows], images: int, sizes: tuple[Size, Size]
) -> Rows:
    """The rows whose pixels evaluation needs at another size than training, if it is another."""
    if sizes[0] == sizes[1]:
        return np.arange(0)
    if recipe.model.pca_dim or recipe.model.bits or len(rows["held_out"]):
        return np.arange(images)  # so that runs with other held-out classes share their cache
    return rows["test"]
