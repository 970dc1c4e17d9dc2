"""The demo: train on half of the built-in characters, find the other half again."""

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from proximetry import metrics
from proximetry.data import Catalog, EvalTransform, PixelCache, glyphs
from proximetry.models import Embedder
from proximetry.training.display import Display, metrics_table
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
    pixels = _pixels(catalog)
    # As vectors of their own: what an embedder has to beat. Ink counts, paper does not.
    raw = 255.0 - pixels[:, 0].flatten(1).float()
    rows = {
        "raw pixels": _evaluate(raw, test.labels),
        "untrained embedder": _evaluate(_untrained(recipe, pixels), test.labels),
        "trained embedder": results["chosen"]["test"],
    }
    gain = 100 * (rows["trained embedder"]["recall@1"] - rows["raw pixels"]["recall@1"])
    display.message(
        f"\nCharacters never seen in training, in percent:\n\n{metrics_table(rows, COLUMNS)}\n\n"
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


def _pixels(catalog: Catalog) -> Tensor:
    """The test images as training left them in the pixel cache."""
    cache = PixelCache.build(catalog, 48).take(catalog.mask(split="test"))
    return EvalTransform(48, 48)(cache, np.arange(len(cache)))


@torch.no_grad()
def _untrained(recipe: Recipe, pixels: Tensor) -> Tensor:
    torch.manual_seed(recipe.training.seed)
    m = recipe.model
    embedder = Embedder.create(m.backbone, m.dim, pooling=m.pooling, weights="none").eval()
    normalise = embedder.preprocessing.normalise
    starts = range(0, len(pixels), 256)
    return torch.cat([embedder(normalise(pixels[i : i + 256])) for i in starts])


def _evaluate(vectors: Tensor, labels: tuple[str, ...]) -> dict[str, float]:
    return metrics.evaluate(vectors, np.asarray(labels))


def _free_folder(home: Path) -> Path:
    number = 1
    while (home / f"demo-{number}").exists():
        number += 1
    return home / f"demo-{number}"
