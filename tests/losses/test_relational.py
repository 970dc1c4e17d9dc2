"""Relational distillation against its formula in float64."""

import pytest
import torch

from proximetry.losses import RelationalLoss


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def formula(student, teacher, temperature):
    """Return mean_i KL(teacher ‖ student) of the similarities to the other samples."""
    total = 0.0
    for i in range(len(student)):
        others = [j for j in range(len(student)) if j != i]
        p, q = (torch.softmax(values[i, others] / temperature, 0) for values in (teacher, student))
        total = total + (p * (p / q).log()).sum()
    return total / len(student)


@pytest.mark.parametrize(("batch", "temperature"), [(2, 0.1), (7, 0.5)])
def test_relational_loss_equals_its_formula(batch, temperature):
    generator = torch.Generator().manual_seed(0)
    x, t = (torch.randn(batch, d, dtype=torch.float64, generator=generator) for d in (8, 3))
    x.requires_grad_()
    s, targets = unit(x) @ unit(x).T, unit(t) @ unit(t).T
    expected = 2.0 * formula(s, targets, temperature)
    loss = RelationalLoss(2.0, temperature)
    actual = loss(x, t)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(loss(x, similarities=targets), expected)
    gradients = (torch.autograd.grad(value, x)[0] for value in (actual, expected))
    torch.testing.assert_close(*gradients)
    assert torch.autograd.gradcheck(lambda value: loss(value, t), x)


def test_teacher_gets_no_gradient_and_a_perfect_student_no_loss():
    x = torch.randn(5, 4, requires_grad=True)
    teacher = torch.randn(5, 6, requires_grad=True)
    RelationalLoss()(x, teacher).backward()
    assert x.grad.abs().sum() > 0
    assert teacher.grad is None
    assert RelationalLoss()(x, 3.0 * x).item() == pytest.approx(0.0, abs=1e-6)
    assert RelationalLoss()(x[:1], teacher[:1]).item() == 0.0


def test_relational_loss_uses_float32_under_autocast():
    x, teacher = torch.randn(6, 8), torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = RelationalLoss()(x, teacher)
    torch.testing.assert_close(value, RelationalLoss()(x, teacher))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either"),
        ({"teacher": torch.zeros(3, 2), "similarities": torch.zeros(3, 3)}, "either"),
        ({"teacher": torch.zeros(2, 2)}, "batch of 3"),
        ({"similarities": torch.zeros(3, 2)}, r"\[3, 3\]"),
    ],
)
def test_invalid_teachers_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelationalLoss()(torch.randn(3, 4), **arguments)
