"""`proximetry export` and `proximetry push`: embedders for other programs and people."""

from pathlib import Path

from proximetry.cli.inputs import load_embedder
from proximetry.cli.options import EmbedderFolder, Flag
from proximetry.cli.output import check_out, echo


def export(embedder: EmbedderFolder, out: Path, *, opset: int = 18) -> None:
    """Export an embedder to ONNX and verify it with onnxruntime against torch.

    Args:
        out: the .onnx file to write.
        opset: version of the ONNX operators.
    """
    check_out(out, [".onnx"], option="OUT")
    model = load_embedder(embedder, "cpu")
    model.export_onnx(out, opset=opset)
    inputs = str(model.preprocessing)
    if model.takes_images:
        height, width = model.preprocessing.crop
        inputs = f"RGB 0…255, float32 [N, 3, {height}, {width}]"
    echo(f"{out}: {inputs} → [N, {model.dim}], checked")


def push(
    embedder: EmbedderFolder, repo: str, *, license: str | None = None, private: Flag = False
) -> None:
    """Upload an embedder, with a model card, to a repository of the Hugging Face Hub.

    Its class names, metrics and recipe are included. Commands that take an embedder then take
    hub:owner/name as well.

    Args:
        repo: the repository, owner/name; created if it does not exist.
        license: the license of the embedder, by the hub's name, such as apache-2.0.
        private: make a new repository private.
    """
    address = load_embedder(embedder, "cpu").push_to_hub(repo, license=license, private=private)
    echo(f"{address}: use it as hub:{repo}")
