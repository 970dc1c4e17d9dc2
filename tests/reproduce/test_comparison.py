"""`proximetry compare`: losses and seeds on one folder, and significant differences."""

import pytest

from proximetry.reproduce import ReproduceError, compare
from proximetry.reproduce.records import Results, read_records
from proximetry.reproduce.statistics import Sample, ci_half_width, pairwise_differences
from proximetry.reproduce.table import Table
from proximetry.training import Recipe
from proximetry.training.metrics_table import WITH_DISTRACTORS
from tests.reproduce.small import no_training, train_here
from tests.training.tiny import tiny_values

METRIC = f"map@r {WITH_DISTRACTORS}"


@pytest.fixture(scope="module")
def recipe(data, cache):
    values = tiny_values(cache, data={"batch_size": 12, "root": str(data / "train")})
    values["training"] = {"epochs": "auto", "max_steps": 6}
    return Recipe.load(values)


def compare_here(recipe, out, start=train_here, **options):
    losses = ("proxy_anchor", "arcface", "proxy_anchor")
    return compare(recipe, losses, (0, 1), out, device="cpu", start=start, **options)


@pytest.fixture(scope="module")
def compared(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    return out, *compare_here(recipe, out)


def test_compare_trains_every_loss_with_every_seed(compared):
    _, folder, summary = compared
    records = read_records(folder)
    assert folder.name == "compare-train"
    assert list(records) == [
        f"{loss}-seed{seed}" for loss in ("arcface", "proxy-anchor") for seed in (0, 1)
    ]
    assert {record.kind for record in records.values()} == {"held_out"}
    assert summary in (folder / "README.md").read_text()
    assert f"| loss         | {METRIC}" in summary
    assert "for all differences together (Bonferroni, 1 test)" in summary
    command = "proximetry compare IMAGES --losses proxy_anchor arcface --seeds 0 1"
    assert command in (folder / "README.md").read_text()


def test_compare_resumes_and_rejects_other_images(compared, recipe, data):
    out, folder, summary = compared
    assert compare_here(recipe, out, start=no_training) == (folder, summary)
    fewer = recipe.override({"data.root": str(data)})  # with a test set
    with pytest.raises(ReproduceError, match="two or more, got arcface"):
        compare(fewer, ["arcface"], out=out)
    (out / "compare-data").mkdir()
    (out / "compare-data" / "runs.jsonl").write_bytes(
        (folder / "runs.jsonl").read_bytes().replace(b'"compare-train"', b'"compare-data"')
    )
    with pytest.raises(ReproduceError, match="trained on different images"):
        compare_here(fewer, out, start=no_training)


def test_compare_needs_held_out_classes(recipe, tmp_path, data):
    for path in sorted((data / "train").iterdir())[:4]:
        (tmp_path / "few").mkdir(exist_ok=True)
        (tmp_path / "few" / path.name).symlink_to(path)
    few = recipe.override({"data.root": str(tmp_path / "few")})
    with pytest.raises(ReproduceError, match="no held-out classes to compare on: 4 training"):
        compare_here(few, tmp_path, start=no_training)
    with pytest.raises(ValueError, match="unknown loss 'arcfce'"):
        compare(recipe, ["arcfce", "arcface"])


def test_pairwise_differences_share_one_confidence():
    class Run:
        kind = "held_out"

        def __init__(self, row, seed, value):
            self.row, self.seed, self.value = row, seed, value

        def metrics(self, epoch=None):
            return {"map@r": self.value}

    values = {"a": (0.50, 0.51, 0.52), "b": (0.60, 0.61, 0.62), "c": (0.6, 0.62, 0.64)}
    rows = [{"name": name} for name in values]
    table = Table.load({"name": "t", "rows": rows, "metrics": ["map@r"], "protocol": "held_out"})
    runs = [Run(name, seed, v) for name, vs in values.items() for seed, v in enumerate(vs)]
    differences = pairwise_differences(Results(table, runs), "map@r")
    found = [(one.better, one.worse, one.is_significant) for one in differences]
    assert found == [("c", "a", True), ("b", "a", True), ("c", "b", False)]
    assert differences[0].mean == pytest.approx(11)
    a, b = Sample((50.0, 51.0, 52.0)), Sample((60.0, 61.0, 62.0))
    assert differences[1].ci_half_width == pytest.approx(ci_half_width(a, b, 1 - 0.05 / 3))
    assert differences[1].ci_half_width > ci_half_width(a, b)
    assert a.ci_half_width == pytest.approx(4.303 / 3**0.5, abs=1e-3)


def test_compare_command_passes_recipe_losses_and_seeds(call, data, tmp_path, monkeypatch):
    calls = []

    def compare(recipe, losses, seeds, out, **options):
        calls.append((recipe.training.epochs, losses, seeds, out))
        return tmp_path, "the summary"

    monkeypatch.setattr("proximetry.reproduce.compare", compare)
    words = ("compare", data / "train", "--seeds", "3", "5", "--out", tmp_path)
    printed = call(*words, "--losses", "mpa", "arcface", "--training.epochs", "2")
    assert calls == [(2, ("mpa", "arcface"), (3, 5), tmp_path)]
    assert "the summary" in printed
    assert f"page: {tmp_path / 'README.md'}" in printed
    assert "Pass --losses" in call(*words, "--loss", "arcface", code=2)
    assert "no folder or file" in call("compare", data / "nothing", code=2)
