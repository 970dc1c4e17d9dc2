"""Conditions of a filter (`where`): parse and validate them.

`where` maps a column to a condition: a value, a list of values combined with OR, or a mapping of
operators to values. Every operator of every column must match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value, join_first

Where: TypeAlias = Mapping[str, Any]
"""Conditions by column, such as ``{"label": ["jay", "crow"], "year": {">=": 1999, "<": 2005}}``."""

LISTS = ("=", "!=", "^=")  # any of the values, none of them, any of the prefixes
RANGES = ("<", "<=", ">", ">=")
_TEXT = re.compile(r"([^!<>=^].*?)(!=|<=|>=|\^=|=|<|>)(.*)", re.DOTALL)


class Condition(NamedTuple):
    """An operator of one column and its values: exactly one for a range."""

    column: str
    operator: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        sign = "" if self.operator == "=" else f"{self.operator} "
        return f"{self.column} {sign}{join_first(map(format_value, self.values))}"


def parse_where(where: Where, columns: Iterable[str]) -> list[Condition]:
    """Return the conditions of `where`, after checking columns, operators and values."""
    names, conditions = [*columns], list[Condition]()
    for column, value in where.items():
        if column not in names:
            raise UsageError(
                f"the gallery has no column {format_value(column)}{suggest(str(column), names)}"
            )
        if value == {}:
            raise UsageError(_missing(column))
        operators = value if isinstance(value, Mapping) else {"=": value}
        conditions += [_condition(column, sign, values) for sign, values in operators.items()]
    return conditions


def _condition(column: str, operator: Any, value: Any) -> Condition:
    if operator not in LISTS + RANGES:
        raise UsageError(
            f"unknown operator {format_value(operator)} of {column}. Use one of "
            f"{' '.join(LISTS + RANGES)}"
        )
    single = isinstance(value, str | bytes) or not isinstance(value, Iterable)
    values = (value,) if single else tuple(value)
    if not values:
        raise UsageError(_missing(column))
    if operator in RANGES and (not single or value is None):
        raise UsageError(f"{column} {operator} needs one value, got {format_value(value)}")
    try:
        "".join(one for one in values if isinstance(one, str)).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{column} {operator} needs text, got {format_value(value)}") from None
    if operator == "^=" and not all(isinstance(prefix, str) for prefix in values):
        raise UsageError(f"{column} ^= needs text, got {format_value(value)}")
    return Condition(column, operator, values)


def _missing(column: str) -> str:
    return f"where has no value for {column}. Pass one, or remove {column}."


def parse_conditions(conditions: Iterable[str]) -> dict[str, Any]:
    """Parse conditions such as label=jay and year>=1999; = of one column are combined with OR."""
    parsed: dict[str, dict[str, Any]] = {}
    for condition in conditions:
        match = _TEXT.fullmatch(condition)
        if match is None:
            raise UsageError(
                f"invalid condition {format_value(condition)}. Write COLUMN=VALUE, such as "
                "label=jay, or another operator: != < <= > >= ^= (prefix)."
            )
        column, operator, value = match.groups()
        operators = parsed.setdefault(column, {})
        if operator in LISTS:
            operators.setdefault(operator, []).append(value)
        elif operators.setdefault(operator, value) != value:
            raise UsageError(f"two values of {column} {operator}: pass one")
    return {
        column: operators["="] if [*operators] == ["="] else operators
        for column, operators in parsed.items()
    }
