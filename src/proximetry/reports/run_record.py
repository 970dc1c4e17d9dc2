"""The folder of a run: recipe, environment, curves, results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError
from proximetry._util.files import read_json
from proximetry.models.storage import SECOND_STAGE
from proximetry.training import Recipe, RunFolder
from proximetry.training.run_folder import FIRST_STAGE


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder, as far as they can be read.

    Attributes:
        path: the folder.
        folder: the folder itself, or its second stage if that exists, else its first.
        recipe: as the run was started.
        environment: versions, command, device.
        history: a line per epoch.
        results: of a finished run; else empty.
        missing: missing parts of the report, each with the reason.
    """

    path: Path
    folder: RunFolder
    recipe: Recipe
    environment: dict[str, Any]
    history: list[dict[str, Any]]
    results: dict[str, Any]
    missing: list[str]

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read the folder of a run, which may be unfinished."""
        if not path.is_dir():
            raise UsageError(f"no such folder: {path}. Pass the folder of a run.")
        stages = [RunFolder(path / name) for name in ("", SECOND_STAGE, FIRST_STAGE)]
        folder = next((stage for stage in stages if stage.recipe.exists()), stages[0])
        if not folder.recipe.exists():
            raise UsageError(
                f"not a run folder: {path} has no {folder.recipe.name}. Pass the folder of a run."
            )
        recipe, history, missing = Recipe.load(folder.recipe), folder.history(), list[str]()
        environment = read_json(folder.environment, 10**6)
        results = folder.read_results() if folder.results.exists() else {}
        if not results or folder is stages[-1]:
            done = max((int(line["epoch"]) for line in history), default=0)
            first, stage = folder.path, ""
            if first.name in (FIRST_STAGE, SECOND_STAGE):
                first, stage = first.parent, f" of the {first.name.replace('-', ' ')}"
            missing.append(
                f"Results: the run is unfinished; {done} of {recipe.training.epochs} epochs{stage} "
                f"are logged. Run `train` with {first} to resume it"
            )
        return cls(path, folder, recipe, environment, history, results, missing)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name or self.path.resolve().name

    @property
    def selected(self) -> dict[str, Any]:
        """Epoch and metrics of the saved epoch; empty for an unfinished run."""
        return {**self.results.get("selected", {})}

    @property
    def selected_epoch(self) -> int | None:
        """The selected epoch; None if the run is unfinished or saved its last epoch."""
        return None if self.results.get("protocol") == "last" else self.selected.get("epoch")

    @property
    def metrics(self) -> list[str]:
        """The main metrics: the first, and MAP@R."""
        names = [score.name for score in self.recipe.evaluation.metrics.scores()]
        return list(dict.fromkeys([names[0], *(name for name in names if name == "map@r")]))

    def curve(self, *keys: str) -> list[tuple[float, float]]:
        """Return the values of a key by epoch, from the history and the results."""
        points: dict[float, float] = {}
        ends = [self.results.get(which, {}) for which in ("untrained", "last", "selected")]
        for line in [*self.history, *ends]:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, (int, float)) and abs(value) < float("inf"):
                points.setdefault(float(line["epoch"]), float(value))
        return sorted(points.items())
