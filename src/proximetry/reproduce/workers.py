"""Several runs at once: worker processes that each do one run after another.

Every worker has a pipe of its own and no lock is shared, so one that is killed takes nothing
with it but its run, which the next call continues.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from proximetry.reproduce.lock import at_work
from proximetry.reproduce.plan import Job
from proximetry.reproduce.work import Outcome, perform, terminate_like_interrupt

Done = Callable[[Outcome], None]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Job


@dataclass
class Crew:
    """Does jobs in so many processes."""

    parallel: int
    done: Done
    waiting: deque[Job] = field(default_factory=deque)
    workers: list[_Worker] = field(default_factory=list)

    def perform(self, jobs: Sequence[Job]) -> None:
        """Do the jobs; on KeyboardInterrupt let the workers save, then pass it on."""
        self.waiting.extend(jobs)
        try:
            while self.waiting or self.workers:
                while self.waiting and len(self.workers) < self.parallel:
                    self.workers.append(_start(self.waiting.popleft()))
                self.listen()
        finally:  # nothing is left to end unless we were interrupted
            self.stop()

    def listen(self) -> None:
        """Wait for a worker to answer or to die, and see to it."""
        ready = wait([worker.pipe for worker in self.workers])
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            try:
                outcome: Outcome = worker.pipe.recv()
            except (EOFError, OSError):
                outcome = self.lost(worker)
            else:
                if outcome.stopped:  # it was told to by someone else, and leaves
                    self.leave(worker)
                    outcome = Outcome(outcome.run, error="it was stopped from outside, and saved")
                elif outcome.broken:  # it leaves, and a new one takes the next job
                    self.leave(worker)
                else:
                    self.next(worker)
            self.done(outcome)

    def next(self, worker: _Worker) -> None:
        """Give a worker its next job, or let it go."""
        if not self.waiting:
            return self.leave(worker)
        worker.job = self.waiting.popleft()
        try:
            worker.pipe.send(worker.job)
        except OSError:  # it died meanwhile: another will take the job
            self.waiting.appendleft(worker.job)
            self.leave(worker)

    def lost(self, worker: _Worker) -> Outcome:
        """Say how a worker died."""
        self.leave(worker)
        code = worker.process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        hint = ", as happens when memory runs out" if code == -signal.SIGKILL else ""
        return Outcome(worker.job.run.id, error=f"its process {how}{hint}; it can be continued")

    def leave(self, worker: _Worker) -> None:
        """Part from a worker."""
        worker.pipe.close()
        worker.process.join()
        self.workers.remove(worker)

    def stop(self) -> None:
        """Ask all workers to save and leave; wait until they have."""
        for worker in self.workers:
            worker.process.terminate()  # SIGTERM: the run saves at its next step
        for worker in list(self.workers):
            worker.process.join()
            worker.pipe.close()
            self.workers.remove(worker)


def _start(job: Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # As many threads as here, so that the numbers do not depend on how many run at once.
    arguments = (theirs, job, torch.get_num_threads())
    process = context.Process(target=_serve, args=arguments, daemon=False)
    with _no_interrupts():
        process.start()
    theirs.close()
    return _Worker(process, ours, job)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Let processes that are started here never see Ctrl-C, not even while they import.

    It reaches everyone at once, and the parent decides. It is held back here and not thrown away,
    so that the parent sees it afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not a POSIX system
        yield
        return
    resource_tracker.ensure_running()  # else it is started in between, and lifts the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, first: Job, threads: int) -> None:
    """Work off jobs until there are no more; what a worker process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_follow_parent, daemon=True).start()
    job = first
    try:
        with at_work(first.out), terminate_like_interrupt():
            while True:
                outcome = perform(job)
                pipe.send(outcome)
                if outcome.stopped or outcome.broken:
                    return
                job = pipe.recv()
    except (EOFError, OSError, KeyboardInterrupt):  # no more jobs, or nobody there to give them
        return


def _follow_parent() -> None:
    """Save and leave if the parent is gone: nobody would hear the outcome."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
