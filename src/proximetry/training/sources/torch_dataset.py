"""Custom datasets: map-style torch Datasets of images, or of tensors for the network."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, format_value
from proximetry._util.machine import cores, preserve_rng_state
from proximetry._util.tensors import chunks
from proximetry.data import Catalog, PixelCache, open_image
from proximetry.data.augment import recolor
from proximetry.data.images import ImageError, resize_image
from proximetry.data.vectors import label_names
from proximetry.models import Embedder, Preprocessing
from proximetry.recipe.schema import Recipe
from proximetry.training.distributed import World
from proximetry.training.errors import RunError
from proximetry.training.reporting import Display
from proximetry.training.sources.training_data import (
    Batch,
    Rows,
    TrainingData,
    cache_sizes,
    derive_seed,
    fingerprint,
    make_augmentation,
)

SPLITS = ("train", "val", "test")
MAX_WORKERS = 8
_LABELS_PER_TASK = 64


@dataclass(frozen=True)
class TorchDatasets:
    """Custom datasets by split; "all" for a single one."""

    parts: Mapping[str, Dataset[Any]]
    name: str

    def title(self, split: str) -> str:
        """Return the name of a part for messages."""
        return self.name if split == "all" else f"{self.name} ({split})"

    def catalog(self, display: Display) -> Catalog:
        """Return the catalog of all items, with labels from the datasets' lists or read once."""
        labels, paths, splits = list[Any](), list[str](), list[str]()
        for split, dataset in self.parts.items():
            size = len(dataset)  # type: ignore[arg-type]
            labels += _labels(self.title(split), dataset, display)
            splits += [split] * size
            paths += [f"{split}/{i}" if split != "all" else str(i) for i in range(size)]
        catalog = Catalog(tuple(paths), label_names(labels), tuple(splits), Path(self.name))
        return replace(catalog, notes=tuple(catalog.shared_classes()))


def torch_datasets(data: Any) -> TorchDatasets:
    """Validate ``train(data=…)``: one dataset, or datasets by the names of their splits."""
    if isinstance(data, Mapping):
        unknown = [format_value(key) for key in data if key not in SPLITS]
        if unknown or "train" not in data:
            problem = f"got {', '.join(unknown)}" if unknown else "'train' is missing"
            raise UsageError(f"data must map 'train', 'val' and 'test' to datasets: {problem}")
        parts = {split: data[split] for split in SPLITS if data.get(split) is not None}
    else:
        parts = {"all": data}
    datasets = TorchDatasets(parts, type(next(iter(parts.values()))).__name__)
    for split, dataset in parts.items():
        if isinstance(dataset, type | DataLoader | IterableDataset) or not all(
            hasattr(dataset, method) for method in ("__getitem__", "__len__")
        ):
            raise UsageError(
                "data must be a Catalog, or a dataset with __getitem__ and __len__ that returns "
                "(image, label); not a class, a DataLoader or an IterableDataset: "
                f"{format_value(dataset)}"
            )
        if len(dataset) == 0:
            raise UsageError(f"{datasets.title(split)} is empty")
    return datasets


def _read_item(name: str, dataset: Any, row: int) -> tuple[Any, Any]:
    """Return image and label of an item; raise if they cannot be used."""
    item, where = dataset[row], f"item {row} of {name}"
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise UsageError(f"{where} must be (image, label), got {_describe(item)}")
    image, label = item[0], _plain_label(item[1])
    if type(label) not in (int, str):
        raise UsageError(
            f"{where}: the label must be an integer or a string, got {format_value(label)}"
        )
    if isinstance(image, Tensor | np.ndarray) and str(image.dtype).endswith("uint8"):
        if image.ndim != 3 or image.shape[2] != 3:
            raise UsageError(
                f"{where}: uint8 images must be [height, width, 3], got {list(image.shape)}. Use "
                "image.permute(1, 2, 0), or float32, which is passed to the network unchanged."
            )
    elif not isinstance(image, Image.Image) and not _is_float(image):
        raise UsageError(
            f"{where}: an image must be a PIL image, uint8 [height, width, 3] or a float tensor "
            f"for the network, got {_describe(image)}"
        )
    return image, label


