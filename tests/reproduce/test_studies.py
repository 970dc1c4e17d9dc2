"""The studies of benchmarks/, and the scripts that evaluate their runs."""

import json

import numpy as np
import pytest
import torch

from benchmarks import han_characters, proxies_used, variants
from benchmarks.l2_sp import L2SP
from benchmarks.quantization import QuantizedProxyAnchor
from benchmarks.studies import HOME, tables
from proximetry.data import open_dataset
from proximetry.data.datasets.glyphs import _font_file
from proximetry.losses import ProxyAnchor
from proximetry.reproduce import ReproduceOptions
from proximetry.reproduce.plan import plan
from proximetry.training import train
from proximetry.training.metrics_table import WITH_DISTRACTORS
from tests.reproduce.small import make_table, run_table, table_values, with_base
from tests.training.tiny import make_recipe

STUDIES = sorted(path.parent.name for path in HOME.glob("*/table.yaml"))


@pytest.mark.parametrize("name", STUDIES)
def test_tables_of_a_study_are_valid(name):
    for table in tables(HOME / name):
        assert table.title
        for on_gpu in (False, True):
            assert len(plan(table, ReproduceOptions(), on_gpu)) >= len(table.rows)


@pytest.fixture(scope="module")
def runs(data, cache, tmp_path_factory):
    """Kept runs of two rows with one seed, with held-out classes."""
    rows = [
        {"name": "one", "changes": {"loss.name": "mpa", "loss.settings": {"proxies_per_class": 3}}},
        {"name": "two", "changes": {"optimizer.lr": 3e-3}},
    ]
    plain = {"protocol": "held_out", "selection": False, "claims": [], "figure": None}
    values = table_values(cache, **plain, published={}, rows=rows, metrics=["recall@1"])
    values = with_base(values, "model", pca_dim=4)
    table = make_table(cache, **with_base(values, "training", ema=0.5))
    home = run_table(table, data, tmp_path_factory.mktemp("kept"), keep_runs=True)
    return {name: home / "work" / f"{name}-seed0" for name in ("one", "two")}


def test_variant_without_changes_equals_the_run(runs):
    expected = json.loads((runs["one"] / "results.json").read_text())["last"]["held_out"]
    *_, trained = lines = list(variants.interpolation(runs["one"]))
    assert trained["held_out"]["map@r"] == pytest.approx(expected["map@r"])
    assert [line["share"] for line in lines] == list(variants.SHARES)
    assert lines[0]["held_out"] != trained["held_out"]
    assert f"map@r {WITH_DISTRACTORS}" in trained["held_out"]
    first, flipped, crops = variants.views(runs["one"], (0.8,))
    assert first["held_out"] == trained["held_out"]
    assert (flipped["flip"], crops["crops"]) == (True, (0.8,))
    assert first["images_per_second"] > 0


def test_soup_of_runs(runs):
    one, two, both, greedy = variants.soup([*runs.values()])
    assert (one["runs"], two["runs"]) == (["one-seed0"], ["two-seed0"])
    assert both["runs"] == ["one-seed0", "two-seed0"]
    best = max(one["held_out"]["map@r"], two["held_out"]["map@r"])
    assert greedy["held_out"]["map@r"] >= best


def test_blend_of_weights():
    states = [
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([3.0, 4.0])},
    ]
    blended = variants.blend(states, (0.25, 0.75))
    assert blended["w"].tolist() == [2.5, 3.5]
    assert blended["n"] == 3


def test_l2_sp_pulls_the_backbone_to_its_start(data, cache, tmp_path):
    distances = []
    for strength in (0.0, 1e3):
        recipe = make_recipe(data, cache, training={"epochs": 1})
        callback = L2SP(strength)
        results = train(recipe, tmp_path / str(strength), device="cpu", callbacks=[callback])
        assert results["epochs"] == 1
        distances.append(sum((weight - start).norm().item() for weight, start in callback.start))
    assert distances[0] > distances[1] == 0.0


def test_distinct_and_used_proxies(runs):
    proxies = torch.eye(4)[None, [0, 0, 1, 2]] + torch.tensor([[0.0], [0.1], [0.0], [0.0]])
    assert proxies_used.distinct(proxies).tolist() == [3]
    vectors = torch.eye(4)[[0, 1, 1]]
    counts = proxies_used.assignments(proxies, vectors, torch.tensor([0, 0, 0]))
    assert counts.sum() == 3
    assert (counts > 0).sum() == 2
    found = proxies_used.measure(runs["one"])
    assert found["proxies"] == 3
    assert 1 <= found["effective"] <= found["used"] <= 3
    assert 1 <= found["distinct"] <= 3


def test_quantization_term_is_zero_for_codes():
    labels = torch.tensor([0, 1])
    loss, x = QuantizedProxyAnchor(2, 4, quantization=2.0), torch.eye(4)[:2]
    plain = ProxyAnchor(2, 4)
    plain.load_state_dict(loss.loss.state_dict())
    assert (loss(x, labels) - plain(x, labels)).item() == pytest.approx(2 * (1 - 0.5))
    codes = torch.tensor([[0.5, 0.5, -0.5, 0.5], [-0.5, 0.5, 0.5, 0.5]])
    assert loss(codes, labels).item() == pytest.approx(plain(codes, labels).item())


def test_han_characters_are_drawn_in_several_faces(tmp_path, monkeypatch):
    faces = [_font_file(name) for name in ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")]
    monkeypatch.setattr(han_characters, "FONTS", tmp_path)
    monkeypatch.setattr(han_characters, "IMAGES", 2)
    han_characters.write_shard(tmp_path / "test.tar", "test", {"A": faces, "B": faces}, 24)
    catalog = open_dataset("shards", tmp_path)
    assert np.bincount(catalog.codes).tolist() == [2, 2]
    assert set(catalog.splits) == {"test"}
    assert catalog.class_names == ("U+0041", "U+0042")
