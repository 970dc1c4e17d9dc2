"""The folder of a run: recipe, environment, metrics, checkpoints, results, the embedder."""

import json
import math
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
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.files import (
    CHECKSUM,
    acquire_lock,
    atomic_write,
    check_writable,
    final_name,
    json_with_checksum,
    name_write_errors,
    parse_json,
    read_json,
    read_text,
)
from proximetry.models.storage import SECOND_STAGE, read_embedder
from proximetry.recipe.auto import keep_choices
from proximetry.recipe.loading import RecipeError, differences
from proximetry.recipe.schema import AUTO, Recipe
from proximetry.training.checkpoint import read_header
from proximetry.training.errors import CheckpointError, FolderError, RunError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = "run.lock"
IMAGES_TABLE, VECTORS_FILE = "images.parquet", "vectors.npz"
"""The images, or vectors, of an extended run."""
LOCK_SECONDS = 20.0
"""Seconds that a run waits for the lock of its folder."""
FIRST_STAGE = "first-stage"
"""The folder of the first of the two runs of ``training.two_stages``."""

# Files of a run; `remove` deletes only these, in this order. After an interrupted removal the run
# can be resumed or, once recipe.yaml is gone, the folder contains no run.
_FILES = (
    "results.json",
    "metrics.jsonl",
    "report.html",
    "comparison.html",
    "checkpoints/last.safetensors",
    "checkpoints/epoch-*.safetensors",
    "checkpoints/best.safetensors",
    "checkpoints/shard-*.safetensors",
    "embedder/embedder.json",
    "embedder/embedder-*.safetensors",
    "tensorboard/events.out.tfevents.*",
    "wandb/latest-run",
    "wandb/debug*.log",
    "wandb/run-*",
    "wandb/offline-run-*",
    "environment.json",
    IMAGES_TABLE,
    VECTORS_FILE,
    "recipe.yaml",
)
_MAX_FILE_SIZE = 100_000_000
_COUNTERS = {"epoch", "batch", "step", "stale"}
_EVALUATE_AGAIN = "Delete results.json to evaluate again, or start over with --fresh."
_REMEDY = "Choose another folder, or start over with --fresh."


def final_stage(path: Path) -> Path:
    """Return the folder of a run, or that of its second stage if it has two."""
    return path / SECOND_STAGE if (path / SECOND_STAGE).is_dir() else path


def check_out(out: Path, source: Path, name: str) -> None:
    """Reject the folder of a new run if it contains another run, which --fresh would remove."""
    if source.exists() and source.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out} is the folder of the {name}. Choose another folder.")


@dataclass(frozen=True)
class SavedRun:
    """A run in a folder: the plain values of its last checkpoint, and the results if complete."""

    path: Path
    recipe: Recipe
    checkpoint: dict[str, Any] | None
    results: dict[str, Any] | None

    def check(self, recipe: Recipe) -> None:
        """Reject a recipe that this run cannot be resumed with.

        Paths, runtime settings and the duration may differ.
        """
        changed = differences(self.recipe.computation_keys(), recipe.computation_keys())
        for key in ("model.weights", "loss.teacher"):
            old, new = (Path(attrgetter(key)(one)) for one in (self.recipe, recipe))
            if old.exists() and new.exists() and not old.samefile(new):  # else it may have moved
                changed = changed or [f"{key} {old} → {new}"]
        before, now, problem = self.recipe.training, recipe.training, ""
        extended = (before.epochs, before.max_steps) != (now.epochs, now.max_steps)
        if changed:
            problem = f"was started with a different recipe: {', '.join(changed)}"
        elif self.path.name == FIRST_STAGE and (extended or before.stop_after != now.stop_after):
            problem = "has two stages and cannot be trained longer"
        elif not extended:
            return
        elif recipe.schedule.name == "cosine":
            length = f"{before.max_steps} steps" if before.max_steps else f"{before.epochs} epochs"
            problem = f"has a cosine schedule over {length} and cannot be trained longer"
        elif self.checkpoint is None:
            problem = "has no checkpoint"
        else:
            state = self.checkpoint["state"]
            done = state["epoch"] + (state["batch"] > 0)
            if now.epochs < done:
                problem = f"is in epoch {done}, past training.epochs {now.epochs}"
            elif state["step"] > (now.max_steps or math.inf):
                problem = f"is after step {state['step']}, past training.max_steps {now.max_steps}"
        if problem:
            raise RunError(f"the run in {self.path} {problem}. {_REMEDY}")

    def is_complete(self, recipe: Recipe) -> bool:
        """Return whether the run is complete for this recipe."""
        if self.results is None:
            return False
        try:
            read_embedder(self.path / "embedder")
        except ValueError as error:
            raise RunError(f"{error}. {_EVALUATE_AGAIN}") from error
        epochs, t = self.results["epochs"], recipe.training
        if epochs == t.epochs or self.checkpoint is None:
            return True
        state = self.checkpoint["state"]
        over = self.was_finished(recipe) or t.is_over(epochs, state["stale"])
        return bool(state["epoch"] == epochs and over)

    def was_finished(self, recipe: Recipe) -> bool:
        """Return whether a limit or a callback ended the run, with the limits of this recipe."""
        state = self.checkpoint["state"] if self.checkpoint is not None else {}
        return bool(state.get("finished") == recipe.training.duration())