def _describe(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    return format_value(value)


def _is_float(image: Any) -> bool:
    return isinstance(image, Tensor) and image.is_floating_point()


def _plain_label(label: Any) -> Any:
    array = isinstance(label, Tensor | np.ndarray | np.generic)
    return label.item() if array and label.reshape(-1).shape[0] == 1 else label


def _labels(name: str, dataset: Any, display: Display) -> list[Any]:
    """Return the labels of all items, from the dataset's list if it is correct, else read."""
    stored, rows = _stored_labels(dataset), range(len(dataset))
    samples = (rows[0], rows[len(rows) // 2], rows[-1])
    if stored and all(_read_item(name, dataset, row)[1] == stored[row] for row in samples):
        return stored
    display.message(f"reading {format_int(len(rows))} items of {name} once, for their labels…")
    labels: list[Any] = []
    tasks = [rows[part] for part in chunks(len(rows), _LABELS_PER_TASK)]
    for part in _map(partial(_read_labels, name, dataset), tasks):
        labels += part
        display.progress("labels", len(labels), len(rows))
    return labels


def _stored_labels(dataset: Any) -> list[Any] | None:
    """Return the labels in `targets` or `labels`, as in torchvision's datasets."""
    if isinstance(dataset, Subset):
        inner = _stored_labels(dataset.dataset)
        return None if inner is None else [inner[row] for row in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_stored_labels(part) for part in dataset.datasets]
        return None if None in parts else [label for part in parts for label in part or ()]
    for name in ("targets", "labels"):
        labels = getattr(dataset, name, None)
        if isinstance(labels, Tensor | np.ndarray):
            labels = labels.tolist()
        if isinstance(labels, Sequence) and len(labels) == len(dataset):
            labels = [_plain_label(label) for label in labels]
            if all(type(label) in (int, str) for label in labels):
                return labels
    return None


def _read_labels(name: str, dataset: Any, rows: range) -> list[Any]:
    return [_read_item(name, dataset, row)[1] for row in rows]


class _Task(Dataset[Any]):
    """Calls a function in a worker process; returns its errors, for `_map` to raise."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, argument: Any) -> Any:
        try:
            return self.function(argument)
        except (UsageError, RunError, ImageError) as error:
            return error  # a DataLoader would raise it with the traceback of the worker


def _map(
    function: Callable[[Any], Any], arguments: Iterable[Any], processes: int = 1
) -> Iterator[Any]:
    """Call a function in worker processes; the run's ``processes`` share the cores."""
    workers = max(1, min(MAX_WORKERS, cores() // processes))
    sampler: Any = arguments
    loader = DataLoader(_Task(function), batch_size=None, sampler=sampler, num_workers=workers)
    # Outside the main thread a DataLoader installs no signal handler, which would raise errors
    # about killed workers of any loader anywhere in the program.
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(iter, loader).result()
    for result in results:
        if isinstance(result, Exception):
            raise result
        yield result


class _BatchReader:
    """Makes whole batches in a worker process."""

    def __init__(
        self,
        datasets: TorchDatasets,
        catalog: Catalog,
        recipe: Recipe,
        preprocessing: Preprocessing,
        tensors: bool,
    ) -> None:
        self.datasets, self.labels = datasets, catalog.labels
        self.preprocessing, self.tensors = preprocessing, tensors
        self.starts = np.cumsum([0, *(len(part) for part in datasets.parts.values())])  # type: ignore[arg-type]
        if not tensors:
            self.size = cache_sizes(recipe, preprocessing)[0]
            self.augment, self.colors = make_augmentation(recipe.data, preprocessing)

    def train(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the input of a training step and its labels."""
        generator, local_slice = batch.generator(), batch.local_slice
        labels = torch.from_numpy(batch.labels)
        seeds = [derive_seed(*batch.key, position) for position in range(batch.total)[local_slice]]
        images = self._items(batch.rows, seeds)
        if self.tensors:
            return torch.stack(images), labels
        uniforms = self.augment.draw_uniforms(batch.total, generator)[local_slice]
        interpolation = self.preprocessing.interpolation
        arrays = [
            np.array(resize_image(open_image(image), self.size, interpolation)) for image in images
        ]
        pixels, rows = PixelCache.in_memory(arrays), np.arange(len(arrays))
        crops = self.augment.apply(pixels, rows, self.augment.windows(pixels, rows, uniforms))
        if self.colors:
            crops = recolor(crops, self.colors.draw(batch.total, generator)[local_slice])
        return crops, labels

    def view(self, rows: Rows) -> Tensor:
        """Return items as in evaluation."""
        images = self._items(rows, rows.tolist())
        return torch.stack(images if self.tensors else [*map(self.preprocessing.pixels, images)])

    def _items(self, rows: Rows, seeds: Iterable[int]) -> list[Any]:
        """Read items, each with its own seed for the random numbers of the dataset."""
        images, parts = [], [*self.datasets.parts.items()]
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            index = int(np.searchsorted(self.starts, row, "right")) - 1
            split, dataset = parts[index]
            name, number = self.datasets.title(split), row - int(self.starts[index])
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            image, label = _read_item(name, dataset, number)
            if self.tensors != _is_float(image):
                raise UsageError(
                    f"item {number} of {name} is {_describe(image)}, unlike the first one. Use "
                    "images or float tensors, not both."
                )
            expected = self.labels[row]
            if str(label).rjust(len(expected), "0") != expected:
                raise RunError(
                    f"item {number} of {name} has the label {format_value(label)}, but had "
                    f"{expected!r} before. A dataset must return the same labels each time."
                )
            as_array = isinstance(image, Tensor) and not self.tensors
            images.append(image.numpy() if as_array else image)
        return images


class TorchDatasetData(TrainingData):
    """The items of custom datasets, read on demand by worker processes.

    Images are augmented and preprocessed like files; float tensors are passed to the network
    unchanged. The random numbers that a dataset draws from torch, NumPy and Python depend on the
    seed of the run, the epoch and the batch, so a resumed run draws the same ones.
    """

    def __init__(
        self,
        recipe: Recipe,
        datasets: TorchDatasets,
        catalog: Catalog,
        embedder: Embedder,
        world: World,
        *,
        display: Display,
    ) -> None:
        super().__init__(recipe, catalog, world, display)
        self.fingerprint = fingerprint(catalog)
        if world.on_main(lambda: self.fingerprint) != self.fingerprint:
            raise RunError(f"the labels of {datasets.name} differ between ranks {world.rank} and 0")
        split, dataset = next(iter(datasets.parts.items()))
        with preserve_rng_state():
            tensors = _is_float(_read_item(datasets.title(split), dataset, 0)[0])
        if not tensors and not embedder.takes_images:
            raise UsageError(
                f"{datasets.name} has images, but the embedder takes {embedder.preprocessing}"
            )
        self.stage = "normalized" if tensors else "pixels"
        self.origin = "tensors from the dataset" if tensors else "images from the dataset"
        self._reader = _BatchReader(datasets, catalog, recipe, embedder.preprocessing, tensors)

    def open_cache(self, mode: str) -> None:
        """Do nothing: items are read on demand."""

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pixels or tensors, and labels, of this process's part of each batch."""
        batches = (self._batch(epoch, number) for number in range(start, len(self.sampler)))
        for pixels, labels in _map(self._reader.train, batches, self.world.size):
            yield pixels.to(self.world.device), self._send(labels)

    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of items as in evaluation."""
        rows = self._pad_rows(rows, batch_size)
        parts = [rows[part] for part in chunks(len(rows), batch_size)]
        for pixels in _map(self._reader.view, parts, self.world.size):
            yield pixels.to(self.world.device)
