"""Resolve `auto` in a recipe: the fastest settings for a device, and the number of epochs."""

import math
from dataclasses import dataclass
from typing import Any

from proximetry._util.files import DISK_SHARE, MAX_CACHE_BYTES
from proximetry._util.formatting import format_int, readable_size
from proximetry.recipe.loading import flatten
from proximetry.recipe.schema import AUTO, Recipe

# `training.epochs: auto`, from benchmarks/default-recipe-search: more epochs for tiny sets, to
# get enough steps; fewer for large ones.
EPOCHS, EPOCHS_ON_CPU, MIN_EPOCHS = 30, 12, 5
MIN_STEPS = 100
MAX_IMAGES = 10_000_000

EVALUATIONS = 10  # of a run, at least, with `evaluation.every: auto`
# `training.checkpoint_epochs: auto` on a GPU: a short epoch takes no longer than a checkpoint.
CHECKPOINT_IMAGES = 20_000

PIXELS_SHARE = 1 / 3  # of a GPU's free memory; the rest is for activations and the CUDA graph
MEMORY_SHARE = 2 / 3  # of the free memory; larger caches are read from disk in each epoch

# A resumed run keeps these choices; the cache does not change results.
_RESUMED = (
    *("training.precision", "training.cuda_graph", "training.epochs"),
    *("schedule.every", "evaluation.every"),
)

_CACHES = {
    "none": "images decoded on the fly",
    "pixels": "pixels from disk",
    "gpu": "pixels on the GPU",
}


@dataclass(frozen=True)
class DeviceInfo:
    """The device: compute capability, bytes of free memory, number of processes of the run."""

    name: str
    cuda: bool = False
    capability: tuple[int, int] = (0, 0)
    free: int = 0
    triton: bool = False
    processes: int = 1


@dataclass(frozen=True)
class StorageInfo:
    """Bytes of all pixel caches, of those that do not exist yet, of free disk and memory."""

    pixels: int
    missing: int
    disk: int
    memory: int


def choose(
    recipe: Recipe,
    device: DeviceInfo,
    *,
    images: int,
    storage: StorageInfo | None,
    origin: str = "",
) -> tuple[Recipe, list[str]]:
    """Replace every ``auto``; return the recipe, and lines that describe the choices.

    Explicit values are kept. ``storage`` is None if ``data.cache`` does not apply; ``origin`` then
    describes where the rows are read from. ``images`` is the number to train on.
    """
    training, before = recipe.training, flatten(recipe.to_dict())
    cache, source = ("none", origin) if storage is None else _choose_cache(recipe, device, storage)
    if recipe.model.freeze_backbone:
        source = f"features from memory ({source})"

    bfloat16 = device.capability >= (8, 0)  # in hardware
    precision, note = training.precision, ""
    if precision == AUTO:
        precision = "bfloat16" if device.cuda and bfloat16 else "float32"
        note = " (this GPU has no bfloat16)" if device.cuda and not bfloat16 else ""

    reason = ""
    if device.processes > 1:
        reason = f" ({device.processes} processes)"
    elif training.accumulate > 1:  # chunks of a batch would share one graph and its outputs
        reason = f" (training.accumulate {training.accumulate})"
    elif training.cuda_graph == AUTO and not device.triton:
        reason = " (Triton is not installed)"
    possible = device.cuda and not reason
    graph = possible if training.cuda_graph == AUTO else training.cuda_graph
    if device.cuda:
        note += ", CUDA graph" if graph and possible else f", no CUDA graph{reason}"

    epochs, lines = training.epochs, [f"on {device.name}: {source}, {precision}{note}"]
    if epochs == AUTO:
        epochs = choose_epochs(images, recipe.data.batch_size, device.cuda)
        lines.append(f"{epochs} epochs, by the number of training images ({format_int(images)})")
    if 0 < epochs <= recipe.schedule.freeze_backbone_epochs:
        lines.append(
            f"warning: the backbone is frozen for all epochs: {epochs}. Train longer, or lower "
            "schedule.freeze_backbone_epochs"
        )
    values: dict[str, Any] = {
        "data.cache": cache,
        "training.precision": precision,
        "training.cuda_graph": graph,
        "training.epochs": epochs,
        "training.checkpoint_epochs": math.ceil(CHECKPOINT_IMAGES / images) if device.cuda else 1,
        "schedule.every": max(1, math.ceil(epochs / 3)),
        "evaluation.every": max(1, epochs // EVALUATIONS),
    }
    changes = {key: value for key, value in values.items() if before[key] == AUTO}
    return recipe.override(changes), lines


def choose_epochs(images: int, batch_size: int, cuda: bool) -> int:
    """Return the number of epochs for a number of training images."""
    steps_per_epoch = max(1, images // batch_size)
    needed = max(EPOCHS if cuda else EPOCHS_ON_CPU, math.ceil(MIN_STEPS / steps_per_epoch))
    return min(needed, max(MIN_EPOCHS, MAX_IMAGES // images))


def keep_choices(recipe: Recipe, saved: Recipe) -> Recipe:
    """Replace ``auto`` by the values of a saved run."""
    now, before = flatten(recipe.to_dict()), flatten(saved.to_dict())
    return recipe.override({key: before[key] for key in _RESUMED if now[key] == AUTO})


def _choose_cache(recipe: Recipe, device: DeviceInfo, storage: StorageInfo) -> tuple[str, str]:
    """Return `data.cache`, and a description of where images are read from."""
    cache, size = recipe.data.cache, readable_size(storage.pixels)
    limit = min(MAX_CACHE_BYTES, int(DISK_SHARE * storage.disk))
    if cache != AUTO:
        in_memory = cache == "gpu" and not device.cuda
        return cache, "pixels in memory" if in_memory else _CACHES[cache]
    if recipe.model.freeze_backbone:
        return "none", f"{_CACHES['none']}, once"
    if storage.missing > limit:
        reason = f"a pixel cache of {size} exceeds the limit of {readable_size(limit)}"
        return "none", f"{_CACHES['none']} ({reason}; --data.cache pixels writes it)"
    if device.cuda and storage.pixels <= PIXELS_SHARE * device.free:
        return "gpu", f"{_CACHES['gpu']} ({size})"
    if storage.missing and storage.pixels > MEMORY_SHARE * storage.memory:
        return "none", f"{_CACHES['none']} ({size} of pixels exceed the memory)"
    reason = f" ({size} exceed the GPU's free memory of {readable_size(device.free)})"
    return "pixels", _CACHES["pixels"] + (reason if device.cuda else "")
