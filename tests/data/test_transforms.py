import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv

from proximetry.data import Catalog, EvalTransform, PixelCache, TrainTransform
from proximetry.data.pixels import scaled_size
from proximetry.data.resample import axis_weights, resample, resample_each, resample_together

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


@pytest.mark.parametrize("way", [resample_each, resample_together])
@pytest.mark.parametrize("interpolation", list(MODES))
@pytest.mark.parametrize("crop", [9, 32, 60])
def test_train_equals_torchvision_resized_crop(pixels, way, interpolation, crop):
    transform = TrainTransform(crop, interpolation=interpolation)
    rows = np.tile(np.arange(len(pixels)), 6)
    windows = transform.draw(pixels, rows, seeded(crop))
    batch = way(pixels, rows, windows, (crop, crop), interpolation)
    assert batch.shape == (len(rows), 3, crop, crop)
    assert batch.dtype == torch.uint8
    for k, row in enumerate(rows):
        box = [int(getattr(windows, n)[k]) for n in ("top", "left", "height", "width")]
        expected = tv.resized_crop(
            chw(pixels, row), *box, [crop, crop], MODES[interpolation], antialias=True
        )
        if windows.flip[k]:
            expected = tv.horizontal_flip(expected)
        error = (batch[k].int() - expected.int()).abs().max()
        # The same kernel gives the same bytes; its weights are coarser than the matrices'.
        assert error <= (0 if way is resample_each else 1)


def test_matrix_products_equal_the_float_reference(pixels):
    # The rounding to bytes is all that differs from exact arithmetic.
    rows = np.arange(len(pixels))
    windows = EvalTransform(24, 24).windows(pixels, rows)
    got = resample_together(pixels, rows, windows, (24, 24), "bilinear")
    for k in rows:
        scaled = tv.resize(chw(pixels, k).double(), [24], MODES["bilinear"], antialias=True)
        exact = tv.center_crop(scaled, [24, 24])
        assert (got[k].double() - exact).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("way", [resample_each, resample_together])
@pytest.mark.parametrize("interpolation", list(MODES))
@pytest.mark.parametrize(("resize", "crop"), [(32, 28), (33, 28), (20, 20), (64, 9)])
def test_eval_equals_resize_and_centre_crop(pixels, way, interpolation, resize, crop):
    transform = EvalTransform(resize, crop, interpolation)
    rows = np.arange(len(pixels))
    batch = way(pixels, rows, transform.windows(pixels, rows), (crop, crop), interpolation)
    mode = MODES[interpolation]
    reference = v2.Compose([v2.Resize(resize, mode, antialias=True), v2.CenterCrop(crop)])
    for k in rows:
        error = (batch[k].int() - reference(chw(pixels, k)).int()).abs().max()
        assert error <= (0 if way is resample_each else 1)


def sized(*sizes):
    """A cache that knows sizes and has no pixels."""
    names = tuple(map(str, range(len(sizes))))
    catalog = Catalog(names, names, ("all",) * len(sizes))
    index = np.array([[0, *size] for size in sizes], dtype=np.int64)
    return PixelCache(catalog, torch.empty(0, dtype=torch.uint8), index)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=20))
def test_eval_windows_follow_the_rule_for_one_image(sizes):
    for resize, crop in [(256, 224), (1, 1), (37, (12, 30)), (4095, 7)]:
        windows = EvalTransform(resize, crop).windows(sized(*sizes), np.arange(len(sizes)))
        for k, (height, width) in enumerate(sizes):
            wide, tall = scaled_size(width, height, resize)
            assert (windows.scaled_height[k], windows.scaled_width[k]) == (tall, wide)
            assert (windows.top[k], windows.left[k], windows.flip[k]) == (0, 0, False)
            assert (windows.height[k], windows.width[k]) == (height, width)
            down, across = (crop, crop) if isinstance(crop, int) else crop
            # Python rounds halves to even, as torchvision does.
            assert windows.first_row[k] == round((tall - down) / 2)
            assert windows.first_column[k] == round((wide - across) / 2)


