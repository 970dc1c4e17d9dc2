"""What a run would take: all is checked, images too, some steps are measured, nothing written."""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from proximetry._util.errors import first_few, readable_seconds, readable_size, spaced
from proximetry.data import Catalog
from proximetry.data.cache import cache_home, describe_copies, raise_unreadable
from proximetry.data.images import ImageError, Interpolation, Size
from proximetry.data.loader import decode, parallel_map
from proximetry.models import Embedder
from proximetry.models.embedder import Stage
from proximetry.recipe.auto import StorageFacts
from proximetry.recipe.schema import Recipe
from proximetry.training.custom import take_parts
from proximetry.training.distributed import World, join_processes
from proximetry.training.reporting import Display, Trackers
from proximetry.training.run import (
    RunContext,
    check_place_of_stages,
    check_rows,
    choose_automatic,
    first_stage,
    fit_crop_size,
    make_data,
    make_updater,
    preserve_torch_state,
    resolve,
)
from proximetry.training.run_folder import FIRST_STAGE, RunFolder, SavedRun
from proximetry.training.sources.base import TrainingData, cache_sizes
from proximetry.training.sources.images import (
    ImageData,
    check_space,
    free_space,
    second_cache,
    without,
)
from proximetry.training.step import Updater, autocast

STEPS = 2
CPU_BATCH = 16  # a few seconds must do, and more images take proportionally longer there
MOST_DECODED = 20_000
"""Images that are decoded to check them; of more, as many from all over the catalogue."""


def dry_run(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str | None = None,
    resume: bool = True,
    display: Display | None = None,
) -> dict[str, Any]:
    """Check a run as `train` would, and return what it will take.

    Raises what the run would raise: about the data, the weights, the loss, or the folder. Images
    are decoded, `MOST_DECODED` at most. The display shows how far that has come, and the notes.
    """
    world = join_processes(device)
    notes = _Notes(display if display is not None and world.leads else Display())
    with preserve_torch_state(world, out), notes.display:
        return _estimate_run(recipe, Path(out), RunContext(world, notes, resume=resume), notes)


class _Notes(Display):
    """Collects messages, each once, and passes them on to a display."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        """Keep and show a line."""
        if text not in self.lines:
            self.lines.append(text)
            self.display.message(text)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show progress."""
        self.display.progress(what, done, total)


def _estimate_run(recipe: Recipe, out: Path, context: RunContext, notes: _Notes) -> dict[str, Any]:
    world, folder = context.world, RunFolder(out)
    if recipe.training.two_stages:
        notes.message("what follows is about the first of two stages")
        check_place_of_stages(out)
        recipe, folder = first_stage(recipe), RunFolder(out / FIRST_STAGE)
    recipe, saved = resolve(recipe, folder, context.resume, in_stages=folder.path != out)
    Trackers.check(recipe)
    recipe, _ = take_parts(recipe, None, None, None)  # custom components exist in Python only
    embedder, data = make_data(recipe, context)
    recipe, lines = choose_automatic(fit_crop_size(recipe, embedder, notes.message), data)
    for line in lines[1:]:
        notes.message(line)
    storage = data.storage
    if storage is None or recipe.data.cache == "none":
        storage = StorageFacts(0, 0, free_space(recipe), 0)
    check_space(recipe, storage.missing)
    if recipe.model.freeze_backbone:
        data.stage = "features"
    updater = make_updater(recipe, embedder, data, notes.message)
    if saved is not None:
        check_rows(saved, recipe, data.catalog)
    state, done = _state(saved, recipe, not context.resume and RunFolder(out).results.exists())
    left = recipe.training.epochs - done
    # Before images are decoded, whose peak memory would hide that of a step.
    rates, memory = _measure(recipe, updater, data)
    images, checked = len(data.catalog), Checked()
    if isinstance(data, ImageData) and left:
        preprocessing = embedder.preprocessing
        size, how = cache_sizes(recipe, preprocessing)[0], preprocessing.interpolation
        catalog = data.catalog
        checked = world.first(lambda: _check_images(recipe, catalog, size, how, notes.display))
        if checked.bad:
            stage, readable = data.stage, without(catalog, checked.bad)
            data = ImageData(recipe, preprocessing, world, notes, readable)
            data.stage = stage
        for line in checked.copies:
            notes.message(line)
    return {
        "data": {
            name: {"images": len(rows), "classes": len(data.catalog.subset(rows).class_names)}
            for name, rows in data.rows.items()
        },
        "images": images,
        "decoded": checked.decoded,
        "left_out": [f"{path}: {why}" for path, why in checked.bad],
        "notes": notes.lines,
        "recipe": recipe.to_dict(),
        "dim": recipe.model.pca_dim or recipe.model.dim,
        "image_size": embedder.preprocessing.crop[0] if embedder.takes_images else None,
        "weights": f"{embedder.weights.source}: {embedder.weights.origin}",
        "device": lines[0],
        "folder": {"path": str(out), "state": state},
        "cache": {
            "folder": str(cache_home(recipe.data.cache_dir)),
            "bytes": storage.pixels,
            "missing_bytes": storage.missing,
            "free_bytes": storage.disk,
        },
        "memory_bytes": memory + (storage.pixels if recipe.data.cache == "gpu" else 0),
        "images_per_second": rates[0],
        "seconds": {
            **_training_seconds(
                recipe, embedder, data, storage, checked, epochs=left, rate=rates[0]
            ),
            "evaluation": left and _images_evaluated(recipe, data, left) / rates[1],
        },
    }