class RunFolder:
    """The files of a run; only rank 0 writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"  # resolved
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"  # an object per epoch
        self.results = path / "results.json"
        self.embedder = path / "embedder"
        self.last = path / "checkpoints" / "last.safetensors"
        self.best = path / "checkpoints" / "best.safetensors"  # of the selected epoch so far
        self.lock = path / LOCK
        self._lock: BaseFileLock | None = None

    def epoch_checkpoint(self, epoch: int) -> Path:
        """Return the path of the kept checkpoint of an epoch."""
        return self.path / "checkpoints" / f"epoch-{epoch:04d}.safetensors"

    def shard(self, step: int, rank: int, ranks: int) -> Path:
        """Return the path of the sharded proxies of a rank after a step."""
        return self.path / "checkpoints" / f"shard-{step:08d}-{rank}of{ranks}.safetensors"

    def checkpoints(self) -> list[Path]:
        """Return the existing checkpoints: the last, the best, kept epochs from the newest."""
        epochs = self.last.parent.glob("epoch-*.safetensors")
        newest_first = sorted(epochs, key=lambda path: (len(path.name), path.name), reverse=True)
        return [path for path in (self.last, self.best, *newest_first) if path.exists()]

    def begin(self, recipe: Recipe, device: torch.device) -> None:
        """Begin a run; remove the previous one first."""
        self._remove_partial_files()
        self.remove()
        self.last.parent.mkdir(parents=True, exist_ok=True)
        environment = json.dumps(describe_environment(recipe.training.seed, device), indent=2)
        atomic_write(self.environment, environment.encode())
        recipe.save(self.recipe)

    def resume(self, recipe: Recipe, lines: Sequence[dict[str, Any]]) -> None:
        """Resume the run with the lines of metrics.jsonl in its checkpoint."""
        self._remove_partial_files()
        recipe.save(self.recipe)
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if not self.metrics.exists() or self.metrics.read_bytes() != content:
            atomic_write(self.metrics, content)

    def _remove_partial_files(self) -> None:
        """Remove the partial files of killed processes."""
        for path in [*self.path.glob(".*"), *self.path.glob("*/.*")]:
            file = str(path.relative_to(self.path).parent / final_name(path))
            if any(fnmatch(file, name) for name in _FILES):
                path.unlink(missing_ok=True)

    def resolve(self, recipe: Recipe, resume: bool = True) -> tuple[Recipe, SavedRun | None]:
        """Validate folder and recipe; return the recipe to train and the saved run to resume.

        Values that are ``auto`` in the recipe are taken from the saved run.
        """
        self.check_folder()
        saved = self.inspect() if resume else None
        if saved is not None:
            recipe = keep_choices(recipe, saved.recipe)
            saved.check(recipe)
        return recipe, saved

    def check_folder(self) -> None:
        """Reject a folder that cannot be written to or contains something else."""
        existing = next(
            path for path in (self.path, *self.path.absolute().parents) if path.exists()
        )
        if not existing.is_dir():
            raise FolderError(f"{existing} is a file. Choose another folder.")
        try:
            check_writable(existing / LOCK)
        except UsageError:
            raise FolderError(f"{existing} is not writable. Choose another folder.") from None
        if existing != self.path or self.holds_run():
            return
        names = {path.name for path in self.path.iterdir() if not final_name(path)}
        if any(self.last.parent.glob("*")) or names - {"checkpoints", "environment.json", LOCK}:
            raise FolderError(
                f"{self.path} is not empty and contains no run. Choose another folder."
            )

    def inspect(self) -> SavedRun | None:
        """Read the run in this folder; return None if there is none with a checkpoint."""
        recipe = self.read_recipe()
        if recipe is None:
            return None
        try:
            results = self.read_results() if self.results.exists() else None
        except RunError as error:
            raise RunError(f"{error}. {_EVALUATE_AGAIN}") from error
        if not self.last.exists():
            if results is None:
                raise CheckpointError(self.last, "is missing")
            return SavedRun(self.path, recipe, None, results)
        checkpoint = read_header(self.last, verify=False)[0]["state"]
        if "images" not in checkpoint or not checkpoint.get("state", {}).keys() >= _COUNTERS:
            raise CheckpointError(self.last, "is not a checkpoint of a run")
        return SavedRun(self.path, recipe, checkpoint, results)

    def read_recipe(self) -> Recipe | None:
        """Return the recipe of the run in this folder; None before its first checkpoint."""
        if not self.holds_run():
            return None
        try:
            recipe = Recipe.load(self.recipe)
        except RecipeError as error:
            raise RunError(f"{error}. Restore {self.recipe}. {_REMEDY}") from error
        if self.results.exists() or self.last.exists():
            return recipe
        # Once an epoch with a checkpoint is logged, a missing checkpoint is an error.
        every = recipe.training.checkpoint_epochs
        logged = max((line["epoch"] for line in self.history()), default=0)
        return recipe if every != AUTO and logged >= every else None

    def holds_run(self) -> bool:
        """Return whether the folder contains a run, not just a file named recipe.yaml."""
        return self.recipe.exists() and (self.environment.exists() or self.lock.exists())

    def acquire(self, report: Callable[[str], None] = lambda line: None) -> bool:
        """Lock the folder, waiting up to `LOCK_SECONDS`; return False if this object has it."""
        if self._lock is not None:
            return False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = acquire_lock(self.lock, LOCK_SECONDS, report)
        except TimeoutError as error:
            raise RunError(
                f"{error} is training in {self.path}. Wait for it, or choose another folder."
            ) from None
        return True

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def is_locked(self) -> bool:
        """Return whether another process trains here; False on a file system without locks."""
        from filelock import FileLock, Timeout

        with suppress(OSError, NotImplementedError):
            try:
                if self.lock.exists():
                    FileLock(self.lock).acquire(timeout=0).lock.release()
            except Timeout:
                return True
        return False

    def remove(self) -> None:
        """Remove the run in this folder, and nothing else."""
        for name in _FILES:
            for path in [*self.path.glob(name)]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                if path.parent != self.path:
                    with suppress(OSError):  # other files in it
                        path.parent.rmdir()

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with name_write_errors(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl without the half-written last line of a killed run."""
        if not self.metrics.exists():
            return []
        lines: list[dict[str, Any]] = []
        try:
            complete, _, _ = read_text(self.metrics, _MAX_FILE_SIZE).rpartition("\n")
            for text in complete.splitlines():
                line = parse_json(text)
                line["epoch"]
                lines.append(line)
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{self.metrics} is damaged in line {len(lines) + 1}. Delete {self.results} and "
                "train again to restore both from the checkpoint."
            ) from error
        return lines

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        atomic_write(self.results, json_with_checksum(results))

    def read_results(self) -> dict[str, Any]:
        """Read results.json."""
        try:
            results: dict[str, Any] = read_json(self.results, _MAX_FILE_SIZE)
            del results[CHECKSUM]
        except (LookupError, TypeError):
            raise RunError(f"{self.results} is damaged: it has no checksum") from None
        except ValueError as error:
            raise RunError(str(error)) from error
        return results


def describe_environment(seed: int, device: torch.device) -> dict[str, Any]:
    """Return versions, seed, command, device and commit, and a random id of the run."""
    packages = {"proximetry": __version__}
    for name in ("torch", "torchvision", "timm", "numpy", "pillow"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    git = None
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.check_output(
            describe, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
        git = {"commit": commit.removesuffix("-dirty"), "changed": commit.endswith("-dirty")}
    return {
        "id": uuid4().hex,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "git": git,
    }
