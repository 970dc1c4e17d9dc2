"""`Embedder`: backbone, pooling and head; from images to vectors, to disk and to ONNX."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from proximetry import __version__
from proximetry._common import (
    UsageError,
    binary_codes,
    is_whole,
    random_numbers_kept,
    shorten,
    shown,
    some,
    unit,
)
from proximetry.models.backbones import (
    Features,
    build,
    check_name,
    check_patches,
    class_and_patches,
    default_pooling,
    has_class_token,
    load_timm,
    prepare,
)
from proximetry.models.backbones.vectors import build_for_vectors
from proximetry.models.batchnorm import evaluating
from proximetry.models.encoding import embed_images, embed_tensors
from proximetry.models.names import (
    LARGEST_BITS,
    LARGEST_DIM,
    MOST_TTA_CROPS,
    OWN,
    POOLINGS,
    SIMILARITIES,
    VECTOR_BACKBONES,
    Similarity,
)
from proximetry.models.pooling import make_pooling
from proximetry.models.preprocessing import (
    ImageSource,
    Input,
    Preprocessing,
    Tensors,
    input_from_json,
)
from proximetry.models.storage import (
    DESCRIPTION,
    find_embedder,
    read_embedder,
    write_embedder,
)
from proximetry.models.weights import WeightsRecord, load_backbone

_LARGEST_HEAD = 2**30  # weights: 4 GB
_LARGE_NETWORK = 2**27  # weights: 0.5 GB

Stage = Literal["pixels", "normalized", "features"]
"""How far a batch is on its way: pixels 0…255, what the network takes, or pooled features."""


@dataclass(frozen=True)
class Architecture:
    """What an embedder is made of, in the words of `Embedder.create`.

    A `dim` of 0 means no linear head; the `pooling` of an embedder is never "auto". With `binary`
    the signs of the `dim` dimensions are trained to be codes of so many bits. The `backbone` is a
    name of timm, one for vectors, or "own:" and the class of a module given to `Embedder.wrap`.
    """

    backbone: str
    dim: int
    pooling: str
    layer_norm: bool
    normalize: bool
    flip_tta: bool = False
    similarity: Similarity = "cosine"
    binary: bool = False
    tta_crops: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("pooling", POOLINGS), ("similarity", SIMILARITIES)):
            if getattr(self, name) not in known:
                names = ", ".join(map(repr, known))
                raise ValueError(f"{name} must be one of {names}, got {shown(getattr(self, name))}")
        if type(self.dim) is not int or not 0 <= self.dim <= LARGEST_DIM:
            raise ValueError(f"dim must be from 0 to {LARGEST_DIM}, got {shown(self.dim)}")
        for name in ("layer_norm", "normalize", "flip_tta", "binary"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {shown(getattr(self, name))}")
        crops = self.tta_crops
        if (
            not isinstance(crops, list | tuple)
            or len(crops) > MOST_TTA_CROPS
            or not all(isinstance(share, float) and 0 < share < 1 for share in crops)
        ):
            raise ValueError(
                f"tta_crops must be at most {MOST_TTA_CROPS} numbers between 0 and 1, such as "
                f"[0.875], got {shown(crops)}"
            )
        object.__setattr__(self, "tta_crops", tuple(crops))  # which JSON makes a list
        if self.binary and (self.dim % 8 or not 8 <= self.dim <= LARGEST_BITS):
            raise ValueError(
                f"bits must be a multiple of 8 from 8 to {LARGEST_BITS}, got {self.dim}"
            )
        if self.binary and self.similarity != "cosine":
            raise ValueError(
                f"bits are for the similarity 'cosine', which signs keep, not {self.similarity!r}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as they are saved and counted in fingerprints.

        What was added later is left out where it is not used: an embedder stays what it was.
        """
        found = {**asdict(self), "tta_crops": list(self.tta_crops)}
        return {k: v for k, v in found.items() if v or k not in ("binary", "tta_crops")}


