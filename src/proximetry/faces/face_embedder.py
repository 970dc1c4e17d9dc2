"""`FaceEmbedder`: a saved embedder or an ONNX file as a function from pixels to vectors."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from proximetry._util.errors import UsageError, suggest
from proximetry._util.files import read_text
from proximetry._util.formatting import format_value
from proximetry._util.machine import resolve_device
from proximetry.data.images import ImageError, image_size
from proximetry.faces.detector import describe_tensors, open_session, reason_of
from proximetry.models import Preprocessing

Array = np.ndarray[Any, Any]

_DEFAULT_SIDE = 112
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class _Contract(BaseModel):
    """The input of an ONNX file; see `open_embedder`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    size: int | tuple[int, int] | None = None
    channels: Literal["RGB", "BGR"] = "RGB"
    range: tuple[float, float] = (0, 255)
    mean: float | tuple[float, float, float] | None = None
    std: float | tuple[float, float, float] | None = None
    output: str | None = None


@dataclass(frozen=True)
class FaceEmbedder:
    """A function from pixels to vectors.

    Attributes:
        source: folder, file or hub address.
        dim: dimension of the vectors.
        preprocessing: from images to pixels.
        embed: maps pixels, uint8 RGB [B, 3, H, W], to vectors [B, dim].
        device: device of the pixels.
        flip_tta: whether a vector already describes both the image and its mirror image.
        onnx: whether it is an ONNX file.
    """

    source: str
    dim: int
    preprocessing: Preprocessing
    embed: Callable[[Tensor], Tensor]
    device: torch.device
    flip_tta: bool = False
    onnx: bool = False

    @property
    def views(self) -> str:
        """Describe the views of an image in a vector."""
        if self.flip_tta:
            return "image and mirror image in one embedding (flip TTA)"
        return "image and mirror image, concatenated"

    def size_notes(self, file: str) -> list[str]:
        """Return a note if an image does not have the size of the faces an ONNX model takes."""
        crop = self.preprocessing.crop
        try:
            width, height = image_size(file)
        except ImageError:  # reported when it is embedded
            return []
        if not self.onnx or (height, width) == crop:
            return []
        return [
            f"images are scaled and cropped ({file} has {width}×{height} pixels, the model takes "
            f"{crop[1]}×{crop[0]}). Align them first with `proximetry faces align`."
        ]


def open_embedder(
    source: str | os.PathLike[str],
    contract: str | None = None,
    device: str | torch.device | None = None,
) -> FaceEmbedder:
    """Open an embedder: the folder of a run or of an embedder, hub:owner/name, or an ONNX file.

    ``contract`` describes the input of an ONNX file, as JSON or a JSON file; by default the JSON
    file of the same name beside it, then its own metadata (`proximetry export`). All keys are
    optional: ``size`` (one side, or [height, width]; 112 unless the file has another), ``channels``
    ("RGB" or "BGR"), ``range`` of the pixels before ``mean`` and ``std`` ([0, 255]), ``mean`` and
    ``std`` (one number or three; by default the range becomes −1…1), and ``output``, the name of
    the embedding among several outputs.
    """
    path = Path(source).expanduser()
    device = device if isinstance(device, torch.device) else resolve_device(device)
    if path.is_file() or path.suffix.lower() == ".onnx":
        return _open_onnx(path, contract, device)
    if contract is not None:
        raise UsageError(f"--input applies to ONNX files only, got {source}. Omit --input.")
    # With timm, whose import takes seconds.
    from proximetry.models.hub import load_embedder

    model = load_embedder(path, device)
    flip_tta = model.architecture.flip_tta
    return FaceEmbedder(str(source), model.dim, model.preprocessing, model.embed, device, flip_tta)


