"""What the folder of a run tells: recipe, environment, curves, results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from proximetry._util.errors import UsageError
from proximetry._util.files import read_json
from proximetry.models.storage import SECOND_STAGE
from proximetry.training import Recipe, RunFolder
from proximetry.training.run_folder import FIRST_STAGE

T = TypeVar("T")
_LARGEST_ENVIRONMENT = 1_000_000


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells of it, whatever of it is there.

    Attributes:
        path: the folder as it was named.
        folder: where the run is: that folder, or the second stage in it, or till then the first.
        recipe: as the run was begun.
        environment: versions, command, device.
        history: a line per epoch.
        results: of a run that has ended; else empty.
        missing: what is not there or cannot be read, and why.
    """

    path: Path
    folder: RunFolder
    recipe: Recipe
    environment: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read the folder of a run; damaged files are listed as missing."""
        if not path.is_dir():
            raise UsageError(f"there is no folder {path}; name the folder of a run")
        folder = RunFolder(path)
        stages = [folder, RunFolder(path / SECOND_STAGE), RunFolder(path / FIRST_STAGE)]
        folder = next((stage for stage in stages if stage.recipe.exists()), folder)
        if not folder.recipe.exists():
            raise UsageError(f"{path} holds no run: there is no {folder.recipe.name} in it")
        recipe = Recipe.load(folder.recipe)
        missing: list[str] = []

        def attempt(what: str, read: Callable[[], T], otherwise: T) -> T:
            try:
                return read()
            except ValueError as error:
                missing.append(f"{what}: {error}")
                return otherwise

        environment = attempt(
            "Environment", lambda: _environment(folder.environment), dict[str, Any]()
        )
        nothing: list[dict[str, Any]] = []
        history = attempt("Curves", folder.history, nothing)
        results: dict[str, Any] = {}
        if folder.results.exists():
            results = attempt("Results", folder.read_results, results)
        if not folder.results.exists() or folder is stages[-1]:
            missing.append(_unfinished(folder, history, recipe))
        return cls(path, folder, recipe, environment, history, results, missing)

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.name or self.path.resolve().name

    @property
    def selected(self) -> dict[str, Any]:
        """Epoch and metrics of the selected epoch; empty unless the run has ended."""
        found: dict[str, Any] = self.results.get("selected", {})
        return found

    @property
    def metrics(self) -> list[str]:
        """The metrics that stand for all others: the first, and MAP@R."""
        names = [score.name for score in self.recipe.evaluation.metrics.scores()]
        return list(dict.fromkeys([names[0], *(name for name in names if name == "map@r")]))

    def curve(self, *keys: str) -> list[tuple[float, float]]:
        """The values under a key by epoch: of each line that has it, and of the results."""
        points: dict[float, float] = {}
        ends = [self.results.get(which, {}) for which in ("untrained", "last", "selected")]
        for line in [*self.history, *ends]:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, (int, float)) and abs(value) < float("inf"):
                points.setdefault(float(line["epoch"]), float(value))
        return sorted(points.items())


def _environment(file: Path) -> dict[str, Any]:
    found = read_json(file, _LARGEST_ENVIRONMENT)
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no names and values")
    return found


def _unfinished(folder: RunFolder, history: list[dict[str, Any]], recipe: Recipe) -> str:
    done = max((int(line["epoch"]) for line in history), default=0)
    whole, of_stage = folder.path, ""
    if whole.name in (FIRST_STAGE, SECOND_STAGE):
        whole, of_stage = whole.parent, f" of the {whole.name.replace('-', ' ')}"
    return (
        f"Results: the run has not ended; {done} of {recipe.training.epochs} epochs{of_stage} are "
        f"logged. It goes on when `train` is called again with {whole}"
    )
