"""Filters and text in the form of Milvus, for all of its versions."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value
from proximetry.search.conditions import RANGES, Condition

# Fields besides the vector; other columns are in a field of JSON.
TEXTS, OTHERS = ("path", "label"), "columns"
# Milvus stores UTF-8 text, and names of files may have other bytes, which are lone surrogates in
# Python. They are stored as the last private-use characters; another one stands for no text.
_TO_PRIVATE = {0xDC00 + byte: 0x10FF00 + byte for byte in range(0x80, 0x100)}
_FROM_PRIVATE = {private: surrogate for surrogate, private in _TO_PRIVATE.items()}
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
NO_TEXT = "\U0010ff00"
_LARGEST = 1.7976931348623157e308


def store(value: Any) -> Any:
    """Return a value as Milvus stores it; None for NaN and infinity."""
    if isinstance(value, float):
        return value if abs(value) <= _LARGEST else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value).translate(_TO_PRIVATE)


def restore(value: Any) -> Any:
    """Return a value that Milvus stores as it was."""
    if not isinstance(value, str):
        return value
    return None if value == NO_TEXT else value.translate(_FROM_PRIVATE)


def _quoted(value: Any) -> str:
    return f'"{store(str(value)).translate(_ESCAPES)}"'


def _literals(value: Any, operator: str) -> list[str]:
    """Return the literals that a value is compared with: text may be a number."""
    literals = [] if operator in RANGES and not isinstance(value, str) else [_quoted(value)]
    with suppress(ValueError):
        parsed = json.loads(str(value).lower().replace("inf", "1e999"))
        if isinstance(parsed, int) and abs(parsed) >= 2**63:
            parsed = float(parsed)
        if isinstance(parsed, float):
            parsed = min(max(parsed, -_LARGEST), _LARGEST)
        if isinstance(parsed, bool | int | float):
            literals.append(json.dumps(parsed))
    return literals


def _within(field: str, prefix: str) -> str:
    """Return the expression of text with a prefix: a range, since patterns differ by version."""
    text = store(prefix).rstrip("\U0010ffff")
    if not text:
        return f'{field} >= ""'
    following = 0xE000 if text[-1] == "\ud7ff" else ord(text[-1]) + 1
    return f"({field} >= {_quoted(prefix)} and {field} < {_quoted(text[:-1] + chr(following))})"


def expression(condition: Condition) -> str:
    """Return the filter expression of a condition; it compares no missing values."""
    column, operator, values = condition
    field, exists = f"{OTHERS}[{_quoted(column)}]", f"(exists {OTHERS}[{_quoted(column)}])"
    if column in TEXTS:
        if operator in ("=", "!="):
            texts = [_quoted(NO_TEXT if value is None else value) for value in values]
            return f"{column} {'in' if operator == '=' else 'not in'} [{', '.join(texts)}]"
        if not isinstance(values[0], str):
            raise UsageError(f"column {column} has type text, got {format_value(values[0])}")
        field, exists = column, f"({column} != {_quoted(NO_TEXT)})"
    if operator == "^=":
        terms = [_within(field, prefix) for prefix in values]
    else:
        sign = operator if operator in RANGES else "=="
        known = [value for value in values if value is not None]
        terms = [f"{field} {sign} {text}" for one in known for text in _literals(one, operator)]
    matches = f"({' or '.join(terms or ['id < 0'])})"
    if operator == "!=":
        matches = f"(not {matches})"
    if (operator == "!=") != (None in values):
        return f"((not {exists}) or {matches})"
    return f"({exists} and {matches})"
