"""Evaluation mode, and frozen statistics and momentum of batch norm."""

from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from proximetry._util.machine import override

Module = TypeVar("Module", bound=nn.Module)


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Switch to evaluation mode, and restore all modes when no thread needs it any more."""
    return override(
        module.modules(),
        False,
        attrgetter("training"),
        lambda layer, mode: setattr(layer, "training", mode),
    )


def _use_running_statistics(layer: nn.Module, inputs: Any) -> None:
    """Switch a layer to evaluation mode before its forward pass."""
    layer.training = False


def freeze_batchnorm(module: Module, affine: bool = False) -> Module:
    """Freeze the running statistics of every batch norm in `module`, and return it.

    A forward hook puts each layer into evaluation mode, also after `.train()`. Copies and pickles
    stay frozen. With `affine`, scale and shift are frozen too.
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


def set_batchnorm_momentum(module: Module, momentum: float) -> Module:
    """Set the momentum of the running statistics, as PyTorch defines it (Proxy-Anchor: 0.9)."""
    if not 0 <= momentum <= 1:
        raise ValueError(f"momentum must be between 0 and 1, got {momentum!r}")
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.momentum = momentum
    return module
