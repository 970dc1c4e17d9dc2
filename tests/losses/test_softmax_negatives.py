"""Losses that adjust hard negatives, against whole arrays and autograd."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from proximetry import losses
from proximetry.losses import LossForm
from tests.losses import reference
from tests.losses.cases import batch, make

ENGINES = ["dense", "streamed"]


def arc(S, margin):
    return torch.cos(S.acos() + margin)


def curricular(S, own, margin, t):
    """As in the authors' code, for θ < π − m."""
    target = arc(own, margin)
    hard = target.unsqueeze(1) < S
    return target, torch.where(hard, S * (t + S), S)


def misclassified(S, own, target, t):
    hard = target.unsqueeze(1) < S
    return target, torch.where(hard, (t + 1) * S + t, S)


def circle(S, own, m):
    """Sun et al. 2020, section 3.1: the weights are detached."""
    positive = (1 + m - own.detach()).clamp(min=0) * (own - (1 - m))
    return positive, (S.detach() + m).clamp(min=0) * (S - m)


CASES = {
    "curricularface": ({"margin": 0.4}, lambda S, own: curricular(S, own, 0.4, 0.3)),
    "mv_softmax": ({}, lambda S, own: misclassified(S, own, own - 0.35, 0.2)),
    "mv_softmax in angle": (
        {"kind": "angle", "margin": 0.5, "t": 0.12},
        lambda S, own: misclassified(S, own, arc(own, 0.5), 0.12),
    ),
    "proxy_circle": ({"scale": 30.0, "margin": 0.3}, lambda S, own: circle(S, own, 0.3)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients(case, engine):
    settings, adjust = CASES[case]
    loss = make(case.split()[0], engine=engine, **settings).double().eval()
    if hasattr(loss, "t") and isinstance(loss.t, torch.Tensor):
        loss.t.fill_(0.3)
    x, y = batch(size=12)
    x = F.normalize(x) + 0.8 * F.normalize(loss.proxies.weight.detach()[y, 0])
    results = []
    for by_hand in (False, True):
        leaf, w = x.clone().requires_grad_(), loss.proxies.weight
        if by_hand:
            S = F.normalize(leaf) @ F.normalize(w[:, 0]).T
            own = S.gather(1, y.unsqueeze(1)).squeeze(1)
            positive, negatives = adjust(S, own)
            z = negatives.scatter(1, y.unsqueeze(1), positive.unsqueeze(1))
            value = F.cross_entropy(loss.scale * z, y)
        else:
            value = loss(leaf, y)
        results.append((value.detach(), *torch.autograd.grad(value, (leaf, w))))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["curricularface", "mv_softmax"])
def test_hard_and_easy_negatives_occur(name):
    x, y = batch()
    loss = make(name).double().eval()
    own = loss.similarities(x).gather(1, y.unsqueeze(1)).squeeze(1)
    hard = loss.similarities(x) > (loss.positive_logit(own, None) / loss.scale).unsqueeze(1)
    assert 0 < hard.double().mean() < 1


def test_curricularface_updates_its_mean_before_the_logits():
    loss = make("curricularface", momentum=0.5).double()
    mean = 0.0
    for seed in range(3):
        x, y = batch(seed=seed)
        weights = torch.arange(9.0)
        y[2] = -1
        S = loss.similarities(x).detach()
        own = S.gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1)
        kept = weights.masked_fill(y < 0, 0.0).double()
        mean += 0.5 * ((own * kept).sum() / kept.sum() - mean)
        value = loss(x, y, weights)
        assert loss.t.item() == pytest.approx(mean.item())
    remaining = (y >= 0).numpy()
    terms = [
        reference.curricularface(
            x[i : i + 1].numpy(), loss.proxies.weight.detach().numpy(), y[i : i + 1].numpy(),
            mean=mean.item(),
        )
        for i in np.flatnonzero(remaining)
    ]  # fmt: skip
    assert value.item() == pytest.approx(np.average(terms, weights=weights[y >= 0]))
    loss(x, torch.full_like(y, -1))
    assert loss.t.item() == pytest.approx(mean.item())


@pytest.mark.parametrize("engine", ENGINES)
def test_two_batches_before_backward_keep_their_state(engine):
    """The streamed engine computes the negatives again in backward."""
    batches = [batch(seed=seed) for seed in (0, 1)]
    one = make("curricularface", momentum=0.9, engine=engine).double()
    other = copy.deepcopy(one)
    sum(one(x, y) for x, y in batches).backward()
    for x, y in batches:
        other(x, y).backward()
    torch.testing.assert_close(one.proxies.weight.grad, other.proxies.weight.grad)


