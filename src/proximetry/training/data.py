"""What a run trains on and is evaluated on: rows of the catalogue, and batches of pixels."""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._common import readable_size, some, spaced, torch_pool
from proximetry.data import (
    Catalog,
    CenterCrop,
    ClassBalanced,
    ColorJitter,
    PixelCache,
    RandomResizedCrop,
    Shuffled,
    list_datasets,
    open_dataset,
)
from proximetry.data.augment.colors import ColorChanges, recolor
from proximetry.data.augment.resample import Windows
from proximetry.data.pixel_cache import cache_home, estimate, known_contents
from proximetry.models import Preprocessing
from proximetry.training.comparison import check_comparison, nothing_to_find
from proximetry.training.distributed import World
from proximetry.training.fingerprint import fingerprint
from proximetry.training.recipe import Protocol, Recipe, RecipeError
from proximetry.training.reporting import Display
from proximetry.training.run_folder import RunError

Rows = npt.NDArray[np.int64]
T = TypeVar("T")


class _Order(NamedTuple):
    """A batch before it is made: which window of which rows, in which colors, and the labels."""

    rows: Rows
    windows: Windows
    colors: ColorChanges | None
    labels: Tensor


class TrainingData:
    """The images of a run.

    Attributes:
        rows: rows of the catalogue to ``train`` on, the ``held_out`` classes, the ``test`` set.
        protocol: how the epoch is selected: as the recipe says, or ``last`` where no class can be
            held out.
        class_names: of the training classes, in the order of their labels.
        sampler: which of the training rows make up which batch.
        notes: what there is to say about the data.
        fingerprint: by which a continued run knows the images again.
    """

    def __init__(
        self,
        recipe: Recipe,
        preprocessing: Preprocessing,
        world: World,
        display: Display,
    ) -> None:
        d = recipe.data
        self.world, self._recipe, self._display = world, recipe, display
        self._filter = preprocessing.interpolation
        catalog = open_catalog(recipe)
        told = catalog.remarks()
        for note in told:
            display.message(note)
        divide(catalog, recipe)  # which may refuse it, before hours of decoding
        cache = self._build(catalog, d.short_side or preprocessing.resize)
        self.catalog = cache.catalog
        self.fingerprint = fingerprint(self.catalog, known_contents(catalog, d.cache_dir))
        self.rows, self.protocol, self.pca_dim, notes = divide(self.catalog, recipe)
        left_out = [f"left out {path}: {why}" for path, why in cache.bad]
        self.notes = [*self.catalog.remarks(), *left_out, *notes]
        for note in self.notes[len(told) :]:
            display.message(note)
        self._cache = cache
        self._eval_rows, self._eval_cache = self._evaluation_cache(preprocessing.resize)
        train = self.catalog.subset(self.rows["train"])
        self.class_names = list(train.class_names)
        self._codes = train.codes
        self.sampler = make_sampler(recipe, train.codes, world)
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
    def pixels(self) -> int:
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

    def _order(self, epoch: int, number: int) -> _Order:
        chosen = self.sampler.batch(epoch, number)
        seed = derive_seed(self._recipe.training.seed, epoch, number)
        generator = torch.Generator().manual_seed(seed)
        rank, size = self.world.rank, self.world.size
        mine = slice(len(chosen) * rank // size, len(chosen) * (rank + 1) // size)
        rows = self.rows["train"][chosen]
        # Drawn for the whole batch, so that nothing depends on who does what.
        windows = self._augment.draw(self._cache, rows, generator)[mine]
        colors = self._colors.draw(len(rows), generator)[mine] if self._colors else None
        labels = torch.from_numpy(self._codes[chosen[mine]])
        return _Order(rows[mine], windows, colors, labels)

    def _send(self, labels: Tensor) -> Tensor:
        """Labels on the device of the run, without waiting for what that is doing."""
        if self.world.device.type != "cuda":
            return labels.to(self.world.device)
        return labels.pin_memory().to(self.world.device, non_blocking=True)

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


def open_catalog(recipe: Recipe) -> Catalog:
    """Read which images there are."""
    d = recipe.data
    if d.root is None and not list_datasets()[d.dataset].built_in:
        raise RecipeError(f"data.root is missing: where do the images of {d.dataset!r} lie?")
    return open_dataset(d.dataset, d.root)


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


class Division(NamedTuple):
    """Rows of a catalogue by their purpose, and what they allow.

    Attributes:
        protocol: how the epoch is selected.
        pca_dim: dimensions after PCA, if any.
        notes: where that is not what the recipe says, and why.
    """

    rows: dict[str, Rows]
    protocol: Protocol
    pca_dim: int | None
    notes: list[str]


def divide(catalog: Catalog, recipe: Recipe) -> Division:
    """Return the rows to train on, the rows of held-out classes, and the rows of the test set.

    Classes are held out by a fixed draw, the same for every seed of a run, unless the catalogue
    has a split "val" of its own. Without a split at all, everything is there to be trained on.
    """
    splits, protocol = np.asarray(catalog.splits), recipe.evaluation.protocol
    train = np.flatnonzero((splits == "train") | (splits == "all"))
    rows = {
        "train": train,
        "held_out": np.flatnonzero(splits == "val"),
        "test": np.flatnonzero(splits == "test"),
    }
    notes = _drop_unusable_splits(catalog, rows, protocol)
    _check_classes(catalog.subset(train))
    if protocol == "held_out" and len(rows["held_out"]) == 0:
        part = catalog.subset(train)
        names, reason = _hold_out(part, recipe.evaluation.held_out)
        if reason and recipe.schedule.name == "plateau":
            raise RunError(
                f"{reason}, and schedule.name plateau goes by held-out classes; choose another "
                "schedule.name, such as step, and training.two_stages false"
            )
        if reason:
            protocol = "last"
            notes.append(f"{reason}: trained on all of them, the last epoch is taken")
        out = np.isin(np.asarray(part.labels), names)
        rows["train"], rows["held_out"] = train[~out], train[out]
        reason = nothing_to_find(part.subset(out)) if out.any() else ""
        if reason:
            raise RunError(f"in the held-out classes {reason}; or use evaluation.protocol last")
    if protocol == "last" and recipe.training.stop_after:
        notes.append(
            f"training.stop_after {recipe.training.stop_after} has no effect: without a metric "
            "that selects the epoch, all epochs are trained"
        )
    if protocol == "paper" and len(rows["test"]) == 0:
        raise RunError(
            "evaluation.protocol paper selects the epoch on the test set, but there is none; give "
            "one (a folder test/ or a column split), or use evaluation.protocol held_out"
        )
    for name in ("held_out", "test"):
        if len(rows[name]):
            try:
                check_comparison(catalog.subset(rows[name]), recipe.evaluation.metrics)
            except ValueError as error:
                raise RunError(str(error)) from error
    images, pca_dim = len(rows["train"]), recipe.model.pca_dim
    if pca_dim is not None and images < pca_dim:
        notes.append(
            f"the embedding keeps its {recipe.model.dim} dimensions: PCA to {pca_dim} takes as "
            f"many training images, and there are {images}"
        )
        pca_dim = None
    return Division(rows, protocol, pca_dim, notes)


def _check_classes(train: Catalog) -> None:
    if len(train) == 0:
        raise RunError("there is no image to train on: the catalogue has no rows of split train")
    if len(train.class_names) == 1:
        raise RunError(
            f"all images to train on are of one class, {train.class_names[0]!r}; an embedder "
            "learns to tell classes apart and needs two or more, each in a folder of its own"
        )


def _drop_unusable_splits(catalog: Catalog, rows: dict[str, Rows], protocol: Protocol) -> list[str]:
    """Empty splits in which no image can be found again, or none confused; return notes on that."""
    notes = []
    for name, split, selects in (("held_out", "val", "held_out"), ("test", "test", "paper")):
        part = catalog.subset(rows[name])
        images = np.bincount(part.codes)
        if len(images) == 0:
            continue
        why = f"split {split} needs two classes, one of them with two images or more"
        if len(images) > 1 and images.max() > 1:
            reason = nothing_to_find(part)
            if not reason:
                continue
            why = f"in split {split} {reason}"
        if protocol == selects:
            raise RunError(f"{why}, to select an epoch; fix it, or use evaluation.protocol last")
        notes.append(f"{why}: it is not evaluated")
        rows[name] = rows[name][:0]
    return notes


FEWEST_CLASSES = 10
"""With fewer training classes none are held out."""
FEWEST_HELD_OUT = 3
"""Among fewer classes nearly everything is found, and epochs cannot be told apart."""


def _hold_out(train: Catalog, fraction: float) -> tuple[tuple[str, ...], str]:
    """Return the classes to hold out or, where that cannot be done, none and the reason."""
    images = np.bincount(train.codes)
    pairs = train.subset(images[train.codes] > 1)  # an image alone in its class finds nothing
    classes, able = len(images), len(pairs.class_names)
    held = max(FEWEST_HELD_OUT, round(fraction * able))
    if classes < FEWEST_CLASSES:
        return (), f"{classes} training classes are too few to hold some out"
    if able < held:
        few = f"only {able}" if able else "none"
        return (), f"of {classes} training classes {few} have two images, too few to hold some out"
    if classes - held < 2:
        return (), f"evaluation.held_out {fraction} leaves too few of {classes} classes to train on"
    if able == held:
        return pairs.class_names, ""
    return pairs.split_classes((able - held, held), seed=0)[1].class_names, ""


def make_sampler(recipe: Recipe, codes: Rows, world: World) -> Shuffled | ClassBalanced:
    """What decides which images make up which batch."""
    d, seed = recipe.data, recipe.training.seed
    if d.batch_size % world.size:
        raise RecipeError(
            f"data.batch_size {d.batch_size} cannot be shared evenly by {world.size} processes; "
            f"use a multiple of {world.size}"
        )
    try:
        if d.sampler == "balanced":
            classes = d.batch_size // d.images_per_class
            return ClassBalanced(codes, classes, d.images_per_class, seed=seed)
        full = len(codes) >= d.batch_size
        return Shuffled(len(codes), d.batch_size, drop_last=full, seed=seed)
    except ValueError as error:
        raise RecipeError(f"data: {error}") from error


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed that depends on all the numbers, the same on every machine."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0]) >> 1
