"""Published tables, as YAML files in the folder ``tables``; unknown keys are errors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value
from proximetry.recipe.loading import (
    RecipeError,
    find_file,
    merge,
    plain_values,
    read_yaml,
    validation_message,
)
from proximetry.recipe.schema import Count, Dim, Flag, Number, Section, Side, TrainingConfig

FOLDER = Path(__file__).parent / "tables"
_SYMBOL_NAMES = {"+": "plus", "α": "alpha", "δ": "delta"}
Percentage = Annotated[float, Field(ge=0, le=100)]


class ReproduceError(UsageError):
    """An invalid table, option or record."""


class RunsFailedError(ValueError):
    """Some runs failed."""


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of `proximetry reproduce`.

    Attributes:
        seeds: one run per row and seed
        rows: only these rows of the table; default: all
        parallel: number of concurrent runs; seconds are compared only if it is 1
        backbone: replaces the table's backbone, such as bn_inception or resnet50.tv_in1k
        weights: weights of the backbone: auto, package, hub, none, or a file
        epochs: replaces the number of epochs; schedule and evaluation interval scale too
        selection: also select the epoch on held-out classes; default: set by the table
        device: cpu, cuda or cuda:1; default: cuda if there is a GPU
        render: only rewrite README.md and the figures from existing runs
        keep_runs: keep checkpoints, embedders and logs of the runs
    """

    seeds: tuple[int, ...] = (0,)
    rows: tuple[str, ...] = ()
    parallel: int = 1
    backbone: str | None = None
    weights: str | None = None
    epochs: int | None = None
    selection: bool | None = None
    device: str | None = None
    render: bool = False
    keep_runs: bool = False


DEFAULTS = ReproduceOptions()


class Published(Section):
    """The published setting.

    Attributes:
        protocol: how the epoch was selected, and the number of runs per published value.
        epochs: default: the table's.
    """

    backbone: str = ""
    protocol: str = ""
    note: str = ""
    epochs: Count | None = None


class Row(Section):
    """One row.

    Attributes:
        recipe: a shipped recipe that replaces the table's.
        changes: overrides of the table's base, by dotted or nested keys.
        published: metric → published percentage.
        x: position on the horizontal axis of a sweep.
    """

    name: str
    recipe: str | None = None
    changes: dict[str, Any] = Field({})
    published: dict[str, Percentage] = Field({})
    x: Number | None = None

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        return slugify(self.name)


def slugify(name: str) -> str:
    """Return a name as part of a file name."""
    for sign, word in _SYMBOL_NAMES.items():
        name = name.replace(sign, f" {word} ")
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


class Claim(Section):
    """A published claim that one row is better than another."""

    better: str
    worse: str
    metric: str = "recall@1"


class Figure(Section):
    """A figure: recall@1 against the x of the rows (sweep), or epochs and seconds (curves).

    ``label`` and ``log`` (logarithmic) apply to the horizontal axis of a sweep.
    """

    kind: Literal["sweep", "curves"] = "sweep"
    label: str = ""
    log: Flag = False


