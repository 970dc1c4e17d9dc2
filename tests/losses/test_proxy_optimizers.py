"""Optimizers of the proxies that run during backward."""

import copy

import numpy as np
import pytest
import torch

from proximetry import losses
from proximetry.losses import streamed as streamed_module
from proximetry.losses.proxy_optimizers import ProxySGD, RowwiseAdam
from tests.losses.cases import NAMES, OPTIMIZERS, batch, make, value_and_gradients


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(streamed_module.TILE_ENTRIES, "cpu", 32)


@pytest.mark.parametrize(("rule", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_update_in_backward_equals_a_step_after_backward(name, rule, settings):
    fused, plain = (make(name, 11, 6, 2, engine=engine).double() for engine in ("auto", "dense"))
    fused.proxy_optimizer = rule(fused.proxies, **settings).double()
    step = rule(plain.proxies, **settings).double()
    for seed in range(3):
        x, y = batch(9, 11, 6, seed)
        value, grad_x, none = value_and_gradients(fused, x, y)
        expected, expected_x, gradient = value_and_gradients(plain, x, y)
        step.update(slice(0, 11), gradient)
        assert none is None
        torch.testing.assert_close((value, grad_x), (expected, expected_x), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            fused.proxies.weight, plain.proxies.weight, rtol=1e-9, atol=1e-12
        )


def test_sgd_equals_torch():
    proxies = losses.Proxies(7, 5, 2).double()
    other = copy.deepcopy(proxies)
    ours = ProxySGD(proxies, 0.1, momentum=0.8, weight_decay=0.02).double()
    theirs = torch.optim.SGD(other.parameters(), 0.1, momentum=0.8, weight_decay=0.02)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        other.weight.grad = torch.randn(7, 2, 5, generator=generator, dtype=torch.float64)
        ours.update(slice(0, 7), other.weight.grad.clone())
        theirs.step()
        torch.testing.assert_close(proxies.weight, other.weight, rtol=1e-12, atol=1e-14)


def test_rowwise_adam_equals_its_formula():
    proxies = losses.Proxies(7, 5, 2).double()
    w = proxies.weight.detach().numpy().copy()
    optimizer = RowwiseAdam(proxies, 0.1, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.3).double()
    m, v = np.zeros_like(w), np.zeros((7, 2, 1))
    for t in range(1, 4):
        g = np.random.default_rng(t).normal(size=w.shape)
        optimizer.update(slice(0, 7), torch.from_numpy(g.copy()))
        m = 0.7 * m + 0.3 * g
        v = 0.9 * v + 0.1 * (g**2).mean(-1, keepdims=True)
        update = m / (1 - 0.7**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        w = w - 0.1 * (update + 0.3 * w)
        np.testing.assert_allclose(proxies.weight.detach().numpy(), w, rtol=1e-12)


@pytest.mark.parametrize("name", ["mpa", "soft_triple"])
def test_resumed_state_gives_the_same_bits(name):
    def run(loss, seeds):
        for seed in seeds:
            value_and_gradients(loss, *batch(9, 7, 5, seed, torch.float32))

    def with_optimizer():
        loss = make(name, k=2)
        loss.proxy_optimizer = RowwiseAdam(loss.proxies, 0.1)
        return loss

    whole, first, second = (with_optimizer() for _ in range(3))
    run(whole, range(4))
    run(first, range(2))
    second.load_state_dict(first.state_dict())
    run(second, range(2, 4))
    assert torch.equal(whole.proxies.weight, second.proxies.weight)


def test_evaluation_mode_does_not_update():
    loss = make("proxy_anchor").double()
    loss.proxy_optimizer = ProxySGD(loss.proxies, 0.1).double()
    before = loss.proxies.weight.detach().clone()
    _, _, gradient = value_and_gradients(loss.eval(), *batch())
    assert gradient is not None
    assert torch.equal(loss.proxies.weight, before)
    value_and_gradients(loss.train(), *batch())
    assert not torch.equal(loss.proxies.weight, before)


def test_optimizer_of_other_proxies_raises():
    loss = make("proxy_anchor").double()
    loss.proxy_optimizer = ProxySGD(loss.proxies, 0.1).double()
    loss.proxies.grow(2, optimizer=None)
    with pytest.raises(ValueError, match="the proxies have changed"):
        loss(*batch())


def test_second_backward_raises():
    loss = make("proxy_anchor").double()
    loss.proxy_optimizer = ProxySGD(loss.proxies, 0.1).double()
    x, y = batch()
    value = loss(x.requires_grad_(), y)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_fused_engine_without_a_gpu_raises():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="needs CUDA"):
        make("proxy_anchor", engine="fused")(*batch(dtype=torch.float32))


def test_dense_engine_raises():
    loss = make("proxy_anchor", engine="dense").double()
    loss.proxy_optimizer = ProxySGD(loss.proxies, 0.1).double()
    with pytest.raises(ValueError, match="cannot update proxies"):
        loss(*batch())


def test_sampled_negatives_raise():
    loss = make("proxy_anchor", 40, sampled_negatives=0.5)
    loss.proxy_optimizer = ProxySGD(loss.proxies, 0.1)
    with pytest.raises(ValueError, match="sampled_negatives"):
        loss(*batch(dtype=torch.float32))


@pytest.mark.parametrize(
    ("rule", "settings", "name"),
    [
        (ProxySGD, {"lr": 0.0}, "lr"),
        (ProxySGD, {"lr": 0.1, "momentum": 1.0}, "momentum"),
        (RowwiseAdam, {"lr": 0.1, "betas": (0.9, 1.0)}, "betas"),
        (RowwiseAdam, {"lr": 0.1, "weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_invalid_settings_raise(rule, settings, name):
    with pytest.raises(ValueError, match=name):
        rule(losses.Proxies(3, 4), **settings)
