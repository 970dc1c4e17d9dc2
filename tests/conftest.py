"""For all tests: one thread per worker, hypothesis without deadlines, quick processes."""

import signal
from collections import Counter
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, settings

from proximetry import cli
from tests.processes import Server

torch.set_num_threads(1)
with suppress(ValueError):  # not in the main thread
    # A shell lets what it starts in the background ignore Ctrl-C, and processes pass that on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "proximetry",
    deadline=None,
    max_examples=50,
    derandomize=True,  # the same examples everywhere: a red run can be repeated
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("proximetry")


@pytest.fixture(scope="session")
def server():
    """Starts processes that have loaded everything."""
    running = Server()
    yield running
    running.close()


@pytest.fixture
def call(capsys):
    """Runs a command in this process; returns what it prints or, of a mistake, its one line."""

    def run(*words, code=0):
        got = cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        assert got == code, printed.err
        if code:
            assert printed.out == ""
            assert len(printed.err.splitlines()) == 1
            return printed.err
        return printed.out

    return run


def pytest_collection_modifyitems(items):
    """Begin with the files that take long: at the end no process waits for another one's."""
    tests = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path]))
