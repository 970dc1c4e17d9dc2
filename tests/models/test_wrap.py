"""Custom networks as embedders, the transform of `Preprocessing`, embedders of vectors."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from proximetry.models import Embedder, Preprocessing, Tensors

PIXELS = Preprocessing(28, (24, 24), (0.5, 0.4, 0.3), (0.5, 0.6, 0.7), interpolation="bilinear")


class Net(nn.Module):
    def __init__(self, dim=8, channels=3):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, stride=2)
        self.norm = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6, dim)

    def forward(self, pixels):
        return self.linear(self.norm(self.conv(pixels)).relu().mean((2, 3)))


def image(height=40, width=30):
    draw = np.random.default_rng(height)
    return draw.integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_save_and_load_wrapped_network(tmp_path):
    embedder = Embedder.wrap(Net(), PIXELS, 8)
    images = [image(), Image.fromarray(image(50, 60))]
    embedder.save(tmp_path / "e", class_names=["a"])
    again = Embedder.load(tmp_path / "e", module=Net())
    assert again.fingerprint() == embedder.fingerprint()
    assert again.class_names == ["a"]
    plain = Embedder.wrap(net := Net(), PIXELS, 8, normalize=False).eval()
    pixels = PIXELS.normalize(PIXELS.pixels(image())[None])
    assert torch.equal(plain(pixels), net.eval()(pixels))
    assert torch.equal(again.encode(images), embedder.encode(images))
    assert {path.suffix for path in (tmp_path / "e").iterdir()} == {".json", ".safetensors"}
    with pytest.raises(ValueError, match=r"module=Net\("):
        Embedder.load(tmp_path / "e")
    with pytest.raises(ValueError, match="do not fit"):
        Embedder.load(tmp_path / "e", module=Net(9))
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        Embedder.load(tmp_path / "e", module=Net)


def test_export_wrapped_network(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    embedder = Embedder.wrap(Net(channels=1), (1, 20, 20), 8)
    file = embedder.export_onnx(tmp_path / "net.onnx")
    inputs = np.random.default_rng(0).normal(size=(4, 1, 20, 20)).astype(np.float32)
    (found,) = onnxruntime.InferenceSession(file).run(None, {"pixels": inputs})
    np.testing.assert_allclose(found, embedder.encode(inputs).numpy(), atol=1e-5)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


@pytest.mark.parametrize(
    ("module", "preprocessing", "dim", "message"),
    [
        (Net, PIXELS, 8, r"Net\(\)"),
        (Net(), PIXELS, 9, "returns 8 dimensions"),
        (Net(), (4,), 8, "raises RuntimeError"),
        (Net(), "imagenet", 8, "preprocessing must be"),
        (Net(), (3, 0, 4), 8, "shape"),
        (Net(), 5, 8, "preprocessing must be"),
        (nn.Flatten(0), PIXELS, 8, r"\[3456\]"),
        (Function(lambda x: x.mean((2, 3)) / 0 * 0), PIXELS, 3, "not finite floats"),
        (Function(lambda x: [x]), PIXELS, 3, "returns list"),
        (Function(lambda x: x.flatten(1).argmax(1)), PIXELS, 3, "int64"),
    ],
)
def test_wrap_rejects_modules_that_do_not_return_vectors(module, preprocessing, dim, message):
    with pytest.raises(ValueError, match=message):
        Embedder.wrap(module, preprocessing, dim)


def test_transform_equals_evaluation_and_is_picklable(tmp_path):
    Image.fromarray(image()).save(tmp_path / "one.png")
    transform = pickle.loads(pickle.dumps(PIXELS.transform()))
    expected = PIXELS.normalize(PIXELS.pixels(image())[None])[0]
    for source in (image(), Image.fromarray(image()), tmp_path / "one.png"):
        assert torch.equal(transform(source), expected)
    assert expected.shape == (3, 24, 24)
    assert "resize=28, crop=(24, 24)" in repr(transform)


@pytest.mark.parametrize("backbone", ["vectors", "vectors_mlp"])
def test_vector_embedders(backbone, tmp_path):
    embedder = Embedder.create(backbone, 4, input_dim=16)
    vectors = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    found = embedder.encode(vectors, 2)
    assert found.shape == (5, 4)
    torch.testing.assert_close(found, embedder.encode(list(vectors)))
    embedder.save(tmp_path / "e")
    again = Embedder.load(tmp_path / "e")
    assert again.preprocessing == Tensors((16,))
    assert torch.equal(again.encode(vectors, 2), found)
    with pytest.raises(ValueError, match="got 'a'"):
        again.encode(["a"])
    with pytest.raises(ValueError, match="16 dimensions"):
        embedder.encode(vectors[:, :3])
    vectors[3, 2] = np.nan
    with pytest.raises(ValueError, match="row 3"):
        embedder.encode(vectors)


def test_input_dim_is_for_vectors_only():
    with pytest.raises(ValueError, match=r"shape .* 5"):
        Tensors(5)
    for tta in ({"flip_tta": True}, {"tta_crops": [0.5]}):
        with pytest.raises(ValueError, match="is for images"):
            Embedder.create("vectors", 4, input_dim=7, **tta)
    with pytest.raises(ValueError, match="needs input_dim"):
        Embedder.create("vectors", 4)
    with pytest.raises(ValueError, match="takes images"):
        Embedder.create("small_convnet", 4, input_dim=3, weights="none")
