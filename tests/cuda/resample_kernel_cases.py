"""The resampling kernel against independent references; run by test_kernels.py."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from proximetry.data import CenterCrop, PixelCache, RandomResizedCrop
from proximetry.data.images import resize_and_center_crop, resize_image
from proximetry.data.resample import Windows, resample, window_table
from proximetry.kernels.resample import FIELDS, resample_fused

DEVICE = os.environ["KERNEL_DEVICE"]
MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
BOTH = pytest.mark.parametrize("interpolation", list(MODES))
on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def image(seed, height, width):
    """Return noise: for odd seeds black and white, so that cubic filters overshoot; else mild."""
    draw = np.random.default_rng(seed)
    if seed % 2:
        return draw.choice(np.array([0, 255], np.uint8), (height, width, 3))
    return draw.integers(64, 192, (height, width, 3), dtype=np.uint8)


def by_kernel(pixels, rows, windows, size, interpolation):
    rows = np.asarray(rows)
    table = window_table(pixels, rows, windows).to(DEVICE)
    batch = resample_fused(pixels.flat.to(DEVICE), table, size, interpolation)
    assert batch.shape == (len(rows), 3, *size)
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous(memory_format=torch.channels_last)
    return batch.cpu()


def difference(a, b):
    return int((a.int() - b.int()).abs().max())


def chw(array):
    """A tensor [3, height, width] of an array or a Pillow image."""
    return torch.from_numpy(np.array(array)).permute(2, 0, 1)


def filtered(distance, interpolation):
    x = np.abs(distance)
    if interpolation == "bilinear":
        return np.clip(1 - x, 0, None)
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def exact_axis(length, scaled, interpolation):
    """Weights [scaled, length] in float64, from the definition of the filter."""
    scale = length / scaled
    centers = (np.arange(scaled) + 0.5) * scale
    places = np.arange(length) + 0.5
    weights = filtered((places[None] - centers[:, None]) / max(scale, 1), interpolation)
    return weights / weights.sum(1, keepdims=True)


def exact(window, scaled, interpolation):
    """The scaled window before rounding, [3, height, width] in float64."""
    across = exact_axis(window.shape[1], scaled[1], interpolation)
    down = exact_axis(window.shape[0], scaled[0], interpolation)
    narrow = np.einsum("xw,hwc->chx", across, window.astype(float)).clip(0, 255)
    return np.einsum("yh,chx->cyx", down, narrow).clip(0, 255)


def one_window(*values):
    return Windows(*(torch.tensor([value]) for value in values))


def test_window_table_has_the_fields_of_the_kernel():
    pixels = PixelCache.in_memory([image(0, 5, 7), image(1, 6, 8)])
    windows = one_window(*range(5))
    table = window_table(pixels, np.array([1]), windows)
    assert table.dtype == torch.int64
    assert table.tolist() == [[5 * 7 * 3, 8, *range(5)]]
    assert len(FIELDS) == table.shape[1] == 7


def test_no_images_give_an_empty_batch():
    pixels = PixelCache.in_memory([image(0, 5, 7)])
    nothing = CenterCrop(4).windows(pixels, [0])[:0]
    assert by_kernel(pixels, np.empty(0, np.int64), nothing, (4, 4), "bilinear").numel() == 0


@settings(max_examples=25 if DEVICE == "cpu" else 200)
@given(data=st.data(), interpolation=st.sampled_from(list(MODES)), seed=st.integers(0, 99))
def test_any_window_of_any_image(data, interpolation, seed):
    height, width = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 14))
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    tall, wide = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    # Shrinking to a third at most: the interpreter takes milliseconds for every pixel it reads.
    size = data.draw(st.integers(-(-tall // 3), 18)), data.draw(st.integers(-(-wide // 3), 34))
    flip = data.draw(st.booleans())
    check_window(image(seed, height, width), (top, left, tall, wide), flip, size, interpolation)


@BOTH
@pytest.mark.parametrize(
    ("shape", "box", "size"),
    [
        ((1, 1), (0, 0, 1, 1), (3, 5)),
        ((9, 9), (4, 8, 5, 1), (7, 7)),  # one pixel wide, at the edge
        ((9, 9), (8, 0, 1, 9), (4, 9)),
        ((12, 40), (1, 2, 11, 38), (11, 38)),  # not scaled
        ((5, 3), (0, 0, 5, 3), (1, 1)),
        ((16, 24), (8, 12, 8, 12), (20, 37)),  # more than one tile in both directions
        ((40, 40), (3, 5, 36, 34), (18, 21)),
    ],
)
def test_edge_case_windows(shape, box, size, interpolation):
    for seed, flip in [(0, False), (1, True)]:
        check_window(image(seed, *shape), box, flip, size, interpolation)


def check_window(array, box, flip, size, interpolation):
    # A neighbor on either side would show if the kernel read beyond its image.
    pixels = PixelCache.in_memory([image(3, 2, 3), array, image(5, 3, 2)])
    windows = one_window(*box, flip)
    got = by_kernel(pixels, [1], windows, size, interpolation)[0]
    top, left, height, width = box
    ideal = exact(array[top : top + height, left : left + width], size, interpolation)
    ideal = ideal[:, :, ::-1] if flip else ideal
    assert np.abs(got.numpy() - ideal).max() <= 0.5 + 1e-3
    if (height, width) == size:
        assert np.array_equal(got.numpy(), ideal)


@BOTH
@pytest.mark.parametrize("crop", [8, (11, 5)])
def test_random_crops_equal_torchvision(crop, interpolation):
    sizes = [(14, 20), (20, 14), (7, 5), (5, 20), (1, 1)]
    pixels = PixelCache.in_memory([image(k, *size) for k, size in enumerate(sizes)])
    transform = RandomResizedCrop(crop, interpolation=interpolation)
    rows = np.tile(np.arange(len(sizes)), 2)
    windows = transform.draw(pixels, rows, torch.Generator().manual_seed(1))
    assert windows.flip.any()
    size = crop if isinstance(crop, tuple) else (crop, crop)
    batch = by_kernel(pixels, rows, windows, size, interpolation)
    assert difference(batch, transform.apply(pixels, rows, windows)) <= 1
    for k, row in enumerate(rows):
        box = [int(getattr(windows, name)[k]) for name in ("top", "left", "height", "width")]
        there = tv.resized_crop(
            chw(pixels[row]), *box, list(size), MODES[interpolation], antialias=True
        )
        assert difference(batch[k], there.flip(-1) if windows.flip[k] else there) <= 1


@settings(max_examples=8 if DEVICE == "cpu" else 50)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    resize=st.integers(5, 14),
    less=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    interpolation=st.sampled_from(list(MODES)),
)
def test_center_crops_equal_reading_the_image(height, width, resize, less, interpolation):
    crop = resize - less[0], resize - less[1]
    file = Image.fromarray(image(height * width, height, width))
    cached = np.asarray(resize_image(file, resize, interpolation))
    pixels = PixelCache.in_memory([image(3, 2, 3), cached])
    windows = CenterCrop(crop).windows(pixels, [1])
    expected = chw(resize_and_center_crop(file, resize, crop, interpolation))
    for way in MODES:  # nothing is scaled, so the filter does not matter
        assert torch.equal(by_kernel(pixels, [1], windows, crop, way)[0], expected)


@on_cuda
@BOTH
def test_large_batch_on_the_gpu(interpolation):
    sizes = [(288, 384), (384, 288), (300, 300), (50, 700)] * 8
    pixels = PixelCache.in_memory([image(k, *size) for k, size in enumerate(sizes)])
    transform = RandomResizedCrop(224, interpolation=interpolation)
    view = CenterCrop((50, 224))
    rows = np.arange(len(sizes))
    windows = transform.draw(pixels, rows, torch.Generator().manual_seed(1))
    there = pixels.to("cuda")
    crops = transform.apply(there, rows, windows).cpu()
    assert difference(crops, transform.apply(pixels, rows, windows)) <= 1
    assert torch.equal(view(there, rows).cpu(), view(pixels, rows))


@on_cuda
def test_crops_do_not_synchronize_with_the_gpu():
    pixels = PixelCache.in_memory([image(k, 40, 50) for k in range(8)]).to("cuda")
    transform, view = RandomResizedCrop(24), CenterCrop(24)
    rows = np.arange(8)
    for warm in (False, True):
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            transform(pixels, rows, torch.Generator().manual_seed(0))
            view(pixels, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@on_cuda
def test_pixels_beyond_two_gib():
    array = image(2, 30, 40)
    far = (1 << 31) + 12345
    flat = torch.zeros(far + array.size, dtype=torch.uint8, device="cuda")
    flat[far:] = torch.from_numpy(array.ravel()).cuda()
    near = PixelCache.in_memory([array])
    pixels = PixelCache(near.catalog, flat, np.array([[far, 30, 40]]))
    windows = one_window(2, 3, 25, 30, True)
    got = resample(pixels, [0], windows, (20, 20), "bilinear")
    assert difference(got.cpu(), resample(near, [0], windows, (20, 20), "bilinear")) <= 1


@on_cuda
def test_oversized_windows_are_scaled_on_the_cpu():
    pixels = PixelCache.in_memory([image(4, 1, 40_000)])
    windows = one_window(0, 0, 1, 40_000, True)
    got = resample(pixels.to("cuda"), [0], windows, (1, 20_000), "bilinear")
    assert got.is_cuda
    assert torch.equal(got.cpu(), resample(pixels, [0], windows, (1, 20_000), "bilinear"))


@on_cuda
@BOTH
def test_crops_without_triton_equal_the_cpu(interpolation, monkeypatch):
    monkeypatch.setattr("proximetry.data.resample._kernel", lambda: None)
    pixels = PixelCache.in_memory([image(k, 30 + k, 40) for k in range(6)])
    transform, rows = RandomResizedCrop(24, interpolation=interpolation), np.arange(6)
    windows = transform.draw(pixels, rows, torch.Generator().manual_seed(1))
    got = transform.apply(pixels.to("cuda"), rows, windows)
    assert got.is_cuda
    assert torch.equal(got.cpu(), transform.apply(pixels, rows, windows))
