"""An embedder on disk: one JSON file that says everything, one safetensors file of weights.

The weights file carries its own checksum in its name, and `embedder.json` names it. Replacing
`embedder.json`, one atomic rename, is the moment a save takes place: killed before it, the old
embedder is whole; after it, the new one is.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from proximetry import __version__
from proximetry._common import atomic_write, some

FORMAT = "proximetry embedder"
VERSION = 1
DESCRIPTION = "embedder.json"
SECOND_STAGE = "second-stage"
"""Where the final run of ``training.two_stages`` lies in its folder."""
# Ours, whole or half-written by a save that was killed.
_OURS = re.compile(r"\.?embedder(\.json|-[0-9a-f]{16}\.safetensors)(\.[0-9a-f]{32}\.part)?")


def find_embedder(folder: Path) -> Path:
    """The folder of an embedder, given that or the folder of the run that saved it."""
    places = (folder / "embedder", folder / SECOND_STAGE / "embedder")
    return next((place for place in places if place.is_dir()), folder)


def write_embedder(
    folder: Path, description: Mapping[str, Any], state: Mapping[str, Tensor]
) -> None:
    """Write a description and its weights, in place of an embedder that may be there."""
    _refuse_foreign(folder)
    # Safetensors refuses tensors that share memory, and those that are channels-last.
    dense = torch.contiguous_format
    weights = save_tensors(
        {key: value.detach().cpu().clone(memory_format=dense) for key, value in state.items()}
    )
    digest = hashlib.sha256(weights).hexdigest()
    file = _weights_name(digest)
    content = {
        "format": FORMAT,
        "version": VERSION,
        **description,
        "tensors": {"file": file, "sha256": digest, "bytes": len(weights)},
    }
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, default=_plain) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metrics, recipe and class_names must be plain values: {error}"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / file, weights)
    atomic_write(folder / DESCRIPTION, text.encode())
    for stale in folder.iterdir():
        if stale.name not in (file, DESCRIPTION) and _OURS.fullmatch(stale.name):
            stale.unlink(missing_ok=True)


def read_embedder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the weights that `write_embedder` wrote."""
    description = read_description(folder)
    try:
        digest, size = (description["tensors"][key] for key in ("sha256", "bytes"))
        path = folder / _weights_name(digest)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / DESCRIPTION} is damaged: it names no weights file") from error
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one it was saved with "
            f"({len(content)} bytes here, {size} then)"
        )
    return description, load_tensors(content)


def _weights_name(digest: str) -> str:
    return f"embedder-{digest[:16]}.safetensors"


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy and torch numbers and arrays
        return value.tolist()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; an embedder is saved as a folder")
    foreign = sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))
    if not foreign:
        return
    try:
        read_description(folder)
    except ValueError as error:
        raise ValueError(
            f"{folder} holds other files ({some(foreign, 3)}) and no embedder: "
            "choose a new or empty folder"
        ) from error


def read_description(folder: Path) -> dict[str, Any]:
    """Return what the embedder in a folder is made of, without its weights."""
    path = folder / DESCRIPTION
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.exists():
            raise ValueError(f"there is no folder {folder}") from error
        raise ValueError(f"{folder} is no saved embedder: it has no {DESCRIPTION}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe an embedder")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {content.get('version')!r}; this Proximetry "
            f"({__version__}) reads version {VERSION}: install the one that wrote it"
        )
    return content
