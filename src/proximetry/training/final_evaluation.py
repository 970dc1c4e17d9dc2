"""The final evaluation of a run and its results."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from proximetry.metrics import calibrate, separability
from proximetry.metrics.calibration_fitting import MIN_CLASSES
from proximetry.metrics.distributed import gather_objects
from proximetry.training.checkpoint import restore_best
from proximetry.training.evaluator import SplitScores, selection_value
from proximetry.training.metrics_table import selection_title

if TYPE_CHECKING:
    from proximetry.training.run import Run

SATURATED = 0.9995
"""At or above this value, a selection metric no longer distinguishes epochs."""


def evaluate_untrained(run: Run) -> dict[str, Any]:
    """Run the final evaluation before the first step; return line 0 of metrics.jsonl.

    Every step has its own seed, so training does not depend on this.
    """
    run.clock.enter("evaluation")
    scores = _evaluate(run).scores
    torch.cuda.empty_cache()  # the first step starts with the same free memory as without this
    seconds = round(run.clock.enter("startup"), 3)
    return {"epoch": 0, "step": 0, "seconds": 0.0, **scores, "evaluation_seconds": seconds}


def evaluate_final(
    run: Run, split_scores: SplitScores | None
) -> tuple[dict[str, Any], SplitScores]:
    """Evaluate the last and the selected epoch; return the results and the selected embedder.

    ``split_scores`` is the evaluation of the current weights, if there was one.
    """
    state, bits, clock = run.state, run.recipe.model.bits, run.clock
    results: dict[str, Any] = {
        "protocol": "last" if state.best_epoch is None else run.data.protocol,
        "seed": run.recipe.training.seed,
        "epochs": state.epoch,
        "stopped_early": run.early_stop_reason() or None,
        "drops": run.rates.drops,
        "weights": asdict(run.updater.embedder.weights),
        "notes": [*run.data.notes],
        "seconds": round(clock.seconds["training"], 3),
        "startup_seconds": round(clock.seconds["startup"], 3),
    }
    if bits is not None:
        results["codes"] = (
            f"{bits} bits, the signs of the dimensions; Hamming distance, exact, "
            "ties broken by index"
        )
    if state.lines and state.lines[0]["epoch"] == 0:
        keys = ("epoch", "held_out", "test")
        results["untrained"] = {key: state.lines[0][key] for key in keys if key in state.lines[0]}
    selected_scores = _evaluate(run, split_scores)
    results["selected"] = {"epoch": state.epoch, **selected_scores.scores}
    results["last"] = {**results["selected"]}
    proxies = run.updater.objective.proxies
    if run.updater.objective.sharded_weight is not None:
        results["notes"].append("separability of proxies not computed: they are sharded")
    elif proxies is not None and proxies.num_classes > 1:
        results["last"]["proxies"] = separability(proxies.weight.detach()).scores()
    if state.best_epoch not in (None, state.epoch):
        run.world.barrier()
        restore_best(run)
        selected_scores = _evaluate(run)
        results["selected"] = {"epoch": state.best_epoch, **selected_scores.scores}
    for note in _notes(run, results):
        run.report(note)
        results["notes"].append(note)
    return results, selected_scores


def _evaluate(run: Run, split_scores: SplitScores | None = None) -> SplitScores:
    """Evaluate all final splits in float32, like the saved embedder.

    Splits that ``split_scores`` has in that precision are not evaluated again.
    """
    splits = run.final_splits()
    if split_scores is None or run.recipe.training.precision != "float32":
        return run.evaluator.evaluate(splits, full_precision=True)
    missing = [name for name in splits if name not in split_scores.scores]
    if not missing:
        return split_scores
    more = run.evaluator.evaluate(missing, full_precision=True)
    return SplitScores(
        {**split_scores.scores, **more.scores},
        more.embedder,
        {**split_scores.vectors, **more.vectors},
    )


def _notes(run: Run, results: dict[str, Any]) -> list[str]:
    """Return notes on a saturated selection metric, and splits that training did not improve."""
    untrained_scores, selected_scores = results.get("untrained", {}), results["selected"]
    metric, notes = run.recipe.evaluation.select_by, []
    selection, best = run.selection(), run.state.best_value
    if selection is not None and best is not None and best >= SATURATED:
        title = selection_title(*selection)
        notes.append(f"{title} is {100 * best:.4g} %: the metric is saturated")
    for split in ("held_out", "test"):
        if split in untrained_scores and split in selected_scores:
            untrained = selection_value(untrained_scores[split], metric)
            trained = selection_value(selected_scores[split], metric)
            if trained <= untrained:
                notes.append(
                    f"{selection_title(split, metric)} is {100 * trained:.1f} %, and was "
                    f"{100 * untrained:.1f} % untrained: no improvement over the untrained model"
                )
    return notes


def calibrate_embedder(run: Run, split_scores: SplitScores) -> None:
    """Calibrate the embedder on classes that were not trained on, if there are enough."""
    labels, rows = np.asarray(run.data.catalog.labels), run.data.rows
    splits = [
        split
        for split in ("held_out", "test")
        if split in split_scores.vectors
        and not np.isin(labels[rows[split]], labels[rows["train"]]).any()
    ]
    if not splits or run.recipe.model.bits is not None:
        return
    split = splits[0]
    _, counts = np.unique(labels[rows[split]], return_counts=True)
    if (counts > 1).sum() < MIN_CLASSES:
        return
    shares = [split_scores.vectors[split].cpu()]
    if (group := dist.group.WORLD) is not None and run.world.size > 1:
        shares = gather_objects(shares[0], group)
    if not run.world.is_main:  # it saves the embedder
        return
    try:
        split_scores.embedder.calibration = calibrate(
            torch.cat(shares), labels[rows[split]], similarity=run.recipe.evaluation.similarity
        )
    except ValueError as error:
        run.report(f"not calibrated: {error}")


def save_embedder(run: Run, scores: dict[str, Any], split_scores: SplitScores) -> None:
    """Save the embedder of the selected epoch; replaces the previous one."""
    if run.world.is_main:
        split_scores.embedder.save(
            run.folder.embedder,
            class_names=run.data.class_names,
            metrics={"protocol": run.data.protocol, **scores},
            recipe=run.recipe.without_paths().to_dict(),
        )
