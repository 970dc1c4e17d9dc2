"""`dry_run`: validate a run, decode its images, measure some steps, and write nothing."""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from proximetry._util.formatting import (
    parse_seconds,
    pluralize,
    readable_seconds,
    readable_size,
    truncate_lines,
)
from proximetry.data.images import ImageError
from proximetry.data.loader import decode, parallel_map
from proximetry.data.pixel_cache import Bad, cache_home, describe_duplicates, raise_unreadable
from proximetry.models.embedder import extract_features
from proximetry.recipe.auto import StorageInfo
from proximetry.recipe.schema import Recipe
from proximetry.training.build import RunContext, build, fit_crop_size
from proximetry.training.distributed import join_processes, preserve_torch_state
from proximetry.training.reporting import Display
from proximetry.training.run import Run
from proximetry.training.run_folder import FIRST_STAGE, RunFolder
from proximetry.training.sources.image_data import ImageData, check_space, exclude_bad, free_space
from proximetry.training.sources.training_data import cache_sizes
from proximetry.training.trainer import check_rows, check_stages_folder, first_stage
from proximetry.training.updater import autocast

STEPS = 2
CPU_BATCH = 16
"""Batch size of the measured steps on the CPU, whose time is proportional to it."""
MAX_DECODED = 20_000
"""Maximum number of images to decode, evenly spaced in the catalog."""


class _Notes(Display):
    """Collects messages, each once, and forwards them to a display."""

    def __init__(self, display: Display) -> None:
        self.display, self.lines = display, list[str]()
        self.progress = display.progress  # type: ignore[method-assign]

    def message(self, text: str) -> None:
        """Store and show a line."""
        if text not in self.lines:
            self.lines.append(text)
            self.display.message(text)


class _DecodingResult(NamedTuple):
    """The number of decoded images, paths and errors of bad ones, and notes on duplicates."""

    number: int = 0
    bad: Bad = ()
    seconds_per_image: float = 0.0
    duplicates: tuple[str, ...] = ()


def dry_run(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str | None = None,
    resume: bool = True,
    display: Display | None = None,
) -> dict[str, Any]:
    """Validate a run as `train` does, and estimate its time and memory.

    Decodes at most `MAX_DECODED` images, and raises the errors that the run would raise.
    """
    world = join_processes(device)
    notes = _Notes(display if display is not None and world.is_main else Display())
    with preserve_torch_state(world, out), notes.display:
        folder = RunFolder(Path(out))
        replaces = not resume and folder.results.exists()
        if recipe.training.two_stages:
            notes.message("the estimate is for the first of two stages")
            check_stages_folder(folder.path)
            recipe, folder = first_stage(recipe), RunFolder(folder.path / FIRST_STAGE)
        recipe, saved = folder.resolve(recipe, resume)
        run = build(recipe, folder, RunContext(world, notes, resume=resume), open_cache=False)
        if saved is not None:
            check_rows(saved, run.recipe, run.data.catalog)
        notes.lines.remove(run.choices[0])
        epochs = run.rates.epochs
        state = "new; the complete run there will be removed" if replaces else "new"
        if saved is not None and (saved.checkpoint is None or saved.is_complete(run.recipe)):
            state, epochs = "already complete", 0
        elif saved is not None and saved.checkpoint is not None:
            state, epochs = "resumed", epochs - saved.checkpoint["state"]["epoch"]
        return _estimate(run, notes, state, epochs)


