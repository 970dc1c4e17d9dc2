"""Datasets of one's own: map-style torch Datasets of images, or of tensors for the network."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from proximetry._util.errors import UsageError, shown, spaced
from proximetry._util.machine import cores, preserve_rng_state
from proximetry._util.tensors import chunks
from proximetry.data import Catalog, PixelCache, open_image
from proximetry.data.augment.colors import ColorChanges, recolor
from proximetry.data.images import ImageError, resize_image
from proximetry.data.vectors import label_names
from proximetry.models import Embedder, Preprocessing
from proximetry.recipe.schema import Recipe
from proximetry.training.distributed import World
from proximetry.training.fingerprint import fingerprint
from proximetry.training.reporting import Display
from proximetry.training.run_folder import RunError
from proximetry.training.sources.base import (
    Batch,
    Rows,
    TrainingData,
    cache_sizes,
    derive_seed,
    make_augmentation,
)

SPLITS = ("train", "val", "test")
MOST_WORKERS = 8
_LABELS_AT_ONCE = 64


@dataclass(frozen=True)
class OwnDatasets:
    """The user's datasets by split; "all" for one that is not divided."""

    parts: Mapping[str, Dataset[Any]]
    name: str

    def __post_init__(self) -> None:
        for split, dataset in self.parts.items():
            _check_dataset(self.title(split), dataset)

    def title(self, split: str) -> str:
        """What to call a part in a sentence."""
        return self.name if split == "all" else f"{self.name} ({split})"

    def first_item(self) -> Any:
        """The image or tensor of the first item of all."""
        split, dataset = next(iter(self.parts.items()))
        return _read_item(self.title(split), dataset, 0)[0]

    def catalog(self, display: Display) -> Catalog:
        """The table of all items: their labels are asked for, or read with the items, once."""
        raw: list[Any] = []
        paths: list[str] = []
        splits: list[str] = []
        for split, dataset in self.parts.items():
            size = len(dataset)  # type: ignore[arg-type]
            raw += _labels(self.title(split), dataset, display)
            splits += [split] * size
            paths += [f"{split}/{i}" if split != "all" else str(i) for i in range(size)]
        catalog = Catalog(tuple(paths), label_names(raw), tuple(splits), Path(self.name))
        return replace(catalog, notes=tuple(catalog.shared_classes()))


def own_datasets(data: Any) -> OwnDatasets:
    """Read ``train(data=…)``: one dataset, or datasets by the names of their splits."""
    if not isinstance(data, Mapping):
        return OwnDatasets({"all": data}, type(data).__name__)
    unknown = [shown(key) for key in data if key not in SPLITS]
    if unknown or "train" not in data:
        wrong = f"has {', '.join(unknown)}" if unknown else "has no 'train'"
        raise UsageError(f"data must be datasets by 'train', 'val' and 'test', and {wrong}")
    parts = {split: data[split] for split in SPLITS if data.get(split) is not None}
    return OwnDatasets(parts, type(data["train"]).__name__)


def _check_dataset(name: str, dataset: Any) -> None:
    if isinstance(dataset, type):
        raise UsageError(f"data {dataset.__name__} is a class: make a dataset of it")
    if isinstance(dataset, DataLoader):
        raise UsageError("data is a DataLoader; give the dataset itself: batches are made here")
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"{name} is an IterableDataset; one with __getitem__ and __len__ is needed"
        )
    if not all(hasattr(dataset, method) for method in ("__getitem__", "__len__")):
        raise UsageError(
            "data must be a Catalog, or a dataset with __getitem__ and __len__ that gives (image, "
            f"label), got {shown(dataset)}"
        )
    if len(dataset) == 0:
        raise UsageError(f"{name} is empty")


def _read_item(name: str, dataset: Any, row: int) -> tuple[Any, Any]:
    """Return image and label of an item, checked."""
    item = dataset[row]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise UsageError(f"item {row} of {name} must be (image, label), got {_described(item)}")
    image, label = item[0], _plain_label(item[1])
    where = f"item {row} of {name}"
    if type(label) not in (int, str):
        raise UsageError(f"{where}: the label must be a whole number or a text, got {shown(label)}")
    if isinstance(image, Tensor | np.ndarray) and str(image.dtype).endswith("uint8"):
        if image.ndim != 3 or image.shape[2] != 3:
            hint = ""
            if image.ndim == 3 and image.shape[0] == 3:
                hint = "; give image.permute(1, 2, 0), or float32, which is taken as it is"
            raise UsageError(
                f"{where}: uint8 images are [height, width, 3], got {list(image.shape)}{hint}"
            )
    elif isinstance(image, Tensor) and image.is_floating_point():
        if not torch.isfinite(image).all():
            raise UsageError(f"{where}: the tensor has NaN or infinite values")
    elif not isinstance(image, Image.Image):
        raise UsageError(
            f"{where}: an image must be a PIL image, uint8 [height, width, 3] or a float tensor "
            f"that the network takes as it is, got {_described(image)}"
        )
    return image, label


