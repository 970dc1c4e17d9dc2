"""What is called while a run goes on."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from proximetry.training.loop import Run


class Callback:
    """Called by the loop, on every process; every method may be left out.

    Display, trackers and checkpoints are callbacks. One of your own goes to
    ``train(callbacks=[...])``. `Run` holds the recipe, the embedder, the state and the rest.
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
