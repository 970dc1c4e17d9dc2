"""From plain values to typed ones: unknown keys and wrong types are errors that name the place."""

from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args

from proximetry._common import closest


class RecipeError(ValueError):
    """A recipe that cannot be used, and why."""


def require(condition: bool, message: str) -> None:
    """Refuse a recipe unless the condition holds."""
    if not condition:
        raise RecipeError(message)


def plain(value: Any) -> Any:
    """Turn tuples into lists, as YAML and JSON know them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def differences(
    before: dict[str, Any], now: dict[str, Any], where: str = ""
) -> list[tuple[str, Any, Any]]:
    """The dotted keys in which two plain recipes differ, each with the old and the new value."""
    found = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and key != "settings":
            found += differences(old, new, f"{where}{key}.")
        elif old != new:
            found.append((f"{where}{key}", old, new))
    return found


def build(cls: Any, values: Any, where: str) -> Any:
    """Make a dataclass of nested dictionaries; ``where`` names the place for messages."""
    if not isinstance(values, dict):
        raise RecipeError(f"{where or 'the recipe'} must hold keys and values, got {values!r}")
    known = {f.name: f for f in fields(cls)}
    arguments = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            hint = closest(str(key), known)
            raise RecipeError(f"unknown key {path!r}{hint} Known here: {', '.join(known)}")
        kind = known[key].type
        default = known[key].default_factory
        if is_dataclass(default):
            arguments[key] = build(default, value, path)
        else:
            arguments[key] = convert(value, kind, path)
    return cls(**arguments)


def convert(value: Any, kind: Any, path: str) -> Any:
    """Check a value against the annotation of its field, with YAML's habits forgiven."""
    options = [kind] if not hasattr(kind, "__args__") else list(get_args(kind))
    origin = getattr(kind, "__origin__", None)
    if origin is tuple:
        inner = options[0]
        if not isinstance(value, (list, tuple)) or (
            Ellipsis not in options and len(value) != len(options)
        ):
            raise RecipeError(f"{path} must be a list, got {value!r}")
        return tuple(convert(item, inner, path) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"{path} must hold keys and values, got {value!r}")
        return value
    if origin is Literal:
        return str(value)  # the section checks the choice, with a suggestion
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is bool and isinstance(value, bool):
            return value
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is float and not isinstance(value, bool):
            try:  # YAML reads 1e-4 as text
                return float(value)
            except (TypeError, ValueError):
                continue
        if option is str and isinstance(value, str):
            return value
    names = " or ".join("null" if o is type(None) else o.__name__ for o in options)
    raise RecipeError(f"{path} must be {names}, got {value!r}")


def check_positive(section: str, owner: object, *names: str) -> None:
    """Refuse values of these names, where there are any, that are not above 0."""
    for name in names:
        value = getattr(owner, name)
        if value is not None:
            require(value > 0, f"{section}.{name} must be positive, got {value!r}")


def check_not_negative(section: str, owner: object, *names: str) -> None:
    """Refuse values of these names below 0."""
    for name in names:
        value = getattr(owner, name)
        require(value >= 0, f"{section}.{name} must not be negative, got {value!r}")


def check_choice(section: str, owner: object, name: str, choices: object) -> None:
    """Refuse a value that is none of a Literal's."""
    value = getattr(owner, name)
    allowed = get_args(choices)
    if value not in allowed:
        raise RecipeError(
            f"{section}.{name} is {value!r}{closest(value, allowed)} Known: {', '.join(allowed)}"
        )
