"""Backbones: all models of timm, and three more that are registered with it."""

import copy
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from proximetry._util.errors import UsageError, closest, need, shown
from proximetry._util.machine import preserve_rng_state
from proximetry.models.batchnorm import evaluating


@dataclass(frozen=True)
class Features:
    """Output of a backbone for one image size.

    Attributes:
        channels: of the feature map, or of the output if the backbone pools it itself.
        size: height and width of the feature map; None without one.
        channels_last: whether the map is [H, W, channels].
        dropped: unused parameters, which were removed.
    """

    channels: int
    size: tuple[int, int] | None
    channels_last: bool = False
    dropped: tuple[str, ...] = ()


@cache
def load_timm() -> Any:
    """Import timm, which is slow, and register our backbones with it."""
    timm = need("timm", "images", "A backbone")
    from proximetry.models.backbones import bn_inception, small_convnet, sphereface  # noqa: F401

    return timm


def own_backbones() -> dict[str, str]:
    """Return names and one-line descriptions of the backbones that timm lacks."""
    load_timm()
    from proximetry.models.backbones.base import BACKBONES

    documented = {name: sys.modules[kind.__module__].__doc__ for name, kind in BACKBONES.items()}
    return {name: (text or "").partition("\n")[0] for name, text in documented.items()}


def list_backbones(pattern: str = "") -> list[str]:
    """Return the names for `Embedder.create`; `pattern` may have wildcards ("resnet*")."""
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
    suggestion = closest(str(name), timm.list_models())
    raise UsageError(
        f"unknown backbone {shown(name)}{suggestion} List names with `proximetry backbones "
        "'resnet*'` or list_backbones('resnet*')."
    )


def build(
    name: str, crop: tuple[int, int] | None = None, tensors: dict[str, Tensor] | None = None
) -> nn.Module:
    """Create a backbone without classifier, with random weights or tensors that timm can load."""
    timm = load_timm()
    config = timm.get_pretrained_cfg(check_name(name))
    size = tuple(config.input_size[-2:])
    extra: dict[str, Any] = {}
    if crop and crop != size and config.fixed_input_size:
        extra["img_size"] = crop
    try:
        model = timm.create_model(
            name,
            pretrained=tensors is not None,
            # Tensors, not their file, which timm would unpickle without restriction.
            pretrained_cfg_overlay={"state_dict": tensors} if tensors else None,
            num_classes=0,
            **extra,
        )
    except TypeError as error:
        if not crop or not extra:
            raise
        raise ValueError(
            f"{name} takes images of {size[0]}×{size[1]} only, not {crop[0]}×{crop[1]}"
        ) from error
    model.pretrained_cfg["state_dict"] = None
    return model  # type: ignore[no-any-return]


def set_drop_path(model: nn.Module, name: str, rate: float) -> bool:
    """Add timm's stochastic depth to a backbone; return whether it has blocks to drop."""
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

    patches = getattr(model, "patch_embed", None)
    config: Any = model.pretrained_cfg
    if not isinstance(patches, PatchEmbed) or patches.dynamic_img_pad:
        return
    if crop == tuple(config["input_size"][-2:]):  # as pretrained, e.g. SigLIP
        return
    for side, step in zip(crop, patches.patch_size, strict=True):
        if side % step:
            below = side // step * step
            use = f"{below} or {below + step}" if below else f"{step} or more"
            raise UsageError(
                f"{key} {side} is not a multiple of the patch size {step} of {name}. Use {use}."
            )


def takes_one_size(model: nn.Module) -> bool:
    """Whether the network takes images of one size only, as with learned positions."""
    from timm.layers.patch_embed import PatchEmbed

    patches = getattr(model, "patch_embed", None)
    return isinstance(patches, PatchEmbed) and patches.strict_img_size


def class_and_patches(model: Any, pixels: Tensor) -> Tensor:
    """Return the class token and the mean of the patch tokens, concatenated."""
    tokens = model.forward_features(pixels)
    parts = tokens[:, 0], tokens[:, model.num_prefix_tokens :].mean(1)
    # Networks that average their tokens normalize after it.
    return torch.cat([model.fc_norm(part) for part in parts], 1)


def has_class_token(model: nn.Module) -> bool:
    """Whether `class_and_patches` applies to the network."""
    names = ("cls_token", "num_prefix_tokens", "fc_norm")
    return all(getattr(model, name, None) is not None for name in names)


def default_pooling(model: nn.Module) -> str:
    """Return the pooling that "auto" means for a backbone with a feature map."""
    return str(getattr(model, "default_pooling", "pre-logits"))


def prepare(model: nn.Module, name: str, crop: tuple[int, int], pooling: str = "avg") -> Features:
    """Return the output of a backbone for a pooling, and drop the layers that it does not use.

    These are layers after timm's own pooling (ConvNeXt's last norm, the last convolution of
    MobileNetV3). Without gradients they would stall distributed training.
    """
    try:
        try:
            features = _probe(_on_meta(model), crop, pooling)
        except Exception:  # no meta kernel, or a wrong size
            features = _probe(model, crop, pooling)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{name} cannot take images of {crop[0]}×{crop[1]}: {reason}. Use another image_size."
        ) from error
    parameters = dict(model.named_parameters())
    _drop_unused(model, {id(parameters[name]) for name in features.dropped})
    return features


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device, which computes shapes only."""
    parts: dict[int, Any] = {}
    for value in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(value, device="meta")
        trained = isinstance(value, nn.Parameter)
        parts[id(value)] = nn.Parameter(empty, value.requires_grad) if trained else empty
    return copy.deepcopy(model, parts)


def _probe(model: nn.Module, crop: tuple[int, int], pooling: str) -> Features:
    """Return the output of a backbone and the names of unused parameters."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    device = next(model.parameters()).device
    with evaluating(model), torch.enable_grad():
        features, output = _run(model, torch.zeros(1, 3, *crop, device=device), pooling)
        gradients = torch.autograd.grad(output.sum(), list(named.values()), allow_unused=True)
    unused = [n for n, gradient in zip(named, gradients, strict=True) if gradient is None]
    return replace(features, dropped=tuple(unused))


def _run(model: Any, pixels: Tensor, pooling: str) -> tuple[Features, Tensor]:
    if pooling == "auto":
        pooling = default_pooling(model)
    if pooling == "cls-avg":
        output = class_and_patches(model, pixels)
        return Features(output.shape[1], None), output
    output = model.forward_features(pixels)
    if not isinstance(output, Tensor) or output.ndim != 4:
        output = model(pixels)
        if output.ndim != 2:
            raise ValueError(f"its pooled output has shape {list(output.shape)}")
        return Features(output.shape[1], None), output
    _, first, middle, last = output.shape
    if pooling == "pre-logits":
        pooled = model.forward_head(output, pre_logits=True)
        return Features(pooled.shape[1], (middle, last)), pooled
    named_last = str(getattr(model, "output_fmt", "NCHW")).endswith("NHWC")
    channels_last = last == model.num_features and (named_last or first != last)
    if channels_last:
        return Features(last, (first, middle), True), output
    return Features(first, (middle, last)), output


def _drop_unused(module: nn.Module, unused: Iterable[int]) -> None:
    for parameter in module.parameters(recurse=False):
        if id(parameter) in unused:
            parameter.requires_grad_(False)
    for name, child in module.named_children():
        parameters = list(child.parameters())
        if parameters and all(id(parameter) in unused for parameter in parameters):
            setattr(module, name, nn.Identity())
        else:
            _drop_unused(child, unused)
