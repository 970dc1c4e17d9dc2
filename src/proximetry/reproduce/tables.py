"""A published table as data: what was run, what came out, and what was claimed.

One YAML file each in the folder ``tables`` beside this file; unknown keys are errors.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from proximetry._common import closest
from proximetry.reproduce.trouble import ReproduceError
from proximetry.training.recipe import Recipe, Training, find_recipe
from proximetry.training.recipe_values import RecipeError, build, require

FOLDER = Path(__file__).parent / "tables"
_SPOKEN = {"+": "plus", "α": "alpha", "δ": "delta"}
FigureKind = Literal["sweep", "curves"]


@dataclass(frozen=True)
class Published:
    """How the published figures came about.

    Args:
        backbone: the network they were measured with.
        protocol: how the epoch was chosen and how many runs stand behind a figure.
        note: what else a reader must know.
        epochs: the number of epochs, where it was published; else that of the table is ours.
    """

    backbone: str = ""
    protocol: str = ""
    note: str = ""
    epochs: int | None = None


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        name: as the table prints it.
        changes: dotted key of the recipe → value, over the table's base.
        published: metric → published percentage; a metric that was not published is left out.
        x: place on the horizontal axis of a sweep.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)
    x: float | None = None

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        spoken = self.name.lower()
        for sign, word in _SPOKEN.items():
            spoken = spoken.replace(sign, f" {word} ")
        return re.sub(r"[^a-z0-9.]+", "-", spoken).strip("-")


@dataclass(frozen=True)
class Claim:
    """That one row beats another.

    Args:
        better: the row that is said to win.
        worse: the row that it is said to beat.
        metric: in which.
    """

    better: str
    worse: str
    metric: str = "recall@1"


@dataclass(frozen=True)
class Figure:
    """A picture of the table.

    Args:
        kind: sweep draws recall@1 against the x of the rows; curves draws it against epochs, and
            against seconds of training.
        label: of the horizontal axis of a sweep.
        log: whether that axis is logarithmic.
    """

    kind: FigureKind = "sweep"
    label: str = ""
    log: bool = False


@dataclass(frozen=True)
class _Heading:
    """The keys of a table that `build` can check by their types alone."""

    name: str
    title: str = ""
    source: str = ""
    published: Published = field(default_factory=Published)
    recipe: str = ""
    base: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("recall@1",)
    selection: bool = False
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table(_Heading):
    """A published table.

    Args:
        name: of its file, and of the folder of results.
        title: one line for people.
        source: paper, and which of its tables or figures.
        published: how the published figures came about.
        recipe: a shipped recipe that the base is laid over, if any.
        base: a recipe as plain values, shared by the rows.
        rows: in the order of the table.
        metrics: the columns.
        claims: what the paper says about the order of the rows.
        selection: whether the number of epochs is also chosen on held-out classes.
        figure: the picture, if any.
        differences: how our setting differs from the published one, a sentence each.
    """

    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    figure: Figure | None = None

    def __post_init__(self) -> None:
        if self.recipe:
            object.__setattr__(self, "base", _lay_over(self.recipe, self.base))
        require(
            bool(re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name)),
            f"name {self.name!r} must be of small letters, digits, dots and hyphens",
        )
        require(bool(self.rows), "rows is empty: a table has at least one")
        slugs = [row.slug for row in self.rows]
        twice = sorted({row.name for row in self.rows if slugs.count(row.slug) > 1})
        require(not twice, f"rows must have names of their own; told apart are not {twice}")
        require(all(slugs), "rows must have names with at least one letter or digit")
        for claim in self.claims:
            self.row(claim.better), self.row(claim.worse)
            require(claim.metric in self.metrics, f"claims: {claim.metric!r} is not in metrics")
        if self.figure is not None and self.figure.kind == "sweep":
            without = [row.name for row in self.rows if row.x is None]
            require(not without, f"a sweep needs x for every row; {without} have none")

    @property
    def dataset(self) -> str:
        """The dataset of the base recipe."""
        return str(self.base.get("data", {}).get("dataset", "folder"))

    def row(self, name: str) -> Row:
        """The row of this name."""
        for row in self.rows:
            if row.name == name:
                return row
        names = [row.name for row in self.rows]
        raise RecipeError(f"there is no row {name!r}{closest(name, names)}")

    def epochs(self, row: Row) -> int:
        """The epochs of a row."""
        return int(self.recipe_values(row).get("training", {}).get("epochs", Training().epochs))

    def recipe_values(self, row: Row) -> dict[str, Any]:
        """The plain recipe of a row: the base with the row's changes."""
        values = deepcopy(self.base)
        for key, value in row.changes.items():
            section, last = _place(values, key)
            if not isinstance(section, dict):
                raise RecipeError(f"row {row.name!r}: {key!r} leads into a value, not a section")
            section[last] = deepcopy(value)
        return values

    @classmethod
    def from_dict(cls, values: Any) -> "Table":
        """Build from plain values; unknown keys and wrong types are errors."""
        if not isinstance(values, dict):
            raise RecipeError(f"a table must hold keys such as name, base, rows; got {values!r}")
        known = [f.name for f in fields(cls)]
        for key in values:
            require(key in known, f"unknown key {key!r}{closest(str(key), known)}")
        plain = {key: v for key, v in values.items() if key not in ("rows", "claims", "figure")}
        parts: dict[str, Any] = {
            "rows": tuple(_many(Row, values.get("rows", ()), "rows")),
            "claims": tuple(_many(Claim, values.get("claims", ()), "claims")),
        }
        if values.get("figure") is not None:
            parts["figure"] = build(Figure, values["figure"], "figure")
            _known_kind(parts["figure"].kind)
        heading = build(_Heading, plain, "")
        return cls(**{key: getattr(heading, key) for key in plain}, **parts)

    @classmethod
    def load(cls, source: "str | Path | Table") -> "Table":
        """Read a YAML file, or a shipped table by its name; a table is returned as it is."""
        if isinstance(source, Table):
            return source
        import yaml

        path = _find(source)
        try:
            return cls.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (yaml.YAMLError, RecipeError, TypeError) as error:
            raise ReproduceError(f"{path} holds no table that can be used: {error}") from error


