"""Measure what `proximetry extend` gains on new classes and loses on old ones.

    proximetry embed BACKBONE IMAGES --out vectors.npz
    python -m benchmarks.extend vectors.npz --old 60 --classes 100 --out extend.json

Half of the images of each class are for training, the others are unseen. The first classes by name
are old, the others new; the gallery of a query has the unseen images of all classes. `all` is a run
on all classes from the start.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from proximetry._util.files import atomic_write
from proximetry.data import VectorCatalog
from proximetry.models import Embedder
from proximetry.recipe.schema import Recipe
from proximetry.reproduce.table_page import grid
from proximetry.training import extend, train
from proximetry.training.extension import compare_unseen, write_catalog

METRICS = ("map@r", "recall@1")


def split_images(catalog: VectorCatalog, classes: int) -> VectorCatalog:
    """Return the first classes; every second image of a class is in the split test."""
    codes = catalog.codes
    order = np.argsort(codes, kind="stable")
    position = np.empty(len(codes), np.int64)
    position[order] = np.concatenate([np.arange(n) for n in np.bincount(codes)])
    rows = np.flatnonzero(codes < classes)
    splits = np.where(position[rows] % 2 == 0, "train", "test")
    labels = [catalog.labels[row] for row in rows.tolist()]
    return VectorCatalog.from_arrays(catalog.vectors[rows], labels, splits=splits)


def measure(catalog: VectorCatalog, old: int, seed: int, home: Path, device: str | None) -> Any:
    """Return metrics of old and new classes by embedder."""
    names = catalog.class_names
    files = {}
    for name, part in (("all", names), ("old", names[:old]), ("new", names[old:])):
        files[name] = home / f"{name}.npz"
        write_catalog(catalog.filter(labels=part), files[name])
    changes = {"evaluation.protocol": "last", "training.seed": seed}
    for name in ("old", "all"):
        recipe = Recipe.load("vectors", changes | {"data.root": str(files[name])})
        train(recipe, home / name, device=device)
    half = [home / f"half{i}.npz" for i in (1, 2)]
    middle = (old + len(names)) // 2
    for file, part in zip(half, (names[old:middle], names[middle:]), strict=True):
        write_catalog(catalog.filter(labels=part), file)
    extend(home / "old", files["new"], home / "extended", device=device)
    extend(home / "old", files["new"], home / "no replay", replay=False, device=device)
    extend(home / "old", half[0], home / "first", device=device)
    extend(home / "first", half[1], home / "twice", device=device)
    scores: dict[str, dict[str, Any]] = {}
    frozen = Embedder.load(home / "old")
    for name in ("extended", "no replay", "twice", "all"):
        unseen = compare_unseen(frozen, Embedder.load(home / name), catalog, recipe, {*names[old:]})
        for time, title in (("before", "frozen"), ("after", name)):
            scores[title] = {group: part[time] for group, part in unseen.items()}
    return scores


def main() -> None:
    """Measure, print the table and write all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("vectors", type=Path)
    parser.add_argument("--old", type=int, default=60)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    catalog = split_images(VectorCatalog.read(options.vectors), options.classes)
    runs = []
    for seed in options.seeds:
        with TemporaryDirectory() as home:
            runs.append(measure(catalog, options.old, seed, Path(home), options.device))
    print(grid(["embedder", *(f"{g} {m}" for g in ("old", "new") for m in METRICS)], rows(runs)))
    if options.out is not None:
        atomic_write(options.out, json.dumps(runs, indent=2).encode())


def rows(runs: list[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table: means over the seeds, in percent."""
    return [
        [
            name,
            *(
                f"{100 * np.mean([run[name][group][metric] for run in runs]):.1f}"
                for group in ("old", "new")
                for metric in METRICS
            ),
        ]
        for name in runs[0]
    ]


if __name__ == "__main__":
    main()
