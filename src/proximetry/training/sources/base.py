"""What a run trains on and is evaluated on: rows of the catalogue, and batches of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.errors import Progress
from proximetry.data import (
    Catalog,
    CenterCrop,
    ClassBalanced,
    ColorJitter,
    RandomResizedCrop,
    Shuffled,
    Streamed,
    list_datasets,
    open_dataset,
)
from proximetry.data.images import Size
from proximetry.models import Preprocessing
from proximetry.models.embedder import Stage
from proximetry.models.names import OWN
from proximetry.recipe.auto import StorageFacts
from proximetry.recipe.schema import DataConfig, Protocol, Recipe, RecipeError
from proximetry.training.comparison import check_comparison, nothing_to_find
from proximetry.training.distributed import World
from proximetry.training.run_folder import RunError

Rows = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """This process's part of a batch before it is made.

    Attributes:
        rows: of the catalogue.
        labels: their classes.
        mine: the part in the whole batch, which holds ``total`` rows.
        generator: draws for the whole batch, so that nothing depends on who does what.
    """

    rows: Rows
    labels: Tensor
    mine: slice
    total: int
    generator: torch.Generator


class TrainingData(ABC):
    """What a run trains on, whatever its rows are.

    Attributes:
        catalog: all rows.
        rows: rows of the catalogue to ``train`` on, the ``held_out`` classes, the ``test`` set.
        protocol: how the epoch is selected: as the recipe says, or ``last`` where no class can be
            held out.
        class_names: of the training classes, in the order of their labels.
        sampler: which of the training rows make up which batch.
        notes: what there is to say about the data.
        fingerprint: by which a continued run knows the rows again.
    """

    fingerprint: dict[str, Any]
    stage: Stage = "pixels"
    """How far batches are on their way to the embedder's features."""
    kept = ""
    """Where rows are read from, in words, if that is not for ``data.cache`` to say."""

    def __init__(
        self, recipe: Recipe, catalog: Catalog, world: World, left_out: Sequence[str] = ()
    ) -> None:
        self.world, self._recipe = world, recipe
        self._divide(catalog, left_out)

    def _divide(self, catalog: Catalog, skipped: Sequence[str] = ()) -> None:
        """Set the rows to train on and to evaluate; ``skipped`` are notes on unreadable images."""
        self.catalog = catalog
        self.rows, self.protocol, notes = divide(catalog, self._recipe)
        self.notes = [*catalog.remarks(), *skipped, *notes]
        train = catalog.subset(self.rows["train"])
        self.class_names = list(train.class_names)
        self._codes = train.codes
        self.sampler = make_sampler(self._recipe, train.codes, self.world)

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What the embedder takes, and labels, of this process's part of each batch.

        From batch ``start`` on. What a batch holds depends on the seed, the epoch and its number
        alone.
        """

    @abstractmethod
    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Rows as evaluation sees them, in batches for `Embedder.pixel_features`."""

    @property
    def storage(self) -> StorageFacts | None:
        """What the choice of a cache depends on; None where there is nothing to choose."""
        return None

    @abstractmethod
    def open_cache(self, mode: str) -> None:
        """Open the cache that ``data.cache`` names."""

    def close(self) -> None:  # noqa: B027
        """Let go of what reads rows; nothing is read afterwards."""

    def _batch(self, epoch: int, number: int) -> Batch:
        chosen = self.sampler.batch(epoch, number)
        seed = derive_seed(self._recipe.training.seed, epoch, number)
        rank, size, total = self.world.rank, self.world.size, len(chosen)
        mine = slice(total * rank // size, total * (rank + 1) // size)
        labels = torch.from_numpy(self._codes[chosen[mine]])
        rows = self.rows["train"][chosen]
        return Batch(rows[mine], labels, mine, total, torch.Generator().manual_seed(seed))

    def _filled(self, rows: Rows, batch_size: int) -> Rows:
        """Fill up the last batch on a GPU with its last row: a CUDA graph has one batch size."""
        missing = -len(rows) % batch_size if self.world.device.type == "cuda" else 0
        return np.concatenate([rows, np.full(missing, rows[-1])]) if missing else rows

    def _send(self, labels: Tensor) -> Tensor:
        """Labels on the device of the run, without waiting for what that is doing."""
        if self.world.device.type != "cuda":
            return labels.to(self.world.device)
        return labels.pin_memory().to(self.world.device, non_blocking=True)


def open_catalog(recipe: Recipe, progress: Progress | None = None) -> Catalog:
    """Read which images there are."""
    d = recipe.data
    if d.dataset.startswith(OWN):
        raise RecipeError(
            f"the run was trained on data of its own, {d.dataset.removeprefix(OWN)!r}, which are "
            "not here: in Python, train(data=…) takes them"
        )
    if d.root is None and not list_datasets()[d.dataset].built_in:
        raise RecipeError(f"data.root is missing: where do the images of {d.dataset!r} lie?")
    return open_dataset(
        d.dataset,
        d.root,
        columns=d.columns,
        allow_missing=d.bad_images == "skip",
        progress=progress,
    )


class Division(NamedTuple):
    """Rows of a catalogue by their purpose, and what they allow.

    Attributes:
        protocol: how the epoch is selected.
        notes: where that is not what the recipe says, and why.
    """

    rows: dict[str, Rows]
    protocol: Protocol
    notes: list[str]


def divide(catalog: Catalog, recipe: Recipe) -> Division:
    """Return the rows to train on, the rows of held-out classes, and the rows of the test set.

    Classes are held out by a fixed draw, the same for every seed of a run, unless the catalogue
    has a split "val" of its own. Without a split at all, everything is there to be trained on.
    """
    protocol, train = recipe.evaluation.protocol, catalog.rows("train", "all")
    rows = {"train": train, "held_out": catalog.rows("val"), "test": catalog.rows("test")}
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
        wanted = set(names)
        out = np.array([name in wanted for name in part.class_names], bool)[part.codes]
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
    notes += _large_batch(recipe.data, len(rows["train"]))
    return Division(rows, protocol, notes)


def _large_batch(d: DataConfig, images: int) -> list[str]:
    """Say what becomes of a batch that is larger than all training images."""
    if d.batch_size <= images:
        return []
    step = "with all of them"
    if d.sampler == "balanced":
        step = "in which images of small classes come more than once"
    return [
        f"data.batch_size {d.batch_size} is more than the {images} training images: an epoch is "
        f"one step {step}; a smaller batch makes more steps"
    ]


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


def cache_sizes(recipe: Recipe, preprocessing: Preprocessing) -> tuple[Size, Size]:
    """What images are scaled to for training and for evaluation."""
    d, resize = recipe.data, preprocessing.resize
    if recipe.model.freeze_backbone:  # whose features are those of evaluation
        return resize, resize
    short_side = d.short_side or preprocessing.short_side
    # Random crops are cut from images of their own shape, also where evaluation scales all to one.
    return (short_side if d.random_crop else preprocessing.size_at(short_side)), resize


def make_augmentation(
    d: DataConfig, preprocessing: Preprocessing
) -> tuple[RandomResizedCrop | CenterCrop, ColorJitter]:
    """What makes training images of images."""
    crop, colors = (
        d.crop_size or preprocessing.crop,
        ColorJitter(d.color_jitter, d.hue, d.grayscale),
    )
    if not d.random_crop:
        return CenterCrop(crop, d.flip), colors
    how = preprocessing.interpolation
    return RandomResizedCrop(crop, d.crop_scale, d.crop_ratio, d.flip, how), colors


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
        if d.sampler == "streamed":
            buffer = d.shuffle_buffer
            return Streamed(len(codes), d.batch_size, buffer=buffer, drop_last=full, seed=seed)
        return Shuffled(len(codes), d.batch_size, drop_last=full, seed=seed)
    except ValueError as error:
        raise RecipeError(f"data: {error}") from error


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed that depends on all the numbers, the same on every machine."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0]) >> 1
