"""Color jitter compared with torchvision, and its invariants."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as tv

from proximetry.data.augment import ColorChanges, ColorJitter, recolor


def some_pixels(seed, batch=3, height=5, width=7):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, 3, height, width), generator=draw, dtype=torch.uint8)


def same(batch, **changes):
    values = {"hue": 0.0, "saturation": 1.0, "contrast": 1.0, "brightness": 1.0, **changes}
    return ColorChanges(
        **{k: torch.full((batch,), v, dtype=torch.float64) for k, v in values.items()}
    )


@given(
    name=st.sampled_from(["brightness", "contrast", "saturation"]),
    factor=st.floats(0, 2),
    seed=st.integers(0, 999),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
)
def test_each_color_change_equals_torchvision(name, factor, seed, height, width):
    pixels = some_pixels(seed, 2, height, width)
    found = recolor(pixels, same(2, **{name: factor}))
    expected = 255 * getattr(tv, f"adjust_{name}")(pixels.double() / 255, factor)
    # Half a gray level is rounding. The luma weights sum to 0.9999, which affects gray images.
    assert (found - expected).abs().max() <= 0.5 + 0.03


@given(hue=st.floats(-0.5, 0.5), seed=st.integers(0, 99))
def test_hue_shift_preserves_luma_and_gray(hue, seed):
    # Low saturation, so that nothing is clipped at black and white.
    pixels = (some_pixels(seed).float() / 8 + 112).to(torch.uint8)
    light = torch.tensor([0.2989, 0.587, 0.114])
    turned = recolor(pixels, same(3, hue=hue))
    before, after = (torch.einsum("bchw,c->bhw", p.float(), light) for p in (pixels, turned))
    assert (before - after).abs().max() <= 0.6
    gray = pixels[:, :1].expand(-1, 3, -1, -1)
    assert (recolor(gray, same(3, hue=hue)).int() - gray.int()).abs().max() <= 1
    back = recolor(turned, same(3, hue=-hue))
    assert (back.int() - pixels.int()).abs().max() <= 2


@pytest.mark.parametrize(("hue", "largest"), [(1 / 3, 1), (-1 / 3, 2), (2 / 3, 2)])
def test_hue_rotates_from_red_through_green_to_blue(hue, largest):
    red = torch.tensor([120, 60, 60], dtype=torch.uint8).view(1, 3, 1, 1)
    assert recolor(red, same(1, hue=hue)).flatten().argmax() == largest


def test_neutral_color_changes_keep_the_image():
    pixels = some_pixels(1)
    assert torch.equal(recolor(pixels, same(3)), pixels)
    gray = recolor(pixels, same(3, saturation=0.0))
    expected = 255 * tv.rgb_to_grayscale(pixels.double() / 255, 3)
    assert (gray - expected).abs().max() <= 0.5 + 0.03
    assert torch.equal(recolor(pixels, same(3, hue=1.0)), pixels)
    assert not ColorJitter()
    assert ColorJitter(hue=0.1)


def test_images_are_changed_independently_and_keep_their_layout():
    pixels = some_pixels(2, 6).to(memory_format=torch.channels_last)
    changes = ColorJitter(0.4, 0.2, 0.3).draw(6, torch.Generator().manual_seed(0))
    whole = recolor(pixels, changes)
    assert whole.is_contiguous(memory_format=torch.channels_last)
    for i in range(6):
        part = slice(i, i + 1)
        assert torch.equal(recolor(pixels[part], changes[part])[0], whole[i])
    assert not torch.equal(whole, pixels)


def test_color_changes_stay_within_their_bounds():
    draw = torch.Generator().manual_seed(0)
    changes = ColorJitter(jitter=0.3, hue=0.1, grayscale=0.25).draw(4000, draw)
    assert len(changes) == 4000
    gray = changes.saturation == 0
    assert 0.2 < gray.double().mean() < 0.3
    for values in (changes.contrast, changes.brightness, changes.saturation[~gray]):
        assert 0.7 <= values.min() < 0.71
        assert 1.29 < values.max() <= 1.3
    assert -0.1 <= changes.hue.min() < -0.099
    assert 0.099 < changes.hue.max() <= 0.1
    for name, value in {"jitter": 1.5, "hue": 0.6, "grayscale": -0.1}.items():
        with pytest.raises(ValueError, match=f"{name} must be between 0 and"):
            ColorJitter(**{name: value})
