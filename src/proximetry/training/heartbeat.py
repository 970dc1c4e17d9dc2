"""Signs of life between ranks, so that none waits for ever for one that is gone or hangs.

Inside a collective a process runs no Python: neither a signal handler nor a timeout of ours. So
every rank has a thread that exchanges a word with the others each second and hears of signals. When
a rank is gone or silent, or a signal has come, and the main thread does not leave by itself, the
thread saves what can be saved and ends the process. A rank that is at work is waited for, however
long that takes.

The ranks form a star: all others are linked to rank 0, which tells them about each other.
"""

import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from proximetry.training.stopping import Stopped

BEAT = 1.0
"""Seconds between two signs of life."""
GRACE = 10.0
"""Seconds in which the main thread may leave by itself before its process is ended."""
CONNECT = 10.0
"""Seconds in which rank 0 is reached by all others, or no rank is watched."""
STOPPED = 130
"""Exit code after a signal."""

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class RankError(ConnectionError):
    """Another rank that is gone or does not answer, and how to go on."""


@dataclass
class _Link:
    """The line to another rank, how long it has been silent, and what was read of a word."""

    rank: int
    line: socket.socket
    silent: float = 0.0
    begun: bytes = b""

    def say(self, word: str) -> None:
        with suppress(OSError):  # who is gone is noticed when reading
            self.line.send(f"{word}\n".encode())

    def hear(self) -> list[str] | None:
        """Return the words that have come, None when there will be no more."""
        try:
            read = self.line.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not read:
            return None
        self.silent = 0.0
        *words, self.begun = (self.begun + read).split(b"\n")
        return [word.decode() for word in words]


class Heartbeat:
    """The signs of life of this rank, and what it knows of the others.

    Without `start`, in a process that trains alone or in a group of the caller's, it does nothing.

    Attributes:
        tidy: called before the thread ends the process.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.tidy: Callable[[], None] = lambda: None
        self._rescue: Callable[[], str] = str
        self._links: list[_Link] = []
        self._linked = False
        self._timeout = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False
        # Why the process has to end, with which exit code, and when, if nobody else sees to it.
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._reason, self._code, self._deadline = "", 1, math.inf
        self._left_to_main = self._leaving = False
        self._signals = 0

    def start(self) -> None:
        """Begin to listen for signals."""
        self._ear, self._mouth = socket.socketpair()
        for end in (self._ear, self._mouth):
            end.setblocking(False)
        self._catches = threading.current_thread() is threading.main_thread()
        if self._catches:
            mouth = self._mouth.fileno()
            self._before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def connect(self, timeout: float) -> bool:
        """Link the ranks, which all call this; return whether that succeeded.

        From then on a rank that is silent for ``timeout`` seconds is given up.
        """
        if self._thread is None:
            return False
        made = _connect(self.rank)
        if made is not None:
            self._timeout, self._links, self._linked = timeout, made, True
        return self._linked

    @contextmanager
    def rescuing(self, rescue: Callable[[], str]) -> Iterator[None]:
        """Say in a sentence that a rank was lost meanwhile, and what became of the run.

        ``rescue`` saves what can be saved and says so; it may be called by another thread.
        """
        before, self._rescue = self._rescue, rescue
        try:
            yield
        except RuntimeError as error:
            sentence = self._explain(error)
            if sentence is None:
                raise
            kind = Stopped if self._code == STOPPED else RankError
            raise kind(sentence) from error
        finally:
            self._rescue = before

    def _explain(self, error: RuntimeError) -> str | None:
        """Say who was lost if that is why a collective failed, else None."""
        of_a_collective = "gloo" in str(error) or isinstance(error, dist.DistError)
        if self._thread is None or not of_a_collective:
            return None
        if not self._linked:
            self._give_up(f"another rank has ended unexpectedly ({_line(error)})", GRACE)
        known = self._over.wait(GRACE / 2)  # word of who it was comes another way
        self.leave_to_main()
        return self._sentence() if known else None

    def _sentence(self) -> str:
        try:
            outcome = self._rescue()
        except Exception as error:
            outcome = f"the run could not be saved: {error}"
        return "; ".join(part for part in (self._reason, outcome) if part) or "stopped"

    def leave_to_main(self) -> None:
        """Let the main thread alone end what it does, from now on."""
        with self._turn:
            self._left_to_main, self._deadline = True, math.inf

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this rank leaves; it has little time to do so after an error."""
        if self._thread is None:
            return
        word = "bye"
        if isinstance(error, Stopped | KeyboardInterrupt):
            word = f"lost rank {self.rank} was stopped"
        elif error is not None and not isinstance(error, RankError):  # of which all know
            word = f"lost rank {self.rank} failed: {_line(error)}"
        with self._turn:
            self._leaving, self._rescue, self._deadline = True, str, math.inf
            if error is not None:
                self._reason, self._deadline = _line(error), time.monotonic() + GRACE
                self._code = STOPPED if isinstance(error, Stopped | KeyboardInterrupt) else 1
        for link in list(self._links):
            link.say(word)

    def close(self) -> None:
        """End the thread, and leave signals as they were."""
        if self._thread is None:
            return
        with self._turn:
            self._closed = True
        with suppress(BlockingIOError):
            self._mouth.send(b"\0")
        self._thread.join()
        self._thread = None
        if self._catches:
            signal.set_wakeup_fd(self._before)
        for line in (self._ear, self._mouth, *(link.line for link in self._links)):
            line.close()

    def _watch(self) -> None:
        """Exchange words until this rank leaves, or has to end."""
        last = beaten = time.monotonic()
        while not self._closed:
            rhythm = min(BEAT, self._timeout / 5)
            links = list(self._links)
            lines: list[Any] = [self._ear, *(link.line for link in links)]
            ready = wait(lines, rhythm)
            now = time.monotonic()
            # The time in which this process stood still itself, Ctrl-Z, is not held against others.
            passed, last = min(now - last, 2 * rhythm), now
            if self._ear in ready:
                self._take_signals()
            for link in links:
                link.silent += passed
                if link.line in ready:
                    self._listen(link)
            if now - beaten >= rhythm:
                beaten = now
                for link in self._links:
                    link.say("beat")
                    if link.silent > self._timeout:
                        waited = f"{self._timeout:g} s (training.rank_timeout)"
                        self._give_up(f"rank {link.rank} has not answered for {waited}", 0.0)
            if time.monotonic() > self._deadline:
                self._end()

    def _take_signals(self) -> None:
        with suppress(BlockingIOError):
            came = [number for number in self._ear.recv(64) if number in _STOPPING]
            self._signals += len(came)
            if came:
                # The first one is a request to stop, the second one an order.
                self._give_up("", GRACE if self._signals == 1 else 0.0, STOPPED)

    def _listen(self, link: _Link) -> None:
        words = link.hear()
        if words is None:
            self._links.remove(link)
            link.line.close()
            grace = BEAT if self._over.is_set() else GRACE
            self._give_up(f"rank {link.rank} has ended unexpectedly", grace)
            return
        for word in words:
            kind, _, text = word.partition(" ")
            if kind == "bye":
                self._links.remove(link)
                link.line.close()
                return
            if kind == "lost":
                # Rank 0 is to end first: a launcher kills all others soon after one has ended.
                self._give_up(text, 6 * GRACE if link.rank == 0 else GRACE)

    def _give_up(self, reason: str, grace: float, code: int = 1) -> None:
        """Note why this process has to end, and tell the others; the first reason counts."""
        with self._turn:
            if self._leaving:
                return
            if not self._left_to_main:
                self._deadline = min(self._deadline, time.monotonic() + grace)
            if self._over.is_set():
                return
            self._reason, self._code = reason, code
            self._over.set()
        if self.rank == 0 and reason:
            for link in self._links:
                link.say(f"lost {reason}")

    def _end(self) -> None:
        """End the process, whatever the main thread is waiting for."""
        with self._turn:  # which the main thread then waits for, if it should come back
            if self._closed or time.monotonic() < self._deadline:
                return
            if self._code == STOPPED and not self._leaving:
                for link in self._links:
                    link.say(f"lost rank {self.rank} was stopped")
            with suppress(Exception):
                self.tidy()
            sentence = self._sentence() if self._signals < 2 else "stopped"
            os.write(2, f"proximetry: {' '.join(sentence.split())}\n".encode())
            os._exit(self._code)


