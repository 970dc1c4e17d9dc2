"""Compare PCA settings for fewer training images than dimensions.

    proximetry train IMAGES/train runs/few --recipe default-cpu --model.pca-dim null \
        --evaluation.protocol last
    python -m benchmarks.few_images runs/few IMAGES --out few_images.json

IMAGES has train/ and eval/, with different classes. `prior` is the weight of the second moments of
the head that are added to those of the images (`proximetry.models.pca`).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from proximetry._util.files import atomic_write
from proximetry.data import open_dataset
from proximetry.metrics import evaluate
from proximetry.models import Embedder
from proximetry.models.pca import principal_axes, regularized_moments, second_moments
from proximetry.reproduce.table_page import grid
from proximetry.training.evaluator import encode_catalog

DIM, WHITENING = 512, 0.25
PRIORS = (0.001, 0.01, 0.03, 0.1)


def measure(embedder: Embedder, images: Path) -> list[dict[str, Any]]:
    """Return metrics of the classes in eval/ for every PCA setting."""
    parts = [open_dataset("folder", root=images / part) for part in ("train", "eval")]
    train, other = (encode_catalog(embedder, part) for part in parts)
    rows = []

    def add(name: str, vectors: Tensor) -> None:
        scores = evaluate(vectors, parts[1].codes)
        rows.append(
            {"name": name, "dim": vectors.shape[1]}
            | {metric: scores[metric] for metric in ("map@r", "recall@1")}
        )

    def reduce(moments: Tensor, dim: int) -> Tensor:
        return other @ principal_axes(moments, dim, whitening=WHITENING).t()

    add("no PCA", other)
    moments = second_moments(train)
    add("PCA to as many dimensions as images", reduce(moments, len(train)))
    for prior in PRIORS:
        add(f"prior {prior}", reduce(regularized_moments(moments, embedder, prior=prior), DIM))
    return rows


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON; other entries are kept")
    arguments = parser.parse_args()
    rows = measure(Embedder.load(arguments.run / "embedder"), arguments.images)
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    document[arguments.images.name] = rows
    atomic_write(arguments.out, (json.dumps(document, indent=2) + "\n").encode())
    cells = [
        [r["name"], r["dim"], f"{100 * r['map@r']:.1f}", f"{100 * r['recall@1']:.1f}"] for r in rows
    ]
    print(grid(["", "dimensions", "MAP@R", "recall@1"], cells))


if __name__ == "__main__":
    main()
