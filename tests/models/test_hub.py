"""Push to and download from a hub server in this process."""

import json
import os
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from PIL import Image

from proximetry import cli
from proximetry.faces import open_embedder
from proximetry.models import Embedder, hub
from tests.models.hub_server import READER, WRITER, Hub
from tests.models.test_storage import equal
from tests.models.test_storage import make as make_embedder

REPO = "lab/jays"
make = partial(make_embedder, backbone="small_convnet")
METRICS = {
    "protocol": "held_out",
    "epoch": 3,
    "held_out": {
        "recall@1": 0.75,
        "map@r": 0.5,
        "queries": 12.0,
        "with_distractors": {"map@r": 0.25},
    },
    "test": {"recall@1": np.float32(0.625), "mrr": float("nan"), "dims": {"4": {"recall@1": 0.5}}},
}
RECIPE = {
    "name": "mine",
    "data": {"dataset": "cub"},
    "loss": {"name": "proxy_anchor"},
    "training": {"epochs": 4, "seed": 0},
}


def use_endpoint(monkeypatch, address):
    """As HF_ENDPOINT at import."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def server(tmp_path, monkeypatch):
    running = Hub()
    use_endpoint(monkeypatch, running.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    yield running
    running.close()


def trained(**settings):
    embedder = make(**settings).eval()
    embedder.metrics, embedder.recipe = METRICS, RECIPE
    embedder.class_names = [f"class {i}" for i in range(1200)]
    return embedder


def test_push_and_download(server, tmp_path):
    embedder = trained(flip_tta=True)
    assert embedder.push_to_hub(REPO, license="apache-2.0") == f"{server.address}/{REPO}"
    found = Embedder.from_hub(REPO)
    assert equal(embedder, found)
    assert not found.training
    assert found.fingerprint() == embedder.fingerprint()
    assert (found.recipe, found.class_names) == (RECIPE, embedder.class_names)
    server.commit(REPO, {**server.files(REPO), "run.py": b"1 / 0", "embedder/embedder.json": b"{"})
    assert equal(Embedder.from_hub(REPO), embedder)
    files = {path.name for path in tmp_path.glob("cache/*/snapshots/*/*")}
    assert {name.partition("-")[0] for name in files} == {"embedder", "embedder.json"}
    images = [np.full((40, 30, 3), gray, np.uint8) for gray in (0, 200)]
    assert torch.equal(found.encode(images), embedder.encode(images))


def test_push_replaces_an_embedder_in_one_commit(server):
    first, second = trained(), make(seed=1)
    first.push_to_hub(REPO)
    server.files(REPO)["notes.txt"] = b"mine"
    before = server.sha(REPO)
    second.push_to_hub(REPO)
    assert len(server.commits[REPO]) == 3  # the first created the repository
    names = [re.sub("-[0-9a-f]+", "", name) for name in sorted(server.files(REPO))]
    stored = ["embedder.safetensors", "embedder.json"]
    assert names == [".gitattributes", "README.md", *stored, "notes.txt"]
    assert equal(Embedder.from_hub(REPO), second)
    assert equal(Embedder.from_hub(REPO, revision=before), first)


def test_model_card(server):
    embedder = trained(tta_crops=[0.875])
    embedder.push_to_hub(REPO, license="cc-by-4.0")
    card = ModelCard(server.files(REPO)["README.md"].decode())
    data = card.data.to_dict()
    assert data["library_name"] == "proximetry"
    assert data["license"] == "cc-by-4.0"
    assert {"metric-learning", "image-retrieval"} <= set(data["tags"])
    (model,) = data["model-index"]
    assert model["name"] == "jays"
    found = {
        (one["dataset"]["split"], one["dataset"].get("config"), metric["type"]): metric["value"]
        for one in model["results"]
        for metric in one["metrics"]
    }
    assert found == {
        ("held_out", None, "recall@1"): 0.75,
        ("held_out", None, "map@r"): 0.5,
        ("held_out", "with_distractors", "map@r"): 0.25,
        ("test", None, "recall@1"): 0.625,
        ("test", "dims 4", "recall@1"): 0.5,
    }
    for words in (
        "trained on 1 200 classes",
        "**Intended use**",
        "selected on classes held out of training",
        "| test set | recall@1 | 0.6250 |",
        "| loss | proxy_anchor |",
        "| dataset | cub |",
        "| tta_crops | 0.875 |",
        f"| fingerprint | {embedder.fingerprint()} |",
        f"torch {torch.__version__}",
        f'Embedder.from_hub("{REPO}")',
    ):
        assert words in card.text, words
    code = card.text.partition("```python")[2].partition("```")[0]
    compile(code, "card", "exec")


@pytest.mark.parametrize("odd", ["a|b", "x\n---\ny: z", "<script>", "`rm`", {"deep": [1]}, 7, None])
def test_model_card_escapes_recipe_values(odd):
    embedder = make()
    embedder.recipe = {"name": odd, "data": odd, "loss": {"name": odd}, "training": []}
    embedder.metrics = {str(odd): {"recall@1": 0.5}, "test": {str(odd): 1}}
    text = hub.make_card(embedder, REPO, None)
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["library_name"] == "proximetry"
    assert "<script>" not in body
    assert "initial weights | random" in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(line.count("|") in (3, 4) for line in rows)


def test_tokens_and_private_repositories(server, monkeypatch, tmp_path):
    embedder = make()
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="hf auth login"):
        embedder.push_to_hub(REPO)
    assert server.requests == []
    for token, message in ((READER, "lab/jays: .*403"), ("hf_old", "lab/jays")):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ValueError, match=message):
            embedder.push_to_hub(REPO)
    assert server.commits == {}
    monkeypatch.setenv("HF_TOKEN", WRITER)
    embedder.push_to_hub(REPO, private=True)
    assert server.private == {REPO}
    assert equal(Embedder.from_hub(REPO), embedder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="lab/jays"):
        Embedder.from_hub(REPO)


def test_invalid_repo_ids(server):
    embedder = make()
    for name in ("jays", "a/b/c", "lab/", "", "../lab/jays", "lab/j ays", "a/é"):
        for call in (Embedder.from_hub, embedder.push_to_hub):
            with pytest.raises(ValueError, match="owner/name"):
                call(name)
    assert server.requests == []


def test_missing_repository_revision_and_embedder(server):
    with pytest.raises(ValueError, match="lab/none"):
        Embedder.from_hub("lab/none")
    make().push_to_hub(REPO)
    with pytest.raises(ValueError, match=r"lab/jays: .*404"):
        Embedder.from_hub(REPO, revision="v2")
    server.commit("lab/other", {"README.md": b"", "model.safetensors": b""})
    with pytest.raises(ValueError, match=r"lab/other: .*embedder\.json"):
        Embedder.from_hub("lab/other")
    with pytest.raises(ValueError, match=r'Invalid metadata in README\.md\.\s+- "license" is'):
        make().push_to_hub(REPO, license="no-such")
    assert len(server.commits[REPO]) == 2


def test_offline_download_uses_the_cache(server, monkeypatch):
    embedder = make()
    embedder.push_to_hub(REPO)
    Embedder.from_hub(REPO)
    requests = len(server.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert equal(Embedder.from_hub(REPO), embedder)
    with pytest.raises(OSError, match=r"HF_HUB_OFFLINE .*lab/new"):
        Embedder.from_hub("lab/new")
    assert len(server.requests) == requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert equal(Embedder.from_hub(REPO), embedder)
    for call in (Embedder.from_hub, embedder.push_to_hub):
        with pytest.raises(OSError, match=":9 cannot be reached"):
            call("lab/new")


def changed(files, **values):
    """Return the files with changed values in embedder.json, without its checksum."""
    content = {**json.loads(files["embedder.json"]), **values}
    del content["checksum"]
    return {**files, "embedder.json": json.dumps(content).encode()}


def test_download_rejects_damaged_and_oversized_files(server, monkeypatch):
    make().push_to_hub(REPO)
    good = server.files(REPO)
    (name,) = [file for file in good if file.endswith(".safetensors")]
    tensors = json.loads(good["embedder.json"])["tensors"]
    cases = {
        "is damaged": {**good, "embedder.json": good["embedder.json"][:-9]},
        "weights file is missing": changed(good, tensors={"sha256": "../x", "bytes": 1}),
        "checksum": {**good, name: good[name][:-1] + b"\0"},
        "at most 1 bytes": changed(good, tensors={**tensors, "bytes": 1}),
    }
    for message, files in cases.items():
        server.commit(REPO, files)
        with pytest.raises(ValueError, match=message):
            Embedder.from_hub(REPO)
    server.commit(REPO, good)
    requests = len(server.requests)
    monkeypatch.setattr(hub, "MAX_DESCRIPTION_BYTES", 10)
    with pytest.raises(ValueError, match="was not downloaded"):
        Embedder.from_hub(REPO)
    assert not any(line.startswith("GET") for line in server.requests[requests:])


def test_push_rejects_concurrent_commits(server, monkeypatch):
    make().push_to_hub(REPO)
    info = hub.HfApi.model_info

    def overtaken(*words):
        found = info(*words)
        server.commit(REPO, {**server.files(REPO), "new": b""})
        return found

    monkeypatch.setattr(hub.HfApi, "model_info", overtaken)
    with pytest.raises(ValueError, match="commit has happened"):
        make(seed=1).push_to_hub(REPO)


def test_cli_push_and_hub_addresses(server, tmp_path, capsys):
    folder = make().save(tmp_path / "embedder")
    assert cli.main(["push", str(folder), REPO, "--license", "mit", "--private"]) == 0
    assert f"{server.address}/{REPO}" in capsys.readouterr().out
    assert server.private == {REPO}
    black = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    expected = Embedder.load(folder).embed(black)
    torch.testing.assert_close(open_embedder(f"hub:{REPO}").embed(black), expected)
    # In a separate process, as for a user.
    Image.new("RGB", (64, 64)).save(tmp_path / "black.png")
    words = ["embed", f"hub:{REPO}", "black.png", "--out", "v.npz"]
    environment = {**os.environ, "HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home")}
    environment |= {"HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    subprocess.run(
        [sys.executable, "-m", "proximetry", *words], env=environment, cwd=tmp_path, check=True
    )
    np.testing.assert_allclose(np.load(tmp_path / "v.npz")["vectors"], expected, atol=1e-6)
