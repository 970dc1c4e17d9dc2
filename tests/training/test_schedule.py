"""Learning rates over the epochs."""

import math

import pytest
import torch

from proximetry.recipe.schema import ScheduleConfig
from proximetry.training.schedule import LearningRates


def rates(epochs=10, **settings):
    return LearningRates(ScheduleConfig(**settings), epochs, [1.0, 100.0])


def test_schedule_formulas():
    assert [rates(name="constant").factor(e) for e in (0, 9)] == [1.0, 1.0]
    step = rates(name="step", every=3, factor=0.5)
    assert [step.factor(e) for e in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    miles = rates(name="milestones", at=(2, 5), factor=0.1)
    assert [miles.factor(e) for e in (1, 2, 4, 5)] == [1, 0.1, 0.1, pytest.approx(0.01)]
    cosine = rates(name="cosine", freeze_backbone_epochs=2)
    assert cosine.factor(0) == cosine.factor(2) == 1.0
    assert cosine.factor(6) == pytest.approx(0.5)
    assert cosine.factor(10) == pytest.approx(0.0)


def test_warmup_multiplies_the_schedule():
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=1.0)
    mine = LearningRates(ScheduleConfig(name="step", every=1, warmup_steps=4), 3, [0.8])
    found = []
    for step in range(6):
        mine.apply(optimizer, epoch=step // 3, step=step)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.4, 0.4, 0.4])


def test_step_equals_torch():
    parameter = torch.nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([parameter], lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(reference, 4, 0.7)
    ours = torch.optim.SGD([{"params": [parameter], "lr": 0.3}])
    mine = LearningRates(ScheduleConfig(name="step", every=4, factor=0.7), 20, [0.3])
    for epoch in range(20):
        mine.apply(ours, epoch, step=epoch)
        assert ours.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()


def test_plateau_equals_torch():
    values = [0.1, 0.2, 0.2, 0.19, 0.18, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    parameter = torch.nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        reference, "max", factor=0.1, patience=2, threshold=0.0
    )
    mine = rates(name="plateau", factor=0.1, patience=2)
    for epoch, value in enumerate(values):
        scheduler.step(value)
        mine.observe(value > max(values[:epoch], default=-1), epoch)
        assert mine.factor(epoch + 1) == pytest.approx(reference.param_groups[0]["lr"])
    assert len(mine.drops) == round(-math.log10(reference.param_groups[0]["lr"]))
