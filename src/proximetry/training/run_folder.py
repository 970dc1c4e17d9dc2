"""The folder of a run: recipe, environment, metrics, checkpoints, the embedder."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import torch
from filelock import FileLock, Timeout

from proximetry import __version__
from proximetry._common import PART_SUFFIX, atomic_write, some
from proximetry.training.automatic import keep_choices
from proximetry.training.checkpoint import read_state
from proximetry.training.recipe import Recipe, Role, differences

LOCK = "run.lock"
LOCK_SECONDS = 20.0
"""How long a run waits for another one to leave its folder."""
FIRST_STAGE = "first-stage"
"""Where the two runs of ``training.two_stages`` lie in their folder."""

# What a run has written by the time its recipe is there.
_BEFORE_RECIPE = ("checkpoints", "environment.json", LOCK)
# What a run writes into folders of its own; other files there are not its own.
_OURS = {
    "checkpoints": ("last.safetensors", "best.safetensors", "epoch-*.safetensors"),
    "embedder": ("embedder.json", "embedder-*.safetensors"),
    "tensorboard": ("events.out.tfevents.*",),
}


class RunError(ValueError):
    """A run that cannot start or go on, and why."""


class RunFolder:
    """Where a run writes. Only rank 0 writes; everyone may read.

    Attributes:
        recipe: the resolved recipe.
        environment: versions, seed, command, commit, device.
        metrics: one JSON object per line and epoch.
        results: what came out: metrics, protocol, selected epoch.
        embedder: the folder of the trained embedder.
        last, best: the newest checkpoint, and that of the selected epoch so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.results = path / "results.json"
        self.embedder = path / "embedder"
        self.last = path / "checkpoints" / "last.safetensors"
        self.best = path / "checkpoints" / "best.safetensors"
        self._lock = FileLock(path / LOCK)

    def of_epoch(self, epoch: int) -> Path:
        """The kept checkpoint of an epoch."""
        return self.path / "checkpoints" / f"epoch-{epoch:04d}.safetensors"

    def begin(self, recipe: Recipe, resume: bool, device: torch.device) -> bool:
        """Begin a run here, or continue one; return whether there is a checkpoint to continue.

        A folder without a checkpoint is free: nothing was trained in it yet. Without ``resume``
        a run that is there is removed first.
        """
        begun = self.check(recipe, resume)
        for leftover in self.path.glob(f"**/.*{PART_SUFFIX}"):
            leftover.unlink(missing_ok=True)
        if begun is not None and self.last.exists():
            if begun != recipe:
                recipe.save(self.recipe)
            return True
        self.remove()
        self.last.parent.mkdir(parents=True, exist_ok=True)
        environment = json.dumps(describe_environment(recipe.training.seed, device), indent=2)
        atomic_write(self.environment, environment.encode())
        recipe.save(self.recipe)
        return False

    def check(self, recipe: Recipe, resume: bool = True) -> Recipe | None:
        """Refuse a folder that holds something else, or a run that was started differently.

        Returns the recipe of the run that is to be continued, if there is one. Where things lie,
        the pace and the end may change from then to now.
        """
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise RunError(f"{there} is a file; choose another folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise RunError(f"{there} cannot be written to; choose another folder")
        if there != self.path:
            return None
        if not self.recipe.exists():
            names = {path.name for path in self.path.iterdir() if path.suffix != PART_SUFFIX}
            if any(self.last.parent.glob("*")) or names.difference(_BEFORE_RECIPE):
                raise RunError(f"{self.path} is not empty and holds no run; choose another folder")
        elif resume and (begun := self.begun()) is not None:
            self._check_same(begun, recipe)
            return begun
        self._check_embedder()
        return None

    def _check_same(self, begun: Recipe, recipe: Recipe) -> None:
        roles: tuple[Role, ...] = get_args(Role)
        changed = differences(begun.portable(without=roles), recipe.portable(without=roles))
        other = "choose another folder, or start over with --fresh"
        if changed:
            raise RunError(
                f"the run in {self.path} was started with another recipe: {', '.join(changed)}; "
                f"continue it with the same recipe, {other}"
            )
        before, now = begun.training.epochs, recipe.training.epochs
        if before == now:
            return
        if recipe.schedule.name == "cosine":
            raise RunError(
                f"the run in {self.path} cannot go on to training.epochs {now}: its cosine "
                f"schedule is laid out over {before} epochs; {other}"
            )
        if not self.last.exists():
            raise RunError(
                f"the run in {self.path} cannot go on to training.epochs {now}: its checkpoint "
                f"{self.last} is gone; {other}"
            )
        state = read_state(self.last)["state"]
        done = state["epoch"] + (state["batch"] > 0)
        if now < done:
            raise RunError(
                f"the run in {self.path} is in its epoch {done} already, past training.epochs "
                f"{now}; {other}"
            )

    def _check_embedder(self) -> None:
        """Refuse to begin where the new embedder would have to be saved among other files."""
        ours = {path for name in _OURS["embedder"] for path in self.embedder.glob(name)}
        inside = self.embedder.iterdir() if self.embedder.is_dir() else ()
        foreign = [path.name for path in inside if path not in ours and path.suffix != PART_SUFFIX]
        if foreign:
            raise RunError(
                f"{self.embedder} holds other files ({some(sorted(foreign), 3)}), which are kept; "
                "move them elsewhere, or choose another folder"
            )

    def is_complete(self, recipe: Recipe) -> bool:
        """Whether the results that are here are those at the end of this recipe."""
        if not self.results.exists():
            return False
        epochs, wanted = self.read_results()["epochs"], recipe.training
        if epochs == wanted.epochs or not self.last.exists():
            return True
        state = read_state(self.last)["state"]
        return bool(state["epoch"] == epochs and wanted.is_over(epochs, state["stale"]))

    def begun(self) -> Recipe | None:
        """The recipe of the run that is here, unless nothing was trained yet."""
        if self.recipe.exists() and (self.last.exists() or self.results.exists()):
            return Recipe.load(self.recipe)
        return None

    def keep_choices(self, recipe: Recipe, resume: bool) -> Recipe:
        """Leave nothing to ``auto`` that was chosen when the run here was begun."""
        begun = self.begun() if resume else None
        return recipe if begun is None else keep_choices(recipe, begun)

    def acquire(self) -> None:
        """Be the only one who writes here, after waiting a little for another run to end."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise RunError(
                f"another process is training in {self.path}; wait for it, or choose another folder"
            ) from None

    def release(self) -> None:
        """Let others write here."""
        self._lock.release()

    def remove(self) -> None:
        """Remove the run that is here, if any, but nothing else.

        Whenever that is cut off, what is left can be continued, or counts as no run: the results
        and the last checkpoint go first, the recipe goes last.
        """
        self.results.unlink(missing_ok=True)
        self.last.unlink(missing_ok=True)
        for folder, names in _OURS.items():
            for file in [file for name in names for file in (self.path / folder).glob(name)]:
                file.unlink()
            with suppress(OSError):  # it is not there, or holds what others have put there
                (self.path / folder).rmdir()
        if (self.path / "wandb").is_dir():
            shutil.rmtree(self.path / "wandb")
        for file in (self.metrics, self.environment, self.recipe):
            file.unlink(missing_ok=True)

    def log(self, line: dict[str, Any]) -> None:
        """Append one line of metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics so far; a half-written last line of a killed run is left out."""
        if not self.metrics.exists():
            return []
        lines = []
        for text in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        return lines

    def forget_after(self, epochs: int) -> None:
        """Drop lines of epochs that will be trained again."""
        kept = [line for line in self.history() if line["epoch"] <= epochs]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        atomic_write(self.metrics, text.encode())

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        atomic_write(self.results, json.dumps(results, indent=2).encode())

    def read_results(self) -> dict[str, Any]:
        """Read results.json."""
        results: dict[str, Any] = json.loads(self.results.read_text(encoding="utf-8"))
        return results


def describe_environment(seed: int, device: torch.device) -> dict[str, Any]:
    """Versions, seed, command, device, state of the code: what a figure needs to be believed."""
    packages = {"proximetry": __version__}
    for name in ("torch", "torchvision", "timm", "numpy", "pillow"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """The commit of this package's sources, and whether they were changed since."""
    here = str(Path(__file__).parent)
    words = ["git", "-C", here, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    described = done.stdout.strip()
    return {"commit": described.removesuffix("-dirty"), "changed": described.endswith("-dirty")}