def _line(error: BaseException) -> str:
    """An error in one line, with its kind where it is not made for people."""
    text = " ".join(str(error).split())[:1000]
    if isinstance(error, ValueError | OSError | Stopped):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _connect(rank: int) -> list[_Link] | None:
    """Link all ranks to rank 0, or none if that does not succeed for all of them."""
    size = dist.get_world_size()
    server = _listening(size) if rank == 0 else None
    where: list[Any] = [None]
    if server is not None:
        hosts = [os.environ.get("MASTER_ADDR", "localhost"), socket.gethostname()]
        where = [(hosts, server.getsockname()[1], secrets.token_hex(16))]
    dist.broadcast_object_list(where, src=0)
    hosts, port, password = where[0]
    if server is not None:
        with server:
            links = _answer(server, password, size - 1)
    else:
        links = _call(hosts, port, f"{password} {rank}\n")
    complete: list[Any] = [None] * size
    dist.all_gather_object(complete, len(links) == (size - 1 if rank == 0 else 1))
    if all(complete):
        return links
    for link in links:
        link.line.close()
    return None


def _listening(size: int) -> socket.socket:
    with suppress(OSError):  # IPv6 may be switched off
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=size, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=size)


def _answer(server: socket.socket, password: str, count: int) -> list[_Link]:
    """Take the calls of so many ranks, and of nobody else, or of those that come in time."""
    links: dict[int, _Link] = {}
    end = time.monotonic() + CONNECT
    with suppress(TimeoutError):
        while len(links) < count:
            server.settimeout(max(0.01, end - time.monotonic()))
            line = server.accept()[0]
            line.settimeout(1.0)
            with suppress(OSError):
                word = line.recv(100).decode("ascii", "replace").split()
                if len(word) == 2 and secrets.compare_digest(word[0], password):
                    line.setblocking(False)
                    links[int(word[1])] = _Link(int(word[1]), line)
                    continue
            line.close()
    return list(links.values())


def _call(hosts: list[str], port: int, word: str) -> list[_Link]:
    """Call rank 0 where it can be reached, if it can."""
    for host in hosts:
        with suppress(OSError):
            line = socket.create_connection((host, port), CONNECT / (2 * len(hosts)))
            line.send(word.encode())
            line.setblocking(False)
            return [_Link(0, line)]
    return []
