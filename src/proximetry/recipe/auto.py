"""What `auto` in a recipe stands for: the fastest way on this device, and how long to train.

`choose` knows a device and the images by a few facts alone, so that it can be asked about any.
"""

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import readable_size, spaced
from proximetry.recipe.schema import AUTO, Recipe, flatten

if TYPE_CHECKING:
    from proximetry.training.distributed import World

# `training.epochs: auto`, as found in benchmarks/default-recipe-search. A tiny set needs more
# epochs for enough steps; that a large one is done after so many images was not measured.
EPOCHS, EPOCHS_ON_CPU, FEWEST_EPOCHS = 30, 12, 5
LEAST_STEPS = 100
MOST_IMAGES = 10_000_000

# Pixels may take this part of a GPU's free memory. The rest is for activations, which take several
# times the pixels of a batch in every layer, for the CUDA graph's own pool, and for evaluation.
PIXELS_SHARE = 1 / 3

BFLOAT16_SINCE = (8, 0)
"""The first compute capability with bfloat16 in hardware."""

MAX_CACHE_BYTES, DISK_SHARE = 20_000_000_000, 1 / 5
"""What `auto` writes to the disk at most: bytes of new caches, and their share of the free disk."""

# Pixels may take this part of the free memory: what is larger is read from the disk again and
# again, and decoding files is then as quick.
MEMORY_SHARE = 2 / 3

# Keys that a continued run keeps as it was begun. Where pixels are read from may change: the
# device may be another one by then, and it makes no difference to the result, unless the images
# were encoded.
_KEPT = ("training.precision", "training.cuda_graph", "training.epochs", "schedule.every")


@dataclass(frozen=True)
class DeviceFacts:
    """What a choice depends on.

    Attributes:
        name: in a sentence.
        cuda: whether it is a CUDA GPU.
        capability: its compute capability.
        free: bytes of its memory that nobody holds.
        triton: whether Triton is there.
        processes: how many train together.
    """

    name: str
    cuda: bool = False
    capability: tuple[int, int] = (0, 0)
    free: int = 0
    triton: bool = False
    processes: int = 1


@dataclass(frozen=True)
class StorageFacts:
    """What the choice of a cache of images depends on.

    Attributes:
        pixels: bytes of all pixel caches of the run.
        missing: bytes of those that are not there yet.
        disk: free bytes where they would lie.
        memory: bytes of memory that nobody holds.
    """

    pixels: int
    missing: int
    disk: int
    memory: int


def device_facts(world: "World") -> DeviceFacts:
    """Ask the device of a run; all processes ask together, and go by the weakest device."""
    own = _own_facts(world)
    if world.size == 1:
        return own
    import torch.distributed as dist

    every: list[Any] = [own] * world.size
    dist.all_gather_object(every, own)
    return replace(
        own,
        capability=min(facts.capability for facts in every),
        free=min(facts.free for facts in every),
        triton=all(facts.triton for facts in every),
    )


def _own_facts(world: "World") -> DeviceFacts:
    import torch

    if world.device.type != "cuda":
        threads = torch.get_num_threads()
        return DeviceFacts(f"the CPU ({threads} thread{'s' * (threads > 1)})", processes=world.size)
    return DeviceFacts(
        torch.cuda.get_device_name(world.device),
        cuda=True,
        capability=torch.cuda.get_device_capability(world.device),
        free=torch.cuda.mem_get_info(world.device)[0],
        triton=find_spec("triton") is not None,
        processes=world.size,
    )


def choose(
    recipe: Recipe,
    device: DeviceFacts,
    *,
    images: int,
    storage: StorageFacts | None,
    kept: str = "",
) -> tuple[Recipe, list[str]]:
    """Put values in the place of every ``auto``; return the recipe, and what to say about it.

    What the recipe gives as a value stays, possible or not.

    Args:
        recipe: what was asked for.
        device: what it runs on.
        images: number of images to train on.
        storage: what there is room for; None where ``data.cache`` has no say.
        kept: where rows are read from then, in words.
    """
    asked = flatten(recipe.to_dict())
    cache, where = "none", kept
    if storage is not None:
        cache, where = _choose_cache(recipe, device, storage)
    if recipe.model.freeze_backbone:
        where = f"features from memory ({where})"
    precision, how = _choose_precision(recipe, device)
    graph, recorded = _choose_graph(recipe, device)
    epochs = recipe.training.epochs
    if epochs == AUTO:
        epochs = choose_epochs(images, recipe.data.batch_size, device.cuda)
    chosen: dict[str, Any] = {
        "data.cache": cache,
        "training.precision": precision,
        "training.cuda_graph": graph,
        "training.epochs": epochs,
        "schedule.every": math.ceil(epochs / 3),
    }
    lines = [f"on {device.name}: {where}, {how}{recorded}"]
    if recipe.training.epochs == AUTO:
        lines.append(f"{epochs} epochs, by the number of training images ({spaced(images)})")
    if epochs <= recipe.schedule.freeze_backbone_epochs:
        lines.append(
            f"warning: the backbone is frozen for all epochs: {epochs}. Train longer, or lower "
            "schedule.freeze_backbone_epochs"
        )
    changes = {key: value for key, value in chosen.items() if asked[key] == AUTO}
    return recipe.override(changes), lines


