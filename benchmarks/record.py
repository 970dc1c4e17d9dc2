"""Look for a better recipe on held-out training classes; test classes are never looked at.

python -m benchmarks.record benchmarks/record/cub.yaml --data ~/cub --out results/record-cub

A file names a base recipe and candidates: changes to it by dotted keys. Each candidate is trained
on the training classes that are not held out, and judged at its last epoch on those that are, for
every seed. What is done is skipped, and so is what another process does at the moment: two of them
share the work. The table at the end is sorted by recall@1.

Each trained candidate is also judged at other sizes of the images, and with their mirror images,
which costs no training: `sizes` in the file are pairs of a crop and of the short side before it.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from proximetry.training.display import Display
from proximetry.training.material import questions
from proximetry.training.network import PixelNetwork
from proximetry.training.recipe_values import differences
from proximetry.training.trainer import Trainer
from proximetry.training.world import enter_world

from proximetry import metrics
from proximetry._common import atomic_write, closest
from proximetry.data import EvalTransform
from proximetry.models import Embedder
from proximetry.reproduce import Row, Table
from proximetry.reproduce.grid import table_head, table_line
from proximetry.reproduce.lock import try_lock
from proximetry.reproduce.work import free_memory
from proximetry.training import Recipe, RunFolder

Sizes = list[tuple[int, int]]


def candidate_recipe(search: dict[str, Any], changes: dict[str, Any], seed: int) -> Recipe:
    """The base with the changes of one candidate, judged on held-out classes."""
    row = Row("candidate", {**changes, "training.seed": seed})
    values = Table("record", base=search["base"], rows=(row,)).recipe_values(row)
    values["evaluation"] = {
        **values.get("evaluation", {}),
        "protocol": "held_out",
        "watch_test": False,
        "every": values["training"]["epochs"],  # so no epoch can be chosen but the last
    }
    return Recipe.from_dict(values)


def is_done(file: Path, recipe: Recipe) -> bool:
    """Whether the candidate has been judged; as another recipe of the same name is an error."""
    if not file.exists():
        return False
    before = json.loads(file.read_text(encoding="utf-8"))["recipe"]
    found = differences(before, recipe.to_dict())
    if found:
        key, old, new = found[0]
        raise SystemExit(f"{file} was made with {key} {old!r}, now it is {new!r}; remove it")
    return True


@contextmanager
def taken(file: Path) -> Iterator[bool]:
    """Whether this process may work on it; another one that does so lets go when it ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        yield try_lock(handle.fileno(), shared=False)


@torch.no_grad()
def judge(trainer: Trainer, embedder: Embedder, crop: int, side: int) -> dict[str, float]:
    """Metrics on the held-out classes, their images seen at another size."""
    material, recipe, device = trainer.material, trainer.recipe, trainer.world.device
    rows, step = material.rows["held_out"], recipe.evaluation.batch_size
    network = PixelNetwork(embedder.eval(), recipe.training.precision, device)
    view = EvalTransform(side, crop, embedder.preprocessing.interpolation)
    found = [
        network(view(material.cache, rows[i : i + step]).to(device))
        for i in range(0, len(rows), step)
    ]
    asked = questions(material.catalog.subset(rows), torch.cat(found))
    return metrics.evaluate(**asked, metric=recipe.evaluation.similarity)


def judge_otherwise(trainer: Trainer, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Metrics at other sizes, and at the recipe's own with mirror images."""
    embedder = copy.deepcopy(trainer.kept())
    found = {f"{c} of {side}": judge(trainer, embedder, c, side) for c, side in sizes}
    embedder.architecture = replace(embedder.architecture, mirror=True)
    pixels = embedder.preprocessing
    return {**found, "mirror": judge(trainer, embedder, pixels.crop[0], pixels.resize)}


def run_candidate(recipe: Recipe, out: Path, name: str, data: Path, sizes: Sizes) -> float:
    """Train one candidate, write down what came out, and return its recall@1."""
    told = recipe.to_dict()
    recipe.data.root = str(data)
    work = out / "work" / name
    trainer = Trainer(recipe, RunFolder(work), enter_world(), True, Display())
    results = trainer.run()
    environment = json.loads((work / "environment.json").read_text(encoding="utf-8"))
    found = {
        "candidate": name,
        "recipe": told,
        "held_out": results["last"]["held_out"],
        "otherwise": judge_otherwise(trainer, sizes),
        "curve": RunFolder(work).history(),
        "seconds": results["seconds"],
        "startup_seconds": results["startup_seconds"],
        "device": environment["device"],
        "packages": environment["packages"],
    }
    atomic_write(out / f"{name}.json", json.dumps(found, indent=1).encode())
    recall: float = results["last"]["held_out"]["recall@1"]
    return recall


def read(out: Path, search: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs that are done, by candidate."""
    return {
        name: [
            json.loads(file.read_text(encoding="utf-8"))
            for file in sorted(out.glob(f"{name}-seed*.json"))
        ]
        for name in search["candidates"]
    }


def summary(search: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table of the candidates that are done, best first."""

    def mean(name: str, metric: str, way: str | None = None) -> float:
        judged = (run["held_out"] if way is None else run["otherwise"][way] for run in found[name])
        return 100 * fmean(one[metric] for one in judged)

    ways = [f"{crop} of {side}" for crop, side in search.get("sizes", [])] + ["mirror"]
    cuts = search["base"].get("evaluation", {}).get("cuts", [])
    own = ["recall@1", "map@r", *(f"recall@1[:{cut}]" for cut in cuts)]
    columns = ["candidate", *own, *(f"recall@1, {way}" for way in ways)]
    columns += ["seeds", "s", "changes"]
    lines = table_head(columns)
    done = [name for name, runs in found.items() if runs]
    for name in sorted(done, key=lambda name: mean(name, "recall@1"), reverse=True):
        figures = [mean(name, metric) for metric in own]
        figures += [mean(name, "recall@1", way) for way in ways]
        seconds = fmean(run["seconds"] for run in found[name])
        changes = ", ".join(f"{k} {v}" for k, v in search["candidates"][name].items())
        shown = [f"{figure:.2f}" for figure in figures]
        seeds = len(found[name])
        lines.append(table_line([name, *shown, seeds, f"{seconds:.0f}", changes or "the base"]))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("search", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="names of candidates")
    arguments = parser.parse_args()
    search = yaml.safe_load(arguments.search.read_text(encoding="utf-8"))
    for name in arguments.only or ():
        if name not in search["candidates"]:
            parser.error(f"no candidate {name!r}{closest(name, search['candidates'])}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for name in arguments.only or search["candidates"]:
            one = f"{name}-seed{seed}"
            recipe = candidate_recipe(search, search["candidates"][name], seed)
            with taken(arguments.out / "work" / f"{one}.lock") as mine:
                if not mine or is_done(arguments.out / f"{one}.json", recipe):
                    continue
                sizes = search.get("sizes", [])
                recall = run_candidate(recipe, arguments.out, one, arguments.data, sizes)
                free_memory()
            print(f"{one}: held-out recall@1 {100 * recall:.2f}", flush=True)
            told = summary(search, read(arguments.out, search))
            atomic_write(arguments.out / "README.md", told.encode())
    print(summary(search, read(arguments.out, search)))


if __name__ == "__main__":
    main()
