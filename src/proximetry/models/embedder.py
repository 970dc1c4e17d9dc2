"""`Embedder`: backbone, pooling and head; from pixels to vectors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry.models.backbones import Features, check_name, prepare
from proximetry.models.pooling import POOLINGS, make_pooling
from proximetry.models.preprocessing import Preprocessing
from proximetry.models.weights import WeightsRecord, load_backbone

if TYPE_CHECKING:
    from proximetry.models.encoding import ImageSource

# Networks whose published form flattens its map.
_FLATTENING = ("sphereface20",)


@dataclass(frozen=True)
class Architecture:
    """What an embedder is made of; `dim` 0 means no linear head, `pooling` is never "auto"."""

    backbone: str
    dim: int
    pooling: str
    layer_norm: bool
    normalize: bool
    mirror: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of plain values; with `mirror`, which is newer, only if it is set."""
        values = asdict(self)
        if not self.mirror:
            del values["mirror"]
        return values


class Embedder(nn.Module):
    """Turn pictures into vectors in which near means alike.

    Made by `Embedder.create` or read by `Embedder.load`. The network is backbone → pooling →
    LayerNorm without affine (optional) → linear to `dim` (optional) → L2 (optional).

    Attributes:
        architecture: names and settings the network is made of.
        preprocessing: the pixels it wants.
        weights: what the backbone started from.
        width: of the pooled features.
        dim: width of the vectors.
        class_names, metrics, recipe: what was saved with it, for people and for other rooms.
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        preprocessing: Preprocessing,
        weights: WeightsRecord,
    ) -> None:
        super().__init__()
        features = prepare(model, architecture.backbone, preprocessing.crop)
        pooling = _resolve_pooling(architecture, features)
        architecture = Architecture(**{**asdict(architecture), "pooling": pooling})
        width = features.channels
        if pooling == "flatten" and features.size:
            width *= features.size[0] * features.size[1]
        self.architecture = architecture
        self.preprocessing = preprocessing
        self.weights = weights
        self.width = width
        self.dim = architecture.dim or width
        self.class_names: list[str] | None = None
        self.metrics: dict[str, Any] | None = None
        self.recipe: dict[str, Any] | None = None
        self.backbone = model
        self.pooling = make_pooling(pooling)
        self.head = _make_head(width, architecture.dim)
        self._channels_last = features.channels_last
        self._idle = {name for name, value in model.named_parameters() if not value.requires_grad}

    @classmethod
    def create(
        cls,
        backbone: str,
        dim: int | None = 512,
        *,
        pooling: str = "auto",
        layer_norm: bool = False,
        normalize: bool = True,
        mirror: bool = False,
        weights: str | PathLike[str] = "auto",
        image_size: int | None = None,
        resize: int | None = None,
    ) -> Self:
        """Make an embedder.

        Args:
            backbone: any name of `list_backbones()`.
            dim: width of the vectors; None or 0 leaves the pooled features as they are.
            pooling: "avg", "max", "avg+max" (their sum), "gem" (p = 3), "gem-learned" (p starts
                at 3) or "flatten" for backbones with a feature map; "token" for transformers,
                which pool their tokens themselves; "auto" takes "avg" or "token", and "flatten"
                for sphereface20.
            layer_norm: LayerNorm without affine after pooling (ProxyNCA++).
            normalize: end on the unit sphere.
            mirror: outside training, the mean features of an image and its mirror image; twice the
                work.
            weights: "auto" takes an installed package that carries them, else the hub, else
                fails; "package", "hub", a file, or "none" for random weights on purpose.
            image_size: side of the square crop; None takes what the weights were trained with.
            resize: short side before the crop when evaluating; None keeps the usual proportion.
        """
        check_name(backbone)
        for name, value in (("dim", dim or 1), ("image_size", image_size), ("resize", resize)):
            if value is not None and (isinstance(value, bool) or value < 1 or value != int(value)):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if pooling not in POOLINGS:
            known = ", ".join(map(repr, POOLINGS))
            raise ValueError(f"pooling must be one of {known}, got {pooling!r}")
        crop = (image_size, image_size) if image_size else None
        choice = weights if isinstance(weights, str) else Path(weights)
        model, preprocessing, record = load_backbone(backbone, choice, crop, resize)
        architecture = Architecture(backbone, dim or 0, pooling, layer_norm, normalize, mirror)
        return cls(model, architecture, preprocessing, record)

    def features(self, pixels: Tensor) -> Tensor:
        """Return the pooled features [B, channels], before LayerNorm and head."""
        if self.architecture.mirror and not self.training:
            return (self._pooled(pixels) + self._pooled(pixels.flip(3))) / 2
        return self._pooled(pixels)

    def _pooled(self, pixels: Tensor) -> Tensor:
        if self.architecture.pooling == "token":
            return self.backbone(pixels)  # type: ignore[no-any-return]
        model: Any = self.backbone
        found = model.forward_features(pixels)
        if self._channels_last:
            found = found.permute(0, 3, 1, 2)
        return self.pooling(found)  # type: ignore[no-any-return]

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed preprocessed pixels [B, 3, H, W] (see `Preprocessing.normalise`) as [B, dim]."""
        return self.project(self.features(pixels))

    def project(self, features: Tensor) -> Tensor:
        """Return the vectors [B, dim] of pooled features [B, width]."""
        if self.architecture.layer_norm:
            features = F.layer_norm(features, features.shape[-1:])
        vectors: Tensor = self.head(features)
        # Half precision may do the network; lengths and losses need float32.
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return F.normalize(vectors, dim=-1) if self.architecture.normalize else vectors

    def parameter_parts(self) -> dict[str, list[nn.Parameter]]:
        """Return the trainable parts, for a learning rate each: backbone, head (with pooling)."""
        named = self.backbone.named_parameters()
        backbone = [value for name, value in named if name not in self._idle]
        return {
            "backbone": backbone,
            "head": [*self.pooling.parameters(), *self.head.parameters()],
        }

    def encode(
        self,
        images: "Iterable[ImageSource]",
        batch_size: int = 64,
        *,
        device: str | torch.device | None = None,
        flip: bool = False,
        workers: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Embed pictures: paths, PIL images, uint8 arrays or tensors [H, W, 3] or [H, W], mixed.

        Each is turned upright, made RGB, resized and cropped as `preprocessing` says.

        Args:
            images: any number of pictures.
            batch_size: pictures per pass.
            device: move the embedder there first; None leaves it where it is.
            flip: append the vector of the mirrored picture: [N, 2 · dim] (RegularFace on LFW).
            workers: threads that read pictures; None takes one per core, at most eight.
            progress: called with the number of pictures done, after every batch.

        Returns:
            Tensor [N, dim], float32, on the CPU.
        """
        from proximetry.models.encoding import encode

        return encode(self, images, batch_size, device, flip, workers, progress)

    def save(
        self,
        folder: str | PathLike[str],
        *,
        class_names: Sequence[str] | None = None,
        metrics: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> Path:
        """Write the embedder to a folder; an embedder that is already there is replaced at once.

        What is not given is kept from before. Raises ValueError when the folder holds
        anything else.
        """
        from proximetry.models.storage import save

        return save(self, Path(folder), class_names, metrics, recipe)

    @classmethod
    def load(cls, folder: str | PathLike[str], device: str | torch.device = "cpu") -> Self:
        """Read what `save` wrote, ready to encode. Downloads nothing and runs no stored code."""
        from proximetry.models.storage import load

        return load(cls, Path(folder)).to(device)

    def export_onnx(
        self, path: str | PathLike[str], *, opset: int = 18, check: bool = True
    ) -> Path:
        """Write the network as ONNX: float32 RGB 0…255 [N, 3, H, W], resized and cropped, in.

        Normalisation is part of the graph, the batch may have any size, and the preprocessing
        stands in the model's metadata. With `check`, onnxruntime must agree with torch.
        """
        from proximetry.models.export import export_onnx

        return export_onnx(self, Path(path), opset, check)


def _resolve_pooling(architecture: Architecture, features: Features) -> str:
    name, pooling = architecture.backbone, architecture.pooling
    if pooling == "auto":
        if features.size is None:
            return "token"
        return "flatten" if name.partition(".")[0] in _FLATTENING else "avg"
    if features.size is None and pooling != "token":
        raise ValueError(
            f"pooling {pooling!r} needs a feature map, but {name} gives tokens and pools them "
            "itself: use pooling='token'"
        )
    if features.size is not None and pooling == "token":
        raise ValueError(f"pooling 'token' is for transformers, but {name} gives a feature map")
    return pooling


def _make_head(width: int, dim: int) -> nn.Module:
    if not dim:
        return nn.Identity()
    head = nn.Linear(width, dim)
    nn.init.kaiming_normal_(head.weight, mode="fan_out")
    nn.init.zeros_(head.bias)
    return head
