"""The data of a run: the rows for training, selection and test, and the batches."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.types import Progress
from proximetry.data import (
    Catalog,
    CenterCrop,
    ClassBalancedSampler,
    ColorJitter,
    RandomResizedCrop,
    ShuffledSampler,
    StreamedSampler,
    list_datasets,
    open_dataset,
)
from proximetry.data.images import Size
from proximetry.models import Preprocessing
from proximetry.models.constants import CUSTOM
from proximetry.models.embedder import Stage
from proximetry.recipe.auto import StorageInfo
from proximetry.recipe.loading import RecipeError
from proximetry.recipe.schema import DataConfig, Protocol, Recipe
from proximetry.training.distributed import World
from proximetry.training.errors import RunError
from proximetry.training.evaluation_inputs import check_comparison, explain_missing_positives
from proximetry.training.reporting import Display

Rows = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """This process's part of a batch, before its images are loaded.

    Attributes:
        rows: catalog rows.
        labels: their classes.
        local_slice: position in the whole batch, which has ``total`` rows.
        key: seed of the run, epoch, and number of the batch.
    """

    rows: Rows
    labels: Rows
    local_slice: slice
    total: int
    key: tuple[int, int, int]

    def generator(self) -> torch.Generator:
        """Return the random generator of the whole batch, for any number of processes."""
        return torch.Generator().manual_seed(derive_seed(*self.key))


class TrainingData(ABC):
    """The data of a run: images, vectors or a torch dataset.

    Attributes:
        catalog: all rows.
        rows: rows of the catalog by use: ``train``, ``held_out`` classes, ``test``.
        protocol: that of the recipe, or ``last`` if no class can be held out.
        class_names: names of the training classes, in the order of their labels.
        sampler: selects the training rows of each batch.
        notes: notes on the data.
        fingerprint: identifies the rows when a run resumes.
        stage: the embedder stage that takes the batches.
        origin: description of where rows are read from; empty if ``data.cache`` decides it.
    """

    fingerprint: dict[str, Any]
    stage: Stage = "pixels"
    origin = ""

    def __init__(self, recipe: Recipe, catalog: Catalog, world: World, display: Display) -> None:
        self.world, self._recipe, self._display = world, recipe, display
        self.split(catalog)
        for note in self.notes:
            display.message(note)

    def split(self, catalog: Catalog, skipped: Sequence[str] = ()) -> None:
        """Set the rows to train on and to evaluate; ``skipped`` are notes on unreadable images."""
        self.catalog = catalog
        self.rows, self.protocol, notes = split_rows(catalog, self._recipe)
        self.notes = [*catalog.remarks(), *skipped, *notes]
        train = catalog.subset(self.rows["train"])
        self.class_names = list(train.class_names)
        self._codes = add_label_noise(train.codes, self._recipe.data.label_noise)
        self.sampler = make_sampler(self._recipe, self._codes, self.world)

    @property
    def class_counts(self) -> list[int]:
        """The number of training rows of each class; 0 for classes without data."""
        counts: list[int] = np.bincount(self._codes, minlength=len(self.class_names)).tolist()
        return counts

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield input and labels of this process's part of each batch, from batch ``start`` on.

        A batch depends on the seed, the epoch and its number alone.
        """

    @abstractmethod
    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of rows as in evaluation, for `extract_features`."""

    @property
    def storage(self) -> StorageInfo | None:
        """Sizes for the choice of a cache; None if there is no choice."""
        return None

    @abstractmethod
    def open_cache(self, mode: str) -> None:
        """Open the cache that ``data.cache`` selects."""

    def _batch(self, epoch: int, number: int) -> Batch:
        indices = self.sampler.batch(epoch, number)
        local_slice = self.world.local_slice(len(indices))
        rows, labels = self.rows["train"][indices[local_slice]], self._codes[indices[local_slice]]
        key = self._recipe.training.seed, epoch, number
        return Batch(rows, labels, local_slice, len(indices), key)

    def _pad_rows(self, rows: Rows, batch_size: int) -> Rows:
        """Repeat the last row to fill the last batch on a GPU: a CUDA graph has one batch size."""
        missing = -len(rows) % batch_size if self.world.device.type == "cuda" else 0
        return np.concatenate([rows, np.full(missing, rows[-1])]) if missing else rows

    def _send(self, labels: Tensor) -> Tensor:
        """Send labels to the device of the run without waiting for it."""
        on_cuda = self.world.device.type == "cuda"
        return labels.pin_memory().to(self.world.device, non_blocking=True) if on_cuda else labels


def open_catalog(recipe: Recipe, progress: Progress | None = None) -> Catalog:
    """Open the catalog of the recipe's images."""
    d = recipe.data
    if d.dataset.startswith(CUSTOM):
        raise RecipeError(f"data.dataset {d.dataset!r} is custom. Pass it in Python: train(data=…)")
    if d.root is None and not list_datasets()[d.dataset].built_in:
        raise RecipeError(f"data.root is missing. Set it to the folder of {d.dataset!r}.")
    catalog = open_dataset(
        d.dataset,
        d.root,
        columns=d.columns,
        labels_from_name=d.labels_from_name,
        allow_missing=d.bad_images == "skip" or d.suggestions is not None,
        progress=progress,
    )
    return catalog if d.suggestions is None else catalog.apply_suggestions(d.suggestions)


