"""Backbones: all models of timm and three more; evaluation mode and frozen batch norms."""

import copy
import sys
from collections.abc import Container
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value
from proximetry._util.imports import missing_package
from proximetry._util.machine import override, preserve_rng_state
from proximetry.models.preprocessing import Channels

Module = TypeVar("Module", bound=nn.Module)

# Up to these numbers of weights and pixels, embedding one image takes about a second and 1 GB.
_SMALL_NETWORK, _SMALL_IMAGE = 2**25, 448 * 448


class NoFeatureMapError(ValueError):
    """The pooling needs a feature map, but the backbone returns tokens."""


default_cfgs: dict[str, dict[str, Any]] = {}  # read by timm's register_model
BACKBONES: dict[str, "type[Backbone]"] = {}


class Backbone(nn.Module):
    """A network with a feature map, returned by `forward_features` of subclasses.

    The arguments of a subclass register it with timm:

        name: for timm and `Embedder.create`.
        scale, channels: as in `Preprocessing`; timm's configuration has no such fields.
        pooling: meaning of pooling="auto".
        config: fields of timm's `PretrainedCfg`: mean, std, input_size, classifier, …
    """

    num_features: int
    default_cfg: dict[str, Any]  # set by timm
    pixel_format: ClassVar[dict[str, Any]]
    default_pooling: ClassVar[str]

    def __init_subclass__(
        cls,
        name: str,
        scale: float = 1 / 255,
        channels: Channels = "RGB",
        pooling: str = "avg",
        **config: Any,
    ) -> None:
        from timm.models import build_model_with_cfg, register_model  # slow

        super().__init_subclass__()
        cls.pixel_format = {"scale": scale, "channels": channels}
        cls.default_pooling = pooling
        BACKBONES[name] = cls
        default_cfgs[name] = {"crop_pct": 1.0, "interpolation": "bilinear", **config}

        def make(pretrained: bool = False, **settings: Any) -> Backbone:
            return build_model_with_cfg(
                cls, name, pretrained, kwargs_filter=("in_chans",), **settings
            )

        make.__name__ = name
        register_model(make)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return class scores of a feature map, or the pooled features with `pre_logits`."""
        pooled = x.mean((2, 3))
        if pre_logits:
            return pooled
        return self.get_submodule(self.default_cfg["classifier"])(pooled)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, or the pooled features without classes."""
        return self.forward_head(self.forward_features(x))


class ResidualMLP(nn.Module):
    """x + MLP(LayerNorm(x)) for vectors; the MLP starts at zero, the network at the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.narrow.weight)
        nn.init.zeros_(self.narrow.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors [B, dim] to vectors [B, dim]."""
        residual: Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm(x))))
        return x + residual


@cache
def load_timm() -> Any:
    """Import timm, which is slow, and register the extra backbones with it."""
    try:
        import timm
    except ModuleNotFoundError as error:
        raise missing_package("A backbone", "timm", "images") from error
    from proximetry.models.backbones import bn_inception, small_convnet, sphereface  # noqa: F401

    return timm


def extra_backbones() -> dict[str, str]:
    """Return names and one-line descriptions of the backbones that timm lacks."""
    load_timm()
    docstrings = {name: sys.modules[kind.__module__].__doc__ for name, kind in BACKBONES.items()}
    return {name: (text or "").partition("\n")[0] for name, text in docstrings.items()}


def list_backbones(pattern: str = "") -> list[str]:
    """Return the names for `Embedder.create`; `pattern` may have wildcards.

    Examples:
        >>> list_backbones("bn_*")
        ['bn_inception']
    """
    return load_timm().list_models(pattern)  # type: ignore[no-any-return]


def check_name(name: str) -> str:
    """Return `name`, or raise and suggest similar names."""
    timm = load_timm()
    if isinstance(name, str) and timm.is_model(name):
        with suppress(RuntimeError):  # of an unknown tag
            timm.get_pretrained_cfg(name)
            return name
    if isinstance(name, nn.Module):
        raise UsageError(
            f"backbone must be a name, got the module {type(name).__name__}. Use "
            "Embedder.wrap(module, preprocessing, dim)."
        )
    raise UsageError(
        f"unknown backbone {format_value(name)}{suggest(str(name), timm.list_models())} "
        "List names with `proximetry backbones 'resnet*'` or list_backbones('resnet*')."
    )


