"""Checkpoints: the state of a run in one safetensors file, written atomically, without pickle.

A file has the tensors of each module, everything else as JSON in its header, and a checksum of all
its bytes. It can be loaded on any number of processes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from proximetry._util.files import (
    CHECKSUM,
    CHECKSUM_PLACEHOLDER,
    atomic_path,
    atomic_write,
    has_valid_checksum,
    parse_json,
    with_checksum,
)
from proximetry._util.formatting import join_first
from proximetry._util.tensors import contiguous_copy
from proximetry.recipe.loading import differences
from proximetry.recipe.schema import Recipe
from proximetry.training.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from proximetry.training.run import Run

FORMAT = 2


def save_state(run: Run) -> None:
    """Write the last checkpoint; raise if a loss or a weight is not finite."""
    run.check_finite(weights=True)
    if not run.world.is_main:
        return
    state = {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in vars(run.state).items()
    }
    values = {
        "state": state,
        "rates": {"stale": run.rates.stale, "drops": run.rates.drops},
        "seconds": run.clock.elapsed(),
        "scaler": run.updater.scaler.state_dict(),
        "recipe": run.recipe.to_dict(),
        "images": run.data.fingerprint,
    }
    save_checkpoint(run.folder.last, run.modules(), run.updater.optimizer, values)


def link_checkpoints(run: Run) -> None:
    """Hard-link the last checkpoint as ``best`` and as a kept epoch, if it is one of these."""
    folder, state = run.folder, run.state
    if not run.world.is_main or state.batch or not state.epoch:
        return
    targets = [folder.best] if state.best_epoch == state.epoch else []
    if run.keeps_checkpoint():
        targets.append(folder.epoch_checkpoint(state.epoch))
    for target in targets:
        with atomic_path(target) as part:
            try:
                os.link(folder.last, part)
            except OSError:  # the file system has no hard links
                shutil.copyfile(folder.last, part)


def restore_state(run: Run) -> None:
    """Resume from the last checkpoint."""
    path = run.folder.last
    try:
        check = partial(_check_same, path, run)
        values = load_checkpoint(path, run.modules(), run.updater.optimizer, check)
        for name, value in values["state"].items():
            current = getattr(run.state, name)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                setattr(run.state, name, value)
        vars(run.rates).update(values["rates"])
        for phase, seconds in values["seconds"].items():
            run.clock.seconds[phase] += seconds
        if values["scaler"]:
            run.updater.scaler.load_state_dict(values["scaler"])
    except (LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(path, f"is not a checkpoint of this version ({error!r})") from error


def restore_best(run: Run) -> None:
    """Load the weights of the selected epoch."""
    path, best = run.folder.best, run.state.best_epoch

    def check(values: dict[str, Any]) -> None:
        _check_same(path, run, values)
        epoch, batch = values["state"]["epoch"], values["state"]["batch"]
        if (epoch, batch) != (best, 0):
            raise CheckpointError(path, f"is not of the selected epoch {best}, but of {epoch}")

    load_checkpoint(path, run.modules(), check=check)


def _check_same(path: Path, run: Run, values: dict[str, Any]) -> None:
    """Reject a checkpoint of another recipe or other images."""
    changed = differences(
        Recipe.load(values["recipe"]).computation_keys(), run.recipe.computation_keys()
    )
    if changed:
        raise CheckpointError(path, f"is of a run with another recipe: {', '.join(changed)}")
    check_same_images(run.folder.path, values["images"], run.data.fingerprint)


def check_same_images(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Reject images that are not those of the run in a folder; list the differences.

    Files that were moved or renamed are the same if their contents are.
    """
    files = "paths" if None in (before["contents"], now["contents"]) else "contents"
    if all(before[key] == now[key] for key in ("rows", files)):
        return
    changes = [
        f"{title} {name}: {now[key].get(name, 0)} images instead of {before[key].get(name, 0)}"
        for key, title in (("splits", "split"), ("classes", "class"))
        for name in sorted({*before[key], *now[key]})
        if before[key].get(name) != now[key].get(name)
    ]
    if not changes:
        same_rows = before["rows"] == now["rows"]
        changes = ["other image files" if same_rows else "other classes or splits of images"]
    raise RunError(
        f"the run in {folder} was started with other images: {join_first(changes)}. Restore them, "
        "choose another folder, or start over with --fresh."
    )


def save_checkpoint(
    path: Path, modules: dict[str, nn.Module], optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Write modules, optimizer and the plain values of the state to a file."""
    saved = optimizer.state_dict()
    parts = {part: module.state_dict() for part, module in modules.items()}
    parts |= {f"optimizer.{index}": values for index, values in saved["state"].items()}
    tensors = {
        f"{part}.{name}": contiguous_copy(tensor)
        for part, values in parts.items()
        for name, tensor in values.items()
    }
    header = {
        CHECKSUM: CHECKSUM_PLACEHOLDER,  # first: `with_checksum` replaces the first one
        "format": FORMAT,
        "state": state,
        "optimizer": {"groups": saved["param_groups"]},
    }
    atomic_write(path, with_checksum(save(tensors, {"proximetry": json.dumps(header)})))


def load_checkpoint(
    path: Path,
    modules: dict[str, nn.Module],
    optimizer: Optimizer | None = None,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
) -> dict[str, Any]:
    """Load modules and, if passed, the optimizer; return the plain values of the state.

    ``check`` may reject the values before anything is changed.
    """
    header, content = read_header(path)
    check(header["state"])
    tensors = load(content)
    for part, module in modules.items():
        try:
            module.load_state_dict(_part(tensors, part))
        except RuntimeError as error:
            raise CheckpointError(path, f"does not fit the {part} of this run: {error}") from error
    if optimizer is not None:
        states: dict[int, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".", 2)
                states.setdefault(int(index), {})[name] = tensor
        groups = header["optimizer"]["groups"]
        for group, current in zip(groups, optimizer.param_groups, strict=False):
            group["fused"] = current["fused"]  # depends on the device, not on the run
        optimizer.load_state_dict({"state": states, "param_groups": groups})
        for parameter, values in optimizer.state.items():
            for name, value in values.items():  # fused optimizers need the same memory format
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    state: dict[str, Any] = header["state"]
    return state


def read_part(path: Path, part: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain values of a checkpoint, and the tensors of one of its modules by name."""
    header, content = read_header(path)
    return header["state"], _part(load(content), part)


def _part(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = f"{part}."
    return {key[len(prefix) :]: tensors[key] for key in tensors if key.startswith(prefix)}


def read_header(path: Path, *, verify: bool = True) -> tuple[dict[str, Any], bytes]:
    """Return the header of a checkpoint and, with ``verify``, all bytes if the checksum matches."""
    try:
        with path.open("rb") as file:
            content = file.read(8)
            size = min(int.from_bytes(content, "little"), path.stat().st_size)
            content += file.read(-1 if verify else size)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    try:
        text = parse_json(content[8 : 8 + size].decode())["__metadata__"]["proximetry"]
        header: dict[str, Any] = parse_json(text)
        version, _ = header["format"], header["state"]
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(path, "is damaged, or not a checkpoint of Proximetry") from error
    if version != FORMAT:
        raise CheckpointError(path, f"has format {version!r}; this version reads {FORMAT}")
    if verify and not has_valid_checksum(content):
        raise CheckpointError(path, "is damaged: its checksum does not match")
    return header, content
