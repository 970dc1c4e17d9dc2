"""Margins that depend on the sample or its class: formulas, gradients, state."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from proximetry import losses
from tests.losses import reference
from tests.losses.cases import batch, make, of_lengths, value_and_gradients

ENGINES = ["dense", "streamed"]


def independent(loss, x, y, logit):
    """Value and gradients of cross-entropy with ``logit(θ, ‖x‖)``, by autograd on whole arrays."""
    x = x.clone().requires_grad_()
    w = loss.proxies.weight.detach()[:, 0].clone().requires_grad_()
    S = F.normalize(x) @ F.normalize(w).T
    own = F.one_hot(y, len(w)).bool()
    theta, length = S[own].acos(), x.norm(dim=1)
    z = (loss.scale * S).masked_scatter(own, loss.scale * logit(theta, length))
    value = F.cross_entropy(z, y)
    return (value.detach(), *torch.autograd.grad(value, (x, w), retain_graph=True)), x, value


def near_its_class(loss, lengths, seed=1):
    """Embeddings of these lengths, at up to a radian from the proxy of their class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(len(lengths)) % loss.proxies.num_classes
    w = F.normalize(loss.proxies.weight.detach()[y, 0])
    x = w + 0.4 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
    return F.normalize(x) * torch.as_tensor(lengths, dtype=w.dtype).unsqueeze(1), y


def assert_equal_to(loss, x, y, logit, extra=None):
    expected, inside, value = independent(loss, x, y, logit)
    if extra is not None:
        value = value + extra(inside.norm(dim=1)).mean()
        w = expected[2]
        expected = (value.detach(), torch.autograd.grad(value, inside)[0], w)
    for engine in ENGINES:
        loss.engine = engine
        got = value_and_gradients(loss, x, y)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.view_as(other), other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("m1", "m2", "m3"), [(1.0, 0.3, 0.2), (0.9, 0.4, 0.15), (1.35, 0.0, 0.0)])
def test_combined_margin(m1, m2, m3):
    loss = make("combined_margin", dim=16, m1=m1, m2=m2, m3=m3).double()
    x, y = near_its_class(loss, [1.0] * 9)
    assert_equal_to(loss, x, y, lambda theta, _: torch.cos(m1 * theta + m2) - m3)


@pytest.mark.parametrize(("m1", "m2"), [(1.0, 0.3), (0.6, 0.4), (1.35, 0.1), (3.0, 0.0)])
def test_combined_margin_is_continuous_and_decreasing(m1, m2):
    loss = losses.CombinedMargin(3, 3, m1=m1, m2=m2, scale=1.0)
    theta = torch.linspace(0, torch.pi, 20001, dtype=torch.float64)
    logit = loss.positive_logit(theta.cos(), of_lengths(torch.ones_like(theta)))
    assert (logit.diff() <= 1e-12).all()
    assert logit.diff().abs().max() < 2e-3


def test_combined_margin_has_arcface_and_cosface_as_cases():
    x, y = batch()
    for name, margins in (("arcface", (1.0, 0.5, 0.0)), ("cosface", (1.0, 0.0, 0.35))):
        combined = make("combined_margin", **dict(zip(("m1", "m2", "m3"), margins, strict=True)))
        expected = value_and_gradients(make(name).double(), x, y)
        torch.testing.assert_close(value_and_gradients(combined.double(), x, y), expected)


def test_adaface():
    loss = make("adaface", dim=16, margin=0.4).double().eval()
    loss.length_mean.fill_(12.0)
    loss.length_deviation.fill_(4.0)
    x, y = near_its_class(loss, [1.0, 5.0, 9.0, 12.0, 14.0, 20.0, 50.0, 120.0])

    def logit(theta, length):
        length = length.detach().clamp(0.001, 100.0)
        z = ((length - 12.0) / (4.0 + 0.001) / 3).clamp(-1, 1)
        return torch.cos((theta - 0.4 * z).clamp(0, torch.pi)) - 0.4 * (z + 1)

    assert_equal_to(loss, x, y, logit)


def test_adaface_with_extreme_quality_is_cosface_or_has_a_negative_angle():
    """ẑ = 0 is CosFace, ẑ = −1 ArcFace."""
    x, y = batch(dtype=torch.float64)
    x = F.normalize(x) * 20.0
    for z, margin, expected in ((0.0, 0.35, "cosface"), (-1.0, 0.5, "arcface")):
        loss = make("adaface", margin=margin, seed=3).double().eval()
        loss.length_mean.fill_(20.0 if z == 0 else 100.0)
        loss.length_deviation.fill_(1.0)
        own = F.normalize(loss.proxies.weight.detach()[y, 0])
        near = F.normalize(F.normalize(x) + 2 * own) * 20.0  # θ < π − m
        got = value_and_gradients(loss, near, y)
        same = value_and_gradients(make(expected, margin=margin, seed=3).double(), near, y)
        torch.testing.assert_close(got, same)


