"""Measure exact search in a copy of the vectors on a GPU.

    python -m benchmarks.search_gpu [--rows 10000000] [--dim 512]

The vectors are unit vectors around class centers. Bandwidth counts one read of the bfloat16 copy
per batch. The results of 64 queries are compared with the exact scan on the CPU.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from benchmarks.measure import versions
from proximetry.search.exact import Part, Store
from proximetry.search.gpu_scan import GpuScan

QUERIES, K = 1024, 10
IMAGES_PER_CLASS = 100
BLOCK = 500_000


def make_vectors(
    rows: int, dim: int, device: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return vectors and queries of the same classes."""
    generator = torch.Generator(device).manual_seed(0)
    options: Any = {"device": device, "generator": generator}
    centers = torch.randn(max(1, rows // IMAGES_PER_CLASS), dim, **options)

    def draw(count: int) -> npt.NDArray[np.float32]:
        classes = torch.randint(0, len(centers), (count,), **options)
        noisy = centers[classes] + torch.randn(count, dim, **options)
        unit: npt.NDArray[np.float32] = F.normalize(noisy).cpu().numpy()
        return unit

    vectors = np.empty((rows, dim), np.float32)
    for start in range(0, rows, BLOCK):
        vectors[start : start + BLOCK] = draw(min(BLOCK, rows - start))
    return vectors, draw(QUERIES)


def measure(scan: GpuScan, queries: npt.NDArray[np.float32], batch: int, size: int) -> str:
    """Return a row of the table for batches of queries; ``size`` is that of the copy in bytes."""
    scan.search(queries[:batch], K)
    seconds = []
    for number in range(50 if batch < 64 else 10):
        start = number * batch % max(1, QUERIES - batch)
        began = time.perf_counter()
        scan.search(queries[start : start + batch], K)
        seconds.append(time.perf_counter() - began)
    median, slow = statistics.median(seconds), sorted(seconds)[int(0.95 * len(seconds))]
    cells = [batch, *(f"{1e3 * value:.2f}" for value in (median, slow, median / batch))]
    return f"| {' | '.join(map(str, cells))} | {size / median / 1e12:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure exact search on a GPU.")
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    vectors, queries = make_vectors(options.rows, options.dim, options.device)
    store = Store([vectors], np.array([0, len(vectors)]), "cosine", 1.0 + 1e-6)
    began = time.perf_counter()
    scan = GpuScan(store, ["all"], options.device)
    print(f"{options.rows} × {options.dim}, k = {K}; {versions()}")
    print(f"copied in {time.perf_counter() - began:.1f} s\n")
    print("| queries | median, ms | 95 % | per query | TB/s |")
    print("|---|---|---|---|---|")
    for batch in (1, 4, 16, 64, 256):
        print(measure(scan, queries, batch, 2 * vectors.size), flush=True)
    began = time.perf_counter()
    expected = store.search([Part(vectors, None, 0)], queries[:64], K)
    seconds = time.perf_counter() - began
    actual = scan.search(queries[:64], K)
    is_equal = np.array_equal(actual.positions, expected.positions)
    is_equal &= np.array_equal(actual.scores, expected.scores)
    print(f"\n64 queries on the CPU: {seconds:.1f} s; equal results: {is_equal}")


if __name__ == "__main__":
    main()
