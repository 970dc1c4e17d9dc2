"""What turns faces into vectors: an embedder of ours, or an ONNX file.

The pixels that an ONNX file takes are stated; the rest is found out and checked.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proximetry._util.errors import UsageError, closest, shown
from proximetry._util.files import read_json
from proximetry._util.machine import resolve_device
from proximetry.data.images import ImageError, image_size
from proximetry.faces.session import open_session, reason_of
from proximetry.models import Preprocessing

Array = np.ndarray[Any, Any]

KEYS = ("size", "channels", "range", "mean", "std", "output")
_SIDE = 112
_LONGEST = 2**20  # bytes of a file that states an input
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class FaceEmbedder:
    """Pixels to vectors, whatever does it.

    Attributes:
        source: where it comes from, for people.
        dim: dimension of the vectors.
        preprocessing: how images become the pixels it takes.
        embed: turns such pixels, uint8 RGB [B, 3, H, W], into vectors [B, dim].
        device: where it takes pixels.
        flip_tta: whether a vector is that of the image and its mirror image already.
        onnx: whether it is an ONNX file.
        blame: says why a vector may not be finite.
    """

    source: str
    dim: int
    preprocessing: Preprocessing
    embed: Callable[[Tensor], Tensor]
    device: torch.device
    flip_tta: bool = False
    onnx: bool = False
    blame: Callable[[], str] = lambda: "its weights may be damaged, or its input not as stated"

    @property
    def views(self) -> str:
        """What a vector describes by default, in words."""
        if self.flip_tta:
            return "image and mirror image in one embedding (flip TTA)"
        return "image and mirror image, concatenated"

    def note_on_size(self, file: str) -> list[str]:
        """Say that images are scaled if this one has not the size that a published model takes.

        Such models are trained on faces that are aligned to exactly that size.
        """
        crop = self.preprocessing.crop
        try:
            width, height = image_size(file)
        except ImageError:  # which is told when it is to be embedded
            return []
        if not self.onnx or (height, width) == crop:
            return []
        return [
            f"images are scaled and cropped ({file} has {width}×{height} pixels, the model takes "
            f"{crop[1]}×{crop[0]}): align them first, `proximetry faces align` does it"
        ]


def open_embedder(
    place: str | os.PathLike[str],
    contract: str | None = None,
    device: str | torch.device | None = None,
) -> FaceEmbedder:
    """Read an embedder: the folder of a run or of one, hub:owner/name, or an ONNX file.

    ``contract`` says what pixels an ONNX file takes; see `read_contract`.
    """
    path = Path(place).expanduser()
    where = device if isinstance(device, torch.device) else resolve_device(device)
    if path.is_file() or path.suffix.lower() == ".onnx":
        return _open_onnx(path, contract, where)
    if contract is not None:
        raise UsageError(f"--input describes an ONNX file, and {place} is none")
    # With timm, whose import takes seconds.
    from proximetry.models.embedder import why_not_finite
    from proximetry.models.hub import load_embedder

    model = load_embedder(path, where)
    return FaceEmbedder(
        str(place),
        model.dim,
        model.preprocessing,
        model.embed,
        where,
        model.architecture.flip_tta,
        blame=lambda: why_not_finite(model),
    )


def _open_onnx(path: Path, contract: str | None, device: torch.device) -> FaceEmbedder:
    """Open an ONNX file that turns images [batch, 3, height, width] into vectors [batch, dim].

    What pixels it takes is said by ``contract``, else by a JSON file of the same name beside it,
    else by its own metadata (files that `proximetry export` wrote). What nobody says is as usual
    for face recognition: RGB, (x − 127.5) / 127.5, and 112×112 unless the file has another size.
    """
    session = open_session(path, torch.get_num_threads(), device)
    name, shape, dtype = _input(path, session)
    stated, place = read_contract(path, contract)
    output = _output(path, session, stated.pop("output", None))
    metadata = session.get_modelmeta().custom_metadata_map
    flip_tta = False
    if not stated and metadata.get("proximetry") == "embedder":
        preprocessing, flip_tta = _exported(path, metadata)
    else:
        preprocessing = _preprocessing(stated, place, shape[2:])
    crop = preprocessing.crop
    taken = [a if isinstance(a, int) else b for a, b in zip(shape[2:], crop, strict=True)]
    if taken != [*crop]:
        raise UsageError(
            f"{path} takes {shape[2]}×{shape[3]} pixels (height×width), but {place} says "
            f"{crop[0]}×{crop[1]}"
        )

    def run(pixels: Array) -> Array:
        return np.asarray(session.run([output], {name: pixels.astype(dtype)})[0])

    batch, dim = _try(path, run, crop, shape[0] if isinstance(shape[0], int) else None)

    def embed(pixels: Tensor) -> Tensor:
        values = preprocessing.normalize(pixels).numpy(force=True)
        size = batch or len(values)
        found = []
        for at in range(0, len(values), size):
            part = values[at : at + size]
            # A network with a fixed batch takes nothing less.
            empty = np.zeros((size - len(part), *part.shape[1:]), part.dtype)
            found.append(run(np.concatenate([part, empty]))[: len(part)])
        return torch.from_numpy(np.concatenate(found)).float()

    return FaceEmbedder(str(path), dim, preprocessing, embed, device, flip_tta, onnx=True)


def read_contract(path: Path, contract: str | None) -> tuple[dict[str, Any], str]:
    """Return what is said about the input of an ONNX file, and where.

    ``contract`` is JSON or the name of a JSON file; without it, the JSON file beside the ONNX file
    is read, if there is one. All keys are optional: ``size`` (one side, or [height, width]),
    ``channels`` ("RGB" or "BGR"), ``range`` of the pixels before ``mean`` and ``std`` ([0, 255]),
    ``mean`` and ``std`` (one number or three; by default such that the range becomes −1…1), and
    ``output``, the name of the output that is the embedding, where there are several.
    """
    beside = path.with_suffix(".json")
    if contract is None and not beside.is_file():
        return {}, "the default"
    inline = contract is not None and contract.lstrip().startswith("{")
    file = beside if contract is None else Path(contract)
    place = "--input" if inline else str(file)
    try:
        found = json.loads(contract or "") if inline else read_json(file, _LONGEST)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--input is not JSON: {error}" if inline else str(error)) from error
    if not isinstance(found, dict):
        raise UsageError(
            f'{place} must be a JSON object such as {{"size": 112}}, got {shown(found)}'
        )
    for key in found:
        if key not in KEYS:
            raise UsageError(f"{place}: unknown key {key!r}{closest(key, KEYS)}")
    return found, place


def _input(path: Path, session: Any) -> tuple[str, Sequence[Any], Any]:
    inputs = session.get_inputs()
    told = ", ".join(f"{one.name} {one.shape}" for one in inputs)
    if len(inputs) != 1:
        raise UsageError(f"{path} has {len(inputs)} inputs ({told}); an embedder has one")
    (only,) = inputs
    if len(only.shape) != 4 or (isinstance(only.shape[1], int) and only.shape[1] != 3):
        raise UsageError(f"{path} takes {told}; expected images [batch, 3, height, width]")
    if only.type not in _TYPES:
        known = " or ".join(_TYPES)
        raise UsageError(f"{path} takes {only.type}; expected {known}")
    return only.name, only.shape, _TYPES[only.type]


def _output(path: Path, session: Any, wanted: str | None) -> str:
    names = [one.name for one in session.get_outputs()]
    if wanted is None and len(names) == 1:
        return str(names[0])
    if wanted is None or wanted not in names:
        lacks = f"no output {wanted!r}, but" if wanted is not None else "several outputs,"
        raise UsageError(
            f"{path} has {lacks} {', '.join(names)}: say which is the embedding, "
            f'--input \'{{"output": "{names[0]}"}}\''
        )
    return wanted


def _preprocessing(stated: Mapping[str, Any], place: str, shape: Sequence[Any]) -> Preprocessing:
    usual = [side if isinstance(side, int) else _SIDE for side in shape]
    size = stated.get("size", usual)
    size = [size, size] if isinstance(size, int) else size
    if not _numbers(size, 2) or not all(isinstance(side, int) and side > 0 for side in size):
        raise UsageError(f"{place}: size must be a side or [height, width], got {size!r}")
    limits = stated.get("range", [0, 255])
    if not _numbers(limits, 2) or not limits[0] < limits[1]:
        raise UsageError(f"{place}: range must be two rising numbers, got {limits!r}")
    low, high = limits
    mean = _channels(stated.get("mean", (low + high) / 2), place, "mean")
    std = _channels(stated.get("std", (high - low) / 2), place, "std")
    try:
        return Preprocessing(
            resize=min(size),
            crop=tuple(size),
            mean=tuple(value - low for value in mean),
            std=std,
            scale=(high - low) / 255,
            channels=stated.get("channels", "RGB"),
            interpolation="bilinear",
        )
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from error


def _channels(value: Any, place: str, key: str) -> tuple[float, ...]:
    values = [value] * 3 if _numbers([value], 1) else value
    if not _numbers(values, 3):
        raise UsageError(f"{place}: {key} must be a number or three, got {value!r}")
    return tuple(values)


def _numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == count
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        and all(isfinite(v) for v in values)
    )


def _exported(path: Path, metadata: Mapping[str, str]) -> tuple[Preprocessing, bool]:
    """What `proximetry export` wrote: pixels go in as they are, the rest is in the graph."""
    try:
        before = json.loads(metadata["preprocessing"])
        preprocessing = Preprocessing(
            resize=before["resize"],
            crop=tuple(before["crop"]),
            interpolation=before["interpolation"],
            mean=(0.0,) * 3,
            std=(1.0,) * 3,
            scale=1.0,
        )
        return preprocessing, bool(json.loads(metadata["architecture"])["flip_tta"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: its metadata does not say what it takes") from error


def _try(
    path: Path, run: Callable[[Array], Array], crop: tuple[int, int], fixed: int | None
) -> tuple[int | None, int]:
    """Return the batch a network insists on, if any, and the dimension of its vectors.

    Many files promise any batch and mean one: two images show it.
    """
    problem = ""
    for batch in (fixed,) if fixed else (2, 1):
        try:
            found = run(np.zeros((batch, 3, *crop), np.float32))
        except Exception as error:
            problem = problem or reason_of(error)
            continue
        if found.ndim == 2 and len(found) == batch and found.dtype.kind == "f":
            return (None if batch == 2 and not fixed else batch), found.shape[1]
        problem = f"it gives {list(found.shape)} of {found.dtype}"
    raise UsageError(
        f"{path} does not turn images [batch, 3, {crop[0]}, {crop[1]}] into vectors "
        f"[batch, dimensions]: {problem}"
    )
