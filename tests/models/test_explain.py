"""Explanations: contributions against the formulas of each pooling, and where they are."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from proximetry._util.errors import UsageError
from proximetry.kernels.layers import fuse
from proximetry.models import Embedder
from proximetry.models.pca import with_pca

SIDE = 48


def small(backbone="small_convnet", dim=16, **settings):
    torch.manual_seed(0)
    settings = {"image_size": SIDE, **settings}
    return Embedder.create(backbone, dim, weights="none", **settings).eval()


def images(size=(SIDE, SIDE), seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(2)]


def check_sums(embedder, explanation, a, b):
    expected = float(embedder.similarity(a, b))
    assert explanation.similarity == pytest.approx(expected, abs=1e-5)
    for contributions, vectors, one in zip(
        explanation.contributions, explanation.vectors, (a, b), strict=True
    ):
        assert contributions.sum() == pytest.approx(expected, abs=1e-5)
        unit = embedder.encode(one).double().numpy()
        np.testing.assert_allclose(
            vectors.sum((0, 1)), unit / np.linalg.norm(unit), rtol=0, atol=1e-5
        )
    assert explanation.pairs.sum() == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(
        explanation.pairs.sum(1), explanation.contributions[0].ravel(), rtol=0, atol=1e-8
    )


def shares_of_max(flat):
    largest = flat == flat.max(1, keepdims=True)
    return flat * largest / largest.sum(1, keepdims=True)


def shares_of_gem(flat):
    cubes = np.maximum(flat, 1e-6) ** 3
    return cubes.mean(1, keepdims=True) ** (1 / 3) * cubes / cubes.sum(1, keepdims=True)


SHARES = {
    "avg": lambda flat: flat / flat.shape[1],
    "pre-logits": lambda flat: flat / flat.shape[1],
    "max": shares_of_max,
    "avg+max": lambda flat: flat / flat.shape[1] + shares_of_max(flat),
    "gem": shares_of_gem,
    "gem-learned": shares_of_gem,
}


@pytest.mark.parametrize("pooling", SHARES)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_vectors_equal_numpy_reference(pooling, layer_norm):
    embedder = small(pooling=pooling, layer_norm=layer_norm)
    nn.init.normal_(embedder.head.bias, std=0.1)
    a, b = images()
    a[:] = a[:1, :1]  # a constant image, of which many positions are equal
    explanation = embedder.explain(a, b)
    check_sums(embedder, explanation, a, b)
    weight, bias = (value.detach().double().numpy() for value in embedder.head.parameters())
    for image, found in zip((a, b), explanation.vectors, strict=True):
        with torch.no_grad():
            pixels = embedder.preprocessing.normalize(embedder.preprocessing.pixels(image)[None])
            features = embedder.backbone.forward_features(pixels)[0].double().numpy()
        shares = SHARES[pooling](features.reshape(len(features), -1)).T
        if layer_norm:
            deviation = np.sqrt(shares.sum(0).var() + 1e-5)
            shares = (shares - shares.mean(1, keepdims=True)) / deviation
        vectors = shares @ weight.T + bias / len(shares)
        vectors /= np.linalg.norm(vectors.sum(0))
        np.testing.assert_allclose(found.reshape(vectors.shape), vectors, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", ["avg", "max", "avg+max", "gem", "flatten", "auto"])
@pytest.mark.parametrize(
    "augmentation",
    [
        {"flip_tta": True},
        {"tta_crops": (0.8,)},
        {"tta_crops": (0.875, 0.6), "flip_tta": True, "layer_norm": True},
    ],
)
def test_contributions_sum_to_cosine_with_augmentation(pooling, augmentation):
    embedder = small(pooling=pooling, normalize=False, similarity="cosine", **augmentation)
    a, b = images((60, 90))
    check_sums(embedder, embedder.explain(a, b), a, b)


def test_flip_augmentation_mirrors_positions():
    embedder = small(flip_tta=True)
    a, b = images()
    explanation, mirrored = embedder.explain(a, b), embedder.explain(a[:, ::-1], b[:, ::-1])
    for one, other in zip(explanation.contributions, mirrored.contributions, strict=True):
        np.testing.assert_allclose(one, other[:, ::-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "backbone",
    [
        *("test_resnet", "test_efficientnet", "test_convnext", "test_convnext3", "test_byobnet"),
        *("test_mambaout", "test_nfnet", "test_vit2", "test_vit4", "mobilenetv3_small_050"),
        *("mobilenetv4_conv_small_035", "bn_inception"),
    ],
)
def test_contributions_sum_to_cosine_for_backbones(backbone):
    embedder = small(backbone, image_size=None if "vit" in backbone else 64)
    a, b = images((80, 100))
    explanation = embedder.explain(a, b)
    check_sums(embedder, explanation, a, b)
    # The even share of what no position accounts for, such as biases, is not the whole.
    assert explanation.vectors[0].std((0, 1)).max() > 0


def test_layer_norm_after_pooling_keeps_its_statistics():
    embedder = small("test_convnext", image_size=64)
    norm = embedder.backbone.head.norm
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    a, b = images((64, 64))
    found, _ = embedder.explain(a, b).vectors
    with torch.no_grad():
        pixels = embedder.preprocessing.normalize(embedder.preprocessing.pixels(a)[None])
        features = embedder.backbone.forward_features(pixels)[0].flatten(1).T.double()
        shares = features / len(features)
        deviation = (shares.sum(0).var(unbiased=False) + norm.eps).sqrt()
        shares = (shares - shares.mean(1, keepdim=True)) / deviation * norm.weight
        head = embedder.head.double()
        vectors = shares @ head.weight.T
        rest = norm.bias.double() @ head.weight.T + head.bias
        vectors += rest / len(vectors)
        vectors /= vectors.sum(0).norm()
    np.testing.assert_allclose(found.reshape(vectors.shape), vectors, rtol=0, atol=1e-5)


def test_contributions_sum_to_cosine_with_pca_and_fused_layers():
    embedder = small("test_efficientnet", image_size=64)
    a, b = images((64, 64))
    reduced = with_pca(embedder, torch.linalg.qr(torch.randn(16, 4)).Q.T)
    check_sums(reduced, reduced.explain(a, b), a, b)
    before = embedder.explain(a, b).contributions
    fuse(embedder)
    explanation = embedder.explain(a, b)
    check_sums(embedder, explanation, a, b)
    np.testing.assert_allclose(explanation.contributions[0], before[0], rtol=0, atol=1e-6)


def with_patch(patch, left, top):
    image = np.full((SIDE, SIDE, 3), 128, np.uint8)
    image[top : top + len(patch), left : left + len(patch)] = patch
    return image


@pytest.mark.parametrize("pooling", ["avg", "max", "gem"])
def test_matches_find_shared_patch(pooling):
    patch = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    embedder = small(pooling=pooling)
    explanation = embedder.explain(with_patch(patch, 4, 4), with_patch(patch, 28, 24))
    best, *others = explanation.matches(4)
    for box, (left, top) in ((best.a, (4, 4)), (best.b, (28, 24))):
        assert left - 4 <= box[0] < box[2] <= left + 20
        assert top - 4 <= box[1] < box[3] <= top + 20
    assert best.contribution >= max((match.contribution for match in others), default=0)
    assert explanation.place(0, best.a) == "top left"
    for number, contributions in enumerate(explanation.contributions):
        y, x = np.unravel_index(contributions.argmax(), contributions.shape)
        left, top = ((4, 4), (28, 24))[number]
        assert left <= 4 * x < left + 16
        assert top <= 4 * y < top + 16


def test_matches_do_not_overlap_and_are_pairs():
    a, b = images()
    explanation = small().explain(a, b)
    matches = explanation.matches(20)
    assert len(matches) > 3
    values = [match.contribution for match in matches]
    assert values == sorted(values, reverse=True)
    for boxes in zip(*[(match.a, match.b) for match in matches], strict=True):
        covered = np.zeros((SIDE, SIDE), int)
        for left, top, right, bottom in boxes:
            covered[round(top) : round(bottom), round(left) : round(right)] += 1
        assert covered.max() == 1
    first, pairs = matches[0], explanation.pairs.reshape(12, 12, 12, 12)
    rows = [slice(round(box[1] / 4), round(box[3] / 4)) for box in first[:2]]
    columns = [slice(round(box[0] / 4), round(box[2] / 4)) for box in first[:2]]
    total = pairs[rows[0], columns[0], rows[1], columns[1]].sum()
    assert first.contribution == pytest.approx(total)


@pytest.mark.parametrize("squash", [False, True])
def test_boxes_are_in_pixels_of_the_images(squash, tmp_path):
    embedder = small(resize=60, squash=squash)
    upright = Image.fromarray(images((100, 200))[0])
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    upright.save(path, exif=exif)
    explanation = embedder.explain(upright, path)
    visible = (20.0, 10.0, 180.0, 90.0) if squash else (60.0, 10.0, 140.0, 90.0)
    np.testing.assert_allclose(explanation.boxes[0], visible)
    assert explanation.images[1].size == (100, 200)
    for match in explanation.matches():
        left, top, right, bottom = match.a
        assert visible[0] <= left < right <= visible[2] + 1e-9
        assert visible[1] <= top < bottom <= visible[3] + 1e-9


def test_image_shows_both_images():
    a, b = images()
    picture = small().explain(a, b).image(8, side=100)
    assert picture.mode == "RGB"
    assert picture.height > 100
    assert picture.width > 200


class Custom(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small("test_vit", image_size=None), "has a class token"),
        (lambda: small("test_vit", image_size=None, pooling="cls-avg"), "has a class token"),
        (lambda: small("test_vit3", image_size=None), "this network calls (expand|softmax)"),
        (lambda: small(similarity="euclidean"), "is euclidean"),
        (lambda: Embedder.create("vectors", 8, input_dim=4, weights="none"), "vectors of 4"),
        (lambda: Embedder.wrap(Custom(), small().preprocessing, 3), "not an ONNX file or a module"),
    ],
)
def test_unsupported_embedders_raise(make, message):
    a, b = images((200, 200))
    with pytest.raises(UsageError, match=message):
        make().explain(a, b)


def test_command_explains_two_images(tmp_path):
    small().save(tmp_path / "model")
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file, pixels in zip(files, images(), strict=True):
        Image.fromarray(pixels).save(file)

    def call(*words):
        command = [sys.executable, "-m", "proximetry", "explain", *map(str, words)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    out = tmp_path / "why.webp"
    found = call(*files, "--model", tmp_path / "model", "--out", out)
    assert found.returncode == 0, found.stderr
    cosine = small().explain(*files).similarity
    assert found.stdout.startswith(f"cosine {cosine:.4f}\n  1. ")
    assert "of a.png (x " in found.stdout
    assert f"image: {out}" in found.stdout
    with Image.open(out) as picture:
        assert picture.format == "WEBP"
    wrong = call(*files, "--model", tmp_path / "model", "--out", files[0])
    assert wrong.returncode == 2
    assert "is an input of this command" in wrong.stderr
