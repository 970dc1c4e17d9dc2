"""Regularizers against their formulas: values and gradients."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proximetry._util.tensors import nearest_other_class
from proximetry.losses import regularizers
from proximetry.losses.dense import intra_class_distance
from proximetry.losses.regularizers import (
    AngularCenterLoss,
    CenterLoss,
    ExclusiveRegularizer,
    IntraClassRegularizer,
    QuantizationLoss,
)
from tests.losses import reference


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(2, 6), st.integers(0, 1000))
def test_intra_class_term_equals_equation_3(classes, k, dim, seed):
    w = draw(classes, k, dim, seed=seed)
    value = intra_class_distance(w)
    assert value.item() == pytest.approx(reference.intra_class(w.numpy()), rel=1e-9)


def test_intra_class_gradcheck_and_backward_twice():
    w = draw(4, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(intra_class_distance, (w,))
    assert torch.autograd.gradgradcheck(intra_class_distance, (w,))
    value = intra_class_distance(w) * 3.0
    (first,) = torch.autograd.grad(value, w, retain_graph=True)
    (second,) = torch.autograd.grad(value, w)
    torch.testing.assert_close(first, second)


def exclusive(w):
    """Zhao et al. 2019: (1/C) Σ_i max_{j≠i} cos, over proxies of other classes."""
    C, K, _ = w.shape
    flat = reference.unit(w).reshape(C * K, -1)
    cosine = flat @ flat.T
    owner = np.arange(C * K) // K
    cosine[owner[:, None] == owner] = -np.inf
    return cosine.max(1).mean()


@pytest.mark.parametrize("block", [1, 3, 8, None])
@given(st.integers(2, 15), st.integers(1, 3), st.integers(2, 6), st.integers(0, 1000))
def test_exclusive_term_equals_regularface(block, classes, k, dim, seed):
    w = draw(classes, k, dim, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            regularizers, "nearest_other_class", partial(nearest_other_class, block=block)
        )
        value = ExclusiveRegularizer(2.0)(w)
    assert value.item() == pytest.approx(2.0 * exclusive(w.numpy()), rel=1e-9)


@pytest.mark.parametrize("entries", [2**20, 16])
@pytest.mark.parametrize("shape", [(9, 2, 4), (9, 4)])
def test_exclusive_gradient_reaches_both_members_of_a_pair(shape, entries, monkeypatch):
    monkeypatch.setattr(regularizers, "BLOCK_ENTRIES", entries)
    assert torch.autograd.gradcheck(ExclusiveRegularizer(), (draw(*shape).requires_grad_(),))


@pytest.mark.parametrize(
    ("term", "w", "expected"),
    [
        (IntraClassRegularizer(1.0), torch.ones(3, 4, 5), np.sqrt(1e-5) / 2),
        (ExclusiveRegularizer(), torch.ones(6, 1, 3), 1.0),
        (ExclusiveRegularizer(), torch.zeros(3, 1, 3), 0.0),
        (ExclusiveRegularizer(), torch.ones(1, 2, 3), 0.0),
    ],
)
def test_equal_zero_and_single_proxies_have_finite_gradients(term, w, expected):
    w.requires_grad_()
    value = term(w)
    value.backward()
    assert value.item() == pytest.approx(expected, rel=0.05)
    assert torch.isfinite(w.grad).all()
    assert expected != 0 or (w.grad == 0).all()


@pytest.mark.parametrize("term", [IntraClassRegularizer(), ExclusiveRegularizer()])
def test_terms_are_invariant_to_proxy_length_and_propagate_nan(term):
    w = draw(6, 2, 5).float()
    expected = term(w).item()
    for scale in (1e-10, 1e-5, 1e5, 1e15):
        scaled = (w * scale).requires_grad_()
        value = term(scaled)
        value.backward()
        assert value.item() == pytest.approx(expected, rel=1e-5)
        assert torch.isfinite(scaled.grad).all()
    for bad in (torch.nan, torch.inf):
        for row in range(6):
            broken = w.clone()
            broken[row, 1, 2] = bad
            assert term(broken).isnan()


def test_center_loss_equals_manual_computation():
    term = CenterLoss(3, 2, weight=0.5, rate=0.5)
    x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]], requires_grad=True)
    y = torch.tensor([0, 0, 1])
    value = term(x, y)
    assert value.item() == pytest.approx(0.5 * 0.5 * (1 + 9 + 4) / 3)
    value.backward()
    torch.testing.assert_close(x.grad, 0.5 * x.detach() / 3)
    # c ← c − rate · Σ(c − x) / (1 + n): (1 + 3) / 3 / 2 and 2 / 2 / 2
    torch.testing.assert_close(term.centers, torch.tensor([[2 / 3, 0.0], [0.0, 0.5], [0.0, 0.0]]))
    term.eval()
    before = term.centers.clone()
    term(x, y)
    assert torch.equal(term.centers, before)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 5), st.integers(0, 1000))
def test_angular_center_loss_equals_its_formula(classes, k, dim, seed):
    w, x = draw(classes, k, dim, seed=seed), draw(7, dim, seed=seed + 1)
    y = torch.arange(7) % classes
    value = AngularCenterLoss(2.0)(x, y, w)
    cosines = np.einsum("bd,bkd->bk", reference.unit(x.numpy()), reference.unit(w.numpy()[y]))
    assert value.item() == pytest.approx(2.0 * np.mean(1 - cosines.max(1)), rel=1e-9)


def test_angular_center_loss_gradient_reaches_embedding_and_own_proxy():
    w, x = draw(4, 3, seed=1).requires_grad_(), draw(5, 3).requires_grad_()
    y = torch.tensor([0, 1, 1, 0, 1])
    term = AngularCenterLoss(0.5)
    assert torch.autograd.gradcheck(lambda x, w: term(x, y, w), (x, w))
    term(x, y, w).backward()
    assert (w.grad[2:] == 0).all()
    assert (w.grad[:2] != 0).any(1).all()
    assert torch.isfinite(x.grad).all()
    assert term(torch.full((1, 3), torch.nan), [0], w).isnan()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AngularCenterLoss(-1.0), "weight .* got -1.0"),
        (lambda: AngularCenterLoss()(torch.zeros(1, 2), [3], torch.ones(2, 2)), "label 3"),
        (lambda: AngularCenterLoss()(torch.zeros(1, 3), [0], torch.ones(2, 2)), "3 dimensions"),
        (lambda: IntraClassRegularizer(-1.0), "weight .* got -1.0"),
        (lambda: ExclusiveRegularizer(float("nan")), "weight .* got nan"),
        (lambda: ExclusiveRegularizer()(torch.zeros(3)), r"got \[3\]"),
        (lambda: IntraClassRegularizer()(torch.zeros(3)), r"got \[3\]"),
        (lambda: CenterLoss(0, 2), "num_classes .* got 0"),
        (lambda: CenterLoss(2, 2, rate=0.0), "rate .* got 0.0"),
        (lambda: CenterLoss(2, 2)(torch.zeros(1, 2), torch.tensor([2])), "label 2"),
        (lambda: CenterLoss(2, 2)(torch.zeros(1, 3), torch.tensor([1])), "3 dimensions"),
    ],
)
def test_regularizers_reject_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("entries", [1, 2**20])
@pytest.mark.parametrize("term", [IntraClassRegularizer(), ExclusiveRegularizer()])
def test_autocast_changes_nothing(term, entries, monkeypatch):
    monkeypatch.setattr(regularizers, "BLOCK_ENTRIES", entries)
    w = draw(6, 2, 5).float().requires_grad_()
    value = term(w)
    (gradient,) = torch.autograd.grad(value, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = term(w)
    (other,) = torch.autograd.grad(inside, w)
    assert inside.item() == value.item()
    assert torch.equal(other, gradient)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 1000))
def test_quantization_is_the_distance_to_the_code(batch, dim, seed):
    x = draw(batch, dim, seed=seed)
    total = 0.0
    for vector in x.numpy():
        code = np.where(vector > 0, 1.0, -1.0)
        length, root = np.sqrt((vector**2).sum()), np.sqrt(dim)
        total += ((vector / length - code / root) ** 2).sum() / batch
    assert QuantizationLoss(0.7)(x).item() == pytest.approx(0.7 * total, abs=1e-12)
    # Neither the length of a vector nor the precision of the network matters.
    assert QuantizationLoss(0.7)(x * 1e3).item() == pytest.approx(0.7 * total, abs=1e-12)
    half = QuantizationLoss(0.7)(x.bfloat16())
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(0.7 * total, abs=0.05)


def test_quantization_gradcheck_and_zero_gradients():
    x = draw(4, 6).requires_grad_()
    assert torch.autograd.gradcheck(QuantizationLoss(1.3), (x,))
    codes = draw(3, 8).sign().mul(5).requires_grad_()  # codes already
    value = QuantizationLoss()(codes)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(codes.grad, torch.zeros_like(codes))
    zero = torch.zeros(2, 8, requires_grad=True)
    QuantizationLoss()(zero).backward()
    torch.testing.assert_close(zero.grad, torch.zeros_like(zero))
