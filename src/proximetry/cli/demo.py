"""The demo: train on half of the built-in characters, find the other half again."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximetry._util.files import atomic_write
from proximetry._util.machine import cores
from proximetry._util.tensors import chunks
from proximetry.data import Catalog, glyphs
from proximetry.metrics import evaluate
from proximetry.models import Embedder
from proximetry.recipe.schema import Recipe
from proximetry.search.manifest import MANIFEST
from proximetry.training.reporting import Display, metrics_table
from proximetry.training.run import train

COLUMNS = ("recall@1", "recall@2", "recall@4", "recall@8", "map@r", "ndcg@4", "ndcg@8")


def run_demo(out: Path | None, seed: int, display: Display) -> dict[str, dict[str, Any]]:
    """Train, evaluate, and say what was learned; return the rows of the table."""
    started = time.monotonic()
    numbered = (Path("runs") / f"demo-{number}" for number in itertools.count(1))
    folder = out or next(path for path in numbered if not path.exists())
    recipe = Recipe.load("glyphs", {"training.seed": seed})
    catalog = glyphs()
    test, seen = catalog.filter(split="test"), catalog.filter(split="train")
    display.message(
        f"Glyphs: {len(seen)} images of {len(seen.class_names)} characters to train on, "
        f"{len(test)} images of {len(test.class_names)} others to find again."
    )
    results = train(recipe, folder, display=display)
    embedder = Embedder.load(folder)
    with ThreadPoolExecutor(cores()) as pool:
        files = [test.file(row) for row in range(len(test))]
        pixels = torch.stack([*pool.map(embedder.preprocessing.pixels, files)])
    # As vectors of their own: what an embedder has to beat. Ink counts, paper does not.
    raw = 255.0 - pixels[:, 0].flatten(1).float()
    rows = {
        "raw pixels": evaluate(raw, np.asarray(test.labels)).mean(),
        "untrained embedder": results["untrained"]["test"],
        "trained embedder": results["selected"]["test"],
    }
    parts = chunks(len(pixels), recipe.evaluation.batch_size)
    vectors = torch.cat([embedder.embed(pixels[part]) for part in parts])
    made = [*make_gallery(folder, embedder, test, vectors), *make_report(folder, vectors)]
    gallery = folder / "gallery"
    serve = f"  proximetry serve {gallery}\n" if (gallery / MANIFEST).exists() else ""
    gain = 100 * (rows["trained embedder"]["recall@1"] - rows["raw pixels"]["recall@1"])
    display.message(
        f"\nCharacters never seen in training, in percent:\n\n{metrics_table(rows, COLUMNS)}\n\n"
        f"recall@1 rose by {gain:.1f} points over raw pixels, "
        f"{time.monotonic() - started:.0f} s in all. The epoch was selected on characters held "
        f"out of training.\n\n" + "\n".join(made) + f"\n\nNext:\n{serve}"
        f"  proximetry train IMAGES    your own folder of class folders\n"
        f"  proximetry recipes         the shipped recipes\n"
        f"  proximetry evaluate {folder} glyphs\n"
        f"  proximetry embed {folder} IMAGES --out vectors.npz"
    )
    return rows


def make_gallery(folder: Path, embedder: Embedder, test: Catalog, vectors: Tensor) -> list[str]:
    """Make a gallery of the test images in the folder of the run; say where, or why not."""
    place = folder / "gallery"
    try:
        from proximetry.search import Gallery

        if (place / MANIFEST).exists():  # the run was complete before
            Gallery.open(place, embedder)
        else:
            Gallery.build(embedder, test, place, vectors=vectors)
    except ModuleNotFoundError as error:
        return [f"Gallery: left out; {error}"]
    return [f"Gallery: {place}"]


def make_report(folder: Path, vectors: Tensor) -> list[str]:
    """Write the report of the run; say where, and what is missing in it."""
    from proximetry.reports import RunRecord, evaluate_run, report_page

    record, place = RunRecord.read(folder), folder / "report.html"
    atomic_write(place, report_page(record, evaluate_run(record, vectors=vectors)))
    return [f"Report:  {place}", *(f"  left out: {reason}" for reason in record.missing)]
