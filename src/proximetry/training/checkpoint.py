"""Checkpoints: the state of a run in one safetensors file, written atomically, without pickle.

A file has the tensors of each module, everything else as JSON in its header, and a checksum of all
its bytes. It can be loaded on any number of processes. Sharded proxies and their optimizer state
are in separate files, one per process; their headers give the classes, start … stop − 1.
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
from proximetry.losses import ShardedProxies
from proximetry.recipe.loading import differences
from proximetry.recipe.schema import Recipe
from proximetry.training.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from proximetry.training.run import Run

FORMAT = 2


def save_state(run: Run) -> None:
    """Write the last checkpoint; raise if a loss or a weight is not finite."""
    run.check_finite(weights=True)
    shards = _save_shards(run)
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
        "shards": shards,
    }
    save_checkpoint(run.folder.last, run.modules(), run.updater.optimizer, values)
    _remove_unused_shards(run)


def link_checkpoints(run: Run) -> None:
    """Hard-link the last checkpoint as ``best`` and as a kept epoch, where these apply."""
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
    _remove_unused_shards(run)


def _save_shards(run: Run) -> list[str]:
    """Write the sharded proxies of this rank and their optimizer state to a file.

    Return the file names of all ranks. Several checkpoints may refer to a file, so it never
    changes.
    """
    proxies = run.updater.objective.proxies
    if not isinstance(proxies, ShardedProxies):
        return []
    path = run.folder.shard(run.state.step, run.world.rank, run.world.size)
    rows = _sharded_tensors(proxies, run.updater.optimizer)
    _write(path, rows, {"state": {"start": proxies.start, "stop": proxies.stop}})
    return run.world.gather(path.name)


def _remove_unused_shards(run: Run) -> None:
    """Remove the shards that no checkpoint refers to."""
    if run.updater.objective.sharded_weight is None:
        return
    folder, used = run.folder, set[str]()
    for path in folder.checkpoints():
        used.update(read_header(path, verify=False)[0]["state"].get("shards", ()))
    for path in folder.last.parent.glob("shard-*.safetensors"):
        if path.name not in used:
            path.unlink()


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
            raise CheckpointError(
                path, f"is from epoch {epoch}, not from the selected epoch {best}"
            )

    load_checkpoint(path, run.modules(), check=check)


def _check_same(path: Path, run: Run, values: dict[str, Any]) -> None:
    """Reject a checkpoint of a different recipe or different images."""
    changed = differences(
        Recipe.load(values["recipe"]).computation_keys(), run.recipe.computation_keys()
    )
    if changed:
        raise CheckpointError(path, f"has a different recipe: {', '.join(changed)}")
    check_same_images(run.folder.path, values["images"], run.data.fingerprint)


def check_same_images(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Reject images that differ from those of the run in a folder, and list the differences.

    Moved or renamed files are the same if their contents are.
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
        changes = ["different image files" if same_rows else "different classes or splits"]
    raise RunError(
        f"the run in {folder} was started with different images: {join_first(changes)}. Restore "
        "them, choose another folder, or start over with --fresh."
    )


def save_checkpoint(
    path: Path, modules: dict[str, nn.Module], optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Write modules, optimizer and the plain values of the state to a file.

    Sharded proxies and their optimizer state are in separate files.
    """
    saved = optimizer.state_dict()
    parts = {part: module.state_dict() for part, module in modules.items()}
    parts |= {f"optimizer.{index}": values for index, values in saved["state"].items()}
    tensors = {
        f"{part}.{name}": tensor
        for part, values in parts.items()
        for name, tensor in values.items()
    }
    if (proxies := _sharded_proxies(modules)) is not None:
        for name in _sharded_tensors(proxies, optimizer):
            for key in _checkpoint_keys(name, proxies, modules, optimizer):
                del tensors[key]
    _write(path, tensors, {"state": state, "optimizer": {"groups": saved["param_groups"]}})


def _write(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and a header with a checksum."""
    header = {CHECKSUM: CHECKSUM_PLACEHOLDER, "format": FORMAT} | header  # the first is replaced
    copies = {key: contiguous_copy(tensor) for key, tensor in tensors.items()}
    atomic_write(path, with_checksum(save(copies, {"proximetry": json.dumps(header)})))


def _sharded_proxies(modules: dict[str, nn.Module]) -> ShardedProxies | None:
    """Return the sharded proxies among the modules."""
    layers = (layer for module in modules.values() for layer in module.modules())
    return next((layer for layer in layers if isinstance(layer, ShardedProxies)), None)


def _sharded_tensors(proxies: ShardedProxies, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors with a row for each class of this rank: proxies and optimizer state."""
    state = optimizer.state.get(proxies.weight, {})
    rows = {
        f"optimizer.{name}": value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.ndim > 0  # no step counter
    }
    return {"weight": proxies.weight, **rows}


def _checkpoint_keys(
    name: str,
    proxies: ShardedProxies,
    modules: dict[str, nn.Module],
    optimizer: Optimizer | None,
) -> list[str]:
    """Return the keys that a sharded tensor has in a checkpoint of all tensors."""
    if name == "weight":
        return [
            f"{part}.{key}"
            for part, module in modules.items()
            for key, parameter in module.named_parameters(remove_duplicate=False)
            if parameter is proxies.weight
        ]
    if optimizer is None:
        return []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    index = next(i for i, parameter in enumerate(parameters) if parameter is proxies.weight)
    return [name.replace("optimizer.", f"optimizer.{index}.", 1)]


def _load_shards(
    folder: Path, shards: list[str], modules: dict[str, nn.Module], optimizer: Optimizer | None
) -> dict[str, Tensor]:
    """Return the sharded tensors of the classes of this rank, by their keys in a checkpoint.

    Any number of ranks may have written the shards.
    """
    proxies = _sharded_proxies(modules)
    if proxies is None:
        return {}
    parts: dict[str, list[Tensor]] = {}
    last = proxies.start
    for path in (folder / name for name in shards):
        header, _ = read_header(path, verify=False)
        start, stop = header["state"]["start"], header["state"]["stop"]
        first, end = max(start, proxies.start), min(stop, proxies.stop)
        if first >= end:
            continue
        if first != last:
            raise CheckpointError(path, f"does not start at class {last}")
        for name, tensor in load(read_header(path)[1]).items():
            parts.setdefault(name, []).append(tensor[first - start : end - start])
        last = end
    if last != proxies.stop:
        raise CheckpointError(folder, f"has no proxies of the classes {last} to {proxies.stop - 1}")
    return {
        key: torch.cat(rows)
        for name, rows in parts.items()
        for key in _checkpoint_keys(name, proxies, modules, optimizer)
    }


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
    shards = header["state"].get("shards", [])
    tensors |= _load_shards(path.parent, shards, modules, optimizer)
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
