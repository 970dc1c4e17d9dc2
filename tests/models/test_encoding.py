import copy
import io
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as T

from proximetry.models import Embedder, evaluation_mode, freeze_batchnorm
from proximetry.models.embedder import _center_zoom, extract_features


@pytest.fixture(scope="module")
def embedder():
    torch.manual_seed(0)
    return Embedder.create("test_resnet", 8, weights="none", image_size=64, resize=72).eval()


def image_of(seed, height=80, width=100):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def reference(embedder, image):
    pixels = embedder.preprocessing
    steps = T.Compose(
        [
            T.Resize(pixels.resize, InterpolationMode(pixels.interpolation)),
            T.CenterCrop(pixels.crop),
            T.PILToTensor(),
            T.ToDtype(torch.float32, scale=True),
            T.Normalize(pixels.mean, pixels.std),
        ]
    )
    with torch.inference_mode():
        return embedder(steps(image.convert("RGB"))[None])[0]


def test_encode_equals_torchvision(embedder):
    images = [image_of(seed, 50 + 9 * seed, 120 - 8 * seed) for seed in range(7)]
    found = embedder.encode(images, batch_size=3)
    assert found.shape == (7, 8)
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    assert not found.is_inference()
    assert embedder.encode([], concat_flip=True).shape == (0, 16)
    expected = torch.stack([reference(embedder, image) for image in images])
    for batch in (1, 2, 64):
        torch.testing.assert_close(embedder.encode(images, batch), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_encode_of_all_image_sources(embedder, tmp_path):
    image = image_of(1)
    image.save(tmp_path / "a.png")
    array = np.asarray(image).copy()
    path = tmp_path / "a.png"
    sources = [path, str(path), path.read_bytes(), image, array, torch.from_numpy(array)]
    vectors = embedder.encode(sources)
    assert torch.allclose(vectors, vectors[:1], atol=1e-6)
    stacked = embedder.encode(np.stack([array, array]))
    torch.testing.assert_close(stacked, vectors[:2])
    generated = embedder.encode(source for source in sources)
    assert torch.equal(generated, vectors)


def test_concat_flip(embedder):
    image = image_of(3)
    flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    both = embedder.encode([image], concat_flip=True)
    assert both.shape == (1, 16)
    torch.testing.assert_close(both[:, :8], embedder.encode([image]))
    torch.testing.assert_close(both[:, 8:], embedder.encode([flipped]), rtol=1e-3, atol=1e-4)
    averaged = copy.deepcopy(embedder)
    averaged.architecture = replace(embedder.architecture, flip_tta=True)
    with pytest.raises(ValueError, match="flip_tta"):
        averaged.encode([image], concat_flip=True)


@pytest.mark.parametrize("backbone", ["test_resnet", "bn_inception", "test_vit", "test_convnext"])
@pytest.mark.parametrize("tta", [{}, {"flip_tta": True, "tta_crops": (0.8,)}], ids=str)
def test_encode_and_embed_are_bit_equal(backbone, tta):
    """Pixels from files or a cache, in any memory format."""
    torch.manual_seed(0)
    size = None if backbone == "test_vit" else 64
    embedder = Embedder.create(backbone, 8, weights="none", image_size=size, layer_norm=True, **tta)
    images = [image_of(seed, 180 + seed, 170 + 2 * seed) for seed in range(5)]
    expected = embedder.encode(images, batch_size=2)
    pixels = torch.stack([embedder.preprocessing.pixels(image) for image in images])
    layouts = (torch.contiguous_format, torch.channels_last)
    embedder.train()
    for batches in [pixels.contiguous(memory_format=layout).split(2) for layout in layouts]:
        assert torch.equal(torch.cat([embedder.embed(batch) for batch in batches]), expected)
        features = [extract_features(embedder, batch) for batch in batches]
        assert torch.equal(torch.cat([embedder.project(part) for part in features]), expected)
    assert all(part.training for part in embedder.modules())
    assert not extract_features(embedder, pixels).requires_grad


def test_encode_ignores_autocast_and_takes_half_precision(embedder):
    images = [image_of(seed) for seed in range(3)]
    pixels = torch.stack([embedder.preprocessing.pixels(image) for image in images])
    encoded, embedded = embedder.encode(images), embedder.embed(pixels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(embedder.encode(images), encoded)
        assert torch.equal(embedder.embed(pixels), embedded)
    half = copy.deepcopy(embedder).to(torch.bfloat16).encode(images)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, encoded, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("margins", [(), (8, 16)])
@pytest.mark.parametrize("flip", [False, True])
def test_tta_averages_features_in_evaluation(embedder, flip, margins):
    several = copy.deepcopy(embedder)
    crops = tuple(1 - margin / 32 for margin in margins)
    several.architecture = replace(embedder.architecture, flip_tta=flip, tta_crops=crops)
    pixels = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    ready = embedder.preprocessing.normalize(pixels)
    with torch.no_grad():
        views = [ready]
        for margin in margins:
            center = ready[:, :, margin:-margin, margin:-margin]
            views.append(F.interpolate(center, (64, 64), mode="bilinear"))
        views += [view.flip(3) for view in views] if flip else []
        expected = torch.stack([embedder.features(view) for view in views]).mean(0)
    torch.testing.assert_close(extract_features(several, pixels), expected)
    trained = freeze_batchnorm(several).train()
    assert torch.equal(trained.features(ready), embedder.features(ready))


@given(
    sides=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    share=st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_zoomed_crop_is_centered(sides, share):
    torch.manual_seed(0)
    pixels = torch.randn(2, 3, *sides)
    found = _center_zoom(pixels, share)
    assert found.shape == pixels.shape
    for side in (2, 3):
        torch.testing.assert_close(_center_zoom(pixels.flip(side), share), found.flip(side))
    torch.testing.assert_close(
        _center_zoom(torch.ones(1, 3, *sides), share), torch.ones(1, 3, *sides)
    )


def test_encode_in_threads_restores_modes_and_statistics():
    torch.manual_seed(0)
    embedder = Embedder.create("test_resnet", 8, weights="none", image_size=64).train()
    embedder.head.eval()
    modes = [part.training for part in embedder.modules()]
    state = {key: value.clone() for key, value in embedder.state_dict().items()}
    lists = [[image_of(10 * number + seed) for seed in range(6)] for number in range(4)]
    expected = [embedder.encode(images, 2) for images in lists]
    together = Barrier(4)

    def encode(number):
        together.wait()
        return [embedder.encode(lists[number], 2) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for vectors, found in zip(expected, pool.map(encode, range(4)), strict=True):
            assert all(torch.equal(one, vectors) for one in found)
    with pytest.raises(ValueError, match="image 0"):
        embedder.encode(["missing.png"])
    assert [part.training for part in embedder.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in embedder.state_dict().items())


@given(st.data())
def test_evaluation_mode_nested_and_overlapping(data):
    """Contexts exit in any order, and networks share modules."""
    shared = nn.Dropout()
    networks = [nn.Sequential(shared, nn.Dropout()), nn.Sequential(nn.Dropout().eval(), shared)]
    modes = [part.training for network in networks for part in network.modules()]
    inside = []
    for _ in range(data.draw(st.integers(1, 12))):
        if inside and data.draw(st.booleans()):
            inside.pop(data.draw(st.integers(0, len(inside) - 1)))[1].__exit__(None, None, None)
        else:
            network = data.draw(st.sampled_from(networks))
            inside.append((network, evaluation_mode(network)))
            inside[-1][1].__enter__()
        assert not any(part.training for network, _ in inside for part in network.modules())
    for _, context in inside:
        context.__exit__(None, None, None)
    assert [part.training for network in networks for part in network.modules()] == modes


def test_encode_of_one_lazy_image_many_times(embedder):
    """Pillow decodes on first access, which only one thread may do."""
    file = io.BytesIO()
    image_of(1, 300, 300).save(file, "PNG")
    expected = embedder.encode([file.getvalue()])
    for _ in range(10):
        image = Image.open(file)
        assert torch.allclose(embedder.encode([image] * 8), expected, atol=1e-6)


def test_on_error_is_called_in_order_in_the_calling_thread(embedder, monkeypatch):
    read = type(embedder.preprocessing).pixels

    def slowly(self, source):
        time.sleep(0.05 if source == "first" else 0)
        return read(self, source)

    monkeypatch.setattr(type(embedder.preprocessing), "pixels", slowly)
    images = ["first", "other", image_of(1), image_of(2), "last", "least"]
    errors, seen = [], []
    embedder.encode(
        images, 2, on_error=lambda i, _: errors.append((i, get_ident())), progress=seen.append
    )
    assert errors == [(i, get_ident()) for i in (0, 1, 4, 5)]
    assert seen == [2, 4, 6]


def test_encode_reports_index_of_unreadable_images(embedder, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"image 1: .*bad\.jpg"):
        embedder.encode([image_of(1), tmp_path / "bad.jpg"])
    for wrong, message in (
        (torch.zeros(4, 4, 3), "uint8"),
        (torch.zeros(3, 9, 9, dtype=torch.uint8), "channels last"),
        (np.zeros((4, 4, 3)), "uint8"),
        (7, "int"),
    ):
        with pytest.raises(ValueError, match=f"image 0: .*{message}"):
            embedder.encode([wrong])


def test_encode_rejects_nonfinite_embeddings(embedder, tmp_path):
    broken = copy.deepcopy(embedder)
    with torch.no_grad():
        broken.head.weight[3, 2] = torch.nan
    image_of(1).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"image 0 \(.*a\.png\) has NaN .* head\.weight"):
        broken.encode([tmp_path / "a.png"], concat_flip=True)
    # A skipped image does not shift the indices of the others.
    skipped = []
    with pytest.raises(ValueError, match=r"image 1 \("):
        broken.encode(
            [b"no image", tmp_path / "a.png"], on_error=lambda index, _: skipped.append(index)
        )
    assert skipped == [0]
    overflowing = copy.deepcopy(embedder)
    with torch.no_grad():
        overflowing.head.weight.fill_(3e38)
    with pytest.raises(ValueError, match="overflows"):
        overflowing.encode([image_of(1)])


def test_encode_of_one_image_returns_one_vector(embedder, tmp_path):
    image = image_of(1)
    image.save(tmp_path / "a.png")
    pixels = np.asarray(image)
    (expected,) = embedder.encode([image])
    for one in (image, pixels, torch.from_numpy(pixels.copy()), tmp_path / "a.png"):
        torch.testing.assert_close(embedder.encode(one), expected)
    vectors = Embedder.create("vectors", 4, weights="none", input_dim=8)
    assert vectors.encode(np.ones(8, np.float32)).shape == (4,)
    assert vectors.encode(np.ones((1, 8), np.float32)).shape == (1, 4)


def test_encode_truncates_and_normalizes_again(embedder):
    images = [image_of(1), image_of(2)]
    whole, short = embedder.encode(images), embedder.encode(images, truncate_dim=3)
    torch.testing.assert_close(short, F.normalize(whole[:, :3]))
    assert embedder.encode(images[0], truncate_dim=3).shape == (3,)
    for dim in (0, 9, 2.5):
        with pytest.raises(ValueError, match=f"truncate_dim .* got {dim}"):
            embedder.encode(images, truncate_dim=dim)


def test_similarity_of_images_and_vectors(embedder):
    images = [image_of(1), image_of(2)]
    vectors = embedder.encode(images)
    found = embedder.similarity(images, images)
    torch.testing.assert_close(found, vectors @ vectors.T)
    assert embedder.similarity(images[0], images[1]).shape == ()
    torch.testing.assert_close(embedder.similarity(images[0], vectors), found[0])
    torch.testing.assert_close(embedder.similarity(vectors.numpy(), images[0]), found[:, 0])
    far = Embedder.create("vectors", None, normalize=False, weights="none", input_dim=2)
    assert far.similarity(torch.tensor([3.0, 4.0]), torch.zeros(1, 2)).tolist() == [-5.0]


def test_encode_rejects_bad_batch_sizes(embedder):
    for batch_size in (0, None, 1.5):
        with pytest.raises(ValueError, match=f"batch_size .* got {batch_size}"):
            embedder.encode([image_of(1)], batch_size=batch_size)
