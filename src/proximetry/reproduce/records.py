"""The runs of a table, one JSON object per line of `runs.jsonl`, without paths of a machine."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from proximetry._util.files import atomic_write, parse_json
from proximetry.recipe.auto import keep_choices
from proximetry.recipe.loading import RecipeError, differences, validation_message
from proximetry.recipe.schema import Recipe, Section
from proximetry.reproduce.plan import Kind, Run, command_for, run_id
from proximetry.reproduce.table import ReproduceError, Row, Table

if TYPE_CHECKING:
    from proximetry.training.run_folder import RunFolder

RUNS = "runs.jsonl"
_ENVIRONMENT = ("started", "python", "packages", "cuda", "git")
_CURVE = ("epoch", "seconds", "evaluation_seconds", "loss", "test", "held_out")


class Record(Section):
    """The results of a run; None is what was not recorded.

    Attributes:
        last: epoch and metrics at the end.
        selected_epoch: of a selection run.
        seconds: of training alone.
        curve: per epoch: seconds of training so far, loss, and the metrics if they were computed.
        parallel: number of runs that shared the device.
        images: number of images per split.
        views: metrics of the held-out classes for other sizes of the images.
        epochs_given: whether `--epochs` set the number of epochs.
    """

    table: str
    row: str
    slug: str
    seed: int
    kind: Kind
    recipe: dict[str, Any]
    command: str
    device: str
    environment: dict[str, Any]
    weights: dict[str, Any]
    protocol: str
    notes: list[str]
    last: dict[str, Any]
    selected_epoch: int | None
    seconds: float | None
    startup_seconds: float | None
    curve: list[dict[str, Any]]
    parallel: int | None
    images: dict[str, int] | None
    views: dict[str, dict[str, Any]] | None
    epochs_given: bool

    @property
    def id(self) -> str:
        """Unique within a table."""
        return run_id(self.slug, self.seed, self.kind)

    def metrics(
        self, epoch: int | None = None, dim: int | None = None, view: str | None = None
    ) -> dict[str, Any]:
        """Metrics at an epoch or at the end, of the first dimensions or a view; empty if none."""
        if view is not None:
            return (self.views or {}).get(view, {})
        at = self.last
        if epoch not in (None, self.last["epoch"]):
            at = next((line for line in self.curve if line["epoch"] == epoch), {})
        split = "held_out" if self.kind == "held_out" else "test"
        found: dict[str, Any] = {**at.get(split, {}), **at.get("proxies", {})}
        return found if dim is None else found.get("dims", {}).get(str(dim), {})

    def write(self, folder: Path) -> None:
        """Add the run to those of a folder, or replace the one of its id."""
        records = {**read_records(folder), self.id: self}
        write_records(folder, records.values())


def make_record(
    table: Table,
    run: Run,
    folder: "RunFolder",
    *,
    on_gpu: bool,
    selected: Sequence[Row],
    epochs_given: bool,
    **known: Any,
) -> Record:
    """Gather what a finished run left in its folder; ``known`` are further fields of the record.

    ``selected`` are the rows whose epoch is also selected.
    The recipe is that of the folder, which leaves nothing to ``auto``.
    """
    results = folder.read_results()
    root, recipe = run.recipe.data.root, Recipe.load(folder.recipe).without_places().to_dict()
    environment = parse_json(folder.environment.read_text(encoding="utf-8"))
    weights = dict(results["weights"])
    if weights["source"] == "file":
        weights["origin"] = Path(weights["origin"]).name
    return Record(
        table=table.name,
        row=run.row.name,
        slug=run.row.slug,
        seed=run.seed,
        kind=run.kind,
        recipe=recipe,
        command=command_for(table, run.row.name, [run.seed], recipe, selected, epochs_given),
        epochs_given=epochs_given,
        device=environment["device"] if on_gpu else "CPU",
        environment={key: environment.get(key) for key in _ENVIRONMENT},
        weights=weights,
        protocol=results["protocol"],
        notes=[note.replace(f"{root}/", "") if root else note for note in results["notes"]],
        last=results["last"],
        selected_epoch=results["selected"]["epoch"] if run.kind == "selection" else None,
        seconds=results["seconds"],
        startup_seconds=results["startup_seconds"],
        curve=[{key: line[key] for key in _CURVE if key in line} for line in folder.history()],
        **known,
    )


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
            sentence = isinstance(error, ValidationError) and validation_message(error, Record)
            raise ReproduceError(
                f"{path}, line {number}: invalid run ({sentence or error}). Remove the line to run "
                "it again, or use another --out"
            ) from error
        runs[record.table, record.id] = record
    return list(runs.values())


def read_records(folder: Path, table: Table | None = None) -> dict[str, Record]:
    """Read the runs of a folder by id; with a table, each must be of one of its rows."""
    records = {record.id: record for record in read_runs(folder)}
    for name, record in records.items():
        try:
            if table is not None and table.row(record.row).slug != record.slug:
                raise ReproduceError(f"slug {record.slug!r} is not that of row {record.row!r}.")
        except ReproduceError as error:
            raise ReproduceError(
                f"{folder / RUNS}: {name}: {error} Use another --out, or remove its line"
            ) from error
    return records


def check_same(name: str | Path, before: dict[str, Any], run: Run) -> None:
    """Raise if ``name``, a run, was made with another recipe.

    Keys that do not change results, or only floating-point rounding, may differ.
    """
    try:
        existing = Recipe.load(before)
    except RecipeError as error:
        raise ReproduceError(
            f"{name} has an invalid recipe ({error}). Use another --out, or remove it"
        ) from error
    old, new = (
        recipe.without_places().portable(without=("metadata", "path", "runtime"))
        for recipe in (existing, keep_choices(run.recipe, existing))
    )
    changed = differences(old, new)
    if changed:
        raise ReproduceError(
            f"{name} was made with another recipe: {'; '.join(changed[:3])}. Use another --out, or "
            "remove it to run it again"
        )


class Results:
    """The runs of a table that are there, in its order.

    Attributes:
        runs_of: the runs that the table shows, by row; in each row by seed.
        runs: all of them.
        selection: the runs that selected an epoch, by row.
        everything: all runs.
    """

    def __init__(self, table: Table, records: Iterable[Record]) -> None:
        known = sorted(records, key=lambda record: record.seed)
        self.table = table
        self.runs_of = {
            row.name: [r for r in known if r.row == row.name and r.kind != "selection"]
            for row in table.rows
        }
        self.runs = [record for records in self.runs_of.values() for record in records]
        self.seeds = sorted({record.seed for record in self.runs})
        self.selection = {r.row: r for r in known if r.kind == "selection"}
        self.everything = [*self.runs, *self.selection.values()]

    @classmethod
    def read(cls, table: Table, folder: Path) -> "Results":
        """The runs in a folder."""
        return cls(table, read_records(folder, table).values())

    def selected(self, asked: Iterable[Row] = ()) -> tuple[Row, ...]:
        """The rows whose epoch a complete table selects, by what is there and what was asked for.

        Those that the table names, or all as soon as there is another one.
        """
        names = {*self.selection, *(row.name for row in asked)}
        named = self.table.selected_rows() if names else ()
        return named if names <= {row.name for row in named} else self.table.rows

    def missing(self, seeds: Iterable[int], selected: Iterable[Row]) -> list[str]:
        """Names of the runs that a complete table would also have."""
        there = {record.id for record in self.everything}
        wanted = sorted({*self.seeds, *seeds})
        names = [run_id(row.slug, seed, "full") for seed in wanted for row in self.table.rows]
        names += [run_id(row.slug, 0, "selection") for row in self.selected(selected)]
        return [name for name in names if name not in there]
