"""Checkpoints: one file each, safetensors with JSON in its header, written atomically.

No pickle. A file holds the tensors of every part under the part's name, and everything else as
JSON, so that it opens on any number of processes and can be read by people.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from proximetry._common import atomic_write

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def save_checkpoint(
    path: Path, modules: dict[str, nn.Module], optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Write modules, optimiser and plain state."""
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
        "format": FORMAT,
        "state": state,
        "optimizer": {"groups": flat["param_groups"], "plain": plain},
    }
    atomic_write(path, save(tensors, {"proximetry": json.dumps(header)}))


def load_checkpoint(
    path: Path, modules: dict[str, nn.Module], optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Read modules and, if given, the optimiser back; return the plain state."""
    header, tensors = _open(path)
    for part, module in modules.items():
        prefix = f"{part}."
        own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
        try:
            module.load_state_dict(own)
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
    """Return the plain state of a checkpoint, without reading its tensors."""
    header, _ = _open(path, tensors=False)
    state: dict[str, Any] = header["state"]
    return state


def _lay_out(optimizer: Optimizer) -> None:
    """Give the state of each parameter its memory format, by which fused optimisers go."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _open(path: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("proximetry")
            wanted = file.keys() if tensors else ()
            found = {key: file.get_tensor(key) for key in wanted}
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no readable checkpoint: {error}") from error
    if text is None:
        raise CheckpointError(f"{path} is a safetensors file, but no checkpoint of proximetry")
    header = json.loads(text)
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {header.get('format')}, this version reads {FORMAT}; "
            "use the version of proximetry that wrote it"
        )
    return header, found
