"""Learning-rate schedules by epoch, with a linear warm-up by step."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proximetry.recipe.schema import ScheduleConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer


def drop_epochs(schedule: ScheduleConfig, epochs: int) -> list[int]:
    """Return the epochs after which the rates drop, if known before the run."""
    if schedule.name == "step":
        return list(range(schedule.every, epochs, schedule.every))
    return list(schedule.at) if schedule.name == "milestones" else []


@dataclass
class LearningRates:
    """Sets the learning rates of an optimizer before each step.

    ``base`` are the initial rates of the groups. For plateau, ``stale`` counts the evaluations
    since an improvement or a drop, and ``drops`` lists the epochs after which rates dropped.
    """

    schedule: ScheduleConfig
    epochs: int
    base: list[float]
    stale: int = 0
    drops: list[int] = field(default_factory=list)

    def factor(self, epoch: int) -> float:
        """Return the factor of the rates in an epoch (counted from 0)."""
        s = self.schedule
        match s.name:
            case "constant":
                return 1.0
            case "step" | "milestones":
                past = [at for at in drop_epochs(s, self.epochs) if at <= epoch]
                return float(s.factor ** len(past))
            case "plateau":
                return float(s.factor ** len(self.drops))
            case "cosine":
                frozen = s.freeze_backbone_epochs
                done = max(0, epoch - frozen) / max(1, self.epochs - frozen)
                return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def apply(self, optimizer: "Optimizer", epoch: int, step: int) -> None:
        """Set the rates for a step of an epoch (both counted from 0)."""
        factor = self.factor(epoch)
        if step < self.schedule.warmup_steps:
            factor *= (step + 1) / self.schedule.warmup_steps
        for group, rate in zip(optimizer.param_groups, self.base, strict=True):
            group["lr"] = rate * factor

    def observe(self, improved: bool, epoch: int) -> None:
        """Record whether an epoch (counted from 0) was better than any before."""
        self.stale = 0 if improved else self.stale + 1
        if self.schedule.name == "plateau" and self.stale > self.schedule.patience:
            self.drops.append(epoch + 1)
            self.stale = 0
