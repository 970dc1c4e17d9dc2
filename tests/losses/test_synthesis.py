"""Synthetic classes (Proxy Synthesis) against the formula, in NumPy and float64."""

import numpy as np
import pytest
import torch

from proximetry import losses
from proximetry.losses.synthesis import ALPHA
from tests.losses import reference
from tests.losses.cases import NAMES, batch, make, value_and_gradients

UNSUPPORTED = {"dynamic_margin", "mpa", "mpa_ap", "mpa_dw", "soft_triple"}
SUPPORTED = [name for name in NAMES if name not in UNSUPPORTED]


def enlarged(x, w, y, share, seed):
    """Return a batch and proxies with synthetic samples and classes, one by one."""
    torch.manual_seed(seed)
    order = torch.randperm(len(x)).tolist()
    factor = torch.distributions.Beta(ALPHA, ALPHA).sample().item()
    xs, ws, ys = [*x], [*w], [*y]
    for n, i in enumerate(order):
        j = order[n - 1]
        if y[i] == y[j] or len(xs) - len(x) == round(share * len(x)):
            continue
        mixed = factor * reference.unit(x[i]) + (1 - factor) * reference.unit(x[j])
        length = factor * np.linalg.norm(x[i]) + (1 - factor) * np.linalg.norm(x[j])
        xs.append(length * reference.unit(mixed))
        proxies = factor * reference.unit(w[y[i]]) + (1 - factor) * reference.unit(w[y[j]])
        ys.append(len(ws))
        ws.append(proxies)
    return np.stack(xs), np.stack(ws), np.array(ys)


@pytest.mark.parametrize("engine", ["dense", "streamed"])
@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize(
    "name", ["norm_softmax", "arcface", "proxy_anchor", "proxy_nca", "proxy_sigmoid"]
)
def test_value_equals_the_formula(name, share, engine):
    loss = make(name, engine=engine, synthesis=share).double()
    for seed in range(3):
        x, y = batch(seed=seed)
        arrays = enlarged(
            x.numpy(), loss.proxies.weight.detach().numpy(), y.numpy(), share, seed + 10
        )
        assert len(arrays[0]) > len(x)
        torch.manual_seed(seed + 10)
        expected = getattr(reference, name)(*arrays)
        assert loss(x, y).item() == pytest.approx(expected, rel=1e-10)
        loss.eval()
        expected = getattr(reference, name)(x.numpy(), arrays[1][:7], y.numpy())
        assert loss(x, y).item() == pytest.approx(expected, rel=1e-10)
        loss.train()


def test_label_smoothing_counts_the_synthetic_classes():
    loss = make("norm_softmax", synthesis=1.0, label_smoothing=0.2).double()
    x, y = batch()
    xs, ws, ys = map(
        torch.from_numpy,
        enlarged(x.numpy(), loss.proxies.weight.detach().numpy(), y.numpy(), 1.0, 3),
    )
    xs, ws = (torch.nn.functional.normalize(v, dim=-1) for v in (xs, ws[:, 0]))
    torch.manual_seed(3)
    expected = torch.nn.functional.cross_entropy(20 * xs @ ws.T, ys, label_smoothing=0.2)
    torch.testing.assert_close(loss(x, y), expected)


@pytest.mark.parametrize("name", ["norm_softmax", "arcface", "proxy_anchor", "magface"])
def test_gradcheck(name):
    loss = make(name, classes=4, dim=3, synthesis=1.0).double()
    x, y = batch(size=5, classes=4, dim=3)

    def function(x, w):
        torch.manual_seed(0)
        return torch.func.functional_call(loss, {"proxies.weight": w}, (x, y))

    w = loss.proxies.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x.requires_grad_(), w), atol=1e-6)


@pytest.mark.parametrize("name", SUPPORTED)
def test_engines_agree_and_ignored_samples_have_no_effect(name):
    x, y = batch()
    found = []
    for engine in ("dense", "streamed"):
        loss = make(name, engine=engine, synthesis=1.0).double()
        torch.manual_seed(5)
        found.append(value_and_gradients(loss, x, y))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    loss = make(name, synthesis=1.0).double()
    nan = torch.full((1, x.shape[1]), torch.nan, dtype=x.dtype)
    torch.manual_seed(5)
    value = loss(torch.cat([x, nan]), torch.cat([y, torch.tensor([-1])]))
    torch.testing.assert_close(value.detach(), found[0][0])


def test_weights_of_synthetic_samples_are_interpolated():
    """Equal weights have the value without weights; samples of weight 0 have no effect."""
    x, y = batch()
    loss = make("norm_softmax", synthesis=1.0).double()
    values = []
    for size, weights in ((9, None), (9, torch.ones(9)), (10, torch.tensor([1.0] * 9 + [0.0]))):
        torch.manual_seed(1)
        more = torch.cat([x, x[:1]])[:size], torch.cat([y, y[:1]])[:size]
        values.append(loss(*more, weights))
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(values[2], values[0])


def test_batch_of_one_class_has_no_synthetic_samples():
    x, _ = batch()
    loss, y = make("norm_softmax", synthesis=1.0).double(), torch.zeros(9, dtype=torch.long)
    value = loss(x, y)
    torch.testing.assert_close(value, loss.eval()(x, y))


def test_unsupported_losses_raise():
    x, y = batch(dtype=torch.float32)
    for loss, message in (
        (make("mpa", k=2, synthesis=0.5), "several proxies"),
        (make("cosface", k=3, synthesis=0.5), "several proxies"),
        (make("dynamic_margin", synthesis=0.5), "DynamicMargin, which needs the size"),
    ):
        with pytest.raises(ValueError, match=f"synthesis does not support {message}"):
            loss(x, y)
        loss.eval()(x, y)
    loss = make("cosface", synthesis=0.5)
    loss.proxy_optimizer = losses.ProxySGD(loss.proxies, lr=0.1)
    with pytest.raises(ValueError, match="a proxy optimizer"):
        loss(x, y)
    with pytest.raises(ValueError, match="synthesis must be between 0 and 1, got 2"):
        make("cosface", synthesis=2.0)