def fingerprint(catalog: Catalog, contents: str | None = None) -> dict[str, Any]:
    """Describe the rows of a catalog in plain values, for `check_same_images`.

    ``contents`` is the digest of the image files, if known.
    """
    roles = (catalog.labels, catalog.splits, catalog.queries, catalog.galleries)
    digests = []
    for lines in (zip(*filter(None, roles), strict=True), catalog.paths):
        digest = hashlib.sha256()
        for line in lines:
            digest.update(repr(line).encode("utf-8", "surrogateescape") + b"\0")
        digests.append(digest.hexdigest())
    return {
        "classes": dict(sorted(Counter(catalog.labels).items())),
        "splits": dict(sorted(Counter(catalog.splits).items())),
        "rows": digests[0],
        "paths": digests[1],
        "contents": contents,
    }


MIN_CLASSES = 10
"""Minimum number of training classes to hold some out."""
MIN_HELD_OUT = 3
"""Minimum number of held-out classes; with fewer, nearly every query is correct in any epoch."""


class DataSplit(NamedTuple):
    """Rows of a catalog by use, the protocol that they allow, and notes on both."""

    rows: dict[str, Rows]
    protocol: Protocol
    notes: list[str]


def split_rows(catalog: Catalog, recipe: Recipe) -> DataSplit:
    """Split a catalog into rows for training, held-out classes and the test set.

    Held-out classes are the split "val" if the catalog has one, else a random choice that is the
    same for every seed. Without splits, all rows are for training.
    """
    protocol, train = recipe.evaluation.protocol, catalog.rows("train", "all")
    rows = {"train": train, "held_out": catalog.rows("val"), "test": catalog.rows("test")}
    titles, notes = {"held_out": "split val", "test": "split test"}, []
    part = catalog.subset(train)
    if len(part.class_names) < (2 if recipe.training.epochs else 1):
        raise RunError(
            f"split train has {len(part)} images of {len(part.class_names)} classes. Training "
            "needs two classes or more, each in its own folder."
        )
    if protocol == "held_out" and len(rows["held_out"]) == 0:
        names, reason = _hold_out(part, recipe.evaluation.held_out)
        if reason and recipe.schedule.name == "plateau":
            raise RunError(
                f"{reason}, but schedule.name plateau needs held-out classes. Use another "
                "schedule.name, such as step, and training.two_stages false."
            )
        if reason:
            protocol = "last"
            notes.append(f"{reason}. Training uses all classes and saves the last epoch")
        held_out = np.isin(part.class_names, names)[part.codes]
        rows["train"], rows["held_out"] = train[~held_out], train[held_out]
        titles["held_out"] = "the held-out classes"
    rows["train"] = limit_per_class(catalog, rows["train"], recipe.data.max_images_per_class)
    for name, selects in (("held_out", "held_out"), ("test", "paper")):
        if len(rows[name]) == 0:
            continue
        reason = _explain_unusable(catalog.subset(rows[name]), titles[name], recipe)
        if reason and protocol == selects:
            raise RunError(f"cannot select an epoch: {reason}. Use evaluation.protocol last.")
        if reason:
            notes.append(f"{reason}: it is not evaluated")
            rows[name] = rows[name][:0]
    if protocol == "last" and recipe.training.stop_after:
        notes.append(
            f"training.stop_after {recipe.training.stop_after} has no effect: without a metric "
            "that selects the epoch, all epochs are trained"
        )
    if protocol == "paper" and len(rows["test"]) == 0:
        raise RunError(
            "evaluation.protocol paper needs a test set to select the epoch. Add one (a folder "
            "test/ or a column split), or use evaluation.protocol held_out."
        )
    size, images = recipe.data.batch_size, len(rows["train"])
    if size > images:
        notes.append(
            f"data.batch_size {size} is more than the {images} training images: an epoch is one "
            "step; a smaller batch makes more steps"
        )
    return DataSplit(rows, protocol, notes)


