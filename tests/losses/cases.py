"""Helpers of the loss tests: small losses and batches, and the names of the registry."""

import torch

from proximetry import losses
from proximetry.losses.batch import normalize
from proximetry.losses.dense import own_similarity
from proximetry.losses.form import Problem

NAMES = list(losses.LOSSES)
#: Losses with a margin in angle: the slope of their logit has a pole at cosines of ±1.
ANGULAR = {
    "adaface", "arcface", "combined_margin", "curricularface", "dynamic_margin", "elasticface",
    "magface"
}  # fmt: skip
MULTI = [name for name in NAMES if "proxies_per_class" in losses.loss_settings(name)]
#: Optimizers that update the proxies during backward, with settings.
OPTIMIZERS = [
    (losses.ProxySGD, {"lr": 0.1}),
    (losses.ProxySGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (losses.RowwiseAdam, {"lr": 0.05, "weight_decay": 0.1}),
    (losses.RowwiseAdam, {"lr": 0.05, "betas": (0.0, 0.99)}),
]


def make(name, classes=7, dim=5, k=None, seed=0, **settings):
    """Return a loss without random margins, with k proxies per class if it supports several."""
    torch.manual_seed(seed)
    if name == "elasticface":
        settings = {"deviation": 0.0} | settings
    if k is not None and name in MULTI:
        settings["proxies_per_class"] = k
    return losses.create(name, classes, dim, **settings)


def batch(size=9, classes=7, dim=5, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator, dtype=dtype)
    return x, torch.randint(0, classes, (size,), generator=generator)


def prepared(x, y):
    """Return the normalized batch that the loss passes to its methods."""
    return normalize(x, y, None, x.dtype)


def of_lengths(length, y=None):
    """Return a batch with these lengths and labels, for the logits."""
    length = torch.as_tensor(length, dtype=torch.float64)
    y = torch.zeros(len(length), dtype=torch.long) if y is None else y
    return losses.Batch(length, length, y, torch.ones_like(length), torch.zeros_like(length))


def problem(loss, x, proxies, y):
    """Return the problem that the loss passes to its engine."""
    own = own_similarity(x, proxies, y, loss.form, loss.gamma)
    batch = prepared(x, y)._replace(own=own)
    scale, offset = loss.negative_logit(batch)
    if loss.form.by != "class":
        limit, value = loss.adjust_arguments(batch)
        common = x, proxies, y, loss.form, loss.gamma, scale, offset
        return Problem(*common, limit=limit, value=value)
    present = x.new_zeros(len(proxies)).index_fill(0, y, 1.0)
    weight = loss.negative_weight(len(proxies), lambda: (present, present.sum()))
    return Problem(x, proxies, y, loss.form, loss.gamma, scale, offset, weight)


def value_and_gradients(loss, x, y):
    x = x.detach().clone().requires_grad_()
    loss.zero_grad(set_to_none=True)
    value = loss(x, y)
    value.backward()
    return value.detach(), x.grad, loss.proxies.weight.grad
