"""Callbacks of a run."""

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from proximetry._util.errors import closest, shown

if TYPE_CHECKING:
    from proximetry.training.loop import Run


class Callback:
    """Called by the loop, on every process; every method may be left out.

    Display and trackers are callbacks. A custom one goes to
    ``train(callbacks=[...])``, of this class or of any other that has some of the methods. `Run`
    holds the recipe, the embedder, the state and the rest. ``run.finish()`` ends training after the
    present epoch, and `train` returns the results. ``run.stop()`` ends the run after the present
    step, with a checkpoint, as Ctrl-C does: `train` raises `Stopped`. What a callback raises ends
    the run as well: `train` raises it, the last checkpoint stays, and the same call continues from
    there.
    """

    def on_start(self, run: "Run") -> None:
        """Before the first step; a continued run has its state restored."""

    def on_untrained(self, run: "Run", line: dict[str, Any]) -> None:
        """After the evaluation of the untrained embedder; ``line`` has epoch 0 and no loss."""

    def on_step_end(self, run: "Run", loss: Tensor) -> None:
        """After an update; reading ``loss`` from a GPU waits for it."""

    def on_epoch_end(self, run: "Run", line: dict[str, Any]) -> None:
        """After an epoch and its evaluation; ``line`` is what metrics.jsonl gets."""

    def on_stop(self, run: "Run") -> None:
        """After the last step of a run that was asked to stop."""

    def on_end(self, run: "Run", results: dict[str, Any]) -> None:
        """After the embedder and the results are saved."""


EVENTS = {
    name: list(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if name.startswith("on_")
}
"""The methods of a callback, and what each is called with."""


def check_callbacks(callbacks: object) -> Sequence[Any]:
    """Return callbacks; refuse what is none, and methods that would never be called."""
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        raise TypeError(f"callbacks must be a list of callbacks, got {shown(callbacks)}")
    found = list(callbacks)
    for callback in found:
        _check(callback)
    return found


def _check(callback: object) -> None:
    name = type(callback).__name__
    if isinstance(callback, type):
        raise TypeError(f"callback {callback.__name__} is a class: write {callback.__name__}()")
    methods = [
        method
        for method in dir(callback)
        if method.startswith("on_") and callable(getattr(callback, method))
    ]
    for method in methods:
        if method not in EVENTS:
            raise TypeError(
                f"callback {name} has a method {method}, which is never called"
                f"{closest(method, EVENTS)}"
            )
        given = ["run", *EVENTS[method][1:]]
        try:
            inspect.signature(getattr(callback, method)).bind(*given)
        except TypeError as error:
            raise TypeError(
                f"{method} of callback {name} is called with ({', '.join(given)}): {error}"
            ) from None
        except ValueError:  # a method without a signature, written in C
            continue
    if not methods:
        raise TypeError(f"{shown(callback)} is no callback: it has none of {', '.join(EVENTS)}")
