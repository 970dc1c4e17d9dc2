"""The page of results says what the committed runs say."""

from benchmarks.results_page import HOME, PAGE, make_page
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
