"""Damaged and malicious embedder files: an error message, never a wrong embedder."""

import copy
import json
import math
import resource
import shutil
import sys
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry.models import Embedder, WeightsError

EXTREMES = [
    *(0, -1, -5, 1, 2, 4096, 65536, 10**6, 10**12, 10**100, 1e-300, 1e300, math.nan, math.inf),
    *(None, True, False, "", "16", "x" * 5000, "../../etc/passwd", "\0", "\ud800", "auto"),
    *([], [1], [1, 1], [4096, 4096], [10**6, 10**6], [0.5] * 3, [1e-300] * 3, ["x"] * 3),
    *({}, {"x": 1}, [[[[[]]]]], "test_vit", "small_convnet", "test_resnet"),
]


@pytest.fixture(scope="module", autouse=True)
def memory_limit():
    """Limit the memory of the process."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 10**9, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    embedder = Embedder.create("small_convnet", 8, weights="none", image_size=24, tta_crops=[0.9])
    return embedder.save(
        tmp_path_factory.mktemp("saved") / "e",
        class_names=["a", "Bär"],
        metrics={"map@r": 0.5},
        recipe={"evaluation": {"batch_size": 16}},
    )


def embed(embedder):
    pixels = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0)) * 255
    return embedder.embed(pixels)


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "e")


def load(folder):
    """Return the embedder and "", or None and the error message."""
    try:
        return Embedder.load(folder), ""
    except ValueError as error:
        return None, str(error)


def places(value, path=()):
    """Yield the path of every value in a document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def at(document, path):
    for key in path:
        document = document[key]
    return document


def put(document, path, value):
    at(document, path[:-1])[path[-1]] = value


def check_message(message, folder):
    assert str(folder) in message or "unknown backbone" in message
    assert len(message) < 1500


def check_rejected(folder, text):
    embedder, message = load(folder)
    assert embedder is None
    check_message(message, folder)
    assert text in message
    assert "not enough memory" not in message


@settings(max_examples=50)
@given(data=st.data())
def test_mutated_descriptions(saved, tmp_path_factory, data):
    """Moved, removed and extreme values, without a checksum."""
    document = json.loads((saved / "embedder.json").read_text())
    del document["checksum"]
    original = copy.deepcopy(document)
    spots = [path for path in places(document) if path]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(spots))
        kind = data.draw(st.sampled_from(["extreme", "swap", "remove"]))
        try:
            if kind == "extreme":
                put(document, path, data.draw(st.sampled_from(EXTREMES)))
            elif kind == "swap":
                other = data.draw(st.sampled_from(spots))
                one, two = (copy.deepcopy(at(document, place)) for place in (path, other))
                put(document, path, two)
                put(document, other, one)
            else:
                del at(document, path[:-1])[path[-1]]
        except (KeyError, IndexError, TypeError):  # removed by the previous change
            continue
    folder = tmp_path_factory.getbasetemp() / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    (folder / "embedder.json").write_text(json.dumps(document))
    embedder, message = load(folder)
    if embedder is None:
        check_message(message, folder)
        return
    for part in ("architecture", "preprocessing"):
        loaded = json.loads(json.dumps(asdict(getattr(embedder, part))))
        expected = {key: value for key, value in document[part].items() if value != "auto"}
        assert loaded | expected == loaded
    if all(document[part] == original[part] for part in ("architecture", "preprocessing")):
        assert torch.equal(embed(embedder), embed(Embedder.load(saved)))


