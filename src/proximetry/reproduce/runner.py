"""`reproduce`: a published table in, results beside it out. Every run is a process of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import yaml
from filelock import FileLock, Timeout

from proximetry._common import atomic_write, resolve_device
from proximetry.data import Catalog, list_datasets, open_dataset
from proximetry.models import Embedder
from proximetry.models.backbones import check_name
from proximetry.reproduce.figures import draw, need_matplotlib
from proximetry.reproduce.options import DEFAULTS, ReproduceOptions
from proximetry.reproduce.page import FLIP_VIEW, page, view_name
from proximetry.reproduce.plan import Run, make_run, plan, wants_selection
from proximetry.reproduce.records import Record, Results, check_same, make_record, read_records
from proximetry.reproduce.table import ReproduceError, Table
from proximetry.training.data import divide
from proximetry.training.evaluator import evaluate_embedder
from proximetry.training.recipe import Recipe
from proximetry.training.run_folder import RunFolder
from proximetry.training.stopping import FOLLOW_PARENT, Stopped

Report = Callable[[str], None]
PATIENCE = 20.0  # seconds to wait for another command in the same folder
_HEAD = "# runs at once: "


class Interrupted(Stopped):
    """A command that was asked to stop, with everything saved."""


@dataclass(frozen=True)
class Job:
    """A run and everything its process needs to know.

    Attributes:
        run: what to do.
        recipe: the run's, with the place of the data.
        work: folder of what is only there while runs are at work.
        device: to train on.
        parallel: how many runs share the device.
        watch: whether its display may use the terminal.
    """

    run: Run
    recipe: Recipe
    work: Path
    device: str
    parallel: int = 1
    watch: bool = False

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
        """The recipe as the process reads it, and how many runs shared the device."""
        return self.work / f"{self.run.id}.yaml"

    @property
    def log(self) -> Path:
        """What the process says."""
        return self.work / f"{self.run.id}.log"


Child = subprocess.Popen[bytes]


def start_process(job: Job, program: Sequence[str] = ("-m", "proximetry", "train")) -> Child:
    """Start `proximetry train` for a job."""
    words = [sys.executable, *program, str(job.file), str(job.folder.path)]
    environment = {
        **os.environ,
        FOLLOW_PARENT: str(os.getpid()),
        # As many threads as here, so that the figures do not depend on how many run at once.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    with job.log.open("wb") as log:
        return subprocess.Popen(
            [*words, "--device", job.device],
            stdin=subprocess.DEVNULL,
            stdout=None if job.watch else log,
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

    The folder ``out/<table>`` gets one JSON file per run, README.md with ours beside the published
    figures, and the pictures. A command that was cut off is simply given again.

    Args:
        table: the name of a shipped table, a YAML file, or a table.
        data: folder of the table's dataset, or one that holds it under the dataset's name.
        out: where the folder of the table is made.
        options: seeds, device and what else may be said.
        report: gets a line for every run that ends, and other news.
        start: starts the process of a run.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM; the same call continues.
        ReproduceError: what is wrong with the call, or at the end which runs failed, and why.
    """
    chosen = Table.load(table)
    home = Path(out) / chosen.name
    if chosen.figure is not None:
        need_matplotlib()
    if options.render:
        return _render(chosen, home, options.selection)
    if options.parallel < 1:
        raise ReproduceError(f"parallel must be at least 1, got {options.parallel}")
    device = resolve_device(options.device)
    on_gpu = device.type == "cuda"
    runs = plan(chosen, options, on_gpu)
    for name in dict.fromkeys(run.recipe.model.backbone for run in runs):
        check_name(name)
    root, catalog = _find_data(chosen, data)
    _make_folder(home)
    with _alone(home, report), _terminate_like_interrupt():
        there = _check_existing(chosen, home, options, on_gpu)
        left = [run for run in runs if run.id not in there]
        at_once = min(options.parallel, len(left))
        watch = at_once == 1 and sys.stdout.isatty()
        jobs = []
        for run in left:
            recipe = run.recipe.override({"data.root": None if root is None else str(root)})
            jobs.append(Job(run, recipe, home / "work", str(device), at_once, watch))
            _check_begun(jobs[-1])
        report(f"{chosen.name}: {len(runs)} runs, {len(runs) - len(left)} of them done already")
        if at_once > 1 and chosen.figure is not None and chosen.figure.kind == "curves":
            report(
                "runs that share a device slow each other down: with --parallel above 1 seconds "
                "are neither drawn nor compared"
            )
        finish = _Finish(chosen, home, options, catalog, len(left), report)
        try:
            try:
                _perform(jobs, at_once, start, finish)
            finally:
                _write(chosen, home, options.seeds, wants_selection(chosen, options))
                _tidy(home, [] if options.keep_runs else runs)
        except KeyboardInterrupt:  # also one that comes while the page is written
            done = len(list(home.glob("*.json")))
            raise Interrupted(
                f"stopped and saved; {done} runs are done in {home}, and the same command continues"
            ) from None
    finish.raise_failures()
    return home


