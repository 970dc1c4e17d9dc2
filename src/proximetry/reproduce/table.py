"""A published table as data: what was run, what came out, and what was claimed.

One YAML file each in the folder ``tables`` beside this file; unknown keys are errors.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from proximetry._util.errors import closest, shown
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
_SPOKEN = {"+": "plus", "α": "alpha", "δ": "delta"}
Percentage = Annotated[float, Field(ge=0, le=100)]


class ReproduceError(ValueError):
    """A table that cannot be run or was not run to its end, and what to do."""


class RunsFailedError(ReproduceError):
    """Runs that failed, and why."""


class Published(Section):
    """How the published figures came about.

    Attributes:
        protocol: how the epoch was selected and how many runs stand behind a figure.
        note: what else a reader must know.
        epochs: if published; else the number of epochs in the table is ours.
    """

    backbone: str = ""
    protocol: str = ""
    note: str = ""
    epochs: Count | None = None


class Row(Section):
    """One row.

    Attributes:
        recipe: another shipped recipe than the table's to lay its base over.
        changes: to the recipe that the rows share, by dotted or nested keys.
        published: metric → published percentage.
        x: place on the horizontal axis of a sweep.
    """

    name: str
    recipe: str | None = None
    changes: dict[str, Any] = Field({})
    published: dict[str, Percentage] = Field({})
    x: Number | None = None

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        spoken = self.name.lower()
        for sign, word in _SPOKEN.items():
            spoken = spoken.replace(sign, f" {word} ")
        return re.sub(r"[^a-z0-9.]+", "-", spoken).strip("-")


class Claim(Section):
    """That one row beats another in a metric."""

    better: str
    worse: str
    metric: str = "recall@1"


class Figure(Section):
    """A picture: recall@1 against the x of the rows (sweep), or epochs and seconds (curves).

    ``label`` and ``log`` (logarithmic) are about the horizontal axis of a sweep.
    """

    kind: Literal["sweep", "curves"] = "sweep"
    label: str = ""
    log: Flag = False


class Table(Section):
    """A published table, or a search for a better recipe.

    Attributes:
        name: of the folder of results; default: of the file.
        source: paper, and which of its tables or figures.
        protocol: last trains on all training classes and evaluates the test set at the last epoch;
            held_out trains without the held-out classes and evaluates those, never the test set.
        recipe: a shipped recipe that the base is laid over, if any.
        base: changes to it, or a whole recipe: what the rows share.
        metrics: the columns.
        seconds: whether the seconds of training are a column.
        dims: further columns: the first metric for the first d dimensions of the embedding.
        views: with held_out, further columns: the first metric for other sizes of the evaluated
            images (pairs of a crop and of what images are scaled to before it), and with flip TTA.
        claims: what the paper says about the order of the rows.
        selection: whether the epoch is also selected on held-out classes; or of which rows it is.
        differences: how our setting differs from the published one, a sentence each.
    """

    name: str
    title: str = ""
    source: str = ""
    protocol: Literal["last", "held_out"] = "last"
    published: Published = Published()
    recipe: str | None = None
    base: dict[str, Any] = Field({})
    rows: tuple[Row, ...]
    metrics: tuple[str, ...] = ("recall@1",)
    seconds: Flag = False
    dims: tuple[Dim, ...] = ()
    views: tuple[tuple[Side, Side], ...] = ()
    claims: tuple[Claim, ...] = ()
    selection: Flag | tuple[str, ...] = False
    figure: Figure | None = None
    differences: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name):
            raise ValueError(
                f"name {self.name!r} must be of small letters, digits, dots and hyphens"
            )
        for key in ("rows", "metrics"):
            if not getattr(self, key):
                raise ValueError(f"{key} is empty: a table has at least one")
        slugs = ["", *(row.slug for row in self.rows)]
        wrong = [row.name for row in self.rows if slugs.count(row.slug) > 1]
        if wrong:
            raise ValueError(f"rows must differ in the letters and digits of their names: {wrong}")
        for claim in self.claims:
            self.row(claim.better), self.row(claim.worse)
            if claim.metric not in self.metrics:
                raise ValueError(f"claims: {claim.metric!r} is not in metrics")
        self.selected_rows()
        if self.figure is not None and "recall@1" not in self.metrics:
            raise ValueError("figure: the picture shows recall@1, which is not in metrics")
        if self.figure is not None and self.figure.kind == "sweep":
            without = [row.name for row in self.rows if row.x is None]
            if without:
                raise ValueError(f"a sweep needs x for every row; {without} have none")
        if self.protocol == "held_out" and (self.selection or self.claims or self.figure):
            raise ValueError("a table with protocol held_out has no selection, claims or figure")
        if self.protocol == "last" and self.views:
            raise ValueError("views are for tables with protocol held_out")
        _ = self.shared  # there is no table without the recipes it names
        return self

    @model_validator(mode="after")
    def _check_published(self) -> Self:
        """Refuse figures that would never be shown."""
        for row in self.rows:
            for name in row.published:
                if name not in self.metrics:
                    told = f"row {row.name!r}: published {name!r} is not in metrics"
                    raise ValueError(f"{told}{closest(name, self.metrics)}")
        return self

    @classmethod
    def load(cls, source: "str | Path | Mapping[str, Any] | Table") -> "Table":
        """Make a table of a YAML file, a shipped table's name or plain values."""
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
            sentence = f"{where} is no table that can be used: {validation_message(error, cls)}"
        except RecipeError as error:
            sentence = str(error)
        raise ReproduceError(sentence)

    def recipe_values(self, row: Row) -> dict[str, Any]:
        """The plain recipe of a row."""
        return merge(self.shared[row.recipe or self.recipe], row.changes)

    @cached_property
    def shared(self) -> dict[str | None, dict[str, Any]]:
        """The plain recipes that rows share, by the shipped recipe that the base is laid over."""
        names = {row.recipe or self.recipe for row in self.rows}
        return {name: merge(plain_values(name) if name else {}, self.base) for name in names}

    def dataset(self, row: Row) -> str:
        """The dataset of a row."""
        return str(self.recipe_values(row).get("data", {}).get("dataset", "folder"))

    def row(self, name: str) -> Row:
        """The row of this name."""
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise ReproduceError(f"there is no row {shown(name)}{closest(name, rows)}")
        return rows[name]

    def selected_rows(self, asked: bool | None = None) -> tuple[Row, ...]:
        """The rows whose epoch is also selected; ``asked`` is for all rows, whatever is said."""
        wanted = self.selection if asked is None else asked
        if isinstance(wanted, bool):
            return self.rows if wanted else ()
        return tuple(map(self.row, wanted))

    def epochs(self, row: Row) -> int | str:
        """The number of epochs of a row, or auto."""
        given = self.recipe_values(row).get("training", {})
        epochs: int | str = given.get("epochs", TrainingConfig().epochs)
        return epochs


def shipped_tables() -> dict[str, Path]:
    """The tables that come with the package, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def list_tables() -> str:
    """A line for every shipped table: name, number of runs, title."""
    lines = []
    for name in shipped_tables():
        table = Table.load(name)
        rows = len(table.rows)
        runs = f"{rows} run{'s' * (rows > 1)} per seed"
        selected = len(table.selected_rows())
        runs += f" + {selected} for selection" if selected else ""
        lines.append(f"{name:26} {runs:34} {table.title}")
    return "\n".join(lines)
