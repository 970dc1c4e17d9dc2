"""Commands that are stopped or killed, and the same table in the end."""

import os
import signal
import socket
from pathlib import Path

import pytest

from proximetry.reproduce import Interrupted, ReproduceError
from proximetry.reproduce.runner import _alone
from proximetry.training import Callback
from tests.processes import Process
from tests.reproduce.gated import wait_for
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
COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.reproduce.gated import run_gated
run_gated(*sys.argv[2:])
"""


@pytest.fixture(scope="module")
def table(cache, tmp_path_factory):
    """Six epochs, and a checkpoint every other."""
    values = table_values(cache, selection=False)
    values = with_base(values, "training", epochs=6, checkpoint_epochs=2)
    values = with_base(values, "evaluation", every=3)
    return write_table(tmp_path_factory.mktemp("table") / "small.yaml", values)


@pytest.fixture(scope="module")
def uninterrupted(table, data, tmp_path_factory):
    return run_table(table, data, tmp_path_factory.mktemp("straight"))


def goes_on_to_the_same(table, data, out, uninterrupted):
    home = run_table(table, data, out)
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
def test_a_signal_saves_and_the_same_command_continues(
    table, data, tmp_path, uninterrupted, number
):
    home = tmp_path / "small"

    def start(job):
        return train_here(job, Signal(number, 3 * STEPS + 2))

    said = "stopped and saved; 0 runs are done in .*, and the same command continues"
    with pytest.raises(Interrupted, match=said):
        run_table(table, data, tmp_path, start=start)
    assert list(home.glob("work/*/checkpoints/last.safetensors"))
    assert "No run of this table is done yet" in (home / "README.md").read_text()
    goes_on_to_the_same(table, data, tmp_path, uninterrupted)


def is_gone(pid):
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_killed_processes_and_commands_cost_no_run(server, table, data, tmp_path, uninterrupted):
    home, first, second = tmp_path / "small", tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    runs = ("proxy-anchor-seed0", "mpa-k-2-seed0")

    def held(gate):
        return all((gate / run).exists() for run in runs)

    def begin(gate, step):
        words = [Path.cwd(), gate, step, table, data, tmp_path]
        return Process(server, gate / "log", COMMAND, *words)

    # Both runs wait in the fourth epoch, after the checkpoint of the second.
    command = begin(first, 3 * STEPS + 2)
    command.until(lambda: held(first))
    killed, orphan = (int((first / run).read_text()) for run in runs)
    os.kill(killed, signal.SIGKILL)
    said = "Proxy-Anchor, seed 0: its process was killed by signal 9, as happens when memory runs"
    command.until(lambda: said in command.said())
    command.kill()
    wait_for(lambda: is_gone(orphan), "the end of a run whose command was killed")

    # A new command continues both; interrupted, it lets them save.
    command = begin(second, 4 * STEPS + 1)
    command.until(lambda: held(second))
    command.send(signal.SIGINT)
    assert command.ended() == 1
    assert "Interrupted: stopped and saved; 0 runs are done" in command.said()
    assert all(is_gone(int((second / run).read_text())) for run in runs)
    assert "No run of this table is done yet" in (home / "README.md").read_text()
    goes_on_to_the_same(table, data, tmp_path, uninterrupted)


def test_only_one_command_at_a_time(tmp_path):
    said = []
    us = f"process {os.getpid()} on {socket.gethostname()}"
    refused = pytest.raises(ReproduceError, match=f"^{us} is at work in .*; wait for it")
    with _alone(tmp_path, said.append), refused, _alone(tmp_path, said.append, patience=0.2):
        pass
    assert said == [f"waiting up to 0.2 s for {us}, at work in {tmp_path}"]
    with _alone(tmp_path, said.append, patience=0):
        pass
    assert len(said) == 1
    assert not list(tmp_path.iterdir())
