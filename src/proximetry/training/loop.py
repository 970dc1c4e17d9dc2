"""The training loop: start at `fit`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proximetry.data.images import ImageError
from proximetry.metrics import separability
from proximetry.models import Embedder
from proximetry.training.callbacks import Callback
from proximetry.training.checkpoint import load_checkpoint
from proximetry.training.clock import Stopwatch
from proximetry.training.data import TrainingData
from proximetry.training.distributed import World, any_rank
from proximetry.training.evaluator import Evaluated, Evaluator, Scores
from proximetry.training.recipe import Recipe
from proximetry.training.reporting import selection_title
from proximetry.training.run_folder import RunError, RunFolder
from proximetry.training.schedule import LearningRates
from proximetry.training.state import TrainState, find_best, save_state
from proximetry.training.stopping import Stopped, StopRequests
from proximetry.training.update import Updater

SATURATED = 0.9995
"""A selection metric from here on cannot tell epochs apart."""


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
    report: Callable[[str], None]
    callbacks: Sequence[Callback] = ()
    stopping: bool = False
    finishing: bool = False
    fresh: bool = False
    """Begun with ``resume=False``, with which it would begin again."""

    @property
    def again(self) -> str:
        """How a stopped run goes on."""
        how = " without --fresh (resume=False)" if self.fresh else ""
        return f"the same command{how} continues it"

    def stop(self) -> None:
        """End the run after the present step, with a checkpoint; the same call continues it."""
        self.stopping = True

    def finish(self) -> None:
        """End training after the present epoch; the run is then complete, and `train` returns.

        The same recipe with another ``training.epochs`` resumes it.
        """
        self.finishing = True

    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds besides the optimiser."""
        u = self.updater
        parts: dict[str, nn.Module] = {"embedder": u.embedder, "loss": u.objective}
        return parts if u.average is None else {**parts, "average": u.average}

    def is_over(self) -> bool:
        """Whether all epochs are done, or early stopping or a callback ends the run."""
        t, state = self.recipe.training, self.state
        return state.finished == t.epochs or t.is_over(state.epoch, state.stale)

    def selection(self) -> tuple[str, str] | None:
        """The split and the metric that select the epoch, if they do."""
        split = {"held_out": "held_out", "paper": "test"}.get(self.data.protocol)
        return None if split is None else (split, self.recipe.evaluation.select_by)

    def notify(self, event: str, *values: Any) -> None:
        """Tell every callback about an event."""
        for callback in self.callbacks:
            # One of the user's own need not have them all.
            getattr(callback, event, lambda *_: None)(self, *values)

    def check_finite(self, *, weights: bool = False) -> None:
        """Stop if a loss was not finite, naming the step and its images; waits for the device.

        The weights may be looked at too: the last update can spoil them after a finite loss.
        """
        step = int(self.state.bad_step)
        if step >= 0:
            per_epoch = len(self.data.sampler)
            indices = self.data.sampler.batch(step // per_epoch, step % per_epoch)
            files = [self.data.catalog.file(row) for row in self.data.rows["train"][indices[:5]]]
            raise self.diverged(
                f"the loss was not finite at step {step} (epoch {step // per_epoch + 1}); its "
                f"{len(indices)} images begin with {', '.join(files)}"
            )
        if weights and not _all_finite(self.modules()):
            raise self.diverged(f"the weights are not finite after step {self.state.step}")

    def diverged(self, how: str) -> RunError:
        """The error that says what to do about numbers that are not finite."""
        kept = next(iter(self.folder.checkpoints()), None)
        return RunError(
            f"the training has diverged: {how}. A smaller learning rate (--optimizer.lr, now "
            f"{self.recipe.optimizer.lr:g}), --optimizer.clip-norm or --training.precision float32 "
            "usually helps, in another folder or with --fresh"
            + (f". The last good checkpoint is {kept}" if kept else "")
        )


def _all_finite(modules: dict[str, nn.Module]) -> bool:
    parameters = [p for module in modules.values() for p in module.parameters()]
    # A sum is finite only if every term is; one number to wait for.
    sums = [parameter.detach().sum(dtype=torch.float64) for parameter in parameters]
    return not sums or bool(torch.isfinite(torch.stack(sums).sum()))


def fit(run: Run, stop_requested: StopRequests) -> dict[str, Any]:
    """Train from where the state stands to the end, save the embedder, return the results."""
    try:
        return _fit(run, stop_requested)
    except ImageError as error:  # the last checkpoint stays
        skip = "" if run.state.step else " (--data.bad-images skip leaves it out)"
        raise RunError(
            f"{error}; put a readable file in its place{skip}; the same command continues the "
            f"run in {run.folder.path}"
        ) from error


def _fit(run: Run, stop_requested: StopRequests) -> dict[str, Any]:
    evaluated: Evaluated | None = None
    run.notify("on_start")
    if run.recipe.evaluation.untrained and run.state.step == 0 and _final_splits(run):
        with _stopping(run, stop_requested, "stopped before the first step"):
            line = _evaluate_untrained(run)
        run.notify("on_untrained", line)
    while not run.is_over():
        evaluated = None
        seen, seconds = _train_epoch(run, stop_requested)
        line = _describe_epoch(run, seen, seconds)
        if _is_evaluated(run):
            run.clock.enter("evaluation")
            evaluated = run.evaluator.evaluate(_splits_to_watch(run))
            line |= evaluated.scores
            _observe(run, evaluated)
            line["evaluation_seconds"] = round(run.clock.enter("other"), 3)
        run.notify("on_epoch_end", line)
        if any_rank(run.finishing, run.world) and not run.is_over():
            run.state.finished = run.recipe.training.epochs
            save_state(run.folder.last, run)
    early = _early_stop(run)
    if early:
        run.report(early)
    with _stopping(run, stop_requested, "stopped in the final evaluation"):
        results, final = _evaluate_at_the_end(run, evaluated)
    return _finish(run, results, final)


def _stopping(run: Run, stop_requested: StopRequests, what: str) -> AbstractContextManager[None]:
    """Let a request to stop end an evaluation at once; several processes wait for each other."""
    if run.world.size > 1:
        return nullcontext()
    return stop_requested.at_once(f"{what} of the run in {run.folder.path}; {run.again}")


def _evaluate_untrained(run: Run) -> dict[str, Any]:
    """Evaluate before the first step what is evaluated at the end; return line 0 of metrics.jsonl.

    Every step has a seed of its own: nothing that is trained depends on this.
    """
    run.clock.enter("evaluation")
    scores = _evaluate_finally(run, None).scores
    torch.cuda.empty_cache()  # the first step finds the memory as if nothing had been before it
    seconds = run.clock.enter("startup")
    return {
        "epoch": 0,
        "step": 0,
        "seconds": 0.0,
        **scores,
        "evaluation_seconds": round(seconds, 3),
    }


def _train_epoch(run: Run, stop_requested: StopRequests) -> tuple[int, float]:
    """Train the rest of an epoch; return the images whose steps were timed, and their seconds."""
    state = run.state
    run.rates.apply(run.updater.optimizer, state.epoch)
    run.updater.embedder.train()
    run.updater.objective.train()
    frozen = state.epoch < run.recipe.schedule.freeze_backbone_epochs
    changed = run.updater.freeze_backbone(frozen)
    if run.clock.phase != "startup":
        run.clock.enter("startup" if changed else "training")
    seen = 0
    for pixels, labels in _readable(run):
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
        if any_rank(run.stopping or stop_requested(), run.world):
            run.clock.enter("other")
            run.notify("on_stop")
            raise Stopped(_stopped_after(run, state.step))
    run.check_finite(weights=True)  # which waits for the device
    return seen, run.clock.enter("other")


def _readable(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of an epoch; if an image cannot be read, save the run first."""
    try:
        yield from run.data.batches(run.state.epoch, run.state.batch)
    except ImageError as error:
        if run.world.size > 1:  # the other ranks are in the next step
            raise
        run.notify("on_stop")
        saved = _stopped_after(run, run.state.step)
        raise RunError(f"{error}; put a readable file in its place; {saved}") from error


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
        "images_per_second": round(seen / seconds, 1) if seen and seconds else None,
        "seconds": round(run.clock.seconds["training"], 3),
    }


def _stopped_after(run: Run, step: int) -> str:
    """Say how a stopped run goes on, and what it has come to."""
    usable = ", and the embedder so far can be used" if run.folder.embedder.exists() else ""
    return f"stopped after step {step}, saved in {run.folder.path}; {run.again}{usable}"


def _is_evaluated(run: Run) -> bool:
    """Whether there is an evaluation after this epoch."""
    epoch, every = run.state.epoch, run.recipe.evaluated_every(bool(_splits_to_watch(run)))
    return epoch % every == 0 or epoch == run.recipe.training.epochs


def _splits_to_watch(run: Run) -> list[str]:
    """The splits that are evaluated after an epoch."""
    selection = run.selection()
    splits = [] if selection is None else [selection[0]]
    watched = run.recipe.evaluation.watch_test and len(run.data.rows["test"]) > 0
    return [*splits, "test"] if watched and "test" not in splits else splits


def _observe(run: Run, evaluated: Evaluated) -> None:
    """Select this epoch if it is the best so far and save it; the schedule may go by that too."""
    state, selection = run.state, run.selection()
    if selection is not None:
        split, metric = selection
        was_saturated = _saturation(run)
        improved = state.observe(_selecting(evaluated.scores[split], metric))
        run.rates.observe(improved, state.epoch - 1)
        saturated = _saturation(run)
        if saturated and not was_saturated:
            run.report(saturated)
    if selection is None or state.best_epoch == state.epoch:
        _save_embedder(run, {"epoch": state.epoch, **evaluated.scores}, evaluated)


def _selecting(scores: Scores, metric: str) -> float:
    """The value of a metric that is compared between epochs: among training images, if it is."""
    value: float = scores.get("among_train", scores)[metric]
    return value


def _saturation(run: Run) -> str:
    """Say that the selection metric is as good as it can be, if it is."""
    selection, value = run.selection(), run.state.best_value
    if selection is None or value is None or value < SATURATED:
        return ""
    return f"{selection_title(*selection)} is {100 * value:.4g} %: it cannot tell epochs apart"


def _early_stop(run: Run) -> str:
    """Say why a run has ended before its last epoch, if it has."""
    state, selection = run.state, run.selection()
    if state.epoch >= run.recipe.training.epochs:
        return ""
    if selection is None or state.finished == run.recipe.training.epochs:
        return f"stopped early after epoch {state.epoch}: a callback called run.finish()"
    return (
        f"stopped early after epoch {state.epoch}: no improvement of {selection_title(*selection)} "
        f"in {state.stale} evaluations; best epoch {state.best_epoch}"
    )


def _save_embedder(run: Run, scores: dict[str, Any], evaluated: Evaluated) -> None:
    """Save the embedder of the selected epoch so far; the one before stays until then."""
    if run.world.leads:
        evaluated.embedder.save(
            run.folder.embedder,
            class_names=run.data.class_names,
            metrics={"protocol": run.data.protocol, **scores},
            recipe=run.recipe.without_places().to_dict(),
        )


def _evaluate_at_the_end(run: Run, evaluated: Evaluated | None) -> tuple[dict[str, Any], Evaluated]:
    """Evaluate the last and the selected epoch; return the results, and the embedder to save."""
    state, recipe = run.state, run.recipe
    last = final = _evaluate_finally(run, evaluated)
    notes = [*run.data.notes, _saturation(run)]
    results: dict[str, Any] = {
        "protocol": "last" if state.best_epoch is None else run.data.protocol,
        "seed": recipe.training.seed,
        "epochs": state.epoch,
        "stopped_early": _early_stop(run) or None,
        "drops": run.rates.drops,
        "weights": asdict(run.updater.embedder.weights),
        "notes": [note for note in notes if note],
        "seconds": round(run.clock.seconds["training"], 3),
        "startup_seconds": round(run.clock.seconds["startup"], 3),
    }
    if recipe.model.bits is not None:
        results["codes"] = (
            f"{recipe.model.bits} bits, the signs of the dimensions; Hamming distance, exact, "
            "equal distances by index"
        )
    for line in state.lines[:1]:
        if line["epoch"] == 0:
            parts = ("epoch", "held_out", "test")
            results["untrained"] = {key: line[key] for key in parts if key in line}
    results["selected"] = {"epoch": state.epoch, **last.scores}
    results["last"] = {**results["selected"], **_separability(run)}
    if state.best_epoch not in (None, state.epoch):
        run.world.wait()
        results["notes"] += _restore_selected(run)
        if state.best_epoch is not None:
            final = _evaluate_finally(run, None)
            results["selected"] = {"epoch": state.best_epoch, **final.scores}
        else:
            results["protocol"] = "last"
    results["notes"] += _no_gain(run, results)
    return results, final


def _separability(run: Run) -> dict[str, dict[str, float]]:
    """How far the proxies of different classes are apart, where the loss has proxies.

    Of the last epoch alone: those of the selected one may be lost with its checkpoint.
    """
    proxies = run.updater.objective.proxies
    if proxies is None or proxies.num_classes < 2:
        return {}
    return {"proxies": separability(proxies.weight.detach()).scores()}


def _restore_selected(run: Run) -> list[str]:
    """Put the weights of the selected epoch in place; return what there is to say about that.

    If they are lost, none is selected: the last epoch will do.
    """
    epoch = run.state.best_epoch
    path, lost = run.world.first(lambda: find_best(run))
    if path is not None:
        load_checkpoint(path, run.modules())
        return []
    if run.world.first(lambda: _saved_selected(run) is not None):
        saved = _load_saved(run).to(run.world.device)
        run.evaluator.embedder.load_state_dict(saved.state_dict())
        note = f"{lost}: epoch {epoch} is taken from the embedder that was saved then"
    else:
        run.state.best_epoch = None
        note = f"{lost}: epoch {epoch} was selected, but the last one is taken"
    run.report(note)
    return [note]


def _saved_selected(run: Run) -> Embedder | None:
    """The embedder in the folder, if it is that of the selected epoch of this run.

    Neither PCA nor LoRA can be taken out of one again, as evaluating it here would need.
    """
    model = run.recipe.model
    if model.pca_dim is not None or model.lora_rank is not None:
        return None
    try:
        saved = _load_saved(run)
        recipe = Recipe.load(saved.recipe or {})
    except ValueError:
        return None
    found = (saved.metrics or {}).get("epoch"), saved.class_names, recipe.essence()
    wanted = run.state.best_epoch, run.data.class_names, run.recipe.essence()
    return saved if found == wanted else None


def _load_saved(run: Run) -> Embedder:
    own = run.updater.embedder
    module = copy.deepcopy(own.backbone) if own.is_own else None
    return Embedder.load(run.folder.embedder, module=module)


def _no_gain(run: Run, results: dict[str, Any]) -> list[str]:
    """Say that training has gained nothing, if it has not."""
    before, after = results.get("untrained", {}), results["selected"]
    metric, worse = run.recipe.evaluation.select_by, []
    for split in ("held_out", "test"):
        if split not in before or split not in after:
            continue
        was, now = (_selecting(scores[split], metric) for scores in (before, after))
        if now <= was:
            worse.append(
                f"{selection_title(split, metric)} is {100 * now:.1f} %, and was {100 * was:.1f} % "
                "untrained: training has gained nothing"
            )
    for line in worse:
        run.report(line)
    return worse


def _finish(run: Run, results: dict[str, Any], final: Evaluated) -> dict[str, Any]:
    """Save the selected embedder and the results."""
    _save_embedder(run, results["selected"], final)
    if run.world.leads:
        run.folder.write_results(results)
    run.world.wait()
    run.notify("on_end", results)
    return run.folder.read_results()


def _final_splits(run: Run) -> list[str]:
    """The splits that are evaluated at the end."""
    with_test = run.recipe.evaluation.final_test or run.data.protocol == "paper"
    wanted = ("held_out", "test") if with_test else ("held_out",)
    return [name for name in wanted if len(run.data.rows[name])]


def _evaluate_finally(run: Run, evaluated: Evaluated | None) -> Evaluated:
    """Evaluate on all there is, in float32: the figures are those of the saved embedder.

    What was evaluated already with these weights, in that precision, is not evaluated again.
    """
    splits = _final_splits(run)
    if evaluated is None or run.recipe.training.precision != "float32":
        return run.evaluator.evaluate(splits, full_precision=True)
    missing = [name for name in splits if name not in evaluated.scores]
    if not missing:
        return evaluated
    more = run.evaluator.evaluate(missing, full_precision=True)
    return Evaluated({**evaluated.scores, **more.scores}, more.embedder)
