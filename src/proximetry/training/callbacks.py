"""Callbacks of a run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import suggest
from proximetry._util.formatting import format_value

if TYPE_CHECKING:
    from torch import Tensor

    from proximetry.training.run import Run


class Callback:
    """Base class of callbacks; the loop calls their methods on every process.

    Pass them to ``train(callbacks=[...])``. Any other object with some of these methods is a
    callback, too. `Run` has the recipe, the embedder and the state. ``run.finish()`` ends training
    after the current epoch, and `train` returns the results. ``run.stop()`` ends the run after the
    current step with a checkpoint, as Ctrl-C does, and `train` raises `Stopped`. `train` also
    raises exceptions of callbacks; the same call resumes from the last checkpoint.

    Examples:
        >>> class StopAtLowLoss(Callback):
        ...     def on_epoch_end(self, run, line):
        ...         if line["loss"] < 0.1:
        ...             run.finish()
    """

    def on_start(self, run: "Run") -> None:
        """Called before the first step, after the state of a resumed run is restored."""

    def on_untrained(self, run: "Run", line: dict[str, Any]) -> None:
        """Called after the untrained embedder is evaluated; ``line`` has epoch 0 and no loss."""

    def on_step_end(self, run: "Run", loss: "Tensor") -> None:
        """Called after each step; reading ``loss`` from a GPU waits for it."""

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Called after each epoch and its evaluation; ``line`` is its line of metrics.jsonl."""

    def on_stop(self, run: "Run") -> None:
        """Called when the run is stopped, after its last checkpoint."""

    def on_end(self, run: "Run", results: dict[str, Any]) -> None:
        """Called at the end, after the embedder and the results are saved."""


EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


def check_callbacks(callbacks: object) -> list[Any]:
    """Return callbacks; reject other objects, and event methods that do not exist."""
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        raise TypeError(f"callbacks must be a list of callbacks, got {format_value(callbacks)}")
    checked = list(callbacks)
    for callback in checked:
        if isinstance(callback, type):
            raise TypeError(
                f"callback {callback.__name__} is a class. Write {callback.__name__}()."
            )
        methods = [method for method in dir(callback) if method.startswith("on_")]
        if not methods:
            raise TypeError(
                f"not a callback: {format_value(callback)}. It has none of {', '.join(EVENTS)}"
            )
        for method in methods:
            if method not in EVENTS:
                name, hint = type(callback).__name__, suggest(method, EVENTS)
                raise TypeError(f"callback {name}: {method} is never called{hint}")
    return checked
