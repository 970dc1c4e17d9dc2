"""`proximetry reproduce`: run the rows of a published table."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from proximetry._util.errors import UsageError
from proximetry.cli.options import Flag
from proximetry.cli.output import echo
from proximetry.reproduce.table import ReproduceOptions


def reproduce(
    table: str | None = None,
    *,
    data: Path | None = None,
    out: Path = Path("results"),
    options: Annotated[ReproduceOptions, Parameter(name="*")] = ReproduceOptions(),  # noqa: B008
    list_: Annotated[Flag, Parameter(name="--list")] = False,
) -> None:
    """Run every row of a published table and compare the results with the published metrics.

    Finished rows are skipped: repeat an interrupted command to resume it.

    Args:
        table: name of a table, or a YAML file; see --list.
        data: folder of the dataset, or a folder with the datasets as cub/, cars/, flowers/.
        out: parent of the table's folder, which contains results, README.md and figures.
        list_: list the tables and exit.
    """
    from proximetry.reproduce import list_tables
    from proximetry.reproduce import reproduce as run

    if list_:
        echo(list_tables())
        return
    if table is None:
        raise UsageError("TABLE is missing. Pass it before the options; --list prints the tables.")
    folder = run(table, data, out, options, report=echo)
    echo(f"results in {folder / 'README.md'}")
