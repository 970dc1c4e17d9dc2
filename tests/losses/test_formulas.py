"""Each loss against its formula, the gradient in its paper, and finite differences."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proximetry import losses
from proximetry.losses.dense import dense, join_by_sample, pull_by_class
from proximetry.losses.streamed import streamed
from tests.losses import reference
from tests.losses.cases import NAMES, batch, make, of_lengths, prepared, problem

ENGINES = {"dense": dense, "streamed": streamed}


def formula(name):
    return getattr(reference, name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_value_equals_the_formula(name, k, engine):
    loss = make(name, k=k, engine=engine).double()
    for seed in range(5):
        x, y = batch(seed=seed)
        expected = formula(name)(x.numpy(), loss.proxies.weight.detach().numpy(), y.numpy())
        loss.eval()  # SphereFace's λ stays the same
        assert loss(x, y).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_used_and_may_change_between_steps(name):
    loss = make(name, k=3).double().eval()
    x, y = batch()
    before = loss(x, y).item()
    known = inspect.signature(formula(name)).parameters
    changes = {
        key: setting.default - 1 if type(setting.default) is int else 0.6 * setting.default + 0.05
        for key, setting in loss.settings().items()
        if key in known
    }
    if not changes:
        pytest.skip("no setting may change")
    for key, value in changes.items():
        setattr(loss, key, value)
    w = loss.proxies.weight.detach().numpy()
    expected = formula(name)(x.numpy(), w, y.numpy(), **changes)
    assert loss(x, y).item() == pytest.approx(expected, rel=1e-10)
    assert loss(x, y).item() != pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name, k, engine):
    if name == "proxy_circle":
        pytest.skip("its weights have no gradient")
    loss = make(name, classes=4, dim=3, k=k, engine=engine).double().eval()
    x, y = batch(size=5, classes=4, dim=3)

    def function(x, w):
        if name == "adaface":  # lengths have no gradient: keep them the same
            x = 5.0 * torch.nn.functional.normalize(x)
        return torch.func.functional_call(loss, {"proxies.weight": w}, (x, y))

    w = loss.proxies.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x.requires_grad_(), w), atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradcheck_of_learned_temperature(engine):
    loss = make("proxy_nca_plus_plus", engine=engine, learn_temperature=True).double()
    x, y = batch()

    def function(t):
        return torch.func.functional_call(loss, {"log_temperature": t}, (x, y))

    start = loss.log_temperature.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (start,))
    assert loss.temperature == pytest.approx(1 / 9)
    loss.temperature = 0.5
    expected = reference.proxy_nca_plus_plus(
        x.numpy(), loss.proxies.weight.detach().numpy(), y.numpy(), 0.5
    )
    assert loss(x, y).item() == pytest.approx(expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["proxy_sigmoid", "uniface", "sphereface2"])
def test_gradcheck_of_learned_numbers(name, engine):
    loss = make(name, engine=engine).double()
    x, y = batch()
    keys = [key for key, _ in loss.named_parameters() if key != "proxies.weight"]

    def function(*numbers):
        return torch.func.functional_call(loss, dict(zip(keys, numbers, strict=True)), (x, y))

    starts = [loss.get_parameter(key).detach().clone().requires_grad_() for key in keys]
    assert torch.autograd.gradcheck(function, starts)


def similarity_gradient(loss, S, y, engine):
    """∂L/∂S: with the unit vectors as proxies, the embeddings are the similarities."""
    S = S.clone().requires_grad_()
    eye = torch.eye(S.shape[1], dtype=S.dtype).unsqueeze(1)
    own, negatives, *_ = ENGINES[engine](problem(loss, S, eye, y))
    positive = loss.positive_logit(own, prepared(S, y))
    if loss.form.by == "class":
        pull = pull_by_class(positive, y, S.shape[1]).sum() / len(y.unique())
        (pull + negatives).backward()
    else:
        join_by_sample(loss.form, positive, negatives).mean().backward()
    return S.grad.numpy()


ALPHA, DELTA = 6.0, 0.1


def mpa_gradient(s, y, i, c):
    """Saeki et al. 2021, eqs. 8 and 9, which are two forms of the same."""
    if y[i] == c:
        sign, together, count = -1, y == c, len(set(y.tolist()))
    else:
        sign, together, count = 1, y != c, s.shape[1]
    z = ALPHA * (sign * s[:, c] + DELTA)
    eight = np.exp(z[i]) / (1 + np.exp(z[together]).sum())
    nine = 1 / (np.exp(-z[i]) + np.exp(z[together] - z[i]).sum())
    assert eight == pytest.approx(nine, rel=1e-12)
    return sign * ALPHA * eight / count


def mpa_dw_gradient(s, y, i, c):
    """Eq. 14. Printed: S_DR = S(x, c') − S(x, c'), which is zero; meant: S(x, c) − S(x, c')."""
    if y[i] == c:
        return -ALPHA / (np.exp(-ALPHA * (DELTA - s[i, c])) + 1) / len(s)
    others = np.arange(s.shape[1]) != y[i]
    relative = np.exp(ALPHA * (s[i, others] - s[i, c])).sum()
    return ALPHA / (np.exp(-ALPHA * (s[i, c] + DELTA)) + relative) / len(s)


def mpa_ap_gradient(s, y, i, c):
    """Eq. 18."""
    own = np.arange(s.shape[1]) == y[i]
    marked = np.where(own, DELTA - s[i], s[i] + DELTA)
    relative = np.exp(ALPHA * (marked - marked[c])).sum()
    sign = -1 if own[c] else 1  # S' falls with S for the own class
    return sign * ALPHA / (np.exp(-ALPHA * marked[c]) + relative) / len(s)


def soft_triple_gradient(s, y, i, c):
    """Eq. 5, printed with both signs wrong: −λ(1 − p_y) for the own class, λ p_c for the others."""
    own = np.arange(s.shape[1]) == y[i]
    z = np.exp(ALPHA * (s[i] - DELTA * own))
    return ALPHA * (z[c] / z.sum() - own[c]) / len(s)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "equation"),
    [
        ("mpa", mpa_gradient),
        ("mpa_dw", mpa_dw_gradient),
        ("mpa_ap", mpa_ap_gradient),
        ("soft_triple", soft_triple_gradient),
    ],
)
def test_gradient_equals_the_equation_of_the_paper(name, equation, engine):
    generator = torch.Generator().manual_seed(3)
    S = torch.rand(6, 5, generator=generator, dtype=torch.float64) * 1.6 - 0.8
    y = torch.randint(0, 5, (6,), generator=generator)
    scale = "scale" if name == "soft_triple" else "alpha"
    loss = make(name, 5, margin=DELTA, **{scale: ALPHA})
    got = similarity_gradient(loss, S, y, engine)
    for i, c in np.ndindex(got.shape):
        assert got[i, c] == pytest.approx(equation(S.numpy(), y.numpy(), i, c), rel=1e-9)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
