"""Compare retrieval metrics with other packages: time and peak memory on the same vectors.

python -m benchmarks.metrics [--device cuda] [--size sop|20k|cub] [--repeats 3] [--skip-peers]

Proximetry: recall@1, R-precision and MAP@R; and with recall@10, 100, 1000, MRR and nDCG@100.
pytorch-metric-learning: precision@1, R-precision and MAP@R, with faiss (its default on a CPU) and
with its batched torch k-NN.
open-metric-learning: CMC@1, precision and MAP at the largest R, with its batched k-NN.
A peer that is not installed is skipped with a note.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import peak_memory, versions
from proximetry.metrics import Metrics, evaluate

DIM = 512
SIZES = {"sop": (60_502, 11_316), "20k": (20_000, 1_000), "cub": (5_864, 100)}
# Distance of items from the center of their class; gives recall@1 = 0.94 at the larger size.
SPREAD = 2.0
# Queries that pytorch-metric-learning handles in one call.
PEER_BATCH = 1024

Scores = dict[str, float]


@dataclass
class Stopwatch:
    """Runs a function, and keeps the seconds of each run and the last scores."""

    run: Callable[[], Scores]
    device: str
    seconds: list[float] = field(default_factory=list)
    scores: Scores = field(default_factory=dict)

    def __call__(self) -> None:
        """Run once."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        self.scores = self.run()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)


def data(size: str, device: str) -> tuple[Tensor, Tensor]:
    """Return shuffled vectors around class centers; two items or more per class."""
    count, classes = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, classes, (count - 2 * classes,), generator=generator)
    labels = torch.cat([torch.arange(classes).repeat(2), some])
    labels = labels[torch.randperm(count, generator=generator)]
    centers = torch.randn(classes, DIM, generator=generator)
    vectors = torch.randn(count, DIM, generator=generator).mul_(SPREAD).add_(centers[labels])
    return vectors.to(device), labels.to(device)


def proximetry(vectors: Tensor, labels: Tensor) -> Scores:
    metrics = Metrics(recall_at=(1,), mrr=False, ndcg_at=())
    return evaluate(vectors, labels, metrics=metrics).mean()


def eight_metrics(vectors: Tensor, labels: Tensor) -> Scores:
    metrics = Metrics(recall_at=(1, 10, 100, 1000), ndcg_at=(100,))
    return evaluate(vectors, labels, metrics=metrics).mean()


def pytorch_metric_learning(vectors: Tensor, labels: Tensor, knn: Any = None) -> Scores:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    calculator = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=vectors.device,
        knn_func=knn,
    )
    # faiss compares distances, whose order is that of cosines if the vectors have unit length.
    actual = calculator.get_accuracy(torch.nn.functional.normalize(vectors), labels)
    return {
        "recall@1": float(actual["precision_at_1"]),
        "r_precision": float(actual["r_precision"]),
        "map@r": float(actual["mean_average_precision_at_r"]),
    }


def pytorch_metric_learning_torch(vectors: Tensor, labels: Tensor) -> Scores:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.inference import CustomKNN

    knn = CustomKNN(CosineSimilarity(), batch_size=PEER_BATCH)
    return pytorch_metric_learning(vectors, labels, knn)


def open_metric_learning(vectors: Tensor, labels: Tensor) -> Scores:
    from oml.functional.knn import batched_knn
    from oml.functional.metrics import calc_retrieval_metrics

    unit = torch.nn.functional.normalize(vectors)
    everyone = torch.arange(len(unit))
    largest = int(torch.bincount(labels).max()) - 1
    _, actual, relevant = batched_knn(unit, everyone, everyone, top_n=largest, labels_gt=labels)
    scores = calc_retrieval_metrics(
        list(actual),
        relevant,
        cmc_top_k=(1,),
        precision_top_k=(largest,),
        map_top_k=(largest,),
    )
    return {"recall@1": float(scores["cmc"][1])}


PEERS: dict[str, tuple[str, Callable[[Tensor, Tensor], Scores], str]] = {
    "pytorch-metric-learning, faiss": ("faiss", pytorch_metric_learning, "cpu"),
    "pytorch-metric-learning, torch": (
        "pytorch_metric_learning",
        pytorch_metric_learning_torch,
        "cpu cuda",
    ),
    "open-metric-learning": ("oml", open_metric_learning, "cpu"),
}


def check_agreement(scores: Scores, peer: Scores, name: str) -> None:
    # Rounding may swap two almost equally near neighbors; larger differences are errors.
    for key in scores.keys() & peer.keys():
        if abs(scores[key] - peer[key]) > 1e-4:
            raise SystemExit(f"{name}: {key} = {peer[key]}, Proximetry: {scores[key]}")


def compare(size: str, device: str, repeats: int, skip_peers: bool) -> None:
    vectors, labels = data(size, device)
    count, classes = SIZES[size]
    print(f"\n{count} vectors of {DIM}, {classes} classes, {device}\n", flush=True)
    print("| | seconds | relative time | memory beyond the input |\n|---|---|---|---|")
    runs: dict[str, Callable[[Tensor, Tensor], Scores]] = {
        "proximetry": proximetry,
        "proximetry, eight metrics": eight_metrics,
    }
    for name, (module, run, devices) in PEERS.items():
        if skip_peers or device not in devices.split():
            continue
        if importlib.util.find_spec(module) is None:
            print(f"| {name} | not installed | | |")
            continue
        runs[name] = run
    watches: dict[str, Stopwatch] = {}
    memory: dict[str, float] = {}
    for name, run in runs.items():
        run(vectors[:2048], labels[:2048])  # load libraries before measuring
        watches[name] = Stopwatch(lambda run=run: run(vectors, labels), device)  # type: ignore[misc]
        memory[name] = peak_memory(watches[name], device) / 2**20
    for _ in range(repeats - 1):
        for watch in watches.values():
            watch()
    for name, watch in watches.items():
        # On a GPU the first run is a warm-up; on a CPU it is like any other.
        seconds = statistics.median(watch.seconds[1:] if device == "cuda" else watch.seconds)
        watch.seconds = [seconds]
        ratio = seconds / watches["proximetry"].seconds[0]
        print(f"| {name} | {seconds:.3f} | {ratio:.2f} × | {memory[name]:.0f} MiB |", flush=True)
        check_agreement(watches["proximetry"].scores, watch.scores, name)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in watches["proximetry"].scores.items())
    print(f"\n{shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), help="one size only; default: all")
    parser.add_argument("--repeats", type=int, help="runs behind each median (CPU 1, CUDA 6)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--skip-peers", action="store_true", help="measure Proximetry only")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    repeats = arguments.repeats or (6 if arguments.device == "cuda" else 1)
    print(versions())
    for size in [arguments.size] if arguments.size else list(SIZES):
        compare(
            size,
            arguments.device,
            max(repeats, 2 * (arguments.device == "cuda")),
            arguments.skip_peers,
        )


if __name__ == "__main__":
    main()