def _described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return shown(value)


def _plain_label(label: Any) -> Any:
    if isinstance(label, Tensor):
        return label.item() if label.numel() == 1 else label
    array = isinstance(label, np.ndarray | np.generic)
    return label.item() if array and label.size == 1 else label


def _labels(name: str, dataset: Any, display: Display) -> list[Any]:
    """Labels of all items: from the dataset's own list where it has one that is true."""
    listed = _listed(dataset)
    if listed is not None:
        probes = sorted({0, len(dataset) // 2, len(dataset) - 1})
        if all(_read_item(name, dataset, row)[1] == listed[row] for row in probes):
            return listed
    display.message(f"reading {spaced(len(dataset))} items of {name} once, for their labels…")
    found: list[Any] = []
    loader = DataLoader(
        _Labels(name, dataset),
        batch_size=None,
        sampler=[range(len(dataset))[part] for part in chunks(len(dataset), _LABELS_AT_ONCE)],
        num_workers=_workers(1),
    )
    for labels in loader:
        if isinstance(labels, Exception):
            raise labels
        found += labels
        display.progress("labels", len(found), len(dataset))
    return found


def _listed(dataset: Any) -> list[Any] | None:
    """The labels that a dataset lists as `targets` or `labels`, as those of torchvision do."""
    if isinstance(dataset, Subset):
        inner = _listed(dataset.dataset)
        return None if inner is None else [inner[row] for row in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_listed(part) for part in dataset.datasets]
        return None if None in parts else [label for part in parts for label in part or ()]
    for name in ("targets", "labels"):
        labels = getattr(dataset, name, None)
        if isinstance(labels, Tensor | np.ndarray):
            labels = labels.tolist()
        if isinstance(labels, Sequence) and len(labels) == len(dataset):
            plain = [_plain_label(label) for label in labels]
            if all(type(label) in (int, str) for label in plain):
                return plain
    return None


class _Labels(Dataset[list[Any] | Exception]):
    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset = name, dataset

    def __getitem__(self, rows: range) -> list[Any] | Exception:
        try:
            return [_read_item(self.name, self.dataset, row)[1] for row in rows]
        except (UsageError, ImageError) as error:
            return error  # what a worker raises comes with its traceback in place of a sentence


def _workers(processes: int) -> int:
    return max(1, min(MOST_WORKERS, cores() // processes))


class _Order(NamedTuple):
    """A batch before it is made.

    Attributes:
        rows: of the catalogue.
        seeds: of the random numbers that the dataset itself may draw, item by item.
        chances: what augmentation draws; None for rows as evaluation sees them.
    """

    rows: Rows
    seeds: list[int]
    chances: Tensor | None = None
    colors: ColorChanges | None = None


class _Reader(Dataset[tuple[Tensor, list[Any]] | Exception]):
    """Makes whole batches, in a worker process."""

    def __init__(
        self, datasets: OwnDatasets, recipe: Recipe, preprocessing: Preprocessing, tensors: bool
    ) -> None:
        d = recipe.data
        self.datasets, self.preprocessing, self.tensors = datasets, preprocessing, tensors
        self.starts = np.cumsum([0, *(len(part) for part in datasets.parts.values())])  # type: ignore[arg-type]
        if tensors:
            return
        self.size = cache_sizes(recipe, preprocessing)[0]
        self.augment, self.colors = make_augmentation(d, preprocessing)

    def __getitem__(self, order: _Order) -> tuple[Tensor, list[Any]] | Exception:
        try:
            return self._make(order)
        except (UsageError, ImageError) as error:
            return error  # see _Labels

    def _make(self, order: _Order) -> tuple[Tensor, list[Any]]:
        items = [self._item(row, seed) for row, seed in zip(order.rows, order.seeds, strict=True)]
        labels = [label for _, label in items]
        if self.tensors:
            return torch.stack([image for image, _ in items]), labels
        if order.chances is None:
            return torch.stack([self.preprocessing.pixels(image) for image, _ in items]), labels
        how = self.preprocessing.interpolation
        arrays = [
            np.array(resize_image(open_image(_array(image)), self.size, how)) for image, _ in items
        ]
        pixels, rows = PixelCache.in_memory(arrays), np.arange(len(arrays))
        found = self.augment.apply(pixels, rows, self.augment.windows(pixels, rows, order.chances))
        return (found if order.colors is None else recolor(found, order.colors)), labels

    def _item(self, row: int, seed: int) -> tuple[Any, Any]:
        part = int(np.searchsorted(self.starts, row, "right")) - 1
        split, dataset = list(self.datasets.parts.items())[part]
        number, name = int(row - self.starts[part]), self.datasets.title(split)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        image, label = _read_item(name, dataset, number)
        if self.tensors != _is_tensor(image):
            raise UsageError(
                f"item {number} of {name} is {_described(image)}, unlike the first one: give "
                "images or float tensors, not both"
            )
        return image, label


def _taken(made: tuple[Tensor, list[Any]] | Exception) -> tuple[Tensor, list[Any]]:
    if isinstance(made, Exception):
        raise made
    return made


def _array(image: Any) -> Any:
    return image.numpy() if isinstance(image, Tensor) else image


def _is_tensor(image: Any) -> bool:
    return isinstance(image, Tensor) and image.is_floating_point()


class DatasetData(TrainingData):
    """The items of datasets of one's own, read by worker processes when they are needed.

    Images are augmented and preprocessed as those of files are; float tensors go to the network as
    they are. A dataset may draw random numbers of torch, NumPy and Python: they follow from the
    seed of the run, the epoch and the batch, so that a continued run draws the same.
    """

    def __init__(
        self,
        recipe: Recipe,
        datasets: OwnDatasets,
        catalog: Catalog,
        embedder: Embedder,
        world: World,
        display: Display,
    ) -> None:
        super().__init__(recipe, catalog, world)
        for note in self.notes:
            display.message(note)
        self.fingerprint = fingerprint(catalog, None)
        if world.first(lambda: self.fingerprint) != self.fingerprint:
            raise RunError(f"{datasets.name} has other labels on rank {world.rank} than on rank 0")
        with preserve_rng_state():
            tensors = _is_tensor(datasets.first_item())
        if not tensors and not embedder.takes_images:
            raise UsageError(
                f"{datasets.name} gives images, and the embedder takes {embedder.preprocessing}"
            )
        # What the embedder takes as it is, it takes either way.
        self.stage = "normalized" if tensors else "pixels"
        self.kept = "tensors as they are" if tensors else "images from the dataset"
        self._reader = _Reader(datasets, recipe, embedder.preprocessing, tensors)
        self._orders: Iterator[_Order] = iter(())
        self._loader = self._make_loader(_Orders(self), persistent_workers=True)

    def _make_loader(self, orders: Iterable[_Order], **settings: Any) -> DataLoader[Any]:
        workers = _workers(self.world.size)
        return DataLoader(
            self._reader, batch_size=None, sampler=orders, num_workers=workers, **settings
        )

    def close(self) -> None:
        """End the worker processes, which would live until the loader is collected as garbage."""
        iterator = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]

    def open_cache(self, mode: str) -> None:
        """Items are read when they are needed, from where the dataset has them."""

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pixels or tensors, and labels, of this process's part of each batch."""
        ordered: deque[Batch] = deque()

        def orders() -> Iterator[_Order]:
            for number in range(start, len(self.sampler)):
                ordered.append(self._batch(epoch, number))
                yield self._order(ordered[-1], epoch, number)

        self._orders = orders()
        for pixels, labels in map(_taken, self._loader):
            batch = ordered.popleft()
            self._check_labels(batch.rows, labels)
            yield pixels.to(self.world.device), self._send(batch.labels)

    def _order(self, batch: Batch, epoch: int, number: int) -> _Order:
        places = range(batch.total)[batch.mine]
        seed = self._recipe.training.seed
        seeds = [derive_seed(seed, epoch, number, place) for place in places]
        if self._reader.tensors:
            return _Order(batch.rows, seeds)
        reader, mine = self._reader, batch.mine
        chances = reader.augment.draw_uniforms(batch.total, batch.generator)[mine]
        colors = reader.colors.draw(batch.total, batch.generator)[mine] if reader.colors else None
        return _Order(batch.rows, seeds, chances, colors)

    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Items as evaluation sees them; on a GPU the last batch is filled up."""
        rows = self._filled(rows, batch_size)
        parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        orders = [_Order(part, [int(row) for row in part]) for part in parts]
        # A separate loader: a callback may evaluate in the middle of an epoch.
        loader = self._make_loader(orders)
        for (pixels, labels), part in zip(map(_taken, loader), parts, strict=True):
            self._check_labels(part, labels)
            yield pixels.to(self.world.device)

    def _check_labels(self, rows: Rows, labels: list[Any]) -> None:
        """Refuse items whose label is not the one that was known of them."""
        for row, label in zip(rows, labels, strict=True):
            known = self.catalog.labels[row]
            if str(label).rjust(len(known), "0") != known:
                raise RunError(
                    f"{self.catalog.file(row)} has the label {shown(label)} now, and had {known!r} "
                    "before: its dataset must give the same labels each time"
                )


class _Orders:
    """The training batches of an epoch; a persistent loader iterates over them once per epoch."""

    def __init__(self, data: DatasetData) -> None:
        self._data = data

    def __iter__(self) -> Iterator[_Order]:
        return iter(self._data._orders)
