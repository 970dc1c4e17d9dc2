"""Commands that are stopped or killed: real processes, and the same table in the end."""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from proximetry.reproduce.lock import alone, at_work
from proximetry.reproduce.work import Outcome
from proximetry.reproduce.workers import Crew

from proximetry import cli
from proximetry.reproduce import Interrupted, ReproduceError, Table, reproduce, run, work, workers
from proximetry.reproduce import lock as lock_module
from proximetry.reproduce.plan import Job, Options, make_run
from proximetry.reproduce.records import read_records
from tests.reproduce.small import (
    make_table,
    numbers,
    page_of,
    start,
    table_values,
    with_base,
    write_table,
)

EPOCHS = 40  # long enough to be met in the middle


@pytest.fixture(scope="module")
def table(cache, tmp_path_factory):
    values = with_base(
        table_values(cache, selection=False), "training", epochs=EPOCHS, checkpoint_epochs=3
    )
    values = with_base(values, "evaluation", every=10)
    return write_table(tmp_path_factory.mktemp("table") / "small.yaml", values)


@pytest.fixture(scope="module")
def uninterrupted(table, data, tmp_path_factory):
    return reproduce(table, data, tmp_path_factory.mktemp("straight"), device="cpu")


def wait_for(what, seconds=60):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


def trained(folder):
    """Epochs that the runs at work have written down."""
    counts = [len(f.read_text().splitlines()) for f in folder.glob("work/*/metrics.jsonl")]
    return [count for count in counts if 2 <= count < EPOCHS]