def _training_seconds(
    recipe: Recipe,
    embedder: Embedder,
    data: TrainingData,
    storage: StorageFacts,
    checked: "Checked",
    *,
    epochs: int,
    rate: float,
) -> dict[str, float]:
    """Return the seconds of decoding, features and training."""
    images, in_training = len(data.catalog), len(data.rows["train"])
    per_epoch = len(data.sampler) * min(recipe.data.batch_size, in_training)
    decoding, on_the_fly = 0.0, 0.0
    if storage.missing:
        sizes = cache_sizes(recipe, embedder.preprocessing)
        twice = len(second_cache(recipe, data.rows, images, sizes))
        share = storage.missing / storage.pixels
        decoding = share * (images + twice) * checked.seconds_per_image
    elif recipe.data.cache == "none":  # all cores decode while the network computes
        on_the_fly = images * checked.seconds_per_image
    training = epochs * per_epoch / rate
    if embedder.takes_images and data.stage == "features":
        embedded = sum(map(len, data.rows.values())) / _features_rate(embedder, data.world)
        features = max(on_the_fly, embedded)
        return {"decoding": decoding, "features": features, "training": training}
    return {"decoding": decoding, "training": max(training, epochs * on_the_fly)}


class Checked(NamedTuple):
    """What came of decoding images: how many there were, which of them cannot be read, and why.

    And notes on copies, where all images were read.
    """

    decoded: int = 0
    bad: tuple[tuple[str, str], ...] = ()
    seconds_per_image: float = 0.0
    copies: tuple[str, ...] = ()


def _check_images(
    recipe: Recipe, catalog: Catalog, size: Size, how: Interpolation, display: Display
) -> Checked:
    """Decode the images as the run will, but keep nothing; refuse what it would refuse."""
    rows = np.linspace(0, len(catalog) - 1, min(len(catalog), MOST_DECODED)).astype(int).tolist()
    display.message(f"checking {_count(len(rows), 'image')}…")
    started = time.perf_counter()
    errors: list[tuple[str, str]] = []
    images = parallel_map(partial(decode, size=size, interpolation=how), map(catalog.file, rows))
    for number, (row, image) in enumerate(zip(rows, images, strict=True), 1):
        if isinstance(image, ImageError):
            errors.append((catalog.paths[row], image.reason))
        display.progress("checking", number, len(rows))
    seconds, bad = time.perf_counter() - started, tuple(errors)
    raise_unreadable(bad, len(rows), recipe.data.bad_images)
    copies = describe_copies(catalog) if len(rows) == len(catalog) else ()
    return Checked(len(rows), bad, seconds / len(rows), tuple(copies))


def _state(saved: SavedRun | None, recipe: Recipe, replaces: bool) -> tuple[str, int]:
    """Return what happens to the folder, and the number of its complete epochs."""
    if replaces:
        return "new; the complete run there will be removed", 0
    if saved is None:
        return "new", 0
    if saved.is_complete(recipe) or saved.checkpoint is None:
        return "complete already", recipe.training.epochs
    return "continued", saved.checkpoint["state"]["epoch"]


def _images_evaluated(recipe: Recipe, data: TrainingData, epochs: int) -> int:
    """Return how many images all evaluations of these epochs embed, first and last included."""
    counts = {name: len(rows) for name, rows in data.rows.items()}
    fitted = recipe.model.pca_dim is not None or recipe.model.bits is not None
    e, pca = recipe.evaluation, counts["train"] if fitted else 0
    watched = counts["test"] if data.protocol == "paper" or e.watch_test else 0
    watched += counts["held_out"] if data.protocol == "held_out" else 0
    # With PCA an embedder cannot be saved without the training images either.
    each = watched + pca
    tested = e.final_test or data.protocol == "paper"
    final = counts["held_out"] + counts["test"] * tested
    passes = (1 + e.untrained) * (final + pca) if final else pca
    return math.ceil(epochs / recipe.evaluated_every(watched > 0)) * each + passes