def test_resumed_steps_are_bit_exact():
    steps = [batch(seed=seed, dtype=torch.float32) for seed in range(4)]
    loss, resumed = make("curricularface"), make("curricularface", seed=8)
    whole = copy.deepcopy(loss)
    expected = [whole(*rows).item() for rows in steps]
    assert [loss(*rows).item() for rows in steps[:2]] == expected[:2]
    resumed.load_state_dict(loss.state_dict())
    assert [resumed(*rows).item() for rows in steps[2:]] == expected[2:]


class Squared(losses.ProxyAnchor):
    """A class-wise loss with negative logits α(S² + δ)."""

    form = LossForm("single", "class", "separate", adjust=lambda S, *_: (S * S, 2.0 * S))


@pytest.mark.parametrize("name", ["cosface", "curricularface", "sphereface2"])
def test_fused_engine_is_chosen(name, monkeypatch):
    monkeypatch.setattr("proximetry.losses.base._has_fused_engine", lambda device: True)
    large = 2**20
    assert make(name, large, 1).choose_engine(8) == "fused"
    assert Squared(large, 1).choose_engine(8) == "streamed"


@pytest.mark.parametrize("engine", ENGINES)
def test_custom_adjustment_of_a_class_wise_loss(engine):
    x, y = batch()
    torch.manual_seed(0)
    loss = Squared(7, 5, engine=engine).double()
    S = F.normalize(x) @ F.normalize(loss.proxies.weight[:, 0]).T
    is_positive = F.one_hot(y, 7).bool()
    pull = torch.exp(-32 * (S - 0.1)).where(is_positive, 0.0).sum(0).log1p()
    push = torch.exp(32 * (S * S + 0.1)).where(~is_positive, 0.0).sum(0).log1p()
    expected = pull.sum() / is_positive.any(0).sum() + push.mean()
    value = loss(x, y)
    gradients = (torch.autograd.grad(v, loss.proxies.weight)[0] for v in (value, expected))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*gradients)


def test_circle_loss_is_that_of_the_paper():
    """log(1 + Σ e^{γ α_n (S_n − Δ_n)} · e^{−γ α_p (S_p − Δ_p)}), eq. 4."""
    x, y = batch()
    loss = make("proxy_circle", scale=20.0).double()
    S = loss.similarities(x).detach()
    total = 0.0
    for i in range(len(x)):
        p, n = S[i, y[i]], torch.cat([S[i, : y[i]], S[i, y[i] + 1 :]])
        negative = torch.exp(20 * (n + 0.25).clamp(min=0) * (n - 0.25)).sum()
        total += torch.log(1 + negative * torch.exp(-20 * (1.25 - p).clamp(min=0) * (p - 0.75)))
    assert loss(x, y).item() == pytest.approx(total.item() / len(x))


@pytest.mark.parametrize("engine", ENGINES)
def test_sphereface2_equals_binary_cross_entropy(engine):
    loss = make("sphereface2", scale=12.0, exponent=2.5, engine=engine).double()
    with torch.no_grad():
        loss.bias += 0.3
    x, y = batch()
    own = F.one_hot(y, 7).to(x)
    results = []
    for by_hand in (False, True):
        leaf = x.clone().requires_grad_()
        if by_hand:
            S = F.normalize(leaf) @ F.normalize(loss.proxies.weight[:, 0]).T
            z = 12 * (2 * ((S + 1) / 2) ** 2.5 - 1 - 0.4 * (2 * own - 1)) + loss.bias
            weights = (0.7 * own + 0.3 * (1 - own)) / 12
            terms = F.binary_cross_entropy_with_logits(z, own, weights, reduction="none")
            value = terms.sum(1).mean()
        else:
            value = loss(leaf, y)
        results.append((value.detach(), *torch.autograd.grad(value, (leaf, *loss.parameters()))))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 10_000])
@pytest.mark.parametrize("scale", [5.0, 40.0, 1000.0])
def test_sphereface2_bias_balances_the_gradients_at_similarity_zero(classes, scale):
    """The formula of the authors' code solves this; written so that it does not overflow."""
    loss = losses.SphereFace2(classes, 4, scale=scale)
    b, zero = loss.starting_bias(loss._built_with), 2 * 0.5**3 - 1
    assert np.isfinite(b)
    pull = np.log(0.7) - np.logaddexp(0, scale * (zero - 0.4) + b)
    push = np.log(0.3 * max(classes - 1, 1)) - np.logaddexp(0, -scale * (zero + 0.4) - b)
    assert pull == pytest.approx(push, rel=1e-6, abs=1e-6)
    assert loss.bias.item() == pytest.approx(b)