def _explain_unusable(part: Catalog, title: str, recipe: Recipe) -> str:
    """Return why a part cannot be evaluated, "" if it can; raise if the metrics do not apply."""
    if len(part.class_names) == 1 or np.bincount(part.codes).max() == 1:
        return f"{title} needs two classes, one of them with two images or more"
    if reason := explain_missing_positives(part):
        return f"in {title} {reason}"
    try:
        check_comparison(part, recipe.evaluation.metrics)
    except ValueError as error:
        raise RunError(str(error)) from error
    return ""


def _hold_out(train: Catalog, fraction: float) -> tuple[tuple[str, ...], str]:
    """Return the classes to hold out or, if that is impossible, none and the reason."""
    images = np.bincount(train.codes)
    pairs = train.subset(images[train.codes] > 1)  # a class of one image has no positives
    classes, candidates = len(images), len(pairs.class_names)
    number = max(MIN_HELD_OUT, round(fraction * candidates))
    if classes < MIN_CLASSES:
        return (), f"{classes} training classes are too few to hold some out"
    if candidates < number:
        few = f"only {candidates} have two images, too few to hold some out"
        return (), f"of {classes} training classes {few}"
    if classes - number < 2:
        return (), f"evaluation.held_out {fraction} leaves too few of {classes} classes to train on"
    if candidates == number:
        return pairs.class_names, ""
    return pairs.split_classes((candidates - number, number), seed=0)[1].class_names, ""


def limit_per_class(catalog: Catalog, rows: Rows, limit: int | None) -> Rows:
    """Return at most ``limit`` random rows of each class, the same for every seed, in order."""
    if limit is None:
        return rows
    order = np.random.default_rng(0).permutation(rows)
    order = order[np.argsort(catalog.codes[order], kind="stable")]
    codes = catalog.codes[order]
    number = np.arange(len(codes)) - np.searchsorted(codes, codes)  # within its class
    return np.sort(order[number < limit])


def add_label_noise(codes: Rows, fraction: float) -> Rows:
    """Replace a random fraction of the codes by those of other classes, the same for every seed."""
    rng, noisy, classes = np.random.default_rng(0), codes.copy(), codes.max() + 1
    if fraction and classes == 1:
        raise RunError("data.label_noise needs two classes or more")
    rows = rng.permutation(len(codes))[: round(fraction * len(codes))]
    noisy[rows] = (noisy[rows] + rng.integers(1, classes, len(rows))) % classes
    return noisy


def cache_sizes(recipe: Recipe, preprocessing: Preprocessing) -> tuple[Size, Size]:
    """Return the sizes that images are resized to for training and for evaluation."""
    d, resize = recipe.data, preprocessing.resize
    if recipe.model.freeze_backbone:  # trains on the features of evaluation
        return resize, resize
    short_side = d.short_side or preprocessing.short_side
    # Random crops come from images of their original shape, even if evaluation squashes them.
    return (short_side if d.random_crop else preprocessing.size_at(short_side)), resize


def make_augmentation(
    d: DataConfig, preprocessing: Preprocessing
) -> tuple[RandomResizedCrop | CenterCrop, ColorJitter]:
    """Make the crops and the color changes of training images."""
    crop = d.crop_size or preprocessing.crop
    colors = ColorJitter(d.color_jitter, d.hue, d.grayscale)
    if not d.random_crop:
        return CenterCrop(crop, d.flip), colors
    interpolation = preprocessing.interpolation
    return RandomResizedCrop(crop, d.crop_scale, d.crop_ratio, d.flip, interpolation), colors


def make_sampler(
    recipe: Recipe, codes: Rows, world: World
) -> ShuffledSampler | ClassBalancedSampler:
    """Make the sampler of training batches."""
    d, seed = recipe.data, recipe.training.seed
    if d.batch_size % world.size:
        raise RecipeError(
            f"data.batch_size {d.batch_size} cannot be shared evenly by {world.size} processes. "
            f"Use a multiple of {world.size}."
        )
    options: Any = {"drop_last": len(codes) >= d.batch_size, "seed": seed}
    try:
        if d.sampler == "balanced":
            classes = d.batch_size // d.images_per_class
            return ClassBalancedSampler(codes, classes, d.images_per_class, seed=seed)
        if d.sampler == "streamed":
            return StreamedSampler(len(codes), d.batch_size, buffer=d.shuffle_buffer, **options)
        return ShuffledSampler(len(codes), d.batch_size, **options)
    except ValueError as error:
        raise RecipeError(f"data: {error}") from error


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed that depends on all the numbers, the same on every machine."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0]) >> 1
