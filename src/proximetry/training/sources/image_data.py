"""Training images: batches of pixels, from the pixel cache or decoded on the fly."""

import os
import shutil
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from itertools import tee
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from proximetry._util.formatting import format_int, join_first, readable_size, truncate_lines
from proximetry._util.machine import available_memory, torch_pool
from proximetry._util.tensors import chunks
from proximetry.data import Catalog, CenterCrop, PixelCache
from proximetry.data.augment import ColorChanges, recolor
from proximetry.data.images import Size
from proximetry.data.loader import ImageLoader, Pixels
from proximetry.data.pixel_cache import Bad, cache_home, estimate, unreadable_images
from proximetry.data.resample import Windows
from proximetry.models import Preprocessing
from proximetry.recipe.auto import StorageInfo
from proximetry.recipe.schema import Recipe
from proximetry.training.distributed import World
from proximetry.training.errors import RunError
from proximetry.training.reporting import Display
from proximetry.training.sources.training_data import (
    Rows,
    TrainingData,
    cache_sizes,
    fingerprint,
    make_augmentation,
)

T = TypeVar("T")


class _Crops(NamedTuple):
    """A batch before its pixels are cropped: windows of images, color changes and labels."""

    pixels: Pixels
    rows: Rows
    windows: Windows
    colors: ColorChanges | None
    labels: Tensor


