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

from proximetry._common import first_few, readable_seconds, readable_size, spaced
from proximetry.data import Catalog, VectorCatalog
from proximetry.data.decoding import check_all
from proximetry.data.images import Interpolation, Size
from proximetry.data.pixel_cache import cache_home, describe_copies, refuse_bad
from proximetry.models import Embedder
from proximetry.models.embedder import Stage
from proximetry.training.automatic import StorageFacts, choose, device_facts
from proximetry.training.data import (
    Division,
    cache_sizes,
    divide,
    make_sampler,
    open_catalog,
)
from proximetry.training.distributed import World, join_processes
from proximetry.training.images import (
    check_space,
    free_space,
    second_cache,
    storage_facts,
    without,
)
from proximetry.training.parts import check_vectors_fit, take_parts
from proximetry.training.recipe import Recipe
from proximetry.training.reporting import Display, Trackers
from proximetry.training.run import (
    check_abilities,
    check_end,
    check_place_of_stages,
    check_rows,
    first_stage,
    fit_crop_size,
    guest_of_torch,
    make_embedder,
    make_updater,
)
from proximetry.training.run_folder import FIRST_STAGE, RunFolder
from proximetry.training.update import Updater, autocast

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
    shown = display if display is not None and world.leads else Display()
    with guest_of_torch(world, out, shown.message), shown:
        return _estimate_run(recipe, Path(out), world, resume, shown)


def _estimate_run(
    recipe: Recipe, out: Path, world: World, resume: bool, display: Display
) -> dict[str, Any]:
    notes, folder = list[str](), RunFolder(out)

    def note(*lines: str) -> None:
        for line in lines:
            if line not in notes:
                notes.append(line)
                display.message(line)

    if recipe.training.two_stages:
        note("what follows is about the first of two stages")
        check_place_of_stages(out)
        recipe, folder = first_stage(recipe), RunFolder(out / FIRST_STAGE)
    recipe = folder.keep_choices(recipe, resume)
    check_end(folder.check(recipe, resume), recipe, folder, in_stages=folder.path != out)
    Trackers.check(recipe)
    torch.manual_seed(recipe.training.seed)
    recipe, _ = take_parts(recipe, None, None, None)  # which are Python's to give
    catalog = open_catalog(recipe, partial(display.progress, "looking for the images"))
    note(*catalog.remarks())
    check_vectors_fit(recipe, catalog)
    embedder = make_embedder(
        recipe.model,
        recipe.evaluation.similarity,
        note,
        input_dim=catalog.vectors.shape[1] if isinstance(catalog, VectorCatalog) else None,
    )
    embedder.to(world.device)
    recipe = fit_crop_size(recipe, embedder, note)
    check_abilities(recipe, embedder)
    division, parts, sampler = _divide(catalog, recipe, world)
    note(*division.notes)

    storage = None
    if embedder.takes_images:  # the caches, as the run would build them
        sizes = cache_sizes(recipe, embedder.preprocessing)
        how = embedder.preprocessing.interpolation
        storage = storage_facts(recipe, catalog, division.rows, sizes, how)
    facts = device_facts(world)
    images = len(parts["train"])
    recipe, lines = choose(
        recipe, facts, images=images, storage=storage, kept="vectors from memory"
    )
    note(*lines[1:])
    if storage is None or recipe.data.cache == "none":
        storage = StorageFacts(0, 0, free_space(recipe), 0)
    check_space(recipe, storage.missing)
    stage: Stage = "features" if recipe.model.freeze_backbone else "pixels"
    updater = make_updater(recipe, embedder, parts["train"].class_names, world, note, stage=stage)
    state, done = _state(folder, RunFolder(out), recipe, catalog, resume)
    left = recipe.training.epochs - done
    # Before images are decoded: what memory that took at most would hide what a step takes.
    rates, memory = _measure(recipe, updater, world, images, len(parts["train"].class_names))
    checked, every = Checked(), len(catalog)
    if embedder.takes_images and left:
        checked = world.first(lambda: _check_images(recipe, catalog, sizes[0], how, display))
        if checked.bad:
            catalog = without(catalog, checked.bad)
            division, parts, sampler = _divide(catalog, recipe, world)
            note(*division.notes)
        note(*checked.copies)
    counts = {name: len(part) for name, part in parts.items()}
    per_epoch = len(sampler) * min(recipe.data.batch_size, counts["train"])
    training = left * per_epoch / rates[0]
    # Without a cache all cores decode while the network computes.
    first, meanwhile = 0.0, 0.0
    if storage.missing:
        twice = len(second_cache(recipe, division.rows, len(catalog), sizes))
        share = storage.missing / storage.pixels
        first = share * (len(catalog) + twice) * checked.seconds_per_image
    elif recipe.data.cache == "none":
        meanwhile = len(catalog) * checked.seconds_per_image
    features: dict[str, float] = {}
    if embedder.takes_images and stage == "features":
        rate = _features_rate(embedder, world)
        features = {"features": max(meanwhile, sum(counts.values()) / rate)}
    else:
        training = max(training, left * meanwhile)
    return {
        "data": {
            name: {"images": len(part), "classes": len(part.class_names)}
            for name, part in parts.items()
        },
        "images": every,
        "decoded": checked.decoded,
        "left_out": [f"{path}: {why}" for path, why in checked.bad],
        "notes": notes,
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
            "decoding": first,
            **features,
            "training": training,
            "evaluation": left and _images_evaluated(recipe, division, counts, left) / rates[1],
        },
    }