def _estimate(run: Run, notes: _Notes, state: str, epochs: int) -> dict[str, Any]:
    """Return the estimated costs of the remaining epochs."""
    embedder, data, images = run.updater.embedder, run.data, len(run.data.catalog)
    recipe, storage = fit_crop_size(run.recipe, embedder), data.storage
    if storage is None or recipe.data.cache == "none":
        storage = StorageInfo(0, 0, free_space(recipe), 0)
    check_space(recipe, storage.missing)
    # Before images are decoded, which needs more memory than a step.
    training_rate, evaluation_rate, memory = _measure(run, recipe)
    decoded = _DecodingResult()
    if isinstance(data, ImageData) and epochs:
        decoded = run.world.on_main(lambda: _decode(run, notes.display))
        if decoded.bad:
            data.split(exclude_bad(data.catalog, decoded.bad))
        for line in (*data.notes, *decoded.duplicates):
            notes.message(line)
    per_epoch = len(data.sampler) * min(recipe.data.batch_size, len(data.rows["train"]))
    seconds = {"decoding": 0.0, "training": epochs * per_epoch / training_rate}
    seconds_per_pass = images * decoded.seconds_per_image if recipe.data.cache == "none" else 0.0
    if embedder.takes_images and data.stage == "features":
        pixels = torch.zeros(CPU_BATCH, 3, *embedder.preprocessing.crop, dtype=torch.uint8)
        pixels = pixels.to(run.world.device)
        rate = _rate(lambda step: extract_features(embedder, pixels), CPU_BATCH, run)
        seconds["features"] = max(seconds_per_pass, sum(map(len, data.rows.values())) / rate)
    else:  # all cores decode while the network computes
        seconds["training"] = max(seconds["training"], epochs * seconds_per_pass)
    if storage.missing and isinstance(data, ImageData):
        decodings = storage.missing / storage.pixels * (images + len(data.rows_of_second_cache()))
        seconds["decoding"] = decodings * decoded.seconds_per_image
    if recipe.training.max_time is not None:
        seconds["training"] = min(seconds["training"], parse_seconds(recipe.training.max_time))
    seconds["evaluation"] = epochs and _images_evaluated(run, epochs) / evaluation_rate
    return {
        "data": {
            name: {"images": len(rows), "classes": len(data.catalog.subset(rows).class_names)}
            for name, rows in data.rows.items()
        },
        "images": images,
        "decoded": decoded.number,
        "skipped": [f"{path}: {why}" for path, why in decoded.bad],
        "notes": notes.lines,
        "recipe": recipe.to_dict(),
        "dim": recipe.model.pca_dim or recipe.model.dim,
        "image_size": embedder.preprocessing.crop[0] if embedder.takes_images else None,
        "weights": f"{embedder.weights.source}: {embedder.weights.origin}",
        "device": run.choices[0],
        "folder": {"path": str(run.folder.path), "state": state},
        "cache": {
            "folder": str(cache_home(recipe.data.cache_dir)),
            "bytes": storage.pixels,
            "missing_bytes": storage.missing,
            "free_bytes": storage.disk,
        },
        "memory_bytes": memory + (storage.pixels if recipe.data.cache == "gpu" else 0),
        "images_per_second": training_rate,
        "seconds": seconds,
    }


def _decode(run: Run, display: Display) -> _DecodingResult:
    """Decode images as the run will, without storing them; raise the same errors."""
    catalog, preprocessing = run.data.catalog, run.updater.embedder.preprocessing
    rows = np.linspace(0, len(catalog) - 1, min(len(catalog), MAX_DECODED)).astype(int).tolist()
    display.message(f"checking {pluralize(len(rows), 'image')}…")
    size, interpolation = cache_sizes(run.recipe, preprocessing)[0], preprocessing.interpolation
    started, errors = time.perf_counter(), list[tuple[str, str]]()
    images = parallel_map(
        partial(decode, size=size, interpolation=interpolation), map(catalog.file, rows)
    )
    for number, (row, image) in enumerate(zip(rows, images, strict=True), 1):
        if isinstance(image, ImageError):
            errors.append((catalog.paths[row], image.reason))
        display.progress("checking", number, len(rows))
    seconds, bad = time.perf_counter() - started, tuple(errors)
    raise_unreadable(bad, len(rows), run.recipe.data.bad_images)
    duplicates = describe_duplicates(catalog) if len(rows) == len(catalog) else ()
    return _DecodingResult(len(rows), bad, seconds / len(rows), tuple(duplicates))


def _images_evaluated(run: Run, epochs: int) -> int:
    """Return the number of images in all evaluations, including the first and the last."""
    recipe, rows = run.recipe, run.data.rows
    fitted = recipe.model.pca_dim is not None or recipe.model.bits is not None
    fit_images = len(rows["train"]) if fitted else 0
    watched, final = (
        sum(len(rows[split]) for split in splits)
        for splits in (run.watched_splits(), run.final_splits())
    )
    passes = (1 + recipe.evaluation.untrained) * (final + fit_images) if final else fit_images
    evaluations = math.ceil(epochs / recipe.evaluation_interval(watched > 0))
    return evaluations * (watched + fit_images) + passes


