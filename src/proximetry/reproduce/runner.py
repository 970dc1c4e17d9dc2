"""`reproduce`: run the rows of a published table, each in a child process."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from proximetry._util.errors import need
from proximetry._util.files import atomic_write, parse_json, take_lock
from proximetry._util.machine import resolve_device
from proximetry.data import Catalog, list_datasets, open_dataset
from proximetry.models import Embedder
from proximetry.models.backbones import check_name
from proximetry.recipe.schema import AUTO, read_yaml
from proximetry.reproduce.figures import draw
from proximetry.reproduce.options import DEFAULTS, ReproduceOptions
from proximetry.reproduce.page import page
from proximetry.reproduce.plan import Run, make_run, plan
from proximetry.reproduce.records import (
    RUNS,
    Record,
    Results,
    check_same,
    make_record,
    read_records,
)
from proximetry.reproduce.statistics import sample
from proximetry.reproduce.table import ReproduceError, Row, RunsFailedError, Table
from proximetry.training.callbacks import FOLLOW_PARENT, Stopped
from proximetry.training.evaluator import evaluate_embedder
from proximetry.training.run_folder import RunFolder
from proximetry.training.sources.base import divide

Report = Callable[[str], None]
PATIENCE = 20.0  # seconds to wait for another command in the same folder
# As a run divides its images: without splits all of them are there to be trained on.
_SPLITS = {"train": ("train", "all"), "test": ("test",)}
_HEAD = "# runs at once: "


class Interrupted(Stopped):
    """The command was interrupted after saving everything."""


class _TooLittleMemoryError(ReproduceError):
    """A run did not fit into memory, perhaps because of concurrent runs."""


@dataclass(frozen=True)
class Job:
    """A run and the inputs of its process.

    Attributes:
        work: folder of temporary files.
        parallel: number of runs that share the device.
    """

    run: Run
    work: Path
    device: str
    parallel: int = 1

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.work / self.run.id)

    @property
    def on_gpu(self) -> bool:
        """Whether it trains on a GPU."""
        return self.device.startswith("cuda")

    @property
    def file(self) -> Path:
        """The recipe for the process, and the number of runs that share the device."""
        return self.work / f"{self.run.id}.yaml"

    @property
    def log(self) -> Path:
        """The output of the process."""
        return self.work / f"{self.run.id}.log"

    def most_at_once(self) -> int:
        """Largest number of runs that shared the device, also before an interruption."""
        try:
            head = self.file.read_text(encoding="utf-8").partition("\n")[0]
            return max(self.parallel, int(head.removeprefix(_HEAD)))
        except (OSError, ValueError):
            return self.parallel

    def write(self) -> None:
        """Write the recipe for the process."""
        self.work.mkdir(exist_ok=True)
        text = yaml.safe_dump(self.run.recipe.to_dict(), sort_keys=False, allow_unicode=True)
        atomic_write(self.file, f"{_HEAD}{self.most_at_once()}\n{text}".encode())


Child = subprocess.Popen[bytes]


def start_process(job: Job, program: Sequence[str] = ("-m", "proximetry", "train")) -> Child:
    """Start `proximetry train` for a job; a single one may use the terminal."""
    words = [sys.executable, *program, str(job.file), str(job.folder.path)]
    environment = {
        **os.environ,
        FOLLOW_PARENT: str(os.getpid()),
        # Results must not depend on the number of concurrent runs.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    if job.parallel > 1 and "GOMP_SPINCOUNT" not in os.environ:
        # Threads that wait in loops take the cores from the other runs; docs/faq.md has figures.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with job.log.open("wb") as log:
        return subprocess.Popen(
            [*words, "--device", job.device],
            stdin=subprocess.DEVNULL,
            stdout=None if job.parallel == 1 and sys.stdout.isatty() else log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then decides
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
    """Run every row of a published table that is not done yet; return the folder of its results.

    The folder ``out/<table>`` gets the runs (runs.jsonl), README.md with ours beside the published
    figures, and the images of plots. To resume an interrupted command, repeat it.

    Args:
        table: the name of a shipped table, a YAML file, or a table.
        data: folder of the table's dataset, or one that holds it under the dataset's name.
        out: where the folder of the table is made.
        options: seeds, device and other options.
        report: receives a line for every finished run, and other progress.
        start: starts the process of a run.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM; the same call continues.
        ReproduceError: invalid arguments, or failed runs with their reasons.
    """
    chosen = Table.load(table)
    home = Path(out) / chosen.name
    if chosen.figure is not None:  # not after hours of training
        need("matplotlib", "train", "drawing the figures of this table")
    if options.render:
        if not (home / RUNS).exists():
            raise ReproduceError(f"no results to render: {home}. Pass their folder as --out")
        asked = None if options.selection is None else chosen.selected_rows(options.selection)
        _write(chosen, home, (), asked)
        return home
    if options.parallel < 1:
        raise ReproduceError(f"parallel must be at least 1, got {options.parallel}")
    device = resolve_device(options.device)
    on_gpu = device.type == "cuda"
    runs = plan(chosen, options, on_gpu)
    for name in dict.fromkeys(run.recipe.model.backbone for run in runs):
        check_name(name)
    names = list(dict.fromkeys(run.recipe.data.dataset for run in runs))
    found = {name: _find_data(chosen, name, data, len(names) == 1) for name in names}
    with _alone(home, report), _terminate_like_interrupt():
        there = _check_existing(chosen, home, options, on_gpu)
        if not options.keep_runs:
            _tidy(home, [run.id for run in runs if run.id in there])
        left = [run for run in runs if run.id not in there]
        at_once = min(options.parallel, len(left))
        jobs = []
        for run in left:
            root, _ = found[run.recipe.data.dataset]
            placed = replace(run, recipe=run.recipe.override({"data.root": root}))
            jobs.append(Job(placed, home / "work", str(device), at_once))
            _check_begun(jobs[-1])
        report(f"{chosen.name}: {len(runs)} runs, {len(runs) - len(left)} of them done already")
        if at_once > 1 and chosen.figure is not None and chosen.figure.kind == "curves":
            report(
                "runs that share a device slow each other down: with --parallel above 1 seconds "
                "are neither drawn nor compared"
            )
        finish = partial(_finish, chosen, home, options, found)
        try:
            try:
                failures = _perform(jobs, at_once, start, finish, report)
            finally:
                _write(chosen, home, options.seeds, chosen.selected_rows(options.selection))
        except KeyboardInterrupt:  # also one that comes while the page is written
            done = len(read_records(home))
            raise Interrupted(
                f"stopped and saved; {done} runs are done in {home}, and the same command continues"
            ) from None
    if failures:
        count = len(failures)
        raise RunsFailedError(
            f"{count} run{'s' * (count > 1)} failed; the others are in {home}, and the same "
            f"command tries again. {'; '.join(failures)}"
        )
    return home


def _perform(
    jobs: Sequence[Job],
    parallel: int,
    start: Callable[[Job], Child],
    finish: Callable[[Job, int], str],
    report: Report,
) -> list[str]:
    """Run the jobs, ``parallel`` at a time, and return the failures; on interruption, save all.

    A run that is out of memory beside others is repeated separately at the end. The first such run
    of a row also reduces ``parallel``.
    """
    waiting, failures = deque(jobs), []
    alone: deque[Job] = deque()
    crowded: set[str] = set()  # rows
    running: list[tuple[Job, Child]] = []
    try:
        while waiting or running or alone:
            if not waiting and not running:
                waiting, alone, parallel = alone, deque(), 1
            while waiting and len(running) < parallel:
                job = replace(waiting.popleft(), parallel=parallel)
                job.write()
                running.append((job, start(job)))
            at_once = len(running)
            ended = [(job, child) for job, child in running if child.poll() is not None]
            for job, child in ended:
                running.remove((job, child))
                try:
                    message = finish(job, child.wait())
                except Exception as error:  # one run must not take the others with it
                    expected = isinstance(error, (ValueError, OSError))
                    text = str(error) if expected else f"{type(error).__name__}: {error}"
                    why = " ".join(text.split())
                    if isinstance(error, _TooLittleMemoryError) and job.parallel > 1:
                        alone.append(job)
                        message = f"{why.partition(';')[0]}; it will be run again separately"
                        if job.run.row.name not in crowded:
                            crowded.add(job.run.row.name)
                            at_once -= 1
                            parallel = max(1, min(parallel, at_once))
                            message += f", and until then at most {parallel} at a time"
                    else:
                        failures.append(f"{job.run}: {why}")
                        message = f"failed, {why}"
                left = len(waiting) + len(running) + len(alone)
                report(f"{job.run}: {message}; {left} left")
            if not ended:
                time.sleep(0.1)
    finally:  # none is left to end unless we were interrupted
        for _, child in running:
            child.terminate()  # SIGTERM: the run saves at its next step
        for _, child in running:
            child.wait()
    return failures


def _finish(
    table: Table,
    home: Path,
    options: ReproduceOptions,
    data: Mapping[str, tuple[str | None, Catalog]],
    job: Job,
    code: int,
) -> str:
    """Record a finished run, remove its temporary files, and return its outcome."""
    if code:
        raise _why(job, code)
    _, catalog = data[job.run.recipe.data.dataset]
    try:
        views = _evaluate_views(job, table, catalog) if table.views else None
    except (RuntimeError, ValueError, OSError) as error:
        # A record without them would never get them; the run folder stays for the next time.
        raise ReproduceError(f"it is trained, but its views were not evaluated: {error}") from error
    record = make_record(
        table,
        job.run,
        job.folder,
        on_gpu=job.on_gpu,
        selected=table.selected_rows(options.selection),
        epochs_given=options.epochs is not None,
        parallel=job.most_at_once(),
        images={split: len(catalog.rows(*names)) for split, names in _SPLITS.items()},
        views=views,
    )
    record.write(home)
    if not options.keep_runs:
        _tidy(home, [job.run.id])
    return f"{outcome(table, record)}, {record.seconds or 0:.0f} s"


def outcome(table: Table, record: Record) -> str:
    """Summarize a run in a few words."""
    if record.selected_epoch is not None:
        return f"epoch {record.selected_epoch} selected on held-out classes"
    metric = table.metrics[0]
    found = sample([record], metric)
    return f"{metric} {found}" if found else f"no {metric}"


def _evaluate_views(job: Job, table: Table, catalog: Catalog) -> dict[str, dict[str, Any]]:
    """Evaluate the held-out classes for other sizes of their images, and with flip TTA."""
    embedder = Embedder.load(job.folder.embedder, device=job.device)
    plain = replace(embedder.architecture, flip_tta=False, tta_crops=())
    embedder.architecture = plain
    held_out = catalog.subset(divide(catalog, job.run.recipe).rows["held_out"])
    own, found = embedder.preprocessing, {}
    for crop, side in table.views:
        embedder.preprocessing = replace(own, crop=(crop, crop), resize=own.size_at(side))
        found[f"{crop} of {side}"] = evaluate_embedder(embedder, held_out)
    embedder.preprocessing = own
    embedder.architecture = replace(plain, flip_tta=True)
    return {**found, "flip TTA": evaluate_embedder(embedder, held_out)}


def _why(job: Job, code: int) -> ReproduceError:
    """Return why a process ended with this code."""
    if code < 0:
        killed = f"its process was killed by signal {-code}"
        if code == -signal.SIGKILL:
            return _TooLittleMemoryError(
                f"{killed}, as happens when memory runs out; it can be resumed"
            )
        return ReproduceError(f"{killed}; it can be resumed")
    if code == 130:
        return ReproduceError("it was stopped by a signal, and saved")
    text = job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else f"its process ended with code {code}"
    if re.search("out ?of ?memory|not enough memory", last, re.IGNORECASE):
        place = "the GPU" if job.on_gpu else "this machine"
        return _TooLittleMemoryError(
            f"{place} has too little memory for it; use a custom table file with a smaller "
            "data.batch_size, a larger training.accumulate or data.cache: pixels"
        )
    whole = f" (log: {job.log})" if "Traceback" in text else ""
    return ReproduceError(last.removeprefix("proximetry: ") + whole)


def _find_data(
    table: Table, name: str, data: str | Path | None, alone: bool
) -> tuple[str | None, Catalog]:
    """Return the folder of a dataset of the table, and its catalog.

    ``data`` may be the folder of a dataset that is ``alone`` in its table.
    """
    info = list_datasets()[name]
    if info.built_in:
        return None, open_dataset(name)
    itself = f"the folder of {info}, or " if alone else ""
    what = f"Pass as --data {itself}a folder that holds {'it' if alone else info} as {name}/"
    if data is None:
        raise ReproduceError(f"--data is missing. {what}")
    given = Path(data).expanduser()
    inner = given / name
    root = (inner if inner.is_dir() or not alone else given).absolute()
    try:
        catalog = open_dataset(name, root)
        splits = {"train": info.train, "test": info.test}
        if table.protocol == "held_out":
            del splits["test"]  # it is not used
        for split, size in splits.items():
            classes = len(catalog.subset(catalog.rows(*_SPLITS[split])).class_names)
            if classes == 0:
                raise ValueError(f"{root} has no images of split {split!r}")
            if size is not None and classes != size.classes:
                raise ValueError(
                    f"{root} holds {classes} classes of split {split!r} instead of "
                    f"{size.classes}: this is not {info.title}"
                )
    except (ValueError, OSError) as error:
        raise ReproduceError(f"{error}. {what}") from error
    return str(root), catalog


@contextmanager
def _alone(home: Path, report: Report, patience: float = PATIENCE) -> Iterator[None]:
    """Lock a folder, waiting for up to ``patience`` seconds."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = take_lock(home / ".lock", patience, report)
    except TimeoutError as error:
        raise ReproduceError(
            f"{error} is at work in {home}; wait for it, or use another --out"
        ) from None
    except OSError as error:
        raise ReproduceError(
            f"--out: nothing can be written to {home} ({error.strerror}); choose another folder"
        ) from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # who waits for it notices, and makes another
        lock.release()


