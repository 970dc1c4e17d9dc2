"""`compare`: train losses with several seeds on the same images, and test their differences."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proximetry.recipe.schema import Recipe
from proximetry.reproduce.records import Results
from proximetry.reproduce.runner import Child, Job, Report, reproduce, start_process
from proximetry.reproduce.table import ReproduceError, ReproduceOptions, Row, Table, slugify
from proximetry.reproduce.table_page import comparison
from proximetry.training.metrics_table import WITH_DISTRACTORS
from proximetry.training.sources.training_data import open_catalog, split_rows


def compare(
    recipe: Recipe,
    losses: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path = "runs",
    *,
    parallel: int = 1,
    device: str | None = None,
    report: Report = lambda line: None,
    start: Callable[[Job], Child] = start_process,
) -> tuple[Path, str]:
    """Train a recipe with each loss and seed; return the folder of the results and a summary.

    The losses are compared on held-out classes at the last epoch; the test set is not used. The
    folder ``out/compare-<images>`` contains the runs and README.md with the summary. Complete runs
    are kept: repeat an interrupted call to resume it.

    Args:
        recipe: the recipe with its images; each loss has its default settings.
        losses: two names of losses or more.
        seeds: one run per loss and seed; two or more for a test of significance.
        out: parent of the folder of the results.
        parallel: number of concurrent runs.
        device: cpu, cuda or cuda:1; None selects CUDA if there is a GPU.
        report: called with a line for every finished run, and other messages.
        start: starts the process of a run.
    """
    names = [*dict.fromkeys(losses)]
    if len(names) < 2:
        raise ReproduceError(f"losses must be two or more, got {', '.join(names) or 'none'}.")
    held_out = recipe.override({"evaluation.protocol": "held_out", "training.two_stages": False})
    split = split_rows(open_catalog(held_out), held_out)
    if not len(split.rows["held_out"]):
        raise ReproduceError(f"no held-out classes to compare on: {'; '.join(split.notes)}.")
    table = _make_table(held_out, names)
    options = ReproduceOptions(seeds=tuple(seeds), parallel=parallel, device=device)
    folder = reproduce(table, None, out, options, report=report, start=start)
    return folder, comparison(Results.read(table, folder))


def _make_table(recipe: Recipe, losses: Sequence[str]) -> Table:
    """Return a table with a row for each loss."""
    base: dict[str, Any] = recipe.override({"evaluation.protocol": "last"}).to_dict()
    images = Path(base["data"]["root"] or base["data"]["dataset"]).stem
    base["loss"] = {k: v for k, v in base["loss"].items() if k not in ("name", "settings")}
    del base["name"], base["about"]
    select_by, computed = recipe.evaluation.select_by, recipe.evaluation.metrics.names()
    shown = dict.fromkeys([select_by, "map@r", "recall@1"])
    return Table(
        name=f"compare-{slugify(images)}".strip("-"),
        title=f"Losses compared on {images}",
        protocol="held_out",
        base=base,
        rows=tuple(
            Row.model_validate({"name": name, "changes": {"loss.name": name}}) for name in losses
        ),
        metrics=(f"{select_by} {WITH_DISTRACTORS}", *(name for name in shown if name in computed)),
        comparison=True,
    )
