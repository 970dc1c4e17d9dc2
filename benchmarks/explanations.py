"""Delete the most contributing positions of images, and measure how fast the cosine falls.

    python -m benchmarks.explanations IMAGES --model RUN --out explanations.json

IMAGES has a folder of images per class; pairs are two images of a class. The positions of the
first image are replaced in the order of `Embedder.explain`, of Grad-CAM on the cosine at the same
feature map (Selvaraju et al. 2017), or at random. A better order has a smaller area under the
curve of cosines, as a fraction of the cosine of the whole images.
"""

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from proximetry._util.files import atomic_write
from proximetry.models import Embedder

STEPS = 8
RESAMPLES = 2000


def choose_pairs(folder: Path, count: int) -> list[tuple[Path, Path]]:
    """Return pairs of images of a class, of classes in turn."""
    draw = random.Random(0)
    classes = [sorted(one.iterdir()) for one in sorted(folder.iterdir()) if one.is_dir()]
    classes = [files for files in classes if len(files) > 1]
    draw.shuffle(classes)
    chosen = [draw.sample(classes[number % len(classes)], 2) for number in range(count)]
    return [(one, other) for one, other in chosen]


def grad_cam(embedder: Embedder, pixels: Tensor, other: Tensor) -> Tensor:
    """Return Grad-CAM [h, w] of the cosine to a vector; before the ReLU, to break its ties."""
    with torch.no_grad():
        batch = embedder.preprocessing.normalize(pixels)
        feature_map = cast(Any, embedder.backbone).forward_features(batch)
    feature_map.requires_grad_()
    cosine = embedder.project(embedder.pool(feature_map))[0] @ other
    (gradient,) = torch.autograd.grad(cosine, feature_map)
    axes = (1, 2) if embedder.channels_last else (2, 3)
    weights = gradient.mean(axes, keepdim=True)
    scores: Tensor = (weights * feature_map).sum(3 if embedder.channels_last else 1)[0]
    return scores.detach()


def delete(pixels: Tensor, scores: Tensor, filling: str) -> Tensor:
    """Return the image [STEPS + 1, 3, H, W] with more and more of its positions replaced."""
    image, size, shape = pixels.float(), pixels.shape[2:], scores.shape
    order = scores.flatten().argsort(descending=True)
    if filling == "gray":
        replacement = torch.full_like(image, 127)
    else:  # the mean color of each position, interpolated
        small = F.interpolate(image, shape, mode="area")
        replacement = F.interpolate(small, size, mode="bilinear")
    steps = []
    for step in range(STEPS + 1):
        mask = torch.zeros(shape).flatten()
        mask[order[: round(step / STEPS * len(order))]] = 1
        mask = F.interpolate(mask.view(1, 1, *shape), size, mode="nearest")
        steps.append(image + (replacement - image) * mask)
    return torch.cat(steps).round().to(torch.uint8)


def measure(embedder: Embedder, pairs: list[tuple[Path, Path]], filling: str) -> dict[str, Any]:
    """Return the curves of every pair [pairs, STEPS + 1] by method."""
    curves: dict[str, list[np.ndarray]] = {}
    generator = torch.Generator().manual_seed(0)
    for number, (a, b) in enumerate(pairs):
        pixels = embedder.preprocessing.pixels(a)[None]
        explanation = embedder.explain(a, b)
        other = torch.from_numpy(explanation.vectors[1].sum((0, 1))).float()
        contributions = torch.from_numpy(explanation.contributions[0])
        scores = {
            "explain": contributions,
            "Grad-CAM": grad_cam(embedder, pixels, other),
            "random": torch.rand(contributions.shape, generator=generator),
        }
        deleted = [delete(pixels, values, filling) for values in scores.values()]
        cosines = (embedder.embed(torch.cat(deleted)) @ other).view(len(scores), -1).numpy()
        for name, curve in zip(scores, cosines, strict=True):
            curves.setdefault(name, []).append(curve)
        if number % 50 == 49:
            print(f"{number + 1} pairs", flush=True)
    return {name: np.stack(values) for name, values in curves.items()}


def summarize(curves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return mean curves, areas, and bootstrap intervals of the differences to "explain"."""
    areas = {
        name: np.trapezoid(values / values[:, :1], axis=1) / STEPS
        for name, values in curves.items()
    }
    draw = np.random.default_rng(0)
    rows = draw.integers(0, len(areas["explain"]), (RESAMPLES, len(areas["explain"])))
    result = {}
    for name, values in areas.items():
        difference = (values - areas["explain"])[rows].mean(1)
        result[name] = {
            "area": round(float(values.mean()), 4),
            "minus_explain": [round(float(x), 4) for x in np.quantile(difference, (0.025, 0.975))],
            "cosines": curves[name].mean(0).round(4).tolist(),
        }
    return result


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--filling", choices=("gray", "blur"), default="blur")
    parser.add_argument("--out", type=Path, help="JSON")
    arguments = parser.parse_args()
    embedder = Embedder.load(arguments.model, "cpu")
    pairs = choose_pairs(arguments.images, arguments.pairs)
    result = summarize(measure(embedder, pairs, arguments.filling))
    settings = {"pairs": len(pairs), "filling": arguments.filling, "model": arguments.model}
    content = json.dumps({**settings, "methods": result}, indent=2)
    print(content)
    if arguments.out:
        atomic_write(arguments.out, content.encode())


if __name__ == "__main__":
    main()