class ImageData(TrainingData):
    """The images of a run; call `open_cache` before `batches` and `views`."""

    def __init__(
        self,
        recipe: Recipe,
        preprocessing: Preprocessing,
        world: World,
        display: Display,
        catalog: Catalog,
    ) -> None:
        self._filter = preprocessing.interpolation
        self._sizes = cache_sizes(recipe, preprocessing)
        super().__init__(recipe, catalog, world, display)  # validates, before hours of decoding
        self._augment, self._colors = make_augmentation(recipe.data, preprocessing)
        self._view = CenterCrop(preprocessing.crop)
        self._stream: torch.cuda.Stream | None = None

    @cached_property
    def storage(self) -> StorageInfo:
        """Sizes for the choice of a cache; reads at most the headers of image files."""
        recipe, catalog, (train_size, eval_size) = self._recipe, self.catalog, self._sizes
        second = catalog.subset(self.rows_of_second_cache())
        caches = [
            estimate(part, size, recipe.data.cache_dir, interpolation=self._filter)
            for part, size in ((catalog, train_size), (second, eval_size))
            if len(part)
        ]
        return StorageInfo(
            pixels=sum(size for _, size in caches),
            missing=sum(size for complete, size in caches if not complete),
            disk=free_space(recipe),
            memory=available_memory(),
        )

    def rows_of_second_cache(self) -> Rows:
        """Return the rows that evaluation needs at another size than training."""
        model, (train_size, eval_size) = self._recipe.model, self._sizes
        if train_size == eval_size:
            return np.arange(0)
        if model.pca_dim or model.bits or len(self.rows["held_out"]):
            return np.arange(len(self.catalog))  # shared with runs of other held-out classes
        return self.rows["test"]

    def open_cache(self, mode: str) -> None:
        """Open the pixel cache, on disk or on the GPU; "none" decodes images on the fly."""
        self._source: PixelCache | ImageLoader
        self._eval_source: PixelCache | ImageLoader
        train_size, eval_size = self._sizes
        if mode == "none":
            if bad := self.world.on_main(self._unreadable):
                self._exclude(bad)
            self.fingerprint = fingerprint(self.catalog)
            self._eval_rows = np.arange(len(self.catalog))
            self._source, self._eval_source = map(self._loader, self._sizes)
            return
        cache = self._build(self.catalog, train_size)
        if cache.bad:
            self._exclude(cache.bad)
        self.fingerprint = fingerprint(self.catalog, cache.digest)
        # Evaluation uses the pixels of the saved embedder: image files resized once. If training
        # resizes to another size, there is a second cache.
        second = self.rows_of_second_cache()
        caches, self._eval_rows = [cache], np.arange(len(self.catalog))
        if len(second):
            self._eval_rows = np.full(len(self.catalog), -1)
            self._eval_rows[second] = np.arange(len(second))
            caches.append(self._build(self.catalog.subset(second), eval_size))
        if mode == "gpu":
            try:
                caches = [cache.to(self.world.device) for cache in caches]
            except ValueError as error:
                raise RunError(f"data.cache gpu: {error}") from error
        self._source, self._eval_source = caches[0], caches[-1]

    def _unreadable(self) -> Bad:
        """Return paths and errors of the images to skip, if the recipe skips them."""
        d = self._recipe.data
        if d.bad_images == "skip":
            self._display.message(f"checking {format_int(len(self.catalog))} images once…")
        return unreadable_images(
            self.catalog,
            self._sizes[0],
            self._filter,
            d.bad_images,
            d.cache_dir,
            progress=partial(self._display.progress, "checking"),
        )

    def _build(self, catalog: Catalog, size: Size) -> PixelCache:
        recipe, d = self._recipe, self._recipe.data
        count, started, message = format_int(len(catalog)), 0.0, self._display.message

        def report_start() -> None:
            nonlocal started
            started = time.monotonic()
            _, needed = estimate(catalog, size, d.cache_dir, interpolation=self._filter)
            check_space(recipe, needed)
            message(f"decoding {count} images into the cache ({readable_size(needed)})…")

        def build() -> PixelCache:
            return PixelCache.build(
                catalog,
                size,
                d.cache_dir,
                interpolation=self._filter,
                policy=d.bad_images,
                progress=partial(self._display.progress, "decoding"),
                on_start=report_start,
                on_wait=lambda: message("waiting for another process that decodes the images…"),
            )

        if self.world.size > 1:
            self.world.on_main(lambda: len(build()))  # rank 0 decodes, the others open its cache
        cache = build()
        if started:
            message(f"decoded {count} images in {time.monotonic() - started:.0f} s")
        # Ranks that read different images would have different batches.
        bad: list[set[Any]] = self.world.gather(set(cache.bad))
        if differing := sorted(set.union(*bad) - set.intersection(*bad)):
            listed = join_first(f"{path}: {why}" for path, why in differing)
            raise RunError(f"some processes can read images that others cannot: {listed}")
        return cache

    def _exclude(self, bad: Bad) -> None:
        """Exclude unreadable images."""
        skipped, before = [f"skipped {path}: {why}" for path, why in bad], self.notes
        self.split(exclude_bad(self.catalog, bad), skipped)
        new_notes = [note for note in self.notes if note not in {*before, *skipped}]
        for note in [*truncate_lines(skipped, "results.json"), *new_notes]:
            self._display.message(note)

    def _loader(self, size: Size) -> ImageLoader:
        world, recipe = self.world, self._recipe
        return ImageLoader(
            self.catalog,
            size,
            self._filter,
            batch_size=max(-(-recipe.data.batch_size // world.size), recipe.evaluation.batch_size),
            processes=min(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))),
        )

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pixels and labels of this process's part of each batch, from batch ``start`` on.

        The next batch is prepared during the training step: in a thread on the CPU, on a separate
        stream on a GPU. A batch depends on the seed, the epoch and its number only.
        """
        numbers, device = range(start, len(self.sampler)), self.world.device
        with closing(self._crops(epoch, numbers)) as crops, torch_pool(1, 1) as pool:
            # The thread must not use the GPU, not even pin memory: a CUDA graph may be recorded
            # meanwhile. One thread is enough for crops.
            if device.type == "cpu":
                yield from _compute_ahead(pool, map(self._apply, crops), len(numbers))
                return
            computed = _compute_ahead(pool, crops, len(numbers))
            for pixels, labels, done in _prefetch_one(map(self._apply_on_gpu, computed)):
                torch.cuda.current_stream(device).wait_event(done)
                yield pixels, labels

    def _crops(self, epoch: int, numbers: range) -> Generator[_Crops]:
        """Yield batches of images and the windows to crop, in order."""
        # Images are read several batches ahead.
        ahead, batches = tee(self._batch(epoch, number) for number in numbers)
        on_cuda = self.world.device.type == "cuda"
        images = _read(self._source, (batch.rows for batch in ahead))
        for (pixels, rows), batch in zip(images, batches, strict=True):
            generator, total, local_slice = batch.generator(), batch.total, batch.local_slice
            uniforms = self._augment.draw_uniforms(total, generator)[local_slice]
            colors = self._colors.draw(total, generator)[local_slice] if self._colors else None
            if on_cuda and isinstance(pixels, PixelCache) and not pixels.flat.is_cuda:
                # Crop on the GPU in every mode, for the same result.
                pixels, rows = pixels.gather(rows), np.arange(len(rows))
            windows = self._augment.windows(pixels, rows, uniforms)
            yield _Crops(pixels, rows, windows, colors, torch.from_numpy(batch.labels))

    def _apply(self, crops: _Crops) -> tuple[Tensor, Tensor]:
        pixels = self._augment.apply(crops.pixels, crops.rows, crops.windows)
        if crops.colors is not None:
            pixels = recolor(pixels, crops.colors)
        return pixels, crops.labels

    def _apply_on_gpu(self, crops: _Crops) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """Start to crop a batch on a separate stream; also return the event to wait for.

        The stream waits for the work queued so far, so freed memory is not overwritten before its
        last reader is done; it does not wait for the next step.
        """
        device = self.world.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            pixels, labels = self._apply(crops._replace(pixels=self._upload(crops.pixels)))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return pixels, self._send(labels), done

    def _upload(self, pixels: Pixels) -> Pixels:
        return pixels if pixels.flat.is_cuda else pixels.send(self.world.device)

    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of rows as in evaluation; on a GPU the last batch is padded."""
        batches = [self._eval_rows[rows[part]] for part in chunks(len(rows), batch_size)]
        with closing(_read(self._eval_source, batches)) as read:
            for pixels, indices in read:
                if self.world.device.type == "cuda" and not isinstance(pixels, PixelCache):
                    pixels = self._upload(pixels)
                yield self._view(pixels, self._pad_rows(indices, batch_size)).to(self.world.device)


