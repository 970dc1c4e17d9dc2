"""Faster layers for CUDA: batch norm with its activation, and depthwise convolutions.

`fuse` swaps the class of the layers it knows in a network. Parameters, buffers and their names
stay, so checkpoints and saved embedders are the same with or without. The layers fall back to
torch where the kernels do not apply: on the CPU, for other memory formats, when compiling.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Module = TypeVar("Module", bound=nn.Module)

# The kernels' ACT.
_ACTIVATIONS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.ReLU: 1, nn.ReLU6: 2}
# Where the batch norms come from whose forward is known. A subclass may do something else there.
_NORMS = ("torch.nn.modules.batchnorm", "timm.layers.norm_act")


class _Norm(torch.autograd.Function):
    """A batch norm and its activation; saves x alone.

    With `moving`, mean and variance are those of x, and x has its gradient through them too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        act: int,
        moving: bool,
    ) -> Tensor:
        from proximetry.cuda import norm

        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.settings = eps, act, moving
        return norm.norm(x, norm.Norm(weight, bias, mean, variance, eps), act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from proximetry.cuda import norm

        x, weight, bias, mean, variance = ctx.saved_tensors
        eps, act, moving = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        layer = norm.Norm(weight, bias, mean, variance, eps)
        gradients = norm.norm_backward(x, dy, layer, act, moving)
        return *gradients, None, None, None, None, None


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution with any padding; the weight is [kernel², C], float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        kernel: int,
        stride: int,
        before: tuple[int, int],
        size: tuple[int, int],
    ) -> Tensor:
        from proximetry.cuda import depthwise

        ctx.save_for_backward(x, weight)
        ctx.settings = kernel, stride, before
        if _suits_cudnn(x, size):
            plain = weight.t().view(-1, 1, kernel, kernel).to(x.dtype)
            return F.conv2d(x, plain, padding=before, groups=x.shape[1])
        return depthwise.depthwise(x, weight, kernel, stride, before, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from proximetry.cuda import depthwise

        x, weight = ctx.saved_tensors
        kernel, stride, before = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = depthwise.depthwise_input(dy, weight, kernel, stride, before, x.shape[2:])
        if ctx.needs_input_grad[1]:
            if _suits_cudnn(x, dy.shape[2:]):
                dweight = _cudnn_weight(x, dy, kernel, before)
            else:
                dweight = depthwise.depthwise_weight(x, dy, kernel, stride, before)
        return dx, dweight, None, None, None, None


def _suits_cudnn(x: Tensor, size: Sequence[int]) -> bool:
    """Whether cuDNN is the faster one, for all but the gradient of the input: at stride 1."""
    return x.is_cuda and tuple(x.shape[2:]) == tuple(size)


def _cudnn_weight(x: Tensor, dy: Tensor, kernel: int, before: tuple[int, int]) -> Tensor:
    channels = x.shape[1]
    shape = torch.empty(channels, 1, kernel, kernel, dtype=x.dtype, device=x.device)
    found: Tensor = torch.ops.aten.convolution_backward(
        dy, x, shape, None, [1, 1], list(before), [1, 1], False, [0, 0], channels,
        [False, True, False],
    )[1]  # fmt: skip
    return found.float().view(channels, kernel**2).t()


def _suits(x: Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


class _FusedNorm(nn.BatchNorm2d):
    """A batch norm, with the activation that timm puts into its batch norms."""

    def forward(self, x: Tensor) -> Tensor:
        if not _suits(x) or not _suits_norm(self, x):
            return super().forward(x)
        return fused_norm(self, x)


def _suits_norm(layer: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether the kernels do what the layer would do with this x, errors included."""
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
    """Return what the batch norm `layer` makes of x, activation included."""
    mean, variance = _statistics(layer, x)
    weight = torch.ones_like(mean) if layer.weight is None else layer.weight.float()
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.float()
    after = getattr(layer, "act", nn.Identity())
    act = _ACTIVATIONS.get(type(after))
    y: Tensor = _Norm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, mean, variance, layer.eps, act or 0, layer.training
    )
    return y if act is not None else after(y)


def _statistics(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance to norm with; in training mode, move the running ones."""
    if not layer.training:
        return layer.running_mean.float(), layer.running_var.float()
    from proximetry.cuda import norm

    running = layer.running_mean, layer.running_var, layer.num_batches_tracked
    return norm.statistics(x, *running, float(layer.momentum))


class _FusedDepthwise(nn.Conv2d):
    """A depthwise convolution, padded as torch or as TensorFlow does ("same")."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cuda") and x.is_cuda:
            x = x.to(torch.get_autocast_dtype("cuda"))
        return fused_depthwise(self, x) if _suits(x) else super().forward(x)


def fused_depthwise(layer: Any, x: Tensor) -> Tensor:
    """Return the depthwise convolution `layer` of x."""
    kernel, stride = layer.kernel_size[0], layer.stride[0]
    before, size = zip(
        *(_padding(layer, axis, length) for axis, length in enumerate(x.shape[2:])), strict=True
    )
    weight = layer.weight.float().view(layer.out_channels, kernel**2).t().contiguous()
    y: Tensor = _Depthwise.apply(x, weight, kernel, stride, before, size)  # type: ignore[no-untyped-call]
    return y


def _padding(layer: Any, axis: int, length: int) -> tuple[int, int]:
    """Return the padding before an axis, and the length of the result."""
    kernel, stride = layer.kernel_size[axis], layer.stride[axis]
    if _is_same(layer):
        result = -(-length // stride)
        return max((result - 1) * stride + kernel - length, 0) // 2, result
    padding = layer.padding[axis]
    return padding, (length + 2 * padding - kernel) // stride + 1


def _is_same(layer: Any) -> bool:
    from timm.layers.conv2d_same import Conv2dSame

    return isinstance(layer, Conv2dSame)


def _is_norm(layer: nn.Module) -> bool:
    drops = getattr(layer, "drop", None)  # timm's may drop units between norm and activation
    return (
        isinstance(layer, nn.BatchNorm2d)
        and type(layer).forward.__module__ in _NORMS
        and (drops is None or isinstance(drops, nn.Identity))
    )


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


@cache
def _fused(front: Any, kind: Any) -> Any:
    return type(f"Fused{kind.__name__}", (front, kind), {})


def fuse(module: Module) -> Module:
    """Let batch norms and depthwise convolutions of `module` use our kernels on CUDA."""
    if find_spec("triton") is None:
        return module
    for layer in module.modules():
        kind: Any = type(layer)
        if issubclass(kind, (_FusedNorm, _FusedDepthwise)):
            continue
        if _is_norm(layer):
            layer.__class__ = _fused(_FusedNorm, kind)
        elif _is_depthwise(layer):
            layer.__class__ = _fused(_FusedDepthwise, kind)
    return module
