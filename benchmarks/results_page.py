"""Write docs/results.md, and the pages and figures of all studies, from their runs.

python -m benchmarks.results_page
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from benchmarks.studies import HOME, read_study, studies, study_page
from proximetry.recipe.schema import Recipe
from proximetry.reproduce.figures import draw
from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.statistics import Verdict, compare_claim
from proximetry.reproduce.table import Table, shipped_tables
from proximetry.reproduce.table_page import grid, overview

PAGE = HOME.parent / "docs" / "results.md"

# Maximum differences of runs of one recipe and seed on one GPU: loss (relative) and recall@1
# (points) at any epoch, and recall@1 at the last one.
TOLERANCES = 0.01, 1.0, 0.5


def make_page() -> str:
    """Return the page: its introduction unchanged, the rest generated from the runs."""
    introduction = PAGE.read_text(encoding="utf-8").partition("\n| table |")[0]
    names = sorted(shipped_tables(), key=lambda name: not name.startswith("best-"))
    all_results = [Results.read(Table.load(name), HOME / name) for name in names]
    parts = [introduction, summarize(all_results)]
    parts += [
        overview(results, f"../benchmarks/{results.table.name}")
        for results in all_results
        if results.runs
    ]
    return "\n".join(parts)


def summarize(all_results: Iterable[Results]) -> str:
    """Return the verdicts on the published claims by table, and the tables without runs."""
    absent, counts = [], []
    for results in all_results:
        table = results.table
        if not results.runs:
            absent.append(f"{table.title} (`{table.name}`)")
        elif table.claims:
            verdicts = Counter(compare_claim(claim, results).verdict for claim in table.claims)
            counts.append((table.title, verdicts))
    # Every verdict has a column, so that every claim is counted.
    columns = [v for v in get_args(Verdict) if any(v in verdicts for _, verdicts in counts)]
    lines = ([title, *(verdicts.get(v) for v in columns)] for title, verdicts in counts)
    text = grid(["table", *columns], lines)
    return text + (f"\n\nNot run yet: {'; '.join(absent)}." if absent else "") + "\n"


def repeats(records: Iterable[Record]) -> list[list[Record]]:
    """Return groups of runs with the same recipe and seed, where tables overlap."""
    return [group for group in _group_by(records, _recipe) if len(group) > 1]


def twins(records: Iterable[Record]) -> list[list[Record]]:
    """Return groups of runs with the same training, evaluated in different ways.

    Records of one run, which have the same seconds, do not count.
    """
    groups = _group_by(records, _training)
    return [
        group
        for group in groups
        if len(_group_by(group, _recipe)) > 1 and len({r.seconds for r in group}) == len(group)
    ]


def _group_by(
    records: Iterable[Record], key: Callable[[Record], dict[str, Any]]
) -> list[list[Record]]:
    groups: list[tuple[dict[str, Any], list[Record]]] = []
    for record in records:
        values = key(record)
        same = next((group for other, group in groups if other == values), None)
        if same is None:
            groups.append((values, [record]))
        else:
            same.append(record)
    return [group for _, group in groups]


def _recipe(record: Record) -> dict[str, Any]:
    return {**Recipe.load(record.recipe).keys_without_roles(), "device": record.device}


# Settings of the evaluation, which training does not depend on.
OF_TEST_IMAGES = ("model.whitening", "model.flip_tta", "model.tta_crops")


def _training(record: Record) -> dict[str, Any]:
    """Return the settings that training depends on."""
    return {
        key: value
        for key, value in _recipe(record).items()
        if key not in ("model.pca_dim", *OF_TEST_IMAGES) and not key.startswith("evaluation.")
    }


def _losses(record: Record) -> tuple[float, ...]:
    """Return the loss of every epoch; the untrained embedder has none."""
    return tuple(line["loss"] for line in record.curve if "loss" in line)


def spread(group: Sequence[Record]) -> tuple[float, float, float]:
    """Return how much runs differ, in the order of `TOLERANCES`."""
    losses = zip(*(_losses(record) for record in group), strict=True)
    recalls = [
        [100 * line["test"]["recall@1"] for line in record.curve if "test" in line]
        for record in group
    ]
    apart = [max(recalls_at) - min(recalls_at) for recalls_at in zip(*recalls, strict=True)]
    return max(max(values) / min(values) - 1 for values in losses), max(apart), apart[-1]


def same_losses(group: Sequence[Record]) -> bool:
    """Return whether the losses of all epochs are equal to the last bit."""
    return len({_losses(record) for record in group}) == 1


def main() -> None:
    """Write all pages and figures."""
    PAGE.write_text(make_page(), encoding="utf-8")
    for study in studies():
        (study / "README.md").write_text(study_page(study), encoding="utf-8")
        for results in read_study(study):
            draw(results, study)


if __name__ == "__main__":
    main()
