"""Commands that are stopped or killed: real processes, and the same table in the end."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from proximetry import cli
from proximetry.reproduce import Interrupted, ReproduceError, reproduce
from proximetry.reproduce.lock import alone, at_work
from tests.reproduce.small import numbers, page_of, start, table_values, with_base, write_table

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
    second = alone(tmp_path, patience=0.2)
    refused = pytest.raises(ReproduceError, match="another command is at work")
    with alone(tmp_path), at_work(tmp_path), refused, second:
        pass
    with alone(tmp_path, patience=0):
        pass
