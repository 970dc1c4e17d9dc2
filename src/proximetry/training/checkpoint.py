"""Checkpoints: one file each, safetensors with JSON in its header, written atomically.

No pickle. A file holds the tensors of every part under the part's name, and everything else as
JSON, so that it opens on any number of processes and can be read by people. It carries its own
checksum: one bit that has changed since makes it unreadable, not a different run.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from proximetry._util.files import (
    CHECKSUM,
    SEAL,
    atomic_path,
    atomic_write,
    is_sealed,
    parse_json,
    sealed,
)

FORMAT = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def save_checkpoint(
    path: Path, modules: dict[str, nn.Module], optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Write modules, optimizer and plain state."""
    tensors: dict[str, Tensor] = {}
    for part, module in modules.items():
        for name, tensor in module.state_dict().items():
            tensors[f"{part}.{name}"] = tensor.detach().cpu().contiguous().clone()
    flat = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for index, values in flat["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                plain.setdefault(str(index), {})[name] = value
    header = {
        CHECKSUM: SEAL,  # first, since only the first one is filled in
        "format": FORMAT,
        "state": state,
        "optimizer": {"groups": flat["param_groups"], "plain": plain},
    }
    atomic_write(path, sealed(save(tensors, {"proximetry": json.dumps(header)})))


def link_checkpoint(source: Path, target: Path) -> None:
    """Give a checkpoint a second name; copy it where the file system has no hard links."""
    with atomic_path(target) as part:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)


def load_checkpoint(
    path: Path,
    modules: dict[str, nn.Module],
    optimizer: Optimizer | None = None,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
) -> dict[str, Any]:
    """Read modules and, if given, the optimizer back; return the plain state.

    Before anything is changed, ``check`` may refuse the state.
    """
    header, content = _read(path)
    check(header["state"])
    tensors = load(content)
    for part, module in modules.items():
        try:
            module.load_state_dict(_part(tensors, part))
        except RuntimeError as error:
            raise CheckpointError(f"{path} does not fit the {part} of this run: {error}") from error
    if optimizer is not None:
        states: dict[int, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".", 2)
                states.setdefault(int(index), {})[name] = tensor
        for index, values in header["optimizer"]["plain"].items():
            states.setdefault(int(index), {}).update(values)
        groups = header["optimizer"]["groups"]
        for group, own in zip(groups, optimizer.param_groups, strict=False):
            if "betas" in group:
                group["betas"] = tuple(group["betas"])
            group["fused"] = own["fused"]  # depends on the device, not on the run
        optimizer.load_state_dict({"state": states, "param_groups": groups})
        _lay_out(optimizer)
    state: dict[str, Any] = header["state"]
    return state


def read_state(path: Path) -> dict[str, Any]:
    """Return the plain state from the header of a checkpoint, without verifying the checksum."""
    with _readable(path), path.open("rb") as file:
        start = file.read(8)
        size = min(int.from_bytes(start, "little"), path.stat().st_size)
        content = start + file.read(size)
    state: dict[str, Any] = _parse_header(path, content)["state"]
    return state


def read_part(path: Path, part: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain state of a checkpoint, and the tensors of one of its parts by name."""
    header, content = _read(path)
    return header["state"], _part(load(content), part)


def _part(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = f"{part}."
    return {key[len(prefix) :]: one for key, one in tensors.items() if key.startswith(prefix)}


def _lay_out(optimizer: Optimizer) -> None:
    """Give the state of each parameter its memory format, by which fused optimizers go."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a checkpoint and all of its bytes, whose checksum is verified."""
    with _readable(path):
        content = path.read_bytes()
    header = _parse_header(path, content)
    if not is_sealed(content):
        raise CheckpointError(f"{path} is damaged: it does not have the checksum it was saved with")
    return header, content


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _parse_header(path: Path, content: bytes) -> dict[str, Any]:
    try:
        size = int.from_bytes(content[:8], "little")
        text = parse_json(content[8 : 8 + size].decode())["__metadata__"]["proximetry"]
        header: dict[str, Any] = parse_json(text)
        version, _ = header["format"], header["state"]
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged, or no checkpoint of Proximetry") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version!r}, this version reads {FORMAT}; "
            "use the version of Proximetry that wrote it"
        )
    return header
