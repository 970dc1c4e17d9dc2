"""`proximetry export`: write an embedder as an ONNX file."""

from pathlib import Path

from proximetry.cli.inputs import load_embedder
from proximetry.cli.options import EmbedderFolder
from proximetry.cli.output import check_out, echo


def export(embedder: EmbedderFolder, out: Path, *, opset: int = 18) -> None:
    """Export an embedder to ONNX and verify it with onnxruntime against torch.

    Args:
        out: the .onnx file to write.
        opset: ONNX opset version.
    """
    check_out(out, [".onnx"], option="OUT")
    model = load_embedder(embedder, "cpu")
    model.export_onnx(out, opset=opset)
    inputs = str(model.preprocessing)
    if model.takes_images:
        height, width = model.preprocessing.crop
        inputs = f"RGB 0…255, float32 [N, 3, {height}, {width}]"
    echo(f"{out}: {inputs} → [N, {model.dim}], verified")
