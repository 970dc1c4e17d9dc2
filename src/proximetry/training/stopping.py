"""Ctrl-C and SIGTERM ask a run to stop; it finishes its step, saves, and leaves."""

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(Exception):  # noqa: N818
    """A run that was asked to stop and saved itself."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(
            f"stopped after step {step}, saved in {folder}; the same command continues it"
        )
        self.step, self.folder = step, folder


class StopSignal:
    """Catches SIGINT and SIGTERM while it is entered; a second one acts as usual."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, self._before[number])
