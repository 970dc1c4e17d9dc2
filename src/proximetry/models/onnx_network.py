"""`OnnxNetwork`: an ONNX file as the network of an embedder, run by onnxruntime."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from proximetry._util.errors import UsageError, suggest
from proximetry._util.files import read_text
from proximetry._util.formatting import format_value
from proximetry._util.imports import import_optional
from proximetry.models.preprocessing import Preprocessing

import_optional("pydantic", "faces", "An ONNX file")

from pydantic import BaseModel, ConfigDict, ValidationError  # noqa: E402

Array = np.ndarray[Any, Any]

CUDA = "CUDAExecutionProvider"  # of onnxruntime-gpu
_DEFAULT_SIDE = 112
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class _Description(BaseModel):
    """The input of an ONNX file; see `Embedder.from_onnx`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    size: int | tuple[int, int] | None = None
    channels: Literal["RGB", "BGR"] = "RGB"
    range: tuple[float, float] = (0, 255)
    mean: float | tuple[float, float, float] | None = None
    std: float | tuple[float, float, float] | None = None
    output: str | None = None


class OnnxNetwork(nn.Module):
    """An ONNX file that maps images [B, 3, H, W] to vectors [B, dim].

    The file and the name of its output are buffers: an embedder saves them, and they are part of
    its fingerprint.

    Attributes:
        sha256: checksum of the file.
        shape: of the input, [B, 3, H, W]; names where the file takes any size.
    """

    file: Tensor
    output: Tensor

    def __init__(
        self, content: bytes, output: str | None, device: torch.device, name: str = "the file"
    ) -> None:
        super().__init__()
        self._name = name
        self._session = open_session(content, torch.get_num_threads(), device, name)
        inputs = self._session.get_inputs()
        outputs = [value.name for value in self._session.get_outputs()]
        shape, kind = inputs[0].shape, inputs[0].type
        one_image = len(inputs) == 1 and len(shape) == 4 and kind in _TYPES
        if not one_image or (isinstance(shape[1], int) and shape[1] != 3):
            raise UsageError(
                f"{name} takes {describe_tensors(inputs)}. Use a network for float images "
                "[B, 3, H, W]"
            )
        output = output or (outputs[0] if len(outputs) == 1 else None)
        if output is None or output not in outputs:
            raise UsageError(
                f"{name} has the outputs {', '.join(outputs)}, not {output}. Name the embedding in "
                f'the description of the file: {{"output": "{outputs[0]}"}}'
            )
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._input, self._output, self._type = inputs[0].name, output, _TYPES[kind]
        self.shape: Sequence[Any] = shape
        self._batch = shape[0] if isinstance(shape[0], int) else None
        for key, value in (("file", content), ("output", output.encode())):
            self.register_buffer(key, torch.frombuffer(bytearray(value), dtype=torch.uint8))

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], crop: tuple[int, int], device: torch.device
    ) -> Self:
        """Restore the network from the state of an embedder."""
        content, output = (state[f"backbone.{key}"].numpy().tobytes() for key in ("file", "output"))
        network = cls(content, output.decode(), device)
        network.probe(crop)
        return network

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that `Embedder.export_onnx` writes; else empty."""
        metadata = self._session.get_modelmeta().custom_metadata_map
        return metadata if metadata.get("proximetry") == "embedder" else {}

    @property
    def flip_tta(self) -> bool:
        """Whether a vector describes both the image and its mirror image."""
        return bool(json.loads(self.metadata.get("architecture", "{}")).get("flip_tta"))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the vectors [B, dim] of normalized pixels [B, 3, H, W], on the CPU."""
        values = pixels.numpy(force=True)
        size = self._batch or len(values)
        vectors = []
        for at in range(0, len(values), size):
            part = values[at : at + size]
            # A fixed batch size needs padding.
            empty = np.zeros((size - len(part), *part.shape[1:]), part.dtype)
            vectors.append(self._run(np.concatenate([part, empty]))[: len(part)])
        return torch.from_numpy(np.concatenate(vectors)).float()

    def _run(self, pixels: Array) -> Array:
        inputs = {self._input: np.ascontiguousarray(pixels, self._type)}
        return np.asarray(self._session.run([self._output], inputs)[0])

    def probe(self, crop: tuple[int, int]) -> None:
        """Find the batch size, and raise unless the output is vectors.

        Many files declare a dynamic batch size but accept one image only, so two images are tried.
        """
        problem = ""
        for batch in (self._batch,) if self._batch else (2, 1):
            try:
                output = self._run(np.zeros((batch, 3, *crop), np.float32))
            except Exception as error:
                problem = problem or reason_of(error)
                continue
            if output.ndim == 2 and len(output) == batch and output.dtype.kind == "f":
                self._batch = self._batch or (1 if batch == 1 else None)
                return
            problem = f"it returns {list(output.shape)} {output.dtype}"
        raise UsageError(
            f"{self._name} does not map images [batch, 3, {crop[0]}, {crop[1]}] to vectors "
            f"[batch, dimensions]: {problem}"
        )


