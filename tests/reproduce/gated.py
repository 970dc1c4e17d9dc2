"""Runs that wait at a step until they are let go, as processes and as a whole command.

As a module it is what such a process runs: ``python -m tests.reproduce.gated train …`` or
``python -m tests.reproduce.gated reproduce …``.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from proximetry.reproduce import ReproduceOptions, reproduce
from proximetry.reproduce.runner import start_process
from proximetry.training import Callback, Recipe, Stopped, train

LIMIT = 600  # seconds after which a wait has failed: far beyond what it can take


def wait_for(event, what="it"):
    until = time.monotonic() + LIMIT
    while not event():
        assert time.monotonic() < until, f"{what} never came"
        time.sleep(0.02)


class Gate(Callback):
    """Holds a run at a step: writes the process's number to a file and waits.

    It lets go when the file ``open`` is there, at SIGTERM, and when the parent is gone.
    """

    def __init__(self, folder, name, step):
        self.folder, self.name, self.step = folder, name, step
        self.asked = False

    def on_step_end(self, run, loss):
        if run.state.step != self.step:
            return
        trained = signal.getsignal(signal.SIGTERM)

        def note(number, frame):
            self.asked = True
            trained(number, frame)

        signal.signal(signal.SIGTERM, note)
        parent = os.getppid()
        (self.folder / f"{self.name}.part").write_text(str(os.getpid()))
        (self.folder / f"{self.name}.part").rename(self.folder / self.name)
        wait_for(lambda: self.asked or self.is_open() or os.getppid() != parent)

    def is_open(self):
        return (self.folder / "open").exists()


def start_gated(gate, step, job):
    """Start a run in a process of its own that will wait at a step."""
    return start_process(job, ("-m", "tests.reproduce.gated", "train", str(gate), str(step)))


def main(kind, gate, step, *words):
    torch.set_num_threads(1)
    if kind == "train":
        recipe, out = words[:2]
        callback = Gate(Path(gate), Path(out).name, int(step))
        try:
            train(Recipe.load(recipe), out, device="cpu", callbacks=[callback])
        except Stopped:
            sys.exit(130)
    else:
        table, data, out = words
        reproduce(
            table,
            data,
            out,
            ReproduceOptions(device="cpu", parallel=2),
            report=lambda line: print(line, flush=True),
            start=partial(start_gated, gate, step),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
