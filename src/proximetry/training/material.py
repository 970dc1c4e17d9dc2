"""What a run trains on and is judged on: rows of the catalogue, and batches of pixels."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry.data import (
    Catalog,
    ClassBalanced,
    EvalTransform,
    PixelCache,
    Shuffled,
    TrainTransform,
    Windows,
    open_dataset,
)
from proximetry.data.colours import Colours, recolour
from proximetry.models import Preprocessing
from proximetry.training.display import Display
from proximetry.training.folder import RunError
from proximetry.training.recipe import Data, Recipe
from proximetry.training.recipe_values import RecipeError
from proximetry.training.seeds import derive
from proximetry.training.world import World

Rows = npt.NDArray[np.int64]


def open_catalog(data: Data) -> Catalog:
    """The catalogue of a recipe's data."""
    if data.root is None and data.dataset != "glyphs":
        raise RecipeError(f"data.root is missing: where do the images of {data.dataset!r} lie?")
    return open_dataset(data.dataset, data.root)


class _Order(NamedTuple):
    """A batch before it is made: which window of which rows, in which colours, and the labels."""

    rows: Rows
    windows: Windows
    colours: Colours | None
    labels: Tensor


class _Cut(NamedTuple):
    """A batch that a GPU is making, and when it is made."""

    pixels: Tensor
    labels: Tensor
    done: torch.cuda.Event

    def take(self) -> tuple[Tensor, Tensor]:
        """The batch, for the present stream, which waits where it must; the processor does not."""
        torch.cuda.current_stream(self.pixels.device).wait_event(self.done)
        return self.pixels, self.labels


class Material:
    """The images of a run.

    Attributes:
        rows: rows of the catalogue to ``fit`` on, the ``held_out`` classes, and the ``test`` set.
        class_names: of the classes to fit, in the order of their labels.
        sampler: which of the rows to fit make up which batch.
        notes: what the reader of the data had to say.
    """

    def __init__(
        self, recipe: Recipe, preprocessing: Preprocessing, world: World, display: Display
    ) -> None:
        d = recipe.data
        catalog = open_catalog(d)
        short = d.short_side or preprocessing.resize

        def build() -> PixelCache:
            return PixelCache.build(catalog, short, d.cache_dir, policy=d.bad_images)

        if world.size > 1:  # rank 0 decodes, the others then find it done
            world.first(lambda: len(build()))
        cache = build()
        for path, reason in cache.bad:
            display.message(f"left out {path}: {reason}")
        for note in cache.catalog.notes:
            display.message(note)
        if d.cache == "memory":
            cache = PixelCache(cache.catalog, cache.flat.clone(), cache.index, cache.bad)
        elif d.cache == "gpu":
            try:
                cache = cache.to(world.device)
            except ValueError as error:
                raise RunError(f"data.cache gpu: {error}") from error
        self.cache, self.catalog, self.world = cache, cache.catalog, world
        self.notes = [*cache.catalog.notes, *(f"left out {p}: {why}" for p, why in cache.bad)]
        self.rows = divide(self.catalog, recipe)
        self._seed = recipe.training.seed
        fit = self.catalog.subset(self.rows["fit"])
        self.class_names = list(fit.class_names)
        self._fit_codes = fit.codes
        self.sampler = _sampler(recipe, fit.codes, world)
        self._train = TrainTransform(
            d.crop_size or preprocessing.crop,
            scale=d.crop_scale,
            flip=d.flip,
            interpolation=preprocessing.interpolation,
        )
        self._colours = d.colours()
        self._view = EvalTransform(
            preprocessing.resize, preprocessing.crop, preprocessing.interpolation
        )
        self._stream: torch.cuda.Stream | None = None

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pixels and labels of this process's part of each batch, from batch ``start`` on.

        The next batch is made while the present one is trained on: in a thread or, of pixels on a
        GPU, there, beside the network. What a batch holds depends on the seed, the epoch and its
        number alone.
        """
        prepared = self._prepared(epoch, start)
        if self.cache.flat.device.type == "cpu":
            for order, pixels in prepared:
                assert pixels is not None
                yield pixels.to(self.world.device), self._send(order.labels)
            return
        coming: _Cut | None = None
        for order, _ in prepared:
            ready, coming = coming, self._cut(order)
            if ready is not None:
                yield ready.take()
        if coming is not None:
            yield coming.take()

    def _prepared(self, epoch: int, start: int) -> Iterator[tuple[_Order, Tensor | None]]:
        """What a thread prepares, one batch ahead."""
        threads = torch.get_num_threads()
        # One thread is enough for crops; more would take turns with those of the network.
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            coming = pool.submit(self._prepare, epoch, start)
            for number in range(start, len(self.sampler)):
                found = coming.result()
                torch.set_num_threads(threads)
                if number + 1 < len(self.sampler):
                    coming = pool.submit(self._prepare, epoch, number + 1)
                yield found

    def _cut(self, order: _Order) -> _Cut:
        """Begin to cut the pixels of a batch out of those on the GPU, on a stream of their own.

        What has been asked of the GPU so far comes first, so memory that has become free is not
        written to before its last reader is done. The coming step is not among it.
        """
        device = self.cache.flat.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            pixels = self._make(order)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return _Cut(pixels, self._send(order.labels), done)

    def _prepare(self, epoch: int, number: int) -> tuple[_Order, Tensor | None]:
        """What the thread does: the order, and its pixels unless a GPU is to cut them.

        It leaves the GPU alone: meanwhile the network may be recorded as a CUDA graph, which no
        other thread may disturb, be it by asking for pinned memory.
        """
        order = self._order(epoch, number)
        if self.cache.flat.device.type != "cpu":
            return order, None
        return order, self._make(order)

    def _make(self, order: _Order) -> Tensor:
        pixels = self._train.apply(self.cache, order.rows, order.windows)
        return pixels if order.colours is None else recolour(pixels, order.colours)

    def _order(self, epoch: int, number: int) -> _Order:
        chosen = self.sampler.batch(epoch, number)
        generator = torch.Generator().manual_seed(derive(self._seed, epoch, number))
        rank, size = self.world.rank, self.world.size
        mine = slice(len(chosen) * rank // size, len(chosen) * (rank + 1) // size)
        rows = self.rows["fit"][chosen]
        # Drawn for the whole batch, so that nothing depends on who does what.
        windows = self._train.draw(self.cache, rows, generator)[mine]
        colours = self._colours.draw(len(rows), generator)[mine] if self._colours else None
        labels = torch.from_numpy(self._fit_codes[chosen[mine]])
        return _Order(rows[mine], windows, colours, labels)

    def _send(self, labels: Tensor) -> Tensor:
        """Labels on the device of the run, without waiting for what that is doing."""
        if self.world.device.type != "cuda":
            return labels.to(self.world.device)
        return labels.pin_memory().to(self.world.device, non_blocking=True)

    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Pixels of rows as evaluation sees them.

        On a GPU the last batch is filled up with its last image: a recorded network knows one
        size of a batch.
        """
        missing = -len(rows) % batch_size
        if self.world.device.type == "cuda" and missing:
            rows = np.concatenate([rows, np.full(missing, rows[-1])])
        for start in range(0, len(rows), batch_size):
            yield self._view(self.cache, rows[start : start + batch_size]).to(self.world.device)

    def file(self, index: int) -> str:
        """The file of the index-th image to fit, for messages."""
        return self.catalog.file(int(self.rows["fit"][index]))


