import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv

from proximetry.data import (
    Catalog,
    CenterCrop,
    PixelCache,
    RandomResizedCrop,
    open_image,
    resize_and_center_crop,
)
from proximetry.data.resample import resample

SIZES = [(40, 56), (64, 48), (33, 33), (50, 20), (21, 90), (7, 5)]
MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pixels():
    rng = np.random.default_rng(0)
    return PixelCache.in_memory([rng.integers(0, 256, (*s, 3), dtype=np.uint8) for s in SIZES])


def chw(pixels, i):
    return torch.from_numpy(pixels[i].copy()).permute(2, 0, 1)


def test_pixels_larger_than_gpu_memory_are_an_error(monkeypatch):
    def run_out(tensor, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.Tensor, "to", run_out)
    with pytest.raises(ValueError, match=r"need 0\.003 GiB of cuda, .* 0\.001 GiB are free"):
        PixelCache.in_memory([np.zeros((1024, 1024, 3), np.uint8)]).to("cuda")


@pytest.mark.parametrize("interpolation", list(MODES))
@pytest.mark.parametrize("crop", [9, 32, 60])
def test_random_crops_equal_torchvision_resized_crop(pixels, interpolation, crop):
    transform = RandomResizedCrop(crop, interpolation=interpolation)
    rows = np.tile(np.arange(len(pixels)), 6)
    windows = transform.draw(pixels, rows, seeded(crop))
    batch = transform.apply(pixels, rows, windows)
    assert batch.shape == (len(rows), 3, crop, crop)
    assert batch.dtype == torch.uint8
    for k, row in enumerate(rows):
        box = [int(getattr(windows, n)[k]) for n in ("top", "left", "height", "width")]
        expected = tv.resized_crop(
            chw(pixels, row), *box, [crop, crop], MODES[interpolation], antialias=True
        )
        if windows.flip[k]:
            expected = tv.horizontal_flip(expected)
        assert torch.equal(batch[k], expected)


@given(data=st.data())
def test_center_crop_of_the_cache_equals_resize_and_center_crop(data, tmp_path_factory):
    # Scaled once and cropped: evaluation in training uses the same bytes as encoding.
    folder = tmp_path_factory.mktemp("images")
    height, width = (data.draw(st.integers(1, 60)) for _ in range(2))
    form = data.draw(st.sampled_from(["png", "jpeg", "webp", "gif", "bmp", "tiff"]))
    channels = data.draw(st.sampled_from([(), (3,)]))
    noise = np.random.default_rng(data.draw(st.integers(0, 99)))
    array = noise.integers(0, 256, (height, width, *channels), dtype=np.uint8)
    Image.fromarray(array).save(folder / f"x.{form}")
    resize = data.draw(st.integers(1, 40))
    crop = tuple(data.draw(st.integers(1, resize)) for _ in range(2))
    if data.draw(st.booleans()):
        resize = (resize, data.draw(st.integers(crop[1], 40)))  # any aspect ratio
    interpolation = data.draw(st.sampled_from(list(MODES)))
    catalog = Catalog((f"x.{form}",), ("a",), ("all",), folder)
    cache = PixelCache.build(catalog, resize, folder / "cache", interpolation=interpolation)
    found = CenterCrop(crop)(cache, [0])[0]
    expected = resize_and_center_crop(open_image(catalog.file(0)), resize, crop, interpolation)
    assert np.array_equal(found.permute(1, 2, 0), expected)


def test_flipped_centers_are_the_views_of_evaluation_or_their_mirrors(pixels):
    rows, crop = np.repeat(np.arange(len(pixels) - 1), 20), CenterCrop((7, 4), flip=True)
    plain = CenterCrop((7, 4))(pixels, rows)
    uniforms = crop.draw_uniforms(len(rows), torch.Generator().manual_seed(0))
    windows = crop.windows(pixels, rows, uniforms)
    batch = crop.apply(pixels, rows, windows)
    assert 0.3 < windows.flip.double().mean() < 0.7
    expected = torch.where(windows.flip[:, None, None, None], plain.flip(3), plain)
    assert torch.equal(batch, expected)
    assert not CenterCrop((7, 4)).windows(pixels, rows, uniforms).flip.any()


def sized(*sizes):
    """A cache with image sizes but no pixels."""
    names = tuple(map(str, range(len(sizes))))
    catalog = Catalog(names, names, ("all",) * len(sizes))
    index = np.array([[0, *size] for size in sizes], dtype=np.int64)
    return PixelCache(catalog, torch.empty(0, dtype=torch.uint8), index)


def test_crop_larger_than_an_image_names_the_image():
    crop = CenterCrop((24, 16))  # fits portrait images only
    message = r"image 7 has 20×30 pixels, too few for a crop of 24×16. Use a short side of 24"
    with pytest.raises(ValueError, match=message):
        crop.windows(sized(*[(30, 20)] * 7, (20, 30)), [0, 7])


@pytest.mark.parametrize(
    ("field", "value"), [("top", -1), ("left", 50), ("height", 0), ("width", 57)]
)
def test_windows_outside_the_image_are_rejected(pixels, field, value):
    windows = CenterCrop(8).windows(pixels, [0])
    wrong = dataclasses.replace(windows, **{field: torch.tensor([value])})
    with pytest.raises(ValueError, match=f"image 0 must lie inside its 40×56 .* {field} {value}"):
        resample(pixels, [0], wrong, (8, 8), "bilinear")


