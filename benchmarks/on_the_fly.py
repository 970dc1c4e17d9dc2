"""Training on the fly beside the bare network, a plain DataLoader loop and the cache.

python -m benchmarks.on_the_fly [--images FOLDER_OR_TAR] [--batch 32] [--rounds 3]
python -m benchmarks.on_the_fly --device cuda --batch 180 --count 5864 [--format webp]

Images per second, taken in turns in one process:

    bare      forward, backward and the optimiser's step on pixels that are already there
    none      the trainer with data.cache none: files decoded on the fly, crops, loss, book-keeping
    plain     the same network and loss in a loop over torchvision's transforms (decode,
              RandomResizedCrop, flip, ToTensor, Normalize) in a DataLoader with a worker per core
    cached    the trainer with data.cache gpu on a GPU, else pixels

Without --images so many JPEG files (--count) of 500×375 pixels are made first.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms  # type: ignore[import-untyped]

from benchmarks.measure import versions
from benchmarks.training import network
from proximetry._util.machine import cores
from proximetry.data import Catalog
from proximetry.data.shards import open_path
from proximetry.recipe.schema import Recipe
from proximetry.training.distributed import World, join_processes
from proximetry.training.loop import Run
from proximetry.training.objective import Objective
from proximetry.training.reporting import Display
from proximetry.training.run import RunContext, make_embedder, make_optimizer, prepare
from proximetry.training.run_folder import RunFolder
from proximetry.training.sources.images import ImageData
from proximetry.training.step import autocast


def make_images(root: Path, count: int, kind: str, size: tuple[int, int]) -> None:
    """Files with the spectrum of photographs, eight to a class."""
    draw = np.random.default_rng(0)
    width, height = size
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    falloff = 1 / np.maximum(frequency, 1 / width)
    options: dict[str, Any] = {"quality": 85}
    for i in range(count):
        folder = root / f"class{i // 8:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.fft.rfft2(draw.normal(size=(3, height, width))) * falloff
        image = np.fft.irfft2(noise, s=(height, width))
        image = 128 + 50 * image / image.std(axis=(1, 2), keepdims=True)
        pixels = image.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels).save(folder / f"{i}.{kind}", **options)


def make_recipe(images: Path, home: Path, arguments: argparse.Namespace) -> Recipe:
    return Recipe.load(
        {
            "data": {
                "dataset": "shards" if images.suffix == ".tar" else "folder",
                "root": str(images),
                "batch_size": arguments.batch,
                "short_side": arguments.short_side,
                "cache": "none",
                "cache_dir": str(home / "cache"),
            },
            **network(arguments),
            "evaluation": {"protocol": "last"},
        }
    )


class Files(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's ImageFolder, over the rows of a catalogue."""

    def __init__(self, catalog: Catalog, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.catalog, self.codes, self.transform = catalog, catalog.codes, transform

    def __len__(self) -> int:
        return len(self.catalog)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        with open_path(self.catalog.file(row)) as stream, Image.open(stream) as image:
            return self.transform(image.convert("RGB")), int(self.codes[row])


def plain_loop(run: Run, device: torch.device) -> Callable[[int], float]:
    """Return what gives the images per second of so many steps of a plain loop."""
    recipe, preprocessing = run.recipe, run.updater.embedder.preprocessing
    embedder = make_embedder(recipe.model).to(device)
    if device.type == "cuda":
        embedder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    embedder.train()
    objective = Objective(recipe.loss, run.data.class_names, embedder.dim).to(device)
    optimizer = make_optimizer(recipe.optimizer, embedder, objective)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(
                preprocessing.crop, interpolation=transforms.InterpolationMode.BICUBIC
            ),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )
    loader = DataLoader(
        Files(run.data.catalog.subset(run.data.rows["train"]), transform),
        batch_size=recipe.data.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=cores(),
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )

    def measure(steps: int) -> float:
        done = seen = 0
        wait(device)
        started = time.perf_counter()
        while done < steps:
            for pixels, labels in loader:
                values = pixels.to(device, non_blocking=True, memory_format=torch.channels_last)
                optimizer.zero_grad(set_to_none=True)
                with autocast(recipe.training.precision, device):
                    embeddings = embedder.project(embedder.features(values))
                objective(embeddings, labels.to(device, non_blocking=True)).backward()
                optimizer.step()
                done, seen = done + 1, seen + len(labels)
                if done == steps:
                    break
        wait(device)
        return seen / (time.perf_counter() - started)

    return measure


