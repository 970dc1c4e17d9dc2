import hashlib
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from proximetry.models import Embedder
from proximetry.models.storage import weights_name
from tests.interrupt import completes, kill_at
from tests.models import transformers  # noqa: F401 (importing registers tiny_dinov3)
from tests.models.test_weights import Harmful


def make(seed=0, backbone="test_resnet", **settings):
    torch.manual_seed(seed)
    embedder = Embedder.create(backbone, 8, weights="none", image_size=64, **settings)
    with torch.no_grad():
        for part in embedder.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.running_mean.normal_()
    return embedder


def equal(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize(
    ("backbone", "settings"),
    [
        ("test_resnet", {"pooling": "gem-learned", "layer_norm": True}),
        ("test_vit", {"similarity": "euclidean", "flip_tta": True, "tta_crops": [0.875, 0.5]}),
        ("test_convnext", {"pooling": "avg+max", "normalize": False}),
        ("sphereface20", {}),
        ("tiny_dinov3", {"pooling": "cls-avg"}),
        ("small_convnet", {"resize": 70}),
    ],
)
def test_save_and_load_are_bit_exact(tmp_path, backbone, settings):
    embedder = make(backbone=backbone, **settings).eval()
    embedder.save(tmp_path / "e")
    loaded = Embedder.load(tmp_path / "e")
    assert equal(embedder, loaded)
    assert loaded.architecture == embedder.architecture
    assert loaded.preprocessing == embedder.preprocessing
    assert loaded.weights == embedder.weights
    assert loaded.fingerprint() == embedder.fingerprint()
    assert not loaded.training
    pixels = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(loaded(pixels), embedder(pixels))


def test_created_and_loaded_parameters_are_trainable_in_inference_mode(tmp_path):
    own = torch.nn.Linear(3, 4)
    with torch.inference_mode():
        made = Embedder.create("small_convnet", np.int64(8), weights="none", image_size=32)
        made.save(tmp_path / "e")
        embedders = made, Embedder.load(tmp_path / "e"), Embedder.wrap(own, (3,), 4)
    assert not any(value.is_inference() for one in embedders for value in one.parameters())


def test_metadata_round_trip(tmp_path):
    embedder = make()
    names = ["Ä", "b", "\udcff\udc80", "\x00", "😀"]
    metrics = {"recall@1": np.float32(0.5), "curve": np.arange(3), "map": torch.tensor(0.25)}
    embedder.save(
        tmp_path / "e", class_names=names, metrics=metrics, recipe={"loss": {"alpha": 32}}
    )
    loaded = Embedder.load(tmp_path / "e")
    assert loaded.class_names == names
    assert loaded.metrics == {"recall@1": 0.5, "curve": [0, 1, 2], "map": 0.25}
    assert loaded.recipe == {"loss": {"alpha": 32}}
    loaded.save(tmp_path / "f", metrics={"recall@1": 0.75})
    again = Embedder.load(tmp_path / "f")
    assert (again.class_names, again.metrics) == (names, {"recall@1": 0.75})
    text = json.loads((tmp_path / "e" / "embedder.json").read_text())
    assert text["version"] == 1
    assert set(text["versions"]) == {"proximetry", "torch", "timm"}


def test_load_rejects_other_files(tmp_path, monkeypatch):
    """Also with a matching name, size and checksum; unpickling would run code."""
    monkeypatch.chdir(tmp_path)
    folder = make().save("e")
    description = json.loads((folder / "embedder.json").read_text())
    del description["checksum"]
    torch.save({"head.bias": Harmful()}, "torch.pt")
    harmful = pickle.dumps(Harmful()), Path("torch.pt").read_bytes()
    for content in (*harmful, b"", b"x" * 100, (10**15).to_bytes(8, "little") + b"{}"):
        digest = hashlib.sha256(content).hexdigest()
        description["tensors"] = {"sha256": digest, "bytes": len(content)}
        (folder / "embedder.json").write_text(json.dumps(description))
        (folder / weights_name(digest)).write_bytes(content)
        with pytest.raises(ValueError, match="not a safetensors file"):
            Embedder.load(folder)
    assert not Path("harmed").exists()


def test_load_preserves_random_state_in_threads_and_needs_no_hub(tmp_path, monkeypatch):
    folder = make().save(tmp_path / "e")
    monkeypatch.setattr("proximetry.models.weights._hub_file", lambda name: pytest.fail("hub"))
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Embedder.load, [folder] * 12))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_killed_save_keeps_the_old_embedder_or_the_new(tmp_path):
    old, new, folder = make(1), make(2), tmp_path / "e"
    loaded = []
    for event in range(1, 20):
        old.save(folder)

        def work(event=event):
            kill_at(event, folder)
            new.save(folder)

        if completes(work):
            break
        loaded.append(Embedder.load(folder))
    assert len(loaded) >= 5  # two files, their renames, one removal
    assert {equal(one, old) + 2 * equal(one, new) for one in loaded} == {1, 2}
    assert equal(Embedder.load(folder), new)
    assert len(list(folder.iterdir())) == 2  # partial files were removed


def test_save_rejects_folders_with_other_files_and_values_json_cannot_represent(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        make().save(tmp_path)
    (tmp_path / "embedder.json").write_text("{}")
    with pytest.raises(ValueError, match="no embedder"):
        make().save(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        make().save(tmp_path / "thesis.txt")
    assert (tmp_path / "embedder.json").read_text() == "{}"
    with pytest.raises(ValueError, match="JSON values"):
        make().save(tmp_path / "e", metrics={"x": object()})
    assert not (tmp_path / "e").exists()
    # Other files in the folder are kept.
    make().save(tmp_path / "e")
    (tmp_path / "e" / "README.md").write_text("mine")
    make(3).save(tmp_path / "e")
    assert (tmp_path / "e" / "README.md").read_text() == "mine"


def test_half_precision_and_channels_last_weights(tmp_path):
    half = make().to(torch.bfloat16)
    half.save(tmp_path / "half")
    loaded = Embedder.load(tmp_path / "half")
    assert loaded.head.weight.dtype == torch.float32
    assert torch.equal(loaded.head.weight, half.head.weight.float())
    model = Embedder.create("small_convnet", 8, weights="none")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(memory_format=torch.channels_last).save(tmp_path / "e")
    state = Embedder.load(tmp_path / "e").state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
