"""Losses by entry against binary cross-entropy over the whole array."""

import math

import pytest
import torch
import torch.nn.functional as F

from proximetry import losses
from tests.losses.cases import batch, make

ENGINES = ["dense", "streamed"]


def logits_of(loss, S, is_own):
    if isinstance(loss, losses.ProxySigmoid):
        return loss.log_scale.exp() * S + loss.bias, torch.ones_like(S)
    weights = torch.where(is_own, torch.ones_like(S), loss.negative_share)
    return loss.scale * (S - loss.margin * is_own.to(S)) - loss.bias, weights


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("proxy_sigmoid", {"initial_scale": 7.0}), ("uniface", {"scale": 9.0, "negative_share": 0.3})],
)
def test_value_and_gradients_equal_binary_cross_entropy(name, settings, engine):
    loss = make(name, engine=engine, **settings).double()
    with torch.no_grad():
        loss.bias += 0.7
    x, y = batch()
    is_own = F.one_hot(y, 7).bool()
    results = []
    for by_hand in (False, True):
        leaf = x.clone().requires_grad_()
        if by_hand:
            S = F.normalize(leaf) @ F.normalize(loss.proxies.weight[:, 0]).T
            z, weights = logits_of(loss, S, is_own)
            terms = F.binary_cross_entropy_with_logits(
                z, is_own.double(), weights, reduction="none"
            )
            value = terms.sum(1).mean()
        else:
            value = loss(leaf, y)
        results.append((value.detach(), *torch.autograd.grad(value, (leaf, *loss.parameters()))))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-13)


def test_initial_numbers():
    loss = losses.ProxySigmoid(5, 4)
    assert loss.log_scale.exp().item() == pytest.approx(10)
    assert loss.bias.item() == -10
    assert losses.UniFace(1000, 4).bias.item() == pytest.approx(math.log(10_000))


def test_bias_of_sharded_loss_on_the_meta_device_depends_on_the_classes():
    with torch.device("meta"):
        loss = losses.UniFace(1000, 4)
    assert losses.shard(loss).bias.item() == pytest.approx(math.log(10_000))


@pytest.mark.parametrize("name", ["proxy_sigmoid", "uniface"])
def test_learned_numbers_are_trained_and_resumed(name):
    x, y = batch(dtype=torch.float32)
    loss = make(name)
    optimizer = torch.optim.Adam(losses.parameter_groups(torch.nn.Linear(2, 2), loss, lr=0.1))
    before = loss.bias.item()
    loss(x, y).backward()
    optimizer.step()
    assert loss.bias.item() != before
    other = make(name, seed=4)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other(x, y), loss(x, y))


def test_form_by_entry_is_separate():
    with pytest.raises(ValueError, match="by entry must have join='separate'"):
        losses.LossForm("single", by="entry", join="softmax")
