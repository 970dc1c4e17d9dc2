"""Backbones: every model of timm by name, and three that timm lacks, registered into it."""

import copy
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from proximetry._common import UsageError, closest, need, random_numbers_kept, shown
from proximetry.models.batchnorm import evaluating


@dataclass(frozen=True)
class Features:
    """What a backbone gives for images of one size.

    Attributes:
        channels: of the feature map or, where the backbone pools it itself, of the result.
        size: height and width of the feature map; None if there is none.
        channels_last: whether the map is [H, W, channels].
        dropped: parameters that take no part, and were removed.
    """

    channels: int
    size: tuple[int, int] | None
    channels_last: bool = False
    dropped: tuple[str, ...] = ()


@cache
def load_timm() -> Any:
    """Import timm, and register our own backbones with it.

    It takes longer than torch, and a search or a mistake in a command needs no network.
    """
    timm = need("timm", "images", "A backbone")
    from proximetry.models.backbones import bn_inception, small_convnet, sphereface  # noqa: F401

    return timm


def own_backbones() -> dict[str, str]:
    """Return the backbones that timm lacks, by name, with a line of what each is."""
    load_timm()
    from proximetry.models.backbones.base import BACKBONES

    documented = {name: sys.modules[kind.__module__].__doc__ for name, kind in BACKBONES.items()}
    return {name: (text or "").partition("\n")[0] for name, text in documented.items()}


def list_backbones(pattern: str = "") -> list[str]:
    """Return the names that `Embedder.create` takes; `pattern` may hold wildcards ("resnet*")."""
    return load_timm().list_models(pattern)  # type: ignore[no-any-return]


def check_name(name: str) -> str:
    """Return `name`; refuse what is no backbone and suggest near names."""
    timm = load_timm()
    if isinstance(name, str) and timm.is_model(name):
        with suppress(RuntimeError):  # of an unknown tag
            timm.get_pretrained_cfg(name)
            return name
    if isinstance(name, nn.Module):
        raise UsageError(
            f"backbone is a name of timm, got the module {type(name).__name__}; a network of your "
            "own becomes an embedder by Embedder.wrap(module, preprocessing, dim)"
        )
    near = closest(str(name), timm.list_models())
    raise UsageError(
        f"unknown backbone {shown(name)}{near} `proximetry backbones 'resnet*'`, or in Python "
        "list_backbones('resnet*'), finds names"
    )


def build(
    name: str, crop: tuple[int, int] | None = None, tensors: dict[str, Tensor] | None = None
) -> nn.Module:
    """Make a backbone without classifier, random or with tensors under timm's own names."""
    timm = load_timm()
    config = timm.get_pretrained_cfg(check_name(name))
    own = tuple(config.input_size[-2:])
    extra: dict[str, Any] = {}
    if crop and crop != own and config.fixed_input_size:
        extra["img_size"] = crop
    try:
        model = timm.create_model(
            name,
            pretrained=tensors is not None,
            # Tensors, not their file: timm would unpickle it without restriction.
            pretrained_cfg_overlay={"state_dict": tensors} if tensors else None,
            num_classes=0,
            **extra,
        )
    except TypeError as error:
        if not crop or not extra:
            raise
        raise ValueError(
            f"{name} takes images of {own[0]}×{own[1]} only, not {crop[0]}×{crop[1]}"
        ) from error
    model.pretrained_cfg["state_dict"] = None
    return model  # type: ignore[no-any-return]


def set_drop_path(model: nn.Module, name: str, rate: float) -> bool:
    """Give a backbone stochastic depth, as timm builds it in: the more the later the block.

    Returns whether it has blocks that can be dropped.
    """
    timm = load_timm()
    from timm.layers.drop import DropPath

    rates: dict[str, float] = {}
    if timm.is_model(name):
        # A network that does not know the argument says so by a TypeError.
        with random_numbers_kept(), suppress(TypeError):
            parts = timm.create_model(name, num_classes=0, drop_path_rate=rate).named_modules()
            rates = {place: one.drop_prob for place, one in parts if isinstance(one, DropPath)}
    for place, share in rates.items():
        parent, _, child = place.rpartition(".")
        setattr(model.get_submodule(parent), child, DropPath(share).train(model.training))
    return bool(rates)


