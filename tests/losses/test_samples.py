"""Sample weights, ignored labels, reductions and label smoothing."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry import losses
from proximetry.losses import streamed as streamed_module
from tests.losses.cases import NAMES, batch, make, prepared

ENGINES = ["dense", "streamed"]
SMOOTH = [name for name in NAMES if "label_smoothing" in losses.loss_settings(name)]
BY_CLASS = [name for name in NAMES if losses.LOSSES[name].form.by == "class"]
FEW = settings(max_examples=8)  # for each loss and engine


def gradients(loss, x, y, *args, **kwargs):
    """The value, which is summed for backward, and the gradients of embeddings and parameters."""
    x = x.detach().clone().requires_grad_()
    loss.zero_grad(set_to_none=True)
    value = loss(x, y, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad, *(p.grad.clone() for p in loss.parameters())


def assert_same(got, expected):
    torch.testing.assert_close(list(got), list(expected), rtol=1e-9, atol=1e-11)


def make_varied(name, engine, classes, seed):
    """The loss in float64, with settings that change how samples count depending on the seed."""
    more = {}
    if name == "mpa" and seed % 2:
        more["negative_classes"] = "absent"
    if name in SMOOTH and seed % 3:
        more["label_smoothing"] = 0.2
    return make(name, classes, k=2, seed=seed, engine=engine, **more).double().eval()


def shapes(**more):
    return given(
        classes=st.integers(1, 9),
        entries=st.sampled_from([1, 40, 2**18]),
        seed=st.integers(0, 10**6),
        counts=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        **more,
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
@FEW
@shapes()
def test_weight_w_equals_w_samples(name, engine, classes, entries, seed, counts):
    """A sample of weight 3 is three samples, one of weight 0 or label -1 none."""
    x, y = batch(len(counts), classes, seed=seed)
    loss = make_varied(name, engine, classes, seed)
    repeats = torch.tensor(counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streamed_module.TILE_ENTRIES, "cpu", entries)
        got = gradients(loss, x, y, repeats)
        rows = torch.arange(len(counts)).repeat_interleave(repeats)
        if not len(rows):
            assert all((one == 0).all() for one in got)
            return
        expected = list(gradients(loss, x[rows], y[rows]))
        expected[1] = torch.zeros_like(x).index_add_(0, rows, expected[1])
        assert_same(got, expected)

        ignored = y.masked_fill(repeats == 0, -1)
        x[repeats == 0] = torch.nan  # ignored samples may have any value
        assert_same(gradients(loss, x, ignored, repeats.clamp(min=1)), expected)
        remaining = repeats > 0
        expected = list(gradients(loss, x[remaining], y[remaining]))
        expected[1] = torch.zeros_like(x).index_add_(0, remaining.nonzero()[:, 0], expected[1])
        assert_same(gradients(loss, x, ignored), expected)
        if name in BY_CLASS:
            return
        for reduction in ("sum", "none"):
            terms = loss(x, ignored, repeats.clamp(min=1), reduction=reduction)
            torch.testing.assert_close(terms.sum() / repeats.sum(), got[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
@FEW
@shapes()
def test_reductions_sum_and_none_equal_the_mean_times_the_size(
    name, engine, classes, entries, seed, counts
):
    x, y = batch(len(counts), classes, seed=seed)
    loss = make_varied(name, engine, classes, seed)
    size = classes if name in BY_CLASS else len(counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streamed_module.TILE_ENTRIES, "cpu", entries)
        expected = [one * size for one in gradients(loss, x, y)]
        assert_same(gradients(loss, x, y, reduction="sum"), expected)
        value, *rest = gradients(loss, x, y, reduction="none")
        assert value.shape == (size,)
        assert_same((value.sum(), *rest), expected)

        # Each term has its own gradient, independent of the other terms.
        factors = torch.randn(size, generator=torch.Generator().manual_seed(seed)).double()
        twin = make_varied(name, "dense", classes, seed)
        actual = []
        for one in (loss, twin):
            inside = x.clone().requires_grad_()
            terms = one(inside, y, reduction="none")
            target = (inside, *one.parameters())
            actual.append((terms.detach(), *torch.autograd.grad((terms * factors).sum(), target)))
        assert_same(*actual)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_unit_weights_equal_no_weights(name, engine):
    x, y = batch(dtype=torch.float32)
    loss = make(name, k=3, engine=engine).eval()
    expected = gradients(loss, x, y)
    # With weights, streamed class-wise losses subtract the maximum, which rounds differently.
    tolerance = 1e-6 if engine == "streamed" and name in BY_CLASS else 0.0
    for ones in (torch.ones(9), np.ones(9), [1] * 9, torch.ones(9).bool()):
        for got, one in zip(gradients(loss, x, y, ones), expected, strict=True):
            torch.testing.assert_close(got, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BY_CLASS)
def test_class_wise_weights_are_inside_the_logarithm(name, engine):
    x, y = batch()
    y[0], y[1] = 5, -1
    loss = make(name, k=2, engine=engine).double()
    if loss.tau:
        loss.tau = 0.0
    weights = torch.rand(9).double()
    s, remaining = loss.similarities(x).detach().numpy(), (y >= 0).numpy()
    w, present = weights.numpy() * remaining, sorted(set(y[remaining].tolist()))
    for c, term in enumerate(loss(x, y, weights, reduction="none")):
        own = (y == c).numpy()
        pull = np.log1p((w * np.exp(-32 * (s[:, c] - 0.1)))[own].sum())
        push = np.log1p((w * np.exp(32 * (s[:, c] + 0.1)))[~own].sum())
        assert term.item() == pytest.approx(7 * pull / len(present) + push)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [1e-30, 1e30])
def test_weights_of_any_size_are_finite_in_float32(name, engine, weight):
    x, y = batch(dtype=torch.float32)
    weights = torch.ones(9)
    weights[4] = weight
    wide = gradients(make(name, k=2, engine="dense").double().eval(), x.double(), y, weights)
    got = gradients(make(name, k=2, engine=engine).eval(), x, y, weights)
    for ours, theirs in zip(got, wide, strict=True):
        assert (ours.double() - theirs).abs().max() <= 2e-4 * theirs.abs().max()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_batch_of_ignored_labels_has_zero_loss_and_gradient(name, reduction, engine):
    x, y = batch(dtype=torch.float32)
    loss = make(name, k=3, engine=engine)
    for labels, weights in ((torch.full_like(y, -1), None), (y, torch.zeros(9))):
        for one in gradients(loss, x, labels, weights, reduction=reduction):
            assert (one == 0).all()


def test_center_losses_ignore_labels():
    x, y = batch(dtype=torch.float32)
    y[3] = y[5] = -1
    remaining = y >= 0
    proxies = make("proxy_anchor").proxies
    first, second = losses.CenterLoss(7, 5), losses.CenterLoss(7, 5)
    for _ in range(2):
        torch.testing.assert_close(first(x, y), second(x[remaining], y[remaining]))
    torch.testing.assert_close(first.centers, second.centers)
    angular = losses.AngularCenterLoss()
    torch.testing.assert_close(angular(x, y, proxies), angular(x[remaining], y[remaining], proxies))
    before = first.centers.clone()
    assert first(x, torch.full_like(y, -1)) == angular(x, torch.full_like(y, -1), proxies) == 0
    assert torch.equal(first.centers, before)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SMOOTH)
@FEW
@shapes(smoothing=st.sampled_from([0.1, 0.5, 1.0]))
def test_label_smoothing_equals_cross_entropy(
    name, engine, smoothing, classes, entries, seed, counts
):
    """With a margin, too: the sample's class then has another logit."""
    x, y = batch(len(counts), classes, seed=seed)
    actual = []
    for way in (engine, "by hand"):
        smooth = {} if way == "by hand" else {"label_smoothing": smoothing, "engine": engine}
        loss = make(name, classes, k=2, seed=seed, **smooth).double().eval()
        if loss.tau:
            loss.tau = 0.0
        inside = x.clone().requires_grad_()
        if way == "by hand":
            prepared_batch, S = prepared(inside, y), loss.similarities(inside)
            scale, _ = loss.negative_logit(prepared_batch)
            z = S * (scale.unsqueeze(1) if isinstance(scale, torch.Tensor) else scale)
            own = loss.positive_logit(S.gather(1, y.unsqueeze(1)).squeeze(1), prepared_batch)
            z = z.scatter(1, y.unsqueeze(1), own.unsqueeze(1))
            value = F.cross_entropy(z, y, label_smoothing=smoothing)
            penalty = loss.penalty(prepared_batch)
            value = value if penalty is None else value + penalty.mean()
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(streamed_module.TILE_ENTRIES, "cpu", entries)
                value = loss(inside, y)
        gradient = torch.autograd.grad(value, (inside, loss.proxies.weight))
        actual.append((value.detach(), *gradient))
    assert_same(*actual)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(8), r"weights.*\[8\]"),
        (torch.ones(9, 1), r"got \[9, 1\]"),
        ([1.0] * 8 + [-0.5], r"weight -0.5 \(position 8"),
        ([1.0] * 8 + [float("nan")], "weight nan"),
        ([float("inf")] * 9, "weight inf"),
        (["a"] * 9, "weights must be numbers"),
    ],
)
def test_loss_rejects_invalid_weights(weights, message):
    x, y = batch(dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        make("proxy_anchor")(x, y, weights)
