"""Search tables: evaluated only on held-out classes, every row once, best first."""

import pytest
import torch

from proximetry.metrics.scores import SEPARABILITY
from proximetry.reproduce import RunsFailedError, Table, runner
from proximetry.reproduce.records import read_records
from proximetry.training.metrics_table import WITH_DISTRACTORS
from tests.reproduce.small import Ended, run_table, table_values, with_base


@pytest.fixture(scope="module")
def table(cache):
    values = table_values(
        cache,
        name="search",
        protocol="held_out",
        published={},
        selection=False,
        claims=[],
        figure=None,
        metrics=["recall@1", "map@r"],
        dims=[2],
        views=[[24, 24], [16, 24]],
        rows=[{"name": "base"}, {"name": "narrow", "changes": {"model.pca_dim": 3}}],
    )
    values = with_base(values, "model", resize=24)
    return Table.load(with_base(values, "evaluation", held_out=0.3))


@pytest.fixture(scope="module")
def home(table, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("search")

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def finished(job):
        assert job.folder.results.exists()
        return Ended(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "evaluate_embedder", no_memory)
        with pytest.raises(RunsFailedError, match=r"narrow, seed 0: .*out of memory"):
            run_table(table, data, out, rows=("narrow",))
    run_table(table, data, out, rows=("narrow",), start=finished)  # nothing is trained again
    text = (out / "search" / "README.md").read_text()
    assert "| narrow |" in text
    assert text.endswith("\n\nRows without a run here: base.\n")
    lines = []
    home = run_table(table, data, out, lines.append)
    assert lines[0] == "search: 2 runs, 1 already complete"
    assert lines[1].startswith("base, seed 0: recall@1")
    return home


def test_rows_are_evaluated_once_on_held_out_classes(home):
    records = read_records(home)
    assert list(records) == ["base-seed0", "narrow-seed0"]
    for record in records.values():
        assert record.kind == record.protocol == "held_out"
        assert record.recipe["evaluation"]["protocol"] == "held_out"
        assert "test" not in record.last
        assert not any("test" in line for line in record.curve)
        metrics = record.metrics()
        assert metrics["queries"] == 18  # three of the ten classes
        assert record.views.keys() == {"24 of 24", "16 of 24", "flip TTA"}
        skipped = ("dims", "with_distractors", f"map@r {WITH_DISTRACTORS}", *SEPARABILITY)
        assert record.views["24 of 24"] == {k: v for k, v in metrics.items() if k not in skipped}
        assert record.metrics(dim=2)["recall@1"] <= 1
    smaller = records["base-seed0"].views["16 of 24"]
    assert smaller != records["base-seed0"].views["24 of 24"]


def test_folder_without_splits_is_trained_on(table, data, tmp_path):
    home = run_table(table, data / "train", tmp_path, rows=("base",))
    (record,) = read_records(home).values()
    assert record.images == {"train": 60, "test": 0}
    assert "your own images: 60 training, 0 test images" in (home / "README.md").read_text()


def test_page_ranks_the_rows(home):
    records = read_records(home)
    text = (home / "README.md").read_text()
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| row | recall@1 | map@r |"))
    assert "| recall@1, first 2 dimensions | recall@1, 24 of 24 |" in lines[head]
    means = {r.row: 100 * r.metrics()["recall@1"] for r in records.values()}
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines[head + 2 : head + 4]]
    assert names == sorted(means, key=means.get, reverse=True)
    for line, name in zip(lines[head + 2 : head + 4], names, strict=True):
        assert line.startswith(f"| {name} | {means[name]:.2f} |")
    narrow = lines[head + 2 + names.index("narrow")]
    assert narrow.endswith("| model.pca_dim 3 |")
    assert "Percent on the held-out 30 % of the training classes" in text
    assert (
        "| protocol | last epoch, on held-out training classes; the test set is not used |" in text
    )
    assert "Published" not in text
    assert "without a run" not in text
    assert sorted(path.name for path in home.iterdir()) == ["README.md", "runs.jsonl"]
