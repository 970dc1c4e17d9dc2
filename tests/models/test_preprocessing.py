import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as T

from proximetry.models import Embedder, Preprocessing
from proximetry.models.encoding import resize_and_crop

IMAGENET = Preprocessing(256, (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def change(**values):
    return Preprocessing.from_json({**IMAGENET.to_json(), **values})


def test_json_round_trip():
    for pixels in (IMAGENET, change(channels="BGR", crop=(112, 96), interpolation="bilinear")):
        assert Preprocessing.from_json(json.loads(json.dumps(pixels.to_json()))) == pixels


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16])
def test_normalise_is_torchvisions(dtype):
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    expected = T.Normalize(IMAGENET.mean, IMAGENET.std)(pixels.double() / 255)
    found = IMAGENET.normalise(pixels.to(dtype))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_normalise_bgr_written_out():
    pixels = torch.tensor([10.0, 20.0, 30.0]).view(1, 3, 1, 1)
    wanted = change(channels="BGR", scale=1.0, mean=(104.0, 117.0, 128.0), std=(1.0, 1.0, 1.0))
    assert wanted.normalise(pixels).flatten().tolist() == [30 - 104, 20 - 117, 10 - 128]


def test_backbones_want_their_published_pixels():
    bgr = Embedder.create("bn_inception", weights="none", image_size=64).preprocessing
    assert (bgr.scale, bgr.channels, bgr.mean, bgr.std) == (
        1.0,
        "BGR",
        (104.0, 117.0, 128.0),
        (1.0, 1.0, 1.0),
    )
    face = Embedder.create("sphereface20", weights="none").preprocessing
    assert (face.crop, face.resize) == ((112, 96), 96)
    white = face.normalise(torch.full((1, 3, 1, 1), 255.0))
    assert white.flatten().tolist() == [(255 - 127.5) / 128] * 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resize": 0}, "resize"),
        ({"resize": 200}, "padded with black"),
        ({"crop": (224,)}, "crop"),
        ({"crop": (0, 3)}, "crop"),
        ({"mean": (0.1, 0.2)}, "mean"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
        ({"scale": 0.0}, "scale"),
        ({"channels": "GRB"}, "'GRB'"),
        ({"interpolation": "nearest"}, "'nearest'"),
        ({"colour": 1}, "colour"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        change(**values)


def test_normalise_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"\[3, 4, 4\]"):
        IMAGENET.normalise(torch.zeros(3, 4, 4))


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    side=st.integers(8, 60),
    crop=st.tuples(st.integers(4, 70), st.integers(4, 70)),
    kind=st.sampled_from(["bilinear", "bicubic"]),
)
def test_resize_and_crop_is_torchvisions(height, width, side, crop, kind):
    pixels = np.random.default_rng(height * 91 + width).integers(0, 256, (height, width, 3))
    image = Image.fromarray(pixels.astype(np.uint8))
    wanted = change(resize=max(side, min(crop)), crop=crop, interpolation=kind)
    reference = T.Compose(
        [
            T.Resize(wanted.resize, InterpolationMode(kind), antialias=True),
            T.CenterCrop(wanted.crop),
        ]
    )
    assert np.array_equal(np.array(resize_and_crop(image, wanted)), np.array(reference(image)))
