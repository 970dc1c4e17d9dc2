"""Choose thresholds on one half of the classes and measure them on the other half.

python -m benchmarks.calibration NAME=vectors.npz [NAME=vectors.npz …] [--halves 20]

The files are those of `proximetry embed`, with vectors and labels of classes that were not trained
on. Prints, for each target, the median and the range of the rate divided by the target, and how
many halves are within a factor of two. Another line shows how much halves differ: the range for
the one threshold that meets FAR 1e-3 over all classes.
"""

import argparse
import sys
from collections import defaultdict
from typing import cast

import numpy as np

from proximetry.data import VectorCatalog, open_dataset, resolve_source
from proximetry.metrics import calibrate, evaluate_calibration

HEAD = "| images | target | median ratio | range | within a factor of 2 | true accepts |"


def measure(name: str, file: str, halves: int) -> None:
    """Print the rows of one file, and its calibration error."""
    catalog = cast(VectorCatalog, open_dataset(*resolve_source(file)))
    vectors, labels = catalog.vectors, np.asarray(catalog.labels)
    classes = np.unique(labels)
    rates = defaultdict[tuple[str, float], list[tuple[float, float]]](list)
    errors, curves, exact = list[float](), list[str](), list[float]()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    differs = labels[:, None] != labels
    accepted = (unit @ unit.T >= np.quantile((unit @ unit.T)[differs], 1 - 1e-3)) & differs
    for seed in range(halves):
        chosen = np.random.default_rng(seed).permutation(classes)[: len(classes) // 2]
        first = np.isin(labels, chosen)
        calibration = calibrate(vectors[first], labels[first])
        result = evaluate_calibration(calibration, vectors[~first], labels[~first])
        for kind, measured in (("FAR", result.pairs), ("FPIR", result.gallery)):
            for rate in measured:
                pair = rate.false_accepts / rate.target, rate.true_accepts
                rates[kind, rate.target].append(pair)
        errors.append(result.error)
        half = np.ix_(~first, ~first)
        exact.append(accepted[half].sum() / differs[half].sum() / 1e-3)
        curves.append(calibration.curve)
    for (kind, target), values in rates.items():
        ratio, accepted = np.array(values).T
        within = ((ratio >= 0.5) & (ratio <= 2)).sum()
        print(
            f"| {name} | {kind} {target:g} | {np.median(ratio):.2f} | {ratio.min():.2f}–"
            f"{ratio.max():.2f} | {within} of {len(ratio)} | {100 * accepted.mean():.1f} % |",
            flush=True,
        )
    print(
        f"{name}: {len(classes)} classes, {len(labels)} images; calibration error "
        f"{np.mean(errors):.3f} (maximum {max(errors):.3f}); {curves.count('isotonic')} isotonic; "
        f"one threshold for all: {min(exact):.2f}–{max(exact):.2f}, within a factor of √2 on "
        f"{sum(2**-0.5 <= ratio <= 2**0.5 for ratio in exact)} of {halves}",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--halves", type=int, default=20)
    options = parser.parse_args()
    print(f"{HEAD}\n|---|---|---|---|---|---|")
    for entry in options.files:
        name, _, file = entry.partition("=")
        measure(name, file, options.halves)


if __name__ == "__main__":
    main()
