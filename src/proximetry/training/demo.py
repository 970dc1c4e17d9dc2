"""The demo: train on half of the built-in characters, find the other half again."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proximetry import metrics
from proximetry.data import EvalTransform, PixelCache, glyphs
from proximetry.models import Embedder
from proximetry.training.display import Display
from proximetry.training.recipe import Recipe
from proximetry.training.run import train

COLUMNS = ("recall@1", "recall@2", "recall@4", "recall@8", "map@r", "ndcg@4", "ndcg@8")


def run_demo(out: Path | None, seed: int, display: Display) -> dict[str, dict[str, float]]:
    """Train, evaluate, and say what was learned; return the rows of the table."""
    started = time.monotonic()
    folder = _free_folder(Path("runs")) if out is None else out
    recipe = Recipe.load("glyphs")
    recipe.training.seed = seed
    catalog = glyphs()
    test = catalog.filter(split="test")
    seen = catalog.filter(split="train")
    display.message(
        f"Glyphs: {len(seen)} images of {len(seen.class_names)} characters to train on, "
        f"{len(test)} images of {len(test.class_names)} others to find again."
    )
    results = train(recipe, folder, display=display)
    rows = {
        "raw pixels": _evaluate(_raw_pixels(test), test.labels),
        "untrained embedder": _evaluate(_untrained(recipe, test), test.labels),
        "trained embedder": results["chosen"]["test"],
    }
    gain = 100 * (rows["trained embedder"]["recall@1"] - rows["raw pixels"]["recall@1"])
    display.message(
        f"\nCharacters never seen in training, in percent:\n\n{_table(rows)}\n\n"
        f"recall@1 rose by {gain:.1f} points over raw pixels, "
        f"{time.monotonic() - started:.0f} s in all. The epoch was chosen on characters held out "
        f"of training.\n\n"
        f"Next:\n"
        f"  proximetry recipes                                  the shipped recipes\n"
        f"  proximetry train folder runs/mine --data.root DIR   your own folder of class folders\n"
        f"  proximetry evaluate {folder}/embedder glyphs\n"
        f"  proximetry embed {folder}/embedder IMAGES --out vectors.npz"
    )
    return rows


def _raw_pixels(test: Any) -> torch.Tensor:
    """Every image as its own vector: what an embedder has to beat."""
    cache = PixelCache.build(test, 48)
    pixels = EvalTransform(48, 48)(cache, np.arange(len(cache)))
    return 255.0 - pixels[:, 0].flatten(1).float()  # ink counts, paper does not


def _untrained(recipe: Recipe, test: Any) -> torch.Tensor:
    torch.manual_seed(recipe.training.seed)
    m = recipe.model
    embedder = Embedder.create(m.backbone, m.dim, pooling=m.pooling, weights="none")
    return embedder.encode([test.file(i) for i in range(len(test))], batch_size=256)


def _evaluate(vectors: torch.Tensor, labels: tuple[str, ...]) -> dict[str, float]:
    return metrics.evaluate(vectors, np.asarray(labels))


def _table(rows: dict[str, dict[str, float]]) -> str:
    lines = [" " * 20 + "".join(f"{name:>10}" for name in COLUMNS)]
    for name, values in rows.items():
        lines.append(f"{name:20}" + "".join(f"{100 * values[key]:10.1f}" for key in COLUMNS))
    return "\n".join(lines)


def _free_folder(home: Path) -> Path:
    number = 1
    while (home / f"demo-{number}").exists():
        number += 1
    return home / f"demo-{number}"
