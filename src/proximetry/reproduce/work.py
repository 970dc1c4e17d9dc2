"""One run, from its recipe to its JSON file; what goes wrong becomes a sentence."""

import gc
import shutil
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch

from proximetry._common import atomic_write, closest
from proximetry.reproduce.plan import Job
from proximetry.reproduce.records import Record, make_record
from proximetry.reproduce.trouble import ReproduceError
from proximetry.training.display import Display
from proximetry.training.folder import RunFolder
from proximetry.training.run import train
from proximetry.training.stopping import Stopped

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        run: its name.
        summary: for the line that reports it; empty if it did not end well.
        error: one sentence, if it failed.
        stopped: whether it was asked to stop, and saved itself.
        broken: whether its process is no longer to be trusted: after an error of CUDA every other
            call to the device fails too.
    """

    run: str
    summary: str = ""
    error: str = ""
    stopped: bool = False
    broken: bool = False


def perform(job: Job, display: Display | None = None) -> Outcome:
    """Do a run, or the rest of one, and write its file."""
    name = job.run.id
    try:
        record = _train(job, display)
    except (Stopped, KeyboardInterrupt):
        return Outcome(name, stopped=True)
    except Exception as error:  # one run must not take the others with it
        return Outcome(name, error=_sentence(job, error), broken=not _expected(error))
    finally:
        free_memory()
    return Outcome(name, summary=_summary(record))


def free_memory() -> None:
    """Give back what runs that are over held: networks and their graphs refer to each other."""
    gc.collect()
    with suppress(RuntimeError):  # on a device that is broken this fails like all else
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _train(job: Job, display: Display | None) -> Record:
    parallel = _most_at_once(job)
    train(job.recipe, job.work, device=job.device, display=display)
    record = make_record(job, RunFolder(job.work), _card(job.device), parallel)
    record.write(job.out)
    job.shared.unlink(missing_ok=True)
    if not job.keep:
        shutil.rmtree(job.work, ignore_errors=True)
    return record


def _most_at_once(job: Job) -> int:
    """How many runs shared the device, now or before the run was cut off."""
    before = 1
    with suppress(OSError, ValueError):
        before = int(job.shared.read_text(encoding="utf-8"))
    most = max(before, job.parallel)
    job.shared.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(job.shared, f"{most}\n".encode())
    return most


def _summary(record: Record) -> str:
    if record.chosen_epoch is not None:
        text = f"epoch {record.chosen_epoch} chosen on held-out classes"
    else:
        test = record.test() or {}
        text = f"recall@1 {100 * test['recall@1']:.1f}" if "recall@1" in test else "done"
    return text if record.seconds is None else f"{text}, {record.seconds:.0f} s"


def on_cuda(device: str | None) -> bool:
    """Whether a run on this device uses a card."""
    if device is None:
        return torch.cuda.is_available()
    return device.startswith("cuda")


def check_device(device: str | None) -> None:
    """Refuse a device that is none or not there, before anything is decoded."""
    if device is None:
        return
    try:
        place = torch.device(device)
    except RuntimeError:
        near = ", did you mean 'cuda'?" if device.lower() == "gpu" else closest(device, _DEVICES)
        raise ReproduceError(f"unknown device {device!r}{near} Known: cpu, cuda, cuda:1") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ReproduceError(
            f"device {device!r} was asked for, but torch sees "
            f"{torch.cuda.device_count() or 'no'} CUDA devices here, counted from 0"
        )


def _card(device: str | None) -> str:
    if not on_cuda(device):
        return "CPU"
    return torch.cuda.get_device_name(torch.device(device or "cuda"))


def _sentence(job: Job, error: Exception) -> str:
    if _out_of_memory(error):
        lower = "lower --parallel, or " if job.parallel > 1 else ""
        return (
            f"{_memory(job.device)} has too little memory for it and what else runs there; {lower}"
            "give a table file of your own with a smaller data.batch_size, a larger "
            "training.accumulate or data.cache: disk"
        )
    if _expected(error):
        return " ".join(str(error).split())
    trace = job.out / "work" / f"{job.run.id}.error.txt"
    atomic_write(trace, "".join(traceback.format_exception(error)).encode())
    return f"{type(error).__name__}: {' '.join(str(error).split())} (the whole of it is in {trace})"


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _expected(error: Exception) -> bool:
    """Whether an error is one that is told in a sentence, and leaves the process in order."""
    known = (ValueError, OSError, ImportError, torch.OutOfMemoryError)
    return isinstance(error, known)


def _memory(device: str | None) -> str:
    if not on_cuda(device) or not torch.cuda.is_available():
        return "this machine"
    card = torch.cuda.get_device_properties(torch.device(device or "cuda"))
    return f"the card ({card.name}, {card.total_memory / 2**30:.0f} GiB)"


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM act as Ctrl-C does where a run does not catch it itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
