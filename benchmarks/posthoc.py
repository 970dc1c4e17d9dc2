"""Evaluate trained embedders on held-out classes with other views, whitening and averages.

    python -m benchmarks.studies best-recipe-search cub-large --data CUB --out OUT --keep-runs
    python -m benchmarks.posthoc --root CUB --short-side 400 --sizes 384 448 512 \
        --shares 0.75 0.875 1 --out FILE.json RUN

RUN is a folder kept by `--keep-runs`. Each run is evaluated for views of other sizes and
shares of the image, with and without its flip; for averages of such views; and for whitening
exponents. `--together` evaluates the average of the runs (a model soup): one backbone with the mean
of their weights, and their heads concatenated and reduced by PCA. The test set is not used.
"""

import argparse
import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry._util.files import atomic_write
from proximetry._util.tensors import chunks
from proximetry.data import PixelCache, open_dataset
from proximetry.data.resample import Rows, Windows, resample
from proximetry.metrics import Metrics, evaluate
from proximetry.models import Embedder, evaluation_mode
from proximetry.models.embedder import extract_features
from proximetry.models.pca import principal_axes, second_moments
from proximetry.recipe.schema import Recipe
from proximetry.training.sources.training_data import split_rows
from proximetry.training.updater import autocast

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = "bfloat16" if DEVICE.type == "cuda" else "float32"
DIM, BATCH = 512, 128
POWERS = (0.0, 0.15, 0.25, 0.35, 0.5, 0.75)

Scores = dict[str, float]
Ways = Iterator[tuple[str, Scores]]
"""Ways of evaluating, by name."""
View = tuple[int, float]
"""Side in pixels, and share of the short side."""


class Images:
    """The training images of a dataset, with some classes held out."""

    def __init__(self, root: str, short_side: int, recipe: Recipe) -> None:
        catalog = open_dataset(recipe.data.dataset, root)
        self._rows = split_rows(catalog, recipe).rows
        self._pixels = PixelCache.build(catalog, short_side).to(DEVICE)
        self._labels = np.asarray(catalog.labels)

    def _view(self, rows: Rows, view: View, flip: bool) -> Tensor:
        heights = torch.from_numpy(self._pixels.heights[rows])
        widths = torch.from_numpy(self._pixels.widths[rows])
        size, share = view
        side = (torch.minimum(heights, widths).double() * share).round().long()
        windows = Windows(
            top=((heights - side) / 2).round().long(),
            left=((widths - side) / 2).round().long(),
            height=side,
            width=side,
            flip=torch.full((len(side),), flip),
        )
        return resample(self._pixels, rows, windows, (size, size), "bicubic")

    @torch.no_grad()
    def features(self, embedder: Embedder, split: str, view: View, *, flip: bool = False) -> Tensor:
        """Return pooled features of a view of a split, or of its flip."""
        rows = self._rows[split]
        with evaluation_mode(embedder), autocast(PRECISION, DEVICE):
            return torch.cat(
                [
                    extract_features(embedder, self._view(rows[part], view, flip)).float()
                    for part in chunks(len(rows), BATCH)
                ]
            )

    def score(self, vectors: Tensor) -> Scores:
        """Return metrics of unit vectors of the held-out classes, in percent."""
        labels = self._labels[self._rows["held_out"]]
        scores = evaluate(vectors, labels, metrics=Metrics(recall_at=(1,)), similarity="cosine")
        return {key: round(100 * scores[key], 3) for key in ("recall@1", "map@r")}


def averaged(runs: Sequence[Embedder]) -> Embedder:
    """Return one embedder with the mean of the backbones, and all heads concatenated."""
    soup = copy.deepcopy(runs[0])
    states = [run.backbone.state_dict() for run in runs]
    soup.backbone.load_state_dict(
        {
            key: torch.stack([state[key] for state in states]).mean(0)
            if value.is_floating_point()
            else value
            for key, value in states[0].items()
        }
    )
    heads: list[Any] = [run.head for run in runs]
    soup.dim = sum(run.dim for run in runs)
    soup.head = nn.Linear(soup.width, soup.dim).to(DEVICE)
    with torch.no_grad():
        soup.head.weight.copy_(torch.cat([head.weight for head in heads]))
        soup.head.bias.copy_(torch.cat([head.bias for head in heads]))
    return soup