def workers_of(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def goes_on_to_the_same(table, data, out, uninterrupted):
    home = reproduce(table, data, out, device="cpu")
    assert page_of(home) == page_of(uninterrupted)
    assert numbers(home) == numbers(uninterrupted)
    assert not (home / "work").exists()
    assert (home / "sweep.svg").read_bytes() == (uninterrupted / "sweep.svg").read_bytes()


@contextmanager
def ctrl_c_when(ready):
    """Send a real SIGINT to this process as soon as a condition holds."""

    def send():
        wait_for(ready)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


def test_ctrl_c_saves_and_the_same_command_continues(table, data, tmp_path, uninterrupted, capsys):
    home = tmp_path / "small"
    words = ["reproduce", table, "--data", data, "--out", tmp_path, "--device", "cpu"]
    with ctrl_c_when(lambda: trained(home)):
        assert cli.main([str(word) for word in words]) == 1
    err = capsys.readouterr().err
    assert "0 runs are done" in err
    assert "the same command continues" in err
    assert len(err.strip().splitlines()) == 1
    assert list(home.glob("work/*/checkpoints/last.safetensors"))
    assert "No run of this table is done yet" in (home / "README.md").read_text()
    goes_on_to_the_same(table, data, tmp_path, uninterrupted)


@pytest.mark.slow
def test_killed_workers_and_commands_cost_no_run(table, data, tmp_path, uninterrupted):
    words = ["--data", data, "--out", tmp_path, "--device", "cpu", "--parallel", "2"]
    command = start(table, *words)
    home = tmp_path / "small"
    wait_for(lambda: len(trained(home)) == 2)
    first, second = workers_of(command.pid)
    os.kill(first, signal.SIGKILL)
    said = ""
    while "killed by signal 9" not in said:
        said = command.stdout.readline()
        assert said, command.stderr.read()
    epochs = sum(trained(home))
    wait_for(lambda: sum(trained(home)) > epochs)  # the other goes on
    command.kill()
    command.communicate(timeout=60)
    # A new command waits until the last worker has saved. Ctrl-C reaches its own workers.
    with ctrl_c_when(lambda: sum(trained(home)) > epochs + 4), pytest.raises(Interrupted):
        reproduce(table, data, tmp_path, device="cpu", parallel=2)
    assert not Path(f"/proc/{second}/cmdline").exists()
    assert not [c for c in multiprocessing.active_children() if c.is_alive()]
    assert "No run of this table is done yet" in (home / "README.md").read_text()
    goes_on_to_the_same(table, data, tmp_path, uninterrupted)


def test_only_one_command_at_a_time(tmp_path):
    said = []
    second = alone(tmp_path, patience=0.2, report=said.append)
    refused = pytest.raises(ReproduceError, match="another command is at work")
    with alone(tmp_path), at_work(tmp_path), refused, second:
        pass
    assert said == [f"waiting up to 0.2 s for another command at work in {tmp_path}"]
    with alone(tmp_path, patience=0, report=said.append):
        pass
    assert len(said) == 1


def test_a_command_that_slips_in_between_is_waited_for(tmp_path, monkeypatch):
    """Having the folder alone and sharing it are two steps: the second may fail."""
    answers = iter([True, False, False, True, True])
    asked = []

    def lock(handle, shared):
        asked.append(shared)
        return next(answers)

    monkeypatch.setattr(lock_module, "try_lock", lock)
    with alone(tmp_path):
        assert asked == [False, True, False, False, True]


def job_of(table, home):
    """The first run of a table."""
    chosen = Table.load(table)
    first = make_run(chosen, chosen.rows[0], 0, "full", Options())
    (home / "work").mkdir(exist_ok=True)
    return Job(chosen.name, first, first.recipe, "", home, {}, "cpu")


@pytest.fixture
def started(monkeypatch):
    """The workers that are started, each sent a SIGINT at once."""
    found, real = [], workers._start

    def start_and_interrupt(job):
        found.append(real(job))
        os.kill(found[-1].process.pid, signal.SIGINT)
        return found[-1]

    monkeypatch.setattr(workers, "_start", start_and_interrupt)
    return found


@pytest.mark.slow
def test_a_worker_that_met_the_unexpected_is_replaced(table, tmp_path, started):
    """Nor does Ctrl-C hurt a worker, not even while it imports."""
    outcomes = []
    known = job_of(table, tmp_path)  # without a place of the data: a sentence
    strange = dataclasses.replace(known, recipe=None)
    Crew(1, outcomes.append).perform([strange, known, known])
    assert [outcome.broken for outcome in outcomes] == [True, False, False]
    assert "AttributeError" in outcomes[0].error
    assert "data.root is missing" in outcomes[1].error
    assert len(started) == 2
    assert not [worker for worker in started if worker.process.is_alive()]


def test_a_broken_card_is_left_to_new_processes(table, tmp_path, monkeypatch):
    """A process that met an error of CUDA hands the rest to others."""
    jobs = [dataclasses.replace(job_of(table, tmp_path), device="cuda") for _ in range(3)]
    outcomes, handed = [], []
    answers = iter([Outcome("a", summary="done"), Outcome("b", error="CUDA error", broken=True)])
    monkeypatch.setattr(run, "perform", lambda job, display: next(answers))
    monkeypatch.setattr(Crew, "perform", lambda crew, rest: handed.extend(rest))
    run._perform(jobs, 1, outcomes.append, watch=False)
    assert [outcome.run for outcome in outcomes] == ["a", "b"]
    assert handed == jobs[2:]


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (ValueError("x"), False),
        (OSError("x"), False),
        (ImportError("x"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("CUDA error: an illegal memory access"), True),
        (RuntimeError("CUDA error: out of memory"), True),
    ],
)
def test_what_breaks_a_process(table, tmp_path, monkeypatch, error, broken):
    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr(work, "train", fail)
    for at_once in (1, 2):
        job = dataclasses.replace(job_of(table, tmp_path), parallel=at_once)
        outcome = work.perform(job)
        assert outcome.broken == broken
        memory = "too little memory" in outcome.error
        assert memory == ("out of memory" in str(error))
        assert ("--parallel" in outcome.error) == (memory and at_once == 2)


def test_several_at_once_are_recorded_and_seconds_left_out(cache, data, tmp_path, monkeypatch):
    def one_after_another(crew, jobs):
        assert crew.parallel == 2
        for job in jobs:
            crew.done(work.perform(job))

    monkeypatch.setattr(Crew, "perform", one_after_another)
    table = make_table(cache, figure={"kind": "curves"}, selection=False)
    lines = []
    home = reproduce(table, data, tmp_path, parallel=9, device="cpu", report=lines.append)
    assert "neither drawn nor compared" in lines[1]
    assert [r.parallel for r in read_records(home).values()] == [2, 2]
    text = (home / "README.md").read_text()
    assert "| runs at once | 2 |" in text
    assert "neither drawn nor compared: up to 2 runs shared the device." in text
    assert "seconds.svg" not in text
    assert not (home / "seconds.svg").exists()
    assert (home / "epochs.svg").exists()
