"""ONNX: the whole way from RGB pixels 0…255 to vectors in one file, checked against torch."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proximetry._common import atomic_write, need

# Largest difference to torch that counts as agreement, relative to the largest value.
TOLERANCE = 1e-4
# torch writes this opset and converts to newer ones.
OLDEST = 18


def write_onnx(
    network: nn.Module,
    sample: Tensor,
    path: Path,
    metadata: Mapping[str, str],
    *,
    opset: int,
    check: bool,
) -> None:
    """Write a network in evaluation mode that takes batches like `sample`, of any length."""
    onnx, onnxruntime, _ = (
        need(package, "onnx", "ONNX export") for package in ("onnx", "onnxruntime", "onnxscript")
    )
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST <= opset <= newest:
        raise ValueError(f"opset must be between {OLDEST} and {newest}, got {opset!r}")
    model = _export(network, sample[:2], opset)
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    if check:
        with torch.inference_mode():
            expected = network(sample).cpu()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        _compare(session, sample.cpu(), expected)
    atomic_write(path, content)


def _export(network: nn.Module, sample: Tensor, opset: int) -> Any:
    try:
        with _quiet():
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
    except Exception as error:
        # The exporter's messages fill a page; its last line of reasons is in the cause.
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch {torch.__version__} cannot export this network at opset {opset}: {reason}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks about its own internals; what matters is checked later."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _compare(session: Any, sample: Tensor, expected: Tensor) -> None:
    for batch in (1, 3):
        (found,) = session.run(None, {"pixels": sample[:batch].numpy()})
        difference = (torch.from_numpy(found) - expected[:batch]).abs().max()
        relative = float(difference / expected.abs().max().clamp(min=1e-12))
        if not relative <= TOLERANCE:
            raise ValueError(
                f"the exported network differs from torch by {relative:.2g} at batch {batch} "
                f"(allowed {TOLERANCE:g}); nothing was written"
            )
