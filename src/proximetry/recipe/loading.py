"""Recipe files: YAML, inheritance with ``base``, overrides, and error messages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from proximetry._util.errors import UsageError, suggest
from proximetry._util.files import read_text
from proximetry._util.formatting import format_value, shorten
from proximetry.models.constants import MAX_BITS

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

SHIPPED = Path(__file__).parent / "recipes"
MAX_FILE_BYTES = 100_000

# Keys that records of older runs contain, with the only value that still loads.
REMOVED: dict[str, Any] = {"loss.center": 0.0, "loss.quantization": 0.0, "training.wandb": None}

# Defaults of the keys whose change resets other keys.
DEFAULTS: dict[str, Any] = {"model.image_size": None, "model.dim": 512, "loss.name": "proxy_anchor"}

# Keys whose value is a dictionary.
_DICTIONARIES = ("data.columns", "loss.settings", "evaluation.metrics")


class RecipeError(UsageError):
    """An invalid recipe."""


class YamlError(ValueError):
    """Invalid YAML."""


class _Loader(yaml.SafeLoader):
    """A safe loader that reads 1e-4 as a number and rejects duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        names = [str(key.value) for key, _ in node.value]
        for position, (key, _) in enumerate(node.value):
            if names[position] in names[:position]:
                problem = f"duplicate key {format_value(key.value)}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """Return the plain values of a YAML text."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"line {line}: {shorten(error.problem or 'unreadable', 200)}") from error
    except Exception as error:  # deep nesting; constructors of dates and tags raise anything
        raise YamlError(f"a value cannot be read: {shorten(str(error), 200)}") from error


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file; error messages call it a ``kind``."""
    try:
        values = parse_yaml(read_text(path, MAX_FILE_BYTES))
    except YamlError as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} is not a {kind}: expected keys and values")
    return values


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    return {
        path.relative_to(SHIPPED).with_suffix("").as_posix(): path
        for path in sorted(SHIPPED.rglob("*.yaml"))
    }


def find_file(source: str | Path, shipped: Mapping[str, Path], kind: str, command: str) -> Path:
    """Return the file at a path, else the shipped one of this name, which ``command`` lists."""
    path = Path(source) if isfile(source) else shipped.get(str(source))
    if path is None:
        raise RecipeError(
            f"no {kind} {format_value(str(source))}{suggest(str(source), shipped)} "
            f"`proximetry {command}` lists the shipped ones"
        )
    return path


def plain_values(
    source: str | Path | Mapping[str, Any], derived: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Return a recipe's nested plain values, merged with its base's, without validation.

    ``derived`` are the files whose base this one is.
    """
    if isinstance(source, Mapping):
        values, path = dict(source), None
    else:
        shipped = shipped_recipes()
        path = find_file(source, shipped, "recipe", "recipes")
        if path in derived:
            names = " → ".join(path.name for path in (*derived, path))
            raise RecipeError(f"circular `base` recipes: {names}. Remove one `base`.")
        name = next((name for name, file in shipped.items() if file == path), path.stem)
        values = {"name": name} | read_yaml(path, "recipe")
        derived = (*derived, path)
    base = values.pop("base", None)
    if base is None:
        return overlay({}, values)
    if not isinstance(base, str):
        raise RecipeError(f"base must name one recipe, got {format_value(base)}")
    sibling = path.parent / base if path is not None else Path(base)
    return merge(plain_values(sibling if isfile(sibling) else base, derived), values)


def merge(
    values: Mapping[str, Any], changes: Mapping[str, Any], *, is_complete: bool = True
) -> dict[str, Any]:
    """Return nested values with changes, without the keys that the changes invalidate.

    In a complete recipe, unlike in overrides of one, a missing key has its default.
    """
    old, new = (flatten(overlay({}, part)) for part in (values, changes))
    for key in _invalidated_keys(old, new, is_complete):
        old.pop(key, None)
    dims = old.get("evaluation.eval_dims")
    if {"model.dim", "model.pca_dim"} & {*new} and isinstance(dims, list | tuple):
        after = {**old, **new}
        width = after.get("model.pca_dim") or after.get("model.dim")
        if type(width) is int:
            old["evaluation.eval_dims"] = [d for d in dims if type(d) is not int or d < width]
    merged = overlay(overlay({}, old), changes)
    bits, model = new.get("model.bits", old.get("model.bits")), merged.get("model")
    if is_complete and type(bits) is int and 1 <= bits <= MAX_BITS and isinstance(model, dict):
        model.setdefault("dim", bits)  # one dimension per bit
    return merged


