"""`Embedder`: backbone, pooling and head, defined by an `Architecture`."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value, join_first, shorten
from proximetry._util.machine import preserve_rng_state, resolve_device
from proximetry._util.tensors import binary_codes, l2_normalize
from proximetry._util.types import Progress, is_integer
from proximetry.data import Catalog, VectorCatalog
from proximetry.metrics.calibration import Calibration
from proximetry.metrics.calibration_fitting import calibrate
from proximetry.models.architecture import Architecture
from proximetry.models.backbones import (
    Features,
    ResidualMLP,
    build,
    check_name,
    check_patches,
    class_and_patches,
    evaluation_mode,
    load_timm,
    prepare,
)
from proximetry.models.constants import CUSTOM, HUB, ONNX, VECTOR_BACKBONES, Similarity
from proximetry.models.encoding import embed_images
from proximetry.models.pooling import POOLING_LAYERS
from proximetry.models.preprocessing import ImageSource, ImageSources, Input, Preprocessing, Tensors
from proximetry.models.storage import (
    find_embedder,
    read_calibration,
    read_embedder,
    write_embedder,
)
from proximetry.models.weights import RANDOM, WeightsRecord, load_weights

if TYPE_CHECKING:
    from proximetry.models.explanation import Explanation

_MAX_HEAD = 2**30  # weights: 4 GB
_LARGE_NETWORK = 2**27  # weights: 0.5 GB

Stage = Literal["pixels", "normalized", "features"]
"""Stage of a batch: pixels 0…255, normalized input of the network, or pooled features."""


class Embedder(nn.Module):
    """Image embedding model: backbone, pooling and linear head.

    Create one with `Embedder.create`, `Embedder.wrap` (a custom module) or `Embedder.load`. The
    network is backbone → pooling → LayerNorm without affine (optional) → linear to `dim`
    (optional) → L2 (optional).

    Attributes:
        architecture: settings of the network.
        preprocessing: the input of the network; `Tensors` if it takes no images.
        weights: initial weights of the backbone.
        width: dimension of the pooled features.
        dim: dimension of the vectors.
        bits: length of the trained binary codes, or None.
        channels_last: whether the backbone's feature map is [B, H, W, channels].
        takes_images: whether the input is images rather than tensors.
        class_names: training classes, if saved.
        metrics: metrics, if saved.
        recipe: training recipe, if saved.
        calibration: what similarities mean, if it was measured (`calibrate`).
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        preprocessing: Input,
        weights: WeightsRecord,
    ) -> None:
        super().__init__()
        self.takes_images = isinstance(preprocessing, Preprocessing)
        if (architecture.flip_tta or architecture.tta_crops) and not self.takes_images:
            raise ValueError(f"test-time augmentation is for images, got {preprocessing}")
        if architecture.backbone == ONNX or architecture.backbone.startswith(CUSTOM):
            features = Features(_probe_custom(model, preprocessing), "token")
        elif isinstance(preprocessing, Tensors):
            features = Features(preprocessing.shape[0], "token")
        else:
            name, pooling = architecture.backbone, architecture.pooling
            features = prepare(model, name, preprocessing.crop, pooling)
        if architecture.dim * features.width > _MAX_HEAD:
            raise ValueError(
                f"head too large: {features.width} features × {architecture.dim} dimensions. Use "
                "fewer dimensions, another pooling or smaller images."
            )
        self.architecture = replace(architecture, pooling=features.pooling)
        self.preprocessing = cast(Preprocessing, preprocessing)  # Tensors if not takes_images
        self.weights = weights
        self.width = features.width
        self.dim = architecture.dim or features.width
        self.bits = architecture.dim if architecture.binary else None
        self.class_names: list[str] | None = None
        self.metrics: dict[str, Any] | None = None
        self.recipe: dict[str, Any] | None = None
        self.calibration: Calibration | None = None
        self.backbone = model
        self.pooling = POOLING_LAYERS.get(features.pooling, nn.Identity)()
        self.head: nn.Module = nn.Identity()
        if architecture.dim:
            self.head = nn.Linear(features.width, architecture.dim)
            nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
            nn.init.zeros_(self.head.bias)
        self.channels_last, self._dropped = features.channels_last, features.dropped
        self._frozen = {n for n, value in model.named_parameters() if not value.requires_grad}

    @classmethod
    @torch.inference_mode(False)  # inference tensors cannot be trained
    def create(
        cls,
        backbone: str,
        dim: int | None = 512,
        *,
        bits: int | None = None,
        pooling: str = "auto",
        layer_norm: bool = False,
        normalize: bool = True,
        flip_tta: bool = False,
        tta_crops: Sequence[float] = (),
        similarity: Similarity | None = None,
        weights: str | PathLike[str] = "auto",
        image_size: int | None = None,
        resize: int | None = None,
        squash: bool | None = None,
        input_dim: int | None = None,
    ) -> Self:
        """Create an embedder.

        Args:
            backbone: a name from `list_backbones()`; for vectors instead of images "vectors", a
                linear head, or "vectors_mlp", a small MLP before it.
            dim: dimension of the vectors; None or 0 returns the pooled features.
            bits: length of binary codes, a multiple of 8 such as 64; replaces `dim`, and
                `encode(…, binary=True)` returns the signs of the vectors.
            pooling: "avg", "max", "avg+max" (their sum), "gem" (p = 3), "gem-learned" (p starts
                at 3) or "flatten" for feature maps; for transformers "token", their own pooling,
                or "cls-avg", the class token and the mean patch token concatenated (DINOv2,
                DINOv3). "auto" is the pooling of pretraining: "token" for transformers, "flatten"
                for sphereface20, and "pre-logits", the input of the classifier, for other networks.
                Other poolings drop the layers after the network's own pooling, with a warning.
            layer_norm: LayerNorm without affine after pooling (ProxyNCA++).
            normalize: L2-normalize the vectors.
            flip_tta: test-time augmentation: average features over the image and its horizontal
                flip, outside training (2× cost).
            tta_crops: test-time augmentation: also average features over center crops of these
                fractions, such as (0.875,), upscaled; with `flip_tta` also over their flips.
            similarity: similarity of the vectors, "cosine" or "euclidean"; None selects "cosine"
                if they are normalized, else "euclidean".
            weights: "auto" uses an installed package with weights, else the hub, else raises;
                "package", "hub", a file or folder, or "none" for random weights.
            image_size: side of the square crop; None uses the default of the weights.
            resize: short side before the evaluation crop; None keeps the usual ratio.
            squash: resize both sides to `resize`, or to `image_size` without it, ignoring the
                aspect ratio; None follows the weights (timm's `crop_mode`).
            input_dim: dimension of the input vectors, for "vectors" and "vectors_mlp" only.

        Examples:
            >>> embedder = Embedder.create("small_convnet", 64, weights="none", image_size=32)
            >>> embedder.encode(np.zeros((40, 60, 3), np.uint8)).shape
            torch.Size([64])
        """
        sizes = {"dim": (dim if bits is None else bits) or None, "image_size": image_size}
        sizes |= {"resize": resize, "input_dim": input_dim}
        for key, value in sizes.items():
            if value is not None and not (isinstance(value, Integral) and int(value) >= 1):
                raise ValueError(f"{key} must be an integer of at least 1, got {value!r}")
        dim, side, resize, input_dim = (v if v is None else int(v) for v in sizes.values())
        architecture = Architecture(
            backbone,
            dim or 0,
            pooling,
            layer_norm,
            normalize,
            flip_tta,
            similarity or ("cosine" if normalize else "euclidean"),
            bits is not None,
            tta_crops,  # type: ignore[arg-type] # converted to a tuple
        )
        if (input_dim is not None) != (backbone in VECTOR_BACKBONES):
            problem = "needs input_dim" if input_dim is None else "takes images, not input_dim"
            raise ValueError(f"backbone {backbone!r} {problem}")
        if input_dim is not None:
            vectors = Tensors((input_dim,))
            return cls(_build(backbone, vectors), architecture, vectors, RANDOM)
        crop = (side, side) if side else None
        model = build(backbone, crop)
        record, pixels = RANDOM, dict[str, Any]()
        if weights != "none":
            record, pixels = load_weights(model, backbone, weights)
        preprocessing = replace(Preprocessing.from_timm(model, crop, resize, squash), **pixels)
        check_patches(model, backbone, preprocessing.crop)
        embedder = cls(model, architecture, preprocessing, record)
        if embedder._dropped and embedder.architecture.pooling not in ("pre-logits", "token"):
            layers = dict.fromkeys(name.rpartition(".")[0] or name for name in embedder._dropped)
            warnings.warn(
                f"pooling {pooling!r} drops layers of {backbone}: {join_first(list(layers))}. "
                "pooling='auto' keeps them.",
                stacklevel=3,
            )
        return embedder

    @classmethod
    def wrap(
        cls,
        module: nn.Module,
        preprocessing: Preprocessing | Tensors | Sequence[int],
        dim: int,
        *,
        normalize: bool = True,
        similarity: Similarity | None = None,
    ) -> Self:
        """Create an embedder from a custom network, which becomes its `backbone`; it has no head.

        The network is tested with two random inputs. Its code is not saved: pass the module to
        `Embedder.load` again.

        Args:
            module: maps normalized pixels [B, 3, H, W], or tensors [B, *shape], to [B, dim].
            preprocessing: a `Preprocessing` for images, or the shape of one input tensor, such as
                (1, 28, 28).
            dim: dimension of the vectors.
            normalize: L2-normalize the vectors.
            similarity: as in `create`.

        Raises:
            ValueError: if the module fails or does not return finite vectors [B, dim].

        Examples:
            >>> network = nn.Sequential(nn.Flatten(), nn.Linear(784, 32))
            >>> embedder = Embedder.wrap(network, (1, 28, 28), dim=32)
            >>> embedder.encode(torch.zeros(5, 1, 28, 28)).shape
            torch.Size([5, 32])
        """
        if not isinstance(preprocessing, Preprocessing | Tensors):
            preprocessing = Tensors(preprocessing)  # type: ignore[arg-type] # makes a tuple
        name = type(module).__name__
        similarity = similarity or ("cosine" if normalize else "euclidean")
        architecture = Architecture(
            f"{CUSTOM}{name}", 0, "token", False, normalize, similarity=similarity
        )
        record = WeightsRecord("custom", name, None, 0, [])
        embedder = cls(module, architecture, preprocessing, record)
        if embedder.dim != dim:
            raise ValueError(f"{name} returns {embedder.dim} dimensions, got dim {dim!r}")
        return embedder

    @property
    def device(self) -> torch.device:
        """The device of the network; the CPU if it has no parameters."""
        return next((value.device for value in self.parameters()), torch.device("cpu"))

    @property
    def is_custom(self) -> bool:
        """Whether the network is a custom module, whose code is not saved (see `wrap`)."""
        return self.architecture.backbone.startswith(CUSTOM)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed normalized pixels [B, 3, H, W] (see `Preprocessing.normalize`) as [B, dim]."""
        return self.project(self.features(pixels))

    def features(self, batch: Tensor, stage: Stage = "normalized") -> Tensor:
        """Return the pooled features [B, width] of a batch, before LayerNorm and head."""
        if stage == "features":
            return batch
        if stage == "pixels":
            batch = self.preprocessing.normalize(batch)
        batch = batch.to(next(self.parameters(), batch).dtype)  # match a half-precision network
        if self.training:
            return self._pooled(batch)
        views = self.views(batch)
        pooled = self._pooled(views[0])
        for view in views[1:]:
            pooled = pooled + self._pooled(view)
        return pooled / len(views) if len(views) > 1 else pooled

    def views(self, batch: Tensor) -> list[Tensor]:
        """Return the views of test-time augmentation: the batch, its center crops, their flips."""
        views = [batch]
        views += [_center_zoom(batch, fraction) for fraction in self.architecture.tta_crops]
        if self.architecture.flip_tta:
            views += [view.flip(3) for view in views]
        return views

    def _pooled(self, pixels: Tensor) -> Tensor:
        if self.architecture.pooling == "token":
            return self.backbone(pixels)  # type: ignore[no-any-return]
        if self.architecture.pooling == "cls-avg":
            return class_and_patches(self.backbone, pixels)
        return self.pool(cast(Any, self.backbone).forward_features(pixels))

    def pool(self, feature_map: Tensor) -> Tensor:
        """Return the pooled features [B, width] of the output of the backbone's last layer."""
        if self.architecture.pooling in ("pre-logits", "token"):
            return self.backbone.forward_head(feature_map, pre_logits=True)  # type: ignore
        if self.channels_last:
            feature_map = feature_map.permute(0, 3, 1, 2)
        return self.pooling(feature_map).flatten(1)  # type: ignore[no-any-return]

    def project(self, features: Tensor, *, normalize: bool = True) -> Tensor:
        """Return the vectors [B, dim] of pooled features [B, width].

        Without `normalize` they are the output of the head, before L2 normalization.
        """
        if self.architecture.layer_norm:
            features = F.layer_norm(features, features.shape[-1:])
        vectors: Tensor = self.head(features)
        # Norms and losses need float32, even if the network is half precision.
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return l2_normalize(vectors)[0] if normalize and self.architecture.normalize else vectors

    @torch.no_grad()
    def embed(self, pixels: Tensor) -> Tensor:
        """Return the vectors [B, dim] of uint8 pixels [B, 3, H, W], in evaluation mode.

        `Preprocessing.pixels` returns such pixels. The result is float32, on the device of the
        pixels; autocast is ignored.
        """
        with torch.autocast(pixels.device.type, enabled=False):
            return self.project(extract_features(self, pixels)).float()

    def encode(
        self,
        images: ImageSources,
        batch_size: int = 64,
        *,
        truncate_dim: int | None = None,
        concat_flip: bool = False,
        binary: bool = False,
        progress: Callable[[int], None] | None = None,
        on_error: Callable[[int, Exception], None] | None = None,
    ) -> Tensor:
        """Embed one image or many: paths, PIL images, uint8 arrays or tensors [H, W, 3] or [H, W].

        Images are oriented upright, converted to RGB, resized and cropped by `preprocessing`. An
        embedder of vectors or other tensors takes an array [*shape] or [N, *shape], or a list.

        Args:
            images: one image or several.
            batch_size: images per forward pass.
            truncate_dim: return only the first dimensions, normalized again if the vectors are.
            concat_flip: append the vector of the horizontal flip: [N, 2 · dim] (common in face
                verification, e.g. Zhao et al. 2019).
            binary: return binary codes as in `metrics.binary_codes`, for embedders with `bits`.
            progress: called with the number of images done, after every batch.
            on_error: called with the index of an unreadable image and the error, in order; the
                image is skipped. None raises a ValueError.

        Returns:
            Tensor [dim] for one image and [N, dim] for several, float32, finite, on the CPU;
            packed codes of ⌈dim / 8⌉ bytes, uint8, if `binary`.

        Raises:
            ValueError: for an unreadable image without `on_error`, and for embeddings with NaN or
                infinite values.

        Examples:
            >>> embedder = Embedder.create("small_convnet", 64, weights="none", image_size=32)
            >>> images = [Image.new("RGB", (40, 60), color) for color in ("red", "blue")]
            >>> embedder.encode(images, truncate_dim=16).shape
            torch.Size([2, 16])
        """
        if concat_flip and not self.takes_images:
            raise ValueError(f"concat_flip is for images; this embedder takes {self.preprocessing}")
        if concat_flip and self.architecture.flip_tta:
            raise ValueError("concat_flip has no effect with flip_tta. Use one of them.")
        if not is_integer(batch_size):
            raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        width = self.dim * (2 if concat_flip else 1)
        if truncate_dim is not None and not (is_integer(truncate_dim) and truncate_dim <= width):
            raise ValueError(
                f"truncate_dim must be an integer from 1 to {width}, got {truncate_dim!r}"
            )
        is_single = self.is_single(images)
        results = [torch.empty(0, width)]
        for _, vectors in embed_images(
            self.embed,
            [images] if is_single else images,  # type: ignore[arg-type, list-item]
            self.preprocessing,
            device=self.device,
            batch_size=batch_size,
            concat_flip=concat_flip,
            on_error=on_error,
            explain_nonfinite=lambda: explain_nonfinite(self),
            progress=progress,
        ):
            results.append(vectors)
        all_vectors = torch.cat(results)[:, :truncate_dim]
        if truncate_dim is not None and self.architecture.normalize:
            all_vectors = l2_normalize(all_vectors)[0]
        if binary:
            all_vectors = binary_codes(all_vectors)
        return all_vectors[0] if is_single else all_vectors

    def is_single(self, images: Any) -> bool:
        """Return whether the input of `encode` is one image (or tensor), not several."""
        is_array = isinstance(images, np.ndarray | Tensor)
        if not self.takes_images:
            shape: object = getattr(self.preprocessing, "shape", ())
            return is_array and tuple(images.shape) == shape
        if is_array:
            return bool(images.ndim < 3 or (images.ndim == 3 and images.shape[-1] == 3))
        return isinstance(images, str | bytes | os.PathLike | Image.Image)

    def similarity(self, a: Any, b: Any) -> Tensor:
        """Return the similarities of two sets: cosines, or negative Euclidean distances.

        Args:
            a: one image or several, as for `encode`, or vectors: float [dim] or [N, dim].
            b: the same.

        Returns:
            Tensor [N, M], without the dimension of a single image or vector.

        Examples:
            >>> embedder = Embedder.create("vectors", None, weights="none", input_dim=2)
            >>> embedder.similarity(torch.tensor([1.0, 0.0]), torch.eye(2)).tolist()
            [1.0, 0.0]
        """
        left, right = (
            torch.as_tensor(side).float()
            if "float" in str(getattr(side, "dtype", ""))
            else self.encode(side)
            for side in (a, b)
        )
        rows, columns = (side.reshape(-1, side.shape[-1]) for side in (left, right))
        if self.architecture.similarity == "euclidean":
            similarities = -torch.cdist(rows, columns)
        else:
            similarities = l2_normalize(rows)[0] @ l2_normalize(columns)[0].T
        return similarities.reshape(left.shape[:-1] + right.shape[:-1])

    def calibrate(
        self,
        catalog: Catalog,
        *,
        gallery_images: int = 5,
        batch_size: int = 64,
        progress: Progress | None = None,
    ) -> Calibration:
        """Measure what similarities mean, on images of classes that were not trained on.

        Classes with the names of training classes are excluded. The result is also kept as
        `calibration`, which `save` stores and `Gallery.search` uses.

        Args:
            catalog: images (or tensors) of at least ten other classes.
            gallery_images: as in `metrics.calibrate`.
            batch_size: images per forward pass.
            progress: called with (done, total).

        Raises:
            ValueError: as `metrics.calibrate`.
        """
        rows = np.flatnonzero(~np.isin(catalog.labels, self.class_names or []))
        if not len(rows):
            raise UsageError(
                f"the embedder was trained on all classes of {catalog.root}, by their names. "
                "Calibrate with images of other classes."
            )
        catalog = catalog.subset(rows)
        inputs: Any = [catalog.file(row) for row in range(len(catalog))]
        if isinstance(catalog, VectorCatalog) and not self.takes_images:
            inputs = catalog.vectors
        vectors = self.encode(
            inputs,
            batch_size,
            progress=None if progress is None else lambda done: progress(done, len(inputs)),
        )
        self.calibration = calibrate(
            vectors,
            catalog.labels,
            similarity=self.architecture.similarity,
            gallery_images=gallery_images,
        )
        return self.calibration

    def explain(self, a: ImageSource, b: ImageSource) -> "Explanation":
        """Split the cosine of two images into contributions of their positions.

        For poolings that are sums over positions: "avg", "max", "avg+max", "gem", "flatten", the
        default pooling of most networks, and transformers that average their tokens.

        Args:
            a: an image, as for `encode`.
            b: the other image.

        Raises:
            UsageError: for other networks and Euclidean similarity.
        """
        from proximetry.models.explain import explain  # circular import

        return explain(self, a, b)

    def fingerprint(self) -> str:
        """Return a checksum of network, preprocessing and weights.

        Vectors of embedders with equal fingerprints are comparable.
        """
        settings = [self.architecture.to_json(), asdict(self.preprocessing)]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for name, value in sorted(self.state_dict().items()):
            # Half precision is hashed as float32, to which `load` converts it.
            tensor = value.detach().cpu()
            tensor = (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def keep_frozen(self) -> None:
        """Exclude the currently frozen parameters of the backbone from `parameter_parts`."""
        named = self.backbone.named_parameters()
        self._frozen |= {name for name, value in named if not value.requires_grad}

    def parameter_parts(self) -> dict[str, list[nn.Parameter]]:
        """Return the trainable parameters of backbone and head (with pooling)."""
        named = self.backbone.named_parameters()
        return {
            "backbone": [value for name, value in named if name not in self._frozen],
            "head": [*self.pooling.parameters(), *self.head.parameters()],
        }

    def backbone_layers(self) -> list[list[nn.Parameter]]:
        """Return the trainable parameters of the backbone by layer, from first to last.

        Layers are those of timm's `group_matcher`: the stem, each block, and the rest.
        """
        matcher = getattr(self.backbone, "group_matcher", None)
        if matcher is None:
            raise UsageError(
                f"{self.architecture.backbone} has no layer groups (timm's group_matcher). Use one "
                "learning rate for all layers."
            )
        layers = load_timm().models.group_parameters(self.backbone, matcher(coarse=False))
        named = dict(self.backbone.named_parameters())
        trained = [[named[n] for n in layers[i] if n not in self._frozen] for i in sorted(layers)]
        return [layer for layer in trained if layer]

    def save(
        self,
        folder: str | PathLike[str],
        *,
        class_names: Sequence[str] | None = None,
        metrics: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> Path:
        """Save the embedder to a folder, atomically replacing an embedder there.

        Metadata that is not passed keeps its value.

        Raises:
            ValueError: if the folder contains other files and no embedder.

        Examples:
            >>> from tempfile import TemporaryDirectory
            >>> embedder = Embedder.create("vectors", 8, weights="none", input_dim=4)
            >>> with TemporaryDirectory() as folder:
            ...     loaded = Embedder.load(embedder.save(folder, class_names=["crow", "wren"]))
            >>> loaded.class_names, loaded.fingerprint() == embedder.fingerprint()
            (['crow', 'wren'], True)
        """
        self.class_names = self.class_names if class_names is None else list(class_names)
        self.metrics = self.metrics if metrics is None else metrics
        self.recipe = self.recipe if recipe is None else recipe
        description = {
            "architecture": self.architecture.to_json(),
            "preprocessing": asdict(self.preprocessing),
            "weights": asdict(self.weights),
            "class_names": self.class_names,
            "metrics": self.metrics,
            "recipe": self.recipe,
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "versions": versions(),
        }
        write_embedder(Path(folder), description, self.state_dict())
        return Path(folder)

    @classmethod
    def load(
        cls,
        source: str | PathLike[str],
        device: str | torch.device | None = None,
        *,
        module: nn.Module | None = None,
    ) -> Self:
        """Load an embedder in evaluation mode, without running code from the source.

        Args:
            source: the folder of a run or of a saved embedder; hub:owner/name[@revision] on the
                Hugging Face Hub; an ONNX file (`from_onnx`); or the name of a backbone, whose
                pretrained weights are used without a head (`create`).
            device: such as "cpu" or "cuda:1"; None chooses CUDA, Apple's MPS or the CPU.
            module: a custom network (`wrap`), which receives the saved weights.
        """
        device, path = resolve_device(device), Path(source)
        name = path.as_posix()
        if name.startswith(HUB):
            repo_id, _, revision = name.removeprefix(HUB).partition("@")
            return cls.from_hub(repo_id, revision or None, device)
        if path.suffix.lower() == ".onnx" and not path.is_dir():
            return cls.from_onnx(path, device)
        if not path.exists():
            if len(path.parts) > 1:
                raise UsageError(
                    f"no such embedder: {name}. Pass a run, an ONNX file or the name of a backbone."
                )
            try:
                check_name(name)
            except UsageError as error:
                raise UsageError(f"no file or folder {name}, and {error}") from None
            return cls.create(name, None).eval().to(device)
        return cls._load_folder(find_embedder(path), device, module)

    @classmethod
    @torch.inference_mode(False)
    def _load_folder(cls, path: Path, device: torch.device, module: nn.Module | None) -> Self:
        """Load an embedder from its folder."""
        description, tensors = read_embedder(path)
        backbone = str(description["architecture"].get("backbone"))
        if backbone.startswith(CUSTOM) and module is None:
            kind = backbone.removeprefix(CUSTOM)
            raise UsageError(
                f"{path} contains a custom network, {format_value(kind)}, whose code is not saved. "
                f"Load it in Python: Embedder.load({str(path)!r}, module={kind}(…))"
            )
        if module is not None and not backbone.startswith(CUSTOM):
            raise ValueError(f"{path} contains {format_value(backbone)}. Load it without module.")
        try:
            architecture = Architecture(**description["architecture"])
            pixels = description["preprocessing"]
            is_tensor = "shape" in pixels
            preprocessing = Tensors(**pixels) if is_tensor else Preprocessing.from_json(pixels)
            record = WeightsRecord(**description["weights"])
            with preserve_rng_state():
                if backbone == ONNX:
                    from proximetry.models.onnx_network import OnnxNetwork

                    module = OnnxNetwork.from_state(tensors, pixels["crop"], device)
                elif module is None:
                    _check_memory(architecture.backbone, preprocessing, tensors)
                model = module or _build(architecture.backbone, preprocessing)
                embedder = cls(model, architecture, preprocessing, record)
        except Exception as error:  # timm raises many types for an impossible image size
            problem = "embedder.json is damaged" if module is None else "module does not fit"
            missing = " is missing" if isinstance(error, KeyError) else ""
            reason = shorten(f"{error}{missing}", 500)
            raise ValueError(f"{path}: {problem}: {reason}") from error
        try:
            embedder.load_state_dict(tensors)
        except RuntimeError as error:
            reason = shorten(" ".join(str(error).split()), 500)
            raise ValueError(
                f"the weights in {path} do not fit {architecture.backbone} with timm "
                f"{versions()['timm']} (saved with {format_value(description.get('versions'))}): "
                f"{reason}"
            ) from error
        for name in ("class_names", "metrics", "recipe"):
            setattr(embedder, name, description.get(name))
        embedder.calibration = read_calibration(description, path)
        return embedder.eval().to(device)

    def push_to_hub(
        self, repo_id: str, *, license: str | None = None, private: bool = False
    ) -> str:
        """Upload the embedder and a model card to the Hugging Face Hub, in one commit.

        Args:
            repo_id: owner/name; created if it does not exist.
            license: license identifier of the hub, such as "apache-2.0"; None states none.
            private: whether a new repository is private.

        Returns:
            Address of the repository.
        """
        from proximetry.models.hub import push  # circular import

        return push(self, repo_id, license, private)

    @classmethod
    @torch.inference_mode(False)
    def from_onnx(
        cls,
        path: str | PathLike[str],
        device: str | torch.device | None = None,
        *,
        description: str | None = None,
    ) -> Self:
        """Load an ONNX file that maps images [B, 3, H, W] to vectors [B, dim].

        `save` stores the file itself, and onnxruntime runs it.

        Args:
            path: the file.
            device: as in `load`.
            description: the input of the file, as JSON or a JSON file. By default it is the JSON
                file of the same name beside it, then the file's own metadata (`export_onnx`). All
                keys are optional: ``size`` (one side, or [height, width]; 112 unless the file has
                another), ``channels`` ("RGB" or "BGR"), ``range`` of the pixels before ``mean`` and
                ``std`` ([0, 255]), ``mean`` and ``std`` (one number or three; by default the range
                becomes −1…1), and ``output``, the name of the vectors among several outputs.
        """
        from proximetry.models.onnx_network import open_onnx

        device = resolve_device(device)
        network, preprocessing, settings = open_onnx(Path(path), description, device)
        architecture = Architecture(ONNX, 0, "token", False, **settings)
        record = WeightsRecord("file", Path(path).name, network.sha256, 0, [])
        embedder = cls(network, architecture, preprocessing, record)
        stored = json.loads(network.metadata.get("calibration", "null"))
        embedder.calibration = read_calibration({"calibration": stored}, Path(path))
        return embedder.eval()

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        revision: str | None = None,
        device: str | torch.device | None = None,
    ) -> Self:
        """Load an embedder from the Hugging Face Hub, or from the hub's local cache.

        ``revision`` is a branch, tag or commit; None is the newest. Files are limited in size and
        verified as in `load`; no code from the repository is run.
        """
        from proximetry.models.hub import download  # circular import

        return cls.load(download(repo_id, revision), device)

    def export_onnx(self, path: str | PathLike[str], *, opset: int = 18) -> Path:
        """Export the network to ONNX; its input is cropped float32 RGB 0…255 [N, 3, H, W].

        Normalization is part of the graph, the batch size is dynamic, and the metadata describes
        preprocessing and output.

        Raises:
            ValueError: if the outputs of onnxruntime and torch differ.

        Examples:
            >>> from tempfile import TemporaryDirectory
            >>> embedder = Embedder.create("vectors", 8, weights="none", input_dim=4)
            >>> with TemporaryDirectory() as folder:
            ...     embedder.export_onnx(f"{folder}/embedder.onnx").stat().st_size > 0
            True
        """
        from proximetry.models.onnx import write_onnx  # circular import

        write_onnx(self, Path(path), opset)
        return Path(path)


@torch.no_grad()
def extract_features(embedder: Embedder, batch: Tensor, stage: Stage = "pixels") -> Tensor:
    """Return the pooled features of a batch in evaluation mode, without gradients."""
    if batch.ndim == 4:
        # One memory format: equal pixels give bit-equal features.
        batch = batch.contiguous(memory_format=torch.channels_last)
    with evaluation_mode(embedder):
        return embedder.features(batch, stage)


def _center_zoom(pixels: Tensor, fraction: float) -> Tensor:
    """Crop the center of pixels [B, 3, H, W] to a fraction of the sides and enlarge it again."""
    sides = pixels.shape[2:]
    top, left = (zoom_margin(side, fraction) for side in sides)
    center = pixels[:, :, top : sides[0] - top, left : sides[1] - left]
    return F.interpolate(center, sides, mode="bilinear", align_corners=False)


def zoom_margin(side: int, fraction: float) -> int:
    """Return the pixels to remove at both ends of a side; equal, so that crops can be flipped."""
    return min(round(side * (1 - fraction) / 2), (side - 1) // 2)


def _build(name: str, preprocessing: Input) -> nn.Module:
    if isinstance(preprocessing, Preprocessing):
        return build(name, preprocessing.crop)
    return nn.Identity() if name == "vectors" else ResidualMLP(preprocessing.shape[0])


def _check_memory(name: str, preprocessing: Input, tensors: Mapping[str, Tensor]) -> None:
    """Reject a network far larger than its saved weights, before allocating it."""
    needed = 0
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):
        state = _build(name, preprocessing).state_dict()
        needed = sum(value.numel() for value in state.values())
    saved = sum(value.numel() for value in tensors.values())
    # Some poolings drop layers with most of the weights (VGG).
    if needed > max(_LARGE_NETWORK, 16 * saved):
        raise ValueError(f"{name} has {needed} weights, the file {saved}")


@torch.no_grad()
def _probe_custom(module: nn.Module, preprocessing: Input) -> int:
    """Return the dimension of a custom network; raise unless it returns finite vectors."""
    if not isinstance(module, nn.Module):
        hint = ". Pass an instance: Net()" if isinstance(module, type) else ""
        raise ValueError(f"module must be a torch.nn.Module, got {format_value(module)}{hint}")
    sample = preprocessing.sample(2, torch.Generator().manual_seed(0))
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    batch = preprocessing.normalize(sample).to(device)
    call = f"{type(module).__name__}, given {list(batch.shape)} float32"
    try:
        with evaluation_mode(module), preserve_rng_state():
            output = module(batch)
    except Exception as error:  # any error of the custom network
        reason = shorten(" ".join(str(error).split()), 300)
        raise ValueError(f"{call}, raises {type(error).__name__}: {reason}") from error
    is_tensor = isinstance(output, Tensor)
    valid = is_tensor and output.ndim == 2 and len(output) == len(batch) and output.shape[1] > 0
    if not valid or not output.is_floating_point() or not torch.isfinite(output).all():
        kind = f"{list(output.shape)} {output.dtype}" if is_tensor else type(output).__name__
        raise ValueError(f"{call}, returns {kind}, not finite floats [{len(batch)}, dim]")
    return output.shape[1]  # type: ignore[no-any-return]


def versions() -> dict[str, str]:
    """Return the versions of the packages that define a network."""
    return {"proximetry": __version__, "torch": torch.__version__, "timm": load_timm().__version__}


def explain_nonfinite(embedder: Embedder) -> str:
    """Explain why vectors of an embedder are not finite."""
    state = embedder.state_dict()  # integers are finite
    names = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if names:
        weights = join_first(names)
        return f"the weights {weights} are not finite. Train again with a smaller learning rate."
    return "the weights are finite, so an activation overflows or the input is not finite."
