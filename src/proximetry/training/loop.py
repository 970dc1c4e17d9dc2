"""The training loop: start at `fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from proximetry.training.callbacks import Callback
from proximetry.training.checkpoint import load_checkpoint
from proximetry.training.clock import Stopwatch
from proximetry.training.data import TrainingData
from proximetry.training.distributed import World, any_rank
from proximetry.training.evaluator import Evaluated, Evaluator
from proximetry.training.recipe import Recipe
from proximetry.training.run_folder import RunError, RunFolder
from proximetry.training.schedule import LearningRates
from proximetry.training.state import TrainState
from proximetry.training.stopping import Stopped
from proximetry.training.update import Updater


@dataclass
class Run:
    """What a run consists of: the parts that the loop moves and that callbacks may look at."""

    recipe: Recipe
    folder: RunFolder
    world: World
    data: TrainingData
    updater: Updater
    evaluator: Evaluator
    rates: LearningRates
    clock: Stopwatch
    state: TrainState
    callbacks: Sequence[Callback] = ()

    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds besides the optimiser."""
        u = self.updater
        parts: dict[str, nn.Module] = {"embedder": u.embedder, "loss": u.objective}
        return parts if u.average is None else {**parts, "average": u.average}

    def is_over(self) -> bool:
        """Whether all epochs are done, or early stopping ends the run."""
        t = self.recipe.training
        stale = t.stop_after > 0 and self.state.stale >= t.stop_after
        return stale or self.state.epoch >= t.epochs

    def notify(self, event: str, *values: Any) -> None:
        """Tell every callback about an event."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)

    def check_finite(self) -> None:
        """Stop if a loss was not finite, naming the step and its images; waits for the device."""
        step = int(self.state.bad_step)
        if step < 0:
            return
        per_epoch = len(self.data.sampler)
        indices = self.data.sampler.batch(step // per_epoch, step % per_epoch)
        files = [self.data.catalog.file(row) for row in self.data.rows["train"][indices[:5]]]
        raise RunError(
            f"the loss was not finite at step {step} (epoch {step // per_epoch + 1}); its "
            f"{len(indices)} images begin with {', '.join(files)}. The last good checkpoint is "
            f"{self.folder.last}. A smaller learning rate, clipping or float32 usually helps"
        )


def fit(run: Run, stop_requested: Callable[[], bool]) -> dict[str, Any]:
    """Train from where the state stands to the end, save the embedder, return the results."""
    evaluated: Evaluated | None = None
    run.notify("on_start")
    while not run.is_over():
        evaluated = None
        seen, seconds = _train_epoch(run, stop_requested)
        line = _describe_epoch(run, seen, seconds)
        splits = _splits_to_watch(run)
        if splits:
            run.clock.enter("evaluation")
            evaluated = run.evaluator.evaluate(splits)
            line |= evaluated.scores
            _observe(run, evaluated)
            line["evaluation_seconds"] = round(run.clock.enter("other"), 3)
        run.notify("on_epoch_end", line)
    return _finish(run, evaluated)


def _train_epoch(run: Run, stop_requested: Callable[[], bool]) -> tuple[int, float]:
    """Train the rest of an epoch; return the images whose steps were timed, and their seconds."""
    state = run.state
    run.rates.apply(run.updater.optimizer, state.epoch)
    run.updater.embedder.train()
    run.updater.objective.train()
    frozen = state.epoch < run.recipe.schedule.warmup_epochs
    changed = run.updater.freeze_backbone(frozen)
    if run.clock.phase != "startup":
        run.clock.enter("startup" if changed else "training")
    seen = 0
    for pixels, labels in run.data.batches(state.epoch, state.batch):
        loss = run.updater(pixels, labels, state.step)
        state.advance(loss)
        if run.world.device.type == "cpu":  # a GPU would be waited for
            run.check_finite()
        if run.clock.phase == "startup":  # kernels are compiled, graphs recorded
            run.check_finite()
            run.clock.enter("training")
        else:
            seen += len(labels) * run.world.size
        run.notify("on_step_end", loss)
        if any_rank(stop_requested(), run.world):
            run.clock.enter("other")
            run.notify("on_stop")
            raise Stopped(
                f"stopped after step {state.step}, saved in {run.folder.path}; the same command "
                "continues it"
            )
    run.check_finite()  # which waits for the device
    return seen, run.clock.enter("other")


def _describe_epoch(run: Run, seen: int, seconds: float) -> dict[str, Any]:
    """Close the epoch; return its line of metrics.jsonl, less the evaluation."""
    state = run.state
    state.epoch += 1
    state.batch = 0
    mean = state.loss_sum.item() / len(run.data.sampler)
    state.loss_sum.zero_()
    return {
        "epoch": state.epoch,
        "step": state.step,
        "loss": mean,
        "lr": run.updater.optimizer.param_groups[0]["lr"],
        "images_per_second": round(seen / seconds, 1) if seen else None,
        "seconds": round(run.clock.seconds["training"], 3),
    }


def _splits_to_watch(run: Run) -> list[str]:
    """The splits that are evaluated after this epoch."""
    e = run.recipe.evaluation
    if run.state.epoch % e.every and run.state.epoch != run.recipe.training.epochs:
        return []
    splits = {"held_out": ["held_out"], "paper": ["test"], "last": []}[e.protocol]
    watch = e.watch_test and len(run.data.rows["test"]) > 0 and "test" not in splits
    return [*splits, "test"] if watch else splits


def _observe(run: Run, evaluated: Evaluated) -> None:
    """Select this epoch if it is the best so far; the schedule may go by that too."""
    e = run.recipe.evaluation
    if e.protocol != "last":
        split = "test" if e.protocol == "paper" else "held_out"
        improved = run.state.observe(evaluated.scores[split][e.select_by])
        run.rates.observe(improved, run.state.epoch - 1)


def _finish(run: Run, evaluated: Evaluated | None) -> dict[str, Any]:
    """Evaluate the last and the selected epoch, save the embedder, write the results."""
    state, recipe = run.state, run.recipe
    last = final = _evaluate_finally(run, evaluated)
    results: dict[str, Any] = {
        "protocol": recipe.evaluation.protocol,
        "seed": recipe.training.seed,
        "epochs": state.epoch,
        "drops": run.rates.drops,
        "weights": asdict(run.updater.embedder.weights),
        "notes": list(run.data.notes),
        "seconds": round(run.clock.seconds["training"], 3),
        "startup_seconds": round(run.clock.seconds["startup"], 3),
        "last": {"epoch": state.epoch, **last.scores},
    }
    results["selected"] = results["last"]
    if state.best_epoch not in (None, state.epoch):
        run.world.wait()
        load_checkpoint(run.folder.best, run.modules())
        final = _evaluate_finally(run, None)
        results["selected"] = {"epoch": state.best_epoch, **final.scores}
    if run.world.leads:
        final.embedder.save(
            run.folder.embedder,
            class_names=run.data.class_names,
            metrics={"protocol": results["protocol"], **results["selected"]},
            recipe=recipe.to_dict(),
        )
        run.folder.write_results(results)
    run.world.wait()
    run.notify("on_end", results)
    return run.folder.read_results()


def _evaluate_finally(run: Run, evaluated: Evaluated | None) -> Evaluated:
    """Evaluate on all there is, in float32: the figures are those of the saved embedder.

    What was evaluated already with these weights, in that precision, is not evaluated again.
    """
    wanted = ("held_out", "test") if run.recipe.evaluation.final_test else ("held_out",)
    splits = [name for name in wanted if len(run.data.rows[name])]
    if evaluated is None or run.recipe.training.precision != "float32":
        return run.evaluator.evaluate(splits, full_precision=True)
    missing = [name for name in splits if name not in evaluated.scores]
    if not missing:
        return evaluated
    more = run.evaluator.evaluate(missing, full_precision=True)
    return Evaluated({**evaluated.scores, **more.scores}, more.embedder)
