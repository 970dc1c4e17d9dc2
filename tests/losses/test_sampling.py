"""Sampled negatives (Partial FC) and the filter of negatives above a similarity."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proximetry import losses
from proximetry.losses.sampling import choose_classes
from tests.losses import reference
from tests.losses.cases import MULTI, NAMES, batch, make, value_and_gradients

ENGINES = ["dense", "streamed"]
BY_CLASS = [name for name in NAMES if losses.LOSSES[name].form.by == "class"]
BY_ENTRY = [name for name in NAMES if losses.LOSSES[name].form.by == "entry"]
BY_SAMPLE = [name for name in NAMES if name not in BY_CLASS + BY_ENTRY]


def without_intra_class_term(loss):
    if "tau" in loss.settings():
        loss.tau = 0.0
    return loss


def every_subset(monkeypatch, present, classes, size):
    """Yield every subset of ``size`` classes with the present ones, and let torch draw it."""
    others = sorted(set(range(classes)) - set(present))
    for drawn in combinations(others, size - len(present)):
        keys = torch.zeros(classes).index_fill(0, torch.tensor(drawn), 0.5)
        monkeypatch.setattr(torch, "rand", lambda *_, keys=keys, **__: keys)
        yield sorted([*present, *drawn])


@given(
    present=st.lists(st.booleans(), min_size=2, max_size=40),
    extra=st.integers(0, 40),
    seed=st.integers(0, 10**6),
)
def test_batch_classes_are_always_chosen(present, extra, seed):
    torch.manual_seed(seed)
    mask = torch.tensor(present).double()
    size = min(int(mask.sum()) + extra, len(present)) or 1
    chosen = choose_classes(mask, size).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert set(mask.nonzero()[:, 0].tolist()) <= set(chosen)


def test_other_classes_are_chosen_uniformly():
    torch.manual_seed(0)
    present = torch.zeros(10).index_fill(0, torch.tensor([2, 7]), 1.0)
    counts = torch.zeros(10)
    for _ in range(4000):
        counts[choose_classes(present, 6)] += 1
    assert counts[2] == counts[7] == 4000
    others = counts[present == 0]
    assert (others / 4000 - 0.5).abs().max() < 0.04  # five standard deviations


CASES = {
    "plain": (None, {}),
    "weights and ignored samples": (torch.tensor([1.0, 0.5, 3.0, 2.0, 0.0]), {}),
    "absent": (None, {"negative_classes": "absent"}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("name", "case"),
    [*((n, c) for n in BY_CLASS + BY_ENTRY for c in list(CASES)[:2]), ("mpa", "absent")],
)
def test_losses_by_class_or_entry_are_unbiased(monkeypatch, name, case, reduction, engine):
    """The mean over all subsets of value and gradients is that of the full loss."""
    weights, settings = CASES[case]
    x, _ = batch(size=5, classes=9)
    y = torch.tensor([5, 8, 5, 2, 0])
    if weights is not None:
        y[2] = -1
    loss = make(name, 9, k=2, engine=engine, sampled_negatives=0.7, **settings).double()

    def measure():
        x_ = x.clone().requires_grad_()
        value = loss(x_, y, weights, reduction=reduction)
        factors = torch.linspace(-1, 2, value.numel(), dtype=x.dtype).view_as(value)
        gradients = torch.autograd.grad((value * factors).sum(), (x_, *loss.parameters()))
        return torch.cat([part.detach().flatten() for part in (value, *gradients)])

    remaining = y >= 0 if weights is None else (y >= 0) & (weights > 0)
    present = y[remaining].unique().tolist()
    loss.eval()
    expected = measure()
    loss.train()
    sampled = torch.stack([measure() for _ in every_subset(monkeypatch, present, 9, 6)])
    assert len(sampled) == math.comb(9 - len(present), 6 - len(present))
    assert (sampled - expected).abs().max() > 1e-3
    torch.testing.assert_close(sampled.mean(0), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MULTI if make(name).tau])
def test_intra_class_term_is_unbiased(monkeypatch, name):
    x, _ = batch(size=3, classes=7)
    y = torch.tensor([5, 5, 2])
    loss = make(name, 7, k=3, sampled_negatives=0.6).double()

    def term():
        """Value and gradient of the intra-class term, the difference of two losses."""
        found = []
        for tau in (0.0, 1.0):
            loss.tau = tau
            value = loss(x, y)
            (gradient,) = torch.autograd.grad(value, loss.proxies.weight)
            found.append(torch.cat([value.detach().view(1), gradient.flatten()]))
        return found[1] - found[0]

    loss.eval()
    expected = term()
    loss.train()
    terms = [term() for _ in every_subset(monkeypatch, [2, 5], 7, 4)]
    torch.testing.assert_close(torch.stack(terms).mean(0), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BY_SAMPLE)
def test_sample_wise_loss_is_the_loss_of_the_sampled_classes(monkeypatch, name, engine):
    x, _ = batch(size=4, classes=9)
    y = torch.tensor([5, 8, -1, 5])
    loss = without_intra_class_term(make(name, 9, k=2, engine=engine, sampled_negatives=0.7))
    loss.double()
    for classes in every_subset(monkeypatch, [5, 8], 9, 6):
        small = without_intra_class_term(make(name, 6, k=2, engine=engine)).double()
        with torch.no_grad():
            small.proxies.weight.copy_(loss.proxies.weight[classes])
        remaining = torch.tensor([classes.index(c) if c >= 0 else -1 for c in y.tolist()])
        for key, value in loss.state_dict().items():
            if value.ndim == 0:  # step counters and statistics
                small.state_dict()[key].copy_(value)
        got, expected = value_and_gradients(loss, x, y), value_and_gradients(small, x, remaining)
        torch.testing.assert_close(got[:2], expected[:2])
        full = torch.zeros_like(loss.proxies.weight).index_copy(
            0, torch.tensor(classes), expected[2]
        )
        torch.testing.assert_close(got[2], full)


@pytest.mark.parametrize("name", ["norm_softmax", "cosface"])
def test_label_smoothing_takes_the_mean_of_the_sampled_classes(monkeypatch, name):
    x, _ = batch(size=3, classes=7)
    y = torch.tensor([5, 5, 2])
    loss = make(name, 7, sampled_negatives=0.6, label_smoothing=0.2).double()
    z = loss.scale * loss.similarities(x).detach()
    z[range(3), y] -= loss.scale * getattr(loss, "margin", 0.0)
    for classes in every_subset(monkeypatch, [2, 5], 7, 4):
        own = z[range(3), y]
        others = (z[:, classes].sum(1) - own) / 3
        hard = z[:, classes].logsumexp(1) - own
        mean_logit = (own + 6 * others) / 7
        expected = (hard + 0.2 * (own - mean_logit)).mean()
        assert loss(x, y).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_mode_and_a_share_of_one_use_all_classes(name):
    x, y = batch(size=4, classes=30, dtype=torch.float32)
    everything, sampled = make(name, 30, k=2).eval(), make(name, 30, k=2, sampled_negatives=0.3)
    whole = make(name, 30, k=2), make(name, 30, k=2, sampled_negatives=1.0)
    state = torch.get_rng_state()
    for plain, loss in ((everything, sampled.eval()), whole):
        expected, got = (value_and_gradients(one, x, y) for one in (plain, loss))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


@pytest.mark.parametrize("name", NAMES)
def test_batch_of_nearly_all_classes_uses_all_classes(name):
    x, y = batch(size=4, classes=5, dtype=torch.float32)
    expected = value_and_gradients(make(name, 5, k=2), x, y)
    got = value_and_gradients(make(name, 5, k=2, sampled_negatives=0.1), x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_training_with_sampled_negatives_separates_the_classes(name, engine):
    torch.manual_seed(0)
    centers = torch.randn(40, 64)
    loss = make(name, 40, 64, k=2, engine=engine, sampled_negatives=0.3)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    for _ in range(150):
        y = torch.randint(0, 40, (8,))
        value = loss(centers[y] + 0.1 * torch.randn(8, 64), y)
        optimizer.zero_grad()
        value.backward()
        gradient = loss.proxies.weight.grad.flatten(1)
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()
        changed = gradient.any(1).nonzero()[:, 0].tolist()
        assert set(y.tolist()) <= set(changed)
        assert len(changed) <= 12
        optimizer.step()
    accuracy = (loss.similarities(centers).argmax(1) == torch.arange(40)).double().mean()
    assert accuracy > 0.75


@pytest.mark.parametrize("name", NAMES)
def test_sampling_does_not_synchronize_with_the_device(name):
    def fail(*_):
        raise AssertionError("on CUDA this waits")

    x, y = batch(classes=40, dtype=torch.float32)
    loss = make(name, 40, k=2, engine="dense", sampled_negatives=0.3)
    loss.check_labels = False
    with pytest.MonkeyPatch.context() as patch:
        for reading in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
            patch.setattr(torch.Tensor, reading, fail)
        loss(x.requires_grad_(), y).backward()


@pytest.mark.parametrize("name", ["mpa", "soft_triple"])
def test_sampling_compiles_as_one_graph(name):
    x, y = batch(classes=40, dtype=torch.float32)
    loss = make(name, 40, k=2, engine="dense", precision="float32", sampled_negatives=0.3)
    torch.manual_seed(5)
    expected = value_and_gradients(loss, x, y)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    got = value_and_gradients(compiled, x, y)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BY_SAMPLE + BY_ENTRY)
def test_ignored_negatives_do_not_count_in_losses_by_sample_or_entry(name, engine):
    """Each term equals the formula without the classes that are too similar."""
    x, y = batch()
    limit = 0.1
    loss = without_intra_class_term(make(name, k=2, engine=engine, ignore_above=limit))
    loss.double().eval()
    S = loss.similarities(x).detach().numpy()
    w, formula = loss.proxies.weight.detach().numpy(), getattr(reference, name)
    options = {"tau": 0.0} if "tau" in loss.settings() else {}
    if name in BY_ENTRY:
        options["bias"] = loss.bias.item()
    for i, term in enumerate(loss(x, y, reduction="none")):
        remaining = [c for c in range(7) if c == y[i] or S[i, c] <= limit]
        own = np.array([remaining.index(y[i])])
        expected = formula(x[i : i + 1].numpy(), w[remaining], own, **options)
        assert term.item() == pytest.approx(expected, rel=1e-10)
    assert (limit < S).any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BY_CLASS)
def test_ignored_negatives_do_not_count_in_class_wise_losses(name, engine):
    x, y = batch()
    loss = without_intra_class_term(make(name, k=2, engine=engine)).double()
    S = loss.similarities(x).detach().numpy()
    before = loss(x, y).item()
    loss.ignore_above = 0.1
    difference = 0.0
    for c in range(7):
        others = S[y.numpy() != c, c]
        for counted, sign in ((others <= 0.1, 1), (others <= 2.0, -1)):
            difference += sign * np.log(1 + np.exp(32 * (others[counted] + 0.1)).sum()) / 7
    assert loss(x, y).item() - before == pytest.approx(difference, rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_ignored_negatives_have_no_gradient(name, engine):
    x, y = batch(size=6, classes=7, dtype=torch.float32)
    loss = without_intra_class_term(make(name, k=2, engine=engine, ignore_above=-1.0))
    y = y % 3
    value, x_gradient, gradient = value_and_gradients(loss, x, y)
    assert torch.isfinite(value)
    assert torch.isfinite(x_gradient).all()
    assert torch.isfinite(gradient).all()
    assert (gradient[3:] == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampled_negatives": 0.0}, "sampled_negatives must be above 0 and at most 1, got 0.0"),
        ({"sampled_negatives": 1.5}, "sampled_negatives .* 1.5"),
        ({"sampled_negatives": "half"}, "sampled_negatives .* 'half'"),
        ({"sampled_negatives": None}, "sampled_negatives .* None"),
        ({"ignore_above": 1.5}, "ignore_above must be between -1 and 1, or None, got 1.5"),
        ({"ignore_above": True}, "ignore_above .* True"),
    ],
)
def test_invalid_settings_of_sampling_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        losses.check_settings("arcface", settings)
    loss = make("arcface")
    with pytest.raises(ValueError, match=message):
        loss.__setattr__(*next(iter(settings.items())))
