"""Write docs/results.md from the runs in benchmarks/results.

python -m benchmarks.results_page
"""

from pathlib import Path

from proximetry.reproduce import Table, shipped_tables
from proximetry.reproduce.markdown import overview
from proximetry.reproduce.records import read_records
from proximetry.reproduce.results import Results

HOME = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"

_BEGIN = Path(__file__).with_suffix(".md")


def make_page() -> str:
    """The whole page, from the JSON files alone."""
    parts = [_BEGIN.read_text(encoding="utf-8")]
    for name in shipped_tables():
        folder = HOME / name
        if any(folder.glob("*.json")):
            results = Results.of(Table.load(name), read_records(folder))
            parts.append(overview(results, f"../benchmarks/results/{name}"))
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"written: {PAGE.name}")


if __name__ == "__main__":
    main()
