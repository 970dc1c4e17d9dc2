"""Measure `proximetry check` on folders of class folders, with problems injected.

    python -m benchmarks.health labels vectors.npz    wrong labels found, of the first half of the
                                                      classes
    python -m benchmarks.health copies photos         altered copies found
    python -m benchmarks.health retrain vectors.npz   MAP@R after training on the first half of the
                                                      classes: clean, noisy, suggestions applied
    python -m benchmarks.health margins vectors.npz   wrong labels found by the proxies of a run
    python -m benchmarks.health time photos           time of the check and of its embedding

Files of vectors are those of ``proximetry embed tf_efficientnet_lite0 photos --out vectors.npz``.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps
from torch.nn import functional as F

from proximetry import check, train
from proximetry.data import Catalog, VectorCatalog
from proximetry.models import Embedder
from proximetry.training.checkpoint import read_part
from proximetry.training.extension import write_catalog

COPIES = 500
ALTERED: dict[str, Callable[[Image.Image], Image.Image]] = {
    "resized": lambda image: image.resize((image.width // 2, image.height // 2)),
    "recompressed": lambda image: image,
    "mirrored": ImageOps.mirror,
    "cropped": lambda image: image.crop(
        (0, image.height // 10, image.width - image.width // 10, image.height)
    ),
}


def split_classes(file: Path) -> VectorCatalog:
    """Return vectors with the first half of the sorted classes for training, the rest as test."""
    catalog = VectorCatalog.read(file)
    first = catalog.codes < len(catalog.class_names) // 2
    splits = np.where(first, "train", "test")
    return VectorCatalog.from_arrays(
        catalog.vectors, catalog.labels, splits=splits, source=str(file)
    )


def flip_labels(catalog: VectorCatalog, share: float, seed: int) -> tuple[VectorCatalog, set[str]]:
    """Give a share of the training images another training class; return also their paths."""
    rows, names = catalog.rows("train"), catalog.filter(split="train").class_names
    random = np.random.default_rng(seed)
    labels = [*catalog.labels]
    flipped = random.choice(rows, round(share * len(rows)), replace=False).tolist()
    for row in flipped:
        labels[row] = str(random.choice([name for name in names if name != labels[row]]))
    return replace(catalog, labels=labels), {catalog.paths[row] for row in flipped}


def measure_labels(file: Path) -> None:
    """Print the precision of the most suspicious images, as many as labels were flipped."""
    catalog = split_classes(file)
    for share in (0.05, 0.1, 0.2):
        for seed in range(3):
            noisy, flipped = flip_labels(catalog, share, seed)
            health = check(noisy.filter(split="train"))
            ranked = np.argsort(-health.wrong_labels, kind="stable")[: len(flipped)]
            precision = np.mean([health.catalog.paths[row] in flipped for row in ranked])
            errors = [one for one in health.findings if one.kind == "label error"]
            found = {health.paths(finding)[0] for finding in errors}
            right = len(found & flipped)
            print(
                f"{share:.0%} flipped, seed {seed}: precision at {len(flipped)} {precision:.3f}; "
                f"{len(found)} reported, precision {right / max(1, len(found)):.3f}, "
                f"recall {right / len(flipped):.3f}, estimated noise {health.label_noise:.3f}",
                flush=True,
            )


def measure_margins(file: Path) -> None:
    """Print the precision of pretrained vectors, of those of a run on the labels, and of margins.

    A margin is the cosine to the proxy of the label minus that to the nearest other proxy.
    """
    catalog = split_classes(file)
    for share in (0.05, 0.1, 0.2):
        labels, flipped = flip_labels(catalog, share, 0)
        noisy = labels.filter(split="train")
        assert isinstance(noisy, VectorCatalog)
        is_flipped = np.array([path in flipped for path in noisy.paths])
        codes = noisy.codes
        with tempfile.TemporaryDirectory() as home:
            write_catalog(noisy, Path(home) / "noisy.npz")
            settings = {"evaluation.protocol": "last"}
            table = Path(home) / "noisy.npz"
            run = train(table, Path(home) / "run", recipe="vectors", settings=settings)
            vectors = run.embedder.encode(noisy.vectors).numpy()
            checkpoint = Path(home) / "run" / "checkpoints" / "last.safetensors"
            proxies = read_part(checkpoint, "loss")[1]["proxies.weight"][:, 0]
        similarities = vectors @ F.normalize(proxies).numpy().T
        own = similarities[np.arange(len(codes)), codes].copy()
        similarities[np.arange(len(codes)), codes] = -np.inf
        scores = {
            "pretrained": check(noisy).wrong_labels,
            "vectors of the run": check(replace(noisy, vectors=vectors)).wrong_labels,
            "margins": similarities.max(1) - own,
        }
        ranks = {name: np.argsort(np.argsort(values)) for name, values in scores.items()}
        ranks["vectors of the run and margins"] = ranks["vectors of the run"] + ranks["margins"]
        ranks["pretrained and margins"] = ranks["pretrained"] + ranks["margins"]
        precisions = {
            name: is_flipped[np.argsort(-values)[: len(flipped)]].mean()
            for name, values in ranks.items()
        }
        text = ", ".join(f"{name} {value:.2f}" for name, value in precisions.items())
        print(f"{share:.0%} flipped: {text}", flush=True)


def measure_copies(folder: Path) -> None:
    """Print the altered copies of a sample that are found in another split, and other pairs."""
    catalog = Catalog.from_folder(folder)
    random = np.random.default_rng(0)
    rows = random.choice(len(catalog), min(2 * COPIES, len(catalog)), replace=False)
    originals = [catalog.file(row) for row in rows.tolist()]
    labels = [catalog.labels[row] for row in rows.tolist()]
    with tempfile.TemporaryDirectory() as home:
        copies, kinds = [], [*ALTERED] * COPIES
        for number, file in enumerate(originals[:COPIES]):
            copies.append(f"{home}/{number}-{kinds[number]}.jpg")
            altered = ALTERED[kinds[number]](Image.open(file).convert("RGB"))
            altered.save(copies[-1], quality=40 if kinds[number] == "recompressed" else 90)
        splits = ["train"] * len(originals) + ["test"] * len(copies)
        health = check(Catalog((*originals, *copies), [*labels, *labels[:COPIES]], splits))
        source = dict(zip(copies, originals, strict=False))
        leaks = [{*health.paths(one)} for one in health.findings if one.kind == "leakage"]
        found = {copy for copy in copies if any({copy, source[copy]} <= paths for paths in leaks)}
        for kind in ALTERED:
            those = [copy for copy in copies if kind in copy]
            print(f"{kind}: {np.mean([copy in found for copy in those]):.1%} of {len(those)}")
        other = [paths for paths in leaks if not any(source.get(one) in paths for one in paths)]
        print(f"all: {len(found) / len(copies):.1%}; {len(other)} other pairs across splits:")
        for paths in other:
            print(" ", *sorted(paths))


def measure_retraining(file: Path, share: float = 0.2) -> None:
    """Print MAP@R on the other half of the classes for clean, noisy and repaired labels."""
    catalog, scores = split_classes(file), dict[str, list[float]]()
    for seed in range(3):
        noisy, _ = flip_labels(catalog, share, seed)
        with tempfile.TemporaryDirectory() as home:
            suggestions = Path(home) / "suggestions.csv"
            check(noisy.filter(split="train")).suggestions(suggestions)
            variants: dict[str, tuple[Catalog, dict[str, Any]]] = {
                "clean": (catalog, {}),
                "noisy": (noisy, {}),
                "suggestions": (noisy, {"data.suggestions": str(suggestions)}),
            }
            for name, (data, settings) in variants.items():
                table = Path(home) / f"{name}.npz"
                fields = ("vectors", "paths", "labels", "splits")
                arrays: dict[str, Any] = {one: np.array(getattr(data, one)) for one in fields}
                np.savez(table, **arrays)
                settings |= {"training.seed": seed, "evaluation.protocol": "last"}
                run = train(table, Path(home) / name, recipe="vectors", settings=settings)
                scores.setdefault(name, []).append(run.results["last"]["test"]["map@r"])
        print({name: [round(100 * one, 2) for one in values] for name, values in scores.items()})
    clean, noisy_score, repaired = (np.mean(scores[name]) for name in scores)
    print(f"recovered {(repaired - noisy_score) / (clean - noisy_score):.0%} of the lost MAP@R")


def measure_time(folder: Path) -> None:
    """Print the seconds of a check and of the embedding in it, as wall time and CPU time."""
    encode, spent = Embedder.encode, list[npt.NDArray[np.float64]]()

    def clock() -> npt.NDArray[np.float64]:
        return np.array([time.perf_counter(), sum(os.times()[:4])])  # of the processes, too

    def timed(*arguments: Any, **options: Any) -> Any:
        start = clock()
        vectors = encode(*arguments, **options)
        spent.append(clock() - start)
        return vectors

    Embedder.encode = timed  # type: ignore[method-assign]
    start = clock()
    health = check(folder)
    with tempfile.TemporaryDirectory() as home:
        health.page(Path(home) / "health.html")
    total, embedding = clock() - start, np.sum(spent, 0)
    for name, whole, part in zip(("wall", "CPU"), total, embedding, strict=True):
        print(
            f"{len(health.catalog)} images, {name} time: {whole:.0f} s, embedding {part:.0f} s, "
            f"ratio {whole / part:.2f}"
        )


MEASUREMENTS = {
    "labels": measure_labels,
    "margins": measure_margins,
    "copies": measure_copies,
    "retrain": measure_retraining,
    "time": measure_time,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure `proximetry check`.")
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("source", type=Path, nargs="+", help="folders, or files of vectors")
    arguments = parser.parse_args()
    for source in arguments.source:
        print(source)
        MEASUREMENTS[arguments.measurement](source)
