import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from proximetry.faces import open_embedder
from proximetry.models import Embedder, Preprocessing
from tests.models import transformers  # noqa: F401 (importing registers tiny_dinov3)

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
    pytest.skip("the extra 'onnx' needs torch 2.9", allow_module_level=True)
pytest.importorskip("onnxscript")


def run(path, pixels):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])


TTA = {"flip_tta": True, "tta_crops": (0.875, 0.6)}


@pytest.mark.parametrize(
    ("backbone", "settings"),
    [
        ("tiny_dinov3", {"normalize": False, "pooling": "cls-avg"}),
        ("small_convnet", {"pooling": "gem-learned", "layer_norm": True, **TTA}),
        ("small_convnet", {"bits": 16, "resize": 70, "squash": True}),
    ],
)
def test_exported_graph_equals_torch(tmp_path, capfd, backbone, settings):
    torch.manual_seed(0)
    embedder = Embedder.create(backbone, 8, weights="none", image_size=64, **settings)
    embedder.train()
    assert embedder.export_onnx(tmp_path / "e.onnx") == tmp_path / "e.onnx"
    assert "constant folding" not in "".join(capfd.readouterr())
    assert embedder.training
    embedder.eval()
    for batch in (1, 5):
        pixels = torch.randint(0, 256, (batch, 3, 64, 64)).float()
        with torch.inference_mode():
            expected = embedder(embedder.preprocessing.normalize(pixels))
        torch.testing.assert_close(run(tmp_path / "e.onnx", pixels), expected, rtol=1e-3, atol=1e-4)
    model = onnx.load(tmp_path / "e.onnx")
    props = {entry.key: entry.value for entry in model.metadata_props}
    before, inside = json.loads(props["preprocessing"]), json.loads(props["normalization"])
    assert before.keys() == {"resize", "crop", "interpolation"}
    assert Preprocessing.from_json({**before, **inside}) == embedder.preprocessing
    assert "must not be applied again" in props["input"]
    assert ("aspect ratio" in props["resize"]) == ("squash" in settings)
    assert json.loads(props["architecture"]) == embedder.architecture.to_json()
    assert props["similarity"] == ("cosine" if embedder.architecture.normalize else "euclidean")
    assert f"[batch, {embedder.dim}]" in props["output"]
    assert ("of unit length" in props["output"]) == embedder.architecture.normalize
    assert ("numpy.packbits" in props["output"]) == (embedder.bits is not None)
    assert json.loads(props["versions"])["torch"] == torch.__version__
    assert props["fingerprint"] == embedder.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == ["e.onnx"]
    again = open_embedder(tmp_path / "e.onnx")  # reads the metadata
    assert again.flip_tta == embedder.architecture.flip_tta
    assert again.preprocessing.resize == embedder.preprocessing.resize
    whole = pixels.to(torch.uint8)
    torch.testing.assert_close(again.embed(whole), embedder.embed(whole), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normalize", [True, False])
def test_onnx_file_is_an_embedder(tmp_path, normalize):
    torch.manual_seed(0)
    options = {"weights": "none", "image_size": 32, "normalize": normalize}
    embedder = Embedder.create("small_convnet", 8, **options).eval()
    loaded = Embedder.load(embedder.export_onnx(tmp_path / "e.onnx"))
    assert (loaded.dim, loaded.architecture.normalize) == (8, normalize)
    assert loaded.architecture.similarity == embedder.architecture.similarity
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    expected = embedder.encode([pixels, pixels[:35]])
    torch.testing.assert_close(loaded.encode([pixels, pixels[:35]]), expected, atol=1e-4, rtol=1e-3)
    again = Embedder.load(loaded.save(tmp_path / "saved"))  # the file itself is saved
    assert again.fingerprint() == loaded.fingerprint()
    assert torch.equal(again.encode(pixels), loaded.encode(pixels))


def test_onnx_file_with_external_data_is_an_embedder(tmp_path):
    embedder = Embedder.create("small_convnet", 8, weights="none", image_size=32).eval()
    model = onnx.load(embedder.export_onnx(tmp_path / "e.onnx"))
    onnx.save(model, tmp_path / "x.onnx", save_as_external_data=True, location="x.onnx.data")
    assert (tmp_path / "x.onnx.data").exists()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    found = Embedder.load(tmp_path / "x.onnx").encode(pixels)
    torch.testing.assert_close(found, embedder.encode(pixels), atol=1e-4, rtol=1e-3)


def test_export_rejects_a_graph_that_differs_from_torch(tmp_path, monkeypatch):
    wrong = SimpleNamespace(run=lambda _, feed: [np.zeros((len(feed["pixels"]), 8), np.float32)])
    embedder = Embedder.create("small_convnet", 8, weights="none")
    (tmp_path / "e.onnx").write_text("old")
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: wrong)
    with pytest.raises(ValueError, match="differs from torch"):
        embedder.export_onnx(tmp_path / "e.onnx")
    assert (tmp_path / "e.onnx").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_export_errors(tmp_path, monkeypatch):
    embedder = Embedder.create("small_convnet", 8, weights="none")
    with pytest.raises(ValueError, match=r"opset .* 9999"):
        embedder.export_onnx(tmp_path / "e.onnx", opset=9999)
    with pytest.raises(ValueError, match="nowhere"):
        embedder.export_onnx(tmp_path / "nowhere" / "e.onnx")
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **k: 1 / 0)
    with pytest.raises(ValueError, match="opset 18: division"):
        embedder.export_onnx(tmp_path / "e.onnx")
    with torch.no_grad():
        embedder.head.bias[2] = torch.nan
    with pytest.raises(ValueError, match=r"head\.bias"):
        embedder.export_onnx(tmp_path / "e.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match="extra 'onnx'"):
        embedder.export_onnx(tmp_path / "e.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dim", [None, 4])
def test_export_without_parameters_and_in_half_precision(tmp_path, dim):
    embedder = Embedder.create("vectors", dim, input_dim=16).half()
    embedder.export_onnx(tmp_path / "e.onnx", opset=20)
    assert onnx.load(tmp_path / "e.onnx").opset_import[0].version == 20
    vectors = torch.randn(3, 16)
    found = run(tmp_path / "e.onnx", vectors)
    torch.testing.assert_close(found, embedder.float().embed(vectors), rtol=1e-3, atol=1e-4)