def _measure(
    recipe: Recipe, updater: Updater, data: TrainingData
) -> tuple[tuple[float, float], int]:
    """Images per second in training and in evaluation, on made-up pixels; bytes of memory."""
    embedder, world, classes = updater.embedder, data.world, len(data.class_names)
    on_cuda = world.device.type == "cuda"
    own = max(1, min(recipe.data.batch_size, len(data.rows["train"])) // world.size)
    batch = own if on_cuda else min(own, CPU_BATCH)
    pixels, views = _made_up(recipe, embedder, updater.stage, batch, world)
    labels = (torch.arange(batch, device=world.device) // 2) % classes
    before = _peak_memory()
    updater.freeze_backbone(False)
    embedder.train()
    training = _rate(lambda step: updater(pixels, labels, step), batch * world.size, world)
    evaluation = _rate(
        lambda step: _embed(updater, views, recipe.training.precision), batch * world.size, world
    )
    if on_cuda:
        return (training, evaluation), torch.cuda.max_memory_reserved(world.device)
    return (training, evaluation), before + (_peak_memory() - before) * own // batch


def _features_rate(embedder: Embedder, world: World) -> float:
    """Images per second of the features of a frozen backbone, on made-up pixels."""
    kind: Any = {"dtype": torch.uint8, "device": world.device}
    pixels = torch.zeros((CPU_BATCH, 3, *embedder.preprocessing.crop), **kind)
    return _rate(lambda step: embedder.pixel_features(pixels), CPU_BATCH * world.size, world)


def _made_up(
    recipe: Recipe, embedder: Embedder, stage: Stage, batch: int, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as training sees it, and one as evaluation does."""
    if stage == "features" or not embedder.takes_images:
        shape = (embedder.width,) if stage == "features" else tuple(embedder.preprocessing.shape)  # type: ignore[attr-defined]
        rows = torch.randn(batch, *shape, device=world.device)
        return rows, rows
    side, crop = recipe.data.crop_size, embedder.preprocessing.crop
    seen = (side, side) if side else crop
    kind: Any = {"dtype": torch.uint8, "device": world.device}
    return torch.randint(0, 256, (batch, 3, *seen), **kind), torch.zeros((batch, 3, *crop), **kind)


def _embed(updater: Updater, pixels: torch.Tensor, precision: str) -> None:
    embedder = updater.embedder
    with torch.no_grad(), autocast(precision, pixels.device):
        embedder.project(embedder.pixel_features(pixels, updater.stage))


def _rate(step: Callable[[int], Any], images: int, world: World) -> float:
    """Images per second of a step, after a first one in which kernels are chosen."""
    step(0)
    _wait(world)
    started = time.perf_counter()
    for number in range(1, STEPS + 1):
        step(number)
    _wait(world)
    return STEPS * images / (time.perf_counter() - started)


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _peak_memory() -> int:
    """Bytes this process has held at most."""
    if sys.platform == "win32":
        return 0  # which has no such call
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(found: dict[str, Any]) -> str:
    """Say what `dry_run` found, in lines of at most 80 columns where paths allow it."""
    data, recipe, cache = found["data"], Recipe.load(found["recipe"]), found["cache"]
    counted = [
        f"{_count(data[name]['images'], 'image')} of {_count(data[name]['classes'], 'class')} {use}"
        for name, use in (("train", "to train on"), ("held_out", "held out"), ("test", "to test"))
        if data[name]["images"]
    ]
    missing = cache["missing_bytes"]
    size = readable_size(missing) if missing else "nothing"
    seconds = found["seconds"]
    taken = [
        f"{what} {readable_seconds(seconds[what])}"
        + (f" ({found['images_per_second']:.3g} images/s)" if what == "training" else "")
        for what in seconds
        if seconds[what] or what in ("training", "evaluation")
    ]
    m, t = recipe.model, recipe.training
    lines = {
        "data": [*counted, *_what_was_decoded(found)],
        "recipe": [
            f"{recipe.name}: {m.backbone}, "
            f"{_side(found['image_size'])}"
            f"{found['dim']}{'-d' if m.bits is None else ' bits'}, "
            f"{recipe.loss.name}",
            f"{_count(t.epochs, 'epoch')}, batches of {recipe.data.batch_size}",
        ],
        "weights": [found["weights"]],
        "device": [found["device"].removeprefix("on ")],
        "folder": [f"{found['folder']['path']} ({found['folder']['state']})"],
        "cache": [
            f"{size} to decode, {readable_size(cache['free_bytes'])} free",
            f"in {cache['folder']}",
        ]
        if recipe.data.cache != "none"
        else ["none"],
        "memory": [f"about {readable_size(found['memory_bytes'])}"],
        "time": [
            f"about {readable_seconds(sum(seconds.values()))}: {', '.join(taken[:2])}"
            + ("," if taken[2:] else ""),
            *([", ".join(taken[2:])] if taken[2:] else []),
        ],
    }
    text = [
        f"{'' if number else name:9}{line}"
        for name, several in lines.items()
        for number, line in enumerate(several)
    ]
    return "\n".join([*text, "Nothing was written."])


def _what_was_decoded(found: dict[str, Any]) -> list[str]:
    """Which images were checked, and which of them the run will leave out."""
    decoded, bad = found["decoded"], found["left_out"]
    if not decoded:
        return []
    line = f"all {_count(decoded, 'image')} decoded to check them"
    if decoded < found["images"]:
        line = f"{spaced(decoded)} images from all over decoded to check them, the others not"
    left_out = [f"left out {reason}" for reason in bad]
    return [line, *first_few(left_out, "the document of --json")]


def _side(pixels: int | None) -> str:
    return "" if pixels is None else f"{pixels} px, "


def _count(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{spaced(number)} {what}{plural}"
