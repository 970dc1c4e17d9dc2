"""Count the distinct and the used proxies of each class in trained runs.

    proximetry reproduce several-proxies --data DATA --keep-runs
    python -m benchmarks.proxies_used results/several-proxies/*/*-seed* --out FILE.jsonl

Per class, averaged over the classes:

- distinct: proxies left after merging those whose cosine is above `SAME`;
- used: proxies that are the nearest of their class for at least one of its training images;
- effective: exp of the entropy of the shares of images per nearest proxy.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.variants import DEVICE, initial_embedder, load_recipe, trained_weights, with_weights
from proximetry.training.checkpoint import read_part
from proximetry.training.evaluator import encode_catalog
from proximetry.training.run_folder import RunFolder
from proximetry.training.sources.training_data import open_catalog, split_rows

SAME = 0.95


def distinct(proxies: Tensor) -> Tensor:
    """Return the number of connected groups of proxies [C, K, D] in each class."""
    unit = F.normalize(proxies, dim=-1)
    linked = (unit @ unit.mT > SAME).float()
    for _ in range(proxies.shape[1].bit_length()):  # paths of twice the length each time
        linked = (linked @ linked > 0).float()
    first = linked.argmax(-1)  # of the group of each proxy
    return (first == torch.arange(proxies.shape[1], device=proxies.device)).sum(-1)


def assignments(proxies: Tensor, vectors: Tensor, codes: Tensor) -> Tensor:
    """Return the number of vectors [N, D] of each class by nearest own proxy, [C, K]."""
    own = F.normalize(proxies, dim=-1)[codes]
    nearest = torch.einsum("nkd,nd->nk", own, F.normalize(vectors, dim=-1)).argmax(1)
    counts = torch.zeros(proxies.shape[:2], device=proxies.device)
    return counts.index_put_((codes, nearest), torch.ones(len(codes)).to(counts), accumulate=True)


def measure(run: Path) -> dict[str, Any]:
    """Return the means over the classes."""
    recipe = load_recipe(run)
    proxies = read_part(RunFolder(run).last, "loss")[1]["proxies.weight"].to(DEVICE)
    catalog = open_catalog(recipe)
    train = catalog.subset(split_rows(catalog, recipe).rows["train"])
    embedder = with_weights(initial_embedder(recipe), trained_weights(run, recipe)).to(DEVICE)
    vectors = encode_catalog(embedder.eval(), train, 128).to(DEVICE)
    counts = assignments(proxies, vectors, torch.tensor(train.codes, device=DEVICE))
    shares = counts / counts.sum(1, keepdim=True)
    entropy = -torch.xlogy(shares, shares).sum(1)
    means = {
        "distinct": distinct(proxies).float(),
        "used": (counts > 0).sum(1).float(),
        "effective": entropy.exp(),
    }
    return {
        "run": run.name,
        "proxies": proxies.shape[1],
        **{name: round(values.mean().item(), 3) for name, values in means.items()},
    }


def main() -> None:
    """Measure runs; write a JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="lines are added to this file")
    arguments = parser.parse_args()
    with arguments.out.open("a", encoding="utf-8") as file:
        for run in arguments.runs:
            if (run / "results.json").exists():
                text = json.dumps(measure(run))
                print(text, flush=True)
                file.write(f"{text}\n")


if __name__ == "__main__":
    main()
