import copy
import hashlib
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from proximetry._util.machine import resolve_device
from proximetry.models import Embedder, GeM, freeze_batchnorm
from proximetry.models.pca import with_pca


def small(dim=16, **settings):
    return Embedder.create("test_resnet", dim, weights="none", image_size=64, **settings)


def gem(flat):
    return (np.maximum(flat, 1e-6) ** 3).mean(-1) ** (1 / 3)


POOLINGS = {
    "avg": lambda flat: flat.mean(-1),
    "max": lambda flat: flat.max(-1),
    "avg+max": lambda flat: flat.mean(-1) + flat.max(-1),
    "gem": gem,
    "gem-learned": gem,
}


@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_forward_equals_numpy_reference(kind, layer_norm, normalize):
    torch.manual_seed(1)
    embedder = small(pooling=kind, layer_norm=layer_norm, normalize=normalize).eval()
    pixels = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        features = embedder.backbone.forward_features(pixels).double().numpy()
        pooled = POOLINGS[kind](features.reshape(*features.shape[:2], -1))
        found = embedder(pixels).double().numpy()
    if layer_norm:
        spread = np.sqrt(pooled.var(-1, keepdims=True) + 1e-5)
        pooled = (pooled - pooled.mean(-1, keepdims=True)) / spread
    head = embedder.head
    vectors = pooled @ head.weight.detach().double().numpy().T + head.bias.detach().numpy()
    if normalize:
        vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    np.testing.assert_allclose(found, vectors, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dim", [None, 0])
def test_embedder_without_head_returns_features(dim):
    embedder = small(dim, normalize=False).eval()
    pixels = torch.randn(2, 3, 64, 64)
    assert embedder.dim == 96
    assert torch.equal(embedder(pixels), embedder.features(pixels))
    assert embedder.parameter_parts()["head"] == []


def test_head_initialization_and_default_similarity():
    torch.manual_seed(0)
    head = small(512).head
    assert torch.count_nonzero(head.bias) == 0
    assert float(head.weight.detach().std()) == pytest.approx(math.sqrt(2 / 512), rel=0.02)
    assert small().architecture.similarity == "cosine"
    assert small(normalize=False).architecture.similarity == "euclidean"
    assert small(normalize=False, similarity="cosine").architecture.similarity == "cosine"


@pytest.mark.parametrize("power", [-90, -45, 0, 63, 100])
def test_normalization_of_huge_and_tiny_vectors(power):
    """Squares of these norms overflow or underflow float32."""
    embedder = small(8).eval()
    pixels = torch.randn(3, 3, 48, 48)
    expected = embedder(pixels).detach()
    with torch.no_grad():
        embedder.head.weight *= 2.0**power
    vectors = embedder(pixels)
    assert torch.allclose(vectors, expected, atol=1e-6)
    vectors[0, 0].backward()
    assert torch.isfinite(embedder.head.weight.grad).all()
    if power == 100:
        exported = torch.export.export(embedder, (pixels,)).module()
        assert torch.equal(exported(pixels), vectors)


def test_half_precision_and_gradient_of_gem():
    with torch.autocast("cpu", torch.bfloat16):
        vectors = small()(torch.randn(2, 3, 64, 64))
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    pool = GeM(learned=True).double()
    features = (torch.rand(2, 3, 4, 4, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(pool, (features,))
    large = torch.full((1, 1, 2, 2), 100.0, dtype=torch.float16)
    assert float(GeM()(large)) == pytest.approx(100.0, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "pooling", "head"),
    [
        ("test_resnet", "gem-learned", 3),
        *((name, "auto", 2) for name in ("test_resnet", "test_convnext", "test_vit")),
    ],
)
def test_parameter_parts_cover_trainable_parameters(name, pooling, head):
    embedder = Embedder.create(name, 8, weights="none", pooling=pooling)
    parts = embedder.parameter_parts()
    listed = [id(value) for part in parts.values() for value in part]
    learning = [id(value) for value in embedder.parameters() if value.requires_grad]
    assert sorted(listed) == sorted(learning)
    assert len(parts["head"]) == head
    embedder(torch.randn(4, 3, *embedder.preprocessing.crop)).pow(3).sum().backward()
    assert all(value.grad is not None for part in parts.values() for value in part)
    for value in parts["backbone"]:
        value.requires_grad_(False)
    assert len(embedder.parameter_parts()["backbone"]) == len(parts["backbone"]) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": -1}, "dim .* -1"),
        ({"dim": 8.0}, "dim .* 8.0"),
        ({"image_size": 0}, "image_size .* 0"),
        ({"resize": -3}, "resize .* -3"),
        ({"image_size": 64, "resize": 32}, "resize 32"),
        ({"pooling": "mean"}, "pooling .* 'mean'"),
        ({"similarity": "dot"}, "similarity .* 'dot'"),
        ({"bits": 63}, "bits .* 63"),
        ({"bits": 8192}, "bits .* 8192"),
        ({"bits": 0}, "bits .* 0"),
        ({"bits": 64, "similarity": "euclidean"}, "bits .* 'euclidean'"),
        *(({"tta_crops": bad}, "tta_crops") for bad in (0.5, [1.0], [0.0], [True], 17 * [0.5])),
    ],
    ids=str,
)
def test_create_rejects_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Embedder.create("test_resnet", **{"weights": "none", **settings})


