import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_data_config
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as T

from proximetry.models import Embedder, Preprocessing

IMAGENET = Preprocessing(256, (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_json_round_trip():
    for pixels in (
        IMAGENET,
        replace(IMAGENET, channels="BGR", crop=(112, 96), interpolation="bilinear"),
        replace(IMAGENET, resize=(248, 248)),
    ):
        assert Preprocessing.from_json(json.loads(json.dumps(asdict(pixels)))) == pixels
    with pytest.raises(ValueError, match="keys: shade"):
        Preprocessing.from_json({**asdict(IMAGENET), "shade": 1})
    with pytest.raises(ValueError, match="keys: crop"):
        Preprocessing.from_json({k: v for k, v in asdict(IMAGENET).items() if k != "crop"})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16])
def test_normalize_equals_torchvision(dtype):
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    expected = T.Normalize(IMAGENET.mean, IMAGENET.std)(pixels.double() / 255)
    found = IMAGENET.normalize(pixels.to(dtype))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_normalize_bgr_and_channels_last():
    values = {"channels": "BGR", "scale": 1.0, "mean": (104.0, 117.0, 128.0), "std": (1.0,) * 3}
    bgr = replace(IMAGENET, **values)
    pixels = torch.tensor([10.0, 20.0, 30.0]).view(1, 3, 1, 1)
    assert bgr.normalize(pixels).flatten().tolist() == [30 - 104, 20 - 117, 10 - 128]
    pixels = torch.zeros(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    for each in (IMAGENET, bgr):
        assert each.normalize(pixels).is_contiguous(memory_format=torch.channels_last)


def test_preprocessing_of_custom_backbones():
    bgr = Embedder.create("bn_inception", weights="none", image_size=64).preprocessing
    assert (bgr.scale, bgr.channels) == (1.0, "BGR")
    assert (bgr.mean, bgr.std) == ((104.0, 117.0, 128.0), (1.0, 1.0, 1.0))
    face = Embedder.create("sphereface20", weights="none").preprocessing
    assert (face.crop, face.resize) == ((112, 96), 96)
    white = face.normalize(torch.full((1, 3, 1, 1), 255.0))
    assert white.flatten().tolist() == [(255 - 127.5) / 128] * 3


def test_squash_keeps_the_whole_image():
    def made(backbone, **settings):
        return Embedder.create(backbone, weights="none", squash=True, **settings).preprocessing

    preprocessing = made("small_convnet", image_size=32)
    assert preprocessing.crop == preprocessing.resize == (32, 32)
    assert preprocessing.short_side == 32
    assert made("small_convnet", image_size=32, resize=40).resize == (40, 40)
    assert made("sphereface20").resize == (112, 96)
    assert made("sphereface20", resize=101).resize == (117, 101)
    assert preprocessing.size_at(48) == (48, 48)
    assert replace(IMAGENET, resize=(448, 336), crop=(40, 40)).size_at(48) == (64, 48)
    assert IMAGENET.size_at(48) == 48
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, :10] = 255  # outside a center crop
    assert preprocessing.pixels(pixels)[:, :, 0].min() == 255


def from_timm(name, resize=None, squash=None):
    config = timm.get_pretrained_cfg(name).to_dict()
    return Preprocessing.from_timm(SimpleNamespace(pretrained_cfg=config), None, resize, squash)


@pytest.mark.parametrize("shape", [(223, 320), (500, 90), (256, 256)])
@pytest.mark.parametrize(
    "name",
    [
        "resnet18.a1_in1k",  # center
        "convnextv2_nano.fcmae_ft_in22k_in1k_384",  # squash
        "dm_nfnet_f0.dm_in1k",  # squash with crop_pct 0.9
        "vit_base_patch16_sapiens2.fb",  # squash to 1024×768
    ],
)
def test_pixels_equal_timms_transform(name, shape):
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    config = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    expected = create_transform(**config, normalize=False)(Image.fromarray(noise))
    assert torch.equal(from_timm(name).pixels(noise), expected)


