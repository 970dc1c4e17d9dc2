"""The studies in this folder: tables, runs and pages.

    python -m benchmarks.studies best-recipe-search cub --data CUB [--rows ln-90] [--seeds 0 1 2]

runs a table of a study again. Studies of shipped tables have no table.yaml; run them again with
`proximetry reproduce TABLE --out benchmarks`.
"""

import argparse
import re
from pathlib import Path

import yaml

from proximetry.reproduce import ReproduceOptions, Table, reproduce
from proximetry.reproduce.records import RUNS, Results, read_runs
from proximetry.reproduce.table_page import page

HOME = Path(__file__).parent
GENERATED = "<!-- Generated from runs.jsonl by python -m benchmarks.results_page. -->\n"


def studies() -> list[Path]:
    """Return the folders with runs."""
    return [path.parent for path in sorted(HOME.glob(f"*/{RUNS}"))]


def has_own_tables(study: Path) -> bool:
    """Return whether the tables of a study are its own, not shipped ones."""
    return (study / "table.yaml").exists()


def tables(study: Path) -> list[Table]:
    """Return the tables of a study: the documents of its table.yaml, else a shipped table."""
    if has_own_tables(study):
        text = (study / "table.yaml").read_text(encoding="utf-8")
        return [Table.load(values) for values in yaml.safe_load_all(text)]
    return [Table.load(name) for name in dict.fromkeys(run.table for run in read_runs(study))]


def read_study(study: Path) -> list[Results]:
    """Return the runs of a study by table."""
    runs = read_runs(study)
    return [
        Results(table, [run for run in runs if run.table == table.name]) for table in tables(study)
    ]


def study_page(study: Path) -> str:
    """Return README.md; sections of own tables follow a written introduction."""
    all_results = read_study(study)
    if not has_own_tables(study):
        return page(all_results[0])
    text = (study / "README.md").read_text(encoding="utf-8").partition(GENERATED)[0]
    sections = [re.sub("^#", "##", page(results), flags=re.MULTILINE) for results in all_results]
    return "\n".join([f"{text}{GENERATED}\n", *sections])


def main() -> None:
    """Run a table of a study again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("table")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--keep-runs", action="store_true")
    options = parser.parse_args()
    chosen = {table.name: table for table in tables(HOME / options.study)}[options.table]
    chosen_options = ReproduceOptions(
        rows=tuple(options.rows),
        seeds=tuple(options.seeds),
        parallel=options.parallel,
        keep_runs=options.keep_runs,
    )
    print(reproduce(chosen, options.data, options.out, chosen_options, report=print))


if __name__ == "__main__":
    main()
