"""Measure identification among a million distractors in a memory-mapped file.

python -m benchmarks.faces_identify [--distractors 1000000] [--dim 512] [--probes 3530]

By default there are as many probes as MegaFace has from FaceScrub, 3530 of 80 people. Vectors are
random around a center for each person, so that ranks of all sizes occur. The script prints seconds
and the increase of anonymous memory, without cached pages of the file.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import versions
from proximetry._util.tensors import chunks
from proximetry.metrics import Identification, identify

PEOPLE = 80
FAR = (1e-3, 1e-4, 1e-5, 1e-6)


class Peak(threading.Thread):
    """Samples the memory of the process every few milliseconds, excluding mapped files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = _anonymous()
        self.highest = self.before
        self.done = threading.Event()

    def run(self) -> None:
        """Sample until `done` is set."""
        while not self.done.wait(0.002):
            self.highest = max(self.highest, _anonymous())


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; memory is measured on Linux only")


def write_distractors(path: Path, count: int, dim: int) -> None:
    distractors = np.lib.format.open_memmap(path, "w+", np.float32, (count, dim))
    rng = np.random.default_rng(0)
    for rows in chunks(count, 2**14):
        distractors[rows] = rng.standard_normal((rows.stop - rows.start, dim), np.float32)
    distractors.flush()


def measure(path: Path, probes: int) -> tuple[Identification, float, float, int]:
    """Return the result, seconds, CPU seconds, and memory in bytes beyond the distractors."""
    distractors = np.load(path, mmap_mode="r")
    rng = np.random.default_rng(1)
    labels = np.arange(probes) % PEOPLE
    centers = rng.standard_normal((PEOPLE, distractors.shape[1]))
    vectors = centers[labels] + 2 * rng.standard_normal((probes, distractors.shape[1]))
    vectors = vectors.astype(np.float32)
    identify(vectors[:200], labels[:200], distractors=distractors[:99], far=FAR)  # loads libraries
    peak = Peak()
    peak.start()
    start, busy = time.perf_counter(), time.process_time()
    result = identify(vectors, labels, distractors=distractors, far=FAR)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak.done.set()
    peak.join()
    return result, seconds, busy, peak.highest - peak.before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--distractors", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--probes", type=int, default=3530)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(versions())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "distractors.npy")
        write_distractors(path, arguments.distractors, arguments.dim)
        result, seconds, busy, memory = measure(path, arguments.probes)
        size = path.stat().st_size
    print(
        f"{arguments.probes} probes of {PEOPLE} people; the distractors take {size / 2**20:.0f} MiB"
    )
    print(result)
    print(f"{seconds:.0f} s ({busy:.0f} s of CPU), {memory / 2**20:.0f} MiB beyond the distractors")


if __name__ == "__main__":
    main()