def build(name: str, crop: tuple[int, int] | None = None) -> nn.Module:
    """Create a backbone without classifier, with random weights."""
    timm = load_timm()
    config = timm.get_pretrained_cfg(check_name(name))
    size = tuple(config.input_size[-2:])
    if crop in (None, size) or not config.fixed_input_size:
        return timm.create_model(name, num_classes=0)  # type: ignore[no-any-return]
    try:
        return timm.create_model(name, num_classes=0, img_size=crop)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ValueError(f"{name} needs images of {size[0]}×{size[1]}, got {crop}") from error


def set_drop_path(model: nn.Module, name: str, rate: float) -> bool:
    """Add timm's stochastic depth to a backbone; return whether it supports it."""
    timm = load_timm()
    from timm.layers.drop import DropPath

    rates: dict[str, float] = {}
    if timm.is_model(name):
        # TypeError: the network has no such argument.
        with preserve_rng_state(), suppress(TypeError):
            parts = timm.create_model(name, num_classes=0, drop_path_rate=rate).named_modules()
            rates = {path: part.drop_prob for path, part in parts if isinstance(part, DropPath)}
    for path, block_rate in rates.items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, DropPath(block_rate).train(model.training))
    return bool(rates)


def check_patches(
    model: nn.Module, name: str, crop: tuple[int, int], key: str = "image_size"
) -> None:
    """Raise if the image size is not a multiple of the patch size: timm may drop the border."""
    from timm.layers.patch_embed import PatchEmbed

    config: Any = model.pretrained_cfg
    patches = getattr(model, "patch_embed", None)
    pretrained = crop == tuple(config["input_size"][-2:])  # e.g. SigLIP
    if not isinstance(patches, PatchEmbed) or patches.dynamic_img_pad or pretrained:
        return
    for side, step in zip(crop, patches.patch_size, strict=True):
        if side % step:
            below = side // step * step
            sizes = f"{below} or {below + step}" if below else f"{step} or more"
            raise UsageError(
                f"{key} {side} is not a multiple of the patch size {step} of {name}. Use {sizes}."
            )


def takes_one_size(model: nn.Module) -> bool:
    """Return whether the network takes images of one size only, as with learned positions."""
    from timm.layers.patch_embed import PatchEmbed

    patches = getattr(model, "patch_embed", None)
    return isinstance(patches, PatchEmbed) and patches.strict_img_size


def class_and_patches(model: Any, pixels: Tensor) -> Tensor:
    """Return the class token and the mean of the patch tokens, concatenated."""
    tokens = model.forward_features(pixels)
    parts = tokens[:, 0], tokens[:, model.num_prefix_tokens :].mean(1)
    # Networks that average their tokens normalize the average.
    return torch.cat([model.fc_norm(part) for part in parts], 1)


@dataclass(frozen=True)
class Features:
    """Pooled output of a backbone for one image size.

    Attributes:
        width: dimension.
        pooling: never "auto"; "token" if the backbone returns no feature map.
        channels_last: whether the feature map is [H, W, channels].
        dropped: unused parameters, which were removed.
    """

    width: int
    pooling: str
    channels_last: bool = False
    dropped: tuple[str, ...] = ()