def _perform(
    jobs: Sequence[Job], parallel: int, start: Callable[[Job], Child], finish: "_Finish"
) -> None:
    """Do the jobs, so many at once; when interrupted let all save, then pass it on."""
    waiting = deque(jobs)
    running: list[tuple[Job, Child]] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.popleft()
                _write_job(job)
                running.append((job, start(job)))
            codes = [child.poll() for _, child in running]
            for (job, _), code in zip(running, codes, strict=True):
                if code is not None:
                    finish(job, code)
            running = [pair for pair, code in zip(running, codes, strict=True) if code is None]
            if len(running) == len(codes):
                time.sleep(0.1)
    finally:  # none is left to end unless we were interrupted
        for _, child in running:
            child.terminate()  # SIGTERM: the run saves at its next step
        for _, child in running:
            child.wait()


def _write_job(job: Job) -> None:
    """Write the recipe for the process, and how many runs shared the device, now or before."""
    most = max(_most_at_once(job), job.parallel)
    job.work.mkdir(exist_ok=True)
    text = yaml.safe_dump(job.recipe.to_dict(), sort_keys=False, allow_unicode=True)
    atomic_write(job.file, f"{_HEAD}{most}\n{text}".encode())


def _most_at_once(job: Job) -> int:
    try:
        return int(job.file.read_text(encoding="utf-8").partition("\n")[0].removeprefix(_HEAD))
    except (OSError, ValueError):
        return 1


@dataclass
class _Finish:
    """Turns the end of a run into its JSON file or a sentence; remembers what went wrong."""

    table: Table
    home: Path
    options: ReproduceOptions
    catalog: Catalog
    left: int
    report: Report
    failures: dict[str, str] = field(default_factory=dict)

    def __call__(self, job: Job, code: int) -> None:
        self.left -= 1
        try:
            if code:
                raise ReproduceError(_why(job, code))
            said = _summary(self.record(job))
        except Exception as error:  # one run must not take the others with it
            expected = isinstance(error, (ValueError, OSError))
            why = str(error) if expected else f"{type(error).__name__}: {error}"
            self.failures[str(job.run)] = " ".join(why.split())
            said = f"failed, {self.failures[str(job.run)]}"
        self.report(f"{job.run}: {said}; {self.left} left")

    def record(self, job: Job) -> Record:
        """Write the file of a run that has ended well, and remove what it leaves at work."""
        record = make_record(
            self.table,
            job.run,
            job.folder,
            root=job.recipe.data.root,
            on_gpu=job.on_gpu,
            selection=wants_selection(self.table, self.options),
            parallel=_most_at_once(job),
            images={s: len(self.catalog.filter(split=s)) for s in ("train", "test")},
            views=_evaluate_views(job, self.table, self.catalog),
        )
        record.write(self.home)
        job.log.unlink(missing_ok=True)
        job.file.unlink(missing_ok=True)
        if not self.options.keep_runs:
            shutil.rmtree(job.folder.path, ignore_errors=True)
        return record

    def raise_failures(self) -> None:
        """Name the failures, each with its sentence."""
        if self.failures:
            lines = [f"{name}: {why}" for name, why in self.failures.items()]
            count = len(lines)
            raise ReproduceError(
                f"{count} run{'s' * (count > 1)} failed; the others are in {self.home}, and the "
                "same command tries again. " + "; ".join(lines)
            )


def _evaluate_views(job: Job, table: Table, catalog: Catalog) -> dict[str, dict[str, Any]] | None:
    """Evaluate the held-out classes for other sizes of their images, and with flip TTA."""
    if not table.views:
        return None
    embedder = Embedder.load(job.folder.embedder, device=job.device)
    held_out = catalog.subset(divide(catalog, job.recipe)["held_out"])
    own, found = embedder.preprocessing, {}
    for crop, side in table.views:
        embedder.preprocessing = replace(own, crop=(crop, crop), resize=side)
        found[view_name(crop, side)] = evaluate_embedder(embedder, held_out)
    embedder.preprocessing = own
    embedder.architecture = replace(embedder.architecture, flip_tta=True)
    return {**found, FLIP_VIEW: evaluate_embedder(embedder, held_out)}


def _summary(record: Record) -> str:
    if record.selected_epoch is not None:
        text = f"epoch {record.selected_epoch} selected on held-out classes"
    else:
        found = record.metrics()
        text = f"recall@1 {100 * found['recall@1']:.1f}" if "recall@1" in found else "done"
    return text if record.seconds is None else f"{text}, {record.seconds:.0f} s"


