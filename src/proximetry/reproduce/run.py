"""`reproduce`: a published table in, results beside it out."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from proximetry._common import atomic_write
from proximetry.models.backbones import check_name
from proximetry.reproduce.figures import draw, need_matplotlib
from proximetry.reproduce.lock import alone
from proximetry.reproduce.markdown import page
from proximetry.reproduce.material import count_images, decode, find_data
from proximetry.reproduce.plan import Job, Kind, Options, Run, command_for, make_run, plan
from proximetry.reproduce.records import Record, check_same, read_records
from proximetry.reproduce.results import Results
from proximetry.reproduce.tables import Table
from proximetry.reproduce.trouble import Interrupted, ReproduceError
from proximetry.reproduce.work import (
    Outcome,
    check_device,
    on_cuda,
    perform,
    terminate_like_interrupt,
)
from proximetry.reproduce.workers import Crew
from proximetry.training.display import Display, make_display
from proximetry.training.folder import RunFolder
from proximetry.training.recipe import Recipe
from proximetry.training.recipe_values import RecipeError

Report = Callable[[str], None]


def reproduce(
    table: str | Path | Table,
    data: str | Path | None = None,
    out: str | Path = "results",
    *,
    seeds: Sequence[int] = (0,),
    parallel: int = 1,
    backbone: str | None = None,
    weights: str | None = None,
    epochs: int | None = None,
    selection: bool | None = None,
    device: str | None = None,
    render: bool = False,
    keep: bool = False,
    watch: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Run every row of a published table that is not done yet; return the folder of its results.

    The folder ``out/<table>`` gets one JSON file per run, README.md with ours beside the published
    figures, and the pictures. A command that was cut off is simply given again.

    Args:
        table: the name of a shipped table, a YAML file, or a table.
        data: folder of the table's dataset, or one that holds it under the dataset's name.
        out: where the folder of the table is made.
        seeds: one run per row and seed.
        parallel: so many runs at once, in processes of their own. A script that asks for more
            than one needs `if __name__ == "__main__":`, as with every use of multiprocessing.
        backbone: another network than the table's.
        weights: its weights: auto, package, hub, none, or a file.
        epochs: another number of epochs; falls of the rates and evaluations move in proportion.
        selection: whether to choose the epoch on held-out classes; default: as the table says.
        device: cpu, cuda or cuda:1; default: cuda where there is one.
        render: only write README.md and the pictures anew, from the JSON files that are there.
        keep: keep the folders of the runs, with checkpoints and embedders.
        watch: show each training as it goes, if one runs at a time.
        report: gets a line for every run that ends, and other news.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM; the same call continues.
        ReproduceError: what is wrong with the call, or at the end which runs failed, and why.
    """
    chosen = Table.load(table)
    home = Path(out) / chosen.name
    if chosen.figure is not None:
        need_matplotlib()
    if render:
        return _render(chosen, home, selection)
    if parallel < 1:
        raise ReproduceError(f"parallel must be at least 1, got {parallel}")
    check_device(device)
    options = Options(backbone, weights, epochs, on_cuda(device))
    select = chosen.selection if selection is None else selection
    runs = plan(chosen, seeds, options, select)
    for name in dict.fromkeys(run.recipe.model.backbone for run in runs):
        check_name(name)
    root, catalog = find_data(chosen, data)
    _make_folder(home)
    with alone(home, report=report), terminate_like_interrupt():
        there = _check_existing(chosen, home, options)
        todo = [run for run in runs if run.id not in there]
        images, at_once = count_images(catalog), min(parallel, len(todo))
        left = []
        for run in todo:
            recipe, command = _placed(run, root), _command(chosen, run, options, select)
            job = Job(chosen.name, run, recipe, command, home, images, device, keep, at_once)
            _check_begun(job)
            left.append(job)
        _announce(chosen, len(runs), len(left), parallel, report)
        progress = _Progress({run.id: str(run) for run in runs}, len(left), report)
        try:
            try:
                if left:
                    decode(catalog, [job.recipe for job in left], report)
                _perform(left, parallel, progress, watch)
            finally:
                _write(chosen, home, seeds, select)
                _tidy(home, [] if keep else runs)
        except KeyboardInterrupt:  # also one that comes while the page is written
            raise _interrupted(home) from None
    progress.raise_failures(home)
    return home


def _announce(table: Table, runs: int, left: int, parallel: int, report: Report) -> None:
    report(f"{table.name}: {runs} runs, {runs - left} of them done already")
    if parallel > 1 and table.figure is not None and table.figure.kind == "curves":
        report(
            "runs that share a device slow each other down: with --parallel above 1 seconds are "
            "neither drawn nor compared"
        )


