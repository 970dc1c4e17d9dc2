"""The final evaluation of a run and its results."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from proximetry.metrics import separability
from proximetry.training.evaluator import Evaluated, Scores
from proximetry.training.reporting import selection_title
from proximetry.training.state import restore_best

if TYPE_CHECKING:
    from proximetry.training.loop import Run

SATURATED = 0.9995
"""From this value on, a selection metric no longer distinguishes epochs."""


def evaluate_untrained(run: Run) -> dict[str, Any]:
    """Run the final evaluation before the first step; return line 0 of metrics.jsonl.

    Every step has its own seed, so training does not depend on this.
    """
    run.clock.enter("evaluation")
    scores = _evaluate(run).scores
    torch.cuda.empty_cache()  # the first step starts with the same free memory as without this
    seconds = round(run.clock.enter("startup"), 3)
    return {"epoch": 0, "step": 0, "seconds": 0.0, **scores, "evaluation_seconds": seconds}


def evaluate_final(run: Run, evaluated: Evaluated | None) -> tuple[dict[str, Any], Evaluated]:
    """Evaluate the last and the selected epoch; return the results and the selected embedder.

    ``evaluated`` is the evaluation of the current weights, if there was one.
    """
    state, results = run.state, _describe(run)
    selected = _evaluate(run, evaluated)
    results["selected"] = {"epoch": state.epoch, **selected.scores}
    results["last"] = {**results["selected"], **_separability(run)}
    if state.best_epoch not in (None, state.epoch):
        run.world.wait()
        restore_best(run)
        selected = _evaluate(run)
        results["selected"] = {"epoch": state.best_epoch, **selected.scores}
    results["notes"] += _no_improvement(run, results)
    return results, selected


def _describe(run: Run) -> dict[str, Any]:
    """Return the results without scores."""
    state, bits = run.state, run.recipe.model.bits
    notes = [*run.data.notes, saturation(run)]
    results: dict[str, Any] = {
        "protocol": "last" if state.best_epoch is None else run.data.protocol,
        "seed": run.recipe.training.seed,
        "epochs": state.epoch,
        "stopped_early": early_stop(run) or None,
        "drops": run.rates.drops,
        "weights": asdict(run.updater.embedder.weights),
        "notes": [note for note in notes if note],
        "seconds": round(run.clock.seconds["training"], 3),
        "startup_seconds": round(run.clock.seconds["startup"], 3),
    }
    if bits is not None:
        results["codes"] = (
            f"{bits} bits, the signs of the dimensions; Hamming distance, exact, "
            "equal distances by index"
        )
    if state.lines and state.lines[0]["epoch"] == 0:
        keys = ("epoch", "held_out", "test")
        results["untrained"] = {key: state.lines[0][key] for key in keys if key in state.lines[0]}
    return results


def _evaluate(run: Run, evaluated: Evaluated | None = None) -> Evaluated:
    """Evaluate all final splits in float32, like the saved embedder.

    Splits that ``evaluated`` has in that precision are not evaluated again.
    """
    splits = final_splits(run)
    if evaluated is None or run.recipe.training.precision != "float32":
        return run.evaluator.evaluate(splits, full_precision=True)
    missing = [name for name in splits if name not in evaluated.scores]
    if not missing:
        return evaluated
    more = run.evaluator.evaluate(missing, full_precision=True)
    return Evaluated({**evaluated.scores, **more.scores}, more.embedder)


def final_splits(run: Run) -> list[str]:
    """Return the splits that are evaluated at the end."""
    with_test = run.recipe.evaluation.final_test or run.data.protocol == "paper"
    wanted = ("held_out", "test") if with_test else ("held_out",)
    return [name for name in wanted if len(run.data.rows[name])]


def _separability(run: Run) -> dict[str, dict[str, float]]:
    """Return how far the proxies of different classes are apart, if the loss has proxies."""
    proxies = run.updater.objective.proxies
    if proxies is None or proxies.num_classes < 2:
        return {}
    return {"proxies": separability(proxies.weight.detach()).scores()}


def selection_value(scores: Scores, metric: str) -> float:
    """Return the metric that epochs are compared by, with training distractors if it has any."""
    value: float = scores.get("among_train", scores)[metric]
    return value


def saturation(run: Run) -> str:
    """Return a note if the selection metric is saturated, else ""."""
    selection, value = run.selection(), run.state.best_value
    if selection is None or value is None or value < SATURATED:
        return ""
    return f"{selection_title(*selection)} is {100 * value:.4g} %: it cannot tell epochs apart"


def early_stop(run: Run) -> str:
    """Return why the run ended before its last epoch, "" if it did not."""
    state, selection = run.state, run.selection()
    if state.epoch >= run.recipe.training.epochs:
        return ""
    if selection is None or state.finished == run.recipe.training.epochs:
        return f"stopped early after epoch {state.epoch}: a callback called run.finish()"
    return (
        f"stopped early after epoch {state.epoch}: no improvement of {selection_title(*selection)} "
        f"in {state.stale} evaluations; best epoch {state.best_epoch}"
    )


def _no_improvement(run: Run, results: dict[str, Any]) -> list[str]:
    """Report the splits on which the run is no better than the untrained embedder."""
    before, after = results.get("untrained", {}), results["selected"]
    metric, worse = run.recipe.evaluation.select_by, []
    for split in ("held_out", "test"):
        if split not in before or split not in after:
            continue
        was, now = (selection_value(scores[split], metric) for scores in (before, after))
        if now <= was:
            worse.append(
                f"{selection_title(split, metric)} is {100 * now:.1f} %, and was {100 * was:.1f} % "
                "untrained: training has gained nothing"
            )
    for line in worse:
        run.report(line)
    return worse


def save_embedder(run: Run, scores: dict[str, Any], evaluated: Evaluated) -> None:
    """Save the embedder of the selected epoch in place of the one before."""
    if run.world.leads:
        evaluated.embedder.save(
            run.folder.embedder,
            class_names=run.data.class_names,
            metrics={"protocol": run.data.protocol, **scores},
            recipe=run.recipe.without_places().to_dict(),
        )