def test_mpa_ap_is_never_above_mpa_dw(size, classes, k, seed):
    x, y = batch(size, classes, seed=seed)
    dw = make("mpa_dw", classes, k=k, seed=seed).double()
    ap = make("mpa_ap", classes, k=k, seed=seed).double()
    assert ap(x, y).item() <= dw(x, y).item() * (1 + 1e-12)


def test_negative_term_over_absent_classes():
    x, y = batch(size=4)
    loss = make("mpa", k=3, tau=0.0, negative_classes="absent").double()
    S = reference.soft_similarity(x.numpy(), loss.proxies.weight.detach().numpy(), 0.1)
    absent = [c for c in range(7) if c not in y.tolist()]
    push = np.mean([np.log(1 + np.exp(32 * (S[:, c] + 0.1)).sum()) for c in absent])
    whole = make("mpa", k=3, tau=0.0).double()
    everything = np.mean(
        [np.log(1 + np.exp(32 * (S[y.numpy() != c, c] + 0.1)).sum()) for c in range(7)]
    )
    difference = whole(x, y).item() - loss(x, y).item()
    assert difference == pytest.approx(everything - push, rel=1e-9)


def test_arcface_logit_is_continuous_and_decreasing():
    loss = losses.ArcFace(3, 3)
    theta = torch.linspace(0, torch.pi, 20001, dtype=torch.float64)
    logit = loss.positive_logit(theta.cos(), of_lengths(torch.ones_like(theta))) / loss.scale
    assert (logit.diff() <= 1e-12).all()
    assert logit.diff().abs().max() < 2e-3
    before = theta <= torch.pi - loss.margin
    torch.testing.assert_close(logit[before][1:], torch.cos(theta + 0.5)[before][1:])


@pytest.mark.parametrize("engine", ENGINES)
def test_arcface_is_accurate_near_its_proxy_in_float32(engine):
    """For cosines of 1 and the next ones below; another proxy is half a radian away."""
    loss = losses.ArcFace(2, 2, engine=engine)
    with torch.no_grad():
        loss.proxies.weight[:] = torch.tensor([[[1.0, 0.0]], [[0.875, 0.484375]]])
    x = torch.stack([torch.ones(40), torch.linspace(0, 0.004, 40)], 1)
    y = torch.zeros(40, dtype=torch.long)
    own, other = loss.similarities(x).detach().double().numpy().T
    assert {0, 2, 4} <= set((1 - own) * 2**24)
    expected = np.log1p(np.exp(64.0 * (other - np.cos(np.arccos(own) + 0.5))))
    got = [loss(x[i : i + 1], y[i : i + 1]).item() for i in range(40)]
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_arcface_gradient_goes_through_the_angle():
    loss = losses.ArcFace(3, 3)
    near = 1.0 - torch.arange(1, 200) * 2.0**-24
    s = torch.cat([near, torch.tensor([0.3, 1.0, 2.0]).cos()]).requires_grad_()
    loss.positive_logit(s, of_lengths(torch.ones(len(s)))).sum().backward()
    theta = np.arccos(s.detach().double().numpy())
    np.testing.assert_allclose(s.grad, 64.0 * np.sin(theta + 0.5) / np.sin(theta), rtol=1e-6)


def test_sphereface_psi_is_monotone_and_lambda_is_annealed():
    loss = losses.SphereFace(3, 3)
    theta = torch.linspace(0, torch.pi, 10001, dtype=torch.float64)
    psi = loss._psi(theta.cos())
    assert (psi.diff() <= 1e-12).all()
    expected = [reference.psi(t, 4) for t in theta.numpy()]
    np.testing.assert_allclose(psi.numpy(), expected, atol=1e-9)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    for step in (1, 2, 3):  # the authors' layer counts before it uses λ
        assert loss.annealed_lambda().item() == pytest.approx(1000 / (1 + 0.12 * step))
        assert float(loss.ramp()) == pytest.approx(5 * (1 + 0.12 * step) / 1000)
        loss(x, y)
    loss.eval()
    loss(x, y)
    assert loss.step.item() == 3
    loss.step.fill_(10**6)
    assert loss.annealed_lambda().item() == 5.0
    assert float(loss.ramp()) == 1.0
    assert losses.SphereFace(3, 3, lambda_min=0.0).ramp() == losses.CosFace(3, 3).ramp() == 1.0
