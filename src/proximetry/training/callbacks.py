"""Callbacks of a run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import suggest
from proximetry._util.formatting import format_value

if TYPE_CHECKING:
    from torch import Tensor

    from proximetry.training.run import Run


class Callback:
    """Called by the loop on every process; every method is optional.

    Pass callbacks to ``train(callbacks=[...])``: objects of this class, or of any other with some
    of these methods. `Run` holds the recipe, the embedder, the state and the rest.
    ``run.finish()`` ends training after the current epoch, and `train` returns the results.
    ``run.stop()`` ends the run after the current step with a checkpoint, as Ctrl-C does, and
    `train` raises `Stopped`. An exception in a callback ends the run, too: `train` raises it, and
    the same call resumes from the last checkpoint.
    """

    def on_start(self, run: "Run") -> None:
        """Before the first step; the state of a resumed run is restored."""

    def on_untrained(self, run: "Run", line: dict[str, Any]) -> None:
        """After the evaluation of the untrained embedder; ``line`` has epoch 0 and no loss."""

    def on_step_end(self, run: "Run", loss: "Tensor") -> None:
        """After an update; reading ``loss`` from a GPU waits for it."""

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """After an epoch and its evaluation; ``line`` is that of metrics.jsonl."""

    def on_stop(self, run: "Run") -> None:
        """After the last step of a run that is stopped."""

    def on_end(self, run: "Run", results: dict[str, Any]) -> None:
        """After the embedder and the results are saved."""


EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


def check_callbacks(callbacks: object) -> list[Any]:
    """Return callbacks; reject other objects, and methods that would never be called."""
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        raise TypeError(f"callbacks must be a list of callbacks, got {format_value(callbacks)}")
    checked = list(callbacks)
    for callback in checked:
        if isinstance(callback, type):
            raise TypeError(f"callback {callback.__name__} is a class: write {callback.__name__}()")
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