def choose_epochs(images: int, batch_size: int, cuda: bool) -> int:
    """The number of epochs for so many training images."""
    usual = EPOCHS if cuda else EPOCHS_ON_CPU
    steps_per_epoch = max(1, images // batch_size)
    wanted = max(usual, math.ceil(LEAST_STEPS / steps_per_epoch))
    return min(wanted, max(FEWEST_EPOCHS, MOST_IMAGES // images))


def keep_choices(recipe: Recipe, begun: Recipe) -> Recipe:
    """Put what a run was begun with in the place of ``auto``."""
    asked, before = flatten(recipe.to_dict()), flatten(begun.to_dict())
    kept = (*_KEPT, "data.cache") if begun.data.cache == "encoded" else _KEPT
    return recipe.override({key: before[key] for key in kept if asked[key] == AUTO})


def _choose_cache(recipe: Recipe, device: DeviceFacts, storage: StorageFacts) -> tuple[str, str]:
    asked, size = recipe.data.cache, readable_size(storage.pixels)
    if asked == "gpu" and not device.cuda:
        return asked, "pixels in memory"
    if asked != AUTO:
        return asked, _PLACES[asked]
    if recipe.model.freeze_backbone:
        return "none", f"{_PLACES['none']}, once"
    limit = min(MAX_CACHE_BYTES, int(DISK_SHARE * storage.disk))
    if storage.missing > limit:
        why = f"a pixel cache of {size} exceeds the limit of {readable_size(limit)}"
        return "none", f"{_PLACES['none']} ({why}; --data.cache pixels writes it)"
    if device.cuda and storage.pixels <= PIXELS_SHARE * device.free:
        return "gpu", f"pixels on the GPU ({size})"
    if storage.missing and storage.pixels > MEMORY_SHARE * storage.memory:
        return "none", f"images decoded on the fly ({size} of pixels are too much for the memory)"
    if not device.cuda:
        return "pixels", _PLACES["pixels"]
    free = readable_size(device.free)
    why = f"{size} are too much for the GPU, where {free} are free"
    return "pixels", f"{_PLACES['pixels']} ({why})"


_PLACES = {
    "none": "images decoded on the fly",
    "encoded": "images from the encoded cache",
    "pixels": "pixels from disk",
    "gpu": "pixels on the GPU",
}


def _choose_precision(recipe: Recipe, device: DeviceFacts) -> tuple[str, str]:
    asked = recipe.training.precision
    if asked != AUTO:
        return asked, asked
    if not device.cuda:
        return "float32", "float32"
    if device.capability < BFLOAT16_SINCE:
        return "float32", "float32 (this GPU has no bfloat16)"
    return "bfloat16", "bfloat16"


def _choose_graph(recipe: Recipe, device: DeviceFacts) -> tuple[bool, str]:
    """Batches have one size in every run, so only who trains and how can be in the way."""
    t, reason = recipe.training, None
    if device.processes > 1:
        reason = f"{device.processes} processes"
    elif t.accumulate > 1:
        # Chunks of a batch would share one graph, and with it one place for their embeddings.
        reason = f"training.accumulate {t.accumulate}"
    elif t.cuda_graph == AUTO and not device.triton:
        reason = "Triton is not installed"
    possible = device.cuda and reason is None
    wanted = possible if t.cuda_graph == AUTO else t.cuda_graph
    if not device.cuda:
        return wanted, ""
    if wanted and possible:
        return wanted, ", CUDA graph"
    return wanted, ", no CUDA graph" + (f" ({reason})" if reason else "")