@settings(max_examples=60)
@given(
    weights=st.booleans(),
    part=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    how=st.sampled_from(["flip", "cut", "insert", "delete", "double"]),
)
def test_damaged_bytes(saved, tmp_path_factory, weights, part, bit, how):
    """Flipped bits and missing parts, anywhere in either file, are detected."""
    folder = tmp_path_factory.getbasetemp() / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    (file,) = folder.glob("*.safetensors" if weights else "embedder.json")
    content = bytearray(file.read_bytes())
    place = int(part * len(content))
    match how:
        case "flip":
            content[place] ^= 1 << bit
        case "cut":
            del content[place:]
        case "insert":
            content[place:place] = bytes([bit * 30])
        case "delete":
            del content[place]
        case "double":
            content += content[place:]
    file.write_bytes(content)
    embedder, message = load(folder)
    if embedder is None:
        check_message(message, folder)
    else:  # only layout and the key of the checksum may change
        assert not weights
        before, now = (json.loads((path / "embedder.json").read_text()) for path in (saved, folder))
        known = [key for key in before if key != "checksum"]
        assert {key: now[key] for key in known} == {key: before[key] for key in known}


def edit(folder, changes):
    """Change values of embedder.json, by dotted path, and remove its checksum."""
    document = json.loads((folder / "embedder.json").read_text())
    document.pop("checksum", None)
    for path, value in changes.items():
        put(document, path.split("."), value)
    (folder / "embedder.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (100_000 * "[", "nested too deeply"),
        (100_000 * '{"a":', "nested too deeply"),
        ('{"format": ' + 5000 * "9" + "}", "is damaged"),
        ("hello", "is damaged"),
        ("", "is damaged"),
        ("[]", "does not describe a proximetry embedder"),
    ],
    ids=["brackets", "objects", "digits", "text", "empty", "list"],
)
def test_invalid_documents(folder, text, message):
    (folder / "embedder.json").write_text(text)
    check_rejected(folder, message)
    check_rejected(folder, str(folder / "embedder.json"))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 99, "version 99"),
        ("format", "other", "embedder"),
        ("tensors", {"file": "../../etc/passwd"}, "weights file"),
        ("tensors", None, "weights file"),
        ("class_names", 7, "class_names"),
        ("weights", {}, "damaged"),
        ("architecture", None, "architecture"),
        ("architecture", {"backbone": "small_convnet"}, "damaged"),
        ("architecture.similarity", "?", "similarity"),
        ("architecture.tta_crops", [2], "tta_crops"),
        ("architecture.backbone", "hf-hub:x/y", "unknown backbone"),
        ("architecture.backbone", "test_efficientnet", "do not fit"),
        ("architecture.dim", 10**12, "dim"),
        ("architecture.dim", 65_536, "do not fit"),
        ("architecture.pooling", "flatten", "do not fit"),
        ("architecture.normalize", 1, "normalize"),
        ("preprocessing", {}, "damaged"),
        ("preprocessing.crop", [10**6, 10**6], "crop"),
        ("preprocessing.resize", 10**12, "resize"),
        ("preprocessing.std", [1e-300, 1, 1], "std"),
        ("preprocessing.scale", math.inf, "scale"),
        ("preprocessing.mean", [10**400, 1, 1], "damaged"),
    ],
)
def test_invalid_settings(folder, path, value, message):
    edit(folder, {path: value})
    check_rejected(folder, message)


def test_missing_files(folder, tmp_path):
    check_rejected(tmp_path / "nowhere", "nowhere")
    check_rejected(tmp_path, "embedder.json")
    next(folder.glob("*.safetensors")).unlink()
    check_rejected(folder, "No such file")


def test_large_image_size_needs_no_memory_to_load(folder):
    edit(folder, {"preprocessing.crop": [4096, 4096], "preprocessing.resize": 4096})
    assert Embedder.load(folder).preprocessing.crop == (4096, 4096)


def test_create_rejects_damaged_weights_of_an_embedder(folder):
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="checksum"):
        Embedder.create("small_convnet", 8, weights=folder)


def test_network_far_larger_than_its_weights_is_rejected(folder):
    network = {"architecture.backbone": "vit_giant_patch14_224", "architecture.pooling": "token"}
    edit(folder, {**network, "preprocessing.crop": [224, 224], "preprocessing.resize": 224})
    check_rejected(folder, "weights, the file")
