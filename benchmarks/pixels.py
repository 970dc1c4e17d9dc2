"""Measure random crops of a batch from the pixel cache: one kernel, or image by image.

python -m benchmarks.pixels [--device cuda] [--batch 180] [--crop 224] [--short 288]

Images are random bytes in the aspect ratio 3:2 of most photographs. For comparison, torchvision
crops the same windows on one CPU thread. Host is the time until the call returns; the last column
is the largest difference from torchvision in gray levels.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torchvision.transforms import InterpolationMode  # type: ignore[import-untyped]
from torchvision.transforms.v2 import functional as tv  # type: ignore[import-untyped]

from benchmarks.measure import alternate, peak_memory, versions
from proximetry.data import PixelCache, RandomResizedCrop
from proximetry.data.images import Interpolation
from proximetry.data.resample import Windows

Make = Callable[[], torch.Tensor]
MODES: dict[Interpolation, InterpolationMode] = {
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}


def make_pixels(count: int, short: int) -> PixelCache:
    draw = np.random.default_rng(0)
    shapes = [(short, short * 3 // 2), (short * 3 // 2, short)]
    images = [draw.integers(0, 256, (*shapes[i % 2], 3), dtype=np.uint8) for i in range(count)]
    return PixelCache.in_memory(images)


def by_torchvision(
    pixels: PixelCache, windows: Windows, crop: int, interpolation: Interpolation
) -> torch.Tensor:
    results = []
    for k in range(len(pixels)):
        box = [int(getattr(windows, name)[k]) for name in ("top", "left", "height", "width")]
        image = pixels.tensor(k).permute(2, 0, 1)
        made = tv.resized_crop(image, *box, [crop, crop], MODES[interpolation], antialias=True)
        results.append(made.flip(-1) if windows.flip[k] else made)
    return torch.stack(results)


def host_time(make: Make, device: str, repeats: int) -> float:
    """Return the median seconds until the call returns; the device may still compute."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        make()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def device_time(make: Make, repeats: int) -> float:
    """Return the seconds of one of many queued calls, as in training."""
    torch.cuda.synchronize()
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    for _ in range(repeats):
        make()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


def compare(
    pixels: PixelCache, device: str, crop: int, interpolation: Interpolation, repeats: int
) -> None:
    transform = RandomResizedCrop(crop, interpolation=interpolation)
    rows = np.arange(len(pixels))
    windows = transform.draw(pixels, rows, torch.Generator().manual_seed(0))
    on_device = pixels.to(device)

    def make() -> torch.Tensor:
        return transform.apply(on_device, rows, windows)

    expected = by_torchvision(pixels, windows, crop, interpolation)
    single = alternate(
        {"torchvision": lambda: by_torchvision(pixels, windows, crop, interpolation)}, 3
    )
    largest = int((make().cpu().int() - expected.int()).abs().max())
    host = host_time(make, device, repeats)
    seconds = device_time(make, repeats) if device == "cuda" else host
    memory = peak_memory(make, device) / 2**20
    print(
        f"| {interpolation} | {'kernel' if device == 'cuda' else 'image by image'} "
        f"| {seconds * 1e3:.3f} | {host * 1e3:.3f} | {memory:.0f} | {largest} |"
    )
    print(f"| {interpolation} | torchvision, CPU | {single['torchvision'] * 1e3:.1f} | | | 0 |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=180)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--short", type=int, default=288)
    parser.add_argument("--repeats", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats = arguments.repeats or (50 if arguments.device == "cuda" else 2)
    pixels = make_pixels(arguments.batch, arguments.short)
    print(f"{arguments.batch} crops to {arguments.crop} from short sides of {arguments.short}")
    print(f"{versions()}\n")
    transform = RandomResizedCrop(arguments.crop)
    rows, generator = np.arange(len(pixels)), torch.Generator()
    drawn = alternate({"draw": lambda: transform.draw(pixels, rows, generator)}, 50)["draw"]
    print(f"windows drawn on the CPU in {drawn * 1e3:.3f} ms\n")
    print("| filter | method | ms per batch | host ms | peak MiB | gray levels |")
    print("|---|---|---|---|---|---|")
    for interpolation in MODES:
        compare(pixels, arguments.device, arguments.crop, interpolation, repeats)


if __name__ == "__main__":
    main()