def _make_folder(home: Path) -> None:
    """Make the folder of results, and see that files can be written there."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
    except (FileExistsError, NotADirectoryError):
        raise ReproduceError(f"--out: {home} cannot be a folder, a file is there") from None
    except OSError as error:
        raise ReproduceError(
            f"--out: nothing can be written to {home} ({error.strerror}); choose another folder"
        ) from error


def _render(table: Table, home: Path, selection: bool | None) -> Path:
    if not any(home.glob("*.json")):
        raise ReproduceError(
            f"{home} holds no results to render; run the table first, or say with --out where "
            "they are"
        )
    _write(table, home, (), selection)
    return home


def _write(table: Table, home: Path, seeds: Sequence[int], selection: bool | None) -> None:
    results = Results.of(table, read_records(home))
    draw(table, results.full, home)
    atomic_write(home / "README.md", page(results, seeds, selection).encode())


def _check_existing(table: Table, home: Path, options: Options) -> dict[str, Record]:
    """Read what is done; refuse to mix it with what is asked for if the recipes differ."""
    records = read_records(home)
    for record in records.values():
        path = home / f"{record.id}.json"
        try:
            row = table.row(record.row)
        except RecipeError as error:
            raise ReproduceError(f"{path}: {error} Use another --out, or remove it") from error
        kind: Kind = "selection" if record.kind == "selection" else "full"
        check_same(path, record.recipe, make_run(table, row, record.seed, kind, options))
    return records


def _placed(run: Run, root: Path | None) -> Recipe:
    place = None if root is None else str(root)
    return replace(run.recipe, data=replace(run.recipe.data, root=place))


def _command(table: Table, run: Run, options: Options, selection: bool) -> str:
    model = run.recipe.model
    seeds = [run.seed]
    return command_for(table, seeds, model.backbone, model.weights, options.epochs, selection)


def _check_begun(job: Job) -> None:
    """A run that was cut off must have been the same; one that cannot go on begins anew."""
    folder = RunFolder(job.work)
    recipe = _recipe_of(folder)
    if recipe is not None and (folder.last.exists() or folder.results.exists()):
        check_same(job.work, recipe, job.run)
    else:  # killed while its folder was being made or removed, it may be of any shape
        shutil.rmtree(job.work, ignore_errors=True)
        job.shared.unlink(missing_ok=True)


def _recipe_of(folder: RunFolder) -> dict[str, Any] | None:
    """The recipe in the folder of a run; None if it is damaged or parts of the folder are gone."""
    try:
        json.loads((folder.path / "environment.json").read_text(encoding="utf-8"))
        values = yaml.safe_load(folder.recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return values if isinstance(values, dict) else None


class _Progress:
    """Counts what is done and remembers what went wrong."""

    def __init__(self, names: dict[str, str], left: int, report: Report) -> None:
        self.names, self.left, self.report = names, left, report
        self.failures: dict[str, str] = {}

    def __call__(self, outcome: Outcome) -> None:
        name = self.names[outcome.run]
        self.left -= 1
        if outcome.error:
            self.failures[name] = outcome.error
            self.report(f"{name}: failed, {outcome.error}; {self.left} left")
        else:
            self.report(f"{name}: {outcome.summary}; {self.left} left")

    def raise_failures(self, home: Path) -> None:
        """Name the failures, each with its sentence."""
        if self.failures:
            lines = [f"{name}: {why}" for name, why in self.failures.items()]
            count = len(lines)
            raise ReproduceError(
                f"{count} run{'s' * (count > 1)} failed; the others are in {home}, and the same "
                "command tries again. " + "; ".join(lines)
            )


def _perform(jobs: Sequence[Job], parallel: int, done: _Progress, watch: bool) -> None:
    if parallel > 1:
        Crew(min(parallel, len(jobs) or 1), done).perform(jobs)
        return
    for number, job in enumerate(jobs, 1):
        outcome = perform(job, make_display() if watch else Display())
        if outcome.stopped:
            raise KeyboardInterrupt
        done(outcome)
        if outcome.broken and on_cuda(job.device):  # this process cannot use the card any more
            return Crew(1, done).perform(jobs[number:])


def _interrupted(home: Path) -> Interrupted:
    done = len(list(home.glob("*.json")))
    return Interrupted(
        f"stopped and saved; {done} runs are done in {home}, and the same command continues"
    )


def _tidy(home: Path, runs: Sequence[Run]) -> None:
    """Remove the folders of runs that are done."""
    work = home / "work"
    for run in runs:
        if (home / f"{run.id}.json").exists():
            shutil.rmtree(work / run.id, ignore_errors=True)
            for left in ("error", "parallel"):
                (work / f"{run.id}.{left}.txt").unlink(missing_ok=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()