def norms(module):
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "small_convnet"])
def test_frozen_batchnorm_keeps_statistics_in_train_mode(name):
    embedder = Embedder.create(name, 8, weights="none", image_size=64)
    assert freeze_batchnorm(freeze_batchnorm(embedder)) is embedder
    before = {key: value.clone() for key, value in embedder.state_dict().items()}
    for model in (embedder, copy.deepcopy(embedder)):
        model.train()
        assert norms(model)
        model.encode([np.full((64, 64, 3), gray, np.uint8) for gray in (0, 200)])
        assert model.training
        model(torch.randn(4, 3, 64, 64) * 3 + 1)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert all(part.weight.requires_grad for part in norms(model))
    pixels = torch.randn(4, 3, 64, 64)
    assert torch.equal(embedder.train()(pixels), embedder.eval()(pixels))


def test_freeze_batchnorm_affine():
    embedder = freeze_batchnorm(small(), affine=True)
    assert not any(value.requires_grad for part in norms(embedder) for value in part.parameters())
    assert embedder.head.weight.requires_grad


def test_binary_codes_of_embedder_with_bits(tmp_path):
    torch.manual_seed(0)
    embedder = small(bits=24)
    assert (embedder.bits, embedder.dim) == (24, 24)
    images = [np.random.default_rng(i).integers(0, 256, (70, 80, 3), np.uint8) for i in range(5)]
    vectors = embedder.encode(images)
    codes = embedder.encode(images, batch_size=2, binary=True)
    assert codes.dtype == torch.uint8
    assert codes.shape == (5, 3)
    np.testing.assert_array_equal(np.unpackbits(codes.numpy(), axis=1), vectors.numpy() > 0)
    assert embedder.encode([], binary=True).shape == (0, 3)
    again = Embedder.load(embedder.save(tmp_path / "embedder"))
    assert again.bits == 24
    assert again.fingerprint() == embedder.fingerprint()
    plain = small(24)
    plain.load_state_dict(embedder.state_dict())
    assert plain.bits is None
    assert with_pca(embedder, torch.eye(24)[:8]).bits is None
    assert plain.fingerprint() != embedder.fingerprint()


def test_fingerprint_and_saved_architecture_are_stable(tmp_path):
    embedder = small(24)
    embedder.save(tmp_path / "embedder")
    saved = json.loads((tmp_path / "embedder" / "embedder.json").read_text())
    assert saved["architecture"] == {
        "backbone": "test_resnet",
        "dim": 24,
        "pooling": "pre-logits",
        "layer_norm": False,
        "normalize": True,
        "flip_tta": False,
        "similarity": "cosine",
    }
    made_of = [saved["architecture"], saved["preprocessing"]]
    whole = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode())
    for name, value in sorted(embedder.state_dict().items()):
        plain = value.float() if value.is_floating_point() else value
        whole.update(f"{name} {plain.dtype} {list(plain.shape)}\0".encode())
        whole.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy())
    assert embedder.fingerprint() == whole.hexdigest()


def test_default_device_is_the_best_one(monkeypatch):
    def devices(gpus, mps):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        return str(resolve_device()), str(resolve_device(float64=True))

    assert devices(2, False) == ("cuda", "cuda")
    assert devices(0, True) == ("mps", "cpu")
    assert devices(0, False) == ("cpu", "cpu")
    with pytest.raises(ValueError, match=r"'mps'\. Available: cpu"):
        resolve_device("mps")