def _lay_over(recipe: str, base: dict[str, Any]) -> dict[str, Any]:
    """A shipped recipe as plain values, with those of the base instead of its own."""
    import yaml

    Recipe.load(recipe)  # which says what is wrong with it
    # What the file says and no more: the rest is for a card to choose.
    values: dict[str, Any] = yaml.safe_load(find_recipe(recipe).read_text(encoding="utf-8"))
    for section, keys in base.items():
        old = values.get(section)
        if isinstance(old, dict) and isinstance(keys, dict):
            keys = {**old, **keys}
        values[section] = keys
    return values


def _many(kind: type[Row] | type[Claim], values: Any, where: str) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RecipeError(f"{where} must be a list, got {values!r}")
    found = [build(kind, value, f"{where}[{i}]") for i, value in enumerate(values)]
    for i, item in enumerate(found):
        for metric, number in getattr(item, "published", {}).items():
            if not isinstance(number, (int, float)) or not 0 <= number <= 100:
                place = f"{where}[{i}].published.{metric}"
                raise RecipeError(f"{place} must be a percentage, got {number!r}")
    return found


def _known_kind(kind: str) -> None:
    kinds = get_args(FigureKind)
    require(kind in kinds, f"figure.kind is {kind!r}{closest(kind, kinds)} Known: {kinds}")


def _place(values: dict[str, Any], key: str) -> tuple[Any, str]:
    """The section that a dotted key leads to, made where it is missing, and the last part."""
    *sections, last = key.split(".")
    inner: Any = values
    for section in sections:
        if not isinstance(inner, dict):
            break
        inner = inner.setdefault(section, {})
    return inner, last


def shipped_tables() -> dict[str, Path]:
    """The tables that come with the package, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def list_tables() -> str:
    """A line for every shipped table: name, number of runs, title."""
    lines = []
    for name in shipped_tables():
        table = Table.load(name)
        rows = len(table.rows)
        runs = f"{rows} run{'s' * (rows > 1)} per seed" + (
            f" + {rows} for selection" if table.selection else ""
        )
        lines.append(f"{name:26} {runs:34} {table.title}")
    return "\n".join(lines)


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    known = shipped_tables()
    if str(source) in known:
        return known[str(source)]
    hint = closest(str(source), known)
    raise ReproduceError(f"no table {str(source)!r}{hint} `proximetry reproduce --list` lists them")
