"""Fixtures of all tests: one thread per worker, hypothesis without deadlines, fast processes."""

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
    # Background jobs of a shell ignore Ctrl-C, and their children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "proximetry",
    deadline=None,
    max_examples=50,
    derandomize=True,  # the same examples everywhere
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("proximetry")


@pytest.fixture(scope="session")
def server():
    """Start processes in which everything is imported."""
    running = Server()
    yield running
    running.close()


@pytest.fixture
def call(capsys):
    """Run a command in this process; return what it prints, or its error message."""

    def run(*words, code=0):
        got = cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        assert got == code, printed.err
        if code:
            assert printed.out == "" or words[0] == "train"  # train prints its choices first
            assert len(printed.err.splitlines()) == 1
            return printed.err
        return printed.out

    return run


def pytest_collection_modifyitems(items):
    """Start with the slowest files, so that no worker waits at the end."""
    tests = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path]))
