"""ONNX export: a graph from RGB pixels 0…255 to vectors, checked against torch."""

import json
import logging
import warnings
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write, check_writable
from proximetry._util.imports import import_optional
from proximetry.models.backbones import evaluation_mode
from proximetry.models.embedder import Embedder, explain_nonfinite, versions

MAX_DIFFERENCE = 1e-4  # from torch, relative to the largest value
MIN_OPSET = 18  # torch exports this opset and converts it to newer ones


class _FromPixels(nn.Module):
    """The embedder after normalization."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, pixels: Tensor) -> Tensor:
        return self.embedder(self.embedder.preprocessing.normalize(pixels))  # type: ignore[no-any-return]


def write_onnx(embedder: Embedder, path: Path, opset: int) -> None:
    """Export to a file; raise if the outputs of onnxruntime and torch differ."""
    onnx, onnxruntime, _ = (
        import_optional(package, "onnx", "ONNX export")
        for package in ("onnx", "onnxruntime", "onnxscript")
    )
    check_writable(path)
    max_opset = onnx.defs.onnx_opset_version()
    if not MIN_OPSET <= opset <= max_opset:
        raise UsageError(f"opset must be between {MIN_OPSET} and {max_opset}, got {opset!r}")
    if any(value.dtype != torch.float32 for value in embedder.parameters()):
        embedder = deepcopy(embedder).float()  # like save and load
    network = _FromPixels(embedder)
    device = next((value.device for value in embedder.parameters()), "cpu")
    sample = embedder.preprocessing.sample(3, torch.Generator().manual_seed(0)).to(device)
    with evaluation_mode(network):
        with torch.inference_mode():
            expected = network(sample).cpu()
        if not torch.isfinite(expected).all():
            raise ValueError(
                f"the embedder returns NaN or infinite values: {explain_nonfinite(embedder)}"
            )
        model = _export(network, sample[:2], opset)
    onnx.helper.set_model_props(model, _metadata(embedder))
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        (output,) = session.run(None, {"pixels": sample[:batch].numpy(force=True)})
        difference = (torch.from_numpy(output) - expected[:batch]).abs().max()
        relative = float(difference / expected.abs().max().clamp(min=1e-12))
        if not relative <= MAX_DIFFERENCE:
            raise ValueError(
                f"the exported network differs from torch by {relative:.2g} at batch size {batch}, "
                f"more than {MAX_DIFFERENCE:g}. Nothing was written."
            )
    atomic_write(path, content)


def _metadata(embedder: Embedder) -> dict[str, str]:
    """Return the description of input, output and embedder for a deployment."""
    network, normalization = embedder.architecture, asdict(embedder.preprocessing)
    if embedder.takes_images:
        size = "shorter side = resize, longer side = int(resize * long / short)"
        if embedder.preprocessing.squash:
            size = "to (height, width) = resize, ignoring the aspect ratio"
        before = {name: normalization.pop(name) for name in ("resize", "crop", "interpolation")}
        inputs = {
            "input": "float32 [batch, 3, height, width]: upright RGB with values 0..255, resized "
            "and cropped as in `preprocessing`. The normalization is inside the graph and must "
            "not be applied again.",
            "preprocessing": json.dumps(before),
            "resize": f"with Pillow: {size}, filter = interpolation",
            "crop": "(height, width) in the center, from round((side - crop) / 2), halves to even",
            "normalization": json.dumps(normalization),
        }
    else:
        inputs = {"input": f"float32, {embedder.preprocessing}, not normalized."}
    output = (
        f"float32 [batch, {embedder.dim}]: embeddings, "
        f"{'of unit length' if network.normalize else 'not normalized'}, to be compared by "
        f"{network.similarity} similarity."
    )
    if embedder.bits:
        output += (
            f" Binary codes of {embedder.bits} bits are their signs: numpy.packbits(embeddings > "
            "0, axis=1), compared by Hamming distance."
        )
    calibration = embedder.calibration
    return {
        "proximetry": "embedder",
        **inputs,
        "output": output,
        "similarity": network.similarity,
        "architecture": json.dumps(network.to_json()),
        "versions": json.dumps(versions()),
        "fingerprint": embedder.fingerprint(),
        **({} if calibration is None else {"calibration": json.dumps(calibration.to_json())}),
    }


def _export(network: nn.Module, sample: Tensor, opset: int) -> Any:
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the exporter's internals
            program = torch.onnx.export(
                network,
                (sample,),
                input_names=["pixels"],
                output_names=["embeddings"],
                opset_version=opset,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
            return program.model_proto  # type: ignore[union-attr]
    except Exception as error:  # any error; messages are long
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch {torch.__version__} cannot export this network at opset {opset}: {reason}"
        ) from error
    finally:
        logger.setLevel(level)
