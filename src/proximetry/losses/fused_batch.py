"""The functions of `batch`, each in one kernel: with many small ones a GPU waits for the CPU."""

from typing import Any

import torch
from torch import Tensor

from proximetry.losses import batch
from proximetry.losses import fused_kernels as kernels
from proximetry.losses.batch import Batch
from proximetry.losses.fused import launcher, power_of_2


def normalize(
    embeddings: Tensor, labels: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Batch:
    """Return the same as `batch.normalize`, in float32."""
    if dtype != torch.float32:
        raise ValueError(f"the fused engine needs float32 proxies, got {dtype}")
    with torch.cuda.device_of(embeddings):  # type: ignore[no-untyped-call]
        return Batch(*_Normalize.apply(embeddings, labels, weights))  # type: ignore[no-untyped-call]


def pull(logit: Tensor, log_weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the same as `batch.pull`."""
    with torch.cuda.device_of(logit):  # type: ignore[no-untyped-call]
        total: Tensor = _Pull.apply(logit, log_weights, labels, num_classes)  # type: ignore[no-untyped-call]
        return total


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, labels: Tensor, weights: Tensor | None) -> Any:
        size, dim = embeddings.shape
        x = torch.empty(size, dim, device=embeddings.device)
        length, inverse, weights_out, log_weights = x.new_empty(4, size).unbind()
        labels_out = torch.empty_like(labels)
        launch = launcher(
            kernels.normalize, DIM=dim, WEIGHTS=weights is not None, BD=power_of_2(dim)
        )
        launch(
            (size,), embeddings.contiguous(), labels,
            x if weights is None else weights.float().contiguous(), x, length, inverse, labels_out,
            weights_out, log_weights,
        )  # fmt: skip
        ctx.mark_non_differentiable(labels_out, weights_out, log_weights)
        ctx.set_materialize_grads(False)
        ctx.weights = weights
        ctx.save_for_backward(embeddings, labels, x, inverse)
        return x, length, labels_out, weights_out, log_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        embeddings, labels, x, inverse = ctx.saved_tensors
        grad_x, grad_length, *_ = grads
        if torch.is_grad_enabled():  # create_graph=True
            outputs = batch.normalize(embeddings, labels, ctx.weights, x.dtype)[:2]
            return _differentiable(outputs, grads[:2], embeddings), None, None
        if grad_x is None:
            grad_x = torch.zeros_like(x)
        gradient = torch.empty_like(x)
        launch = launcher(
            kernels.normalize_backward, DIM=x.shape[1], LENGTH=grad_length is not None,
            BD=power_of_2(x.shape[1]),
        )  # fmt: skip
        launch(
            (len(x),), x, inverse, grad_x.contiguous(),
            x if grad_length is None else grad_length.contiguous(), gradient,
        )  # fmt: skip
        return gradient.to(embeddings.dtype), None, None


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logit: Tensor, log_weights: Tensor, labels: Tensor, num_classes: int
    ) -> Tensor:
        terms, slopes = logit.new_empty(2, len(logit)).unbind()
        launch = launcher(kernels.class_pulls, BB=min(1024, power_of_2(len(logit), 16)))
        launch((len(logit),), logit.contiguous(), log_weights, labels, terms, slopes, len(logit))
        ctx.save_for_backward(logit, log_weights, labels, slopes)
        ctx.num_classes = num_classes
        return terms.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logit, log_weights, labels, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            total = batch.pull(logit, log_weights, labels, ctx.num_classes)
            return _differentiable((total,), (grad,), logit), None, None, None
        return slopes * grad, None, None, None


def _differentiable(outputs: Any, grads: Any, value: Tensor) -> Tensor:
    """Return a gradient that can be differentiated again."""
    pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[1] is not None]
    outputs, grads = zip(*pairs, strict=True)
    (gradient,) = torch.autograd.grad(outputs, value, grads, create_graph=True)
    return gradient
