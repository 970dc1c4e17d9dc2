"""The page of results says what the committed runs say."""

import copy

from benchmarks.results_page import HOME, PAGE, TOLERANCES, make_page, repeats, spread
from proximetry.reproduce import Table
from proximetry.reproduce.markdown import page
from proximetry.reproduce.records import read_records
from proximetry.reproduce.results import Results


def test_the_page_of_results_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == make_page()


def test_the_page_of_every_table_is_up_to_date():
    folders = [path for path in HOME.iterdir() if any(path.glob("*.json"))]
    assert folders
    for folder in folders:
        results = Results.of(Table.load(folder.name), read_records(folder))
        assert (folder / "README.md").read_text(encoding="utf-8") == page(results), folder.name


def test_equal_runs_part_by_no_more_than_is_promised():
    records = [
        record
        for folder in HOME.iterdir()
        if folder.is_dir()
        for record in read_records(folder).values()
        if record.kind == "full"
    ]
    groups = repeats(records)
    assert any(len(group) == 4 for group in groups)
    for group in groups:
        found = spread(group)
        assert all(here <= most for here, most in zip(found, TOLERANCES, strict=True)), found
    # Another seed is another run, and a curve elsewhere is seen.
    one = copy.deepcopy(groups[0][0])
    one.recipe["training"]["seed"] = 7
    assert repeats([groups[0][0], one]) == []
    two = copy.deepcopy(groups[0][0])
    two.curve[-1]["test"]["recall@1"] += 0.02
    assert spread([groups[0][0], two])[2] > TOLERANCES[2]
