"""ONNX: the whole way from RGB pixels 0…255 to vectors in one file, checked against torch."""

import json
import logging
import os
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from proximetry.models.encoding import _evaluating

if TYPE_CHECKING:
    from proximetry.models.embedder import Embedder

# Largest difference to torch that counts as agreement, relative to the largest value.
TOLERANCE = 1e-4
# torch writes this opset and converts to newer ones.
OLDEST = 18


class _FromPixels(nn.Module):
    """The embedder with the normalisation in front."""

    def __init__(self, embedder: "Embedder") -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, pixels: Tensor) -> Tensor:
        ready = self.embedder.preprocessing.normalise(pixels)
        return self.embedder(ready)  # type: ignore[no-any-return]


def export_onnx(embedder: "Embedder", path: Path, opset: int, check: bool) -> Path:
    """Do the work of `Embedder.export_onnx`."""
    onnx, onnxruntime, _ = map(_need, ("onnx", "onnxruntime", "onnxscript"))
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST <= opset <= newest:
        raise ValueError(f"opset must be between {OLDEST} and {newest}, got {opset!r}")
    height, width = embedder.preprocessing.crop
    network = _FromPixels(embedder)
    place = next(embedder.parameters()).device
    sample = torch.rand(3, 3, height, width, generator=torch.Generator().manual_seed(0)) * 255
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx-") as folder,
        _evaluating(network),
    ):
        part = Path(folder, path.name)
        _export(network, sample[:2].to(place), part, opset)
        model = onnx.load(part)
        onnx.helper.set_model_props(model, _metadata(embedder))
        onnx.checker.check_model(model)
        onnx.save(model, part)
        if check:
            with torch.inference_mode():
                expected = network(sample.to(place)).cpu()
            _compare(onnxruntime, part, sample, expected)
        os.replace(part, path)
    return path


def _need(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"ONNX export needs {package}: pip install 'proximetry[onnx]'", name=package
        ) from error


def _export(network: nn.Module, sample: Tensor, path: Path, opset: int) -> None:
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            # The exporter warns about its own internals; what matters is checked afterwards.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network,
                (sample,),
                str(path),
                input_names=["pixels"],
                output_names=["embeddings"],
                opset_version=opset,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        # The exporter's messages fill a page; its last line of reasons is in the cause.
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch {torch.__version__} cannot export this network at opset {opset}: {reason}"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _metadata(embedder: "Embedder") -> dict[str, str]:
    return {
        "proximetry": "embedder",
        "input": "float32 RGB 0..255 [batch, 3, height, width], resized and cropped",
        "preprocessing": json.dumps(embedder.preprocessing.to_json()),
        "architecture": json.dumps(embedder.architecture.to_json()),
    }


def _compare(onnxruntime: Any, path: Path, sample: Tensor, expected: Tensor) -> None:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        (found,) = session.run(None, {"pixels": sample[:batch].numpy()})
        difference = (torch.from_numpy(found) - expected[:batch]).abs().max()
        relative = float(difference / expected.abs().max().clamp(min=1e-12))
        if not relative <= TOLERANCE:
            raise ValueError(
                f"the exported network differs from torch by {relative:.2g} at batch {batch} "
                f"(allowed {TOLERANCE:g}); nothing was written"
            )