class Trial:
    """Evaluates an embedder with different views and whitening."""

    def __init__(self, images: Images, embedder: Embedder) -> None:
        self._images, self._embedder = images, embedder
        own = embedder.preprocessing
        usual = (own.crop[0], own.crop[0] / own.short_side)
        moments = second_moments(_unit(embedder, images.features(embedder, "train", usual)))
        dim = min(DIM, embedder.dim)
        self._axes = {power: principal_axes(moments, dim, whitening=power) for power in POWERS}

    def score(self, features: Tensor, power: float = 0.0) -> Scores:
        """Return metrics of features after PCA, whitened with this exponent."""
        vectors = _unit(self._embedder, features) @ self._axes[power].t()
        return self._images.score(F.normalize(vectors))

    def views(self, sizes: Sequence[int], shares: Sequence[float]) -> Ways:
        """Yield scores of views, of their averages, and of whitened averages."""
        both: dict[tuple[int, float], Tensor] = {}
        for size, share in product(sizes, shares):
            name, view = f"{size} of {round(size / share)}", (size, share)
            plain, flipped = (
                self._images.features(self._embedder, "held_out", view, flip=flip)
                for flip in (False, True)
            )
            yield name, self.score(plain)
            both[size, share] = _mean((plain, flipped))
            yield f"{name}, flip", self.score(both[size, share])
        for share in shares:
            for pair in pairwise(sizes):
                found = _mean(both[size, share] for size in pair)
                yield f"{pair[0]} + {pair[1]} at {share:g}, flip", self.score(found)
            found = _mean(both[size, share] for size in sizes)
            yield f"all sizes at {share:g}, flip", self.score(found)
        several = {f"{size} at all shares": [both[size, s] for s in shares] for size in sizes}
        for name, views in {**several, "all sizes and shares": [*both.values()]}.items():
            for power in POWERS:
                whitened = f", whitened {power}" if power else ""
                yield f"{name}, flip{whitened}", self.score(_mean(views), power)


@torch.no_grad()
def _unit(embedder: Embedder, features: Tensor) -> Tensor:
    return F.normalize(embedder.project(features).float())


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([*tensors]).mean(0)


def main() -> None:
    """Evaluate runs, or their average."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--root", required=True, help="folder of the images")
    parser.add_argument("--short-side", type=int, required=True, help="of the cached images")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="of views, in pixels")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.875, 1.0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--together", action="store_true", help="the average of the runs")
    arguments = parser.parse_args()
    embedders = [Embedder.load(run, device=DEVICE) for run in arguments.runs]
    for run, embedder in zip(arguments.runs, embedders, strict=True):
        if embedder.preprocessing.squash:
            parser.error(f"{run} squashes whole images (model.squash). Use a run that crops them.")
        embedder.architecture = replace(embedder.architecture, flip_tta=False, tta_crops=())
    names = [run.name for run in arguments.runs]
    embedder_of = dict(zip(names, embedders, strict=True))
    if arguments.together:
        embedder_of = {" + ".join(names): averaged(embedders)}
    images = Images(arguments.root, arguments.short_side, Recipe.load(embedders[0].recipe or {}))
    found = {}
    for name, embedder in embedder_of.items():
        found[name] = dict(Trial(images, embedder).views(arguments.sizes, arguments.shares))
        atomic_write(arguments.out, (json.dumps(found, indent=1) + "\n").encode())
        best = sorted(found[name].items(), key=lambda one: -one[1]["map@r"])[:6]
        print(name, *(f"\n  {way}: {scores}" for way, scores in best), flush=True)


if __name__ == "__main__":
    main()
