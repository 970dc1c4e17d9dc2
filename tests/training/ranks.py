"""Ranks as real processes: forked from one that has loaded everything, so that they start at once.

Run as a script, this is that process: it reads requests as lines of JSON, and answers in kind.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys
from proximetry.cli import main
sys.exit(main(["train", *sys.argv[1:3], "--device", "cpu"]))
"""

# Torch's threads are gone when `train` has raised, though its exception still holds the run.
LEFT = """
import sys
from pathlib import Path
from proximetry.training import Recipe, train
try:
    train(Recipe.load(sys.argv[1]), sys.argv[2], device="cpu")
except Exception as error:
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    print(type(error).__name__, error, "gloo" in str(names))
"""

# What happens to one rank: in the midst of a step, when the weights have changed, or in evaluation.
HAPPENS = """
import os, signal, time
from proximetry.training import evaluator, heartbeat, state, update
{setting}

def happens(owner, name, number):
    before, seen = getattr(owner, name), []
    def count(*arguments, **keywords):
        seen.append(1)
        if len(seen) == number and os.environ["RANK"] == "{rank}":
            {what}
        return before(*arguments, **keywords)
    setattr(owner, name, count)

happens({owner}, {number})
"""
MIDST = 'update, "average_gradients"'
STEP = 'state.Checkpoints, "on_step_end"'
EPOCH = 'state.Checkpoints, "on_epoch_end"'
EVALUATION = 'evaluator, "score_queries"'
FREEZE = "os.kill(os.getpid(), signal.SIGSTOP)"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


def happens(what, rank, owner, number, setting=""):
    """Code that trains, with something that happens to a rank when it does a thing."""
    told = {"what": what, "rank": rank, "owner": owner, "number": number, "setting": setting}
    return HAPPENS.format(**told) + TRAIN


class Server:
    """Starts processes and waits for them."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )

    def ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


class Ranks:
    """The processes of one run. What a rank says is in `said`."""

    def __init__(self, server, home, code, *arguments, size=2, missing=0):
        self._server, self._home = server, home
        home.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = probe.getsockname()
        host, port = self._address
        shared = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        self.pids = [
            server.ask(
                code=code,
                arguments=[str(argument) for argument in arguments],
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                log=str(home / f"rank{rank}.log"),
            )
            for rank in range(size - missing)
        ]
        self.codes = [None] * len(self.pids)

    def send(self, rank, number):
        os.kill(self.pids[rank], number)

    def said(self, rank):
        return (self._home / f"rank{rank}.log").read_text()

    def meets(self):
        """Whether rank 0 waits for the others."""
        with socket.socket() as caller:
            return caller.connect_ex(self._address) == 0

    def is_frozen(self, rank):
        return "\nState:\tT" in Path(f"/proc/{self.pids[rank]}/status").read_text()

    def until(self, condition):
        """Wait for something to be true."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, [self.said(rank) for rank in range(len(self.pids))]
            time.sleep(0.01)

    def ended(self, *ranks):
        """Wait for some or all ranks; return their exit codes."""
        every = ranks or range(len(self.pids))
        for rank in every:
            if self.codes[rank] is None:
                self.codes[rank] = self._server.ask(wait=self.pids[rank])
            assert self.codes[rank] is not None, f"rank {rank} never ends: {self.said(rank)}"
        return [self.codes[rank] for rank in every]

    def kill(self):
        for rank, code in enumerate(self.codes):
            if code is None:
                self._server.ask(kill=self.pids[rank])
                self.codes[rank] = -9


def _serve():
    import torch

    torch.set_num_threads(1)
    import cyclopts  # noqa: F401
    import timm  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import proximetry.cli.commands
    import proximetry.cli.train_plan
    import proximetry.training.run  # noqa: F401

    gc.freeze()  # what is there now need not be looked through by every rank
    for line in sys.stdin:
        request = json.loads(line)
        if "code" in request:
            pid = os.fork()
            if pid == 0:
                return request
            answer = pid
        elif "kill" in request:
            os.kill(request["kill"], 9)
            answer = os.waitstatus_to_exitcode(os.waitpid(request["kill"], 0)[1])
        else:
            answer, end = None, time.monotonic() + 60
            while answer is None and time.monotonic() < end:
                pid, status = os.waitpid(request["wait"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                time.sleep(0.01)
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    asked = _serve()
    if asked is not None:  # a rank, which ends as any program does
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(0)
        os.environ.update(asked["environment"])
        sys.argv = ["-", *asked["arguments"]]
        exec(compile(asked["code"], "rank", "exec"), {"__name__": "__main__"})