def _open_onnx(path: Path, contract: str | None, device: torch.device) -> FaceEmbedder:
    session = open_session(path, torch.get_num_threads(), device)
    inputs, outputs = session.get_inputs(), [value.name for value in session.get_outputs()]
    name, shape, kind = inputs[0].name, inputs[0].shape, inputs[0].type
    one_image = len(inputs) == 1 and len(shape) == 4 and kind in _TYPES
    if not one_image or (isinstance(shape[1], int) and shape[1] != 3):
        raise UsageError(
            f"{path} takes {describe_tensors(inputs)}. Use a network for float images [B, 3, H, W]"
        )
    description, origin = _read_contract(path, contract)
    output = description.output or (outputs[0] if len(outputs) == 1 else None)
    if output not in outputs:
        raise UsageError(
            f"{path} has the outputs {', '.join(outputs)}, not {output}. Name the embedding: "
            f'--input \'{{"output": "{outputs[0]}"}}\''
        )
    metadata = session.get_modelmeta().custom_metadata_map
    flip_tta = False
    if description.model_fields_set <= {"output"} and metadata.get("proximetry") == "embedder":
        preprocessing, flip_tta = _exported(metadata)
    else:
        preprocessing = _preprocessing(description, origin, shape[2:])

    def run(pixels: Array) -> Array:
        return np.asarray(session.run([output], {name: pixels.astype(_TYPES[kind])})[0])

    fixed = shape[0] if isinstance(shape[0], int) else None
    batch, dim = _probe(path, run, preprocessing.crop, fixed)

    def embed(pixels: Tensor) -> Tensor:
        values = preprocessing.normalize(pixels).numpy(force=True)
        size = batch or len(values)
        vectors = []
        for at in range(0, len(values), size):
            part = values[at : at + size]
            # A fixed batch size needs padding.
            empty = np.zeros((size - len(part), *part.shape[1:]), part.dtype)
            vectors.append(run(np.concatenate([part, empty]))[: len(part)])
        return torch.from_numpy(np.concatenate(vectors)).float()

    return FaceEmbedder(str(path), dim, preprocessing, embed, device, flip_tta, onnx=True)


def _read_contract(path: Path, contract: str | None) -> tuple[_Contract, str]:
    """Return the description of the input of an ONNX file, and where it is."""
    beside = path.with_suffix(".json")
    if contract is None and not beside.is_file():
        return _Contract(), "the default"
    origin, text = "--input", contract or ""
    if not text.lstrip().startswith("{"):
        origin, text = str(contract or beside), read_text(Path(contract or beside), limit=2**20)
    try:
        return _Contract.model_validate_json(text, strict=True), origin
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(map(str, first["loc"][:1]))
        message = first["msg"].replace("Input should", "must")
        reason = f"{key} {message}, got {format_value(first['input'])}"
        if first["type"] == "extra_forbidden":
            reason = f"unknown key {key!r}{suggest(key, _Contract.model_fields)}"
        raise UsageError(f"{origin}: {reason.strip()}") from error


def _preprocessing(contract: _Contract, origin: str, shape: Sequence[Any]) -> Preprocessing:
    low, high = contract.range
    if low >= high:
        raise UsageError(f"{origin}: range must be [low, high], got {[low, high]}")
    sides = [side if isinstance(side, int) else _DEFAULT_SIDE for side in shape]
    crop = np.broadcast_to(sides if contract.size is None else contract.size, 2).tolist()
    mean = (low + high) / 2 if contract.mean is None else contract.mean
    std = (high - low) / 2 if contract.std is None else contract.std
    try:
        return Preprocessing(
            resize=min(crop),
            crop=tuple(crop),
            mean=tuple((np.broadcast_to(mean, 3) - low).tolist()),
            std=tuple(np.broadcast_to(std, 3).tolist()),
            scale=(high - low) / 255,
            channels=contract.channels,
            interpolation="bilinear",
        )
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from error


def _exported(metadata: Mapping[str, str]) -> tuple[Preprocessing, bool]:
    """Read the metadata of `proximetry export`: normalization is part of the graph."""
    before = json.loads(metadata["preprocessing"])
    settings = {key: before[key] for key in ("resize", "crop", "interpolation")}
    preprocessing = Preprocessing(**settings, mean=(0.0,) * 3, std=(1.0,) * 3, scale=1.0)
    return preprocessing, bool(json.loads(metadata["architecture"])["flip_tta"])


def _probe(
    path: Path, run: Callable[[Array], Array], crop: tuple[int, int], fixed: int | None
) -> tuple[int | None, int]:
    """Return the batch size of a network, if fixed, and the dimension of its vectors.

    Many files declare a dynamic batch size but accept one image only, so two images are tried.
    """
    problem = ""
    for batch in (fixed,) if fixed else (2, 1):
        try:
            output = run(np.zeros((batch, 3, *crop), np.float32))
        except Exception as error:
            problem = problem or reason_of(error)
            continue
        if output.ndim == 2 and len(output) == batch and output.dtype.kind == "f":
            return (None if batch == 2 and not fixed else batch), output.shape[1]
        problem = f"it returns {list(output.shape)} {output.dtype}"
    raise UsageError(
        f"{path} does not map images [batch, 3, {crop[0]}, {crop[1]}] to vectors "
        f"[batch, dimensions]: {problem}"
    )