def _read(
    source: PixelCache | ImageLoader, batches: Iterable[Rows]
) -> Generator[tuple[Pixels, Rows]]:
    """Yield the images of each batch, and the rows of the batch among them."""
    if isinstance(source, PixelCache):
        for rows in batches:
            source.check_size()
            yield source, rows
    else:
        with closing(source.batches(batches)) as loaded:
            for pixels in loaded:
                yield pixels, np.arange(len(pixels))


def _compute_ahead(pool: ThreadPoolExecutor, items: Iterator[T], count: int) -> Iterator[T]:
    """Yield ``count`` items, computing the next one ahead in the thread of the pool."""
    for future in _prefetch_one(pool.submit(next, items) for _ in range(count)):
        yield future.result()


def _prefetch_one(items: Iterable[T]) -> Iterator[T]:
    """Yield each item after the next one has been requested."""
    requested: deque[T] = deque()
    for item in items:
        requested.append(item)
        if len(requested) == 2:
            yield requested.popleft()
    yield from requested


def exclude_bad(catalog: Catalog, bad: Bad) -> Catalog:
    """Return the catalog without unreadable images."""
    paths = {path for path, _ in bad}
    return catalog.subset([row for row, path in enumerate(catalog.paths) if path not in paths])


def free_space(recipe: Recipe) -> int:
    """Return the free bytes of the disk of the pixel cache."""
    home = cache_home(recipe.data.cache_dir).absolute()
    return shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free


def check_space(recipe: Recipe, size: int) -> None:
    """Raise a RunError if a pixel cache is larger than the free disk space."""
    home, free = cache_home(recipe.data.cache_dir).absolute(), free_space(recipe)
    if size > free:
        raise RunError(
            f"the pixel cache needs {readable_size(size)} in {home}, where {readable_size(free)} "
            "are free. Use data.cache none, another data.cache_dir, or a smaller data.short_side."
        )
