"""An embedder on disk: `embedder.json` and one safetensors file of weights.

`embedder.json` has a checksum and names the weights file, whose name contains its own checksum. The
atomic rename of `embedder.json` commits a save: a process killed before it leaves the old embedder,
a process killed after it the new one.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.files import (
    atomic_write,
    check_format,
    final_name,
    json_with_checksum,
    read_json,
)
from proximetry._util.formatting import join_first
from proximetry._util.tensors import contiguous_copy
from proximetry.metrics.calibration import Calibration

FORMAT = "proximetry embedder"
VERSION = 1
DESCRIPTION = "embedder.json"
EXTRAS = {"class_names": list, "metrics": dict, "recipe": dict, "calibration": dict}
"""Optional metadata of an embedder, and their types."""
SECOND_STAGE = "second-stage"
"""Subfolder of the final run of ``training.two_stages``."""
MAX_DESCRIPTION_BYTES = 200_000_000  # a million class names take 20 MB
_FILE_NAME = re.compile(r"embedder(\.json|-[0-9a-f]{16}\.safetensors)")


def is_embedder_file(path: Path) -> bool:
    """Return whether a save, complete or interrupted, wrote this file."""
    return _FILE_NAME.fullmatch(final_name(path) or path.name) is not None


def find_embedder(folder: Path) -> Path:
    """Return the folder of an embedder, given that folder or the folder of its run."""
    candidates = (folder / "embedder", folder / SECOND_STAGE / "embedder")
    return next((path for path in candidates if path.is_dir()), folder)


def write_embedder(
    folder: Path, description: Mapping[str, Any], state: Mapping[str, Tensor]
) -> None:
    """Write a description and its weights, replacing an embedder in the folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Pass a folder.")
    other_files = [path.name for path in folder.glob("*") if not is_embedder_file(path)]
    try:
        if other_files:
            read_description(folder)
    except ValueError as error:
        names = join_first(sorted(other_files), 3)
        raise ValueError(
            f"{folder} contains other files ({names}) and no embedder. Use a new or empty folder."
        ) from error
    weights = save_tensors({name: contiguous_copy(value) for name, value in state.items()})
    digest = hashlib.sha256(weights).hexdigest()
    file = weights_name(digest)
    content = {
        "format": FORMAT,
        "version": VERSION,
        **description,
        "tensors": {"file": file, "sha256": digest, "bytes": len(weights)},
    }
    try:
        text = json_with_checksum(content, _to_json)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metrics, recipe and class_names must be JSON values: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / file, weights)
    atomic_write(folder / DESCRIPTION, text)
    for stale in folder.iterdir():
        if stale.name not in (file, DESCRIPTION) and is_embedder_file(stale):
            stale.unlink(missing_ok=True)


def read_embedder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and weights of a saved embedder."""
    description = read_description(folder)
    name, size = named_weights(description, folder / DESCRIPTION)
    path, digest = folder / name, description["tensors"]["sha256"]
    try:
        actual = path.stat().st_size
        content = path.read_bytes() if actual == size and path.is_file() else b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(
            f"{path} is damaged: its checksum does not match ({actual} of {size} bytes)"
        )
    try:
        return description, load_tensors(content)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def named_weights(description: Mapping[str, Any], path: Path) -> tuple[str, int]:
    """Return name and size of the weights file, from a description read from `path`."""
    try:
        digest, size = (description["tensors"][key] for key in ("sha256", "bytes"))
        if not re.fullmatch("[0-9a-f]{64}", digest) or type(size) is not int or size < 0:
            raise ValueError("checksum or size is invalid")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: the weights file is missing") from error
    return weights_name(digest), size


def read_calibration(description: Mapping[str, Any], path: Path) -> Calibration | None:
    """Return the calibration in a description that was read from `path`, if there is one."""
    if description.get("calibration") is None:
        return None
    try:
        return Calibration.from_json(description["calibration"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def weights_name(digest: str) -> str:
    """Return the name of the weights file with this checksum."""
    return f"embedder-{digest[:16]}.safetensors"


def _to_json(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy and torch numbers and arrays
        return value.tolist()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")


def read_description(folder: Path) -> dict[str, Any]:
    """Return the description of a saved embedder, without its weights."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise UsageError(f"{folder} is not a saved embedder: there is no file {path}")
    content = check_format(path, read_json(path, MAX_DESCRIPTION_BYTES), FORMAT, VERSION)
    if not isinstance(content.get("architecture"), dict):
        raise ValueError(f"{path} is damaged: 'architecture' is missing")
    for name, kind in EXTRAS.items():
        if not isinstance(content.get(name), kind | None):
            raise ValueError(f"{path} is damaged: {name} must be a {kind.__name__}")
    return content
