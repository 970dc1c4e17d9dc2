"""Real processes, forked from one that has imported everything, so that they start quickly.

Run as a script, this is that process: it reads requests as lines of JSON and answers in JSON.
"""

import gc
import json
import os
import subprocess
import sys
import time


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
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # a forked process still has the pipe
            self._process.kill()
            self._process.wait()


class Process:
    """A process that runs code."""

    def __init__(self, server, log, code, *arguments, **environment):
        self._server, self._log, self.code = server, log, None
        words = [str(argument) for argument in arguments]
        self.pid = server.ask(code=code, arguments=words, environment=environment, log=str(log))

    def output(self):
        return self._log.read_text()

    def until(self, condition):
        """Wait until a condition is true."""
        end = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < end, self.output()
            time.sleep(0.01)

    def ended(self):
        """Wait for the end; return the exit code."""
        if self.code is None:
            self.code = self._server.ask(wait=self.pid)
        assert self.code is not None, f"it does not end: {self.output()}"
        return self.code

    def send(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.code is None:
            self.code = self._server.ask(kill=self.pid)


def _serve():
    import torch

    torch.set_num_threads(1)
    import cyclopts  # noqa: F401
    import timm  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import proximetry.cli.train
    import proximetry.search.gallery
    import proximetry.training.trainer  # noqa: F401

    gc.freeze()  # so that forks do not collect imported objects
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
            answer, end = None, time.monotonic() + 240
            while answer is None and time.monotonic() < end:
                pid, status = os.waitpid(request["wait"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                time.sleep(0.01)
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    request = _serve()
    if request is not None:  # in the forked process
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["environment"])
        sys.argv = ["-", *request["arguments"]]
        exec(compile(request["code"], "code", "exec"), {"__name__": "__main__"})
