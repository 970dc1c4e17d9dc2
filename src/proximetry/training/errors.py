"""Errors of runs, checkpoints, run folders and ranks."""

from pathlib import Path

from proximetry._util.errors import UsageError


class RunError(ValueError):
    """A run cannot start or be resumed."""


class CheckpointError(RunError):
    """A checkpoint cannot be used."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}. Restore {path}, or start over with --fresh.")


class FolderError(RunError, UsageError):
    """A folder cannot be used for a run."""


class RankError(ConnectionError):
    """Another rank is lost or does not respond."""
