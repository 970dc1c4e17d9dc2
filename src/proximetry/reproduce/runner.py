"""`reproduce`: run the rows of a published table, each in a child process."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from proximetry._util.files import acquire_lock, atomic_write, parse_json
from proximetry._util.machine import resolve_device
from proximetry.data import Catalog, list_datasets, open_dataset
from proximetry.models import Embedder
from proximetry.models.backbones import check_name
from proximetry.models.constants import VECTOR_BACKBONES
from proximetry.recipe.schema import AUTO, Recipe
from proximetry.reproduce.figures import draw
from proximetry.reproduce.plan import PlannedRun, make_run, plan
from proximetry.reproduce.records import RUNS, Record, Results, check_same, read_records
from proximetry.reproduce.statistics import sample
from proximetry.reproduce.table import (
    DEFAULTS,
    ReproduceError,
    ReproduceOptions,
    RunsFailedError,
    Table,
)
from proximetry.reproduce.table_page import page
from proximetry.training.evaluator import evaluate_embedder
from proximetry.training.run import FOLLOW_PARENT, Stopped
from proximetry.training.run_folder import RunFolder
from proximetry.training.sources.training_data import open_catalog, split_rows

Report = Callable[[str], None]
Child = subprocess.Popen[bytes]
LOCK_TIMEOUT = 20.0  # seconds to wait for another command in the same folder
# A run trains on all images if there are no splits.
_SPLITS = {"train": ("train", "all"), "test": ("test",)}
_ENVIRONMENT = ("started", "python", "packages", "cuda", "git")
_CURVE = ("epoch", "seconds", "evaluation_seconds", "loss", "test", "held_out")


class Interrupted(Stopped):
    """The command was interrupted after saving everything."""


@dataclass(frozen=True)
class Job:
    """A run, the folder of its temporary files, and the number of runs that share its device."""

    run: PlannedRun
    work: Path
    device: str
    parallel: int = 1

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.work / self.run.id)

    @property
    def file(self) -> Path:
        """The recipe for the process."""
        return self.work / f"{self.run.id}.yaml"

    @property
    def log(self) -> Path:
        """The output of the process."""
        return self.work / f"{self.run.id}.log"


def start_process(job: Job) -> Child:
    """Start `proximetry train` for a job; a single one may use the terminal."""
    command = [sys.executable, "-m", "proximetry", "train", str(job.file), str(job.folder.path)]
    # Results must not depend on the number of concurrent runs.
    changes = {FOLLOW_PARENT: str(os.getpid()), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    # Busy-waiting threads slow down the other runs; benchmarks/README.md has figures.
    policy = {"OMP_WAIT_POLICY": "PASSIVE"} if job.parallel > 1 else {}
    with job.log.open("wb") as log:
        return subprocess.Popen(
            [*command, "--device", job.device],
            stdin=subprocess.DEVNULL,
            stdout=None if job.parallel == 1 and sys.stdout.isatty() else log,
            stderr=log,
            env=policy | os.environ | changes,
            start_new_session=True,  # Ctrl-C reaches only this process
        )


def reproduce(
    table: str | Path | Table,
    data: str | Path | None = None,
    out: str | Path = "results",
    options: ReproduceOptions = DEFAULTS,
    *,
    report: Report = lambda line: None,
    start: Callable[[Job], Child] = start_process,
) -> Path:
    """Run every row of a published table that is not complete; return the folder of its results.

    The folder ``out/<table>`` contains the runs (runs.jsonl), README.md with our metrics and the
    published ones, and charts. To resume an interrupted command, repeat it.

    Args:
        table: the name of a shipped table, a YAML file, or a table.
        data: folder of the table's dataset, or one that holds it under the dataset's name, or as
            data.root of the row.
        out: parent of the folder of the table.
        options: seeds, device and other options.
        report: called with a line for every finished run, and other messages.
        start: starts the process of a run.

    Raises:
        Interrupted: after Ctrl-C; the same call resumes.
        ReproduceError: invalid arguments or records.
        RunsFailedError: some runs failed; with their reasons.
    """
    loaded = Table.load(table)
    folder = Path(out) / loaded.name
    if options.render:
        if not (folder / RUNS).exists():
            raise ReproduceError(
                f"no results to render: {folder}. Pass the parent of their folder as --out."
            )
        _write(loaded, folder)
        return folder
    if options.parallel < 1:
        raise ReproduceError(f"parallel must be at least 1, got {options.parallel}")
    device = resolve_device(options.device, float64=True)
    on_gpu = device.type == "cuda"
    runs = plan(loaded, options, on_gpu)
    for name in {run.recipe.model.backbone for run in runs}.difference(VECTOR_BACKBONES):
        check_name(name)
    configs = {_dataset_of(run.recipe): run.recipe for run in runs}
    found = {key: _find_data(loaded, recipe, data) for key, recipe in configs.items()}
    datasets = {run.row.name: found[_dataset_of(run.recipe)] for run in runs}
    with _lock(folder, report):
        existing = _check_existing(loaded, folder, options, on_gpu)
        _check_same_images(folder, existing.values(), datasets)
        if not options.keep_runs:
            _remove_temporary_files(folder, [run.id for run in runs if run.id in existing])
        remaining = [run for run in runs if run.id not in existing]
        parallel, jobs = min(options.parallel, len(remaining)), []
        for run in remaining:
            root, _ = datasets[run.row.name]
            run = replace(run, recipe=run.recipe.override({"data.root": root}))
            jobs.append(Job(run, folder / "work", str(device), parallel))
            _check_interrupted(jobs[-1])
        report(f"{loaded.name}: {len(runs)} runs, {len(runs) - len(remaining)} already complete")

        def finish(job: Job, code: int) -> str:
            catalog = datasets[job.run.row.name][1]
            record = _make_record(loaded, options, catalog, job, code)
            record.write(folder)
            if not options.keep_runs:
                _remove_temporary_files(folder, [job.run.id])
            return f"{summarize(loaded, record)}, {record.seconds:.0f} s"

        try:
            try:
                failures = _run_jobs(jobs, parallel, start, finish, report)
            finally:
                _write(loaded, folder)
        except KeyboardInterrupt:  # also while the page is written
            raise Interrupted(
                f"stopped and saved; runs complete in {folder}: {len(read_records(folder))}. "
                "Repeat the command to resume"
            ) from None
    if failures:
        raise RunsFailedError(
            f"{len(failures)} of {len(jobs)} runs failed; the others are in {folder}. Repeat the "
            f"command to try again. {'; '.join(failures)}"
        )
    return folder


def _run_jobs(
    jobs: Sequence[Job],
    parallel: int,
    start: Callable[[Job], Child],
    finish: Callable[[Job, int], str],
    report: Report,
) -> list[str]:
    """Run the jobs, ``parallel`` at a time, and return the failures; save all on interruption."""
    waiting, failures = deque(jobs), list[str]()
    running: list[tuple[Job, Child]] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.popleft()
                job.work.mkdir(exist_ok=True)
                job.run.recipe.save(job.file)
                running.append((job, start(job)))
            ended = [(job, child) for job, child in running if child.poll() is not None]
            for job, child in ended:
                running.remove((job, child))
                try:
                    message = finish(job, child.wait())
                except Exception as error:  # the other runs continue
                    expected = isinstance(error, (ValueError, OSError))
                    text = str(error) if expected else f"{type(error).__name__}: {error}"
                    reason = " ".join(text.split())
                    failures.append(f"{job.run}: {reason}")
                    message = f"failed, {reason}"
                report(f"{job.run}: {message}; {len(waiting) + len(running)} left")
            if not ended:
                time.sleep(0.1)
    finally:  # only an interruption leaves children running
        for _, child in running:
            child.terminate()  # SIGTERM: the run saves at its next step
        for _, child in running:
            child.wait()
    return failures


def _make_record(
    table: Table, options: ReproduceOptions, catalog: Catalog, job: Job, code: int
) -> Record:
    """Return the record of a run whose process ended with this code."""
    if code:
        raise _failure(job, code)
    run, results, root = job.run, job.folder.read_results(), job.run.recipe.data.root
    environment = parse_json(job.folder.environment.read_text(encoding="utf-8"))
    weights = dict(results["weights"])
    if weights["source"] == "file":
        weights["origin"] = Path(weights["origin"]).name
    return Record(
        table=table.name,
        row=run.row.name,
        seed=run.seed,
        kind=run.kind,
        recipe=Recipe.load(job.folder.recipe).without_paths().to_dict(),
        device=environment["device"] if job.device.startswith("cuda") else "CPU",
        environment={key: environment.get(key) for key in _ENVIRONMENT},
        weights=weights,
        protocol=results["protocol"],
        notes=[note.replace(f"{root}/", "") if root else note for note in results["notes"]],
        last=results["last"],
        selected_epoch=results["selected"]["epoch"] if run.kind == "selection" else None,
        seconds=results["seconds"],
        startup_seconds=results["startup_seconds"],
        curve=[{k: line[k] for k in _CURVE if k in line} for line in job.folder.history()],
        parallel=job.parallel,
        images=_count_images(catalog),
        views=_evaluate_views(job, table, catalog) if table.views else None,
        epochs_overridden=options.epochs is not None,
    )


def _count_images(catalog: Catalog) -> dict[str, int]:
    return {split: len(catalog.rows(*names)) for split, names in _SPLITS.items()}


def summarize(table: Table, record: Record) -> str:
    """Summarize a run in a few words."""
    if record.selected_epoch is not None:
        return f"epoch {record.selected_epoch} selected on held-out classes"
    metric = table.metrics[0]
    return f"{metric} {sample([record], metric) or 'missing'}"


def _evaluate_views(job: Job, table: Table, catalog: Catalog) -> dict[str, dict[str, Any]]:
    """Evaluate the held-out classes at other image sizes, and with flip TTA."""
    embedder = Embedder.load(job.folder.embedder, device=job.device)
    embedder.architecture = replace(embedder.architecture, flip_tta=False, tta_crops=())
    held_out = catalog.subset(split_rows(catalog, job.run.recipe).rows["held_out"])
    preprocessing, views = embedder.preprocessing, {}
    for crop, side in table.views:
        resize = preprocessing.size_at(side)
        embedder.preprocessing = replace(preprocessing, crop=(crop, crop), resize=resize)
        views[f"{crop} of {side}"] = evaluate_embedder(embedder, held_out)
    embedder.preprocessing = preprocessing
    embedder.architecture = replace(embedder.architecture, flip_tta=True)
    return {**views, "flip TTA": evaluate_embedder(embedder, held_out)}


def _failure(job: Job, code: int) -> ReproduceError:
    """Return the error of a process that ended with this code."""
    if code < 0:
        hint = "; there may not be enough memory" if code == -signal.SIGKILL else ""
        return ReproduceError(f"its process was killed by signal {-code}{hint}")
    text = job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else f"its process ended with code {code}"
    if "memory" in last.lower():
        fewer = "a smaller --parallel, or " if job.parallel > 1 else ""
        return ReproduceError(
            f"not enough memory on {job.device}. Use {fewer}a custom table file with a smaller "
            "data.batch_size, a larger training.accumulate or data.cache: pixels."
        )
    log = f" (log: {job.log})" if "Traceback" in text else ""
    return ReproduceError(last.removeprefix("proximetry: ") + log)


def _dataset_of(recipe: Recipe) -> tuple[str, str | None]:
    return recipe.data.dataset, recipe.data.root


def _find_data(table: Table, recipe: Recipe, data: str | Path | None) -> tuple[str | None, Catalog]:
    """Return the folder of a dataset of the table, and its catalog.

    Without ``data``, a recipe may name the folder itself.
    """
    name = recipe.data.dataset
    info = list_datasets()[name]
    if info.built_in:
        return None, open_dataset(name)
    inner = [folder for folder in (recipe.data.root, name) if folder]
    hint = f"Pass as --data the folder of {info}, or a folder that holds it as {inner[0]}/"
    if data is None:
        if recipe.data.root is None:
            raise ReproduceError(f"--data is missing. {hint}")
        return recipe.data.root, open_catalog(recipe)
    outer = Path(data).expanduser()
    roots = [outer / folder for folder in inner if (outer / folder).exists()]
    root = (roots or [outer])[0].absolute()
    splits = {"train": info.train, "test": info.test}
    if table.protocol == "held_out":
        del splits["test"]  # it is not used
    try:
        catalog = open_dataset(name, root)
        for split, size in splits.items():
            classes = len(catalog.subset(catalog.rows(*_SPLITS[split])).class_names)
            if classes == 0:
                raise ValueError(f"{root} has no images of split {split!r}")
            if size is not None and classes != size.classes:
                raise ValueError(
                    f"{root} is not {info.title}: split {split!r} has {classes} classes, not "
                    f"{size.classes}"
                )
    except (ValueError, OSError) as error:
        raise ReproduceError(f"{error}. {hint}") from error
    return str(root), catalog


@contextmanager
def _lock(folder: Path, report: Report, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Lock a folder, waiting for up to ``timeout`` seconds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(folder / ".lock", timeout, report)
    except TimeoutError as error:
        raise ReproduceError(f"{folder} is in use by {error}. Wait, or use another --out") from None
    except OSError as error:
        raise ReproduceError(f"--out {folder} is not writable: {error.strerror}") from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # a waiting process creates a new one
        lock.release()


def _check_existing(
    table: Table, folder: Path, options: ReproduceOptions, on_gpu: bool
) -> dict[str, Record]:
    """Read existing runs; raise if their recipes differ from the requested ones."""
    records = read_records(folder, table)
    for name, record in records.items():
        run = make_run(table, table.row(record.row), record.seed, record.kind, options, on_gpu)
        where, epochs = f"{folder / RUNS}: {name}", record.recipe["training"]["epochs"]
        if record.epochs_overridden and run.recipe.training.epochs == AUTO:
            raise ReproduceError(
                f"{where} was trained with --epochs {epochs}. Pass it, or use another --out."
            )
        check_same(where, Recipe.load(record.recipe), run)
    return records


def _check_same_images(
    folder: Path, records: Iterable[Record], datasets: Mapping[str, tuple[Any, Catalog]]
) -> None:
    """Raise if an existing run was trained on a different number of images.

    Args:
        records: the existing runs.
        datasets: root and catalog by row.
    """
    for record in records:
        row = record.row
        if row in datasets and record.images not in (None, _count_images(datasets[row][1])):
            raise ReproduceError(
                f"{folder / RUNS}: {record.id} was trained on different images. Use another --out."
            )


def _check_interrupted(job: Job) -> None:
    """Check the recipe of an interrupted run; remove one that cannot be resumed."""
    folder = job.folder
    try:
        saved = folder.inspect()
    except (OSError, ValueError):
        saved = None
    if saved is not None:
        check_same(folder.path, saved.recipe, job.run)
    elif folder.path.exists():  # killed while it was created or removed
        folder.acquire()  # its process may still run
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.release()


def _write(table: Table, folder: Path) -> None:
    """Write the page and the figures of the runs so far."""
    results = Results.read(table, folder)
    draw(results, folder)
    atomic_write(folder / "README.md", page(results).encode())


def _remove_temporary_files(folder: Path, names: Iterable[str]) -> None:
    """Remove the temporary files of finished runs."""
    work = folder / "work"
    for name in names:
        shutil.rmtree(work / name, ignore_errors=True)
        for suffix in ("yaml", "log"):
            (work / f"{name}.{suffix}").unlink(missing_ok=True)
    with suppress(OSError):  # other runs have files in it
        work.rmdir()
