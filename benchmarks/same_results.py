"""Compare seven tiny trainings of two revisions bit for bit.

    python -m benchmarks.same_results --before ee35f28

Each revision trains in separate processes: different losses, a moving average, accumulated batches,
augmentation, vectors, a custom dataset and two ranks. Weights, losses and metrics of the working
tree must equal those of the revision; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "losses": {"loss": {"name": "mpa_ap", "settings": {"proxies_per_class": 3}}},
    "average": {"loss": {"name": "soft_triple"}, "training": {"ema": 0.9}},
    "accumulate": {"loss": {"name": "arcface"}, "training": {"accumulate": 2}},
    "augmentation": {"data": {"flip": True, "crop_scale": [0.3, 1.0], "color_jitter": 0.4}},
    "vectors": {"loss": {"name": "proxy_nca_plus_plus"}},
    "dataset": {"loss": {"name": "cosface"}},
    "ranks": {"loss": {"name": "proxy_anchor"}},
}
TRAIN = """
import json, sys
import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from proximetry.training import Recipe, train

class Squares(Dataset):
    def __init__(self, transform=None):
        self.targets = [row // 6 for row in range(72)]
        self.transform = transform
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, row):
        color = np.random.default_rng(self.targets[row]).integers(40, 216, 3)
        light = np.random.default_rng(row).normal(0, 20, 3)
        square = np.broadcast_to(color + light, (24, 24, 3)).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(square)
        return (image if self.transform is None else self.transform(image)), self.targets[row]

values = json.loads(sys.argv[1])
data = Squares() if sys.argv[3] == "dataset" else None
train(Recipe.load(values), sys.argv[2], data=data, device="cpu")
"""


def make_data(folder: Path) -> None:
    """Write colored stripes of twelve classes as images, and vectors of twelve classes."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for c in range(12):
        (folder / "images" / f"class{c:02d}").mkdir(parents=True)
        base = draw.integers(40, 216, 3)
        for number in range(6):
            image = np.tile(base, (24, 24, 1)).astype(float)
            image[:, :: c % 4 + 2] *= 0.5
            image += draw.normal(0, 10, image.shape)
            pixels = image.clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"class{c:02d}" / f"{number}.png")
    labels = np.repeat(np.arange(12), 6)
    vectors = draw.normal(size=(12, 16))[labels] + draw.normal(size=(72, 16))
    np.savez(
        folder / "vectors.npz",
        vectors=vectors.astype(np.float32),
        labels=np.array([f"class{label:02d}" for label in labels]),
    )


def recipe_values(case: str, folder: Path) -> dict[str, Any]:
    """Return the plain recipe of a case."""
    on_vectors = case == "vectors"
    values: dict[str, dict[str, Any]] = {
        "data": {"batch_size": 8, "cache_dir": str(folder / "cache")},
        "model": {"dim": 8, "weights": "none"},
        "optimizer": {"lr": 1e-3, "proxy_multiplier": 10.0},
        "training": {"epochs": 3},
        "evaluation": {"held_out": 0.25},
    }
    if on_vectors:
        values["data"] |= {"dataset": "vectors", "root": str(folder / "vectors.npz")}
        values["model"] |= {"backbone": "vectors"}
    else:
        values["data"] |= {"short_side": 24, "crop_scale": [0.6, 1.0]}
        values["model"] |= {"backbone": "small_convnet", "pooling": "avg", "image_size": 24}
        if case != "dataset":
            values["data"] |= {"dataset": "folder", "root": str(folder / "images")}
    for section, keys in CASES[case].items():
        values[section] = {**values.get(section, {}), **keys}
    return {"name": case, **values}


def run_case(case: str, source: Path, data: Path, out: Path) -> None:
    """Train a case with the package in `source`."""
    values = recipe_values(case, data)
    command = [sys.executable, "-c", TRAIN, json.dumps(values), str(out), case]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    worlds: list[dict[str, str]] = [{}]
    if case == "ranks":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        worlds = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    children = [
        subprocess.Popen(command, env=environment | world, cwd=out.parent) for world in worlds
    ]
    codes = [child.wait() for child in children]
    if any(codes):
        raise SystemExit(f"{case}: training failed with {source}")


def numbers(values: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested values by their keys, without timings."""
    if isinstance(values, dict):
        for name, value in values.items():
            if "seconds" not in name and "per_second" not in name:
                yield from numbers(value, f"{key}/{name}")
    elif isinstance(values, list):
        for place, value in enumerate(values):
            yield from numbers(value, f"{key}/{place}")
    elif isinstance(values, float):
        yield key, values


def compare(one: Path, two: Path) -> list[str]:
    """Return what differs between the weights, the losses and the metrics of two runs."""
    import torch
    from safetensors.torch import load_file

    differences = []
    first, second = (load_file(next(run.glob("embedder/*.safetensors"))) for run in (one, two))
    if first.keys() != second.keys():
        differences.append(f"names of weights: {sorted(first.keys() ^ second.keys())}")
    for name in first.keys() & second.keys():
        if not torch.equal(first[name], second[name]):
            differences.append(f"weights {name}")
    for file in ("metrics.jsonl", "results.json"):
        parsed = []
        for run in (one, two):
            text = (run / file).read_text()
            lines = text.splitlines() if file.endswith("l") else [text]
            parsed.append(dict(numbers([json.loads(line) for line in lines])))
        shared = parsed[0].keys() & parsed[1].keys()
        if not shared:
            differences.append(f"{file}: no number in common")
        differences += [f"{file} {key}" for key in shared if parsed[0][key] != parsed[1][key]]
    return differences


def main() -> None:
    """Compare the working tree with a revision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="revision to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = subprocess.run(
            ["git", "archive", options.before, "src"], cwd=ROOT, check=True, capture_output=True
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder / "before", filter="data")
        sources = {"before": folder / "before" / "src", "after": ROOT / "src"}
        for revision in sources:
            make_data(folder / revision / "data")
        for case in options.cases:
            runs = []
            for revision, source in sources.items():
                runs.append(folder / revision / case)
                run_case(case, source, folder / revision / "data", runs[-1])
            differences = compare(*runs)
            failed |= bool(differences)
            print(
                f"{case}: {'equal' if not differences else '; '.join(differences[:5])}", flush=True
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