class Table(Section):
    """A published table, or a search for a better recipe.

    Attributes:
        name: name of the results folder; default: the file's stem.
        source: paper, and its table or figure.
        protocol: "last" trains on all training classes and evaluates the test set at the last
            epoch; "held_out" evaluates held-out training classes and never the test set.
        recipe: a shipped recipe that the base overrides, if any.
        base: shared by the rows: overrides of that recipe, or a whole recipe.
        metrics: the columns; "map@r, codes" is the metric of binary codes.
        seconds: whether the seconds of training are a column.
        dims: further columns: the first metric for the first d dimensions of the embedding.
        views: with held_out, further columns: the first metric for other (crop, short side) of
            the evaluated images, and with flip TTA.
        claims: the published order of the rows.
        selection: whether the epoch is also selected on held-out classes, or the rows for which.
        differences: differences between the table's and the published setting.
        comparison: whether the rows are losses that are compared with each other (`compare`).
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    title: str = ""
    source: str = ""
    protocol: Literal["last", "held_out"] = "last"
    published: Published = Published()
    recipe: str | None = None
    base: dict[str, Any] = Field({})
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    metrics: Annotated[tuple[str, ...], Field(min_length=1)] = ("recall@1",)
    seconds: Flag = False
    dims: tuple[Dim, ...] = ()
    views: tuple[tuple[Side, Side], ...] = ()
    claims: tuple[Claim, ...] = ()
    selection: Flag | tuple[str, ...] = False
    figure: Figure | None = None
    differences: tuple[str, ...] = ()
    comparison: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        slugs = ["", *(row.slug for row in self.rows)]
        duplicates = [row.name for row in self.rows if slugs.count(row.slug) > 1]
        if duplicates:
            raise ValueError(f"row names must differ in letters and digits, got {duplicates}")
        names = [*((f"row {row.name!r}", n) for row in self.rows for n in row.published)]
        names += [("claims", claim.metric) for claim in self.claims]
        names += [("figure", "recall@1")] if self.figure else []
        for where, name in names:
            if name not in self.metrics:
                raise ValueError(
                    f"{where}: {name!r} is not in metrics{suggest(name, self.metrics)}"
                )
        for claim in self.claims:
            self.row(claim.better), self.row(claim.worse)
        self.selected_rows()
        without = [row.name for row in self.rows if row.x is None]
        if without and self.figure is not None and self.figure.kind == "sweep":
            raise ValueError(f"a sweep needs x for every row; {without} have none")
        if self.protocol == "held_out" and (self.selection or self.claims or self.figure):
            raise ValueError("a table with protocol held_out has no selection, claims or figure")
        if self.protocol == "last" and self.views:
            raise ValueError("views are for tables with protocol held_out")
        _ = self.shared  # raises if a recipe does not exist
        return self

    @classmethod
    def load(cls, source: "str | Path | Mapping[str, Any] | Table") -> "Table":
        """Load a table from a YAML file, the name of a shipped table or plain values."""
        if isinstance(source, Table):
            return source
        values: Any = source
        where: str | Path = "this"
        try:
            if not isinstance(source, Mapping):
                where = find_file(source, shipped_tables(), "table", "reproduce --list")
                values = {"name": where.stem, **read_yaml(where, "table")}
            return cls.model_validate(values)
        except ValidationError as error:
            message = f"{where} is an invalid table: {validation_message(error, cls)}"
        except RecipeError as error:
            message = str(error)
        raise ReproduceError(message)

    def recipe_values(self, row: Row) -> dict[str, Any]:
        """Return the plain recipe of a row."""
        return merge(self.shared[row.recipe or self.recipe], row.changes)

    @cached_property
    def shared(self) -> dict[str | None, dict[str, Any]]:
        """The plain recipes that rows share, by the shipped recipe that the base overrides."""
        names = {row.recipe or self.recipe for row in self.rows}
        return {name: merge(plain_values(name) if name else {}, self.base) for name in names}

    def dataset(self, row: Row) -> str:
        """Return the dataset of a row."""
        return str(self.recipe_values(row).get("data", {}).get("dataset", "folder"))

    def row(self, name: str) -> Row:
        """Return the row of this name."""
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise ReproduceError(f"unknown row {format_value(name)}{suggest(name, rows)}")
        return rows[name]

    def selected_rows(self, override: bool | None = None) -> tuple[Row, ...]:
        """Return the rows whose epoch is also selected; ``override`` applies to all rows."""
        selection = self.selection if override is None else override
        if isinstance(selection, bool):
            return self.rows if selection else ()
        return tuple(map(self.row, selection))

    def epochs(self, row: Row) -> int | str:
        """Return the number of epochs of a row, or auto."""
        training: dict[str, int | str] = self.recipe_values(row).get("training", {})
        return training.get("epochs", TrainingConfig().epochs)


def shipped_tables() -> dict[str, Path]:
    """Return the tables that come with the package, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def list_tables() -> str:
    """Return a line for every shipped table: name, number of runs, title."""
    lines = []
    for table in map(Table.load, shipped_tables()):
        runs = f"{len(table.rows)} runs per seed"
        selected = len(table.selected_rows())
        runs += f" + {selected} for selection" if selected else ""
        lines.append(f"{table.name:26} {runs:34} {table.title}")
    return "\n".join(lines)
