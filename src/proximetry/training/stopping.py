"""Ctrl-C and SIGTERM ask a run to stop; it finishes its step, saves, and leaves."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

FOLLOW_PARENT = "PROXIMETRY_FOLLOW_PARENT"
"""Environment variable: the parent process with which a run is to end too, by its number."""


class Stopped(Exception):  # noqa: N818
    """A run that was stopped and saved, and how to resume it."""


class StopRequests:
    """Says, when called, whether a run was asked to stop."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._parent = os.environ.get(FOLLOW_PARENT)
        self._sentence: str | None = None

    def __call__(self) -> bool:
        """Whether a signal came, or the parent to follow is gone."""
        return self._asked.is_set() or self._parent not in (None, str(os.getppid()))

    def take(self) -> None:
        """Note a request, or obey it."""
        self._asked.set()
        if self._sentence is not None:
            raise Stopped(self._sentence)

    @contextmanager
    def at_once(self, sentence: str) -> Iterator[None]:
        """Stop in the midst of what is done here, with this sentence: nothing is lost by it."""
        if self():
            raise Stopped(sentence)
        self._sentence = sentence
        try:
            yield
        finally:
            self._sentence = None


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Catch SIGINT and SIGTERM, and give what says whether one came.

    A second signal acts as usual. On leaving, the handlers are those that were there before.
    """
    requests = StopRequests()
    before: dict[int, Any] = {}

    def catch(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        requests.take()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, catch)
    try:
        yield requests
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
