"""Runs that wait at a step until they are let go, in processes of a command of its own."""

import os
import signal
import time
import traceback
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from types import SimpleNamespace

from proximetry.reproduce import ReproduceOptions, reproduce, runner
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


class Forked:
    """A run that will wait at a step, in place of Popen: it need not load everything anew."""

    def __init__(self, gate, step, words, *, stdin, stdout, stderr, env, start_new_session):
        self._pid, self._code = os.fork(), None
        if self._pid:
            return
        os.setsid() if start_new_session else None
        for stream, number in ((stdout, 1), (stderr, 2)):
            os.dup2(stream.fileno(), number)
        os.environ.update(env)
        file, out = words[-4:-2]  # before --device cpu
        code = 0
        try:
            callback = Gate(Path(gate), Path(out).name, int(step))
            train(Recipe.load(file), out, device="cpu", callbacks=[callback])
        except Stopped:
            code = 130
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)

    def poll(self):
        return self._wait(os.WNOHANG)

    def wait(self):
        return self._wait(0)

    def _wait(self, how):
        if self._code is None:
            pid, status = os.waitpid(self._pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def terminate(self):
        os.kill(self._pid, signal.SIGTERM)


def run_gated(gate, step, table, data, out):
    """A command whose runs wait at a step."""
    runner.subprocess = SimpleNamespace(Popen=partial(Forked, gate, step), DEVNULL=DEVNULL)
    options = ReproduceOptions(device="cpu", parallel=2)
    reproduce(table, data, out, options, report=lambda line: print(line, flush=True))