def prepare(model: nn.Module, name: str, crop: tuple[int, int], pooling: str = "avg") -> Features:
    """Return the output of a backbone for a pooling, and drop unused layers.

    Unused layers are those after timm's own pooling (the last norm of ConvNeXt, the last
    convolution of MobileNetV3). They get no gradients, which distributed training does not allow.
    """
    if pooling == "cls-avg" and any(
        getattr(model, part, None) is None for part in ("cls_token", "num_prefix_tokens", "fc_norm")
    ):
        raise ValueError(
            f"pooling 'cls-avg' needs a class token, and {name} has none. Use pooling='auto'."
        )
    probed = copy.deepcopy(model).eval()
    weights = sum(value.numel() for value in model.parameters())
    is_small = weights <= _SMALL_NETWORK and prod(crop) <= _SMALL_IMAGE
    try:
        try:  # on the meta device, which computes shapes only, but takes seconds to import
            features = _probe(probed if is_small else probed.to("meta"), crop, pooling)
        except Exception:  # no meta kernel, or a wrong size
            features = _probe(copy.deepcopy(model).eval(), crop, pooling)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{name} cannot take images of {crop[0]}×{crop[1]}: {reason}. Use another image_size."
        ) from error
    if features.pooling == "token" and pooling not in ("auto", "pre-logits", "token"):
        raise NoFeatureMapError(
            f"pooling {pooling!r} needs a feature map, and {name} returns tokens. Use 'token'."
        )
    if pooling == "token" != features.pooling:
        raise ValueError(f"pooling 'token' is for transformers, got {name}. Use pooling='auto'.")
    parameters = dict(model.named_parameters())
    _drop_unused(model, {id(parameters[name]) for name in features.dropped})
    return features


def _probe(model: Any, crop: tuple[int, int], pooling: str) -> Features:
    """Return the output of a backbone and the names of unused parameters."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    pixels = torch.zeros(1, 3, *crop, device=next(model.parameters()).device)
    width, channels_last = 0, False
    with torch.enable_grad():
        if pooling == "cls-avg":
            output = class_and_patches(model, pixels)
        elif getattr(output := model.forward_features(pixels), "ndim", 0) != 4:
            pooling, output = "token", model(pixels)
            if output.ndim != 2:
                raise ValueError(f"its pooled output has shape {list(output.shape)}")
        else:
            if pooling in ("auto", "token"):
                pooling = str(getattr(model, "default_pooling", "pre-logits"))
            _, first, *_, last = output.shape
            is_nhwc = str(getattr(model, "output_fmt", "NCHW")).endswith("NHWC")
            channels_last = last == model.num_features and (is_nhwc or first != last)
            if pooling == "pre-logits":
                output = model.forward_head(output, pre_logits=True)
            else:
                width = last if channels_last else first
                width = prod(output.shape[1:]) if pooling == "flatten" else width
    used = _leaves(output)
    unused = [name for name, value in named.items() if id(value) not in used]
    return Features(width or output.shape[1], pooling, channels_last, tuple(unused))


def _leaves(output: Tensor) -> set[int]:
    """Return the ids of the tensors that would get a gradient from an output."""
    leaves, seen, nodes = set[int](), set[Any](), [output.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            nodes += [previous for previous, _ in node.next_functions]
    return leaves


def _drop_unused(module: nn.Module, unused: Container[int]) -> None:
    for parameter in module.parameters(recurse=False):
        if id(parameter) in unused:
            parameter.requires_grad_(False)
    for name, child in module.named_children():
        parameters = list(child.parameters())
        if parameters and all(id(parameter) in unused for parameter in parameters):
            setattr(module, name, nn.Identity())
        else:
            _drop_unused(child, unused)


def evaluation_mode(module: nn.Module) -> AbstractContextManager[None]:
    """Switch to evaluation mode; restore all modes when the last thread leaves."""
    return override(
        module.modules(),
        False,
        attrgetter("training"),
        lambda layer, mode: setattr(layer, "training", mode),
    )


def _use_running_statistics(layer: nn.Module, inputs: Any) -> None:
    layer.training = False


def freeze_batchnorm(module: Module, affine: bool = False) -> Module:
    """Freeze the running statistics of every batch norm in `module`, and return it.

    A forward hook keeps each layer in evaluation mode, even after `.train()`. Copies and pickles
    stay frozen. With `affine`, scale and shift are frozen too.

    Examples:
        >>> norm = freeze_batchnorm(nn.BatchNorm2d(3)).train()
        >>> _ = norm(torch.randn(4, 3, 8, 8))
        >>> norm.running_mean.tolist()
        [0.0, 0.0, 0.0]
    """
    for layer in module.modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if _use_running_statistics not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_use_running_statistics)
        layer.eval()
        if affine:
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)
    return module