def bare_steps(run: Run, pixels: torch.Tensor, steps: int) -> float:
    """Images per second of forward, backward and step alone."""
    wait(run.world.device)
    started = time.perf_counter()
    for _ in range(steps):
        run.updater.optimizer.zero_grad(set_to_none=True)
        run.updater.network(pixels).sum().backward()
        run.updater.optimizer.step()
    wait(run.world.device)
    return steps * len(pixels) / (time.perf_counter() - started)


def trainer_steps(run: Run, data: Any, steps: int) -> float:
    """Images per second of the trainer's own steps, epoch after epoch."""
    done = seen = epoch = 0
    wait(run.world.device)
    started = time.perf_counter()
    while done < steps:
        for pixels, labels in data.batches(epoch, 0):
            run.state.advance(run.updater(pixels, labels, run.state.step))
            done, seen = done + 1, seen + len(labels)
            if done == steps:
                break
        epoch += 1
    wait(run.world.device)
    return seen / (time.perf_counter() - started)


def supply_steps(data: Any, steps: int, world: World) -> float:
    """Images per second of batches that nobody trains on."""
    done = seen = epoch = 0
    wait(world.device)
    started = time.perf_counter()
    while done < steps:
        for _, labels in data.batches(epoch, 0):
            done, seen = done + 1, seen + len(labels)
            if done == steps:
                break
        epoch += 1
    wait(world.device)
    return seen / (time.perf_counter() - started)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, metavar="FOLDER_OR_TAR")
    parser.add_argument("--device")
    parser.add_argument("--backbone", default="tf_efficientnet_lite0")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--short-side", type=int, help="default: the model's resize")
    parser.add_argument("--count", type=int, default=320, help="images to make")
    parser.add_argument("--format", default="jpg", choices=["jpg", "webp"], help="of those")
    parser.add_argument("--size", type=int, nargs=2, default=(500, 375), help="of those")
    parser.add_argument("--steps", type=int, help="per round; default: an epoch")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, images = Path(folder), arguments.images
        if images is None:
            images = home / "images"
            make_images(images, arguments.count, arguments.format, arguments.size)
        world = join_processes(arguments.device)
        recipe = make_recipe(images, home, arguments)
        run = prepare(recipe, RunFolder(home / "run"), RunContext(world))
        place = "gpu" if world.device.type == "cuda" else "pixels"
        cached = ImageData(run.recipe, run.updater.embedder.preprocessing, world, Display())
        started = time.perf_counter()
        cached.open_cache(place)
        decoding = time.perf_counter() - started
        steps = arguments.steps or len(run.data.sampler)
        run.updater.freeze_backbone(False)
        run.updater.embedder.train()
        pixels = next(iter(cached.batches(0, 0)))[0].clone()
        plain = plain_loop(run, world.device)
        ways: dict[str, Callable[[int], float]] = {
            "bare": lambda count: bare_steps(run, pixels, count),
            "none": lambda count: trainer_steps(run, run.data, count),
            "plain": plain,
            "cached": lambda count: trainer_steps(run, cached, count),
            "supply": lambda count: supply_steps(run.data, count, world),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way(2)  # kernels are compiled, processes started
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                rates[name].append(way(steps))
        print(f"{arguments.backbone}, crop {arguments.crop}, batch {arguments.batch}; {versions()}")
        t = run.recipe.training
        print(f"{t.precision}, CUDA graph {t.cuda_graph}, {cores()} cores, {world.device}")
        print(f"{len(run.data.catalog)} images; cache {place} made in {decoding:.1f} s")
        print(f"{steps} steps to a round; median (lowest to highest) of {arguments.rounds} rounds:")
        for name, found in rates.items():
            spread = f"({min(found):.1f} to {max(found):.1f})"
            print(f"{name:8} {statistics.median(found):9.1f} images/s {spread}")
        for name, other in (("none", "bare"), ("cached", "bare"), ("none", "plain")):
            ratios = [a / b for a, b in zip(rates[name], rates[other], strict=True)]
            print(f"{name} / {other}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
