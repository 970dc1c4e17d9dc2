"""Train the recipe default with a pull towards the pretrained weights (L2-SP, Li et al. 2018).

    python -m benchmarks.l2_sp IMAGES ... --out FILE.jsonl --runs FOLDER

IMAGES has train/ and test/ with different classes. As weight decay in AdamW, the pull is decoupled
from the gradient: after each step, w moves by lr · strength of the way to its pretrained value.
Metrics are those of the last and of the selected epoch.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proximetry.recipe.schema import Recipe
from proximetry.training import Callback, train

STRENGTHS = (0.0, 1.0, 10.0, 100.0)


class L2SP(Callback):
    """Pulls the backbone towards its weights at the start of the run."""

    def __init__(self, strength: float) -> None:
        self.strength = strength
        self.start: list[tuple[Tensor, Tensor]] = []

    def on_start(self, run: Any) -> None:
        """Copy the weights."""
        weights = run.updater.embedder.backbone.parameters()
        self.start = [(weight, weight.detach().clone()) for weight in weights]

    @torch.no_grad()
    def on_step_end(self, run: Any, loss: Tensor) -> None:
        """Move the weights."""
        share = run.updater.optimizer.param_groups[0]["lr"] * self.strength
        for weight, start in self.start:
            weight.lerp_(start, min(1.0, float(share)))


def main() -> None:
    """Train with each strength; write a JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="lines are added to this file")
    arguments = parser.parse_args()
    with arguments.out.open("a", encoding="utf-8") as file:
        for images in arguments.images:
            for seed in arguments.seeds:
                changes = {"data.dataset": "folder", "data.root": str(images.absolute())}
                recipe = Recipe.load(arguments.recipe, {**changes, "training.seed": seed})
                for strength in arguments.strengths:
                    out = arguments.runs / f"{images.name}-{strength:g}-seed{seed}"
                    results = train(recipe, out, callbacks=[L2SP(strength)])
                    line = {"images": images.name, "seed": seed, "strength": strength}
                    line |= {name: results.get(name) for name in ("untrained", "last", "selected")}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(images.name, strength, results["selected"], flush=True)


if __name__ == "__main__":
    main()
