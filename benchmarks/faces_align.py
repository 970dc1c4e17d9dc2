"""Compare `proximetry faces align` with its bare detector.

python -m benchmarks.faces_align IMAGES [--detector FILE.onnx] [--images 400] [--side 640]

The bare detector runs on all cores on inputs that are already in memory, and discards its results:
once with inputs of 640 × 640 pixels, as in SCRFD's paper, once with the (smaller) inputs that
`align` makes of the files. `align` decodes the files, detects, warps, encodes and writes. With
--side, the longer side of the images is first scaled to this number of pixels.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

from benchmarks.measure import Run, alternate, versions
from proximetry._util.machine import cores
from proximetry._util.tensors import chunks
from proximetry.data.folders import images_below
from proximetry.data.images import open_image
from proximetry.faces import Detector, align_folder, find_detector
from proximetry.faces.detector import BATCH, MAX_SIDE, Floats

PREPARED = 64  # files that the bare detector runs on; their inputs are kept in memory


def copy_images(source: Path, home: Path, count: int, side: int | None) -> list[Path]:
    files = [source / path for path in images_below(source)[0]]
    chosen = files[:: max(1, len(files) // count)][:count]
    copies = []
    for number, file in enumerate(chosen):
        copy = home / f"{number % 20:02}" / f"{number:05}{file.suffix}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        if side is None:
            shutil.copy(file, copy)
        else:
            image = open_image(file)
            scale = side / max(image.size)
            size = round(image.width * scale), round(image.height * scale)
            image.resize(size, Image.Resampling.BICUBIC).save(copy, quality=90)
        copies.append(copy)
    return copies


class Recording(Detector):
    """A detector that records its inputs."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.inputs: list[Floats] = []

    def run(self, inputs: Floats) -> list[list[Floats]]:
        """Run the network."""
        self.inputs.append(inputs)
        return super().run(inputs)


def prepare(file: Path, files: list[Path]) -> list[Floats]:
    detector = Recording(file)
    for part in chunks(len(files), BATCH):
        detector([np.asarray(open_image(image)) for image in files[part]])
    return detector.inputs


def bare(detector: Detector, inputs: list[Floats]) -> Run:
    def run() -> None:
        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(lambda batch: detector.run(batch) and None, inputs))

    return run


def watched(run: Run, busy: list[float]) -> Run:
    """Record the CPU time, which hardly depends on other processes."""

    def watch() -> None:
        start = time.process_time()
        run()
        busy.append(time.process_time() - start)

    return watch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path)
    parser.add_argument("--detector", type=Path)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--side", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    file = arguments.detector or find_detector()[0]
    detector = Detector(file)
    with tempfile.TemporaryDirectory(prefix="faces-align-") as place:
        home = Path(place)
        files = copy_images(arguments.files, home / "in", arguments.images, arguments.side)
        inputs = prepare(file, files[:PREPARED])
        batch = BATCH if detector.batched else 1
        full = [np.zeros((batch, 3, MAX_SIDE, MAX_SIDE), np.float32)] * (PREPARED // batch)
        images = len(files)

        def align() -> None:
            align_folder(home / "in", tempfile.mkdtemp(dir=home), detector=file)

        published_size, align_size = (
            f"bare detector, {MAX_SIDE} × {MAX_SIDE}",
            "bare detector, inputs of `align`",
        )
        runs: dict[str, Run] = {
            published_size: bare(detector, full),
            align_size: bare(detector, inputs),
            "`align`": align,
        }
        busy: dict[str, list[float]] = {name: [] for name in runs}
        seconds = alternate(
            {name: watched(run, busy[name]) for name, run in runs.items()}, arguments.rounds
        )
    counts = {published_size: PREPARED, align_size: PREPARED, "`align`": images}
    shapes = sorted({batch.shape[2:] for batch in inputs})
    print(f"{images} files, {file.name}, {cores()} cores; inputs of `align`: {shapes[:4]}")
    print(f"{versions()}, onnxruntime {onnxruntime.__version__}\n")
    print("| | images/s | `align` / this | processor time per image | this / `align` |")
    print("|---|---|---|---|---|")
    speed = {name: count / seconds[name] for name, count in counts.items()}
    work = {name: statistics.median(busy[name][1:]) / count for name, count in counts.items()}
    for name in runs:
        print(
            f"| {name} | {speed[name]:.1f} | {speed['`align`'] / speed[name]:.2f} | "
            f"{1000 * work[name]:.1f} ms | {work[name] / work['`align`']:.2f} |"
        )


if __name__ == "__main__":
    main()
