"""A table whose rows differ in recipe and dataset."""

import shutil

import pytest

from benchmarks.check_results import check_runs
from proximetry.reproduce import Table
from proximetry.reproduce.plan import command_for
from proximetry.reproduce.records import Results, read_records
from proximetry.reproduce.table import ReproduceError
from tests.reproduce.small import (
    make_data,
    make_table,
    no_training,
    run_table,
    table_values,
    with_base,
)


@pytest.fixture
def data(tmp_path):
    """The same images as folder/, and without two classes as csv/."""
    home = tmp_path / "all"
    home.mkdir()
    shutil.move(make_data(tmp_path), home / "folder")
    rows = [
        f"folder/{split}/class{number:02d}/{i}.png,class{number:02d},{split}"
        for split, numbers in (("train", range(8)), ("test", range(10, 16)))
        for number in numbers
        for i in range(6)
    ]
    (home / "csv").write_text("\n".join(["path,label,split", *rows]))
    return home


ROWS = [
    {"name": "squares", "changes": {"evaluation.untrained": True}},
    {"name": "fewer squares", "changes": {"data.dataset": "csv"}},
]
PLAIN = {"selection": False, "claims": [], "figure": None, "seconds": True, "rows": ROWS}


def test_rows_may_differ_in_dataset(data, tmp_path):
    table = make_table(tmp_path / "cache", **PLAIN)
    home = run_table(table, data, tmp_path / "out")
    records = read_records(home)
    images = {record.row: record.images["train"] for record in records.values()}
    assert images == {"squares": 60, "fewer squares": 48}
    page = (home / "README.md").read_text()
    assert "your own images: 60 training" in page
    assert "your own table: 48 training" in page
    assert "--data DATA" in page
    squares = next(record for record in records.values() if record.row == "squares")
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    untrained = next(line for line in lines if line[1] == "untrained")
    assert untrained[0] == "| squares"
    assert untrained[2] == f"{100 * squares.metrics(0)['recall@1']:.1f}"
    ours = next(line for line in lines if line[0] == "| fewer squares")
    assert ours[-1].rstrip(" |").isdecimal(), "seconds are the last column"


def test_rows_may_name_folders_below_the_data(data, tmp_path):
    shutil.copytree(data / "folder", data / "few")
    shutil.rmtree(data / "few" / "train" / "class00")
    rows = [
        {"name": "all", "changes": {"data.root": "folder"}},
        {"name": "few", "changes": {"data.root": "few"}},
    ]
    table = make_table(tmp_path / "cache", **PLAIN | {"rows": rows})
    home = run_table(table, data, tmp_path / "out")
    records = read_records(home)
    images = {record.row: record.images["train"] for record in records.values()}
    assert images == {"all": 60, "few": 54}
    run_table(table, data, tmp_path / "out", start=no_training)
    shutil.rmtree(data / "few" / "train" / "class01")
    with pytest.raises(ReproduceError, match="few-seed0 was trained on different images"):
        run_table(table, data, tmp_path / "out")


def test_row_with_root_uses_the_folder_of_its_dataset(data, tmp_path):
    rows = [{"name": "all", "changes": {"data.root": "elsewhere"}}]
    table = make_table(tmp_path / "cache", **PLAIN | {"rows": rows})
    (record,) = read_records(run_table(table, data, tmp_path / "out")).values()
    assert record.images["train"] == 60


def test_epochs_that_replace_auto_are_in_the_command(data, tmp_path):
    values = table_values(tmp_path / "cache", **PLAIN | {"rows": ROWS[:1]})
    table = Table.load(with_base(values, "training", epochs="auto"))
    home = run_table(table, data, tmp_path / "out", epochs=1)
    (record,) = read_records(home).values()
    assert " --epochs 1`" in (home / "README.md").read_text()
    assert list(check_runs(home, Results.read(table, home))) == []
    with pytest.raises(ReproduceError, match="--epochs 1"):
        run_table(table, data, tmp_path / "out")
    record.model_copy(update={"epochs_overridden": False}).write(home)
    (complaint,) = check_runs(home, Results.read(table, home))
    assert "1 epochs" in complaint


def test_row_may_replace_the_recipe(tmp_path):
    rows = [{"name": "glyphs", "recipe": "glyphs"}, {"name": "plain"}]
    table = Table.load(table_values(tmp_path, **PLAIN | {"rows": rows, "base": {}}))
    assert table.dataset(table.rows[0]) == "glyphs"
    assert table.dataset(table.rows[1]) == "folder"
    recipe = table.recipe_values(table.rows[0])
    assert recipe["model"]["backbone"] == "small_convnet"
    words = command_for(
        table, "glyphs", [0], {"model": recipe["model"], "training": recipe["training"]}, (), False
    )
    assert "--backbone" not in words
    with pytest.raises(ReproduceError, match="no recipe 'nothing'"):
        Table.load(table_values(tmp_path, **PLAIN | {"rows": [{"name": "x", "recipe": "nothing"}]}))