def test_adaface_updates_its_statistics_once_per_training_step():
    loss = make("adaface", momentum=0.25).double()
    mean, deviation = 20.0, 100.0
    for seed in range(4):
        x, y = batch(seed=seed)
        x *= 10.0 ** torch.arange(9).fmod(4).unsqueeze(1)
        weights = torch.arange(9) % 3
        y[4] = -1
        x[4] = torch.nan
        weights[4] = 1
        loss(x, y, weights).backward()
        kept = torch.arange(9).repeat_interleave(weights.masked_fill(y < 0, 0))
        lengths = x[kept].norm(dim=1).clamp(0.001, 100)
        mean += 0.25 * (lengths.mean().item() - mean)
        deviation += 0.25 * (lengths.std().item() - deviation)  # unbiased, as in the code
        assert loss.length_mean.item() == pytest.approx(mean)
        assert loss.length_deviation.item() == pytest.approx(deviation)
    state = copy.deepcopy(loss.state_dict())
    loss.eval()(x, y)
    assert state["length_mean"] == loss.length_mean


@pytest.mark.parametrize("labels", [[0], [-1, -1]])
def test_adaface_statistics_of_tiny_batches(labels):
    loss = make("adaface")
    loss(torch.full((len(labels), 5), 30.0), labels)
    assert loss.length_deviation == 100.0
    expected = 20.0 if labels[0] < 0 else 0.99 * 20 + 0.01 * 30 * 5**0.5
    assert loss.length_mean.item() == pytest.approx(expected)
    loss(torch.full((3, 5), torch.nan), [0, 1, 2])
    assert loss.length_mean.item() == pytest.approx(expected)


def test_magface():
    loss = make("magface", dim=16).double()
    x, y = near_its_class(loss, [2.0, 11.0, 20.0, 50.0, 90.0, 109.0, 120.0, 300.0])

    def logit(theta, length):
        a = length.clamp(10, 110)
        return torch.cos(theta + (0.8 - 0.45) / (110 - 10) * (a - 10) + 0.45)

    def extra(length):
        a = length.clamp(10, 110)
        return 35.0 * (a / 110**2 + 1 / a)

    assert_equal_to(loss, x, y, logit, extra)


def test_magface_needs_a_range_of_lengths():
    loss = make("magface", length_min=20.0, length_max=20.0)
    with pytest.raises(ValueError, match=r"length_max must be above length_min, 20\.0; got 20\.0"):
        loss(*batch(dtype=torch.float32))


@pytest.mark.parametrize("sort_margins", [False, True])
@pytest.mark.parametrize("kind", ["angle", "cosine"])
def test_elasticface(kind, sort_margins):
    settings = {"margin": 0.35, "deviation": 0.05, "kind": kind, "sort_margins": sort_margins}
    loss = make("elasticface", dim=16, **settings).double()
    x, y = near_its_class(loss, [1.0] * 30)
    own = loss.similarities(x).gather(1, y.unsqueeze(1)).squeeze(1).detach()
    torch.manual_seed(4)
    margin = 0.35 + 0.05 * torch.randn_like(own)
    if sort_margins:
        ranks = own.argsort(descending=True).argsort()  # 0 for the easiest sample
        margin = margin.sort().values[ranks]

    def logit(theta, _):
        return torch.cos(theta) - margin if kind == "cosine" else torch.cos(theta + margin)

    expected, _, _ = independent(loss, x, y, logit)
    for loss.engine in ENGINES:
        torch.manual_seed(4)
        got = value_and_gradients(loss, x, y)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.view_as(other), other, rtol=1e-9, atol=1e-12)
    again = loss(x, y)
    assert again != loss(x, y)
    loss.eval()
    assert loss(x, y) == loss(x, y)


def test_dynamic_margin():
    counts = [1, 3, 10, 10, 100, 4000, 2]
    loss = make("dynamic_margin", dim=16).double()
    loss.set_class_counts(np.array(counts))
    x, y = near_its_class(loss, [1.0] * 9)
    n = np.array(counts, float)
    # As in the authors' code: √(1 / √n), scaled to 0.05 … 0.5.
    value = np.sqrt(1 / np.sqrt(n))
    margins = (value - value.min()) / (value.max() - value.min()) * 0.45 + 0.05
    np.testing.assert_allclose(loss.class_margins(), margins)
    margin = torch.from_numpy(margins)[y]
    assert_equal_to(loss, x, y, lambda theta, _: torch.cos(theta + margin))
    w = loss.proxies.weight.detach().numpy()
    expected = reference.dynamic_margin(x.numpy(), w, y.numpy(), counts=counts)
    assert loss(x, y).item() == pytest.approx(expected)


def test_class_counts_are_validated_and_saved():
    loss = make("dynamic_margin")
    with pytest.raises(ValueError, match=r"counts must have 7 entries, .* \[3\]"):
        loss.set_class_counts([1, 2, 3])
    loss.set_class_counts([0, 1, 2, 3, 4, 5, 6])
    assert loss.class_margins()[0] == loss.class_margins()[1] == 0.5
    other = make("dynamic_margin")
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other.class_margins(), loss.class_margins())
    make("arcface").set_class_counts([1])  # not used


@pytest.mark.parametrize(
    ("name", "settings"), [("adaface", {}), ("elasticface", {"deviation": 0.1})]
)
def test_resumed_steps_are_bit_exact(name, settings):
    steps = [batch(seed=seed, dtype=torch.float32) for seed in range(4)]
    loss = make(name, **settings)

    def run(loss, rows):
        values = []
        for seed, (x, y) in rows:
            torch.manual_seed(seed)
            values.append(loss(x, y).item())
        return values

    numbered = list(enumerate(steps))
    whole = run(copy.deepcopy(loss), numbered)
    first = run(loss, numbered[:2])
    resumed = make(name, seed=7, **settings)
    resumed.load_state_dict(loss.state_dict())
    assert first + run(resumed, numbered[2:]) == whole
