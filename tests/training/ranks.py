"""Ranks as real processes, with a failure in one of them."""

import socket

from tests.processes import Process

RUN = """
import sys
from proximetry.training import Recipe, train
train(Recipe.load(sys.argv[1]), sys.argv[2], device="cpu")
"""
TRAIN = """
import sys
from proximetry.cli import main
sys.exit(main(["train", *sys.argv[1:3], "--device", "cpu"]))
"""

# Torch's threads have ended when `train` raises, even if the exception still references the run.
REPORT_THREADS = """
import sys
from pathlib import Path
from proximetry.training import Recipe, train
try:
    train(Recipe.load(sys.argv[1]), sys.argv[2], device="cpu")
except Exception as error:
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    print(type(error).__name__, error, "gloo" in str(names))
"""

# Run code in one rank: in the setup, within a step, between two steps, or in an evaluation.
FAILURE = """
import os, signal
from proximetry.training import build, evaluator, run, updater

def with_failure(owner, name, number):
    before, seen = getattr(owner, name), []
    def count(*arguments, **keywords):
        seen.append(1)
        if len(seen) == number and os.environ["RANK"] == "{rank}":
            {what}
        return before(*arguments, **keywords)
    setattr(owner, name, count)

with_failure({owner}, {number})
"""
SETUP = 'build, "open_catalog"'
STEP = 'updater, "average_gradients"'
EPOCH = 'run.Run, "select"'
EVALUATION = 'evaluator, "score_queries"'
FREEZE = "os.kill(os.getpid(), signal.SIGSTOP)"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


def with_failure(what, rank, owner, number):
    """Return code that trains and runs `what` in a rank, at its n-th call of a function."""
    return FAILURE.format(what=what, rank=rank, owner=owner, number=number) + TRAIN


class Ranks:
    """The processes of one run."""

    def __init__(self, server, home, code, *arguments, size=2, missing=(), timeout=60):
        home.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            host, port = probe.getsockname()
        shared = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        shared["PROXIMETRY_RANK_TIMEOUT"] = str(timeout)
        self._every = {
            rank: Process(
                *(server, home / f"rank{rank}.log", code, *arguments),
                **shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
            if rank not in missing
        }

    def send(self, rank, number):
        self._every[rank].send(number)

    def output(self, rank):
        return self._every[rank].output()

    def until(self, condition):
        """Wait until a condition is true."""
        next(iter(self._every.values())).until(condition)

    def ended(self, *ranks):
        """Wait for some or all ranks; return their exit codes."""
        return [self._every[rank].ended() for rank in ranks or self._every]

    def kill(self):
        for process in self._every.values():
            process.kill()
