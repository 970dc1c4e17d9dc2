"""Where the time of a run goes: start-up, training, evaluation."""

import time
from dataclasses import dataclass, field
from typing import Literal, get_args

Phase = Literal["startup", "training", "evaluation", "other"]


@dataclass
class Stopwatch:
    """Seconds by phase. Every moment belongs to one phase; `enter` begins the next.

    Start-up is loading data and weights and the first step of a network, in which kernels are
    compiled and CUDA graphs recorded.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(get_args(Phase), 0.0))
    phase: Phase = "startup"

    def __post_init__(self) -> None:
        self._since = time.monotonic()

    def enter(self, phase: Phase) -> float:
        """Begin a phase; return the seconds that the one before has lasted since it was entered."""
        now = time.monotonic()
        lasted = now - self._since
        self.seconds[self.phase] += lasted
        self.phase, self._since = phase, now
        return lasted

    def so_far(self) -> dict[str, float]:
        """Return the seconds by phase up to this moment; the present phase goes on."""
        lasted = time.monotonic() - self._since
        return {**self.seconds, self.phase: self.seconds[self.phase] + lasted}