def _why(job: Job, code: int) -> str:
    """Say in a sentence why a process ended with this code."""
    if code < 0:
        hint = ", as happens when memory runs out" if code == -signal.SIGKILL else ""
        return f"its process was killed by signal {-code}{hint}; it can be continued"
    if code == 130:
        return "it was stopped from outside, and saved"
    text = job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else f"its process ended with code {code}"
    if re.search("out ?of ?memory|not enough memory", last, re.IGNORECASE):
        place = "the GPU" if job.on_gpu else "this machine"
        lower = "lower --parallel, or " if job.parallel > 1 else ""
        return (
            f"{place} has too little memory for it and what else runs there; {lower}"
            "give a table file of your own with a smaller data.batch_size, a larger "
            "training.accumulate or data.cache: disk"
        )
    whole = f" (the whole of it is in {job.log})" if "Traceback" in text else ""
    return last.removeprefix("proximetry: ") + whole


def _find_data(table: Table, data: str | Path | None) -> tuple[Path | None, Catalog]:
    """The folder of the table's dataset, and its catalogue; a wrong folder says what to pass."""
    name = table.dataset
    if name == "glyphs":
        return None, open_dataset(name)
    what = f"Pass as --data the folder of {list_datasets()[name]}, or a folder that holds it as "
    what += f"{name}/"
    if data is None:
        raise ReproduceError(f"--data is missing. {what}")
    given = Path(data).expanduser()
    inner = given / name
    root = (inner if inner.is_dir() else given).absolute()
    try:
        catalog = open_dataset(name, root)
        _check_classes(name, root, catalog)
    except (ValueError, OSError) as error:
        raise ReproduceError(f"{error}. {what}") from error
    return root, catalog


def _check_classes(name: str, root: Path, catalog: Catalog) -> None:
    info = list_datasets()[name]
    found = {split: len(catalog.filter(split=split).class_names) for split in ("train", "test")}
    for split, classes in found.items():
        if classes == 0:
            raise ReproduceError(f"{root} has no images of split {split!r}")
    wanted = {"train": info.train, "test": info.test}
    if any(size is not None and size.classes != found[split] for split, size in wanted.items()):
        raise ReproduceError(
            f"{root} holds {found['train']} classes for training and {found['test']} for test: "
            f"this is not {info.title}"
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


@contextmanager
def _alone(home: Path, report: Report, patience: float = PATIENCE) -> Iterator[None]:
    """Be the only command at work in a folder, after waiting for ``patience`` seconds at most."""
    lock = FileLock(home / ".lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"waiting up to {patience:g} s for another command at work in {home}")
            lock.acquire(timeout=patience)
    except Timeout:
        raise ReproduceError(
            f"another command is at work in {home}; wait for it, or use another --out"
        ) from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # who waits for it notices, and makes another
        lock.release()


def _check_existing(
    table: Table, home: Path, options: ReproduceOptions, on_gpu: bool
) -> dict[str, Record]:
    """Read what is done; refuse to mix it with what is asked for if the recipes differ."""
    records = read_records(home)
    for record in records.values():
        path = home / f"{record.id}.json"
        try:
            row = table.row(record.row)
        except ReproduceError as error:
            raise ReproduceError(f"{path}: {error} Use another --out, or remove it") from error
        run = make_run(table, row, record.seed, record.kind, options, on_gpu)
        check_same(path, record.recipe, run)
    return records


def _check_begun(job: Job) -> None:
    """A run that was cut off must have been the same; one that cannot go on begins anew."""
    folder = job.folder
    recipe = _recipe_of(folder)
    if recipe is not None and (folder.last.exists() or folder.results.exists()):
        check_same(folder.path, recipe, job.run)
    elif folder.path.exists():
        # Killed while its folder was being made or removed, it may be of any shape. A process that
        # outlived its command may still be there.
        folder.acquire()
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.release()
        job.file.unlink(missing_ok=True)


def _recipe_of(folder: RunFolder) -> dict[str, Any] | None:
    """The recipe in the folder of a run; None if it is damaged or parts of the folder are gone."""
    try:
        json.loads((folder.path / "environment.json").read_text(encoding="utf-8"))
        values = yaml.safe_load(folder.recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return values if isinstance(values, dict) else None


def _render(table: Table, home: Path, selection: bool | None) -> Path:
    if not any(home.glob("*.json")):
        raise ReproduceError(
            f"{home} holds no results to render; run the table first, or say with --out where "
            "they are"
        )
    _write(table, home, (), selection)
    return home


def _write(table: Table, home: Path, seeds: Sequence[int], selection: bool | None) -> None:
    results = Results.read(table, home)
    draw(table, results.runs_of, home)
    atomic_write(home / "README.md", page(results, seeds, selection).encode())


def _tidy(home: Path, runs: Sequence[Run]) -> None:
    """Remove what runs that are done have left at work."""
    work = home / "work"
    for run in runs:
        if (home / f"{run.id}.json").exists():
            shutil.rmtree(work / run.id, ignore_errors=True)
            for suffix in ("yaml", "log"):
                (work / f"{run.id}.{suffix}").unlink(missing_ok=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM act as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
