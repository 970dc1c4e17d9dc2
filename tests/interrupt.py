"""Interruption harness: processes that are killed when they change a file."""

import os
import signal
import sys

EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
WRITING = os.O_WRONLY | os.O_RDWR


def kill_at(event, folder):
    """Kill this process at the n-th change of a file below a folder.

    It is killed before the change, or after an existing file is truncated for writing.
    """
    left = [event]

    def kill_if_reached(file=None):
        left[0] -= 1
        if left[0] == 0:
            if file is not None:
                os.truncate(file, 0)
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(name, arguments):
        flags = (arguments[2] or 0) if name == "open" else 0
        changes = name in EVENTS or flags & WRITING
        if changes and str(folder) in os.fsdecode(str(arguments[0])):
            kill_if_reached()
            if flags & os.O_TRUNC and os.path.exists(arguments[0]):
                kill_if_reached(arguments[0])

    sys.addaudithook(watch)


def completes(work):
    """Run work in a fork; return False if it was killed, and fail if it ended with an error."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "failed without being killed"
    return True