def _check_existing(
    table: Table, home: Path, options: ReproduceOptions, on_gpu: bool
) -> dict[str, Record]:
    """Read existing runs; raise if their recipes differ from the requested ones."""
    records = read_records(home, table)
    for name, record in records.items():
        run = make_run(table, table.row(record.row), record.seed, record.kind, options, on_gpu)
        if record.epochs_given and run.recipe.training.epochs == AUTO:
            raise ReproduceError(
                f"{home / RUNS}: {name} was made with --epochs "
                f"{record.recipe['training']['epochs']}. Pass it again, or use another --out"
            )
        check_same(f"{home / RUNS}: {name}", record.recipe, run)
    return records


def _check_begun(job: Job) -> None:
    """Check the recipe of an interrupted run; remove one that cannot be resumed."""
    folder = job.folder
    try:
        parse_json(folder.environment.read_text(encoding="utf-8"))
        recipe = read_yaml(folder.recipe, "recipe")
        begun = folder.inspect() is not None
    except (OSError, ValueError):
        begun = False
    if begun:
        check_same(folder.path, recipe, job.run)
    elif folder.path.exists():
        # Killed while its folder was being made or removed, it may be of any shape. A process that
        # outlived its command may still be there.
        folder.acquire()
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.release()
        job.file.unlink(missing_ok=True)


def _write(table: Table, home: Path, seeds: Sequence[int], selected: Sequence[Row] | None) -> None:
    results = Results.read(table, home)
    draw(results, home)
    atomic_write(home / "README.md", page(results, seeds, selected).encode())


def _tidy(home: Path, names: Iterable[str]) -> None:
    """Remove the temporary files of finished runs."""
    work = home / "work"
    for name in names:
        shutil.rmtree(work / name, ignore_errors=True)
        for suffix in ("yaml", "log"):
            (work / f"{name}.{suffix}").unlink(missing_ok=True)
    with suppress(OSError):  # others are running
        work.rmdir()


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM act as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
