"""Ctrl-C and SIGTERM ask a run to stop; it finishes its step, saves, and leaves."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

FOLLOW_PARENT = "PROXIMETRY_FOLLOW_PARENT"
"""Environment variable: the parent process with which a run is to end too, by its number."""


class Stopped(Exception):  # noqa: N818
    """What was asked to stop and saved itself, and how it goes on."""


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT and SIGTERM, and give a function that says whether one came.

    A second signal acts as usual. On leaving, the handlers are those that were there before.
    """
    asked = threading.Event()
    parent = os.environ.get(FOLLOW_PARENT)
    before: dict[int, Any] = {}

    def catch(number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, catch)
    try:
        yield lambda: asked.is_set() or parent not in (None, str(os.getppid()))
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
