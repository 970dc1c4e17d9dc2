"""The functions of `batch`, each in one kernel: with many small kernels a GPU waits for the CPU."""

from typing import Any

import torch
from torch import Tensor

from proximetry.losses import batch as torch_batch
from proximetry.losses import fused_kernels as kernels
from proximetry.losses.batch import Batch
from proximetry.losses.fused import aligned, launcher, power_of_2


def normalize(
    embeddings: Tensor, labels: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Batch:
    """Normalize a batch like `batch.normalize`, in float32."""
    if dtype != torch.float32:
        raise ValueError(f"the fused engine needs float32 proxies, got {dtype}. Use engine='auto'.")
    if not (embeddings.is_cuda or kernels.INTERPRETED.value):
        device = embeddings.device
        raise ValueError(
            f"the fused engine needs CUDA, got embeddings on {device}. Use engine='auto'."
        )
    with torch.cuda.device_of(embeddings):  # type: ignore[no-untyped-call]
        return Batch(*_Normalize.apply(embeddings, labels, weights))  # type: ignore[no-untyped-call]


def pull(logit: Tensor, batch: Batch, num_classes: int) -> tuple[Tensor, Tensor]:
    """See `Engine.pull`."""
    with torch.cuda.device_of(logit):  # type: ignore[no-untyped-call]
        return _Pull.apply(logit, batch, num_classes)  # type: ignore[no-untyped-call, no-any-return]


def mean(terms: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `Engine.mean`."""
    with torch.cuda.device_of(terms):  # type: ignore[no-untyped-call]
        return _Mean.apply(terms, weights)  # type: ignore[no-untyped-call, no-any-return]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, labels: Tensor, weights: Tensor | None) -> Any:
        size, dim = embeddings.shape
        x = torch.empty(size, dim, device=embeddings.device)
        length, inverse, weights_out, log_weights = (x.new_empty(size) for _ in range(4))
        labels_out = torch.empty_like(labels)
        launch = launcher(
            kernels.normalize, DIM=dim, WEIGHTS=weights is not None, BD=power_of_2(dim),
            TYPE=embeddings.dtype,
        )  # fmt: skip
        launch(
            (size,), aligned(embeddings), aligned(labels),
            None if weights is None else aligned(weights.float()), x, length, inverse, labels_out,
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
            outputs = torch_batch.normalize(embeddings, labels, ctx.weights, x.dtype)[:2]
            return _differentiable(outputs, grads[:2], embeddings), None, None
        if grad_x is None:
            grad_x = torch.zeros_like(x)
        gradient = torch.empty_like(x)
        launch = launcher(
            kernels.normalize_backward, DIM=x.shape[1], LENGTH=grad_length is not None,
            BD=power_of_2(x.shape[1]),
        )  # fmt: skip
        launch(
            (len(x),), x, inverse, aligned(grad_x),
            None if grad_length is None else aligned(grad_length), gradient,
        )  # fmt: skip
        return gradient.to(embeddings.dtype), None, None


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logit: Tensor, batch: Batch, num_classes: int) -> Any:
        size = len(logit)
        terms, slopes, value, factor = (logit.new_empty(n) for n in (size, size, (), ()))
        launch = launcher(kernels.class_pulls, BB=min(1024, power_of_2(size, 16)))
        log_weights, labels = aligned(batch.log_weights), aligned(batch.labels)
        launch((size,), aligned(logit), log_weights, labels, terms, slopes, size)
        finish = launcher(kernels.finish_pulls, BB=min(1024, power_of_2(size, 16)))
        finish((1,), terms, slopes, value, factor, size)
        ctx.save_for_backward(logit, slopes)
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.num_classes = batch, num_classes
        ctx.mark_non_differentiable(factor)
        return value, factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _factor: Any) -> Any:
        logit, slopes = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            value, _ = torch_batch.pull(logit, ctx.batch, ctx.num_classes)
            return _differentiable((value,), (grad,), logit), None, None
        return slopes * grad, None, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, weights: Tensor) -> Any:
        size = len(terms)
        slopes, value, factor = (terms.new_empty(n) for n in (size, (), ()))
        launch = launcher(kernels.weighted_mean, BB=min(1024, power_of_2(size, 16)))
        launch((1,), aligned(terms), aligned(weights), slopes, value, factor, size)
        ctx.save_for_backward(slopes)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(factor)
        return value, factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _factor: Any) -> Any:
        (slopes,) = ctx.saved_tensors
        return slopes * grad, None


def _differentiable(outputs: Any, grads: Any, value: Tensor) -> Tensor:
    """Return a gradient that can be differentiated again."""
    pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[1] is not None]
    outputs, grads = zip(*pairs, strict=True)
    (gradient,) = torch.autograd.grad(outputs, value, grads, create_graph=True)
    return gradient
