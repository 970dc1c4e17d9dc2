"""ONNX files opened by onnxruntime."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import UsageError, need

if TYPE_CHECKING:
    import torch


def open_session(file: Path, threads: int, device: "torch.device | None" = None) -> Any:
    """Open an ONNX file, to be run by so many threads, on a GPU if that is wanted and possible."""
    runtime = need("onnxruntime", "faces", "Running an ONNX file")
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    providers = ["CPUExecutionProvider"]
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu and "CUDAExecutionProvider" in runtime.get_available_providers():
        providers.insert(0, "CUDAExecutionProvider")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what matters is raised, and told by us
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Threads that wait leave the cores to those that read images.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return runtime.InferenceSession(str(file), options, providers=providers)
    except Exception as error:  # it has a class of its own for every kind of damage
        raise UsageError(
            f"{file} is no ONNX file that onnxruntime reads: {reason_of(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """What onnxruntime says, without its codes and places."""
    lines = str(error).strip().splitlines()
    return lines[0].rpartition(" : ")[2][:200] if lines else type(error).__name__