def test_a_crop_that_an_image_cannot_hold_names_the_image():
    transform = EvalTransform(20, (24, 16))  # fits what is taller than wide
    message = r"image 7 becomes 20×30 pixels, too few for a crop of 24×16; use a resize of 24"
    with pytest.raises(ValueError, match=message):
        transform.windows(sized(*[(60, 40)] * 7, (40, 60)), [0, 7])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top", -1),
        ("left", 30),
        ("height", 0),
        ("width", 57),
        ("first_row", -1),
        ("first_column", 50),
        ("scaled_height", 7),
    ],
)
def test_windows_must_lie_inside(pixels, field, value):
    windows = EvalTransform(20, 8).windows(pixels, [0])
    wrong = dataclasses.replace(windows, **{field: torch.tensor([value])})
    with pytest.raises(ValueError, match=f"image 0 must lie inside its 40×56 .* {field} {value}"):
        resample(pixels, [0], wrong, (8, 8), "bilinear")


@pytest.fixture
def card(monkeypatch):
    """A GPU with 1 MiB free, and 1 MiB that torch holds in reserve."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 << 20)


def test_too_many_pixels_for_a_card_is_said_beforehand(card):
    pixels = PixelCache.in_memory([np.zeros((1024, 1024, 3), np.uint8)])
    message = (
        "the pixels need 0.003 GiB of cuda:0, of which 0.002 GiB are free; "
        "use data.cache memory or disk, or a smaller data.short_side"
    )
    with pytest.raises(ValueError, match=message):
        pixels.to("cuda:0")


def test_a_card_that_runs_out_while_copying_says_the_same(card, monkeypatch):
    def run_out(tensor, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "to", run_out)
    pixels = PixelCache.in_memory([np.zeros((512, 512, 3), np.uint8)])
    with pytest.raises(ValueError, match=r"need 0\.001 GiB of cuda, of which 0\.002 GiB are free"):
        pixels.to("cuda")


def test_calls_use_the_windows_that_draw_gives(pixels):
    transform = TrainTransform(16)
    rows = [3, 0, 3]
    batch = transform(pixels, rows, seeded(4))
    again = transform.apply(pixels, rows, transform.draw(pixels, rows, seeded(4)))
    assert torch.equal(batch, again)
    assert not torch.equal(batch, transform(pixels, rows, seeded(5)))
    assert EvalTransform(20, 16)(pixels, rows).shape == (3, 3, 16, 16)


def test_groups_of_a_large_batch_give_the_same(pixels, monkeypatch):
    transform = TrainTransform(12)
    rows = np.tile(np.arange(len(pixels)), 3)
    windows = transform.draw(pixels, rows, seeded())
    whole = resample_together(pixels, rows, windows, (12, 12), "bilinear")
    monkeypatch.setattr("proximetry.data.resample._GATHER", 20_000)
    assert torch.equal(whole, resample_together(pixels, rows, windows, (12, 12), "bilinear"))


def test_windows_of_a_global_batch_can_be_sliced(pixels):
    transform = TrainTransform(8)
    rows = np.tile(np.arange(len(pixels)), 4)
    whole = transform.draw(pixels, rows, seeded(7))
    batch = transform.apply(pixels, rows, whole)
    parts = [transform.apply(pixels, rows[p], whole[p]) for p in (slice(0, 10), slice(10, None))]
    assert torch.equal(torch.cat(parts), batch)
    # A shorter batch from the same generator begins with the same windows.
    short = transform.draw(pixels, rows[:10], seeded(7))
    assert torch.equal(short.top, whole[:10].top)
    assert torch.equal(short.flip, whole[:10].flip)


def draws(size, transform, count):
    image = np.zeros((*size, 3), np.uint8)
    cache = PixelCache.in_memory([image])
    windows = transform.draw(cache, np.zeros(count, np.int64), seeded(1))
    return torch.stack([windows.top, windows.left, windows.height, windows.width], 1).numpy()


@pytest.mark.parametrize("size", [(48, 64), (90, 40), (30, 200)])
def test_windows_follow_torchvision_law(size):
    # (30, 200) is so wide that many draws end in the central crop.
    count = 4000
    transform = TrainTransform(8)
    ours = draws(size, transform, count)
    torch.manual_seed(0)
    reference = v2.RandomResizedCrop(8, transform.scale, transform.ratio)
    image = torch.zeros(3, *size)
    make = getattr(reference, "make_params", None) or reference._get_params
    theirs = np.array(
        [[p[k] for k in ("top", "left", "height", "width")] for p in _repeat(make, image, count)]
    )
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    area = [(w[:, 2] * w[:, 3]) for w in (ours, theirs)]
    shape = [(w[:, 3] / w[:, 2]) for w in (ours, theirs)]
    assert stats.ks_2samp(*area).pvalue > 1e-3
    assert stats.ks_2samp(*shape).pvalue > 1e-3


def _repeat(make, image, count):
    return [make([image]) for _ in range(count)]


@pytest.mark.parametrize("size", [(10, 200), (200, 10)])
def test_fallback_is_the_largest_central_window(size):
    # The whole area cannot have an allowed shape here, so every try fails.
    transform = TrainTransform(8, scale=(1.0, 1.0))
    boxes = draws(size, transform, 50)
    height, width = size
    if width > height:
        expected = [0, (width - round(height * 4 / 3)) // 2, height, round(height * 4 / 3)]
    else:
        expected = [(height - round(width * 4 / 3)) // 2, 0, round(width * 4 / 3), width]
    assert (boxes == expected).all()


def test_windows_stay_inside_even_of_tiny_images():
    for size in [(1, 1), (1, 7), (2, 3), (5, 1)]:
        boxes = draws(size, TrainTransform(4), 300)
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] >= 1).all()
        assert (boxes[:, 0] + boxes[:, 2] <= size[0]).all()
        assert (boxes[:, 1] + boxes[:, 3] <= size[1]).all()


def test_flip_is_a_fair_coin_and_can_be_off(pixels):
    rows = np.zeros(2000, np.int64)
    flips = TrainTransform(4).draw(pixels, rows, seeded()).flip
    assert abs(flips.double().mean() - 0.5) < 4 * 0.5 / math.sqrt(2000)
    assert not TrainTransform(4, flip=False).draw(pixels, rows, seeded()).flip.any()
    # Without flips the windows stay the same.
    on, off = (TrainTransform(4, flip=f).draw(pixels, rows, seeded()).top for f in (True, False))
    assert torch.equal(on, off)


def test_weights_sum_to_one_and_identity():
    length = torch.tensor([5, 9, 3])
    weights = axis_weights(length, torch.tensor([9, 4, 3]), torch.zeros(3).long(), 3, "bicubic")
    assert weights.shape == (3, 3, 9)
    assert torch.allclose(weights.sum(2), torch.ones(3, 3))
    assert torch.equal(weights[2, :, :3], torch.eye(3))
    assert (weights[0, :, 5:] == 0).all()


def test_crops_need_not_be_square():
    pixels = PixelCache.in_memory([np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)])
    train = TrainTransform((12, 8))(pixels, [0], seeded())
    assert train.shape == (1, 3, 12, 8)
    view = EvalTransform(20, (24, 16))(pixels, [0])
    source = torch.from_numpy(pixels[0].copy()).permute(2, 0, 1)
    expected = tv.center_crop(tv.resize(source, [20], antialias=True), [24, 16])
    assert torch.equal(view[0], expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainTransform(0), "crop must be positive"),
        (lambda: TrainTransform(8, scale=(0.5, 0.1)), "smallest ≤ largest"),
        (lambda: TrainTransform(8, scale=(0, 1)), "scale must be"),
        (lambda: TrainTransform(8, ratio=(0, 1)), "ratio must be"),
        (lambda: TrainTransform(8, interpolation="nearest"), "got 'nearest'"),
        (lambda: EvalTransform(8, 9), "crop 9, resize 8"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_rows(pixels):
    with pytest.raises(ValueError, match="rows run from 0 to 5, got 0 … 6"):
        EvalTransform(8, 8)(pixels, [0, 6])
    with pytest.raises(ValueError, match="non-empty"):
        EvalTransform(8, 8)(pixels, [])
    windows = EvalTransform(8, 8).windows(pixels, [0])
    with pytest.raises(ValueError, match="2 images, but 1 windows"):
        resample(pixels, [0, 1], windows, (8, 8), "bilinear")
