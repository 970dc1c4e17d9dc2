"""`proximetry demo`: train on half of the built-in characters, retrieve the other half."""

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from proximetry._util.files import atomic_write
from proximetry.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from proximetry.data import Catalog
    from proximetry.models import Embedder

COLUMNS = ("recall@1", "recall@2", "recall@4", "recall@8", "map@r", "ndcg@4", "ndcg@8")


def demo(*, out: Path | None = None, seed: int = 0) -> None:
    """Train on the built-in glyphs and retrieve characters not seen in training.

    Takes two to three minutes on two CPU cores and needs no download. Also writes a report of the
    run and a searchable gallery of those characters.

    Args:
        out: folder of the run; default: a new one below runs/.
        seed: random seed of the run.
    """
    import numpy as np

    from proximetry.data import glyphs
    from proximetry.metrics import evaluate
    from proximetry.models import Embedder
    from proximetry.reports import RunRecord, evaluate_run, report_page
    from proximetry.search.manifest import MANIFEST
    from proximetry.training import train
    from proximetry.training.metrics_table import metrics_table
    from proximetry.training.reporting import make_display

    started, display = time.monotonic(), make_display()
    numbered = (Path("runs") / f"demo-{number}" for number in itertools.count(1))
    folder = out or next(path for path in numbered if not path.exists())
    recipe = Recipe.load("glyphs", {"training.seed": seed})
    catalog = glyphs()
    test, train_catalog = catalog.filter(split="test"), catalog.filter(split="train")
    display.message(
        f"Glyphs: {len(train_catalog)} images of {len(train_catalog.class_names)} characters to "
        f"train on, {len(test)} images of {len(test.class_names)} others to retrieve."
    )
    results = train(recipe, folder, display=display)
    embedder = Embedder.load(folder)
    files = [test.file(row) for row in range(len(test))]
    # Baseline: raw pixels as vectors, inverted so that the background is 0.
    raw = np.stack([255.0 - embedder.preprocessing.pixels(file)[0].flatten() for file in files])
    rows = {
        "raw pixels": evaluate(raw.astype(np.float32), np.asarray(test.labels)).mean(),
        "untrained embedder": results["untrained"]["test"],
        "trained embedder": results["selected"]["test"],
    }
    vectors = embedder.encode(files, recipe.evaluation.batch_size)
    record, page, gallery = RunRecord.read(folder), folder / "report.html", folder / "gallery"
    atomic_write(page, report_page(record, evaluate_run(record, vectors=vectors)))
    lines = [make_gallery(gallery, embedder, test, vectors), f"Report:  {page}"]
    lines += [f"  missing: {reason}" for reason in record.missing]
    serve = f"  proximetry serve {gallery}\n" if (gallery / MANIFEST).exists() else ""
    gain = 100 * (rows["trained embedder"]["recall@1"] - rows["raw pixels"]["recall@1"])
    display.message(
        f"\nCharacters not seen in training, in percent:\n\n{metrics_table(rows, COLUMNS)}\n\n"
        f"recall@1 is {gain:.1f} points higher than with raw pixels "
        f"({time.monotonic() - started:.0f} s in total). The epoch was selected on held-out "
        f"characters.\n\n" + "\n".join(lines) + f"\n\nNext:\n{serve}"
        f"  proximetry train IMAGES    your own folder of class folders\n"
        f"  proximetry recipes         the shipped recipes\n"
        f"  proximetry evaluate {folder} glyphs\n"
        f"  proximetry embed {folder} IMAGES --out vectors.npz"
    )


def make_gallery(path: Path, embedder: "Embedder", test: "Catalog", vectors: "Tensor") -> str:
    """Build a gallery of the test images; return a line about it."""
    from proximetry.search.manifest import MANIFEST

    try:
        from proximetry.search import Gallery

        if (path / MANIFEST).exists():  # from an earlier call
            Gallery.open(path, embedder)
        else:
            Gallery.build(embedder, test, path, vectors=vectors)
    except ModuleNotFoundError as error:
        return f"Gallery: skipped; {error}"
    return f"Gallery: {path}"
