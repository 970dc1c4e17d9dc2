"""Interrupted and killed commands resume to the same table."""

import os
import signal

import pytest

from proximetry.reproduce import Interrupted, ReproduceError
from proximetry.reproduce.records import RUNS
from proximetry.reproduce.runner import _lock
from proximetry.training import Callback
from tests.interrupt import completes, kill_at
from tests.reproduce.small import (
    numbers,
    page_of,
    run_table,
    table_values,
    train_here,
    with_base,
    write_table,
)

STEPS = 5  # per epoch


@pytest.fixture(scope="module")
def table(cache, tmp_path_factory):
    """Four epochs, with a checkpoint every other epoch."""
    values = table_values(cache, selection=False)
    values = with_base(values, "training", epochs=4, checkpoint_epochs=2)
    values = with_base(values, "evaluation", every=2)
    return write_table(tmp_path_factory.mktemp("table") / "small.yaml", values)


@pytest.fixture(scope="module")
def uninterrupted(table, data, tmp_path_factory):
    return run_table(table, data, tmp_path_factory.mktemp("straight"))


def check_same_results(home, uninterrupted):
    assert page_of(home) == page_of(uninterrupted)
    assert numbers(home) == numbers(uninterrupted)
    assert not (home / "work").exists()
    assert (home / "sweep.svg").read_bytes() == (uninterrupted / "sweep.svg").read_bytes()


class Signal(Callback):
    """Sends a signal to this process after a step."""

    def __init__(self, number, step):
        self.number, self.step = number, step

    def on_step_end(self, run, loss):
        if run.state.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_resumed_command_keeps_completed_runs(table, data, tmp_path, uninterrupted, number):
    """The second of two runs is interrupted in its last epoch; only that one is resumed."""
    home, started, resumed = tmp_path / "small", [], []

    def start(job):
        started.append(job.run.id)
        callbacks = [Signal(number, 3 * STEPS + 2)] if len(started) == 2 else []
        resumed.append((job.folder.path / "checkpoints" / "last.safetensors").exists())
        return train_here(job, *callbacks)

    with pytest.raises(Interrupted, match=r"runs complete in .*: 1\. .* to resume"):
        run_table(table, data, tmp_path, start=start)
    completed = (home / RUNS).read_text()
    run_table(table, data, tmp_path, start=start)
    assert started == ["proxy-anchor-seed0", "mpa-k-2-seed0", "mpa-k-2-seed0"]
    assert resumed == [False, False, True]
    assert completed in (home / RUNS).read_text()
    check_same_results(home, uninterrupted)


def test_interrupted_command_terminates_its_processes(table, data, tmp_path):
    events = []

    class Child:
        def poll(self):
            raise KeyboardInterrupt

        def terminate(self):
            events.append("terminate")

        def wait(self):
            events.append("wait")

    with pytest.raises(Interrupted):
        run_table(table, data, tmp_path, start=lambda job: Child(), parallel=2)
    assert events == ["terminate", "terminate", "wait", "wait"]


@pytest.mark.slow
def test_killed_command_resumes_to_the_same_results(table, data, tmp_path, uninterrupted):
    """Killed at file changes throughout the command; the last one completes."""
    home, event = tmp_path / "small", 3

    def work():
        kill_at(event, home)
        run_table(table, data, tmp_path)

    while not completes(work):
        event = 2 * event
    assert event > 50
    check_same_results(home, uninterrupted)


def test_second_command_in_the_same_folder_is_rejected(tmp_path):
    lines = []
    with (
        _lock(tmp_path, lines.append),
        pytest.raises(ReproduceError, match=f"{os.getpid()} .* --out"),
        _lock(tmp_path, lines.append, timeout=0.2),
    ):
        pass
    assert len(lines) == 1
    with _lock(tmp_path, lines.append, timeout=0):
        pass
    assert len(lines) == 1
    assert not list(tmp_path.iterdir())