def _invalidated_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], is_complete: bool
) -> list[str]:
    """Return the flat keys of old values that new values invalidate."""

    def differs(key: str) -> bool:
        has_value = is_complete or key in old
        return key in new and has_value and new[key] != old.get(key, DEFAULTS[key])

    dim, pca_dim = new.get("model.dim"), old.get("model.pca_dim")
    if "model.pca_dim" in new:
        drops_pca = new["model.pca_dim"] is None
    else:
        is_wider = type(dim) is int and type(pca_dim) is int and pca_dim >= dim
        drops_pca = is_wider and differs("model.dim")
    has_bits = new.get("model.bits") is not None
    resized = new.get("model.image_size") is not None and differs("model.image_size")
    rules = (
        (has_bits, "model.dim evaluation.eval_dims"),
        (has_bits or drops_pca, "model.pca_dim model.whitening"),
        (resized, "model.resize data.crop_size data.short_side"),
        (new.get("model.freeze_backbone"), "model.drop_path"),
        (differs("loss.name"), "loss.settings"),
    )
    return [key for applies, keys in rules if applies for key in keys.split()]


def describe_resets(values: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Return one line per change that makes `merge` reset keys that no change names."""
    before, after = flatten(overlay({}, values)), flatten(merge(values, changes))
    new, lines = flatten(overlay({}, changes)), []
    lost = {key: old for key, old in before.items() if key not in new and after.get(key) != old}
    for cause, value in new.items() if lost else ():
        result = flatten(merge(values, {cause: value}))
        keys = [key for key, old in lost.items() if result.get(key) != old]
        if keys:
            settings = ", ".join(f"{key} ({format_value(lost.pop(key))})" for key in keys)
            lines.append(f"{cause} {format_value(value)} also resets {settings}")
    return lines


def overlay(
    values: dict[str, Any], changes: Mapping[str, Any], *, inside: bool = False
) -> dict[str, Any]:
    """Write changes, nested or dotted, into nested values; an empty dictionary replaces one."""
    for key, value in changes.items():
        if not isinstance(key, str):
            raise RecipeError(f"keys must be text, got {format_value(key)}")
        first, _, rest = key.partition(".")
        if rest or (isinstance(value, Mapping) and (value or not inside)):
            old = values.get(first)
            inner = {rest: value} if rest else value
            values[first] = overlay(old if isinstance(old, dict) else {}, inner, inside=True)
        else:
            values[first] = {} if isinstance(value, Mapping) else value
    return values


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested plain values by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in _DICTIONARIES:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return "key old → new" for each key in which two flat recipes differ."""
    return [
        f"{key} {format_value(before.get(key))} → {format_value(now.get(key))}"
        for key in dict.fromkeys([*now, *before])
        if before.get(key) != now.get(key)
    ]


def validation_message(error: ValidationError, model: type[BaseModel]) -> str:
    """Return an error message for the first pydantic error, with its key."""
    first = error.errors()[0]
    # A part of a location may name the member of a union that was tried, not a key.
    where = ".".join(
        str(part) for part in first["loc"] if part not in ("bool", "int", "float", "str")
    )
    value, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            section, _, key = where.rpartition(".")
            return f"unknown key {format_value(where)}{suggest(key, _known_keys(model, section))}"
        case "literal_error":
            allowed = re.findall(r"'([^']+)'", context["expected"])
            near = suggest(value if isinstance(value, str) else "", allowed)
            return f"{where} is {format_value(value)}{near}"
        case "value_error":  # raised by a validator here
            reason = str(context["error"])
            if re.split(r"[.: ]", reason, maxsplit=1)[0] in _known_keys(model, where):
                return f"{where}.{reason}".lstrip(".")
            if reason.startswith(f"{where} "):
                return reason
            separator = " " if reason.startswith(("must ", "is ")) else ": "
            return f"{where}{separator}{reason}" if where else reason
    reason = first["msg"].replace("Input should", "must").replace("valid tuple", "list")
    reason = reason.partition(", unable to parse")[0]
    return f"{where} {reason}, got {format_value(value)}"


def _known_keys(model: Any, section: str) -> list[str]:
    for part in filter(None, section.split(".")):
        if part.isdigit():  # an item of a list
            model = get_args(model)[0]
            continue
        fields = getattr(model, "model_fields", None)
        if fields is None or part not in fields:
            return []
        model = fields[part].annotation
    if dataclasses.is_dataclass(model):
        return [field.name for field in dataclasses.fields(model)]
    return list(getattr(model, "model_fields", ()))
