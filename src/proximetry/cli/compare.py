"""`proximetry compare`: train losses with several seeds and test their differences."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError
from proximetry.cli.options import Device
from proximetry.cli.output import echo
from proximetry.cli.train import RecipeOptions
from proximetry.recipe.loading import merge
from proximetry.training.plan import RUNS, make_plan


def compare(
    images: str,
    /,
    *,
    losses: tuple[str, ...] = ("proxy_anchor", "norm_softmax", "arcface"),
    seeds: tuple[int, ...] = (0, 1, 2),
    out: Path = RUNS,
    recipe: str | None = None,
    device: Device = None,
    parallel: Annotated[int, Parameter(validator=Number(gte=1))] = 1,
    overrides: RecipeOptions = {},  # noqa: B006
) -> None:
    """Compare losses on your images: means over seeds, intervals, significant differences.

    Every loss is trained with every seed and evaluated on held-out classes at the last epoch.
    Finished runs are kept: repeat an interrupted command to resume it.

    Args:
        images: a folder of class folders, a table, a tar file, vectors or a dataset's name, as for
            `proximetry train`.
        losses: losses that `proximetry losses` lists, each with its default settings.
        seeds: one run per loss and seed.
        out: parent of the folder compare-IMAGES, which contains the runs and README.md.
        recipe: a shipped recipe's name or a YAML file, as for `proximetry train`.
        parallel: number of concurrent runs.
        overrides: keys of the recipe.
    """
    changes = merge({}, overrides, is_complete=False)
    if changes.get("loss", {}).keys() & {"name", "settings"}:
        raise UsageError("--loss.name and --loss.settings do not apply. Pass --losses.")
    plan = make_plan(images, out, recipe, changes, device, fresh=True)
    echo(plan.lines[0])
    from proximetry.reproduce import compare as run  # imports torch, after the paths are checked

    folder, summary = run(
        plan.recipe, losses, seeds, out, parallel=parallel, device=device, report=echo
    )
    echo(f"\n{summary}\n\npage: {folder / 'README.md'}")