def test_windows_of_a_global_batch_can_be_sliced(pixels):
    transform = RandomResizedCrop(8)
    rows = np.tile(np.arange(len(pixels)), 4)
    whole = transform.draw(pixels, rows, seeded(7))
    batch = transform.apply(pixels, rows, whole)
    assert torch.equal(batch, transform(pixels, rows, seeded(7)))
    assert not torch.equal(batch, transform(pixels, rows, seeded(5)))
    parts = [transform.apply(pixels, rows[p], whole[p]) for p in (slice(0, 10), slice(10, None))]
    assert torch.equal(torch.cat(parts), batch)
    # A shorter batch from the same generator starts with the same windows.
    short = transform.draw(pixels, rows[:10], seeded(7))
    assert torch.equal(short.top, whole[:10].top)
    assert torch.equal(short.flip, whole[:10].flip)


def draws(size, transform, count):
    image = np.zeros((*size, 3), np.uint8)
    cache = PixelCache.in_memory([image])
    windows = transform.draw(cache, np.zeros(count, np.int64), seeded(1))
    return torch.stack([windows.top, windows.left, windows.height, windows.width], 1).numpy()


@pytest.mark.parametrize("size", [(48, 64), (90, 40), (30, 200)])
def test_windows_have_the_distribution_of_torchvision(size):
    # (30, 200) is so wide that many draws end in the central crop.
    count = 4000
    transform = RandomResizedCrop(8)
    ours = draws(size, transform, count)
    torch.manual_seed(0)
    reference = v2.RandomResizedCrop(8, transform.scale, transform.ratio)
    image = torch.zeros(3, *size)
    make = getattr(reference, "make_params", None) or reference._get_params
    boxes = (make([image]) for _ in range(count))
    theirs = np.array([[box[k] for k in ("top", "left", "height", "width")] for box in boxes])
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    area = [(w[:, 2] * w[:, 3]) for w in (ours, theirs)]
    shape = [(w[:, 3] / w[:, 2]) for w in (ours, theirs)]
    assert stats.ks_2samp(*area).pvalue > 1e-3
    assert stats.ks_2samp(*shape).pvalue > 1e-3


@pytest.mark.parametrize("size", [(10, 200), (200, 10)])
def test_fallback_is_the_largest_central_window(size):
    # No window of the whole area has an allowed aspect ratio, so every attempt fails.
    transform = RandomResizedCrop(8, scale=(1.0, 1.0))
    boxes = draws(size, transform, 50)
    height, width = size
    if width > height:
        expected = [0, (width - round(height * 4 / 3)) // 2, height, round(height * 4 / 3)]
    else:
        expected = [(height - round(width * 4 / 3)) // 2, 0, round(width * 4 / 3), width]
    assert (boxes == expected).all()


def test_windows_stay_inside_even_of_tiny_images():
    for size in [(1, 1), (1, 7), (2, 3), (5, 1)]:
        boxes = draws(size, RandomResizedCrop(4), 300)
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] >= 1).all()
        assert (boxes[:, 0] + boxes[:, 2] <= size[0]).all()
        assert (boxes[:, 1] + boxes[:, 3] <= size[1]).all()


def test_flip_is_a_fair_coin_and_can_be_off(pixels):
    rows = np.zeros(2000, np.int64)
    flips = RandomResizedCrop(4).draw(pixels, rows, seeded()).flip
    assert abs(flips.double().mean() - 0.5) < 4 * 0.5 / math.sqrt(2000)
    assert not RandomResizedCrop(4, flip=False).draw(pixels, rows, seeded()).flip.any()
    # Without flips the windows stay the same.
    on, off = (RandomResizedCrop(4, flip=f).draw(pixels, rows, seeded()).top for f in (True, False))
    assert torch.equal(on, off)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(0), "crop must be positive"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "smallest ≤ largest"),
        (lambda: RandomResizedCrop(8, scale=(0, 1)), "scale must be"),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), "ratio must be"),
        (lambda: RandomResizedCrop(8, interpolation="nearest"), "got 'nearest'"),
        (lambda: CenterCrop((8, 0)), "crop must be positive"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_shapes_of_crops(pixels):
    assert RandomResizedCrop((12, 8))(pixels, [0], seeded()).shape == (1, 3, 12, 8)
    # The share of a process in a small last batch may be empty.
    assert CenterCrop(3)(pixels, []).shape == (0, 3, 3, 3)
    assert RandomResizedCrop(4)(pixels, [], seeded()).shape == (0, 3, 4, 4)


def test_bad_rows(pixels):
    for crop in (
        lambda rows: CenterCrop(3)(pixels, rows),
        lambda rows: RandomResizedCrop(3)(pixels, rows, seeded()),
    ):
        with pytest.raises(ValueError, match="between 0 and 5, got 0 … 6"):
            crop([0, 6])
        with pytest.raises(ValueError, match="list of image numbers"):
            crop([[0, 1]])
    windows = CenterCrop(3).windows(pixels, [0])
    with pytest.raises(ValueError, match="2 images, but 1 windows"):
        resample(pixels, [0, 1], windows, (3, 3), "bilinear")