def _measure(run: Run, recipe: Recipe) -> tuple[float, float, int]:
    """Return images per second in training and in evaluation on random input; bytes of memory."""
    updater, world, data = run.updater, run.world, run.data
    embedder, on_cuda = updater.embedder, world.device.type == "cuda"
    share = max(1, min(recipe.data.batch_size, len(data.rows["train"])) // world.size)
    batch = share if on_cuda else min(share, CPU_BATCH)
    if data.stage == "features" or not embedder.takes_images:
        shape = getattr(embedder.preprocessing, "shape", ())
        width = (embedder.width,) if data.stage == "features" else tuple(shape)
        pixels = views = torch.randn(batch, *width, device=world.device)
    else:
        side, crop = recipe.data.crop_size, embedder.preprocessing.crop
        size = (batch, 3, *((side, side) if side else crop))
        pixels = torch.randint(0, 256, size, dtype=torch.uint8, device=world.device)
        views = torch.zeros((batch, 3, *crop), dtype=torch.uint8, device=world.device)
    labels = (torch.arange(batch, device=world.device) // 2) % len(data.class_names)

    def embed(step: int) -> None:
        with torch.no_grad(), autocast(recipe.training.precision, world.device):
            embedder.project(extract_features(embedder, views, updater.stage))

    before = _peak_memory()
    updater.freeze_backbone(False)
    embedder.train()
    training = _rate(lambda step: updater(pixels, labels, step), batch, run)
    evaluation = _rate(embed, batch, run)
    if on_cuda:
        return training, evaluation, torch.cuda.max_memory_reserved(world.device)
    return training, evaluation, before + (_peak_memory() - before) * share // batch


def _rate(step: Callable[[int], Any], images: int, run: Run) -> float:
    """Return images per second on all processes, after a first step that selects kernels."""
    started = 0.0
    for number in range(STEPS + 1):
        step(number)
        if run.world.device.type == "cuda" and number in (0, STEPS):
            torch.cuda.synchronize(run.world.device)
        if number == 0:
            started = time.perf_counter()
    return STEPS * images * run.world.size / (time.perf_counter() - started)


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    if sys.platform == "win32":
        return 0  # it has no such call
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(document: dict[str, Any]) -> str:
    """Format the result of `dry_run` in lines of at most 80 columns where paths allow it."""
    data, recipe, cache = document["data"], Recipe.load(document["recipe"]), document["cache"]
    counts = [
        f"{pluralize(data[name]['images'], 'image')} of "
        f"{pluralize(data[name]['classes'], 'class')} {use}"
        for name, use in (("train", "to train on"), ("held_out", "held out"), ("test", "to test"))
        if data[name]["images"]
    ]
    if document["decoded"]:
        counts.append(f"{pluralize(document['decoded'], 'image')} decoded and checked")
        skipped = [f"skipped {reason}" for reason in document["skipped"]]
        counts += truncate_lines(skipped, "the document of --json")
    missing, seconds = cache["missing_bytes"], document["seconds"]
    size = readable_size(missing) if missing else "nothing"
    storage = [f"{size} to decode, {readable_size(cache['free_bytes'])} free"]
    m, side = recipe.model, document["image_size"]
    dim = f"{document['dim']}{'-d' if m.bits is None else ' bits'}"
    lines = {
        "data": counts,
        "recipe": [
            f"{recipe.name}: {m.backbone}, {'' if side is None else f'{side} px, '}{dim}, "
            f"{recipe.loss.name}",
            f"{pluralize(recipe.training.epochs, 'epoch')}, batches of {recipe.data.batch_size}",
        ],
        "weights": [document["weights"]],
        "device": [document["device"].removeprefix("on ")],
        "folder": [f"{document['folder']['path']} ({document['folder']['state']})"],
        "cache": ["none"] if recipe.data.cache == "none" else [*storage, f"in {cache['folder']}"],
        "memory": [f"about {readable_size(document['memory_bytes'])}"],
        "speed": [f"{document['images_per_second']:.3g} images/s in training"],
        "time": [
            f"about {readable_seconds(sum(seconds.values()))}",
            *(f"{what} {readable_seconds(part)}" for what, part in seconds.items() if part),
        ],
    }
    indented = [f"{name:9}" + f"\n{9 * ' '}".join(part) for name, part in lines.items()]
    return "\n".join([*indented, "Nothing was written."])
