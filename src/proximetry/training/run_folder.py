"""The folder of a run: recipe, environment, metrics, checkpoints, the embedder."""

import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from proximetry import __version__
from proximetry._util.errors import UsageError, some
from proximetry._util.files import (
    CHECKSUM,
    atomic_write,
    check_writable,
    parse_json,
    read_json,
    sealed_json,
    take_lock,
    writing,
    written_for,
)
from proximetry.models.storage import read_embedder
from proximetry.recipe.auto import keep_choices
from proximetry.recipe.loading import RecipeError, differences
from proximetry.recipe.schema import Recipe
from proximetry.training.checkpoint import CheckpointError, read_state

if TYPE_CHECKING:
    from filelock import BaseFileLock

Report = Callable[[str], None]

LOCK = "run.lock"
LOCK_SECONDS = 20.0
"""How long a run waits for another one to leave its folder."""
FIRST_STAGE = "first-stage"
"""Where the two runs of ``training.two_stages`` lie in their folder."""

REPORTS = ("report.html", "comparison.html")
"""What is written about the run that is here, if no other place is named."""

# What a run has written by the time its recipe is there.
_BEFORE_RECIPE = ("checkpoints", "environment.json", LOCK)
# What a run writes, by folder; other files there are not its own.
_OURS = {
    "": ("recipe.yaml", "environment.json", "metrics.jsonl", "results.json", *REPORTS),
    "checkpoints": ("last.safetensors", "epoch-*.safetensors", "best.safetensors"),
    "embedder": ("embedder.json", "embedder-*.safetensors"),
    "tensorboard": ("events.out.tfevents.*",),
}
_WANDB_ID = "proximetry-id"
_WANDB = (_WANDB_ID, "run-*", "offline-run-*", "latest-run", "debug*.log")
_LARGEST_RESULTS = 100_000_000
_COUNTERS = {"epoch", "batch", "step", "stale"}
_OTHERWISE = "choose another folder, or start over with --fresh"


class RunError(ValueError):
    """A run that cannot start or be resumed, and why."""


@dataclass(frozen=True)
class SavedRun:
    """A run in a folder, as `RunFolder.inspect` read it.

    Attributes:
        path: the folder.
        recipe: the recipe it was begun with.
        checkpoint: the plain state of the last checkpoint, if there is one.
        results: the results, if the run was complete.
    """

    path: Path
    recipe: Recipe
    checkpoint: dict[str, Any] | None
    results: dict[str, Any] | None

    def check(self, recipe: Recipe) -> None:
        """Reject a recipe that this run cannot be resumed with.

        Paths, runtime settings and the duration may differ.
        """
        changed = differences(self.recipe.essence(), recipe.essence())
        old, new = Path(self.recipe.model.weights), Path(recipe.model.weights)
        if old.exists() and new.exists() and not old.samefile(new):  # else it may have moved
            changed = changed or [f"model.weights {old} → {new}"]
        if changed:
            raise RunError(
                f"the run in {self.path} was started with another recipe: {', '.join(changed)}; "
                f"continue it with the same recipe, {_OTHERWISE}"
            )
        before, now = self.recipe.training.epochs, recipe.training.epochs
        if before == now:
            return
        if recipe.schedule.name == "cosine":
            raise RunError(
                f"the run in {self.path} cannot be resumed to training.epochs {now}: its cosine "
                f"schedule is laid out over {before} epochs; {_OTHERWISE}"
            )
        if self.checkpoint is None:
            raise _checkpoints_gone(self.path)
        state = self.checkpoint["state"]
        done = state["epoch"] + (state["batch"] > 0)
        if now < done:
            raise RunError(
                f"the run in {self.path} is in its epoch {done} already, past training.epochs "
                f"{now}; {_OTHERWISE}"
            )

    def is_complete(self, recipe: Recipe) -> bool:
        """Return whether the results are those at the end of this recipe."""
        if self.results is None:
            return False
        try:
            read_embedder(self.path / "embedder")
        except ValueError as error:
            raise RunError(f"{error}. {_rebuild(self.path)}") from error
        epochs, wanted = self.results["epochs"], recipe.training
        if epochs == wanted.epochs or self.checkpoint is None:
            return True
        state = self.checkpoint["state"]
        finished = state.get("finished") == wanted.epochs
        over = finished or wanted.is_over(epochs, state["stale"])
        return bool(state["epoch"] == epochs and over)


def _rebuild(path: Path) -> str:
    results = RunFolder(path).results
    return f"Delete {results} to repeat the final evaluation, or start over with --fresh."