def open_onnx(
    path: Path, description: str | None, device: torch.device
) -> tuple[OnnxNetwork, Preprocessing, dict[str, Any]]:
    """Open an ONNX file; return also its preprocessing, and settings of its `Architecture`."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}. Pass an ONNX file.")
    content = path.read_bytes()
    if path.with_name(f"{path.name}.data").exists():  # weights beside the file
        onnx = import_optional("onnx", "onnx", f"{path} with external data")
        content = onnx.load(str(path)).SerializeToString()
    described, origin = _read_description(path, description)
    network = OnnxNetwork(content, described.output, device, str(path))
    settings: dict[str, Any] = {"normalize": True}
    if described.model_fields_set <= {"output"} and network.metadata:
        # Normalization is part of the graph.
        before = json.loads(network.metadata["preprocessing"])
        sizes = {key: before[key] for key in ("resize", "crop", "interpolation")}
        preprocessing = Preprocessing(**sizes, mean=(0.0,) * 3, std=(1.0,) * 3, scale=1.0)
        exported = json.loads(network.metadata["architecture"])
        settings = {key: exported[key] for key in ("normalize", "similarity")}
    else:
        preprocessing = _preprocessing(described, origin, network.shape[2:])
    network.probe(preprocessing.crop)
    return network, preprocessing, settings


def _read_description(path: Path, description: str | None) -> tuple[_Description, str]:
    """Return the description of the input of an ONNX file, and where it is."""
    beside = path.with_suffix(".json")
    if description is None and not beside.is_file():
        return _Description(), "the default"
    origin, text = "the description", description or ""
    if not text.lstrip().startswith("{"):
        origin = str(description or beside)
        text = read_text(Path(origin), limit=2**20)
    try:
        return _Description.model_validate_json(text, strict=True), origin
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(map(str, first["loc"][:1]))
        message = first["msg"].replace("Input should", "must")
        reason = f"{key} {message}, got {format_value(first['input'])}"
        if first["type"] == "extra_forbidden":
            reason = f"unknown key {key!r}{suggest(key, _Description.model_fields)}"
        raise UsageError(f"{origin}: {reason.strip()}") from error


def _preprocessing(described: _Description, origin: str, shape: Sequence[Any]) -> Preprocessing:
    low, high = described.range
    if low >= high:
        raise UsageError(f"{origin}: range must be [low, high], got {[low, high]}")
    sides = [side if isinstance(side, int) else _DEFAULT_SIDE for side in shape]
    crop = np.broadcast_to(sides if described.size is None else described.size, 2).tolist()
    mean = (low + high) / 2 if described.mean is None else described.mean
    std = (high - low) / 2 if described.std is None else described.std
    try:
        return Preprocessing(
            resize=min(crop),
            crop=tuple(crop),
            mean=tuple((np.broadcast_to(mean, 3) - low).tolist()),
            std=tuple(np.broadcast_to(std, 3).tolist()),
            scale=(high - low) / 255,
            channels=described.channels,
            interpolation="bilinear",
        )
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from error


def open_session(
    source: Path | bytes, threads: int, device: torch.device | None = None, name: str = ""
) -> Any:
    """Open an ONNX file, or its content, in onnxruntime, on a GPU if requested and possible."""
    runtime = import_optional("onnxruntime", "faces", "Running an ONNX file")
    if isinstance(source, Path) and not source.is_file():
        raise UsageError(f"no such file: {source}. Pass an ONNX file.")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device is not None and device.type == "cuda" and CUDA in runtime.get_available_providers():
        providers.insert(0, (CUDA, {"device_id": device.index or 0}))
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Idle threads leave the cores to the image readers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    content = source if isinstance(source, bytes) else str(source)
    try:
        return runtime.InferenceSession(content, options, providers=providers)
    except Exception as error:  # one class for every kind of damage
        reason = reason_of(error)
        raise UsageError(
            f"not an ONNX file that onnxruntime reads: {name or source!s}, {reason}"
        ) from error


def reason_of(error: Exception) -> str:
    """Return the message of an onnxruntime error, without its codes and source locations."""
    return " ".join(str(error).split()).rpartition(" : ")[2][:200] or type(error).__name__


def describe_tensors(values: Sequence[Any]) -> str:
    """Describe the inputs or outputs of a network: names, shapes and types."""
    shapes = (f"{v.name} [{', '.join(map(str, v.shape))}] {v.type}" for v in values)
    return (", ".join(itertools.islice(shapes, 3)) or "nothing") + ", …" * (len(values) > 3)
