"""Faster CUDA layers: batch norm with its activation, depthwise and pointwise convolutions.

`fuse` replaces supported layers, `unfuse` restores them. Parameters, buffers, names and checkpoints
stay the same. Layers use torch where the kernels do not apply: on the CPU, for other
memory formats, and when compiling.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F

# ACT of the kernels.
_ACTIVATIONS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.ReLU: 1, nn.ReLU6: 2}


def _suits(x: Tensor) -> bool:
    """Return whether the kernels support this tensor."""
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


class FusedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm, with the activation of timm's batch norms."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [N, C, H, W]."""
        if not _suits(x) or not _suits_norm(self, x):
            return super().forward(x)
        with torch.cuda.device(x.get_device()):  # Triton launches on the current device
            return fused_norm(self, x)


def _suits_norm(layer: nn.BatchNorm2d, x: Tensor) -> bool:
    """Return whether the kernels support this layer and input; torch raises errors."""
    if layer.running_mean is None or x.shape[1] != layer.num_features:
        return False
    return not layer.training or (
        layer.track_running_stats
        and layer.momentum is not None
        and layer.num_batches_tracked is not None
        and layer.running_mean.dtype == torch.float32
        and x.numel() > x.shape[1]
    )


def fused_norm(layer: Any, x: Tensor) -> Tensor:
    """Return batch norm and activation of x; updates running statistics in training mode."""
    from proximetry.kernels.batch_norm import norm, statistics

    running = layer.running_mean, layer.running_var
    if layer.training:
        mean, variance = statistics(x, *running, layer.num_batches_tracked, float(layer.momentum))
    else:
        mean, variance = (value.float() for value in running)
    weight = torch.ones_like(mean) if layer.weight is None else layer.weight.float()
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.float()
    activation = getattr(layer, "act", nn.Identity())
    act = _ACTIVATIONS.get(type(activation))
    y = norm(x, layer.eps, act or 0, layer.training, weight, bias, mean, variance)
    return y if act is not None else activation(y)


class FusedConv2d(nn.Conv2d):
    """Depthwise convolution, padded as by torch or TensorFlow ("same")."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [N, C, H, W]."""
        if torch.is_autocast_enabled("cuda") and x.is_cuda:
            x = x.to(torch.get_autocast_dtype("cuda"))
        if not _suits(x) or x.shape[1] != self.in_channels:
            return super().forward(x)
        with torch.cuda.device(x.get_device()):
            return fused_depthwise(self, x)


def fused_depthwise(layer: Any, x: Tensor) -> Tensor:
    """Return the depthwise convolution `layer` of x."""
    from proximetry.kernels.depthwise_conv import depthwise

    axes = (_padding(layer, axis, length) for axis, length in enumerate(x.shape[2:]))
    padding, size = zip(*axes, strict=True)
    weight = layer.weight.float().squeeze(1).permute(1, 2, 0).contiguous()
    return depthwise(x, weight, layer.stride[0], padding, size)


def _padding(layer: Any, axis: int, length: int) -> tuple[int, int]:
    """Return the leading padding of an axis and the length of the result."""
    kernel, stride, padding = layer.kernel_size[axis], layer.stride[axis], layer.padding[axis]
    if isinstance(layer, Conv2dSame):
        result = -(-length // stride)
        return max((result - 1) * stride + kernel - length, 0) // 2, result
    return padding, (length + 2 * padding - kernel) // stride + 1


class PointwiseConv2d(nn.Conv2d):
    """1 × 1 convolution as a matrix product in half precision: cuDNN starts slowly."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [N, C, H, W]."""
        if torch.is_autocast_enabled("cuda") and x.is_cuda:
            x = x.to(torch.get_autocast_dtype("cuda"))
        if not _suits(x) or x.dtype == torch.float32 or x.shape[1] != self.in_channels:
            return super().forward(x)
        weight = self.weight.flatten(1).to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def _is_norm(layer: nn.Module) -> bool:
    dropout = getattr(layer, "drop", None)  # of timm's batch norms, before the activation
    return isinstance(layer, nn.BatchNorm2d) and isinstance(dropout, nn.Identity | None)


def _is_depthwise(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.groups == layer.in_channels == layer.out_channels > 1
        and layer.kernel_size in ((3, 3), (5, 5))
        and layer.stride in ((1, 1), (2, 2))
        and layer.dilation == (1, 1)
        and layer.bias is None
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and max(layer.padding) < layer.kernel_size[0]
    )


def _is_pointwise(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Conv2d
        and layer.kernel_size == layer.stride == (1, 1)
        and layer.groups == 1
        and layer.padding == (0, 0)
    )


class FusedBatchNormAct2d(FusedBatchNorm2d, BatchNormAct2d):
    """Fused version of timm's batch norm with activation."""


class FusedConv2dSame(FusedConv2d, Conv2dSame):
    """Fused version of timm's convolution with TensorFlow's padding."""


# Exact classes: subclasses may have another forward pass.
_FUSED: dict[type[nn.Module], Any] = {
    nn.BatchNorm2d: FusedBatchNorm2d,
    BatchNormAct2d: FusedBatchNormAct2d,
    nn.Conv2d: FusedConv2d,
    Conv2dSame: FusedConv2dSame,
}
_UNFUSED: dict[type[nn.Module], Any] = {fused: kind for kind, fused in _FUSED.items()}
_UNFUSED[PointwiseConv2d] = nn.Conv2d


def fuse(module: nn.Module) -> nn.Module:
    """Return the module with batch norms and convolutions that are faster on CUDA."""
    return module if find_spec("triton") is None else _replace(module, _fused_class)


def unfuse(module: nn.Module) -> nn.Module:
    """Return the module with the layers that `fuse` replaced."""
    return _replace(module, lambda layer: _UNFUSED.get(type(layer)))


def _fused_class(layer: nn.Module) -> type[nn.Module] | None:
    if _is_pointwise(layer):
        return PointwiseConv2d
    return _FUSED.get(type(layer)) if _is_norm(layer) or _is_depthwise(layer) else None


def _replace(module: nn.Module, choose: Callable[[nn.Module], type[nn.Module] | None]) -> nn.Module:
    """Replace layers by layers of other classes with the same parameters, buffers and hooks."""
    if (chosen := choose(module)) is not None:
        layer: nn.Module = nn.Module.__new__(chosen)
        layer.__dict__ = module.__dict__
        return layer
    for name, child in module.named_children():
        setattr(module, name, _replace(child, choose))
    return module
