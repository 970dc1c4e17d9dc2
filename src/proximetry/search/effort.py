"""`Effort`: the search effort that a user chooses, and the recall measured with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from proximetry._util.errors import UsageError
from proximetry._util.types import is_integer
from proximetry.search import indexes

if TYPE_CHECKING:
    from proximetry.search.snapshot import Snapshot


class Effort(NamedTuple):
    """The arguments `nprobe`, `ef`, `refine` and `exact` of `Gallery.search`."""

    nprobe: int | None = None
    ef: int | None = None
    refine: int | None = None
    exact: bool = False

    def check(self, kinds: list[str]) -> None:
        """Raise UsageError for values that are invalid, or have no effect on these indexes."""
        chosen = {name: value for name, value in self._asdict().items() if value}
        for name in ("nprobe", "ef", "refine"):
            value = getattr(self, name)
            if value is not None and not is_integer(value):
                raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")
            if value is None or any(name in indexes.knobs(kind) for kind in kinds):
                continue
            names = " and ".join(dict.fromkeys(kinds)) or indexes.EXACT
            valid = ", ".join(dict.fromkeys(knob for kind in kinds for knob in indexes.knobs(kind)))
            raise UsageError(
                f"{name} has no effect on index {names}. "
                + (f"It has {valid}." if valid else "Every search is exact.")
            )
        if self.exact and len(chosen) > 1:
            raise UsageError(f"exact cannot be combined with {', '.join([*chosen][:-1])}")


DEFAULT_EFFORT = Effort()


def measure_recall(snapshot: Snapshot, sample: int, k: int, effort: Effort) -> float:
    """Return recall@k of a search against an exact one; see `Gallery.recall`."""
    allowed = snapshot.alive
    positions, generator = snapshot.allowed_positions(allowed), np.random.default_rng(0)
    size, k = min(sample, len(positions)), min(k + 1, len(positions))  # an image finds itself
    if k < 2:
        raise UsageError("recall needs at least two images")
    queries = snapshot.vectors(np.sort(generator.choice(positions, size, replace=False)))
    exact = snapshot.search(queries, k, allowed, Effort(exact=True)).scores
    scores = snapshot.search(queries, k, allowed, effort).scores
    return float((scores[:, 1:] >= exact[:, -1:]).mean())
