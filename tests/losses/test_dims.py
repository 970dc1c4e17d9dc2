"""Losses on a part of the dimensions: prefixes, and random ones in training."""

import pytest
import torch

from proximetry import losses
from tests.losses import reference
from tests.losses.cases import NAMES, batch, make, value_and_gradients

ENGINES = ["dense", "streamed"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_truncated_loss_equals_the_formula(name, engine):
    loss = make(name, k=2, engine=engine).double().eval()
    x, y = batch()
    w = loss.proxies.weight.detach().numpy()
    lengths = (x.shape[1] / 3) ** 0.5  # are kept on average
    expected = getattr(reference, name)(lengths * x[:, :3].numpy(), w[:, :, :3], y.numpy())
    assert loss(x, y, truncate_dim=3).item() == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(loss(x, y, truncate_dim=5), loss(x, y))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["arcface", "mpa", "proxy_sigmoid"])
def test_random_dimensions_equal_the_formula(name, engine):
    loss = make(name, k=2, engine=engine, sampled_dims=0.6).double()
    x, y = batch()
    w, chosen = loss.proxies.weight.detach().numpy(), set()
    for seed in range(4):
        torch.manual_seed(seed)
        dims = torch.randperm(5)[:3].sort().values.tolist()
        chosen.add(tuple(dims))
        torch.manual_seed(seed)
        value, dx, dw = value_and_gradients(loss, x, y)
        expected = getattr(reference, name)(x.numpy()[:, dims], w[:, :, dims], y.numpy())
        assert value.item() == pytest.approx(expected, rel=1e-10)
        unused = [d for d in range(5) if d not in dims]
        assert not dx[:, unused].any()
        assert not dw[:, :, unused].any()
        assert dx[:, dims].any()
        assert dw[:, :, dims].any()
    assert len(chosen) > 1
    whole = make(name, k=2, engine=engine).double().eval()
    torch.testing.assert_close(loss.eval()(x, y), whole(x, y))


@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple", "uniface"])
def test_gradcheck(name):
    loss = make(name, classes=4, dim=4, k=2).double()
    x, y = batch(size=5, classes=4, dim=4)

    def function(x, w):
        call = (x, y), {"truncate_dim": 2}
        return torch.func.functional_call(loss, {"proxies.weight": w}, *call)

    w = loss.proxies.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x.requires_grad_(), w), atol=1e-6)


@pytest.mark.parametrize("name", ["sphereface", "adaface", "curricularface"])
def test_truncated_loss_does_not_update_the_state(name):
    loss = make(name)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    x, y = batch(dtype=torch.float32)
    loss(x, y, truncate_dim=3)
    assert all(torch.equal(value, before[key]) for key, value in loss.state_dict().items())
    loss(x, y)
    assert any(not torch.equal(value, before[key]) for key, value in loss.state_dict().items())


def test_invalid_dimensions_raise():
    loss, (x, y) = make("arcface"), batch(dtype=torch.float32)
    for dim, message in ((6, "at most 5, got 6"), (0, "at least 1, got 0"), (2.5, "got 2.5")):
        with pytest.raises(ValueError, match=f"truncate_dim must be .*{message}"):
            loss(x, y, truncate_dim=dim)
    with pytest.raises(ValueError, match="sampled_dims must be above 0 and at most 1, got 0"):
        make("arcface", sampled_dims=0.0)
    loss.proxy_optimizer = losses.ProxySGD(loss.proxies, lr=0.1)
    with pytest.raises(ValueError, match="proxy optimizer needs all dimensions"):
        loss(x, y, truncate_dim=3)
