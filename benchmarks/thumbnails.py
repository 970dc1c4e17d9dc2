"""Measure the CPU time of the thumbnails of a page of large photographs.

python -m benchmarks.thumbnails [--count 48] [--megapixels 24] [--size 320]

The photographs are smooth random images with noise, as JPEG files of about 4 to 8 MB.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measure import versions
from proximetry.data import open_image
from proximetry.web.live_gallery import encode_thumbnail

DISTINCT = 6


def make_photos(folder: Path, megapixels: float) -> list[Path]:
    """Write JPEG files in the aspect ratio 3:2."""
    draw = np.random.default_rng(0)
    height = round((megapixels * 1e6 / 1.5) ** 0.5)
    width = round(1.5 * height)
    files = []
    for number in range(DISTINCT):
        coarse = Image.fromarray(draw.integers(0, 256, (60, 90, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        noise = draw.normal(0, 5, (height, width, 1)).astype(np.int16)
        photo = Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))
        files.append(folder / f"{number}.jpg")
        photo.save(files[-1], quality=90)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--megapixels", type=float, default=24)
    parser.add_argument("--size", type=int, default=320)
    options = parser.parse_args()
    print(versions())
    with tempfile.TemporaryDirectory() as folder:
        files = make_photos(Path(folder), options.megapixels)
        size = sum(file.stat().st_size for file in files) / len(files)
        print(f"{options.megapixels:g} megapixels, {size / 1e6:.1f} MB per file")
        encode_thumbnail(str(files[0]), options.size)  # imports
        begun = time.process_time()
        for number in range(options.count):
            encode_thumbnail(str(files[number % DISTINCT]), options.size)
        thumbnails = time.process_time() - begun
        begun = time.process_time()
        open_image(files[0])
        whole = options.count * (time.process_time() - begun)
    print(f"{options.count} thumbnails of {options.size} pixels: {thumbnails:.2f} s of CPU")
    print(f"decoding at full size: {whole:.2f} s of CPU")


if __name__ == "__main__":
    main()
