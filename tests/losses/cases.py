"""Helpers of the loss tests: small losses and batches, and the names of the registry."""

import torch

from proximetry import losses
from proximetry.losses.form import Problem

NAMES = list(losses.LOSSES)
MULTI = [name for name in NAMES if "proxies_per_class" in losses.loss_settings(name)]
#: Optimizers that update the proxies during backward, with settings.
OPTIMIZERS = [
    (losses.ProxySGD, {"lr": 0.1}),
    (losses.ProxySGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (losses.RowwiseAdam, {"lr": 0.05, "weight_decay": 0.1}),
    (losses.RowwiseAdam, {"lr": 0.05, "betas": (0.0, 0.99)}),
]


def make(name, classes=7, dim=5, k=None, seed=0, **settings):
    """Return a loss, with k proxies per class if it supports several."""
    torch.manual_seed(seed)
    if k is not None and name in MULTI:
        settings["proxies_per_class"] = k
    return losses.create(name, classes, dim, **settings)


def batch(size=9, classes=7, dim=5, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator, dtype=dtype)
    return x, torch.randint(0, classes, (size,), generator=generator)


def problem(loss, x, proxies, y, length):
    """Return the problem that the loss passes to its engine."""
    scale, offset = loss.negative_logit(length)
    present = x.new_zeros(len(proxies)).index_fill(0, y, 1.0)
    weight = loss.negative_weight(len(proxies), lambda: (present, present.sum()))
    return Problem(x, proxies, y, loss.form, loss.gamma, scale, offset, weight)


def value_and_gradients(loss, x, y):
    x = x.detach().clone().requires_grad_()
    loss.zero_grad(set_to_none=True)
    value = loss(x, y)
    value.backward()
    return value.detach(), x.grad, loss.proxies.weight.grad