class NoFeatureMapError(ValueError):
    """A pooling of feature maps was asked of a network that has none; ``reason`` says so."""

    def __init__(self, pooling: str, reason: str) -> None:
        super().__init__(
            f"pooling {pooling!r} needs a feature map, but {reason}: use pooling='token'"
        )
        self.reason = reason


class Embedder(nn.Module):
    """Turn images into vectors in which near means alike.

    Made by `Embedder.create`, by `Embedder.wrap` around a network of one's own, or read by
    `Embedder.load`. The network is backbone → pooling →
    LayerNorm without affine (optional) → linear to `dim` (optional) → L2 (optional).

    Attributes:
        architecture: names and settings the network is made of.
        preprocessing: the pixels it takes; `Tensors` if it takes no images.
        weights: what the backbone started from.
        width: dimension of the pooled features.
        dim: dimension of the vectors.
        bits: length of the binary codes that were trained, or None.
        class_names: the classes it was trained on, if they were saved with it.
        metrics: what was saved with it, for people and for other packages.
        recipe: the same.
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        preprocessing: Input,
        weights: WeightsRecord,
    ) -> None:
        super().__init__()
        if architecture.pooling == "cls-avg" and not has_class_token(model):
            raise ValueError(
                f"pooling 'cls-avg' is for transformers with a class token, and "
                f"{architecture.backbone} has none: use pooling='auto'"
            )
        if not isinstance(preprocessing, Preprocessing) and (
            architecture.flip_tta or architecture.tta_crops
        ):
            key = "flip_tta" if architecture.flip_tta else "tta_crops"
            raise ValueError(f"{key} is for images; {architecture.backbone} takes {preprocessing}")
        features = _look_at(model, architecture, preprocessing)
        pooling = _resolve_pooling(architecture, features, model)
        width = features.channels
        if pooling == "flatten":
            width *= prod(features.size or ())
        self.architecture = replace(architecture, pooling=pooling)
        # Who asks for more than both have in common works with images alone.
        self.preprocessing = cast(Preprocessing, preprocessing)
        self.weights = weights
        self.width = width
        self.dim = architecture.dim or width
        self.bits = architecture.dim if architecture.binary else None
        self.class_names: list[str] | None = None
        self.metrics: dict[str, Any] | None = None
        self.recipe: dict[str, Any] | None = None
        self.backbone = model
        self.pooling = make_pooling(pooling)
        self.head: nn.Module = nn.Identity()
        if architecture.dim * width > _LARGEST_HEAD:
            raise ValueError(
                f"a head from {width} features to {architecture.dim} dimensions is too large for "
                "the memory; choose fewer dimensions, another pooling or smaller images"
            )
        if architecture.dim:
            self.head = nn.Linear(width, architecture.dim)
            nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
            nn.init.zeros_(self.head.bias)
        self._channels_last = features.channels_last
        self._dropped = features.dropped
        self._idle = {name for name, value in model.named_parameters() if not value.requires_grad}

    @classmethod
    @torch.inference_mode(False)  # parameters that are made in it could not be trained
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
        """Make an embedder.

        Args:
            backbone: any name of `list_backbones()`; for vectors instead of images "vectors", a
                linear head, or "vectors_mlp", a small MLP before it.
            dim: dimension of the vectors; None or 0 leaves the pooled features as they are.
            bits: for binary codes, 64, 128, 256 or another multiple of 8: the vectors have so many
                dimensions instead of `dim`, and `encode(…, binary=True)` gives their signs.
            pooling: "avg", "max", "avg+max" (their sum), "gem" (p = 3), "gem-learned" (p starts
                at 3) or "flatten" for backbones with a feature map; "token" for transformers,
                which pool their tokens themselves, or "cls-avg", the class token and the mean of
                the patch tokens side by side (DINOv2, DINOv3). "auto" is what the network was
                trained with: "token" for transformers, "flatten" for sphereface20, and for other
                networks of timm "pre-logits", the input of their classifier. Other poolings drop
                the layers that a network has behind its own, with a warning that names them.
            layer_norm: LayerNorm without affine after pooling (ProxyNCA++).
            normalize: L2-normalise the vectors.
            flip_tta: test-time augmentation: average the features of the image and its
                horizontal flip, outside training (2× cost).
            tta_crops: test-time augmentation: also average the features of the centre of the
                crop, such shares of its sides as (0.875,), enlarged to its size; with `flip_tta`
                of its flip too.
            similarity: how the vectors are compared, "cosine" or "euclidean"; None takes
                "cosine" if they are normalised, else "euclidean".
            weights: "auto" takes an installed package that carries them, else the hub, else
                fails; "package", "hub", a file, or "none" for random weights on purpose.
            image_size: side of the square crop; None takes what the weights were trained with.
            resize: short side before the crop when evaluating; None keeps the usual proportion.
            squash: when evaluating, scale both sides to `resize`, or to `image_size` unless it is
                given, whatever the shape of the image; None takes what the weights were evaluated
                with (timm's `crop_mode`).
            input_dim: dimension of the vectors that the embedder takes, for "vectors" and
                "vectors_mlp" alone.
        """
        dim = _count("dim", (dim if bits is None else bits) or None)
        image_size, resize = _count("image_size", image_size), _count("resize", resize)
        input_dim = _count("input_dim", input_dim)
        if not isinstance(squash, bool | None):
            raise ValueError(f"squash must be True, False or None, got {squash!r}")
        similarity = similarity or ("cosine" if normalize else "euclidean")
        architecture = Architecture(
            backbone,
            dim or 0,
            pooling,
            layer_norm,
            normalize,
            flip_tta,
            similarity,
            bits is not None,
            tta_crops,  # type: ignore[arg-type] # which makes a tuple of them
        )
        if (input_dim is not None) != (backbone in VECTOR_BACKBONES):
            needs = "needs input_dim" if input_dim is None else "takes images: leave out input_dim"
            raise ValueError(f"backbone {backbone!r} {needs}")
        if input_dim is not None:
            model, record = build_for_vectors(backbone, input_dim), _RANDOM
            return cls(model, architecture, Tensors((input_dim,)), record)
        check_name(backbone)
        crop = (image_size, image_size) if image_size else None
        model, preprocessing, record = load_backbone(backbone, weights, crop, resize, squash)
        check_patches(model, backbone, preprocessing.crop)
        embedder = cls(model, architecture, preprocessing, record)
        if embedder._dropped and embedder.architecture.pooling not in ("pre-logits", "token"):
            layers = dict.fromkeys(name.rpartition(".")[0] or name for name in embedder._dropped)
            warnings.warn(
                f"pooling {pooling!r} drops layers of {backbone}: {some(list(layers))}. "
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
        """Make an embedder of a network of one's own, which is tried at once.

        The module itself becomes its `backbone`; there is no head. Its code is not saved with it:
        `Embedder.load` takes it again as ``module``.

        Args:
            module: takes normalised pixels [B, 3, H, W], or tensors [B, *shape], and returns
                [B, dim].
            preprocessing: how images become pixels (`Preprocessing`); or, where they are none, the
                shape of one tensor that the module takes, as (1, 28, 28).
            dim: dimension of the vectors.
            normalize: L2-normalise the vectors.
            similarity: as in `create`.

        Raises:
            ValueError: if it cannot take that, or does not give finite vectors [B, dim].
        """
        if isinstance(module, cls):
            raise ValueError("module is an Embedder already: there is nothing to wrap")
        if not isinstance(module, nn.Module):
            what = "a class: write Net()" if isinstance(module, type) else shown(module)
            raise ValueError(f"module must be a torch.nn.Module, got {what}")
        if not isinstance(preprocessing, Preprocessing | Tensors):
            if not isinstance(preprocessing, Sequence) or isinstance(preprocessing, str):
                raise ValueError(
                    "preprocessing must be a Preprocessing, or the shape of a tensor that the "
                    f"module takes, got {shown(preprocessing)}"
                )
            preprocessing = Tensors(tuple(preprocessing))
        name = f"{OWN}{type(module).__name__}"
        near = similarity or ("cosine" if normalize else "euclidean")
        architecture = Architecture(name, 0, "token", False, normalize, similarity=near)
        record = WeightsRecord("own", type(module).__name__, None, 0, [])
        embedder = cls(module, architecture, preprocessing, record)
        if embedder.dim != dim:
            raise ValueError(
                f"{type(module).__name__} gives vectors of {embedder.dim} dimensions, not dim "
                f"{shown(dim)}"
            )
        return embedder

    @property
    def is_own(self) -> bool:
        """Whether the network is one of the user's, whose code is not saved (see `wrap`)."""
        return self.architecture.backbone.startswith(OWN)

    @property
    def takes_images(self) -> bool:
        """Whether it takes images, and not tensors as they are."""
        return isinstance(self.preprocessing, Preprocessing)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed normalised pixels [B, 3, H, W] (see `Preprocessing.normalize`) as [B, dim]."""
        return self.project(self.features(pixels))

    def features(self, pixels: Tensor) -> Tensor:
        """Return the pooled features [B, width] of normalised pixels, before LayerNorm and head."""
        found = self._pooled(pixels)
        if self.training:
            return found
        views = [pixels, *(_zoomed(pixels, share) for share in self.architecture.tta_crops)]
        if self.architecture.flip_tta:
            views += [view.flip(3) for view in views]
        for view in views[1:]:
            found = found + self._pooled(view)
        return found / len(views) if len(views) > 1 else found

    def _pooled(self, pixels: Tensor) -> Tensor:
        if self.architecture.pooling == "token":
            return self.backbone(pixels)  # type: ignore[no-any-return]
        if self.architecture.pooling == "cls-avg":
            return class_and_patches(self.backbone, pixels)
        model: Any = self.backbone
        found = model.forward_features(pixels)
        if self.architecture.pooling == "pre-logits":
            return model.forward_head(found, pre_logits=True)  # type: ignore[no-any-return]
        if self._channels_last:
            found = found.permute(0, 3, 1, 2)
        return self.pooling(found)  # type: ignore[no-any-return]

    def project(self, features: Tensor) -> Tensor:
        """Return the vectors [B, dim] of pooled features [B, width]."""
        vectors = self.project_freely(features)
        return unit(vectors)[0] if self.architecture.normalize else vectors

    def project_freely(self, features: Tensor) -> Tensor:
        """Return the vectors of pooled features as long as the head makes them."""
        if self.architecture.layer_norm:
            features = F.layer_norm(features, features.shape[-1:])
        vectors: Tensor = self.head(features)
        # Half precision may do the network; lengths and losses need float32.
        return vectors.to(torch.promote_types(vectors.dtype, torch.float32))

    def features_from(self, batch: Tensor, stage: Stage) -> Tensor:
        """Return the pooled features [B, width] of a batch, however far it is on its way."""
        if stage == "features":
            return batch
        if stage == "pixels":
            batch = self.preprocessing.normalize(batch)
        # A network in half precision takes pixels in half precision.
        return self.features(batch.to(self._weight.dtype))

    @torch.no_grad()
    def pixel_features(self, pixels: Tensor, stage: Stage = "pixels") -> Tensor:
        """Return the pooled features [B, width] of uint8 pixels [B, 3, H, W], in evaluation mode.

        The first half of `embed`; `project` is the second.
        """
        if pixels.ndim == 4:
            # One memory layout, so that equal pixels give equal bits wherever they come from.
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        with evaluating(self):
            return self.features_from(pixels, stage)

    @property
    def _weight(self) -> Tensor:
        """Any weight, which tells the device and the precision of all."""
        return next(self.parameters(), torch.empty(0))

    @torch.no_grad()
    def embed(self, pixels: Tensor) -> Tensor:
        """Return the vectors [B, dim] of uint8 pixels [B, 3, H, W], in evaluation mode.

        `Preprocessing.pixels` gives such pixels. The result is float32 and on their device, also
        under autocast.
        """
        with torch.autocast(pixels.device.type, enabled=False):
            return self.project(self.pixel_features(pixels)).float()

    def encode(
        self,
        images: Iterable[ImageSource],
        batch_size: int = 64,
        *,
        concat_flip: bool = False,
        binary: bool = False,
        progress: Callable[[int], None] | None = None,
        on_error: Callable[[int, Exception], None] | None = None,
    ) -> Tensor:
        """Embed images: paths, PIL images, uint8 arrays or tensors [H, W, 3] or [H, W], mixed.

        Each is turned upright, made RGB, resized and cropped as `preprocessing` says. An embedder
        that takes vectors or other tensors gets these instead: an array [N, *shape], or several.

        Args:
            images: any number of images.
            batch_size: images per pass.
            concat_flip: append the vector of the horizontal flip: [N, 2 · dim] (the custom in
                face verification, e.g. Zhao et al. 2019).
            binary: return binary codes instead of vectors, as `metrics.binary_codes` makes them;
                meant for embedders with `bits`.
            progress: called with the number of images done, after every batch.
            on_error: called with the number of an image that cannot be read, and why, in order;
                it is then left out. None raises a ValueError.

        Returns:
            Tensor [N, dim], float32, finite, on the CPU; packed codes [N, ⌈dim / 8⌉], uint8, if
            `binary`.

        Raises:
            ValueError: for an image that cannot be read, unless there is an `on_error`, and for
                embeddings with NaN or infinity, naming the image and the weights to blame.
        """
        if self.takes_images:
            _refuse_one_image(images)
        elif concat_flip:
            raise ValueError(f"concat_flip is for images; this embedder takes {self.preprocessing}")
        if not is_whole(batch_size):
            raise ValueError(f"batch_size must be a whole number from 1 up, got {batch_size!r}")
        if concat_flip and self.architecture.flip_tta:
            raise ValueError("with flip_tta both flips have one vector: concat_flip adds nothing")
        made = binary_codes if binary else lambda vectors: vectors
        vectors = [made(torch.empty(0, self.dim * (2 if concat_flip else 1)))]
        done = told = 0

        def left_out(place: int, error: Exception) -> None:
            nonlocal done
            done += 1
            if on_error is not None:
                on_error(place, error)

        shared: Any = {
            "device": self._weight.device,
            "batch_size": batch_size,
            "blame": lambda: why_not_finite(self),
        }
        if isinstance(images, np.ndarray | Tensor) and not self.takes_images:
            batches = embed_tensors(self.embed, images, **shared)
        else:
            batches = embed_images(
                self.embed,
                images,
                self.preprocessing,
                concat_flip=concat_flip,
                on_error=on_error and left_out,
                **shared,
            )
        for places, found in batches:
            vectors.append(made(found))
            done += len(places)
            if progress is not None:
                progress(told := done)
        if progress is not None and done > told:  # none of the last batch could be read
            progress(done)
        return torch.cat(vectors)

    def fingerprint(self) -> str:
        """Return a checksum of all that decides the vectors: network, preprocessing, weights.

        Two embedders that have the same one give vectors that can be compared.
        """
        made_of = [self.architecture.to_json(), asdict(self.preprocessing)]
        whole = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode())
        for name, value in sorted(self.state_dict().items()):
            # Half precision counts as the float32 that it becomes when it is saved and loaded.
            plain = value.detach().cpu()
            plain = (plain.float() if plain.is_floating_point() else plain).contiguous()
            whole.update(f"{name} {plain.dtype} {list(plain.shape)}\0".encode())
            whole.update(plain.reshape(-1).view(torch.uint8).numpy())
        return whole.hexdigest()

    def keep_frozen(self) -> None:
        """Never train what of the backbone is frozen now (``requires_grad`` is false)."""
        named = self.backbone.named_parameters()
        self._idle |= {name for name, value in named if not value.requires_grad}

    def parameter_parts(self) -> dict[str, list[nn.Parameter]]:
        """Return the trainable parts, for a learning rate each: backbone, head (with pooling)."""
        named = self.backbone.named_parameters()
        return {
            "backbone": [value for name, value in named if name not in self._idle],
            "head": [*self.pooling.parameters(), *self.head.parameters()],
        }

    def backbone_layers(self) -> list[list[nn.Parameter]]:
        """Return the trainable parameters of the backbone by layers, from first to last.

        The layers are those that timm's networks tell apart: the stem, each block, what follows.
        """
        matcher = getattr(self.backbone, "group_matcher", None)
        if matcher is None:
            raise UsageError(
                f"{self.architecture.backbone} does not tell its layers apart, as the networks of "
                "timm do: its layers have one learning rate"
            )
        layers = load_timm().models.group_parameters(self.backbone, matcher(coarse=False))
        named = dict(self.backbone.named_parameters())
        trained = [[named[n] for n in layers[i] if n not in self._idle] for i in sorted(layers)]
        return [layer for layer in trained if layer]

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
        extras = {
            "class_names": self.class_names if class_names is None else list(class_names),
            "metrics": self.metrics if metrics is None else metrics,
            "recipe": self.recipe if recipe is None else recipe,
        }
        description = {
            "architecture": self.architecture.to_json(),
            "preprocessing": asdict(self.preprocessing),
            "weights": asdict(self.weights),
            **extras,
            "versions": versions(),
        }
        write_embedder(Path(folder), description, self.state_dict())
        self.class_names, self.metrics, self.recipe = extras.values()  # type: ignore[assignment]
        return Path(folder)

    @classmethod
    def load(
        cls,
        folder: str | PathLike[str],
        device: str | torch.device = "cpu",
        *,
        module: nn.Module | None = None,
    ) -> Self:
        """Read what `save` wrote, ready to encode. Downloads nothing and runs no stored code.

        ``folder`` may also be that of the run that saved it. A network that was given to `wrap`
        is given again as ``module``, in the same shape; it gets the saved weights.
        """
        return cls._read(find_embedder(Path(folder)), device, module)

    @classmethod
    @torch.inference_mode(False)
    def _read(
        cls, folder: Path, device: str | torch.device, module: nn.Module | None = None
    ) -> Self:
        description, tensors = read_embedder(folder)
        _check_module(folder, description, module)
        try:
            architecture = Architecture(**description["architecture"])
            preprocessing = input_from_json(description["preprocessing"])
            record = WeightsRecord(**description["weights"])
            extras = {name: _extra(description, name, kind) for name, kind in _EXTRAS.items()}
            # The random start of the layers is overwritten; the caller's generator stays as it is.
            with random_numbers_kept():
                if module is None:
                    _check_memory(architecture.backbone, preprocessing, tensors)
                model = module or _build(architecture.backbone, preprocessing)
                embedder = cls(model, architecture, preprocessing, record)
        except KeyError as error:
            raise ValueError(f"{folder / DESCRIPTION} is damaged: {error} is missing") from error
        except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
            # A network of timm raises whatever an impossible size of images makes it trip over.
            reason = shorten(str(error), 500)
            if module is not None:
                raise ValueError(f"module does not fit {folder}: {reason}") from error
            raise ValueError(f"{folder / DESCRIPTION} is damaged: {reason}") from error
        try:
            embedder.load_state_dict(tensors)
        except RuntimeError as error:
            if module is not None:
                reason = shorten(" ".join(str(error).split()), 500)
                raise ValueError(f"the weights in {folder} do not fit module: {reason}") from error
            raise ValueError(
                f"{folder} does not fit {architecture.backbone} as timm {versions()['timm']} makes "
                f"it (saved with {shown(description.get('versions'))}): {shorten(str(error), 500)}"
            ) from error
        for name, value in extras.items():
            setattr(embedder, name, value)
        return embedder.eval().to(device)

    def push_to_hub(
        self, repo_id: str, *, license: str | None = None, private: bool = False
    ) -> str:
        """Write the embedder, with a model card, to a repository of the Hugging Face Hub.

        One commit: the embedder and the card that are there are replaced together. Class names,
        metrics and recipe go along, as in `save`.

        Args:
            repo_id: owner/name; made if it is not there.
            license: the hub's name of the license you give it, such as "apache-2.0"; None says
                nothing about it.
            private: whether a new repository is private.

        Returns:
            Its address.
        """
        from proximetry.models.hub import push  # which imports this file

        return push(self, repo_id, license, private)

    @classmethod
    def from_hub(
        cls, repo_id: str, revision: str | None = None, device: str | torch.device = "cpu"
    ) -> Self:
        """Read an embedder that `push_to_hub` wrote, downloaded unless it is in the hub's cache.

        ``revision`` is a branch, a tag or a commit; None takes the newest. Files are limited in
        size and checked as by `load`, and nothing of the repository is executed.
        """
        from proximetry.models.hub import download  # which imports this file

        return cls._read(download(repo_id, revision), device)

    def export_onnx(self, path: str | PathLike[str], *, opset: int = 18) -> Path:
        """Write the network as ONNX: float32 RGB 0…255 [N, 3, H, W], resized and cropped, in.

        Normalisation is part of the graph, the batch may have any size, and the metadata of the
        model says what is inside and how to resize and crop. Raises ValueError unless onnxruntime
        agrees with torch.
        """
        from proximetry.models.export import write_onnx  # which imports this file

        write_onnx(self, Path(path), opset)
        return Path(path)


_RANDOM = WeightsRecord("none", "random", None, 0, [])


def _count(name: str, value: Any) -> int | None:
    """Return a whole number of any integer type as an int, and None as it is."""
    if value is None:
        return None
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def _zoomed(pixels: Tensor, share: float) -> Tensor:
    """The centre of pixels [B, 3, H, W], about this share of their sides, as large as they are."""
    sides = pixels.shape[2:]
    # As much on the left as on the right, so that the centre of a flip is the flip of the centre.
    top, left = (min(round(side * (1 - share) / 2), (side - 1) // 2) for side in sides)
    center = pixels[:, :, top : sides[0] - top, left : sides[1] - left]
    return F.interpolate(center, sides, mode="bilinear", align_corners=False)


def _look_at(model: nn.Module, architecture: Architecture, preprocessing: Input) -> Features:
    """Find out what a network gives for what it takes."""
    name = architecture.backbone
    if name in VECTOR_BACKBONES and isinstance(preprocessing, Tensors):
        return Features(preprocessing.shape[0], None)
    if name.startswith(OWN):
        return Features(try_module(model, preprocessing), None)
    assert isinstance(preprocessing, Preprocessing)
    return prepare(model, name, preprocessing.crop, architecture.pooling)


def _build(name: str, preprocessing: Input) -> nn.Module:
    if isinstance(preprocessing, Tensors):
        return build_for_vectors(name, preprocessing.shape[0])
    return build(name, preprocessing.crop)


def _check_memory(name: str, preprocessing: Input, tensors: Mapping[str, Tensor]) -> None:
    """Reject a network that is far larger than its saved weights, before memory is allocated."""
    needed = 0
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):  # takes no memory
        state = _build(name, preprocessing).state_dict()
        needed = sum(value.numel() for value in state.values())
    saved = sum(value.numel() for value in tensors.values())
    # A pooling may drop layers with most of the weights, as those of VGG.
    if needed > max(_LARGE_NETWORK, 16 * saved):
        raise ValueError(f"{name} has {needed} weights, the file {saved}")


def try_module(module: nn.Module, preprocessing: Input) -> int:
    """Let a module of the user's embed two made-up inputs; return the dimension of its vectors.

    Raises:
        ValueError: if it cannot, or gives anything but finite vectors, one for each input.
    """
    name = type(module).__name__
    made_up = preprocessing.sample(2, torch.Generator().manual_seed(0))
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    batch = preprocessing.normalize(made_up).to(device)
    return check_vectors(name, module, batch)


@torch.no_grad()
def check_vectors(name: str, module: nn.Module, batch: Tensor) -> int:
    """Return the dimension of the vectors that a module gives for a batch that it takes."""
    took = f"{name}, given {list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    try:
        with evaluating(module), random_numbers_kept():
            found = module(batch)
    except Exception as error:  # whatever the user's network trips over
        reason = shorten(" ".join(str(error).split()), 300)
        raise ValueError(f"{took}, raises {type(error).__name__}: {reason}") from error
    if not isinstance(found, Tensor) or not found.is_floating_point():
        kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{took}, gives {kind}, not a float tensor [batch, dim]")
    if found.ndim != 2 or len(found) != len(batch) or found.shape[1] == 0:
        raise ValueError(f"{took}, gives {list(found.shape)}, not [{len(batch)}, dim]")
    if not torch.isfinite(found).all():
        raise ValueError(f"{took}, gives NaN or infinite values")
    return found.shape[1]


def _check_module(folder: Path, description: Mapping[str, Any], module: nn.Module | None) -> None:
    """Refuse a saved network of the user's without its module, and a module for any other."""
    made = description.get("architecture")
    name = made.get("backbone") if isinstance(made, dict) else None
    own = isinstance(name, str) and name.startswith(OWN)
    if own and module is None:
        kind = str(name).removeprefix(OWN)
        raise UsageError(
            f"{folder} holds a network of one's own, {shown(kind)}, whose code is not saved with "
            f"it: in Python, Embedder.load({str(folder)!r}, module={kind}(…)) reads it"
        )
    if module is not None and not own:
        raise ValueError(f"{folder} holds {shown(name)}, which needs no module: leave it out")
    if module is not None and not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {shown(module)}")


def versions() -> dict[str, str]:
    """What an embedder is made with here."""
    return {"proximetry": __version__, "torch": torch.__version__, "timm": load_timm().__version__}


def why_not_finite(embedder: Embedder) -> str:
    """Say what may be to blame for vectors of this embedder that are not finite."""
    bad = [
        name
        for name, value in embedder.state_dict().items()
        if value.is_floating_point() and not torch.isfinite(value).all()
    ]
    if bad:
        return (
            f"so have its weights {some(bad)}; it has to be trained again, and a smaller learning "
            "rate, clipping or float32 usually helps"
        )
    return (
        "its weights are finite, but something overflows on the way; use float32, and look at "
        "mean, std and scale of its preprocessing"
    )


# What is saved with an embedder for people and for other packages, or null.
_EXTRAS = {"class_names": list, "metrics": dict, "recipe": dict}


def _extra(description: dict[str, Any], name: str, kind: type) -> Any:
    value = description.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {shown(value)}")
    return value


def _refuse_one_image(images: object) -> None:
    one = isinstance(images, str | bytes | os.PathLike | Image.Image)
    if isinstance(images, np.ndarray | Tensor):
        one = images.ndim < 3 or (images.ndim == 3 and images.shape[-1] == 3)
    if one:
        raise ValueError(
            f"images must be a list of images, got one {type(images).__name__}: write [image]"
        )


def _resolve_pooling(architecture: Architecture, features: Features, model: nn.Module) -> str:
    name, pooling = architecture.backbone, architecture.pooling
    if pooling in ("auto", "pre-logits") and features.size is None:
        return "token"
    if pooling == "auto":
        return default_pooling(model)
    if features.size is None and pooling not in ("token", "cls-avg"):
        raise NoFeatureMapError(pooling, f"{name} gives tokens and pools them itself")
    if features.size is not None and pooling == "token":
        raise ValueError(f"pooling 'token' is for transformers, but {name} gives a feature map")
    return pooling
