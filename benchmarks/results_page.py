"""Write docs/results.md from the runs in benchmarks/results.

python -m benchmarks.results_page
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from proximetry.reproduce import Table, shipped_tables
from proximetry.reproduce.grid import table_head, table_line
from proximetry.reproduce.markdown import overview
from proximetry.reproduce.records import Record, read_records
from proximetry.reproduce.results import Results
from proximetry.reproduce.statistics import Verdict, examine

HOME = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"

_BEGIN = Path(__file__).with_suffix(".md")

# How far equal runs on one card may part: losses (relative) and recall@1 (points) at any epoch, and
# recall@1 at the last one.
TOLERANCES = 0.01, 1.0, 0.5


def make_page() -> str:
    """The whole page, from the JSON files alone."""
    names = sorted(shipped_tables(), key=lambda name: not name.startswith("record-"))
    every = [Results.of(Table.load(name), read_records(HOME / name)) for name in names]
    parts = [_BEGIN.read_text(encoding="utf-8"), _in_short(every)]
    parts += [
        overview(results, f"../benchmarks/results/{results.table.name}")
        for results in every
        if results.runs
    ]
    records = [record for results in every for record in results.runs]
    again = [_tell(group) for group in repeats(records)]
    again += [_tell_twins(group) for group in twins(records)]
    if again:
        parts.append("\n".join(["## The same training again\n", *again]))
    return "\n".join(parts)


def _in_short(every: Iterable[Results]) -> str:
    """How many published claims stand, table by table; and which tables were not run."""
    verdicts: tuple[Verdict, ...] = get_args(Verdict)[:4]
    lines = table_head(["claims", *verdicts])
    absent = []
    for results in every:
        table = results.table
        if not results.runs:
            absent.append(f"{table.title} (`{table.name}`)")
            continue
        if not table.claims:
            continue
        found = [examine(claim, table, results.full).verdict for claim in table.claims]
        counts = [found.count(verdict) or None for verdict in verdicts]
        lines.append(table_line([table.title, *counts]))
    if absent:
        lines += ["", f"Not run yet: {'; '.join(absent)}."]
    return "\n".join(lines) + "\n"


def repeats(records: Iterable[Record]) -> list[list[Record]]:
    """Full runs of one recipe and seed, which are there more than once where tables overlap."""
    return [group for group in _alike(records, _what) if len(group) > 1]


def twins(records: Iterable[Record]) -> list[list[Record]]:
    """Full runs that train alike, of several rows which are judged in different ways."""
    groups = _alike(records, _trains)
    return [group for group in groups if len(_alike(group, _what)) > 1]


def _alike(
    records: Iterable[Record], key: Callable[[Record], dict[str, Any]]
) -> list[list[Record]]:
    groups: list[tuple[dict[str, Any], list[Record]]] = []
    for record in records:
        mine = key(record)
        found = next((group for other, group in groups if other == mine), None)
        if found is None:
            groups.append((mine, [record]))
        else:
            found.append(record)
    return [group for _, group in groups]


def _what(record: Record) -> dict[str, Any]:
    words = ("name", "about")
    recipe = {key: value for key, value in record.recipe.items() if key not in words}
    return {**recipe, "card": record.card}


def _trains(record: Record) -> dict[str, Any]:
    """What training depends on."""
    recipe = _what(record)
    model = {k: v for k, v in recipe["model"].items() if k not in ("keep", "mirror")}
    return {**recipe, "model": model, "evaluation": None}


def spread(group: Sequence[Record]) -> tuple[float, float, float]:
    """How far equal runs part, in the order of `TOLERANCES`."""
    losses = zip(*([line["loss"] for line in record.curve] for record in group), strict=True)
    recalls = [
        [100 * line["test"]["recall@1"] for line in record.curve if "test" in line]
        for record in group
    ]
    apart = [max(at_once) - min(at_once) for at_once in zip(*recalls, strict=True)]
    return max(max(some) / min(some) - 1 for some in losses), max(apart), apart[-1]


def _tell(group: Sequence[Record]) -> str:
    rows = ", ".join(f"{record.row} of {record.table}" for record in group)
    last = sorted(100 * (record.test() or {})["recall@1"] for record in group)
    loss, recall, _ = spread(group)
    return (
        f"{rows}: the same recipe and seed, run {len(group)} times on one {group[0].card}. "
        f"recall@1 at the last epoch: {', '.join(f'{value:.2f}' for value in last)}. At no epoch "
        f"do they part by more than {recall:.2f} points, or in the loss by {100 * loss:.2f} %. "
        f"What is promised: {TOLERANCES[2]} points at the last epoch, {TOLERANCES[1]:g} on the "
        f"way, {100 * TOLERANCES[0]:g} % in the loss. On a CPU equal runs are equal to the last "
        "bit.\n"
    )


def same_losses(group: Sequence[Record]) -> bool:
    """Whether the losses of all epochs are equal to the last bit."""
    return len({tuple(line["loss"] for line in record.curve) for record in group}) == 1


def _tell_twins(group: Sequence[Record]) -> str:
    rows = " and ".join(f"{record.row} of {record.table}" for record in group)
    equal = "are equal to the last bit" if same_losses(group) else "are **not** equal"
    return (
        f"{rows}, seed {group[0].seed}: they train alike and are judged differently. The losses of "
        f"all {len(group[0].curve)} epochs {equal}.\n"
    )


def main() -> None:
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"written: {PAGE.name}")


if __name__ == "__main__":
    main()