def _checkpoints_gone(path: Path) -> RunError:
    last = RunFolder(path).last
    return RunError(f"the checkpoints of the run in {path} are gone; put {last} back, {_OTHERWISE}")


class PlaceError(RunError, UsageError):
    """A folder in which no run can be begun."""


class RunFolder:
    """Where a run writes. Only rank 0 writes; everyone may read.

    Attributes:
        recipe: the resolved recipe.
        environment: versions, seed, command, commit, device.
        metrics: one JSON object per line and epoch.
        results: what came out: metrics, protocol, selected epoch.
        embedder: the folder of the trained embedder.
        last: the newest checkpoint.
        best: that of the selected epoch so far.
        lock: held by the process that writes here.
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
        self.lock = path / LOCK
        self._held: BaseFileLock | None = None

    def of_epoch(self, epoch: int) -> Path:
        """The kept checkpoint of an epoch."""
        return self.path / "checkpoints" / f"epoch-{epoch:04d}.safetensors"

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints that are here: the last, the best, kept ones from the newest."""
        kept = self.last.parent.glob("epoch-*.safetensors")
        newest_first = sorted(kept, key=lambda path: (len(path.name), path.name), reverse=True)
        return [path for path in (self.last, self.best, *newest_first) if path.exists()]

    def begin(self, recipe: Recipe, device: torch.device) -> None:
        """Begin a run here; one that is here is removed first."""
        self._tidy()
        self.remove()
        self.last.parent.mkdir(parents=True, exist_ok=True)
        environment = json.dumps(describe_environment(recipe.training.seed, device), indent=2)
        atomic_write(self.environment, environment.encode())
        recipe.save(self.recipe)

    def resume(self, recipe: Recipe, lines: Sequence[dict[str, Any]]) -> None:
        """Resume the run here with the lines of metrics.jsonl that its checkpoint has."""
        self._tidy()
        recipe.save(self.recipe)
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if not self.metrics.exists() or self.metrics.read_bytes() != content:
            atomic_write(self.metrics, content)

    def _tidy(self) -> None:
        """Remove what a killed process of ours has left half-written."""
        for folder, names in _OURS.items():
            for path in (self.path / folder).glob(".*"):
                if any(fnmatch(written_for(path), name) for name in names):
                    path.unlink(missing_ok=True)

    def resolve(self, recipe: Recipe, resume: bool = True) -> tuple[Recipe, SavedRun | None]:
        """Validate folder and recipe; return the saved run, and the recipe without its choices.

        A value that is ``auto`` in the recipe becomes the one that the saved run has.
        """
        self.check_place()
        saved = self.inspect() if resume else None
        if saved is None:
            self._check_embedder()
            return recipe, None
        recipe = keep_choices(recipe, saved.recipe)
        saved.check(recipe)
        return recipe, saved

    def check_place(self) -> None:
        """Reject a folder that cannot be written to or holds something else."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise PlaceError(f"{there} is a file; choose another folder")
        try:
            check_writable(there / LOCK)
        except UsageError:
            raise PlaceError(f"{there} cannot be written to; choose another folder") from None
        if there != self.path or self.holds_run():
            return
        names = {path.name for path in self.path.iterdir() if not written_for(path)}
        if any(self.last.parent.glob("*")) or names.difference(_BEFORE_RECIPE):
            raise PlaceError(f"{self.path} is not empty and holds no run; choose another folder")

    def inspect(self) -> SavedRun | None:
        """Read the run in this folder; return None if there is none with a checkpoint."""
        recipe = self.read_recipe()
        if recipe is None:
            return None
        try:
            results = self.read_results() if self.results.exists() else None
        except RunError as error:
            raise RunError(f"{error}. {_rebuild(self.path)}") from error
        if self.last.exists():
            return SavedRun(self.path, recipe, self._read_last(), results)
        if results is None:
            raise _checkpoints_gone(self.path)
        return SavedRun(self.path, recipe, None, results)

    def _read_last(self) -> dict[str, Any]:
        try:
            plain = read_state(self.last)
            if "images" in plain and plain.get("state", {}).keys() >= _COUNTERS:
                return plain
            raise CheckpointError(f"{self.last} is no checkpoint of a run")
        except CheckpointError as error:
            raise RunError(f"{error}; put {self.last} back, {_OTHERWISE}") from error

    def read_recipe(self) -> Recipe | None:
        """Return the recipe of the run in this folder; None before its first checkpoint."""
        if not self.holds_run():
            return None
        try:
            recipe = Recipe.load(self.recipe)
        except RecipeError as error:
            raise RunError(f"{error}; put {self.recipe} back, {_OTHERWISE}") from error
        if self.results.exists() or self.last.exists():
            return recipe
        # Once an epoch with a checkpoint is logged, a missing checkpoint is an error.
        return recipe if self._epochs_logged() >= recipe.training.checkpoint_epochs else None

    def holds_run(self) -> bool:
        """Return whether the recipe of a run is here, and not just a file of that name."""
        return self.recipe.exists() and (self.environment.exists() or self.lock.exists())

    def _check_embedder(self) -> None:
        """Refuse to begin where the new embedder would have to be saved among other files."""
        inside = self.embedder.iterdir() if self.embedder.is_dir() else ()
        foreign = [
            path.name
            for path in inside
            if not any(fnmatch(written_for(path) or path.name, name) for name in _OURS["embedder"])
        ]
        if foreign:
            raise RunError(
                f"{self.embedder} holds other files ({some(sorted(foreign), 3)}), which are kept; "
                "move them elsewhere, or choose another folder"
            )

    def _epochs_logged(self) -> int:
        """The last epoch that metrics.jsonl tells of, whatever else is in it."""
        epochs = [0]
        with suppress(OSError):
            for text in self.metrics.read_bytes().splitlines():
                with suppress(ValueError, LookupError, TypeError):
                    epochs.append(int(parse_json(text.decode())["epoch"]))
        return max(epochs)

    def acquire(self, report: Report = lambda line: None) -> bool:
        """Lock the folder, after waiting a little for another run; return whether that is new."""
        if self._held is not None:
            return False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._held = take_lock(self.lock, LOCK_SECONDS, report)
        except TimeoutError as error:
            raise RunError(
                f"{error} is training in {self.path}; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written to ({error.strerror}); choose another folder"
            ) from error
        return True

    def is_held(self) -> bool:
        """Whether another process writes here; False on a file system without locks."""
        from filelock import FileLock, Timeout

        if not self.lock.exists():
            return False
        try:
            with FileLock(self.lock, timeout=0):
                return False
        except Timeout:
            return True
        except (OSError, NotImplementedError):
            return False

    def release(self) -> None:
        """Let others write here."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def remove(self) -> None:
        """Remove the run that is here, if any, but nothing else.

        If that is interrupted, the rest can be resumed or counts as no run: the results and
        metrics go first, then the last checkpoint, and the recipe at the end.
        """
        self.results.unlink(missing_ok=True)
        self.metrics.unlink(missing_ok=True)
        for name in REPORTS:
            (self.path / name).unlink(missing_ok=True)
        for folder, names in _OURS.items():
            if not folder:
                continue
            for file in [file for name in names for file in (self.path / folder).glob(name)]:
                file.unlink()
            with suppress(OSError):  # it is not there, or holds what others have put there
                (self.path / folder).rmdir()
        tracked = self.path / "wandb"
        for path in [path for name in _WANDB for path in tracked.glob(name)]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        with suppress(OSError):
            tracked.rmdir()
        for file in (self.environment, self.recipe):
            file.unlink(missing_ok=True)

    def wandb_id(self) -> str:
        """Return the id of this run at Weights & Biases, which a resumed run keeps."""
        file = self.path / "wandb" / _WANDB_ID
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            atomic_write(file, uuid4().hex.encode())
        return file.read_text(encoding="ascii")

    def log(self, line: dict[str, Any]) -> None:
        """Append one line of metrics."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics so far; a half-written last line of a killed run is left out."""
        if not self.metrics.exists():
            return []
        lines: list[dict[str, Any]] = []
        try:
            whole, _, _ = self.metrics.read_text(encoding="utf-8").rpartition("\n")
            for text in whole.splitlines():
                line = parse_json(text)
                line["epoch"]
                lines.append(line)
        except OSError as error:
            raise RunError(f"{self.metrics} cannot be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{self.metrics} is damaged in line {len(lines) + 1}; without {self.results.name} "
                "the same command writes both again from the checkpoint"
            ) from error
        return lines

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        atomic_write(self.results, sealed_json(results))

    def read_results(self) -> dict[str, Any]:
        """Read results.json."""
        try:
            results: dict[str, Any] = read_json(self.results, _LARGEST_RESULTS)
            del results[CHECKSUM]
        except (LookupError, TypeError):
            raise RunError(f"{self.results} is damaged: it has no checksum") from None
        except ValueError as error:
            raise RunError(str(error)) from error
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
