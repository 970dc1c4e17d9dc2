"""Callbacks of a run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import suggest
from proximetry._util.formatting import format_value

if TYPE_CHECKING:
    from torch import Tensor

    from proximetry.training.run import Run


class Callback:
    """Base class of callbacks; the loop calls its methods on every process.

    Pass callbacks to ``train(callbacks=[...])``: objects of this class, or of any other with some
    of these methods. `Run` holds the recipe, the embedder, the state and the rest.
    ``run.finish()`` ends training after the current epoch, and `train` returns the results.
    ``run.stop()`` ends the run after the current step with a checkpoint, as Ctrl-C does, and
    `train` raises `Stopped`. An exception in a callback ends the run, too: `train` raises it, and
    the same call resumes from the last checkpoint.
    """

    def on_start(self, run: "Run") -> None:
        """Handle the start, before the first step; the state of a resumed run is restored."""

    def on_untrained(self, run: "Run", line: dict[str, Any]) -> None:
        """Handle the untrained embedder's evaluation; ``line`` has epoch 0 and no loss."""

    def on_step_end(self, run: "Run", loss: "Tensor") -> None:
        """Handle the end of a step; reading ``loss`` from a GPU waits for it."""

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """Handle the end of an epoch, after its evaluation; ``line`` is that of metrics.jsonl."""

    def on_stop(self, run: "Run") -> None:
        """Handle a stop, after the last step and its checkpoint."""

    def on_end(self, run: "Run", results: dict[str, Any]) -> None:
        """Handle the end, after the embedder and the results are saved."""


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