def questions(catalog: Catalog, vectors: Tensor) -> dict[str, Any]:
    """What is asked of `metrics.evaluate`: all against all, or queries against a gallery."""
    labels = np.asarray(catalog.labels)  # names, since numbers would differ between processes
    if catalog.queries is None or catalog.galleries is None:
        return {"embeddings": vectors, "labels": labels}
    asks, answers = np.asarray(catalog.queries, bool), np.asarray(catalog.galleries, bool)
    return {
        "embeddings": vectors[torch.from_numpy(answers)],
        "labels": labels[answers],
        "queries": vectors[torch.from_numpy(asks)],
        "query_labels": labels[asks],
    }


def divide(catalog: Catalog, recipe: Recipe) -> dict[str, Rows]:
    """Rows to fit, rows of held-out classes, and rows of the test set.

    Classes are held out by a fixed draw, the same for every seed of a run, unless the catalogue
    has a split "val" of its own. Without a split at all, everything is there to be trained on.
    """
    splits = np.asarray(catalog.splits)
    train = np.flatnonzero((splits == "train") | (splits == "all"))
    rows = {
        "fit": train,
        "held_out": np.flatnonzero(splits == "val"),
        "test": np.flatnonzero(splits == "test"),
    }
    e = recipe.evaluation
    if e.protocol == "held_out" and len(rows["held_out"]) == 0:
        part = catalog.subset(train)
        classes = len(part.class_names)
        held = min(classes - 1, max(1, round(e.held_out * classes)))
        if classes < 3:
            raise RunError(
                f"{classes} training classes are too few to hold some out; "
                "use evaluation.protocol last"
            )
        names = part.split_classes((classes - held, held), seed=0)[1].class_names
        out = np.isin(np.asarray(part.labels), names)
        rows["fit"], rows["held_out"] = train[~out], train[out]
    if len(rows["fit"]) == 0:
        raise RunError("there is no image to train on: the catalogue has no rows of split train")
    keep = recipe.model.keep or 0
    if len(rows["fit"]) < keep:
        raise RunError(
            f"model.keep {keep} needs as many training images to find its axes, and there are "
            f"{len(rows['fit'])}; keep fewer numbers"
        )
    if e.protocol == "paper" and len(rows["test"]) == 0:
        raise RunError("evaluation.protocol paper chooses on the test set, but there is none")
    return rows


def _sampler(recipe: Recipe, codes: Rows, world: World) -> Shuffled | ClassBalanced:
    d, seed = recipe.data, recipe.training.seed
    try:
        if d.sampler == "balanced":
            classes = d.batch_size // d.images_per_class
            return ClassBalanced(
                codes, classes, d.images_per_class, seed=seed, rank=world.rank, world=world.size
            )
        full = len(codes) >= d.batch_size
        return Shuffled(
            len(codes),
            d.batch_size,
            drop_last=full,
            seed=seed,
            rank=world.rank,
            world=world.size,
        )
    except ValueError as error:
        raise RecipeError(f"data: {error}") from error
