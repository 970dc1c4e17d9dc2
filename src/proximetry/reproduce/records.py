"""The runs of a table, one JSON object per line of `runs.jsonl`, without paths of a machine."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from proximetry._util.files import atomic_write, parse_json
from proximetry.recipe.auto import keep_choices
from proximetry.recipe.loading import differences, validation_message
from proximetry.recipe.schema import Recipe, Section
from proximetry.reproduce.plan import OF_CODES, Kind, PlannedRun, run_id
from proximetry.reproduce.table import ReproduceError, Row, Table, slugify
from proximetry.training.metrics_table import WITH_DISTRACTORS

RUNS = "runs.jsonl"


class Record(Section):
    """The results of a run.

    Attributes:
        last: epoch and metrics at the end.
        selected_epoch: the epoch that a selection run selected.
        seconds: of training, without startup and evaluation.
        curve: per epoch: seconds of training so far, loss, and metrics, if computed.
        parallel: number of runs that shared the device; None if unknown.
        images: number of images per split; None if unknown.
        views: metrics of the held-out classes at other image sizes.
        epochs_overridden: whether `--epochs` set the number of epochs.
    """

    table: str
    row: str
    seed: int
    kind: Kind
    recipe: dict[str, Any]
    device: str
    environment: dict[str, Any]
    weights: dict[str, Any]
    protocol: str
    notes: list[str]
    last: dict[str, Any]
    selected_epoch: int | None
    seconds: float
    startup_seconds: float
    curve: list[dict[str, Any]]
    parallel: int | None
    images: dict[str, int] | None
    views: dict[str, dict[str, Any]] | None
    epochs_overridden: bool

    @property
    def id(self) -> str:
        """Unique within a table."""
        return run_id(slugify(self.row), self.seed, self.kind)

    def metrics(
        self, epoch: int | None = None, dim: int | None = None, view: str | None = None
    ) -> dict[str, Any]:
        """Return the metrics at an epoch (default: the last), of the first dimensions or a view."""
        if view is not None:
            return (self.views or {}).get(view, {})
        line = self.last
        if epoch not in (None, self.last["epoch"]):
            line = next((line for line in self.curve if line["epoch"] == epoch), {})
        split = "held_out" if self.kind == "held_out" else "test"
        metrics: dict[str, Any] = {**line.get(split, {}), **line.get("proxies", {})}
        for name, value in metrics.get("with_distractors", {}).items():
            metrics[f"{name} {WITH_DISTRACTORS}"] = value
        for name, value in metrics.get("codes", {}).items():
            metrics[f"{name}{OF_CODES}"] = value
        return metrics if dim is None else metrics.get("dims", {}).get(str(dim), {})

    def write(self, folder: Path) -> None:
        """Add the run to those of a folder, replacing one with the same id."""
        write_records(folder, {**read_records(folder), self.id: self}.values())


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Write all runs of a folder, sorted by id, in one atomic step."""
    ordered = sorted(records, key=lambda record: (record.table, record.id))
    lines = [json.dumps(record.model_dump(mode="json"), ensure_ascii=False) for record in ordered]
    atomic_write(folder / RUNS, "".join(f"{line}\n" for line in lines).encode())


def read_runs(folder: Path) -> list[Record]:
    """Read all runs of a folder; one file may hold the runs of several tables."""
    path, runs = folder / RUNS, dict[tuple[str, str], Record]()
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = Record.model_validate(parse_json(line.decode()))
            if (record.table, record.id) in runs:
                raise ValueError(f"{record.id} is a duplicate")
        except ValueError as error:
            message = isinstance(error, ValidationError) and validation_message(error, Record)
            raise ReproduceError(
                f"{path}, line {number}: invalid run ({message or error}). Remove the line to run "
                "it again, or use another --out."
            ) from error
        runs[record.table, record.id] = record
    return list(runs.values())


def read_records(folder: Path, table: Table | None = None) -> dict[str, Record]:
    """Read the runs of a folder by id; with a table, each must belong to one of its rows."""
    records = {record.id: record for record in read_runs(folder)}
    for name, record in records.items():
        if table is not None and record.row not in [row.name for row in table.rows]:
            raise ReproduceError(
                f"{folder / RUNS}: {name}: unknown row {record.row!r}. Remove its line, or use "
                "another --out."
            )
    return records


def check_same(name: str | Path, existing: Recipe, run: PlannedRun) -> None:
    """Raise if the run ``name`` has a recipe that differs from the planned one.

    Keys that do not change results, or only floating-point rounding, may differ.
    """
    old, new = (
        recipe.without_paths().keys_without_roles(without=("metadata", "path", "runtime"))
        for recipe in (existing, keep_choices(run.recipe, existing))
    )
    for values in (old, new):  # the folder of a weights file does not matter
        values["model.weights"] = Path(values["model.weights"]).name
    changed = differences(old, new)
    if changed:
        raise ReproduceError(
            f"{name} has a different recipe: {'; '.join(changed[:3])}. Use another --out, or "
            "remove it to run it again."
        )


class Results:
    """The runs of a table, in its order.

    Attributes:
        runs_of: the runs that the table shows, by row; in each row by seed.
        runs: the same, as one list.
        selection: the runs that selected an epoch, by row.
        all_runs: these and the selection runs.
    """

    def __init__(self, table: Table, records: Iterable[Record]) -> None:
        ordered = sorted(records, key=lambda record: record.seed)
        self.table = table
        self.runs_of = {
            row.name: [r for r in ordered if r.row == row.name and r.kind != "selection"]
            for row in table.rows
        }
        self.runs = [record for records in self.runs_of.values() for record in records]
        self.seeds = sorted({record.seed for record in self.runs})
        self.selection = {r.row: r for r in ordered if r.kind == "selection"}
        self.all_runs = [*self.runs, *self.selection.values()]

    @classmethod
    def read(cls, table: Table, folder: Path) -> "Results":
        """Read the runs in a folder."""
        return cls(table, read_records(folder, table).values())

    def selected(self) -> tuple[Row, ...]:
        """Return the rows whose epoch the runs select; all rows if the table does not list them."""
        rows = self.table.selected_rows() if self.selection else ()
        return rows if self.selection.keys() <= {row.name for row in rows} else self.table.rows

    def missing(self) -> list[str]:
        """Return the ids of the runs that are missing for a complete table of these seeds."""
        existing = {record.id for record in self.all_runs}
        names = [run_id(row.slug, seed, "full") for seed in self.seeds for row in self.table.rows]
        names += [run_id(row.slug, 0, "selection") for row in self.selected()]
        return [name for name in names if name not in existing]
