"""Evaluate variants of trained networks: several views, interpolated weights, averages of runs.

    proximetry reproduce ladder --data DATA --keep-runs
    python -m benchmarks.variants views RUN ... --crops 0.875 --out FILE.jsonl
    python -m benchmarks.variants interpolation RUN ... --out FILE.jsonl
    python -m benchmarks.variants soup RUN RUN ... --out FILE.jsonl

RUN is a folder kept by `--keep-runs`, in a folder of results/TABLE. Every variant is evaluated as
its run was, on held-out classes, the test set or both; PCA is fitted again.

- `views`: one view, the average with the flip, and with further crops; parameters, and images per
  second of the network on this device.
- `interpolation`: weights between the pretrained network and the trained one (WiSE-FT).
- `soup`: the mean of the weights of several runs, and a greedy selection of them on held-out
  classes. The runs must start from the same weights: use one seed.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from proximetry.models import Embedder
from proximetry.recipe.schema import Recipe
from proximetry.training import train
from proximetry.training.build import make_embedder
from proximetry.training.checkpoint import read_part
from proximetry.training.metrics_table import WITH_DISTRACTORS
from proximetry.training.run_folder import RunFolder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARTS = ("held_out", "test")
SHARES = (0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0)  # of the trained weights
BATCH = 128

Line = dict[str, Any]
Weights = dict[str, Tensor]


def load_recipe(run: Path) -> Recipe:
    """Return the recipe of a run, for an evaluation without training."""
    changes = {"training.epochs": 0, "evaluation.untrained": False, "training.tracker": "none"}
    return Recipe.load(RunFolder(run).recipe, changes)


def initial_embedder(recipe: Recipe) -> Embedder:
    """Return the embedder before training, without PCA."""
    torch.manual_seed(recipe.training.seed)
    return make_embedder(recipe.model, recipe.evaluation.similarity)


def trained_weights(run: Path, recipe: Recipe) -> Weights:
    """Return the weights at the last epoch, the moving average if there is one."""
    part = "average" if recipe.training.ema else "embedder"
    return read_part(RunFolder(run).last, part)[1]


def blend(states: Sequence[Weights], shares: Sequence[float]) -> Weights:
    """Return a weighted sum of weights; integers are those of the first."""
    return {
        key: torch.tensordot(torch.tensor(shares), torch.stack([s[key] for s in states]), 1)
        if value.is_floating_point()
        else value
        for key, value in states[0].items()
    }


def evaluate(recipe: Recipe, embedder: Embedder) -> Line:
    """Return the metrics of an embedder by part of the images."""
    with TemporaryDirectory() as out:
        selected = train(recipe, Path(out) / "run", embedder=embedder, device=str(DEVICE))[
            "selected"
        ]
    metrics = {}
    for part in PARTS:
        scores = selected.get(part, {})
        nested = scores.get("with_distractors", {}).items()
        values = {**scores, **{f"{name} {WITH_DISTRACTORS}": value for name, value in nested}}
        if scores:
            metrics[part] = {name: value for name, value in values.items() if "@" in name}
    return metrics


def with_weights(embedder: Embedder, weights: Weights) -> Embedder:
    """Load weights into an embedder and return it."""
    embedder.load_state_dict(weights)
    return embedder


def views(run: Path, crops: tuple[float, ...]) -> Iterator[Line]:
    """Yield the metrics for one view, with the flip, and with crops."""
    recipe = load_recipe(run)
    embedder = with_weights(initial_embedder(recipe), trained_weights(run, recipe))
    for flip, extra in dict.fromkeys(((False, ()), (True, ()), (True, crops))):
        embedder.architecture = replace(embedder.architecture, flip_tta=flip, tta_crops=extra)
        yield {
            "flip": flip,
            "crops": extra,
            "parameters": sum(p.numel() for p in embedder.parameters()),
            "images_per_second": images_per_second(embedder),
            **evaluate(recipe, embedder),
        }


def interpolation(run: Path) -> Iterator[Line]:
    """Yield the metrics for each share of the trained weights."""
    recipe = load_recipe(run)
    embedder, trained = initial_embedder(recipe), trained_weights(run, recipe)
    start = {key: value.clone() for key, value in embedder.state_dict().items()}
    for share in SHARES:
        weights = blend((start, trained), (1 - share, share))
        yield {"share": share, **evaluate(recipe, with_weights(embedder, weights))}


def soup(runs: Sequence[Path]) -> Iterator[Line]:
    """Yield the metrics of each run, of all together, and of the greedy selection."""
    recipe = load_recipe(runs[0])
    embedder = initial_embedder(recipe)
    states = {run.name: trained_weights(run, recipe) for run in runs}

    def mix(names: Sequence[str]) -> Line:
        weights = blend([states[name] for name in names], [1 / len(names)] * len(names))
        return {"runs": list(names), **evaluate(recipe, with_weights(embedder, weights))}

    single = [mix([name]) for name in states]
    yield from single
    yield mix([*states])
    if "held_out" not in single[0]:
        return
    metric = recipe.evaluation.select_by
    ordered = sorted(single, key=lambda line: -line["held_out"][metric])
    best = ordered[0]
    for line in ordered[1:]:
        tried = mix([*best["runs"], *line["runs"]])
        if tried["held_out"][metric] > best["held_out"][metric]:
            best = tried
    yield {"greedy": True, **best}


@torch.no_grad()
def images_per_second(embedder: Embedder) -> float:
    """Measure embedding pixels on the device, in bfloat16 and with a CUDA graph on a GPU."""
    side = embedder.preprocessing.crop[0]
    network = embedder.to(DEVICE, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    on_gpu = DEVICE.type == "cuda"
    batch = BATCH if on_gpu else 8
    pixels = torch.zeros(batch, 3, side, side, device=DEVICE).to(memory_format=torch.channels_last)

    def run() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=on_gpu):
            network(pixels)

    for _ in range(3):
        run()
    repeat, replay = 2, run
    if on_gpu:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        repeat, replay = 50, graph.replay
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        replay()
    if on_gpu:
        torch.cuda.synchronize()
    return round(repeat * batch / (time.perf_counter() - start), 1)


def main() -> None:
    """Evaluate the variants; write a JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("views", "interpolation", "soup"))
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--crops", type=float, nargs="*", default=[], help="of views, as fractions")
    parser.add_argument("--out", type=Path, required=True, help="lines are added to this file")
    arguments = parser.parse_args()

    def lines() -> Iterator[Line]:
        if arguments.kind == "soup":
            yield from soup(arguments.runs)
            return
        for run in arguments.runs:
            crops = tuple(arguments.crops)
            found = views(run, crops) if arguments.kind == "views" else interpolation(run)
            yield from ({"run": run.name, **line} for line in found)

    with arguments.out.open("a", encoding="utf-8") as file:
        for line in lines():
            text = json.dumps({"kind": arguments.kind, **line})
            print(text, flush=True)
            file.write(f"{text}\n")
            file.flush()


if __name__ == "__main__":
    main()
