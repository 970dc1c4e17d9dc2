"""For all tests: one thread per worker, hypothesis without deadlines, quick processes."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.processes import Server

torch.set_num_threads(1)
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
