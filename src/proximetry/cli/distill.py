"""`proximetry distill`: train a smaller network that follows a run or another embedder."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from proximetry.cli.options import AsJson, Device, Flag
from proximetry.cli.train import COMMON, OUTPUT, RecipeOptions, start_run
from proximetry.recipe.schema import Recipe


def distill(
    teacher: str,
    out: Path,
    /,
    *,
    recipe: Annotated[str | None, Parameter(group=COMMON)] = None,
    device: Annotated[Device, Parameter(group=COMMON)] = None,
    fresh: Annotated[Flag, Parameter(group=COMMON)] = False,
    dry_run: Annotated[Flag, Parameter(group=COMMON)] = False,
    print_config: Annotated[Flag, Parameter(group=OUTPUT)] = False,
    as_json: Annotated[AsJson, Parameter(group=OUTPUT)] = False,
    overrides: RecipeOptions = {},  # noqa: B006
) -> None:
    """Train a smaller network whose similarities follow those of a run or an embedder.

    For example: proximetry distill runs/big runs/small --backbone tf_efficientnet_lite0

    Everything else is as for `proximetry train`: repeat an interrupted command to resume it.

    Args:
        teacher: folder of a run; or any embedder, with --recipe and --data.root.
        out: folder of the new run.
        recipe: a shipped recipe's name or a YAML file; default: the recipe of the teacher.
            Images always come from the teacher's run, if it is one.
        fresh: remove the run in the folder, even if it is complete, and start over.
        dry_run: validate everything, estimate time, disk and memory; write nothing.
        print_config: print the recipe with all overrides, and exit.
        overrides: keys of the recipe.
    """
    from proximetry.training.distillation import plan_distillation

    plan = plan_distillation(teacher, out, overrides, recipe)
    start_run(
        plan,
        device,
        fresh=fresh,
        dry_run=dry_run,
        print_config=print_config,
        as_json=as_json,
        references=_teacher_rows(teacher, plan.recipe),
    )


def _teacher_rows(teacher: str, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the metrics of the teacher's run, if it was evaluated on the same images."""
    from proximetry.training.run_folder import RunFolder, final_stage

    folder = RunFolder(final_stage(Path(teacher)))
    trained, results = folder.read_recipe(), folder.results.exists() and folder.read_results()
    if trained is None or not results:
        return {}
    settings = [
        (r.data.dataset, r.data.root, r.evaluation.held_out, r.evaluation.protocol, r.training.seed)
        for r in (trained, recipe)
    ]
    if settings[0] != settings[1]:
        return {}
    selected = results["selected"]
    splits = [split for split in ("held_out", "test") if split in selected]
    return {f"teacher, {split.replace('_', '-')}": selected[split] for split in splits}
