"""Embedders on the hub: pushed, downloaded and refused, against a server in this process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants

from proximetry import cli
from proximetry.faces import open_embedder
from proximetry.models import Embedder, hub, weights
from tests.models.hub_server import READER, WRITER, Hub
from tests.models.test_storage import equal, make

REPO = "lab/jays"
METRICS = {
    "protocol": "held_out",
    "epoch": 3,
    "held_out": {"recall@1": 0.75, "map@r": 0.5, "queries": 12.0, "among_train": {"map@r": 0.25}},
    "test": {"recall@1": np.float32(0.625), "mrr": float("nan"), "dims": {"4": {"recall@1": 0.5}}},
}
RECIPE = {
    "name": "mine",
    "data": {"dataset": "cub"},
    "loss": {"name": "proxy_anchor"},
    "training": {"epochs": 4, "seed": 0},
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    running = Hub()
    # What HF_ENDPOINT would have set when the client was imported.
    monkeypatch.setattr(constants, "ENDPOINT", running.address)
    template = f"{running.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server speaks plain LFS
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    yield running
    running.close()


def trained(**settings):
    embedder = make(backbone="small_convnet", **settings).eval()
    embedder.metrics, embedder.recipe = METRICS, RECIPE
    embedder.class_names = [f"class {i}" for i in range(1200)]
    return embedder


def test_what_is_pushed_comes_back(server):
    embedder = trained(flip_tta=True)
    assert embedder.push_to_hub(REPO, license="apache-2.0") == f"{server.address}/{REPO}"
    assert any(line.startswith("PUT /lfs/") for line in server.asked)
    found = Embedder.from_hub(REPO)
    assert equal(embedder, found)
    assert not found.training
    assert found.fingerprint() == embedder.fingerprint()
    assert (found.recipe, found.class_names) == (RECIPE, embedder.class_names)
    pictures = [np.full((40, 30, 3), gray, np.uint8) for gray in (0, 200)]
    assert torch.equal(found.encode(pictures), embedder.encode(pictures))


def test_a_push_replaces_what_was_there_in_one_commit(server):
    first, second = trained(), make(seed=1, backbone="small_convnet")
    first.push_to_hub(REPO)
    server.files(REPO)["notes.txt"] = b"mine"
    before = server.sha(REPO)
    second.push_to_hub(REPO)
    assert len(server.commits[REPO]) == 3  # the first one made the repository
    names = sorted(server.files(REPO))
    assert len(names) == 5
    assert names[:3] == [".gitattributes", "README.md", names[2]]
    assert names[2].startswith("embedder-")
    assert names[3:] == ["embedder.json", "notes.txt"]
    assert equal(Embedder.from_hub(REPO), second)
    assert equal(Embedder.from_hub(REPO, revision=before), first)


def test_the_card_says_what_is_known(server):
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
        ("held_out", "among_train", "map@r"): 0.25,
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
        "| centre crops of test-time augmentation | 0.875 |",
        f"`{embedder.fingerprint()}`",
        f"torch {torch.__version__}",
        f'Embedder.from_hub("{REPO}")',
    ):
        assert words in card.text, words
    code = card.text.partition("```python")[2].partition("```")[0]
    compile(code, "card", "exec")


def test_a_card_of_an_embedder_that_nobody_measured(server):
    make(backbone="small_convnet", bits=None).push_to_hub(REPO)
    card = ModelCard(server.files(REPO)["README.md"].decode())
    assert not {"license", "model-index"} & card.data.to_dict().keys()
    assert "## Evaluation" not in card.text
    assert "started from | random" in card.text


@pytest.mark.parametrize("odd", ["a|b", "x\n---\ny: z", "<script>", "`rm`", {"deep": [1]}, 7, None])
def test_no_recipe_breaks_a_card(server, odd):
    embedder = make(backbone="small_convnet")
    embedder.recipe = {"name": odd, "data": odd, "loss": {"name": odd}, "training": []}
    embedder.metrics = {str(odd): {"recall@1": 0.5}, "test": {str(odd): 1}}
    embedder.push_to_hub(REPO)
    text = server.files(REPO)["README.md"].decode()
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["library_name"] == "proximetry"
    assert "<script>" not in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(line.count("|") in (3, 4) for line in rows)


def test_the_token_decides(server, monkeypatch, tmp_path):
    embedder = make(backbone="small_convnet")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match=r"a push to lab/jays needs a token .* `hf auth login`"):
        embedder.push_to_hub(REPO)
    assert server.asked == []
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(ValueError, match="your token may not do this: lab/jays cannot be pushed"):
        embedder.push_to_hub(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(ValueError, match="the hub does not accept your token"):
        embedder.push_to_hub(REPO)
    assert server.commits == {}
    monkeypatch.setenv("HF_TOKEN", WRITER)
    embedder.push_to_hub(REPO, private=True)
    assert server.private == {REPO}
    assert equal(Embedder.from_hub(REPO), embedder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match=r"no repository lab/jays, or it is private: log in with"):
        Embedder.from_hub(REPO)


@pytest.mark.parametrize("name", ["jays", "a/b/c", "lab/", "", "../lab/jays", "lab/j ays", "a/é"])
def test_names_that_are_none(server, name):
    with pytest.raises(ValueError, match="a repository of the hub is called owner/name, got"):
        Embedder.from_hub(name)
    with pytest.raises(ValueError, match="a repository of the hub is called owner/name, got"):
        make(backbone="small_convnet").push_to_hub(name)
    assert server.asked == []


def test_what_is_not_there(server):
    with pytest.raises(ValueError, match="no repository lab/none, or your token may not read it"):
        Embedder.from_hub("lab/none")
    make(backbone="small_convnet").push_to_hub(REPO)
    with pytest.raises(ValueError, match="lab/jays has no revision 'v2'"):
        Embedder.from_hub(REPO, revision="v2")
    server.commit("lab/other", {"README.md": b"", "model.safetensors": b""})
    with pytest.raises(ValueError, match=r"lab/other holds no saved embedder: embedder\.json"):
        Embedder.from_hub("lab/other")
    with pytest.raises(ValueError, match=r'Invalid metadata in README\.md\.\s+- "license" is'):
        make(backbone="small_convnet").push_to_hub(REPO, license="no-such")
    assert len(server.commits[REPO]) == 2


def test_without_the_hub_the_cache_serves(server, monkeypatch):
    embedder = make(backbone="small_convnet")
    embedder.push_to_hub(REPO)
    Embedder.from_hub(REPO)
    asked = len(server.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert equal(Embedder.from_hub(REPO), embedder)
    with pytest.raises(OSError, match=r"HF_HUB_OFFLINE is set, .* lab/new has not been downloaded"):
        Embedder.from_hub("lab/new")
    assert len(server.asked) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert equal(Embedder.from_hub(REPO), embedder)
    with pytest.raises(OSError, match=r"the hub at .*:9 cannot be reached, and lab/new has not"):
        Embedder.from_hub("lab/new")
    with pytest.raises(OSError, match=r"the hub at .*:9 cannot be reached: nothing was pushed"):
        embedder.push_to_hub(REPO)


def changed(files, **values):
    """The files with other values in embedder.json, whose checksum is taken out."""
    content = {**json.loads(files["embedder.json"]), **values}
    del content["checksum"]
    return {**files, "embedder.json": json.dumps(content).encode()}


def test_what_is_damaged_or_too_large_is_refused(server, monkeypatch):
    make(backbone="small_convnet").push_to_hub(REPO)
    good = server.files(REPO)
    (name,) = [file for file in good if file.endswith(".safetensors")]
    tensors = json.loads(good["embedder.json"])["tensors"]
    cases = {
        r"embedder\.json is damaged": {**good, "embedder.json": good["embedder.json"][:-9]},
        r"does not describe an embedder": {**good, "embedder.json": b"[]"},
        r"names no weights file": changed(good, tensors={"sha256": "../x", "bytes": 1}),
        r"is damaged: its checksum": {**good, name: good[name][:-1] + b"\0"},
        r"and 1 bytes at most can be right": changed(good, tensors={**tensors, "bytes": 1}),
        r"has format version 2": changed(good, version=2),
    }
    for sentence, files in cases.items():
        server.commit(REPO, files)
        with pytest.raises(ValueError, match=sentence):
            Embedder.from_hub(REPO)
    server.commit(REPO, good)
    asked = len(server.asked)
    monkeypatch.setattr(hub, "LARGEST_DESCRIPTION", 10)
    with pytest.raises(ValueError, match=r"embedder\.json of lab/jays .* it was not downloaded"):
        Embedder.from_hub(REPO)
    assert not any(line.startswith("GET") for line in server.asked[asked:])


def test_nothing_else_of_a_repository_is_downloaded(server, tmp_path):
    embedder = make(backbone="small_convnet")
    embedder.push_to_hub(REPO)
    server.commit(REPO, {**server.files(REPO), "run.py": b"1 / 0", "embedder/embedder.json": b"{"})
    assert equal(Embedder.from_hub(REPO), embedder)
    found = {path.name for path in tmp_path.glob("cache/*/snapshots/*/*")}
    assert {name.partition("-")[0] for name in found} == {"embedder", "embedder.json"}


def test_somebody_else_pushes_meanwhile(server, monkeypatch):
    make(backbone="small_convnet").push_to_hub(REPO)
    save = hub.make_card

    def slow(*words):
        monkeypatch.setattr(hub.HfApi, "model_info", overtaken)
        return save(*words)

    info = hub.HfApi.model_info

    def overtaken(*words):
        found = info(*words)
        server.commit(REPO, {**server.files(REPO), "new": b""})
        return found

    monkeypatch.setattr(hub, "make_card", slow)
    with pytest.raises(
        ValueError, match="somebody else has changed lab/jays meanwhile; push again"
    ):
        make(seed=1, backbone="small_convnet").push_to_hub(REPO)


def test_commands_take_the_hub_for_a_folder(server, tmp_path, capsys):
    folder = make(backbone="small_convnet").save(tmp_path / "embedder")
    assert cli.main(["push", str(folder), REPO, "--license", "mit", "--private"]) == 0
    assert f"{server.address}/{REPO}" in capsys.readouterr().out
    assert server.private == {REPO}
    torch.testing.assert_close(
        open_embedder(f"hub:{REPO}").embed(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)),
        Embedder.load(folder).embed(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)),
    )
    assert cli.main(["push", str(folder), "jays"]) == 2
    assert "is called owner/name, got 'jays'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_of_its_own_downloads_from_the_hub_it_is_told(server, tmp_path):
    embedder = make(backbone="small_convnet")
    embedder.push_to_hub(REPO)
    out = tmp_path / "vectors.npz"
    picture = tmp_path / "one.png"
    hub_at = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home")}
    from PIL import Image

    Image.new("RGB", (70, 90), "teal").save(picture)
    words = ["embed", f"hub:{REPO}@main", picture, "--out", out]
    done = subprocess.run(
        [sys.executable, "-m", "proximetry", *map(str, words)],
        env={**os.environ, **hub_at, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITER},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = embedder.encode([picture]).numpy()
    assert np.array_equal(np.load(out)["vectors"], expected)
    assert list(Path(tmp_path / "home").rglob("embedder.json"))
    assert weights.PATIENCE < 10
