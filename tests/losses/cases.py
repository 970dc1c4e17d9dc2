"""What the loss tests share: one small problem per loss, and the names."""

import torch

from proximetry import losses

NAMES = list(losses.LOSSES)
SEVERAL = {"soft_triple", "mpa", "mpa_dw", "mpa_ap"}
SUBCENTRES = {"norm_softmax", "cosface", "arcface", "sphereface"}


def make(name, classes=7, dim=5, k=None, seed=0, **settings):
    """A loss in float64 with some proxies per class where it has them."""
    torch.manual_seed(seed)
    if k is not None and name in SEVERAL | SUBCENTRES:
        settings["proxies_per_class"] = k
    return losses.create(name, classes, dim, **settings)


def batch(size=9, classes=7, dim=5, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator, dtype=dtype)
    return x, torch.randint(0, classes, (size,), generator=generator)


def value_and_gradients(loss, x, y):
    x = x.detach().clone().requires_grad_()
    loss.zero_grad(set_to_none=True)
    value = loss(x, y)
    value.backward()
    return value.detach(), x.grad, loss.proxies.weight.grad