def test_squash_overrides_crop_mode_of_timm():
    squashing, border = "dm_nfnet_f0.dm_in1k", "deepseek_vit_412m.deepseek_v4_flash_vision_exp"
    assert from_timm(squashing).resize == (213, 213)
    assert from_timm(squashing, squash=True).resize == (213, 213)
    assert from_timm(squashing, resize=200).resize == (200, 200)
    assert from_timm(squashing, squash=False).resize == 192
    assert from_timm("resnet18.a1_in1k", squash=True).resize == (224, 224)
    assert from_timm(border, squash=True).resize == (392, 392)
    with pytest.warns(UserWarning, match="crop_mode"):
        centered = from_timm(border)
    assert (centered.resize, centered.crop) == (392, (392, 392))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resize": 0}, "resize"),
        ({"resize": 200}, "resize 200×200"),
        ({"resize": (256, 200)}, "resize 256×200"),
        ({"resize": (256, 256, 256)}, "resize"),
        ({"crop": 224}, "crop"),
        ({"crop": (0, 3)}, "crop"),
        ({"mean": (0.1, 0.2)}, "mean"),
        ({"mean": 0.5}, "mean"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
        ({"scale": 0.0}, "scale"),
        ({"channels": "GRB"}, "'GRB'"),
        ({"interpolation": "nearest"}, "'nearest'"),
    ],
)
def test_preprocessing_rejects_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        replace(IMAGENET, **values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float_pixels_between_zero_and_one_are_rejected(dtype):
    pixels = torch.rand(2, 3, 8, 8).to(dtype)
    with pytest.raises(ValueError, match="255"):
        IMAGENET.normalize(pixels)
    IMAGENET.normalize(pixels * 255)
    IMAGENET.normalize(torch.zeros(2, 3, 8, 8, dtype=dtype))  # black
    IMAGENET.normalize(torch.zeros(0, 3, 8, 8, dtype=dtype))
    IMAGENET.normalize((pixels > 0.5).to(torch.uint8))
    with pytest.raises(ValueError, match=r"\[3, 8, 8\]"):
        IMAGENET.normalize(pixels[0])


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    side=st.integers(8, 60),
    crop=st.tuples(st.integers(4, 70), st.integers(4, 70)),
    kind=st.sampled_from(["bilinear", "bicubic"]),
)
def test_pixels_equal_torchvision(height, width, side, crop, kind):
    pixels = np.random.default_rng(height * 91 + width).integers(0, 256, (height, width, 3))
    image = Image.fromarray(pixels.astype(np.uint8))
    preprocessing = replace(IMAGENET, resize=max(side, min(crop)), crop=crop, interpolation=kind)
    resize = T.Resize(preprocessing.resize, InterpolationMode(kind), antialias=True)
    resized = resize(image)
    if resized.height < crop[0] or resized.width < crop[1]:
        size = f"{resized.height}×{resized.width}, too few for a crop of {crop[0]}×{crop[1]}"
        with pytest.raises(ValueError, match=size):
            preprocessing.pixels(image)
        return
    expected = T.PILToTensor()(T.CenterCrop(crop)(resized))
    found = preprocessing.pixels(image)
    assert found.dtype == torch.uint8
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [(90, 61), (64, 64), (75, 200)])
@pytest.mark.parametrize(
    ("side", "crop"),
    [(57, (40, 50)), (64, (64, 64)), (200, (33, 32)), ([57, 63], (40, 50)), ([64, 64], (64, 64))],
)
@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_documented_load_pixels_equals_preprocessing(size, side, crop, kind, tmp_path):
    """The function in docs/models.md for ONNX deployments."""
    page = Path(__file__).parents[2] / "docs" / "models.md"
    code = re.search(r"def load_pixels\(.*?\n\n", page.read_text(), re.DOTALL)[0]
    names = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(code, names)
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    preprocessing = replace(IMAGENET, resize=side, crop=crop, interpolation=kind)
    found = names["load_pixels"](tmp_path / "a.png", side, crop, kind)
    assert np.array_equal(found, preprocessing.pixels(tmp_path / "a.png").numpy())
