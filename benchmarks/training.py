"""Compare the trainer with the bare network: images per second, without decoding.

python -m benchmarks.training [--backbone tf_efficientnet_lite0] [--batch 32] [--rounds 5]
python -m benchmarks.training --backbone tf_efficientnet_lite2 --batch 180 --images 5864 \
    --crop 224 --cache gpu --precision bfloat16 --cuda-graph --evaluate 5924   (on a GPU)

The bare network runs forward, backward and the optimizer step on pixels in memory; the trainer does
all its work: cropping from a warm cache, loss, clipping, bookkeeping. With --evaluate N, N test
images are embedded and evaluated with all metrics.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import versions
from proximetry.metrics import Metrics, evaluate
from proximetry.recipe.schema import Recipe
from proximetry.training.build import RunContext, build
from proximetry.training.distributed import join_processes
from proximetry.training.run import Run
from proximetry.training.run_folder import RunFolder


def make_images(root: Path, count: int, side: int) -> None:
    """Write JPEG files with some structure, eight per class."""
    draw = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"class{i // 8:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((side * 4 // 3, side), Image.Resampling.BICUBIC)
        image.save(folder / f"{i}.jpg", quality=90)


def network(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe keys of the measured network."""
    return {
        "model": {
            "backbone": arguments.backbone,
            "dim": 512,
            "pooling": "avg+max",
            "weights": "none",
            "freeze_batchnorm": True,
            "image_size": arguments.crop,
        },
        "optimizer": {"clip_value": 10.0},
    }


def make_recipe(root: Path, cache: Path, arguments: argparse.Namespace) -> Recipe:
    return Recipe.load(
        {
            "data": {
                "dataset": "folder",
                "root": str(root),
                "batch_size": arguments.batch,
                "short_side": 256,
                "cache": arguments.cache,
                "cache_dir": str(cache),
            },
            **network(arguments),
            "training": {
                "precision": arguments.precision,
                "cuda_graph": arguments.cuda_graph,
            },
            "evaluation": {"protocol": "last", "batch_size": arguments.batch},
        }
    )


def bare_steps(run: Run, pixels: torch.Tensor, steps: int) -> float:
    """Return images per second of forward, backward and optimizer step."""
    network = run.updater.network
    _wait(run.world.device)
    started = time.perf_counter()
    for _ in range(steps):
        run.updater.optimizer.zero_grad(set_to_none=True)
        network(pixels).sum().backward()
        run.updater.optimizer.step()
    _wait(run.world.device)
    return steps * len(pixels) / (time.perf_counter() - started)


def trainer_epoch(run: Run, epoch: int) -> float:
    """Return images per second of the trainer's steps."""
    seen = 0
    _wait(run.world.device)
    started = time.perf_counter()
    for pixels, labels in run.data.batches(epoch, 0):
        run.state.advance(run.updater(pixels, labels, run.state.step))
        seen += len(labels)
    _wait(run.world.device)
    return seen / (time.perf_counter() - started)


def evaluation_times(run: Run, count: int) -> tuple[float, float]:
    """Return seconds to embed n images, and to evaluate them with all metrics."""
    rows = np.arange(count) % len(run.data.catalog)
    labels = np.asarray(run.data.catalog.labels)[rows]
    _wait(run.world.device)
    started = time.perf_counter()
    embeddings = run.evaluator.embed(rows)
    _wait(run.world.device)
    embedded = time.perf_counter()
    at = (1, 2, 4, 8)
    every = Metrics(recall_at=at, precision_at=at, ndcg_at=at, map_at=at, clustering=True)
    evaluate(embeddings, labels, metrics=every)
    return embedded - started, time.perf_counter() - embedded


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="tf_efficientnet_lite0")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crop", type=int)
    parser.add_argument("--cache", default="pixels")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--evaluate", type=int, default=0, metavar="IMAGES")
    parser.add_argument("--cuda-graph", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        root, cache = Path(home, "images"), Path(home, "cache")
        make_images(root, arguments.images, 320)
        recipe = make_recipe(root, cache, arguments)
        folder = RunFolder(Path(home, "run"))
        started = time.perf_counter()
        run = build(recipe, folder, RunContext(join_processes()))
        first = time.perf_counter() - started
        pixels, _ = next(iter(run.data.batches(0, 0)))
        steps = len(run.data.sampler)
        started = time.perf_counter()
        bare_steps(run, pixels, 2)
        warm = time.perf_counter() - started
        rates: dict[str, list[float]] = {"bare": [], "trainer": []}
        for number in range(arguments.rounds):
            rates["bare"].append(bare_steps(run, pixels, steps))
            rates["trainer"].append(trainer_epoch(run, number))
        bare, whole = (statistics.median(rates[name]) for name in ("bare", "trainer"))
        ratios = [t / b for t, b in zip(rates["trainer"], rates["bare"], strict=True)]
        print(f"{arguments.backbone}, crop {run.updater.embedder.preprocessing.crop[0]}, ", end="")
        print(f"batch {arguments.batch}; {versions()}")
        print(f"first time: model built and {arguments.images} JPEG files decoded in {first:.1f} s")
        print(
            f"CUDA graph: {arguments.cuda_graph}, {arguments.precision}, cache {arguments.cache}; ",
            end="",
        )
        print(f"first two steps {warm:.1f} s")
        print(f"bare network {bare:.1f} images/s, trainer {whole:.1f} images/s")
        print(f"ratio, median over {arguments.rounds} rounds: {statistics.median(ratios):.3f}")
        for ordinal in ("first", "second") if arguments.evaluate else ():
            embedding, scoring = evaluation_times(run, arguments.evaluate)
            print(
                f"{ordinal} evaluation of {arguments.evaluate} images: embedded in "
                f"{embedding:.2f} s, all metrics in {scoring:.2f} s"
            )


if __name__ == "__main__":
    main()
