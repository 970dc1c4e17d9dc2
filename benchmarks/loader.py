"""Measure images per second of the loader: worker processes, threads and one thread.

python -m benchmarks.loader [--images 400] [--rounds 4] [--size 256]

Writes JPEG and WebP images of 500 × 375 pixels to a temporary folder. The variants alternate; the
best of several rounds counts, so other work on the machine matters less.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from proximetry._util.machine import cores
from proximetry.data import loader


def write_images(folder: Path, ending: str, count: int) -> list[str]:
    rng = np.random.default_rng(0)
    files = []
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        noise = Image.fromarray(rng.integers(0, 256, (375, 500, 3), dtype=np.uint8))
        smooth = coarse.resize((500, 375), Image.Resampling.BICUBIC)
        image = Image.blend(smooth, noise.filter(ImageFilter.GaussianBlur(1)), 0.3)
        files.append(str(folder / f"{number}.{ending}"))
        image.save(files[-1], quality=90)
    return files


def threads(decode: Callable[[str], object], files: list[str]) -> Iterator[object]:
    return loader._map_in_threads(decode, iter(files), cores(), 64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--size", type=int, default=256)
    options = parser.parse_args()
    decode = partial(loader.decode, size=options.size, interpolation="bicubic")
    with tempfile.TemporaryDirectory() as folder:
        for ending in ("jpg", "webp"):
            files = write_images(Path(folder), ending, options.images)
            variants: dict[str, Callable[[], Iterable[object]]] = {
                f"{cores()} workers": partial(loader.parallel_map, decode, files),
                f"{cores()} threads": partial(threads, decode, files),
                "1 thread": partial(map, decode, files),
            }
            best = dict.fromkeys(variants, float("inf"))
            for _ in range(options.rounds):
                for name, start in variants.items():
                    began = time.perf_counter()
                    for _ in start():
                        pass
                    best[name] = min(best[name], time.perf_counter() - began)
            rates = ", ".join(f"{name} {len(files) / best[name]:.0f}/s" for name in best)
            print(f"{ending}: {rates}")


if __name__ == "__main__":
    main()