def _divide(
    catalog: Catalog, recipe: Recipe, world: World
) -> tuple[Division, dict[str, Catalog], Any]:
    """The images by their purpose, and what makes batches of those to train on."""
    division = divide(catalog, recipe)
    parts = {name: catalog.subset(chosen) for name, chosen in division.rows.items()}
    return division, parts, make_sampler(recipe, parts["train"].codes, world)


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
    files, progress = [catalog.file(row) for row in rows], partial(display.progress, "checking")
    started = time.perf_counter()
    errors = list(check_all(files, size, how, whole=True, progress=progress))
    seconds = time.perf_counter() - started
    bad = tuple((catalog.paths[rows[number]], error.reason) for number, error in errors)
    refuse_bad(bad, len(rows), recipe.data.bad_images)
    copies = describe_copies(catalog) if len(rows) == len(catalog) else ()
    return Checked(len(rows), bad, seconds / len(rows), tuple(copies))


def _state(
    folder: RunFolder, whole: RunFolder, recipe: Recipe, catalog: Catalog, resume: bool
) -> tuple[str, int]:
    """What becomes of the folder, and how many epochs are done in it; `whole` has both stages."""
    if not resume and whole.results.exists():
        return "new; the complete run there will be removed", 0
    if not resume or folder.begun() is None:
        return "new", 0
    check_rows(folder, recipe, catalog)
    if folder.is_complete(recipe):
        return "complete already", recipe.training.epochs
    return "continued", folder.newest().state["epoch"]


def _images_evaluated(
    recipe: Recipe, division: Division, counts: dict[str, int], epochs: int
) -> int:
    """How many images are embedded to evaluate so many epochs, the first and the last time too."""
    fitted = recipe.model.pca_dim is not None or recipe.model.bits is not None
    e, pca = recipe.evaluation, counts["train"] if fitted else 0
    watched = counts["test"] if division.protocol == "paper" or e.watch_test else 0
    watched += counts["held_out"] if division.protocol == "held_out" else 0
    # With PCA an embedder cannot be saved without the training images either.
    each = watched + pca
    tested = e.final_test or division.protocol == "paper"
    final = counts["held_out"] + counts["test"] * tested
    passes = (1 + e.untrained) * (final + pca) if final else pca
    return math.ceil(epochs / recipe.evaluated_every(watched > 0)) * each + passes


def _measure(
    recipe: Recipe, updater: Updater, world: World, images: int, classes: int
) -> tuple[tuple[float, float], int]:
    """Images per second in training and in evaluation, on made-up pixels; bytes of memory."""
    embedder, on_cuda = updater.embedder, world.device.type == "cuda"
    own = max(1, min(recipe.data.batch_size, images) // world.size)
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
