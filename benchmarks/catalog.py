"""Measure time and peak memory of a catalog of millions of images.

python -m benchmarks.catalog [--rows 10000000] [--classes 1000000]

A Parquet table with the columns path, label, split and year is written to a temporary folder, then
opened without checking the images. Samplers are created for its training images. On a busy machine,
compare CPU time.
"""

import argparse
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as arrow  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

from proximetry.data import Catalog, ClassBalancedSampler, ShuffledSampler

T = TypeVar("T")
CHUNK = 500_000


def write_table(file: Path, rows: int, classes: int) -> None:
    draw, writer = np.random.default_rng(0), None
    for start in range(0, rows, CHUNK):
        numbers = np.arange(start, min(start + CHUNK, rows))
        names = draw.integers(0, classes, len(numbers)).tolist()
        paths = [f"images/{name % 1000:03d}/{name:07d}/{n:09d}.jpg" for n, name in enumerate(names)]
        table = arrow.table(
            {
                "path": [f"{start:08d}/{path}" for path in paths],
                "label": [f"class {name:07d}" for name in names],
                "split": np.where(numbers % 10 < 8, "train", "test"),
                "year": draw.integers(1990, 2025, len(numbers)),
            }
        )
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def measure(name: str, make: Callable[[], T]) -> T:
    start, before = time.perf_counter(), time.process_time()
    made = make()
    taken, busy = time.perf_counter() - start, time.process_time() - before
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    print(f"{name:32}{taken:10.2f} s{busy:10.2f} s of CPU{peak:10.0f} MiB")
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--classes", type=int, default=1_000_000)
    options = parser.parse_args()
    print(f"{options.rows} rows, {options.classes} classes; Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.parquet"
        measure("write the table", lambda: write_table(file, options.rows, options.classes))
        catalog = measure("open", lambda: Catalog.from_parquet(file, check_files=False))
    codes = measure("codes", lambda: catalog.codes)
    train = measure("training rows", lambda: catalog.filter(split="train"))
    measure("their codes", lambda: train.codes)
    balanced = measure("class-balanced sampler", lambda: ClassBalancedSampler(train.codes, 45, 4))
    measure("its first batch", lambda: balanced.batch(0, 0))
    measure("the next", lambda: balanced.batch(0, 1))
    shuffled = measure("shuffling sampler", lambda: ShuffledSampler(len(train), 180))
    measure("its first batch", lambda: shuffled.batch(0, 0))
    assert len(codes) == options.rows


if __name__ == "__main__":
    main()
