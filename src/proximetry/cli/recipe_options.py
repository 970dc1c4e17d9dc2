"""Every key of a recipe as an option of the command line."""

import dataclasses
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter, Token

from proximetry.cli.output import COLUMNS_WORD, read_columns
from proximetry.metrics.scores import Metrics
from proximetry.recipe.schema import AUTO, Recipe, Section, YamlError, parse_yaml


def _as_yaml(kind: Any, tokens: tuple[Token, ...]) -> Any:
    """Read words as YAML would; whether they fit is for the recipe to say."""
    found = []
    for token in tokens:
        try:
            found.append(parse_yaml(token.value) if token.value.strip() else token.value)
        except YamlError:
            found.append(token.value)
    if get_origin(kind) is not tuple:
        return found[0]
    return [] if found in ([""], [[]], [None]) else found  # cyclopts makes "" of []


def _text_or_none(kind: Any, tokens: tuple[Token, ...]) -> str | None:
    """Read a word as it is, and null as YAML does."""
    return None if tokens[0].value == "null" else tokens[0].value


def _bare(kind: Any) -> Any:
    """Return a type without ``None`` and without its limits."""
    members = [member for member in get_args(kind) if member is not type(None)]
    if type(None) in get_args(kind) and len(members) == 1:
        kind = members[0]
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _option(kind: Any, default: Any, about: str) -> Any:
    optional, kind = type(None) in get_args(kind), _bare(kind)
    if kind is str and optional:
        text = Parameter(help=about, metavar="STR", converter=_text_or_none)
        return Annotated[Any, text]
    if kind is bool and default == AUTO:
        words = Parameter(help=about, metavar="auto|true|false", converter=_as_yaml)
        return Annotated[Any, words]
    if kind in (bool, str) or get_origin(kind) is Literal:
        return Annotated[kind, Parameter(help=about)]
    if get_origin(kind) is dict and _bare(get_args(kind)[1]) is str:
        pairs = Parameter(
            help=about, metavar=COLUMNS_WORD, converter=read_columns, accepts_keys=False, n_tokens=1
        )
        return Annotated[Any, pairs]
    if get_origin(kind) is dict:
        value: Any = Annotated[Any, Parameter(converter=_as_yaml)]
        return Annotated[dict[str, value], Parameter(help=about)]
    several = get_origin(kind) is tuple
    word = {int: "N", float: "X"}[_bare(get_args(kind)[0] if several else kind)]
    hint: Any = tuple[Any, ...] if several else Any
    return Annotated[hint, Parameter(help=about, metavar=word, converter=_as_yaml)]


def _options(section: Any) -> Any:
    """Return a dictionary type with the keys of a section, all of which may be left out."""
    hints: dict[str, Any] = {}
    if dataclasses.is_dataclass(section):
        kinds = get_type_hints(section)
        for field in dataclasses.fields(section):
            hints[field.name] = _option(kinds[field.name], field.default, field.metadata["help"])
    else:
        for name, info in section.model_fields.items():
            kind: Any = info.annotation
            nested = dataclasses.is_dataclass(kind) or (
                isinstance(kind, type) and issubclass(kind, Section)
            )
            about = info.description or ""
            hints[name] = _options(kind) if nested else _option(kind, info.default, about)
    return TypedDict(f"{section.__name__}Options", hints, total=False)  # type: ignore[operator]


# No defaults: what applies when a key is not given is for the recipe to say, not for the key.
_GROUP = Group(
    "Keys of the recipe",
    help="What is not given is as the recipe has it; --print-config prints that.",
    sort_key=1,
)
_METRICS = {
    field.name: Annotated[kind, Parameter(help=field.metadata["help"])]
    for field, kind in zip(
        dataclasses.fields(Metrics), get_type_hints(Metrics).values(), strict=True
    )
}
# A dictionary of those that are given.
MetricsOptions: Any = Annotated[
    TypedDict("MetricsOptions", _METRICS, total=False),  # type: ignore[operator]
    Parameter(name="*"),
]
RecipeOptions: Any = Annotated[_options(Recipe), Parameter(name="*", group=_GROUP)]
