"""`FaceEmbedder`: a saved embedder or an ONNX file as a function from pixels to vectors."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.machine import resolve_device
from proximetry.data.images import ImageError, image_size
from proximetry.faces import Flip
from proximetry.models import Embedder, Preprocessing
from proximetry.models.embedder import extract_features


@dataclass(frozen=True)
class FaceEmbedder:
    """A face embedder: a function from pixels to vectors.

    Attributes:
        source: folder, file or hub address.
        dim: dimension of the vectors.
        preprocessing: from images to pixels.
        embed: maps pixels, uint8 RGB [B, 3, H, W], to vectors [B, dim].
        device: device of the pixels.
        flip_tta: whether a vector already combines the image and its mirror image.
        onnx: whether the source is an ONNX file.
        features: as `embed`, before L2 normalization; None if `embed` does not normalize.
    """

    source: str
    dim: int
    preprocessing: Preprocessing
    embed: Callable[[Tensor], Tensor]
    device: torch.device
    flip_tta: bool = False
    onnx: bool = False
    features: Callable[[Tensor], Tensor] | None = None

    def resolve_flip(self, flip: Flip | None, default: Flip = "concat") -> Flip:
        """Return the default for None; raise if the embedder already has flip TTA."""
        if flip is None:
            return "none" if self.flip_tta else default
        if self.flip_tta and flip != "none":
            raise UsageError(f"--flip {flip} has no effect: {self.source} has flip TTA. Omit it.")
        return flip

    def describe_views(self, flip: Flip) -> str:
        """Return the views of an image that its vector combines, in words."""
        if self.flip_tta:
            return "image and mirror image in one embedding (flip TTA)"
        return {
            "concat": "image and mirror image, concatenated",
            "sum": "image and mirror image, summed",
            "none": "the image only",
        }[flip]

    def size_notes(self, file: str) -> list[str]:
        """Return a note if an image does not have the input size of an ONNX model."""
        crop = self.preprocessing.crop
        try:
            width, height = image_size(file)
        except ImageError:  # reported when it is embedded
            return []
        if not self.onnx or (height, width) == crop:
            return []
        return [
            f"images are scaled and cropped ({file} has {width}×{height} pixels, the model's input "
            f"{crop[1]}×{crop[0]}). Align them first with `proximetry faces align`."
        ]


def open_embedder(
    source: str | os.PathLike[str],
    contract: str | None = None,
    device: str | torch.device | None = None,
) -> FaceEmbedder:
    """Open an embedder: any source of `Embedder.load`.

    ``contract`` describes the input of an ONNX file, as in `Embedder.from_onnx`.
    """
    path = Path(source).expanduser()
    device = resolve_device(device)
    if path.is_file() or path.suffix.lower() == ".onnx":
        model = Embedder.from_onnx(path, device, description=contract)
        # Without L2 normalization: concatenated views keep their relative lengths.
        return FaceEmbedder(
            str(path),
            model.dim,
            model.preprocessing,
            partial(extract_features, model),
            device,
            model.backbone.flip_tta,  # type: ignore[arg-type]
            onnx=True,
        )
    if contract is not None:
        raise UsageError(f"--input applies to ONNX files only, got {source}. Omit --input.")
    model = Embedder.load(path, device)
    flip_tta = model.architecture.flip_tta
    return FaceEmbedder(
        str(source),
        model.dim,
        model.preprocessing,
        model.embed,
        device,
        flip_tta,
        features=partial(_unnormalized, model) if model.architecture.normalize else None,
    )


@torch.no_grad()
def _unnormalized(model: Embedder, pixels: Tensor) -> Tensor:
    with torch.autocast(pixels.device.type, enabled=False):
        return model.project(extract_features(model, pixels), normalize=False).float()