def check_patches(
    model: nn.Module, name: str, crop: tuple[int, int], key: str = "image_size"
) -> None:
    """Refuse images whose border would be in no patch: timm may drop it without a word."""
    from timm.layers.patch_embed import PatchEmbed

    patches = getattr(model, "patch_embed", None)
    config: Any = model.pretrained_cfg
    if not isinstance(patches, PatchEmbed) or patches.dynamic_img_pad:
        return
    if crop == tuple(config["input_size"][-2:]):  # as it was trained: one of SigLIP's is such
        return
    for side, step in zip(crop, patches.patch_size, strict=True):
        if side % step:
            below = side // step * step
            use = f"{below} or {below + step}" if below else f"{step} or more"
            raise UsageError(
                f"{key} {side} is no multiple of {step}, the side of the patches of {name}: "
                f"use {use}"
            )


def takes_one_size(model: nn.Module) -> bool:
    """Whether the network was made for images of one size, as those with learned positions are."""
    from timm.layers.patch_embed import PatchEmbed

    patches = getattr(model, "patch_embed", None)
    return isinstance(patches, PatchEmbed) and patches.strict_img_size


def class_and_patches(model: Any, pixels: Tensor) -> Tensor:
    """Return the class token and the mean of the patch tokens, side by side."""
    tokens = model.forward_features(pixels)
    parts = tokens[:, 0], tokens[:, model.num_prefix_tokens :].mean(1)
    # Networks that average their tokens have their last norm behind that.
    return torch.cat([model.fc_norm(part) for part in parts], 1)


def has_class_token(model: nn.Module) -> bool:
    """Whether `class_and_patches` is of use."""
    wanted = ("cls_token", "num_prefix_tokens", "fc_norm")
    return all(getattr(model, name, None) is not None for name in wanted)


def default_pooling(model: nn.Module) -> str:
    """Return the pooling that "auto" means for a backbone with a feature map."""
    return str(getattr(model, "default_pooling", "pre-logits"))


def prepare(model: nn.Module, name: str, crop: tuple[int, int], pooling: str = "avg") -> Features:
    """Find out what the backbone gives for a pooling, and drop the layers that take no part in it.

    Those are layers that timm puts behind its own pooling (ConvNeXt's last norm, the last
    convolution of MobileNetV3), if another one is used: without gradients they would stall
    distributed training.
    """
    try:
        try:
            features = _probe(_without_memory(model), crop, pooling)
        except Exception:  # an operation that is not known without memory, or a size that is wrong
            features = _probe(model, crop, pooling)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{name} cannot take images of {crop[0]}×{crop[1]}: {reason}. "
            "Choose another image_size."
        ) from error
    parameters = dict(model.named_parameters())
    _drop_unused(model, {id(parameters[name]) for name in features.dropped})
    return features


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy that computes shapes alone, whatever the size of the images."""
    parts: dict[int, Any] = {}
    for value in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(value, device="meta")
        trained = isinstance(value, nn.Parameter)
        parts[id(value)] = nn.Parameter(empty, value.requires_grad) if trained else empty
    return copy.deepcopy(model, parts)


def _probe(model: nn.Module, crop: tuple[int, int], pooling: str) -> Features:
    """Return what the backbone gives, with the names of the parameters that it does not need."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    device = next(model.parameters()).device
    with evaluating(model), torch.enable_grad():
        features, output = _look(model, torch.zeros(1, 3, *crop, device=device), pooling)
        gradients = torch.autograd.grad(output.sum(), list(named.values()), allow_unused=True)
    unused = [n for n, gradient in zip(named, gradients, strict=True) if gradient is None]
    return replace(features, dropped=tuple(unused))


def _look(model: Any, pixels: Tensor, pooling: str) -> tuple[Features, Tensor]:
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
        own = list(child.parameters())
        if own and all(id(parameter) in unused for parameter in own):
            setattr(module, name, nn.Identity())
        else:
            _drop_unused(child, unused)
